"""Clients that go away, stall, are too many or send too much: raw bytes, so that nothing is polite by accident."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from peerllm.api import Server, serve
from peerllm.protocol import limits
from peerllm.protocol.requests import Event, GenerateRequest, ModelInfo, TextDelta

STALL = 0.3
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def post(body: bytes, *, target: str = "/v1/chat/completions", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n".encode() + body


def chat(**more: Any) -> bytes:
    return post(json.dumps({"messages": [{"role": "user", "content": "Hi"}], **more}).encode())


@asynccontextmanager
async def connection(path: Path) -> AsyncIterator[Stream]:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        yield reader, writer
    finally:
        await leave(writer)


async def leave(*writers: asyncio.StreamWriter) -> None:
    """Closes, and waits until the sockets are closed too."""
    for writer in writers:
        writer.close()
    for writer in writers:
        with suppress(OSError):
            await writer.wait_closed()


async def until(condition: Callable[[], bool]) -> None:
    """For what has no event of its own."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def answer_head(reader: asyncio.StreamReader) -> int:
    return int((await reader.readuntil(b"\r\n\r\n")).split()[1])


class Endless:
    """A backend that talks until it is stopped, and says how that happened."""

    def __init__(self) -> None:
        self.rounds = 0
        self.ended = asyncio.Event()
        self.waits_for = asyncio.Event()
        self.text = "x" * 1000

    def models(self) -> list[ModelInfo]:
        return []

    def health(self) -> tuple[bool, str]:
        return True, "ready"

    def status(self) -> dict[str, Any]:
        return {}

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        try:
            while True:
                self.rounds += 1
                await asyncio.sleep(0)
                yield TextDelta(text=self.text)
        finally:
            await asyncio.sleep(0)  # tidying up may wait
            self.ended.set()


class Queued(Endless):
    """A backend whose turn never comes."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        self.rounds += 1
        try:
            await self.waits_for.wait()
            yield TextDelta(text="never")
        finally:
            self.ended.set()


def on(loop: str, test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs `test` on asyncio's loop or uvloop's, the daemon's; a loop error or a task left behind fails it."""

    async def run() -> None:
        troubles: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: troubles.append(context))
        async with asyncio.timeout(20):
            await test()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left
        assert not troubles, troubles

    (uvloop.run if loop == "uvloop" else asyncio.run)(run())


both_loops = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])


@both_loops
@pytest.mark.parametrize("is_abrupt", [False, True])
def test_a_client_that_leaves_in_mid_stream_stops_its_answer(tmp_path: Path, loop: str, is_abrupt: bool) -> None:
    async def test() -> None:
        backend = Endless()
        async with await serve(backend, tmp_path / "s") as server:
            async with connection(tmp_path / "s") as (reader, writer):
                writer.write(chat(stream=True))
                await reader.readuntil(b"xxx")
                if is_abrupt:
                    writer.transport.abort()
            await backend.ended.wait()
            rounds = backend.rounds
            await until(lambda: server.clients == 0)
            assert backend.rounds == rounds

    on(loop, test)


@both_loops
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_leaves_while_it_is_queued_leaves_the_queue(tmp_path: Path, loop: str, is_streamed: bool) -> None:
    async def test() -> None:
        backend = Queued()
        async with await serve(backend, tmp_path / "s"):
            async with connection(tmp_path / "s") as (_, writer):
                writer.write(chat(stream=is_streamed))
                await until(lambda: backend.rounds == 1)
            await backend.ended.wait()

    on(loop, test)


@both_loops
def test_a_client_that_leaves_while_comments_are_sent_stops_its_answer(tmp_path: Path, loop: str) -> None:
    async def test() -> None:
        backend = Queued()
        async with await serve(backend, tmp_path / "s", keepalive_seconds=0.01):
            async with connection(tmp_path / "s") as (reader, writer):
                writer.write(chat(stream=True))
                await reader.readuntil(b": waiting")
            await backend.ended.wait()

    on(loop, test)


@both_loops
def test_a_client_that_leaves_before_a_whole_answer_stops_it(tmp_path: Path, loop: str) -> None:
    async def test() -> None:
        backend = Endless()
        async with await serve(backend, tmp_path / "s"):
            async with connection(tmp_path / "s") as (_, writer):
                writer.write(chat())
                await until(lambda: backend.rounds > 5)
            await backend.ended.wait()

    on(loop, test)


@both_loops
@pytest.mark.parametrize("is_streamed", [False, True])
def test_tidying_up_is_not_cut_short_when_the_client_leaves_after_the_answer(
    tmp_path: Path, loop: str, is_streamed: bool, scripted: Any, done: Any
) -> None:
    async def test() -> None:
        tidied = asyncio.Event()
        backend = scripted("text", done, tidied)
        async with await serve(backend, tmp_path / "s") as server:
            async with connection(tmp_path / "s") as (reader, writer):
                writer.write(chat(stream=is_streamed))
                await reader.readuntil(b"[DONE]" if is_streamed else b"ledger")
            await until(lambda: server.clients == 0)
            assert not backend.ended.is_set()
            tidied.set()
            await backend.ended.wait()
            assert backend.ran_to_end

    on(loop, test)


