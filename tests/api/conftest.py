"""A backend that does what the test says, behind a real socket; nothing may be left running."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from peerllm.api import Server, serve
from peerllm.protocol.requests import Event, Finished, GenerateRequest, ModelInfo, TextDelta, Usage

DONE = Finished(reason="stop", usage=Usage(prompt_tokens=3, completion_tokens=2), ledger={"rounds": 2})


class ScriptedBackend:
    """Plays `script`: text and Finished are yielded, an asyncio.Event is waited for, an exception is raised."""

    def __init__(self, *script: str | Finished | asyncio.Event | Exception) -> None:
        self.script: tuple[str | Finished | asyncio.Event | Exception, ...] = script or ("Hel", "lo", DONE)
        self.requests: list[GenerateRequest] = []
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        self.ran_to_end = False
        self.known = [ModelInfo(name="tiny", created=7, context_length=64, details={"layers": 4})]
        self.is_well = True

    def models(self) -> list[ModelInfo]:
        return self.known

    def health(self) -> tuple[bool, str]:
        return (True, "ready") if self.is_well else (False, "the other peer is away")

    def status(self) -> dict[str, Any]:
        return {"state": "ready"}

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        self.begun.set()
        try:
            for step in self.script:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield TextDelta(text=step) if isinstance(step, str) else step
            self.ran_to_end = True
        finally:
            self.ended.set()


Start = Callable[..., Awaitable[Server]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """`await start(backend, **options)` serves it at `tmp_path / "s"`. Afterwards no task and no loop error is left."""
    servers: list[Server] = []
    troubles: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: troubles.append(context))

    async def start_one(backend: ScriptedBackend, **options: Any) -> Server:
        servers.append(await serve(backend, tmp_path / "s", **options))
        return servers[-1]

    yield start_one
    for server in servers:
        await server.close()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if left:
        _, left = await asyncio.wait(left, timeout=1)  # HTTP clients' own generators end a little later
    assert not left
    assert not troubles


@pytest.fixture
async def http(start: Start, tmp_path: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """An HTTP client of that socket. It is closed before the server is."""
    async with aiohttp.ClientSession("http://x", connector=aiohttp.UnixConnector(str(tmp_path / "s"))) as session:
        yield session


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], **more}


@pytest.fixture
def chat_body() -> Callable[..., dict[str, Any]]:
    return chat


async def read_events(response: aiohttp.ClientResponse) -> list[Any]:
    """The data of each event, parsed; `[DONE]` as text; comments as they are."""
    events: list[Any] = []
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        if line == "data: [DONE]" or line.startswith(":"):
            events.append(line.removeprefix("data: "))
        elif line:
            events.append(json.loads(line.removeprefix("data: ")))
    return events


@pytest.fixture
def events_of() -> Callable[[aiohttp.ClientResponse], Awaitable[list[Any]]]:
    return read_events


@pytest.fixture
def scripted() -> type[ScriptedBackend]:
    return ScriptedBackend


@pytest.fixture
def done() -> Finished:
    return DONE
