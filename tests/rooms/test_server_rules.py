"""Which signaling servers may be used, and how they are reached: TLS, proxies, relays that they offer."""

from __future__ import annotations

import asyncio
import datetime
import errno
import ipaddress
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from peerllm_signaling import limits as server_limits
from peerllm_signaling.server import ServerConfig, SignalingServer
from peerllm_signaling.turn import TurnServers
from yarl import URL

from peerllm.protocol.errors import SignalingUnreachable
from peerllm.rooms import RoomClient
from peerllm.rooms.server import check_url, connect, proxy_for
from peerllm.rooms.servers import IceServers
from peerllm.rooms.servers import TurnServers as TurnOffer
from tests.rooms.house import House, until

NAME = "signaling.test"


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("ws://127.0.0.1:8765", "ws://127.0.0.1:8765/v1"),
        ("ws://localhost:1/", "ws://localhost:1/v1"),
        ("ws://[::1]:5", "ws://[::1]:5/v1"),
        ("wss://example.org", "wss://example.org/v1"),
        ("wss://example.org/peerllm/", "wss://example.org/peerllm/v1"),
        ("wss://example.org/v1", "wss://example.org/v1"),
    ],
)
def test_servers_on_this_machine_or_behind_tls_may_be_used(url: str, target: str) -> None:
    assert str(check_url(url)) == target


@pytest.mark.parametrize("url", ["ws://example.org", "ws://192.0.2.1:80", "ws://localhost.example.org", "ws://0.0.0.0"])
def test_others_only_when_the_user_says_so(url: str) -> None:
    with pytest.raises(SignalingUnreachable, match="--insecure"):
        check_url(url)
    assert check_url(url, insecure=True)


@pytest.mark.parametrize(
    "url", ["", "example.org", "http://127.0.0.1", "ws://", "wss:///path", "ws://[::1", "file:///x"]
)
def test_what_is_no_address_is_told(url: str) -> None:
    with pytest.raises(SignalingUnreachable, match="is not the address"):
        check_url(url, insecure=True)


async def test_the_environment_can_allow_it_and_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peerllm.protocol.limits.SIGNALING_CONNECT_SECONDS", 0.1)
    for value, words in (("0", "--insecure"), ("yes", "--insecure"), ("1", "cannot be reached|does not answer")):
        monkeypatch.setenv("PEERLLM_INSECURE", value)
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # so that nothing leaves this machine
        with pytest.raises(SignalingUnreachable, match=words):
            await RoomClient("ws://signaling.test", tmp_path).open()


def test_the_usual_variables_name_the_proxy_and_loopback_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "http_proxy", "all_proxy", "no_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "inside.example.org")
    assert proxy_for(URL("wss://example.org/v1")) == "http://proxy:3128"
    assert proxy_for(URL("wss://inside.example.org/v1")) is None
    assert proxy_for(URL("wss://127.0.0.1/v1")) is None
    assert proxy_for(URL("wss://localhost/v1")) is None
    monkeypatch.delenv("HTTP_PROXY", raising=False)
    assert proxy_for(URL("ws://example.org/v1")) is None


# --- Why one cannot be reached ----------------------------------------------------------------------------------------


async def why_not(url: str) -> str:
    with pytest.raises(SignalingUnreachable) as caught:
        await connect(url, insecure=True)
    before, _, why = caught.value.message.partition(" cannot be reached: ")
    assert before == f"The signaling server {url}"
    return why


NO_SUCH_SERVER = "it answers, but not as a peerllm signaling server does"


