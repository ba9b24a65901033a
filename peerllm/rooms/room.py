"""The opener's end of a room: it answers claims, counts guesses, and seats who knows the words."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import structlog
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from peerllm.protocol import limits
from peerllm.protocol.errors import (
    PeerllmError,
    ProtocolError,
    RoomClosed,
    SignalingUnreachable,
    WrongCode,
)
from peerllm.rooms import pake, server
from peerllm.rooms.codes import RoomCode, make_words
from peerllm.rooms.seated import SeatedPeer
from peerllm.rooms.wire import Introduction, Versions

log = structlog.get_logger(__name__)

_TOKEN_BYTES = 16


@dataclass(slots=True, kw_only=True)
class _Claim:
    number: int
    inbox: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(8))

    def put(self, body: bytes) -> None:
        if not self.inbox.full():  # else it breaks the exchange's rules, and loses
            self.inbox.put_nowait(body)

    def leave(self) -> None:
        """The claimer is gone. Not a cancellation: a guess that has arrived is still checked, and counted."""
        if self.inbox.full():
            self.inbox.get_nowait()
        self.inbox.put_nowait(None)

    async def next(self) -> bytes:
        body = await self.inbox.get()
        if body is None:
            raise _Gone
        return body


class _Gone(Exception):
    """The claimer left before the exchange was complete."""


class Room:
    """A room that this peer opened. Made by `RoomClient.open`."""

    def __init__(
        self,
        socket: server.ServerSocket,
        number: int,
        token: bytes,
        identity: X25519PrivateKey,
        *,
        url: str,
        insecure: bool,
        seats: int,
        seat: Callable[[pake.Paired], Awaitable[SeatedPeer]],
        on_guess: Callable[[int, int], None] | None,
        versions: Versions,
        words: tuple[str, ...] | None = None,
    ) -> None:
        self.code = RoomCode(number, words or make_words())
        """What the other user types."""
        self.wrong_guesses = 0
        self._socket = socket
        self._token = token
        self._identity = identity
        self._public = identity.public_key().public_bytes_raw()
        self._url = url
        self._insecure = insecure
        self._seats = seats
        self._seat = seat
        self._on_guess = on_guess
        self._versions = versions
        self._introductions: list[Introduction] = []
        self._claims: dict[int, _Claim] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._seated: asyncio.Queue[SeatedPeer] = asyncio.Queue()
        self._failure: PeerllmError | None = None
        self._reason = "closed"
        self._ended = asyncio.Event()
        self._arithmetic = asyncio.Semaphore(1)
        self._runner = asyncio.create_task(self._run(), name="room")

    async def admit(self) -> SeatedPeer:
        """The next peer that confirmed the words, ready to connect. Safe to cancel.

        Raises:
            RoomClosed: ten wrong guesses, ten minutes without anyone, or `close`.
            SignalingUnreachable: the server is gone and did not come back.
        """
        ended = asyncio.ensure_future(self._ended.wait())
        seated = asyncio.ensure_future(self._seated.get())
        try:
            await asyncio.wait([ended, seated], return_when=asyncio.FIRST_COMPLETED)
            if seated.done():
                return seated.result()
        finally:
            ended.cancel()
            if not seated.done():
                seated.cancel()
            await asyncio.gather(ended, seated, return_exceptions=True)
        raise self._failure or RoomClosed("The room was closed.")

    async def close(self) -> None:
        """Those inside stay; nobody else can join."""
        self._end(RoomClosed("The room was closed."))
        await asyncio.gather(self._runner, return_exceptions=True)
        await self._leave()  # for a runner that was cancelled before it began
        while not self._seated.empty():  # nobody asked for them
            await self._seated.get_nowait().close()

    def _end(self, error: PeerllmError) -> None:
        """Safe to call from a claim's own task: `_run` does the rest."""
        if self._failure is None:
            self._failure = error
        self._ended.set()
        if asyncio.current_task() is not self._runner:
            self._runner.cancel()

    async def _leave(self) -> None:
        await self._end_claims()
        with contextlib.suppress(SignalingUnreachable):  # then the server has forgotten the room, or will
            await self._socket.say("close", reason=self._reason)
        await self._socket.close()

    # --- The connection to the server ---------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while self._failure is None:
                try:
                    await self._read()
                except SignalingUnreachable as error:
                    await self._end_claims()
                    if self._failure is None:
                        await self._come_back(error)
        except PeerllmError as error:
            self._end(error)
        except Exception as error:
            log.exception("room.broke")
            self._end(RoomClosed(f"An internal error closed the room: {error!r}. Open another."))
        finally:
            await self._leave()

    async def _come_back(self, why: SignalingUnreachable) -> None:
        """Gets the room back under its number after the connection broke or the server was started anew."""
        until = time.monotonic() + limits.SIGNALING_RESTART_SECONDS
        await self._socket.close()
        for attempt in range(1 << 30):
            pause = limits.SIGNALING_RETRY_SECONDS[min(attempt, len(limits.SIGNALING_RETRY_SECONDS) - 1)]
            await asyncio.sleep(pause * random.uniform(0.5, 1))
            try:
                self._socket, _ = await open_room(
                    self._url, self._token, self._seats, insecure=self._insecure, number=self.code.number
                )
                return
            except SignalingUnreachable:
                if time.monotonic() > until:
                    raise why from None

    async def _read(self) -> None:
        while True:
            message = await self._socket.receive()
            if isinstance(message, bytes):
                claim = self._claims.get(int.from_bytes(message[:4]))
                if claim is not None:
                    claim.put(message[4:])
                continue
            op = message["op"]
            if op == "claim":
                self._begin_claim(message)
            elif op == "gone":
                claim = self._claims.pop(_number(message), None)  # at once: another comes in its place
                if claim is not None:
                    claim.leave()
            elif op == "closed":
                raise RoomClosed("Nobody joined within ten minutes, so the room was closed. Open another.")
            elif op == "error":
                raise server.error_of(message.get("code"))

    # --- Claims -------------------------------------------------------------------------------------------------------

    def _begin_claim(self, message: dict[str, Any]) -> None:
        number = _number(message)
        greeting = message.get("greeting")
        is_too_many = len(self._claims) >= limits.MAX_CLAIMS or len(self._tasks) >= limits.MAX_CLAIM_TASKS
        if number in self._claims or is_too_many or not isinstance(greeting, str):
            return  # the server breaks its own rules; the claim ends by itself
        try:
            decoded = base64.b64decode(greeting, validate=True)
        except (binascii.Error, ValueError):
            decoded = b""
        claim = self._claims[number] = _Claim(number=number)
        task = asyncio.create_task(self._answer(claim, decoded), name="claim")
        self._tasks.add(task)
        task.add_done_callback(self._claim_done)

    def _claim_done(self, task: asyncio.Task[None]) -> None:
        """A claim that broke for a reason of our own would break again: the room ends and says why."""
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None or self._failure is not None:
            return
        log.error("room.claim_broke", exc_info=error)
        if not isinstance(error, PeerllmError):
            error = RoomClosed(f"An internal error closed the room: {error!r}. Open another.")
        self._end(error)

    async def _answer(self, claim: _Claim, greeting: bytes) -> None:
        try:
            async with asyncio.timeout(limits.CLAIM_SECONDS):
                paired = await self._exchange(claim, greeting)
        except TimeoutError:
            await self._refuse(claim, None)
        except _Gone:
            pass
        except SignalingUnreachable:
            pass  # `_run` hears of it too
        except WrongCode as error:
            self._count_guess()  # before anything is said: whoever holds up the answer does not hold up the count
            await self._refuse(claim, error)
            if self.wrong_guesses >= limits.MAX_WRONG_GUESSES:
                self._close_for_guesses()
        except ProtocolError as error:
            await self._refuse(claim, error)
        else:
            await self._take_seat(claim, paired)
        finally:
            self._claims.pop(claim.number, None)

    async def _exchange(self, claim: _Claim, greeting: bytes) -> pake.Paired:
        opener = pake.Opener(
            self.code.number,
            self.code.password,
            self._public,
            place=len(self._introductions) + 1,
            introductions=tuple(self._introductions),
            versions=self._versions,
        )
        await self._tell(claim, await self._compute(opener.take_greeting, greeting))
        await self._tell(claim, await self._compute(opener.take_confirmation, await claim.next()))
        return opener.take_done(await claim.next())

    async def _compute(self, work: Callable[[bytes], bytes], data: bytes) -> bytes:
        """In a thread, one at a time, and for the same time whatever it computes: the package's scalar multiplication
        is faster for some words than for others, and a stranger may ask for it as often as a claim can be made."""
        async with self._arithmetic:
            if self.wrong_guesses >= limits.MAX_WRONG_GUESSES:  # the room is closing, and perhaps held up in that
                raise ProtocolError("the room is closed")
            until = time.monotonic() + limits.SPAKE2_SECONDS
            try:
                return await asyncio.to_thread(work, data)
            finally:
                await asyncio.sleep(until - time.monotonic())

    async def _tell(self, claim: _Claim, body: bytes) -> None:
        await self._socket.send(claim.number.to_bytes(4) + body)

    async def _refuse(self, claim: _Claim, error: Exception | None) -> None:
        with contextlib.suppress(SignalingUnreachable):  # `_run` hears of it too
            if error is not None:
                await self._tell(claim, pake.refusal_of(error, self._versions))
            await self._socket.say("refuse", claim=claim.number)

    def _count_guess(self) -> None:
        self.wrong_guesses += 1
        if self._on_guess is not None:
            self._on_guess(self.wrong_guesses, max(limits.MAX_WRONG_GUESSES - self.wrong_guesses, 0))

    def _close_for_guesses(self) -> None:
        self._reason = "guesses"
        self._end(
            RoomClosed(
                f"The room was closed: {limits.MAX_WRONG_GUESSES} times someone tried wrong words. Open another, and "
                f"give its code to one person alone."
            )
        )

    async def _take_seat(self, claim: _Claim, paired: pake.Paired) -> None:
        if paired.remote_key == self._public:
            await self._refuse(claim, ProtocolError("our own key"))
            return
        if self._seats == 0 or self._failure is not None or self.wrong_guesses >= limits.MAX_WRONG_GUESSES:
            await self._refuse(claim, None)
            return
        self._seats -= 1
        peer = await self._seat(paired)
        self._introductions.append(Introduction(paired.remote_key, paired.place))
        self._seated.put_nowait(peer)
        with contextlib.suppress(SignalingUnreachable):  # the two meet at their rendezvous all the same
            await self._socket.say("seat", claim=claim.number)

    async def _end_claims(self) -> None:
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._claims.clear()


