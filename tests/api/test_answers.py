"""Answers over HTTP: whole and streamed, their ends, and their errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from peerllm.protocol import errors, limits
from peerllm.protocol.requests import Finished, Usage

CHAT = "/v1/chat/completions"


async def test_a_whole_chat_answer_has_openais_shape(start: Any, http: Any, scripted: Any, chat_body: Any) -> None:
    await start(scripted())
    async with http.post(CHAT, json=chat_body(seed=5)) as response:
        answer = await response.json()
    assert response.status == 200
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 0
    assert answer == {
        "object": "chat.completion",
        "model": "tiny",
        "seed": 5,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
        "ledger": {"rounds": 2},
    }


async def test_a_whole_completion_has_openais_shape(start: Any, http: Any, scripted: Any) -> None:
    await start(scripted("a", Finished(reason="length", usage=Usage(prompt_tokens=1, completion_tokens=1))))
    async with http.post("/v1/completions", json={"prompt": "x", "model": "tiny"}) as response:
        answer = await response.json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"index": 0, "text": "a", "logprobs": None, "finish_reason": "length"}]


async def test_a_streamed_chat_comes_piece_by_piece(
    start: Any, http: Any, scripted: Any, chat_body: Any, events_of: Any
) -> None:
    await start(scripted())
    body = chat_body(stream=True, stream_options={"include_usage": True})
    async with http.post(CHAT, json=body) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        *chunks, last, end = await events_of(response)
    assert end == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert chunks[-1]["ledger"] == {"rounds": 2}
    assert len({(chunk["id"], chunk["created"], chunk["seed"]) for chunk in [*chunks, last]}) == 1


async def test_a_streamed_completion_has_no_usage_unless_asked(
    start: Any, http: Any, scripted: Any, events_of: Any
) -> None:
    await start(scripted())
    async with http.post("/v1/completions", json={"prompt": "x", "stream": True}) as response:
        *chunks, end = await events_of(response)
    assert end == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello"
    assert all("usage" not in chunk for chunk in chunks)


async def test_a_chunk_is_sent_as_soon_as_it_is_there(start: Any, http: Any, scripted: Any, chat_body: Any) -> None:
    gate = asyncio.Event()
    await start(
        scripted("first", gate, "second", Finished(reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=2)))
    )
    async with http.post(CHAT, json=chat_body(stream=True)) as response:
        line = b""
        while b"first" not in line:
            line = await response.content.readline()
        gate.set()
        assert b"second" in await response.content.read()


async def test_the_seed_that_was_chosen_is_given_back(start: Any, http: Any, scripted: Any, chat_body: Any) -> None:
    backend = scripted()
    await start(backend)
    async with http.post(CHAT, json=chat_body()) as response:
        assert (await response.json())["seed"] == backend.requests[0].sampling.seed


@pytest.mark.parametrize("text", ["Grüße 😀", "line\u2028separator\u0085and\r\nothers", "漢字" * 3000])
async def test_a_stream_is_ascii_however_it_is_cut(
    start: Any, http: Any, scripted: Any, chat_body: Any, done: Any, text: str
) -> None:
    await start(scripted(text, done))
    async with http.post(CHAT, json=chat_body(stream=True)) as response:
        data = await response.read()
    lines = [line for line in data.decode("ascii").splitlines() if line and line != "data: [DONE]"]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.ContextTooLong("The prompt has 99 tokens.", param="messages"), 400, "invalid_request_error"),
        (errors.Overloaded("64 requests wait already."), 429, "rate_limit_error"),
        (errors.PeerAway("The other peer is away."), 503, "server_error"),
        (errors.RoomIncomplete("Nobody has joined yet."), 503, "server_error"),
        (errors.WorkerDied("The worker died."), 503, "server_error"),
        (errors.NonFinite("The logits are not finite."), 500, "server_error"),
        (errors.ProtocolError("The other peer sent nonsense."), 502, "server_error"),
    ],
    ids=lambda value: getattr(value, "code", str(value)),
)
async def test_an_error_before_any_text_has_its_own_status(
    start: Any, http: Any, scripted: Any, chat_body: Any, error: Any, status: int, kind: str, is_streamed: bool
) -> None:
    await start(scripted(error))
    async with http.post(CHAT, json=chat_body(stream=is_streamed)) as response:
        assert response.status == status
        answer = await response.json()
    assert answer == {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
    assert response.headers.get("Retry-After") == (str(limits.RETRY_AFTER_SECONDS) if status == 429 else None)


async def test_an_error_in_mid_stream_is_an_event_and_the_end(
    start: Any, http: Any, scripted: Any, chat_body: Any, events_of: Any
) -> None:
    await start(scripted("some", errors.PeerAway("The other peer is away.")))
    async with http.post(CHAT, json=chat_body(stream=True)) as response:
        assert response.status == 200
        events = await events_of(response)
    assert events[1]["choices"][0]["delta"] == {"content": "some"}
    assert events[-1]["error"]["code"] == "peer_away"
    assert "[DONE]" not in events


async def test_an_error_after_some_text_fails_a_whole_answer(
    start: Any, http: Any, scripted: Any, chat_body: Any
) -> None:
    await start(scripted("some", errors.PeerAway("The other peer is away.")))
    async with http.post(CHAT, json=chat_body()) as response:
        assert response.status == 503


async def test_an_unforeseen_error_tells_the_client_nothing_of_it(
    start: Any, http: Any, scripted: Any, chat_body: Any, capsys: Any
) -> None:
    await start(scripted(ValueError("a secret path")))
    async with http.post(CHAT, json=chat_body()) as response:
        assert response.status == 500
        text = await response.text()
    assert "secret" not in text
    assert json.loads(text)["error"]["code"] == "internal_error"


async def test_an_answer_without_an_end_is_an_error(start: Any, http: Any, scripted: Any, chat_body: Any) -> None:
    await start(scripted("text and then nothing"))
    async with http.post(CHAT, json=chat_body()) as response:
        assert response.status == 500


async def test_a_silent_stream_shows_life(start: Any, http: Any, scripted: Any, chat_body: Any, done: Any) -> None:
    gate = asyncio.Event()
    await start(scripted(gate, "text", gate, done), keepalive_seconds=0.01)
    async with http.post(CHAT, json=chat_body(stream=True)) as response:
        assert response.status == 200
        line = b""
        while line != b": waiting\n":
            line = await response.content.readline()
        gate.set()
        assert b"[DONE]" in await response.content.read()


async def test_the_client_does_not_wait_while_the_backend_tidies_up(
    start: Any, http: Any, scripted: Any, chat_body: Any, done: Any
) -> None:
    tidied = asyncio.Event()
    for is_streamed in (False, True):
        backend = scripted("text", done, tidied)
        if not is_streamed:
            await start(backend)
            first = backend
        else:
            first.script = backend.script
            first.ended.clear()
        async with http.post(CHAT, json=chat_body(stream=is_streamed)) as response:
            await response.read()
            assert not first.ended.is_set()
            tidied.set()
            await first.ended.wait()
            assert first.ran_to_end
        tidied.clear()
        first.ran_to_end = False


async def test_another_model_is_not_found(start: Any, http: Any, scripted: Any, chat_body: Any) -> None:
    await start(scripted())
    async with http.post(CHAT, json=chat_body(model="gpt-5")) as response:
        assert response.status == 404
        error = (await response.json())["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "tiny" in error["message"]


async def test_while_no_model_is_known_the_backend_says_why(
    start: Any, http: Any, scripted: Any, chat_body: Any
) -> None:
    backend = scripted(errors.RoomIncomplete("Nobody has joined yet."))
    backend.known = []
    await start(backend)
    async with http.post(CHAT, json=chat_body(model="tiny")) as response:
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "room_incomplete"


async def test_closing_the_daemon_ends_a_stream_with_an_error(
    start: Any, http: Any, scripted: Any, chat_body: Any, events_of: Any
) -> None:
    backend = scripted("some", asyncio.Event())
    server = await start(backend)
    async with http.post(CHAT, json=chat_body(stream=True)) as response:
        await backend.begun.wait()
        began = asyncio.get_running_loop().time()
        closing = asyncio.create_task(server.close())
        events = await events_of(response)
        await closing
    assert events[-1]["error"]["code"] == "daemon_stopping"
    assert backend.ended.is_set()
    assert asyncio.get_running_loop().time() - began < limits.API_CLOSE_SECONDS


async def test_closing_the_daemon_ends_a_whole_answer_with_an_error(
    start: Any, http: Any, scripted: Any, chat_body: Any
) -> None:
    backend = scripted("some", asyncio.Event())
    server = await start(backend)

    async def close_when_begun() -> None:
        await backend.begun.wait()
        await server.close()

    closing = asyncio.create_task(close_when_begun())
    async with http.post(CHAT, json=chat_body()) as response:
        assert response.status == 503
    await closing


async def test_a_closed_daemon_cannot_be_reached(start: Any, scripted: Any, tmp_path: Any) -> None:
    server = await start(scripted())
    await server.close()
    assert not (tmp_path / "s").exists()
    with pytest.raises(aiohttp.ClientConnectorError):
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(tmp_path / "s"))) as session:
            await session.get("http://x/healthz")
