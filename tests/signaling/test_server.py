"""The server with real sockets: bounds on what a connection may do, farewells, half-open and slow clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import WSMsgType
from multidict import CIMultiDict
from peerllm_signaling import limits, log
from peerllm_signaling.proxies import client_address, parse_networks
from peerllm_signaling.server import PATH, ServerConfig, SignalingServer

from tests.signaling.board import GREETING

TOKEN = "ab" * 16


async def said(socket: aiohttp.ClientWebSocketResponse) -> dict[str, Any]:
    async with asyncio.timeout(5):
        value: dict[str, Any] = await socket.receive_json()
    return value


async def close_code(socket: aiohttp.ClientWebSocketResponse) -> int | None:
    async with asyncio.timeout(5):
        while (await socket.receive()).type not in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.ERROR):
            pass
    return socket.close_code


async def test_a_room_is_opened_claimed_and_spoken_in(server: SignalingServer, session: aiohttp.ClientSession) -> None:
    async with session.ws_connect(server.address + PATH) as opener, session.ws_connect(server.address + PATH) as joiner:
        await opener.send_json({"op": "open", "token": TOKEN, "seats": 1})
        room = (await said(opener))["room"]
        await joiner.send_json({"op": "claim", "room": room, "greeting": GREETING})
        assert (await said(opener))["greeting"] == GREETING
        await opener.send_bytes((1).to_bytes(4) + bytes(limits.MAX_BODY_BYTES))
        assert len(await joiner.receive_bytes(timeout=5)) == limits.MAX_BODY_BYTES
        await opener.send_json({"op": "seat", "claim": 1})
        assert await said(joiner) == {"op": "seated"}


async def test_a_message_over_the_limit_ends_the_connection(
    server: SignalingServer, session: aiohttp.ClientSession
) -> None:
    async with session.ws_connect(server.address + PATH) as socket:
        await socket.send_bytes(bytes(limits.MAX_FRAME_BYTES + 1))
        assert await close_code(socket) == aiohttp.WSCloseCode.MESSAGE_TOO_BIG


async def test_a_connection_that_says_nothing_is_closed(
    server: SignalingServer, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SILENT_SECONDS", 0.05)
    async with session.ws_connect(server.address + PATH) as socket:
        assert await close_code(socket) == aiohttp.WSCloseCode.TRY_AGAIN_LATER


@pytest.mark.parametrize(
    "said_so_far", [b"", b"GET /v1 HTTP/1.1\r\nHost: x\r\n", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"]
)
async def test_a_connection_that_becomes_no_websocket_is_cut(
    nothing_is_left_behind: None, monkeypatch: pytest.MonkeyPatch, said_so_far: bytes
) -> None:
    monkeypatch.setattr(limits, "REQUEST_SECONDS", 0.1)
    server = SignalingServer(ServerConfig("127.0.0.1", 0))
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(said_so_far)
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
    writer.close()
    await server.stop()


async def test_a_websocket_outlives_the_time_for_becoming_one(
    nothing_is_left_behind: None, monkeypatch: pytest.MonkeyPatch, session: aiohttp.ClientSession
) -> None:
    monkeypatch.setattr(limits, "REQUEST_SECONDS", 0.05)
    server = SignalingServer(ServerConfig("127.0.0.1", 0))
    await server.start()
    async with session.ws_connect(server.address + PATH) as socket:
        await asyncio.sleep(0.1)  # the time that is tested
        await socket.send_json({"op": "open", "token": TOKEN, "seats": 1})
        assert (await said(socket))["op"] == "opened"
    await server.stop()


async def test_a_connection_that_floods_is_dropped(
    server: SignalingServer, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FRAMES_BURST", 10)
    async with session.ws_connect(server.address + PATH) as socket:
        await socket.send_json({"op": "open", "token": TOKEN, "seats": 1})
        for _ in range(20):
            await socket.send_json({"op": "seat", "claim": 7})
        assert await close_code(socket) == aiohttp.WSCloseCode.POLICY_VIOLATION


async def test_connections_are_limited_for_each_address(
    server: SignalingServer, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_CONNECTIONS_PER_ADDRESS", 1)
    async with session.ws_connect(server.address + PATH):
        with pytest.raises(aiohttp.WSServerHandshakeError, match="503"):
            await session.ws_connect(server.address + PATH)


async def test_a_slow_reader_is_dropped_and_the_other_goes_on(
    server: SignalingServer, session: aiohttp.ClientSession
) -> None:
    meet = {"op": "meet", "ids": ["00" * limits.MEETING_ID_BYTES]}
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        f"GET {PATH} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
    )
    await reader.readuntil(b"\r\n\r\n")
    body = json.dumps({**meet, "side": 0}).encode()
    writer.write(bytes([0x81, 0x80 | len(body)]) + bytes(4) + body)
    async with session.ws_connect(server.address + PATH) as quick:
        await quick.send_json({**meet, "side": 1})
        while (await said(quick))["op"] != "present":
            pass
        writer.transport.pause_reading()
        for _ in range(limits.PAIR_MESSAGES_BURST):
            await quick.send_bytes(bytes(limits.MAX_BODY_BYTES))
        assert (await said(quick))["op"] == "away"
    writer.close()


async def test_a_half_open_connection_is_found_and_dropped(
    server: SignalingServer, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HEARTBEAT_SECONDS", 0.1)
    meet = {"op": "meet", "ids": ["00" * limits.MEETING_ID_BYTES]}
    dead = await session.ws_connect(server.address + PATH, autoping=False)
    await dead.send_json({**meet, "side": 0})
    async with session.ws_connect(server.address + PATH) as living:
        await living.send_json({**meet, "side": 1})
        while (await said(living))["op"] != "present":
            pass
        assert (await said(living))["op"] == "away"  # nobody answered the server's pings
    await dead.close()


async def test_stopping_says_farewell_to_all(session: aiohttp.ClientSession) -> None:
    server = SignalingServer(ServerConfig("127.0.0.1", 0))
    await server.start()
    sockets = [await session.ws_connect(server.address + PATH) for _ in range(20)]
    closing = asyncio.gather(*(close_code(socket) for socket in sockets))
    async with asyncio.timeout(2):
        await server.stop()
    assert set(await closing) == {aiohttp.WSCloseCode.SERVICE_RESTART}


async def test_health_is_told_to_who_asks(server: SignalingServer, session: aiohttp.ClientSession) -> None:
    base = server.address.replace("ws://", "http://")
    async with session.get(base + "/healthz") as answer:
        assert (answer.status, await answer.text()) == (200, "ok\n")
    async with session.get(base + PATH) as answer:
        assert answer.status == 426


async def test_the_forwarded_address_counts_only_from_a_configured_proxy(session: aiohttp.ClientSession) -> None:
    async def limited(trusted: tuple[str, ...]) -> bool:
        """Whether so many joins from 'different' addresses are taken for one address's."""
        server = SignalingServer(ServerConfig("127.0.0.1", 0, trusted_proxies=parse_networks(trusted)))
        await server.start()
        codes = []
        for index in range(limits.JOINS_PER_MINUTE + 1):
            headers = {"X-Forwarded-For": f"203.0.113.{index}"}
            async with session.ws_connect(server.address + PATH, headers=headers) as socket:
                await socket.send_json({"op": "claim", "room": 4127, "greeting": GREETING})
                codes.append((await said(socket))["code"])
        await server.stop()
        return "too_many" in codes

    assert await limited(())
    assert not await limited(("127.0.0.0/8",))