async def open_room(
    url: str, token: bytes, seats: int, *, insecure: bool, number: int | None = None
) -> tuple[server.ServerSocket, int]:
    """A socket that holds a room, and the room's number: a new one, or the same again.

    Raises:
        SignalingUnreachable, RoomError: in words.
    """
    socket = await server.connect(url, insecure=insecure)
    try:
        fields = {} if number is None else {"room": number}
        await socket.say("open", token=token.hex(), seats=seats, **fields)
        async with asyncio.timeout(limits.SIGNALING_CONNECT_SECONDS):
            message = await socket.receive()
        if isinstance(message, dict) and message["op"] == "error":
            raise server.error_of(message.get("code"))
        if not isinstance(message, dict) or message["op"] != "opened":
            raise ProtocolError("the signaling server does not open a room, and does not say why")
        given = message.get("room")
        if type(given) is not int or not 0 < given < 10**limits.MAX_ROOM_DIGITS or number not in (None, given):
            raise ProtocolError("the signaling server gave a room number that is none")
        return socket, given
    except TimeoutError:
        await socket.close()
        raise SignalingUnreachable(f"The signaling server {url} does not answer.") from None
    except BaseException:
        await socket.close()
        raise


def new_token() -> bytes:
    """By which the opener gets its room back."""
    return secrets.token_bytes(_TOKEN_BYTES)


def _number(message: dict[str, Any]) -> int:
    number = message.get("claim")
    return number if type(number) is int and 0 < number < 1 << 32 else 0
