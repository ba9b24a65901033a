"""One WebSocket to the signaling server: which may be used, how it is reached, and what its errors mean."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import json
import re
import socket
import ssl
import time
import urllib.request
from typing import Any

import aiohttp
from aiohttp import WSMsgType
from yarl import URL

from peerllm.protocol import limits
from peerllm.protocol.errors import (
    RoomClosed,
    RoomCrowded,
    RoomError,
    RoomNotFound,
    SignalingUnreachable,
)

_PATH = "/v1"
Message = dict[str, Any] | bytes


class TryAgain(RoomError):
    """The server refused for now."""


class NotUnderstood(RoomError):
    """The server says that what this release sends is nothing it knows: the same words again would not help."""


_ERRORS: dict[str, tuple[type[RoomError], str]] = {
    "room_not_found": (
        RoomNotFound,
        "There is no room of this number. Codes end after ten minutes, or when someone has joined; ask for a new one.",
    ),
    "room_crowded": (
        RoomCrowded,
        "The room is crowded: everyone it was opened for has joined. `peerllm resume` brings back who was in it.",
    ),
    "room_closed": (RoomClosed, "The room was closed."),
    "room_guesses": (
        RoomClosed,
        f"The room was closed after {limits.MAX_WRONG_GUESSES} wrong guesses. Whoever opened it has to open another.",
    ),
    "room_taken": (RoomClosed, "The room's number now belongs to someone else. Open another."),
    "opener_away": (RoomError, "The peer that opened the room is not there at the moment. Try again in a moment."),
    "opener_returned": (RoomError, "The peer that opened the room connected anew. Try again."),
    "room_busy": (RoomError, "Too many peers try to join this room at once. Try again in a moment."),
    "claim_expired": (RoomError, "Joining took too long: the other peer did not answer in time. Try again."),
    "refused": (RoomError, "The peer that opened the room refused."),
    "too_many": (RoomError, "The signaling server refuses more tries from this address for now. Wait a minute."),
    "too_many_rooms": (
        RoomError,
        "Too many rooms are waiting that were opened from this address. Close some, or wait.",
    ),
    "server_full": (SignalingUnreachable, "The signaling server is full. Try again later, or use another."),
    "bad_message": (NotUnderstood, "The signaling server does not understand this release of peerllm."),
}


_LONGEST_CAUSE = 120
_HUNG_UP = "it ends the connection without an answer"
_NOT_TLS = (
    "wrong version number",
    "http request",
    "unknown protocol",
    "record layer failure",
    "packet length too long",
)
_OS_WORDS = {
    errno.ECONNREFUSED: "connection refused",
    errno.ECONNRESET: _HUNG_UP,
    errno.EPIPE: _HUNG_UP,
    errno.ECONNABORTED: _HUNG_UP,
    errno.ETIMEDOUT: "it does not answer",
    errno.EACCES: "this machine does not allow connections to it",
    errno.EPERM: "this machine does not allow connections to it",
    errno.EHOSTUNREACH: "no route leads there",
    errno.ENETUNREACH: "no network leads there",
    errno.EADDRNOTAVAIL: "this machine has no address from which to reach it",
}
"""The most telling first, for hosts with several addresses."""


TRANSIENT = frozenset({"room_busy", "opener_away", "opener_returned", "claim_expired"})
"""Refusals that a moment's patience may mend."""


def error_of(code: object) -> RoomError:
    """What a server's error code means to the user. TryAgain for those in TRANSIENT."""
    unknown = (RoomError, "The signaling server refused, for a reason that this release does not know.")
    name = code if isinstance(code, str) else ""
    kind, words = _ERRORS.get(name, unknown)
    return TryAgain(words) if name in TRANSIENT else kind(words)