async def test_a_line_of_the_header_that_the_client_wrote_is_not_the_proxys(session: aiohttp.ClientSession) -> None:
    """A proxy may append its word as a line of its own, after the client's."""
    server = SignalingServer(ServerConfig("127.0.0.1", 0, trusted_proxies=parse_networks(["127.0.0.0/8"])))
    await server.start()
    codes = []
    for index in range(limits.JOINS_PER_MINUTE + 1):
        headers = CIMultiDict([("X-Forwarded-For", f"203.0.113.{index}"), ("X-Forwarded-For", "192.0.2.1")])
        async with session.ws_connect(server.address + PATH, headers=headers) as socket:
            await socket.send_json({"op": "claim", "room": 4127, "greeting": GREETING})
            codes.append((await said(socket))["code"])
    await server.stop()
    assert codes[-1] == "too_many"


def test_what_a_client_wrote_into_the_header_itself_is_not_believed() -> None:
    trusted = parse_networks(["10.0.0.0/8", "::1"])
    assert client_address("10.0.0.1", "6.6.6.6, 192.0.2.1", trusted) == "192.0.2.1"
    assert client_address("10.0.0.1", "6.6.6.6, 192.0.2.1, 10.9.9.9", trusted) == "192.0.2.1"
    assert client_address("::1", "192.0.2.1", trusted) == "192.0.2.1"
    assert client_address("::ffff:10.0.0.1", "192.0.2.1", trusted) == "192.0.2.1"
    assert client_address("192.0.2.9", "6.6.6.6", trusted) == "192.0.2.9"
    assert client_address("10.0.0.1", None, trusted) == "10.0.0.1"