@pytest.mark.parametrize(
    ("scheme", "answer", "words"),
    [
        ("ws", b"HTTP/1.1 400 Bad\r\n\r\n", f"{NO_SUCH_SERVER} (HTTP 400)."),
        ("ws", b"HTTP/1.1 302 Elsewhere\r\nLocation: ftp://elsewhere\r\n\r\n", f"{NO_SUCH_SERVER}."),
        ("ws", b"\x00\xff\n" * 3000, f"{NO_SUCH_SERVER}."),
        ("ws", b"HTTP/1.1 200 OK\r\nx: " + b"\xff" * 20000 + b"\r\n\r\n", f"{NO_SUCH_SERVER}."),
        ("ws", b"HTTP/1.1 503 Full\r\n\r\n", "it turns new connections away at the moment (HTTP 503)."),
        ("ws", b"", "it ends the connection without an answer."),
        ("wss", b"", "it ends the connection without an answer."),
        ("wss", b"HTTP/1.1 400 Bad\r\n\r\n", "it answers, but not in TLS, as wss:// needs it."),
    ],
    ids=lambda value: f"{len(value)} bytes" if isinstance(value, bytes) else value,
)
async def test_what_answers_and_is_no_signaling_server_is_told(
    nothing_is_left_behind: None, scheme: str, answer: bytes, words: str
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4096)
        writer.write(answer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        assert await why_not(f"{scheme}://127.0.0.1:{listening.sockets[0].getsockname()[1]}") == words
    finally:
        listening.close()
        await listening.wait_closed()


async def test_what_the_machine_says_is_told_in_plain_words(nothing_is_left_behind: None) -> None:
    assert await why_not("ws://127.0.0.1:1") == "connection refused."
    assert await why_not("wss://127.0.0.1:1") == "connection refused."
    assert await why_not("ws://256.1.1.1") == "there can be no host of that name."


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "no such host."),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), "its name cannot be looked up at the moment."),
        (OSError(errno.EHOSTUNREACH, "x"), "no route leads there."),
        (OSError(errno.ENETUNREACH, "x"), "no network leads there."),
        (
            OSError(
                f"Multiple exceptions: [Errno {errno.ENETUNREACH}] Connect call failed ('::1', 1, 0, 0), "
                f"[Errno {errno.ECONNREFUSED}] Connect call failed ('127.0.0.1', 1)"
            ),
            "connection refused.",
        ),
        (ConnectionResetError(), "it ends the connection without an answer."),
        (ValueError("one\n\x1b[31m" + "two " * 1000), None),
        (ValueError(), "ValueError."),
    ],
)
async def test_causes_are_one_printable_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str | None
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("aiohttp.ClientSession.ws_connect", fail)
    why = await why_not("ws://127.0.0.1:1")
    assert why.isprintable()
    assert len(why) <= 121
    if words is not None:
        assert why == words


# --- TLS --------------------------------------------------------------------------------------------------------------


def certificate(folder: Path) -> Path:
    """A self-signed one for NAME and 127.0.0.1, with its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName(NAME), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / "certificate.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.fixture
async def tls_server(nothing_is_left_behind: None, tmp_path: Path) -> AsyncIterator[SignalingServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate(tmp_path))
    server = SignalingServer(ServerConfig("127.0.0.1", 0, tls=context))
    await server.start()
    yield server
    await server.stop()


PAIR = """
import asyncio, pathlib, sys
from peerllm.rooms import RoomClient

async def main(url, folder):
    room = await RoomClient(url, folder / "a").open()
    peers = await asyncio.gather(room.admit(), RoomClient(url, folder / "b").join(str(room.code)))
    begins, accepts = sorted(peers, key=lambda peer: not peer.is_controlling)
    ours, theirs = await asyncio.gather(begins.begin(1), accepts.accept())
    print(ours.session_key == theirs.session_key)
    for each in (room, *peers):
        await each.close()

asyncio.run(main(sys.argv[1], pathlib.Path(sys.argv[2])))
"""


async def pair_elsewhere(url: str, folder: Path, **env: str) -> str:
    """Two peers in a process of their own; what it printed. The process trusts the test's certificate."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", PAIR, url, str(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"PATH": "/usr/bin", "SSL_CERT_FILE": str(folder / "certificate.pem"), **env},
    )
    async with asyncio.timeout(30):
        output, _ = await process.communicate()
    return output.decode()


async def test_two_pair_over_tls(tls_server: SignalingServer, tmp_path: Path) -> None:
    assert tls_server.address.startswith("wss://")
    assert await pair_elsewhere(tls_server.address, tmp_path) == "True\n"


async def test_a_certificate_that_is_not_trusted_is_told(tls_server: SignalingServer, tmp_path: Path) -> None:
    with pytest.raises(SignalingUnreachable, match="certificate is not valid"):
        await RoomClient(tls_server.address, tmp_path).open()


