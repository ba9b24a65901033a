"""Drafts with the target's embedding and a head of some of its tokens."""

from __future__ import annotations

import json

import pytest
import torch

from peerllm.engine.drafting.distilled import load_distilled
from peerllm.engine.drafting.graph import GraphDrafter
from peerllm.engine.drafting.model import ModelDrafter
from peerllm.engine.drafting.ngram import NgramDrafter
from peerllm.engine.engine import Engine
from peerllm.engine.memory import plan_draft
from peerllm.models import drafts, library
from peerllm.protocol.errors import DraftMismatch, ModelError, ModelNotFound, ModelUnsupported
from peerllm.protocol.identity import LayerRange
from peerllm.protocol.requests import Sampling
from tests import tiny_models
from tests.engine.cut_drafts import whole_draft
from tests.engine.pairs import GREEDY, Pair

SETTINGS = (GREEDY, Sampling(temperature=0.8, seed=1 << 45))


def silent(stage: str, fraction: float) -> None:
    pass


@pytest.mark.parametrize("how", SETTINGS, ids=["greedy", "sampling"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("path", ["eager", "graph"])
def test_a_draft_of_all_layers_is_right_exactly_where_its_head_has_the_token(tiny, tmp_path, family, path, how):
    """Untied and tied; the noise of a cut head is that of the target's tokens."""
    model = tiny(family)
    plain = Pair.load(model.folder, context=200)
    answers = [plain.generate(prompt, 16, 0, how).tokens for prompt in model.prompts[:2]]
    said = sorted({token for answer in answers for token in answer})
    tokens = [*said[::2], 299]
    draft = whole_draft(tmp_path / "draft", model.folder, sorted(set(tokens)))
    pair = Pair.load(model.folder, context=200, path=path, draft=f"model:{draft}")
    wrong = 0
    for prompt, answer in zip(model.prompts, answers, strict=False):
        run = pair.generate(prompt, 16, 3, how)
        assert run.tokens == answer
        for place, token in enumerate(answer[:-1]):
            pair.first.open(1, how)
            candidate = pair.first.drafter.propose(0, [*prompt, *answer[:place]], 1, 0.0, how).candidates[0]
            assert candidate in tokens
            # A token that the head lacks is never the candidate; one that it has always is.
            assert (candidate == token) == (token in tokens), (place, token)
            wrong += candidate != token
    assert wrong > 0


def test_the_graph_drafter_says_what_the_eager_one_says_with_the_same_probabilities(tiny, tmp_path):
    model = tiny("llama")
    draft = whole_draft(tmp_path / "draft", model.folder, list(range(0, 300, 3)))
    found = []
    for path in ("eager", "graph"):
        pair = Pair.load(model.folder, context=120, path=path, draft=f"model:{draft}")
        pair.open(1, SETTINGS[1], model.prompts[2])
        found.append(pair.first.draft_block(1, 0, model.prompts[2], 8))
    assert isinstance(pair.first.drafter, GraphDrafter)
    assert found[0].candidates == found[1].candidates
    assert found[0].probabilities == pytest.approx(found[1].probabilities, abs=1e-4)


def test_the_embedding_is_the_targets_own_memory(tiny, tmp_path):
    model = tiny("llama")
    draft = whole_draft(tmp_path / "draft", model.folder, list(range(100)))
    engine = Engine.load(model.folder, LayerRange(0, 2), context=64, draft=f"model:{draft}")
    small = engine.drafter._model
    assert small.embed.weight.data_ptr() == engine.part.embed.weight.data_ptr()
    alone = load_distilled(draft, model.folder, torch.float32, "cpu", progress=silent)
    assert torch.equal(alone.embed.weight, engine.part.embed.weight)
    assert alone.byte_count - small.byte_count == 304 * 64 * 4


def test_a_draft_for_another_target_is_refused_with_what_differs(tiny, tmp_path):
    draft = whole_draft(tmp_path / "draft", tiny("llama").folder, list(range(100)))
    with pytest.raises(DraftMismatch, match="configuration"):
        Engine.load(tiny("qwen3").folder, LayerRange(0, 2), draft=f"model:{draft}")
    other = tiny_models.make_model(tmp_path / "other", "llama", seed=5)
    with pytest.raises(DraftMismatch, match=r"the weights in model\.safetensors"):
        Engine.load(other, LayerRange(0, 2), draft=f"model:{draft}")
    renamed = tmp_path / "renamed"
    tiny_models.make_model(renamed, "llama")
    words = json.loads((renamed / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    first, second = (name for name in vocabulary if vocabulary[name] in (280, 281))
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (renamed / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(DraftMismatch, match="vocabulary"):
        Engine.load(renamed, LayerRange(0, 2), draft=f"model:{draft}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 99}, "format 99"),
        ({"tokens": [3, 2, 1]}, "not ascending"),
        ({"tokens": []}, "no tokens"),
        ({"target": None}, "no target"),
        ({"target": {"identity": {"config": 5}}}, "damaged"),
    ],
)
def test_a_damaged_draft_file_is_refused_before_anything_is_loaded(tiny, tmp_path, change, words):
    draft = whole_draft(tmp_path / "draft", tiny("llama").folder, list(range(100)))
    path = draft / drafts.DRAFT_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=words):
        drafts.check_draft(draft)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", {"hidden_size": 32}),
        ("config.json", {"intermediate_size": 64}),
        ("config.json", {"rope_theta": 5.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}),
        ("config.json", {"vocab_size": 10}),
        ("config.json", {"num_hidden_layers": 1}),
        ("config.json", {"num_hidden_layers": 9}),
        ("draft.json", {"tokens": [1, 2]}),
        ("draft.json", {"head": "target"}),
        ("draft.json", {"init_from": 5}),
    ],
)
def test_a_draft_whose_files_do_not_belong_together_is_refused_before_a_room_is_opened(tiny, tmp_path, file, change):
    draft = whole_draft(tmp_path / "draft", tiny("llama").folder, list(range(100)))
    path = draft / file
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises((ModelError, ModelUnsupported)):
        drafts.check_draft(draft)


def test_a_draft_that_lacks_a_tensor_or_its_folder_is_refused(tiny, tmp_path):
    from safetensors.torch import load_file, save_file

    draft = whole_draft(tmp_path / "draft", tiny("llama").folder, list(range(100)))
    drafts.check_draft(draft)
    tensors = load_file(str(draft / "model.safetensors"))
    del tensors[drafts.HEAD_ROWS]
    save_file(tensors, str(draft / "model.safetensors"))
    with pytest.raises(ModelError, match=r"draft\.head\.weight"):
        drafts.check_draft(draft)
    with pytest.raises(ModelNotFound):
        drafts.check_draft(tmp_path / "nowhere")


def test_a_draft_cannot_be_taken_for_a_whole_model(tiny, tmp_path):
    draft = whole_draft(tmp_path / "draft", tiny("llama").folder, list(range(100)))
    with pytest.raises(ModelUnsupported, match="--draft"):
        library.describe(str(draft))


def test_the_memory_plan_counts_a_cut_head_and_no_embedding(tiny, tmp_path):
    model = tiny("llama")
    plans = {}
    for count in (100, 200):
        draft = whole_draft(tmp_path / f"draft{count}", model.folder, list(range(count)))
        plans[count] = plan_draft(draft, dtype="float32", context=64, slots=1, is_gpu=False)
    assert plans[200] - plans[100] == 100 * 64 * 4
    whole = plan_draft(model.folder, dtype="float32", context=64, slots=1, is_gpu=False)
    assert whole - plans[100] == (2 * 304 - 100) * 64 * 4


def test_a_shipped_draft_is_found_by_its_models_name_and_only_when_it_is_whole(tiny, tmp_path, monkeypatch):
    from peerllm.cli.drafts import default_draft, short_name

    monkeypatch.setattr(drafts, "_SHIPPED", tmp_path)
    assert default_draft("tiny") == "ngram"
    draft = whole_draft(tmp_path / "tiny", tiny("llama").folder, list(range(100)))
    assert default_draft("tiny") == f"model:{draft}"
    assert short_name(default_draft("tiny")) == "model:tiny"
    (draft / "model.safetensors").unlink()
    assert default_draft("tiny") == "ngram"


def test_without_a_word_about_it_a_model_gets_the_shipped_draft_that_was_made_for_its_weights(
    tiny, tmp_path, monkeypatch
):
    from peerllm.engine.operations import Operations

    target = tiny("llama").folder
    monkeypatch.setattr(drafts, "_SHIPPED", tmp_path / "shipped")
    (tmp_path / "shipped").mkdir()
    draft = whole_draft(tmp_path / "shipped" / "somebody-elses-name", target, list(range(100)))
    other = tiny_models.make_model(tmp_path / "other", "llama", seed=7)
    assert drafts.shipped_for(target) == draft
    assert drafts.shipped_for(other) is None, "of the same shape, with other weights"
    operations = Operations(threads=1, progress=lambda *_: None)
    for folder, kind in ((target, ModelDrafter), (other, NgramDrafter)):
        load = {"folder": str(folder), "layers": [0, 2], "dtype": "float32", "codec": "exact", "context": 64}
        operations.perform("load", {**load, "draft": "auto"}, b"")
        assert isinstance(operations._need_engine().drafter, kind)
