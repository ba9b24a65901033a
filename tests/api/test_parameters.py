"""What of OpenAI's parameters is served, what is neutral, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from peerllm.api.parameters import ApiRequest, parse_body, parse_chat, parse_completion
from peerllm.protocol import limits
from peerllm.protocol.errors import BadRequest, Unsupported
from peerllm.protocol.fields import from_map, to_map
from peerllm.protocol.requests import ChatMessage, GenerateRequest, Sampling

USER = [{"role": "user", "content": "Hi"}]


def chat(**more: Any) -> ApiRequest:
    return parse_chat({"messages": USER, **more})


def completion(**more: Any) -> ApiRequest:
    return parse_completion({"prompt": "Hi", **more})


def test_everything_that_is_served_arrives_in_the_request() -> None:
    parsed = chat(
        model="m", max_tokens=5, stop=["a", "b"], seed=9, temperature=0.5, top_p=0.9, top_k=40, draft_length=3,
        stream=True, stream_options={"include_usage": True}, n=1,
    )  # fmt: skip
    assert parsed.body == GenerateRequest(
        messages=(ChatMessage(role="user", content="Hi"),),
        max_tokens=5,
        stop=("a", "b"),
        sampling=Sampling(temperature=0.5, top_p=0.9, top_k=40, seed=9),
        draft_length=3,
    )
    assert (parsed.model, parsed.is_streamed, parsed.includes_usage) == ("m", True, True)


def test_defaults_are_openais() -> None:
    for parsed in (chat(), completion()):
        assert (parsed.body.sampling.temperature, parsed.body.sampling.top_p) == (1.0, 1.0)
        assert not parsed.is_streamed
        assert not parsed.includes_usage
    assert chat().body.max_tokens is None
    assert completion().body.max_tokens == limits.DEFAULT_COMPLETION_TOKENS


def test_a_request_without_a_seed_gets_a_random_one() -> None:
    seeds = {chat().body.sampling.seed for _ in range(20)}
    assert len(seeds) == 20
    assert max(seeds) < 1 << limits.RANDOM_SEED_BITS


def test_a_negative_seed_keeps_its_64_bits() -> None:
    assert chat(seed=-1).body.sampling.seed == (1 << 64) - 1


def test_what_is_parsed_can_cross_the_link() -> None:
    body = chat(stop="x", seed=-5, temperature=2).body
    assert from_map(GenerateRequest, to_map(body)) == body


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_token_limit_are_served(name: str) -> None:
    assert chat(**{name: 7}).body.max_tokens == 7


def test_a_list_of_text_parts_is_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_chat({"messages": [{"role": "user", "content": parts}]}).body.messages == (
        ChatMessage(role="user", content="ab"),
    )


def test_a_developer_message_is_a_system_message() -> None:
    parsed = parse_chat({"messages": [{"role": "developer", "content": "x"}, *USER]})
    assert parsed.body.messages is not None
    assert parsed.body.messages[0].role == "system"


def test_an_answer_may_be_sent_back_as_it_came() -> None:
    sent_back = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []}
    assert parse_chat({"messages": [*USER, sent_back, *USER]}).body.messages is not None


NEUTRAL: list[dict[str, Any]] = [
    {"frequency_penalty": 0},
    {"frequency_penalty": 0.0},
    {"presence_penalty": 0},
    {"repetition_penalty": 1.0},
    {"min_p": 0},
    {"logit_bias": {}},
    {"user": "me"},
    {"metadata": {"a": "b"}},
    {"safety_identifier": "x"},
    {"service_tier": "auto"},
    {"n": 1},
    {"seed": None, "stop": None, "temperature": None, "top_p": None, "stream": None, "stream_options": None},
]
NEUTRAL_CHAT: list[dict[str, Any]] = [
    {"tools": []},
    {"tool_choice": "none"},
    {"tool_choice": "auto"},
    {"parallel_tool_calls": True},
    {"functions": [], "function_call": "none"},
    {"response_format": {"type": "text"}},
    {"modalities": ["text"]},
    {"store": False},
    {"logprobs": False, "top_logprobs": 0},
    {"audio": None, "prediction": None},
    {"prompt_cache_key": "x"},
]


@pytest.mark.parametrize("more", NEUTRAL + NEUTRAL_CHAT, ids=str)
def test_chat_accepts_values_that_change_nothing(more: dict[str, Any]) -> None:
    assert chat(seed=1, **{k: v for k, v in more.items() if k != "seed"}).body == chat(seed=1).body


@pytest.mark.parametrize(
    "more", [*NEUTRAL, {"echo": False}, {"suffix": ""}, {"best_of": 1}, {"logprobs": None}], ids=str
)
def test_completion_accepts_values_that_change_nothing(more: dict[str, Any]) -> None:
    assert completion(seed=1, **{k: v for k, v in more.items() if k != "seed"}).body == completion(seed=1).body


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"n": True},
        {"frequency_penalty": 0.5},
        {"presence_penalty": -1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {"5": 1}},
        {"logprobs": True},
        {"top_logprobs": 5},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": "required"},
        {"functions": [{"name": "f"}]},
        {"response_format": {"type": "json_object"}},
        {"modalities": ["text", "audio"]},
        {"audio": {"voice": "x"}},
        {"store": True},
        {"reasoning_effort": "high"},
        {"prediction": {"type": "content", "content": "x"}},
        {"web_search_options": {}},
    ],
    ids=str,
)
def test_chat_refuses_by_name_what_it_does_not_support(more: dict[str, Any]) -> None:
    (name,) = more
    with pytest.raises(Unsupported) as caught:
        chat(**more)
    assert caught.value.param == name
    assert name in caught.value.message


@pytest.mark.parametrize("more", [{"echo": True}, {"suffix": "x"}, {"best_of": 3}, {"logprobs": 0}], ids=str)
def test_completion_refuses_by_name_what_it_does_not_support(more: dict[str, Any]) -> None:
    (name,) = more
    with pytest.raises(Unsupported) as caught:
        completion(**more)
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"max_tokens": limits.MAX_CONTEXT + 1}, "max_tokens"),
        ({"seed": 1 << 64}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": "x" * (limits.MAX_STOP_CHARS + 1)}, "stop"),
        ({"draft_length": limits.MAX_DRAFT_LENGTH + 1}, "draft_length"),
        ({"draft_length": -1}, "draft_length"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"model": 5}, "model"),
        ({"surprise": 1}, "surprise"),
        ({"prompt": "x"}, "prompt"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_by_name(more: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat(**more)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("Hi", "messages"),
        (["Hi"], "messages[0]"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": "me"}], "messages[0].name"),
        ([{"role": "user", "content": "x"}] * (limits.MAX_LIST_ITEMS + 1), "messages"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_message_is_refused_by_its_place(messages: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_chat({"messages": messages})
    assert caught.value.param == param


@pytest.mark.parametrize("prompt", [None, 5, ["a", "b"], [1, 2], [[1, 2]], [], "\udfff"], ids=repr)
def test_a_prompt_is_one_text(prompt: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_completion({"prompt": prompt})
    assert caught.value.param == "prompt"


def test_a_list_of_one_prompt_is_that_prompt() -> None:
    assert parse_completion({"prompt": ["Hi"]}).body.prompt == "Hi"


def test_an_empty_prompt_is_the_backends_to_judge() -> None:
    assert parse_completion({"prompt": ""}).body.prompt == ""


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"a": NaN}', b'{"a": Infinity}', b"[" * 100_000, b"1" * 10_000],
    ids=lambda data: repr(data[:16]),
)
def test_a_body_that_is_not_a_json_object_is_a_bad_request(data: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_body(data)


def test_what_a_client_sent_is_shortened_and_made_printable_in_the_error() -> None:
    with pytest.raises(BadRequest) as caught:
        chat(**{"\x1b[31m" + "x" * 1000: 1})
    assert len(caught.value.message) < 200
    assert caught.value.message.isprintable()


def test_a_body_of_the_greatest_size_is_read_without_blocking_the_loop() -> None:
    import time

    body = json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 230}] * 4000}]})
    assert 0.9 * limits.MAX_API_BODY_BYTES < len(body) < limits.MAX_API_BODY_BYTES * 1.1
    began = time.thread_time()
    parse_chat(parse_body(body.encode()))
    assert time.thread_time() - began < limits.LOOP_BLOCKED_SECONDS
