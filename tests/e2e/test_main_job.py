"""The main job on real processes: two daemons, one tiny model, one room code, two Unix sockets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.rooms import RoomOfTwo
from tests.tiny_models import PROMPTS, generate_greedily, load_whole


@pytest.fixture(scope="module")
def whole(tiny_model: Path):  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    return load_whole(tiny_model), AutoTokenizer.from_pretrained(str(tiny_model))


@pytest.mark.parametrize("peer", ["first", "second"])
def test_either_socket_gives_the_text_of_the_whole_model(room: RoomOfTwo, whole, peer: str) -> None:  # type: ignore[no-untyped-def]
    model, tokenizer = whole
    daemon = getattr(room, peer)
    for prompt in PROMPTS[:6]:
        expected = generate_greedily(model, tokenizer(prompt)["input_ids"], 24)
        if tokenizer.eos_token_id in expected:
            expected = expected[: expected.index(tokenizer.eos_token_id)]
        for draft_length in (0, 1, 4, None):
            answer = daemon.complete(prompt, max_tokens=24, draft_length=draft_length)
            assert answer["text"] == tokenizer.decode(expected, skip_special_tokens=True), (prompt, draft_length)


def test_a_seed_gives_the_same_text_at_both_sockets_and_with_and_without_speculation(room: RoomOfTwo) -> None:
    for seed in range(4):
        options = {"temperature": 0.8, "top_p": 0.9, "seed": seed, "max_tokens": 24}
        texts = {
            daemon.complete("the tide and", **options, draft_length=length)["text"]
            for daemon in (room.first, room.second)
            for length in (0, 4)
        }
        assert len(texts) == 1
    different = {
        room.first.complete("the tide", temperature=1.0, seed=seed, max_tokens=16)["text"] for seed in range(4)
    }
    assert len(different) > 1


def test_max_tokens_and_a_stop_string_end_an_answer_exactly(room: RoomOfTwo) -> None:
    plain = room.first.complete("the tide and the moon", max_tokens=24, draft_length=0)
    assert (plain["tokens"], plain["reason"]) in ((24, "length"), (plain["tokens"], "stop"))
    for length in (0, 4, 8):
        for limit in (1, 2, 5):
            answer = room.second.complete("the tide and the moon", max_tokens=limit, draft_length=length)
            assert answer["tokens"] == min(limit, plain["tokens"])
            assert plain["text"].startswith(answer["text"])
    middle = plain["text"][len(plain["text"]) // 2 :][:3]
    cut = plain["text"].index(middle)
    counts = set()
    for length in (0, 1, 4, 8):
        answer = room.first.complete("the tide and the moon", max_tokens=24, stop=[middle], draft_length=length)
        assert answer["text"] == plain["text"][:cut]
        assert answer["reason"] == "stop"
        counts.add(answer["tokens"])
    assert len(counts) == 1  # the count does not depend on the block


def test_the_context_can_be_filled_and_not_passed(room: RoomOfTwo) -> None:
    long = "the tide " * 400
    status, answer = room.first.post("/v1/completions", {"prompt": long, "max_tokens": 4})
    assert status == 400
    assert answer["error"]["code"] == "context_length_exceeded"
    answer = room.first.complete("the tide and " * 60, temperature=0, logit_bias={}, draft_length=8)
    usage = answer["tokens"]
    assert answer["reason"] in ("length", "stop")
    assert usage <= 512


def test_an_empty_prompt_begins_with_bos(room: RoomOfTwo, whole) -> None:  # type: ignore[no-untyped-def]
    model, tokenizer = whole
    expected = generate_greedily(model, [tokenizer.bos_token_id], 8)
    if tokenizer.eos_token_id in expected:
        expected = expected[: expected.index(tokenizer.eos_token_id)]
    assert room.first.complete("", max_tokens=8)["text"] == tokenizer.decode(expected, skip_special_tokens=True)


def test_the_openai_package_works_at_the_peer_that_does_not_draft(room: RoomOfTwo) -> None:
    script = (
        "import sys, openai\n"
        "try:\n"
        "    import httpx2 as httpx\n"  # openai 3 has an httpx of its own name
        "except ImportError:\n"
        "    import httpx\n"
        "http = httpx.Client(transport=httpx.HTTPTransport(uds=sys.argv[1]), trust_env=False)\n"
        "client = openai.OpenAI(base_url='http://localhost/v1', api_key='none', http_client=http)\n"
        "messages = [{'role': 'user', 'content': 'the tide'}]\n"
        "kind = dict(model='tiny-llama', messages=messages, max_tokens=8, temperature=0)\n"
        "whole = client.chat.completions.create(**kind).choices[0].message.content\n"
        "stream = client.chat.completions.create(**kind, stream=True)\n"
        "parts = [c.choices[0].delta.content or '' for c in stream if c.choices]\n"
        "assert ''.join(parts) == whole, (parts, whole)\n"
        "print(repr(whole))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(room.second.socket)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr


def test_curl_works(room: RoomOfTwo) -> None:
    body = json.dumps({"prompt": "the tide", "max_tokens": 4, "temperature": 0})
    result = subprocess.run(
        ["curl", "-sS", "--fail", "--unix-socket", str(room.first.socket), "-H", "Content-Type: application/json",
         "-d", body, "http://localhost/v1/completions"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert json.loads(result.stdout)["usage"]["completion_tokens"] == 4


def test_status_shows_peers_layers_link_and_the_round_ledger(room: RoomOfTwo) -> None:
    room.first.complete("the tide", max_tokens=8)
    status = room.first.status()
    assert status["state"] == "ready"
    assert [peer["layers"] for peer in status["peers"]] == ["0:2", "2:4"]
    assert status["link"]["state"] == "UP"
    assert status["ledger"]["rounds"] > 0
    other = room.second.status()
    assert [peer["drafting"] for peer in other["peers"]] == [False, True]
    assert status["peers"][0]["draft"] == "ngram", "nothing was said, and the package has no draft for this model"
    assert "draft" not in other["peers"][0]
