"""Where the socket is, and what a client makes of a daemon that misbehaves."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from peerllm.cli import client as module
from peerllm.cli.client import Client, default_socket, socket_path
from peerllm.protocol import limits
from peerllm.protocol.errors import BadRequest, NoDaemon, Overloaded, PeerAway, PeerllmError, ProtocolError, SocketError


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The service's socket is not there, and its folder neither."""
    path = tmp_path / "service" / "peerllm.sock"
    monkeypatch.setattr(module, "SERVICE_SOCKET", path)
    return path


def test_the_users_runtime_folder_is_the_default(
    service: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_socket() == tmp_path / "peerllm.sock"
    assert socket_path(None) == tmp_path / "peerllm.sock"
    assert socket_path(Path("/elsewhere")) == Path("/elsewhere")


def test_the_services_socket_is_the_default_where_the_user_has_none(
    service: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.parent.mkdir()
    service.touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_socket() == service
    (tmp_path / "peerllm.sock").touch()
    assert default_socket() == tmp_path / "peerllm.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_socket() == service


def test_without_a_runtime_folder_the_socket_is_beside_the_keys(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, service: Path
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_socket() == tmp_path / "peerllm" / "peerllm.sock"


@contextmanager
def answering(path: Path, answer: bytes, *, reads: bool = True) -> Iterator[None]:
    """Something listens on `path` that gives `answer` and closes."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            if reads:
                connection.recv(100_000)
            connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        listener.close()


def response(body: bytes, status: int = 200) -> bytes:
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", SocketError),
        (b"SSH-2.0-x\r\n", SocketError),
        (response(b"{}")[:-1], SocketError),
        (response(b"{"), ProtocolError),
        (response(b"<html>"), ProtocolError),
        (response(b"[1]"), ProtocolError),
        (response(b'{"error": {"code": "peer_away", "message": "m"}}', 503), PeerAway),
        (response(b'{"error": {"code": "overloaded", "message": "m"}}', 429), Overloaded),
        (response(b'{"error": 5}', 500), PeerllmError),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrong_answer_is_a_typed_error(tmp_path: Path, answer: bytes, kind: type[Exception]) -> None:
    with answering(tmp_path / "s", answer), pytest.raises(kind):
        Client(tmp_path / "s").get("/status")


@pytest.mark.parametrize(
    "answer",
    [
        response(b"data: {}\n\n"),
        b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\na\r\ndata: {}\n\n\r\n",
        b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\na\r\ndata",
    ],
)
def test_a_stream_that_breaks_off_is_an_error(tmp_path: Path, answer: bytes) -> None:
    with answering(tmp_path / "s", answer), pytest.raises(SocketError, match="before the answer was complete"):
        list(Client(tmp_path / "s").stream("/x", {}))


def test_comments_in_a_stream_are_passed_over(tmp_path: Path) -> None:
    body = b': waiting\n\ndata: {"a": 1}\n\n: waiting\n\ndata: [DONE]\n\n'
    with answering(tmp_path / "s", response(body)):
        assert list(Client(tmp_path / "s").stream("/x", {})) == [{"a": 1}]


def test_an_error_in_a_stream_is_typed(tmp_path: Path) -> None:
    body = b'data: {"a": 1}\n\ndata: {"error": {"code": "peer_away", "message": "m"}}\n\n'
    with answering(tmp_path / "s", response(body)), pytest.raises(PeerAway):
        list(Client(tmp_path / "s").stream("/x", {}))


def test_a_daemon_that_refuses_without_reading_is_heard(tmp_path: Path) -> None:
    body = b'{"error": {"code": "overloaded", "message": "m"}}'
    with answering(tmp_path / "s", response(body, 429), reads=False), pytest.raises(Overloaded):
        list(Client(tmp_path / "s").stream("/x", {"text": "x" * 900_000}))


def test_a_daemon_that_says_nothing_is_given_up(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(limits, "DAEMON_SILENCE_SECONDS", 0.05)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        with pytest.raises(SocketError, match="stuck"):
            Client(tmp_path / "s").get("/status")


def test_a_request_that_is_too_large_is_not_sent(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="bytes"):
        next(Client(tmp_path / "s").stream("/x", {"text": "x" * limits.MAX_API_BODY_BYTES}))


def test_nobody_listens_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(NoDaemon):
        Client(tmp_path / "s").get("/status")