# --- The command ------------------------------------------------------------------------------------------------------


@contextmanager
def command(*options: str, env: dict[str, str] | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`peerllm-signaling --port 0`, and the address that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "peerllm_signaling", "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"peerllm-signaling listening on (wss?://\S+)\n", line)
        assert found, line + (process.stderr.read() if process.stderr and process.poll() is not None else "")
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_ends_the_server_in_time(number: signal.Signals) -> None:
    with command() as (process, address):
        async with aiohttp.ClientSession() as session, session.ws_connect(address + PATH) as socket:
            await socket.send_json({"op": "open", "token": TOKEN, "seats": 1})
            await said(socket)
            process.send_signal(number)
            assert await close_code(socket) == aiohttp.WSCloseCode.SERVICE_RESTART
            assert await asyncio.to_thread(process.wait, 3) == 0


async def test_the_log_shows_no_bodies_codes_or_addresses_at_any_level() -> None:
    with command("--log-level", "debug") as (process, address):
        async with aiohttp.ClientSession() as session:
            opener = await session.ws_connect(address + PATH, headers={"X-Forwarded-For": "203.0.113.77"})
            await opener.send_json({"op": "open", "token": TOKEN, "seats": 1})
            room = (await said(opener))["room"]
            joiner = await session.ws_connect(address + PATH)
            await joiner.send_json({"op": "claim", "room": room, "greeting": GREETING})
            await said(opener)
            await opener.send_bytes((1).to_bytes(4) + b"a secret body")
            await joiner.receive_bytes(timeout=5)
            await joiner.send_str("{not json")
            await joiner.close()
            await opener.close()
            async with session.get(address.replace("ws", "http", 1) + "/?a=secret-query") as answer:
                assert answer.status == 404
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rsplit(":", 1)[1]))
        writer.write(b"secret nonsense\r\n\r\n")
        await reader.read()
        writer.close()
        process.send_signal(signal.SIGTERM)
        output, logged = await asyncio.to_thread(process.communicate, timeout=5)
    events = [json.loads(line) for line in logged.splitlines()]
    for event in events:  # digits of a time or a hash could be those of the room by chance
        del event["timestamp"]
        event.pop("address", None)
    everything = output + json.dumps(events)
    assert '"what": "open"' in everything  # it does log
    for secret in (str(room), "secret", TOKEN, GREETING, "127.0.0.1", "203.0.113", "nonsense"):
        assert secret not in everything, f"{secret!r} in {everything}"


def test_an_address_in_the_log_is_a_keyed_hash() -> None:
    assert log.masked("192.0.2.1") == log.masked("192.0.2.1") != log.masked("192.0.2.2")
    code = "from peerllm_signaling import log; print(log.masked('192.0.2.1'))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert other.stdout.strip() != log.masked("192.0.2.1")  # another process has another key


def test_a_port_that_is_taken_is_said_in_words() -> None:
    with command() as (_, address):
        result = subprocess.run(
            [sys.executable, "-m", "peerllm_signaling", "--port", address.rsplit(":", 1)[1]],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert result.returncode == 1
    assert "cannot listen on 127.0.0.1" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--turn-url", "turn:x"],
        ["--turn-secret-file", "/nonexistent"],
        ["--tls-key", "/nonexistent"],
        ["--tls-cert", "/nonexistent"],
        ["--trusted-proxy", "everyone"],
        ["--turn-url", "turn:x", "--turn-secret-file", "/nonexistent"],
    ],
)
def test_options_that_cannot_be_are_refused_at_the_start(options: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "peerllm_signaling", *options], capture_output=True, text=True, timeout=30, check=False
    )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_the_signaling_server_needs_neither_torch_nor_peerllm() -> None:
    code = (
        "import sys, peerllm_signaling.main; found = {name.split('.')[0] for name in sys.modules}; "
        "sys.exit(', '.join(found & {'torch', 'peerllm', 'aiortc'}) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 0, result.stderr


def test_pages_of_the_package_do_not_import_peerllm() -> None:
    root = Path(log.__file__).parent
    for path in root.glob("*.py"):
        assert not re.search(r"^\s*(from|import) peerllm\b", path.read_text(), re.MULTILINE), path
