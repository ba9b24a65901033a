"""Where prompts come from, and which are held out."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from peerllm.engine.batch import BatchDecoder
from peerllm.engine.distill.answers import AnswerMaker, seed_of
from peerllm.engine.distill.options import Recipe, default_init, default_layers
from peerllm.engine.distill.prompts import (
    UNSEEN_FILE,
    PromptFile,
    find_turns,
    is_held_out,
    read_prompts,
    split_prompts,
    unseen_prompts,
)
from peerllm.models.allowlist import check_folder
from peerllm.models.tokenizer import Tokenizer
from peerllm.protocol.errors import ModelError
from tests.engine.distill.conftest import load_whole
from tests.engine.pairs import Pair
from tests.tiny_models import make_model


def with_template(folder: Path, template: str) -> Tokenizer:
    make_model(folder, "llama")
    backend = PreTrainedTokenizerFast.from_pretrained(str(folder))
    backend.chat_template = template
    backend.save_pretrained(str(folder))
    return Tokenizer.load(folder)


def test_the_turns_are_what_the_template_puts_around_a_users_words(target):
    tokenizer = Tokenizer.load(target)
    turns = find_turns(tokenizer)
    words = tokenizer.encode_prompt("the tide and the moon")
    from peerllm.protocol.requests import ChatMessage

    whole = tokenizer.encode_chat([ChatMessage(role="user", content="the tide and the moon")])
    assert [*turns.opener, *words, *turns.closer] == whole
    assert turns.closer[0] in tokenizer.eos_token_ids


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}<|user|>{{ m['content'] }}\nanswer: {% endfor %}", "plain text"),
        ("{% for m in messages %}<|user|>{{ m['content'] | upper }}<|end|>{% endfor %}", "changes"),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "nothing around"),
        ("{{ raise_exception('no') }}", "refuses"),
    ],
)
def test_a_template_that_cannot_be_used_says_why_and_what_to_do(tmp_path, template, words):
    with pytest.raises(ModelError, match=words) as error:
        find_turns(with_template(tmp_path / "model", template))
    assert "--prompts" in error.value.message


def test_prompts_and_answers_of_the_target_are_its_own_samples(target):
    """A prompt that it made is what it says after the opener; the answer is what the engine says to that prompt."""
    part = load_whole(target)
    tokenizer = Tokenizer.load(target)
    turns = find_turns(tokenizer)
    recipe = Recipe(layers=1, init_from=(0,), vocab_top=10, prompt_tokens=20, answer_tokens=12, held_out_every=4)
    decoder = BatchDecoder(part, slots=8, capacity=33, stops=[1], shared=turns.opener, window=5)
    found, held_out = AnswerMaker(decoder, turns, recipe).make(150, lambda share: None)
    assert {sample.temperature for sample in found} >= {0.0, 0.8}
    pair = Pair.load(target, 1, layers=3, context=64)
    numbers = {seed_of(0, number): number for number in range(5000)}
    from peerllm.protocol.requests import Sampling

    for sample in [*found, *held_out][:12]:
        prompt = sample.prompt()
        words = prompt[len(turns.opener) : -len(turns.closer)]
        assert prompt[: len(turns.opener)] == list(turns.opener) and prompt[-len(turns.closer) :] == list(turns.closer)
        assert words and len(prompt) <= 20
        said = pair.generate(list(turns.opener), len(words) + 1, 0, Sampling(temperature=1.0, seed=sample.seed)).tokens
        assert said == [*words, turns.closer[0]]
        how = Sampling(temperature=sample.temperature, seed=sample.seed)
        answer = pair.generate(prompt, sample.answer_tokens, 0, how).tokens
        assert answer == sample.tokens[sample.start :].tolist()
        assert sample.temperature == recipe.temperatures[numbers[sample.seed] % 4]
    assert all(is_held_out(sample.prompt(), 4) for sample in held_out)
    assert not any(is_held_out(sample.prompt(), 4) for sample in found)


def test_what_is_held_out_depends_on_the_prompt_alone():
    prompts = [[1, 2, index] for index in range(2000)]
    share = sum(is_held_out(prompt, 8) for prompt in prompts) / len(prompts)
    assert 0.09 < share < 0.16
    assert [is_held_out(prompt, 8) for prompt in prompts[:20]] == [is_held_out(tuple(p), 8) for p in prompts[:20]]


def test_a_file_has_a_prompt_on_each_line_or_in_each_block():
    assert split_prompts("one\n\n two \n") == ["one", "two"]
    assert split_prompts("one\nmore of one\n---\ntwo\n---\n") == ["one\nmore of one", "two"]


@pytest.mark.parametrize(
    ("data", "words"), [(b"\n\n", "no prompt"), (b"\xff\xfe", "UTF-8"), (b"x" * 4000, "no prompt")]
)
def test_a_file_without_prompts_is_refused(target, tmp_path, data, words):
    file = tmp_path / "prompts"
    file.write_bytes(data)
    with pytest.raises(ModelError, match=words):
        read_prompts(file, Tokenizer.load(target), most=50)


def test_prompts_of_a_file_come_once_each_time_around():
    file = PromptFile([[index] for index in range(7)], "")
    first, second = ([file.prompt(index + start, 3) for index in range(7)] for start in (0, 7))
    assert sorted(first) == sorted(second) == file.prompts
    assert first != second


def test_the_package_carries_a_hundred_prompts_of_four_kinds(target):
    lines = split_prompts(UNSEEN_FILE.read_text())
    assert len(lines) == len(set(lines)) == 100
    assert len(unseen_prompts(Tokenizer.load(target), 7, most=10_000)) == 7


def test_defaults_are_the_first_and_the_last_layers_at_a_fifth_of_the_cost(target):
    assert default_init(4, 30) == (0, 1, 28, 29)
    assert default_init(3, 30) == (0, 1, 29)
    assert default_init(1, 30) == (0,)
    assert default_layers(check_folder(target), 16384) == 1
    from dataclasses import replace

    smollm2 = replace(
        check_folder(target), layers=30, hidden_size=576, intermediate_size=1536, heads=9, kv_heads=3, head_dim=64,
        vocabulary=49152,
    )  # fmt: skip
    assert default_layers(smollm2, 16384) == 4
    assert default_layers(smollm2, 49152) == 1, "a whole head leaves little"
