"""The programs that people use: the openai package and curl."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from peerllm.protocol import errors

try:  # openai 3 has an httpx of its own name
    import httpx2 as httpx
except ImportError:
    import httpx  # type: ignore[no-redef]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "s"))
    async with openai.AsyncOpenAI(
        base_url="http://peerllm/v1",
        api_key="unused",
        max_retries=0,
        http_client=httpx.AsyncClient(transport=transport, trust_env=False),
    ) as client:
        yield client


MESSAGES: Any = [{"role": "user", "content": "Hi"}]


async def test_openai_gets_a_whole_answer(start: Any, scripted: Any, client: openai.AsyncOpenAI) -> None:
    backend = scripted()
    await start(backend)
    answer = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=5, seed=3, stop=["x"], temperature=0,
        extra_body={"draft_length": 0},
    )  # fmt: skip
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 5
    assert answer.model_extra is not None
    assert (answer.model_extra["seed"], answer.model_extra["ledger"]) == (3, {"rounds": 2})
    (request,) = backend.requests
    assert (request.max_tokens, request.stop, request.draft_length) == (5, ("x",), 0)


async def test_openai_gets_a_stream(start: Any, scripted: Any, client: openai.AsyncOpenAI) -> None:
    await start(scripted())
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2


async def test_openai_gets_a_completion_and_the_models(start: Any, scripted: Any, client: openai.AsyncOpenAI) -> None:
    await start(scripted())
    answer = await client.completions.create(model="tiny", prompt="x")
    assert answer.choices[0].text == "Hello"
    stream = await client.completions.create(model="tiny", prompt="x", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello"
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_openai_raises_its_typed_errors(start: Any, scripted: Any, client: openai.AsyncOpenAI) -> None:
    backend = scripted(errors.Overloaded("64 requests wait already."))
    await start(backend)
    with pytest.raises(openai.RateLimitError, match="64 requests"):
        await client.chat.completions.create(model="tiny", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="tiny", messages=MESSAGES, n=2)
    assert (caught.value.param, caught.value.code) == ("n", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="other", messages=MESSAGES)
    backend.script = (errors.PeerAway("The other peer is away."),)
    with pytest.raises(openai.InternalServerError, match="away"):
        await client.chat.completions.create(model="tiny", messages=MESSAGES)


async def test_openai_raises_an_error_in_mid_stream(start: Any, scripted: Any, client: openai.AsyncOpenAI) -> None:
    await start(scripted("some", errors.PeerAway("The other peer is away.")))
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    text = ""
    with pytest.raises(openai.APIError, match="The other peer is away"):
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert text == "some"


async def test_openai_that_stops_reading_stops_the_answer(
    start: Any, scripted: Any, client: openai.AsyncOpenAI
) -> None:
    backend = scripted("some", asyncio.Event())
    await start(backend)
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await asyncio.wait_for(backend.ended.wait(), 5)


async def curl(path: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output."""
    program = shutil.which("curl")
    if program is None:
        pytest.skip("curl is not installed")
    process = await asyncio.create_subprocess_exec(
        program, "--silent", "--show-error", "--max-time", "20", "--unix-socket", str(path), *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.communicate()
        raise
    return process.returncode or 0, output.decode()


async def test_curl_gets_whole_answers_streams_and_errors(start: Any, scripted: Any, tmp_path: Path) -> None:
    await start(scripted())
    body = json.dumps({"messages": MESSAGES})
    status, output = await curl(tmp_path / "s", "http://peerllm/v1/chat/completions", "--data", body)
    assert status == 0
    assert json.loads(output)["choices"][0]["message"]["content"] == "Hello"
    body = json.dumps({"messages": MESSAGES, "stream": True})
    status, output = await curl(tmp_path / "s", "http://peerllm/v1/chat/completions", "--no-buffer", "--data", body)
    assert status == 0
    assert output.endswith("data: [DONE]\n\n")
    status, output = await curl(tmp_path / "s", "--fail", "http://peerllm/v1/chat/completions", "--data", "{}")
    assert status == 22


async def test_curl_sends_a_long_prompt(start: Any, scripted: Any, tmp_path: Path) -> None:
    backend = scripted()
    await start(backend)
    (tmp_path / "body").write_text(json.dumps({"prompt": "long " * 200_000}))
    status, output = await curl(tmp_path / "s", "http://peerllm/v1/completions", "--data", f"@{tmp_path}/body")
    assert status == 0, output
    assert json.loads(output)["choices"][0]["text"] == "Hello"
    assert len(backend.requests[0].prompt) == 1_000_000


async def test_curl_that_finds_no_seat_reads_why(start: Any, scripted: Any, tmp_path: Path) -> None:
    await start(scripted(), max_clients=0)
    status, output = await curl(tmp_path / "s", "http://peerllm/v1/completions", "--data", json.dumps({"prompt": "x"}))
    assert status == 0, output
    assert json.loads(output)["error"]["code"] == "overloaded"


async def test_curl_that_is_killed_stops_its_answer(start: Any, scripted: Any, tmp_path: Path) -> None:
    backend = scripted("some", asyncio.Event())
    await start(backend)
    asking = asyncio.create_task(
        curl(tmp_path / "s", "http://peerllm/v1/completions", "--data", json.dumps({"prompt": "x"}))
    )
    await backend.begun.wait()
    asking.cancel()
    await asyncio.wait_for(backend.ended.wait(), 5)
    await asyncio.wait([asking])
