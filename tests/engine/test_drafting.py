"""Drafters on their own."""

from __future__ import annotations

import pytest
import torch

from peerllm.engine.drafting.base import shared_prefix
from peerllm.engine.drafting.build import build_drafter
from peerllm.engine.drafting.ngram import NgramDrafter
from tests import tiny_models
from tests.engine.pairs import GREEDY


def test_look_up_proposes_what_followed_the_longest_match():
    drafter = NgramDrafter()
    tokens = [1, 2, 3, 9, 9, 2, 3, 7, 7, 1, 2, 3]
    # [2, 3] was last followed by 7, but [1, 2, 3] by 9.
    assert drafter.propose(0, tokens, 4, 0.0, GREEDY).candidates == [9, 9, 2, 3]


def test_look_up_prefers_the_latest_place():
    assert NgramDrafter().propose(0, [5, 1, 5, 2, 5], 1, 0.0, GREEDY).candidates == [2]


def test_look_up_without_a_match_proposes_nothing():
    drafter = NgramDrafter()
    assert drafter.propose(0, [1, 2, 3], 4, 0.0, GREEDY).candidates == []
    assert drafter.propose(0, [1], 4, 0.0, GREEDY).candidates == []


def test_look_up_follows_the_sequence_as_it_grows_and_shrinks():
    drafter = NgramDrafter()
    drafter.propose(0, [1, 2], 2, 0.0, GREEDY)
    assert drafter.propose(0, [1, 2, 8, 1], 2, 0.0, GREEDY).candidates == [2, 8]
    assert drafter.propose(0, [1, 6, 1], 2, 0.0, GREEDY).candidates == [6, 1]


def test_look_up_keeps_slots_apart():
    drafter = NgramDrafter()
    drafter.propose(0, [1, 2, 3], 2, 0.0, GREEDY)
    assert drafter.propose(1, [4, 1], 2, 0.0, GREEDY).candidates == []


def test_look_up_learns_how_often_it_is_right():
    drafter = NgramDrafter()
    tokens = [1, 2, 1]
    first = drafter.propose(0, tokens, 1, 0.0, GREEDY).probabilities[0]
    for token in (3, 1, 4, 1, 5, 1, 6, 1):
        tokens = [*tokens, token]
        later = drafter.propose(0, tokens, 1, 0.0, GREEDY)
    assert later.probabilities[0] < first
    assert drafter.propose(0, [*tokens, 7, 1], 1, 0.5, GREEDY).candidates == []


def test_the_shared_prefix_is_the_longest():
    assert shared_prefix([], [1]) == 0
    assert shared_prefix([1, 2, 3], [1, 2, 3, 4]) == 3
    for place in range(40):
        other = list(range(40))
        other[place] = -1
        assert shared_prefix(list(range(40)), other) == place


@pytest.mark.parametrize(
    ("draft_rows", "target_rows", "columns"), [(320, 304, 304), (305, 352, 304), (304, 302, 302), (303, 352, 303)]
)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("path", ["eager", "graph"])
def test_a_drafts_head_is_cut_to_the_tokens_that_both_can_say(
    tmp_path, path, is_tied, draft_rows, target_rows, columns
):
    """The tokenizer has 300 tokens, which make 304 columns of whole loads."""
    target = tiny_models.make_model(tmp_path / "target", vocabulary=target_rows)
    folder = tiny_models.make_model(tmp_path / "draft", vocabulary=draft_rows, is_tied=is_tied, seed=3)
    drafter = build_drafter(
        f"model:{folder}", target, vocabulary=target_rows, slots=1, context=64, dtype=torch.float32, device="cpu",
        path=path, progress=lambda stage, fraction: None,
    )  # fmt: skip
    part = drafter._model if path == "eager" else drafter._static.part
    assert part.columns == part.head.out_features == columns
    assert part.embed.weight.shape == (draft_rows, 64)
    whole = tiny_models.load_whole(folder)
    assert part.byte_count == 4 * sum(each.numel() for each in whole.parameters())
    if is_tied:
        assert part.head.weight.data_ptr() == part.embed.weight.data_ptr()
    for prompt in ([1, 2, 3], [299, 7], [draft_rows - 1, 5]):
        sequence = list(prompt)
        for _ in range(6):
            with torch.inference_mode():
                sequence.append(int(whole(torch.tensor([sequence])).logits[0, -1, :columns].argmax()))
        found = drafter.propose(0, prompt, 6, 0.0, GREEDY).candidates
        assert found == sequence[len(prompt) :]
        assert max(found) < target_rows


def test_a_draft_whose_padding_would_win_never_proposes_it(tmp_path):
    target = tiny_models.make_model(tmp_path / "target", vocabulary=302)
    folder = tiny_models.make_model(tmp_path / "draft", vocabulary=320)
    model = tiny_models.load_whole(folder)
    with torch.no_grad():
        model.lm_head.weight[302:] = 100 * model.lm_head.weight[:18]
    model.save_pretrained(str(folder))
    drafter = build_drafter(
        f"model:{folder}", target, vocabulary=302, slots=1, context=64, dtype=torch.float32, device="cpu",
        progress=lambda stage, fraction: None,
    )  # fmt: skip
    for prompt in ([1, 2, 3], [40, 41], [250]):
        found = drafter.propose(0, prompt, 8, 0.0, GREEDY).candidates
        assert len(found) == 8
        assert max(found) < 302