class ServerSocket:
    """Control messages are maps with `op`; what the other peer said is bytes."""

    def __init__(self, session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse, url: str) -> None:
        self._session = session
        self._socket = socket
        self._url = url
        self._heard = asyncio.Event()
        self.heard_at = time.monotonic()

    @property
    def has_lost_its_address(self) -> bool:
        """Whether this machine no longer has the address that the socket is bound to: nothing can come back on it."""
        name = self._socket.get_extra_info("sockname")
        if not isinstance(name, tuple):
            return False
        try:
            with socket.socket(socket.AF_INET6 if len(name) == 4 else socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.bind((name[0], 0, *name[2:]))
        except OSError as error:
            return error.errno == errno.EADDRNOTAVAIL
        return False

    @property
    def is_closed(self) -> bool:
        return self._socket.closed

    async def say(self, op: str, **fields: Any) -> None:
        await self._send(json.dumps({"op": op, **fields}, separators=(",", ":")))

    async def send(self, body: bytes) -> None:
        await self._send(body)

    async def _send(self, data: str | bytes) -> None:
        try:
            if isinstance(data, str):
                await self._socket.send_str(data)
            else:
                await self._socket.send_bytes(data)
        except (ConnectionError, aiohttp.ClientError, RuntimeError) as error:
            raise self._lost() from error

    async def receive(self) -> Message:
        """Control messages that are none are passed over. Raises SignalingUnreachable once the connection is over."""
        while True:
            message = await self._socket.receive()
            self.heard_at = time.monotonic()
            self._heard.set()
            if message.type is WSMsgType.BINARY:
                return bytes(message.data)
            if message.type is WSMsgType.TEXT:
                control = _control(message.data)
                if control is not None:
                    return control
            elif message.type is WSMsgType.PING:
                await self._socket.pong(message.data)
            elif message.type is not WSMsgType.PONG:
                raise self._lost()

    async def is_alive(self, seconds: float) -> bool:
        """Whether anything at all comes back within `seconds` after a ping. Someone has to be in `receive`."""
        if self.has_lost_its_address:
            return False
        self._heard.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._socket.ping()
                await self._heard.wait()
        except (TimeoutError, ConnectionError, aiohttp.ClientError, RuntimeError):
            return False
        return not self._socket.closed

    async def close(self) -> None:
        """At most a second."""
        try:
            async with asyncio.timeout(1.0):
                await self._socket.close()
        except TimeoutError:
            pass
        finally:
            await self._session.close()

    def _lost(self) -> SignalingUnreachable:
        return SignalingUnreachable(f"The connection to the signaling server {self._url} was lost.")


async def connect(
    url: str, *, insecure: bool = False, seconds: float = limits.SIGNALING_CONNECT_SECONDS
) -> ServerSocket:
    """Raises SignalingUnreachable, with what to do, after at most `seconds`."""
    target = check_url(url, insecure=insecure)
    session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
    try:
        async with asyncio.timeout(seconds):
            socket = await session.ws_connect(
                target,
                proxy=proxy_for(target),
                autoping=False,  # so that `is_alive` sees the answers to its own
                heartbeat=limits.SIGNALING_HEARTBEAT_SECONDS,
                max_msg_size=limits.MAX_SIGNALING_FRAME_BYTES,
                timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
            )
    except TimeoutError as error:
        await session.close()
        raise SignalingUnreachable(
            f"The signaling server {url} does not answer. Is the address right, and does a firewall let it through?"
        ) from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        await session.close()
        raise SignalingUnreachable(f"The signaling server {url} cannot be reached: {_cause(error)}.") from error
    except BaseException:
        await session.close()
        raise
    return ServerSocket(session, socket, url)


async def reconnect(url: str, *, insecure: bool = False, stagger: float) -> ServerSocket:
    """As `connect`, for a network that may return at any moment: while nothing answers, another attempt begins beside
    the silent ones every `stagger` seconds, and the first that is through is it. What answers with an error ends it.

    Raises:
        SignalingUnreachable: after at most twice SIGNALING_CONNECT_SECONDS.
    """
    attempts: set[asyncio.Task[ServerSocket]] = set()
    seconds = limits.SIGNALING_CONNECT_SECONDS
    until = time.monotonic() + seconds
    try:
        while True:
            if time.monotonic() < until:
                attempts.add(asyncio.create_task(connect(url, insecure=insecure, seconds=seconds)))
            done, _ = await asyncio.wait(attempts, timeout=stagger, return_when=asyncio.FIRST_COMPLETED)
            through = [task for task in done if not task.exception()]
            if through:
                attempts.discard(through[0])
                return through[0].result()
            if done:
                return done.pop().result()  # raises why
    finally:
        for task in attempts:
            task.cancel()
        for late in await asyncio.gather(*attempts, return_exceptions=True):
            if isinstance(late, ServerSocket):
                await late.close()


def check_url(url: str, *, insecure: bool = False) -> URL:
    """The WebSocket's address.

    Raises:
        SignalingUnreachable: it is none, or it is one that may not be used.
    """
    try:
        parsed = URL(url)
        host = parsed.host or ""
    except ValueError as error:
        raise SignalingUnreachable(f"{url!r} is not the address of a signaling server: {error}.") from error
    if parsed.scheme not in ("ws", "wss") or not host:
        raise SignalingUnreachable(f"{url!r} is not the address of a signaling server, such as wss://example.org.")
    if parsed.scheme == "ws" and not insecure and not is_loopback(host):
        raise SignalingUnreachable(
            f"{host} is not this machine, and ws:// is not encrypted: anyone on the way could see who meets whom. Use "
            f"wss://, or allow it with --insecure (or PEERLLM_INSECURE=1)."
        )
    return parsed.with_path(parsed.path.rstrip("/") + _PATH) if not parsed.path.endswith(_PATH) else parsed


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def proxy_for(target: URL) -> str | None:
    """HTTPS_PROXY for wss, HTTP_PROXY for ws, NO_PROXY honoured; never for loopback."""
    host = target.host or ""
    if is_loopback(host) or urllib.request.proxy_bypass(host):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get("https" if target.scheme == "wss" else "http") or proxies.get("all")


def _control(data: str) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("op"), str):
        return None
    if value["op"] == "error" and not isinstance(value.get("code"), str):
        return None
    return value