@both_loops
def test_a_slow_reader_slows_its_answer_down_and_is_dropped_when_it_stalls(tmp_path: Path, loop: str) -> None:
    async def test() -> None:
        backend = Endless()
        async with (
            await serve(backend, tmp_path / "s", stall_seconds=STALL) as server,
            connection(tmp_path / "s") as (reader, writer),
        ):
            writer.write(chat(stream=True))
            await reader.readuntil(b"xxx")
            writer.transport.pause_reading()
            await backend.ended.wait()
            await until(lambda: server.clients == 0)
        # What the kernel's and asyncio's buffers hold, and no more.
        assert backend.rounds < 2000

    on(loop, test)


@both_loops
def test_a_client_that_does_not_take_a_whole_answer_is_dropped(
    tmp_path: Path, loop: str, scripted: Any, done: Any
) -> None:
    async def test() -> None:
        backend = scripted("x" * 2_000_000, done)
        async with (
            await serve(backend, tmp_path / "s", stall_seconds=STALL) as server,
            connection(tmp_path / "s") as (_, writer),
        ):
            writer.transport.pause_reading()
            writer.write(chat())
            await backend.begun.wait()
            await until(lambda: server.clients == 0)

    on(loop, test)


@both_loops
def test_a_client_that_takes_nothing_is_dropped_whatever_the_answers_size(
    tmp_path: Path, loop: str, scripted: Any, done: Any
) -> None:
    async def test() -> None:
        backend = scripted("x", done)
        async with await serve(backend, tmp_path / "s", stall_seconds=STALL) as server:
            writers = []
            # One of these sizes is a little more than the kernel takes.
            for size in range(100_000, 400_000, 20_000):
                backend.script = ("x" * size, done)
                backend.begun.clear()
                _, writer = await asyncio.open_unix_connection(tmp_path / "s")
                writers.append(writer)
                writer.transport.pause_reading()
                writer.write(chat())
                await backend.begun.wait()
            await until(lambda: server.clients == 0)
            await leave(*writers)

    on(loop, test)


@pytest.mark.parametrize(
    "beginning", [b"", b"POST /v1/chat", post(b"", length=100)[:-10]], ids=["nothing", "half a line", "half a head"]
)
@both_loops
def test_a_client_that_does_not_send_a_request_is_dropped(tmp_path: Path, loop: str, beginning: bytes) -> None:
    async def test() -> None:
        options = {"stall_seconds": STALL}
        async with await serve(Endless(), tmp_path / "s", **options), connection(tmp_path / "s") as (reader, writer):
            writer.write(beginning)
            assert await reader.read() == b""

    on(loop, test)


@both_loops
def test_a_body_that_does_not_come_is_a_timeout(tmp_path: Path, loop: str) -> None:
    async def test() -> None:
        async with (
            await serve(Endless(), tmp_path / "s", stall_seconds=STALL),
            connection(tmp_path / "s") as (reader, writer),
        ):
            writer.write(post(b"{", length=100))
            assert await answer_head(reader) == 408

    on(loop, test)


def test_an_idle_connection_is_closed_in_the_end(tmp_path: Path) -> None:
    async def test() -> None:
        async with (
            await serve(Endless(), tmp_path / "s", stall_seconds=STALL),
            connection(tmp_path / "s") as (reader, writer),
        ):
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await answer_head(reader) == 200
            await reader.read()

    on("asyncio", test)


def test_a_long_answer_is_not_taken_for_a_stall(tmp_path: Path) -> None:
    async def test() -> None:
        backend = Queued()
        async with (
            await serve(backend, tmp_path / "s", stall_seconds=STALL, keepalive_seconds=STALL),
            connection(tmp_path / "s") as (reader, writer),
        ):
            writer.write(chat(stream=True))
            for _ in range(3):
                await reader.readuntil(b": waiting")
            assert not backend.ended.is_set()

    on("asyncio", test)


@both_loops
def test_one_client_too_many_is_told_so_and_the_others_live_on(tmp_path: Path, loop: str) -> None:
    async def test() -> None:
        async with await serve(Queued(), tmp_path / "s") as server:
            connections = [await asyncio.open_unix_connection(tmp_path / "s") for _ in range(limits.MAX_API_CLIENTS)]
            await until(lambda: server.clients == limits.MAX_API_CLIENTS)
            async with connection(tmp_path / "s") as (reader, writer):
                writer.write(chat())
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 429 ")
                assert b"Retry-After" in head
                assert json.loads(body)["error"]["code"] == "overloaded"
            reader, writer = connections[0]
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await answer_head(reader) == 200
            writer.close()
            await until(lambda: server.clients == limits.MAX_API_CLIENTS - 1)
            async with connection(tmp_path / "s") as (reader, writer):
                writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                assert await answer_head(reader) == 200
            await leave(*(writer for _, writer in connections))

    on(loop, test)