async def test_two_pair_through_an_https_proxy(tls_server: SignalingServer, tmp_path: Path) -> None:
    asked: list[bytes] = []
    writers: list[asyncio.StreamWriter] = []

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
        sink.close()

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0])
        there, back = await asyncio.open_connection("127.0.0.1", tls_server.port)
        writers.extend((writer, back))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.gather(copy(reader, back), copy(there, writer), return_exceptions=True)

    listening = await asyncio.start_server(proxy, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    output = await pair_elsewhere(f"wss://{NAME}", tmp_path, HTTPS_PROXY=f"http://127.0.0.1:{port}")
    assert output == "True\n"
    assert set(asked) == {b"CONNECT signaling.test:443 HTTP/1.1"}
    for writer in writers:
        writer.transport.abort()
    listening.close()
    await listening.wait_closed()


# --- What the server offers -------------------------------------------------------------------------------------------


async def test_a_pair_is_offered_a_relay_and_can_renew_it(nothing_is_left_behind: None, tmp_path: Path) -> None:
    turn = TurnServers(("turn:127.0.0.1:3478?transport=udp",), b"north")
    server = SignalingServer(ServerConfig("127.0.0.1", 0, turn=turn))
    await server.start()
    house = House(server.address, tmp_path)
    one, _ = await house.pair()
    await until(lambda: one.ice_servers.turn is not None)
    first = one.ice_servers.turn
    assert first is not None
    assert first.urls == ("turn:127.0.0.1:3478?transport=udp",)
    assert 3500 < first.ends_at - time.monotonic() <= 3600
    assert first.credential not in repr(first)
    await one.renew_turn()
    await until(lambda: one.ice_servers.turn != first)
    await house.close()
    await server.stop()


async def test_credentials_are_renewed_before_they_end(
    nothing_is_left_behind: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_limits, "TURN_SECONDS", 1.0)
    turn = TurnServers(("turn:127.0.0.1:3478",), b"north")
    server = SignalingServer(ServerConfig("127.0.0.1", 0, turn=turn))
    await server.start()
    house = House(server.address, tmp_path)
    one, _ = await house.pair()
    await until(lambda: one.ice_servers.turn is not None)
    first = one.ice_servers.turn
    await until(lambda: one.ice_servers.turn != first)
    await house.close()
    await server.stop()


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("turn:relay.example.org", ("relay.example.org", 3478, "udp")),
        ("turn:192.0.2.1:80?transport=tcp", ("192.0.2.1", 80, "tcp")),
        ("turn:[2001:db8::1]:5?transport=udp", ("2001:db8::1", 5, "udp")),
        ("turns:relay.example.org", ("relay.example.org", 5349, "tls")),
        ("turns:relay.example.org:443?transport=tcp", ("relay.example.org", 443, "tls")),
        ("turns:relay.example.org?transport=udp", None),
        ("turn:relay.example.org:0", None),
        ("turn:relay.example.org:70000", None),
        ("stun:relay.example.org", None),
        ("turn:a b", None),
        ("", None),
    ],
)
def test_relays_are_read_from_their_urls(url: str, endpoint: tuple[str, int, str] | None) -> None:
    found = TurnOffer((url,), "name", "credential", 0.0).endpoints()
    assert found == ([] if endpoint is None else [endpoint])


async def test_what_is_offered_is_waited_for_and_no_longer_than_asked(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await house.pair()
    assert (await one.offered(5)).stun
    await two.close()
    await until(lambda: not one._rendezvous.is_present)
    begun = time.monotonic()
    assert (await one.offered(0.05)).stun
    assert time.monotonic() - begun < 4  # and not the five seconds of before


@pytest.mark.parametrize(
    "message",
    [{"stun": "x"}, {"stun": [70000]}, {"turn": 5}, {"turn": {"urls": ["turn:x"]}}, {"stun": [1] * 99}, {"turn": None}],
)
def test_what_a_server_offers_wrongly_is_passed_over(message: dict[str, object]) -> None:
    assert IceServers().with_stun("ws://h", message) == IceServers()
    assert IceServers().with_turn(message, 0.0) == IceServers()