def _cause(error: BaseException) -> str:
    """One printable line: a stranger's bytes may have come into what a library says of them."""
    words = "".join(each if each.isprintable() else " " for each in _plain_words(error))
    line = " ".join(words.split()).rstrip(".")
    return line if len(line) <= _LONGEST_CAUSE else line[: _LONGEST_CAUSE - 1] + "…"


def _plain_words(error: BaseException) -> str:
    match error:
        case aiohttp.WSServerHandshakeError(status=503 | 429):
            return f"it turns new connections away at the moment (HTTP {error.status})"
        case aiohttp.WSServerHandshakeError():
            return f"it answers, but not as a peerllm signaling server does (HTTP {error.status})"
        case aiohttp.ClientHttpProxyError():
            return f"the proxy does not let it through (HTTP {error.status})"
        case aiohttp.ClientResponseError() | aiohttp.RedirectClientError():
            return "it answers, but not as a peerllm signaling server does"  # a status here would be aiohttp's own
        case aiohttp.ClientConnectorCertificateError(certificate_error=ssl.SSLCertVerificationError() as why):
            return f"its certificate is not valid: {why.verify_message or why}"
        case aiohttp.ClientConnectorCertificateError():
            return f"its certificate is not valid: {error.certificate_error}"
        case aiohttp.ClientProxyConnectionError():
            return f"the proxy cannot be reached ({_os_words(error.os_error)})"
        case aiohttp.ClientConnectorDNSError(os_error=OSError(errno=None)):  # where aiodns is installed
            return "no such host"
        case aiohttp.ClientConnectorError():
            return _os_words(error.os_error)
        case aiohttp.ServerDisconnectedError():
            return _HUNG_UP
        case aiohttp.InvalidURL() | UnicodeError():
            return "there can be no host of that name"
        case OSError():
            return _os_words(error)
    return str(error) or type(error).__name__


def _os_words(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or "").replace("_", " ").lower()
        if reason in _NOT_TLS:
            return "it answers, but not in TLS, as wss:// needs it"
        return f"its TLS cannot be used ({reason or error})"
    if isinstance(error, socket.gaierror):
        if error.errno == socket.EAI_AGAIN:
            return "its name cannot be looked up at the moment"
        return "no such host"
    # Where a host has several addresses that fail differently, their numbers are in the text alone.
    numbers = {error.errno, *map(int, re.findall(r"\[Errno (\d+)\]", str(error)))}
    for number, words in _OS_WORDS.items():
        if number in numbers:
            return words
    if isinstance(error, ConnectionError):  # asyncio's own, without a number
        return _HUNG_UP
    return error.strerror or str(error) or type(error).__name__
