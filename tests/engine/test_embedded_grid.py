"""The embedded model, cut in the middle of its 30 layers: the text is transformers' own. Three prompts in the ordinary
run, and with PEERLLM_TEST_FULL=1 twenty, every drafter, every K."""

from __future__ import annotations

import os

import pytest

from peerllm.engine.drafting.ngram import NgramDrafter
from peerllm.protocol.requests import Sampling
from tests import tiny_models
from tests.engine.pairs import GREEDY, Pair, Scripted, Ties

IS_FULL = os.environ.get("PEERLLM_TEST_FULL") == "1"
pytestmark = [pytest.mark.embedded, pytest.mark.timeout(7200 if IS_FULL else 900)]

TOKENS = 48 if IS_FULL else 12
LENGTHS = (1, 4, 8) if IS_FULL else (4,)
QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function that reverses a list, and explain each line.",
    "List three uses of copper.",
    "Repeat after me: one two three, one two three, one two three.",
    "Translate 'good morning' into French.",
    "What is 17 times 23?",
    "Tell me a short story about a lighthouse keeper.",
    "Name the planets of the solar system in order.",
    "How do I boil an egg?",
    "Give me a JSON object with a name and an age.",
    "Who wrote Hamlet?",
    "Explain recursion to a child.",
    "Write a haiku about iron.",
    "What are the primary colours?",
    "Summarise the water cycle in two sentences.",
    "Write an SQL query that counts the rows of a table called peers.",
    "Why do cats purr?",
    "Spell the word 'necessary'.",
    "What happened in 1969?",
    "Say nothing but yes.",
)


@pytest.fixture(scope="module")
def embedded_folder():
    from peerllm.models import embedded

    return embedded.folder()


@pytest.fixture(scope="module")
def tokenizer(embedded_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(embedded_folder))


def test_the_embedded_models_text_is_that_of_whole_model_generation(embedded_folder, tokenizer):
    whole = tiny_models.load_whole(embedded_folder)
    pair = Pair.load(embedded_folder, 15, layers=30, context=512)
    ties = Ties(1e-3)
    for question in QUESTIONS if IS_FULL else QUESTIONS[:3]:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        expected = tiny_models.generate_greedily(whole, prompt, TOKENS)
        plain = pair.generate(prompt, TOKENS, 0)
        assert ties.same(whole, prompt, expected, plain.tokens, GREEDY), question
        scripted = {
            mode: Scripted(mode, [*prompt, *expected], whole.config.vocab_size) for mode in ("right", "wrong", "random")
        }
        for name, drafter in {"ngram": NgramDrafter(), **scripted}.items():
            if not IS_FULL and name in ("wrong", "random"):
                continue
            pair.first.drafter = drafter
            for length in LENGTHS:
                run = pair.generate(prompt, TOKENS, length)
                assert ties.same(whole, prompt, expected, run.tokens, GREEDY), (question, name, length)
                assert name != "right" or run.accepted == run.drafted
        seeded = Sampling(temperature=0.8, top_p=0.95, seed=7)
        pair.first.drafter = NgramDrafter()
        without = pair.generate(prompt, TOKENS, 0, seeded)
        speculative = pair.generate(prompt, TOKENS, 4, seeded)
        assert ties.same(whole, prompt, without.tokens, speculative.tokens, seeded), question
    print("near ties:", ties.found)
    assert len(ties.found) <= max(1, ties.compared // 100)