@both_loops
def test_a_flood_of_clients_beyond_the_limit_holds_no_more_than_as_many_again(tmp_path: Path, loop: str) -> None:
    async def test() -> None:
        async with await serve(Queued(), tmp_path / "s", max_clients=2) as server:
            flood = [await asyncio.open_unix_connection(tmp_path / "s") for _ in range(50)]
            answers = await asyncio.gather(*(reader.read() for reader, _ in flood[2:]), return_exceptions=True)
            told = [answer for answer in answers if isinstance(answer, bytes) and b"overloaded" in answer]
            assert len(told) <= 3
            assert server.clients == 2
            await leave(*(writer for _, writer in flood))

    on(loop, test)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_request_over_the_limit_is_refused(tmp_path: Path, is_chunked: bool) -> None:
    async def test() -> None:
        size = limits.MAX_API_BODY_BYTES + 1
        backend = Endless()
        async with await serve(backend, tmp_path / "s"), connection(tmp_path / "s") as (reader, writer):
            if is_chunked:
                head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
                writer.write(head + f"{size:x}\r\n".encode() + b" " * size + b"\r\n0\r\n\r\n")
            else:
                writer.write(post(b" " * size))
            assert await answer_head(reader) == 413
            assert json.loads(await reader.readuntil(b"}}"))["error"]["code"] == "request_too_large"
            assert backend.rounds == 0

    on("asyncio", test)


def test_a_request_of_just_the_limit_is_read(tmp_path: Path, scripted: Any) -> None:
    async def test() -> None:
        backend = scripted()
        body = json.dumps({"prompt": "x"}).encode()
        body += b" " * (limits.MAX_API_BODY_BYTES - len(body))
        async with await serve(backend, tmp_path / "s"), connection(tmp_path / "s") as (reader, writer):
            writer.write(post(body, target="/v1/completions"))
            assert await answer_head(reader) == 200

    on("asyncio", test)


def test_a_client_that_asks_whether_to_send_its_body_is_answered(tmp_path: Path, scripted: Any) -> None:
    async def test() -> None:
        body = json.dumps({"prompt": "x"}).encode()
        async with await serve(scripted(), tmp_path / "s"), connection(tmp_path / "s") as (reader, writer):
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            writer.write(head.encode() + b"Expect: 100-continue\r\n\r\n")
            assert await answer_head(reader) == 100
            writer.write(body)
            assert await answer_head(reader) == 200

    on("asyncio", test)


def test_a_compressed_request_is_refused_unopened(tmp_path: Path) -> None:
    async def test() -> None:
        async with await serve(Endless(), tmp_path / "s"), connection(tmp_path / "s") as (reader, writer):
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc"
            writer.write(head)
            assert await answer_head(reader) == 400

    on("asyncio", test)


@pytest.mark.parametrize("junk", [b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET\r\n\r\n", b"\x00" * 20000])
def test_what_is_not_http_harms_nobody(tmp_path: Path, junk: bytes) -> None:
    async def test() -> None:
        async with await serve(Endless(), tmp_path / "s", stall_seconds=STALL):
            async with connection(tmp_path / "s") as (reader, writer):
                writer.write(junk)
                answer = await reader.read()
                assert not answer or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
            async with connection(tmp_path / "s") as (reader, writer):
                writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                assert await answer_head(reader) == 200

    on("asyncio", test)


def test_a_hundred_clients_that_come_and_go_leave_nothing_behind(tmp_path: Path) -> None:
    async def test() -> None:
        backend = Endless()

        async def visit(index: int) -> None:
            async with connection(tmp_path / "s") as (reader, writer):
                is_streamed = bool(index % 2)
                writer.write(chat(stream=is_streamed))
                if is_streamed and index % 3:
                    await reader.read(1 + index)

        async with await serve(backend, tmp_path / "s") as server:
            for first in range(0, 100, 20):
                await asyncio.gather(*(visit(index) for index in range(first, first + 20)))
            await until(lambda: server.clients == 0)

    on("uvloop", test)


def test_closing_does_not_wait_long_for_a_backend_that_tidies_up(tmp_path: Path, scripted: Any, done: Any) -> None:
    async def test() -> None:
        backend = scripted("text", done, asyncio.Event())
        async with await serve(backend, tmp_path / "s") as server, connection(tmp_path / "s") as (reader, writer):
            writer.write(chat())
            await reader.readuntil(b"ledger")
            began = asyncio.get_running_loop().time()
            await server.close()
            assert asyncio.get_running_loop().time() - began < 3.0
        assert backend.ended.is_set()

    on("asyncio", test)


@both_loops
def test_closing_does_not_wait_long_for_a_client_that_takes_nothing(tmp_path: Path, loop: str) -> None:
    async def test() -> None:
        backend = Endless()
        server: Server = await serve(backend, tmp_path / "s")
        async with connection(tmp_path / "s") as (reader, writer):
            writer.write(chat(stream=True))
            await reader.readuntil(b"xxx")
            writer.transport.pause_reading()
            rounds = 0
            while rounds != backend.rounds:
                rounds = backend.rounds
                await asyncio.sleep(0.02)
            began = asyncio.get_running_loop().time()
            await server.close()
            assert asyncio.get_running_loop().time() - began < 2.0
        assert backend.ended.is_set()

    on(loop, test)
