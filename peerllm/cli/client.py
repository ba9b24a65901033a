"""A client of the daemon's socket, on the standard library alone: it starts in milliseconds."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import socket
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from peerllm.protocol import limits
from peerllm.protocol.errors import BadRequest, NoDaemon, PeerllmError, ProtocolError, SocketError, error_from_code

SERVICE_SOCKET = Path("/run/peerllm/peerllm.sock")
_EVENT = b"data: "


def default_socket() -> Path:
    """Where a daemon listens unless told otherwise: the user's own runtime folder, the service's, or, where there is
    neither (a container, a notebook), the folder that holds the keys."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    own = Path(runtime) / "peerllm.sock" if runtime else None
    if own is not None and (own.exists() or not SERVICE_SOCKET.exists()):
        return own
    if SERVICE_SOCKET.parent.is_dir():
        return SERVICE_SOCKET
    return default_state_dir() / "peerllm.sock"


def default_state_dir() -> Path:
    """Where keys are kept."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "peerllm"


def add_socket_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--socket",
        type=Path,
        metavar="PATH",
        help="the daemon's Unix socket (default: $XDG_RUNTIME_DIR/peerllm.sock, or the service's)",
    )


def socket_path(chosen: Path | None) -> Path:
    """What `--socket` says, or the default. Raises SocketError where there is none."""
    return default_socket() if chosen is None else chosen


class Client:
    """Asks the daemon at `path`. Each call is a connection of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, target: str) -> dict[str, Any]:
        """The JSON object at `target`.

        Raises:
            NoDaemon: nobody listens.
            PeerllmError: what the daemon answered, typed.
        """
        connection = _UnixConnection(self._path)
        try:
            return _json(_response(connection, "GET", target))
        finally:
            connection.close()

    def stream(self, target: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Posts `body` and yields each event, up to [DONE]. Closing the iterator closes the connection, and that stops
        the answer.

        Raises:
            NoDaemon: nobody listens.
            PeerllmError: what the daemon answered, in its status or in the middle of the stream; or the stream ended
                early.
        """
        payload = json.dumps(body | {"stream": True}).encode()
        if len(payload) > limits.MAX_API_BODY_BYTES:
            raise BadRequest(f"The request has {len(payload)} bytes; {limits.MAX_API_BODY_BYTES} are allowed.")
        connection = _UnixConnection(self._path)
        try:
            response = _response(connection, "POST", target, payload)
            yield from _events(response)
        finally:
            connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=limits.DAEMON_SILENCE_SECONDS)
        self._path = path

    def connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(limits.DAEMON_CONNECT_SECONDS)
        try:
            sock.connect(os.fspath(self._path))
        except (FileNotFoundError, ConnectionRefusedError) as error:
            sock.close()
            raise NoDaemon(
                f"No peerllm daemon listens at {self._path}. Start one with 'peerllm up' or 'peerllm join', or give "
                "--socket the path of one that runs."
            ) from error
        except OSError as error:
            sock.close()
            raise SocketError(f"The socket {self._path} cannot be used: {error.strerror or error}.") from error
        sock.settimeout(self.timeout)
        self.sock = sock


def _response(
    connection: http.client.HTTPConnection, method: str, target: str, payload: bytes | None = None
) -> http.client.HTTPResponse:
    headers = {"Content-Type": "application/json"} if payload is not None else {}
    try:
        # A daemon that refuses answers before it has read everything.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request(method, target, body=payload, headers=headers)
        response = connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        raise _broken(error) from error
    if response.status >= 400 and target != "/healthz":
        raise _typed(_json(response).get("error"), response.status)
    return response


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while True:
        try:
            line = response.readline(limits.MAX_MESSAGE_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise _broken(error) from error
        if not line:
            raise SocketError("The daemon closed the connection before the answer was complete.")
        if not line.startswith(_EVENT):
            continue
        data = line[len(_EVENT) :].strip()
        if data == b"[DONE]":
            return
        event = _object(data)
        if "error" in event:
            raise _typed(event["error"], 500)
        yield event


def _json(response: http.client.HTTPResponse) -> dict[str, Any]:
    try:
        return _object(response.read())
    except (OSError, http.client.HTTPException) as error:
        raise _broken(error) from error


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ProtocolError("What answers on the socket is not a peerllm daemon: it sends no JSON.") from error
    if not isinstance(value, dict):
        raise ProtocolError("What answers on the socket is not a peerllm daemon: it sends other JSON.")
    return value


def _typed(error: Any, status: int) -> PeerllmError:
    if not isinstance(error, dict):
        return PeerllmError(f"The daemon answered with status {status} and no reason.")
    return error_from_code(str(error.get("code")), str(error.get("message")), error.get("param"))


def _broken(error: Exception) -> SocketError:
    if isinstance(error, SocketError):
        return error
    if isinstance(error, TimeoutError):
        return SocketError(f"The daemon has said nothing for {limits.DAEMON_SILENCE_SECONDS:g} s; is it stuck?")
    return SocketError("The daemon closed the connection before the answer was complete.")
