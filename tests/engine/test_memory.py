"""The memory plan: what a slice takes, said before it is loaded."""

from __future__ import annotations

import json

import pytest
import torch

from peerllm.engine import memory, workspace
from peerllm.engine.drafting.build import build_drafter
from peerllm.engine.engine import Engine
from peerllm.engine.operations import Operations
from peerllm.engine.plans import largest_context
from peerllm.engine.shapes import named_config
from peerllm.models.allowlist import check_folder
from peerllm.protocol.errors import EngineError, NotEnoughMemory, Overloaded
from peerllm.protocol.identity import LayerRange
from peerllm.protocol.requests import Sampling
from tests.engine.cut_drafts import whole_draft

GIB = 1 << 30
CARD = 8 * GIB - 400 * (1 << 20)
"""What a card of 8 GB has free with a desktop on it."""


def _folder(path, name):
    """A folder with a config and an empty weight file: a plan reads neither weights nor tokenizer."""
    path.mkdir()
    config = named_config(name).to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    (path / "model.safetensors").write_bytes(b"")
    return path


@pytest.fixture
def qwen(tmp_path):
    return _folder(tmp_path / "7b", "qwen2.5-7b"), _folder(tmp_path / "draft", "qwen2.5-0.5b")


def _plan(folder, layers, **options):
    defaults = {"dtype": "float16", "weights": "unquantised", "context": 4096, "slots": 1, "free": 0, "is_gpu": True}
    return memory.plan_slice(folder, layers, **{**defaults, **options})


def test_half_of_7b_the_draft_and_4k_of_context_take_under_9_5_gb(qwen):
    target, draft = qwen
    drafts = memory.plan_draft(draft, dtype="float16", context=4096, slots=1, is_gpu=True)
    plan = _plan(target, LayerRange(0, 14), draft=drafts, is_apart=True)
    print(plan.words())
    assert plan.total < 9.5e9


def test_a_gpu_does_not_hold_an_embedding_that_nothing_on_it_reads(qwen, tiny, tmp_path):
    """7B's is 1 GB, and a block needs a few rows. The first layers alone have it; a tied head is it; a draft that was
    made for the target reads it; on the CPU there is nothing to be gained."""
    shape = check_folder(qwen[0])
    gpu, cpu = torch.device("cuda:0"), torch.device("cpu")
    cut = whole_draft(tmp_path / "cut", tiny("llama").folder, list(range(100)))
    options = {"draft": f"model:{qwen[1]}", "draft_device": gpu}
    made_for_it = {"draft": f"model:{cut}", "draft_device": gpu}
    small = check_folder(qwen[1])
    assert memory.is_embedding_apart(shape, LayerRange(0, 14), gpu, **options)
    assert memory.is_embedding_apart(shape, LayerRange(0, 28), gpu, **options)
    assert memory.is_embedding_apart(small, LayerRange(0, 23), gpu, draft="none", draft_device=gpu)
    assert memory.is_embedding_apart(shape, LayerRange(0, 14), gpu, **made_for_it | {"draft_device": cpu})
    assert not memory.is_embedding_apart(small, LayerRange(0, 24), gpu, draft="none", draft_device=gpu)
    assert not memory.is_embedding_apart(shape, LayerRange(14, 28), gpu, **options)
    assert not memory.is_embedding_apart(shape, LayerRange(0, 14), gpu, **made_for_it)
    assert not memory.is_embedding_apart(shape, LayerRange(0, 14), cpu, **options)
    plans = [_plan(qwen[0], LayerRange(0, 14), is_apart=is_apart).weights for is_apart in (False, True)]
    assert plans[0] - plans[1] == 152064 * 3584 * 2


def test_with_int8_weights_an_8_gb_card_holds_them(qwen):
    target, draft = qwen
    drafts = memory.plan_draft(draft, dtype="float16", context=4096, slots=1, is_gpu=True)
    assert not _plan(target, LayerRange(0, 14), draft=drafts, free=CARD).fits
    assert _plan(target, LayerRange(0, 14), draft=drafts, free=CARD, weights="int8").fits
    assert _plan(target, LayerRange(14, 28), free=CARD, weights="int8").fits


def test_the_plan_of_weights_and_cache_is_what_an_engine_then_holds(tiny):
    folder = tiny("qwen2").folder
    for layers, weights in ((LayerRange(0, 2), "unquantised"), (LayerRange(1, 4), "int8")):
        engine = Engine.load(folder, layers, context=100, weights=weights)
        plan = _plan(folder, layers, dtype="float32", weights=weights, context=100, slots=4, is_gpu=False)
        assert plan.weights == engine.loaded.bytes["weights"]
        rotary = sum(each.nbytes for each in engine.part.rotary_table)
        assert engine.loaded.bytes["cache"] + rotary <= plan.cache <= 1.01 * (engine.loaded.bytes["cache"] + rotary)


def test_the_largest_context_is_the_largest_that_fits(qwen):
    def plans_at(context):
        return [(torch.device("cuda"), _plan(qwen[0], LayerRange(14, 28), free=CARD + 2 * GIB, context=context))]

    largest = largest_context(plans_at, 1 << 20)
    assert _plan(qwen[0], LayerRange(14, 28), free=CARD + 2 * GIB, context=largest).fits
    assert not _plan(qwen[0], LayerRange(14, 28), free=CARD + 2 * GIB, context=largest + 1).fits


def test_what_does_not_fit_is_refused_with_the_numbers_before_anything_is_read(tiny, monkeypatch):
    folder = tiny("llama").folder
    needed = _plan(folder, LayerRange(0, 4), dtype="float32", context=512, is_gpu=False).total
    monkeypatch.setattr(memory, "host_memory", lambda: (needed - 1, 1 << 40))
    monkeypatch.setattr("peerllm.engine.engine.load_weights", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(NotEnoughMemory, match=r"MiB are needed .* MiB are free; a context of \d+ would fit"):
        Engine.load(folder, LayerRange(0, 4), context=512)
    monkeypatch.setattr(memory, "host_memory", lambda: (needed // 2, 1 << 40))
    with pytest.raises(NotEnoughMemory, match="fewer layers"):
        Engine.load(folder, LayerRange(0, 4), context=512)


def test_without_a_wish_the_context_is_what_fits(tiny, monkeypatch):
    folder = tiny("llama").folder
    needed = _plan(folder, LayerRange(0, 4), dtype="float32", context=300, is_gpu=False).total
    monkeypatch.setattr(memory, "host_memory", lambda: (needed, 1 << 40))
    assert Engine.load(folder, LayerRange(0, 4)).loaded.context == 300


def _fake_gpus(monkeypatch, **free):
    """Devices of so many free bytes, `cuda_1=…`; whatever would be read from a file ends the loading."""

    class Read(Exception):
        pass

    def read(*_, **__):
        raise Read

    def free_memory(device):
        return free[str(device).replace(":", "_")]

    monkeypatch.setattr(memory, "free_memory", free_memory)
    monkeypatch.setattr(memory, "path_of", lambda shape, device, path: "eager" if device.type == "cpu" else "fused")
    monkeypatch.setattr("peerllm.engine.engine.load_weights", read)
    return Read


def _plans(folder, ranges, places, draft, on, **options):
    defaults = {"dtype": "float16", "weights": "unquantised", "slots": 2, "context": 512}
    devices = [torch.device(place) for place in places]
    layers = [LayerRange(*each) for each in ranges]
    plans = memory.plans_for(
        folder, layers, devices, draft=f"model:{draft}", draft_device=torch.device(on), **{**defaults, **options}
    )
    return {str(device): plan for device, plan in plans}


def test_a_draft_is_planned_on_its_own_device_or_beside_the_layers_that_are_there(qwen, monkeypatch):
    target, draft = qwen
    _fake_gpus(monkeypatch, cuda_0=16 * GIB, cuda_1=3 * GIB, cpu=5 * GIB)
    beside = _plans(target, [(0, 14)], ["cuda:0"], draft, "cuda:0")
    assert list(beside) == ["cuda:0"] and beside["cuda:0"].draft > 0
    for place, free in (("cuda:1", 3 * GIB), ("cpu", 5 * GIB)):
        apart = _plans(target, [(0, 14)], ["cuda:0"], draft, place)
        assert list(apart) == ["cuda:0", place] and apart["cuda:0"].draft == 0
        assert (apart[place].free, apart[place].context) == (free, 512)
        assert apart["cuda:0"].total + beside["cuda:0"].draft == beside["cuda:0"].total
    # What a process takes of a GPU is counted on each, once.
    apart = _plans(target, [(0, 14)], ["cuda:0"], draft, "cuda:1")["cuda:1"]
    assert apart.total - beside["cuda:0"].draft == workspace.CUDA_CONTEXT_BYTES
    spread = _plans(target, [(0, 7), (7, 14)], ["cuda:0", "cuda:1"], draft, "cuda:1")
    assert [(place, plan.draft > 0) for place, plan in spread.items()] == [("cuda:0", False), ("cuda:1", True)]


def test_a_device_that_is_named_twice_holds_both_parts_and_one_draft(qwen, monkeypatch):
    target, draft = qwen
    _fake_gpus(monkeypatch, cuda_0=16 * GIB)
    parts = memory.plans_for(
        target, [LayerRange(0, 7), LayerRange(7, 14)], [torch.device("cuda:0")] * 2, draft=f"model:{draft}",
        draft_device=torch.device("cuda:0"), dtype="float16", weights="unquantised", slots=2, context=512,
    )  # fmt: skip
    (_, first), (_, second) = parts
    assert first.draft > 0 and second.draft == 0
    assert second.free == 16 * GIB - first.total


def test_int8_weights_need_room_to_be_widened_in(qwen):
    spaces = [
        workspace.workspace_bytes(
            check_folder(qwen[0]),
            LayerRange(0, 14),
            "float16",
            positions=4161,
            path="fused",
            is_gpu=True,
            weights=weights,
        )
        for weights in ("", "int8")
    ]
    assert spaces[1] - spaces[0] > 250 << 20  # gate and up of 7B in float16


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_without_a_draft_model_its_device_has_no_plan(qwen, draft):
    plans = memory.plans_for(
        qwen[0], [LayerRange(0, 14)], [torch.device("cpu")], draft=draft, draft_device=torch.device("cuda:1"),
        dtype="float16", weights="unquantised", slots=2, context=512,
    )  # fmt: skip
    assert [str(device) for device, _ in plans] == ["cpu"]


def test_the_cpu_has_one_name(tiny):
    folder = tiny("llama").folder
    assert list(_plans(folder, [(0, 2)], ["cpu"], folder, "cpu:0", dtype="float32")) == ["cpu"]


def test_a_draft_alone_that_does_not_fit_is_refused_with_its_devices_numbers_before_anything_is_read(tiny, monkeypatch):
    folder = tiny("llama").folder
    options = {"devices": ("cuda:0",), "draft_device": "cuda:1", "draft": f"model:{folder}"}
    _fake_gpus(monkeypatch, cuda_0=GIB, cuda_1=GIB)
    needed = _plans(folder, [(0, 2)], ["cuda:0"], folder, "cuda:1", dtype="float32")["cuda:1"].total
    _fake_gpus(monkeypatch, cuda_0=GIB, cuda_1=needed - 1)
    words = r"cuda:1: \d+ MiB are needed for the draft model \(weights .* MiB are free; a context of 511 would fit"
    with pytest.raises(NotEnoughMemory, match=words):
        Engine.load(folder, LayerRange(0, 2), context=512, **options)
    _fake_gpus(monkeypatch, cuda_0=GIB, cuda_1=needed // 2)
    with pytest.raises(NotEnoughMemory, match=r"cuda:1: .*; draft on another device, or with a smaller model"):
        Engine.load(folder, LayerRange(0, 2), context=512, **options)
    # The slice of a peer that does not draft needs nothing there.
    read = _fake_gpus(monkeypatch, cuda_0=GIB, cuda_1=1)
    with pytest.raises(read):
        Engine.load(folder, LayerRange(2, 4), context=512, **options)


def test_without_a_wish_the_context_is_what_fits_on_the_drafts_device_too(tiny, monkeypatch):
    folder = tiny("llama").folder
    options = {"devices": ("cuda:0",), "draft_device": "cuda:1", "draft": f"model:{folder}"}
    _fake_gpus(monkeypatch, cuda_0=GIB, cuda_1=GIB)
    needed = _plans(folder, [(0, 2)], ["cuda:0"], folder, "cuda:1", dtype="float32", context=300)["cuda:1"].total
    read = _fake_gpus(monkeypatch, cuda_0=GIB, cuda_1=needed)
    for context in (None, 300):
        with pytest.raises(read):
            Engine.load(folder, LayerRange(0, 2), context=context, **options)
    with pytest.raises(NotEnoughMemory):
        Engine.load(folder, LayerRange(0, 2), context=301, **options)


def test_the_plan_of_a_draft_alone_is_what_its_drafter_then_holds(tiny, tmp_path):
    """A cut draft too: away from the target's embedding it has one of its own."""
    for family in ("llama", "qwen2"):
        target = tiny(family).folder
        cut = whole_draft(tmp_path / family, target, list(range(100)))
        for draft in (target, cut):
            plan = memory.plan_draft_alone(draft, dtype="float32", context=100, slots=4, free=0, is_gpu=False)
            drafter = build_drafter(
                f"model:{draft}", target, vocabulary=304, slots=4, context=100, dtype=torch.float32, device="cpu",
                path="eager", progress=lambda stage, fraction: None,
            )  # fmt: skip
            rotary = sum(each.nbytes for each in drafter._model.rotary_table)
            held = drafter.byte_count + rotary
            assert held <= plan.weights + plan.cache <= 1.01 * held


def test_a_cut_draft_beside_later_layers_has_an_embedding_of_its_own(tiny, tmp_path, monkeypatch):
    """The target's is on the device of its first layers."""
    target = tiny("llama").folder
    cut = whole_draft(tmp_path / "cut", target, list(range(100)))
    _fake_gpus(monkeypatch, cuda_0=GIB, cuda_1=GIB)
    both = [(0, 1), (1, 2)], ["cuda:0", "cuda:1"]
    with_the_first = _plans(target, *both, cut, "cuda:0", dtype="float32")["cuda:0"].draft
    with_the_second = _plans(target, *both, cut, "cuda:1", dtype="float32")["cuda:1"].draft
    assert with_the_second - with_the_first == 304 * 64 * 4


def _card(monkeypatch, free):
    _fake_gpus(monkeypatch, cuda_0=free)
    return {"dtype": "float16", "devices": ("cuda:0",), "weights": "int8"}


def test_beside_a_draft_the_context_is_the_largest_too(qwen, monkeypatch):
    """Its caches end where the slice's end: they are not counted for the context that the model was made for."""
    target, draft = qwen
    card = _card(monkeypatch, CARD - GIB) | {"draft": f"model:{draft}"}
    largest = memory.plan_load(target, LayerRange(0, 14), **card).context
    assert 4096 < largest < 32768
    memory.plan_load(target, LayerRange(0, 14), context=largest, **card)
    with pytest.raises(NotEnoughMemory, match=f"a context of {largest} would fit"):
        memory.plan_load(target, LayerRange(0, 14), context=largest + 1, **card)


def test_a_context_that_is_chosen_early_leaves_room_and_is_a_round_number(qwen, monkeypatch):
    card = _card(monkeypatch, CARD - GIB)
    late = memory.plan_load(qwen[0], LayerRange(14, 28), **card).context
    early = memory.plan_load(qwen[0], LayerRange(14, 28), **card, is_early=True)
    assert early.context < late and early.context % 256 == 0
    assert early.devices[0][1].total < (CARD - GIB) * 31 // 32
    # Up to a wish, and no further.
    wish = {"context": 1000, "is_context_named": False, "is_early": True}
    assert memory.plan_load(qwen[0], LayerRange(14, 28), **card, **wish).context == 1000
    with pytest.raises(NotEnoughMemory):
        memory.plan_load(qwen[0], LayerRange(14, 28), **card, context=late + 1, is_early=True)
    assert memory.plan_load(qwen[0], LayerRange(14, 28), **card, context=late, is_early=True).context == late


def test_a_context_too_small_to_be_of_use_is_refused_unless_it_was_named(qwen, monkeypatch):
    layers = LayerRange(14, 28)
    needed = _plan(qwen[0], layers, weights="int8", context=100, slots=2).total
    card = _card(monkeypatch, needed)
    with pytest.raises(NotEnoughMemory, match=r"keys and values of 256 positions .* a context of 100 would fit"):
        memory.plan_load(qwen[0], layers, **card)
    assert memory.plan_load(qwen[0], layers, **card, context=100).context == 100


def test_a_plan_needs_the_configuration_alone(qwen, monkeypatch):
    (qwen[0] / "model.safetensors").unlink()
    card = _card(monkeypatch, CARD)
    assert memory.plan_load(qwen[0], LayerRange(14, 28), **card, context=512).context == 512


@pytest.mark.parametrize("border", [1, 4, 6, 9, 13])
@pytest.mark.parametrize("on", ["cuda:0", "cuda:1"])
def test_where_one_border_alone_lets_it_fit_it_is_found(qwen, monkeypatch, border, on):
    """Layers are shared by free memory, which knows neither the draft nor the head."""
    options = {"dtype": "float16", "draft": f"model:{qwen[1]}", "context": 512}
    ranges = [(0, border), (border, 14)]
    _fake_gpus(monkeypatch, cuda_0=0, cuda_1=0)
    needed = _plans(qwen[0], ranges, ["cuda:0", "cuda:1"], qwen[1], on)
    _fake_gpus(monkeypatch, cuda_0=needed["cuda:0"].total, cuda_1=needed["cuda:1"].total)
    options |= {"devices": ("cuda:0", "cuda:1"), "draft_device": on}
    plan = memory.plan_load(qwen[0], LayerRange(0, 14), **options)
    assert [str(each) for each in plan.ranges] == [f"0:{border}", f"{border}:14"] and plan.context == 512
    with pytest.raises(NotEnoughMemory):
        memory.plan_load(qwen[0], LayerRange(0, 14), **options | {"context": 513})
    assert memory.plan_load(qwen[0], LayerRange(0, 14), **options, is_context_named=False).context == 512


def test_over_three_devices_borders_move_together(qwen, monkeypatch):
    """The first is too full, the second has no room for what it gives up, the third has."""
    ranges, places = [(0, 3), (3, 8), (8, 14)], ["cuda:0", "cuda:1", "cuda:2"]
    _fake_gpus(monkeypatch, cuda_0=0, cuda_1=0, cuda_2=0)
    needed = _plans(qwen[0], ranges, places, qwen[1], "cuda:0")
    _fake_gpus(monkeypatch, **{name.replace(":", "_"): plan.total for name, plan in needed.items()})
    options = {"dtype": "float16", "devices": tuple(places), "draft": f"model:{qwen[1]}", "context": 512}
    plan = memory.plan_load(qwen[0], LayerRange(0, 14), **options)
    assert [str(each) for each in plan.ranges] == ["0:3", "3:8", "8:14"]


def test_a_cpu_holds_as_many_sequences_as_fit(tiny, monkeypatch):
    """All of a cache is allocated at once: where four do not fit, fewer do, and the context is one sequence's."""
    folder = tiny("llama").folder
    needed = [
        _plan(folder, LayerRange(0, 4), dtype="float32", context=512, is_gpu=False, slots=each).total
        for each in (1, 2, 3, 4)
    ]
    for slots, free in ((1, needed[0]), (1, needed[1] - 1), (2, needed[1]), (4, needed[3]), (4, 1 << 40)):
        monkeypatch.setattr(memory, "host_memory", lambda free=free: (free, 1 << 40))
        engine = Engine.load(folder, LayerRange(0, 4))
        assert (engine.loaded.context, len(engine._free)) == (512, slots)
    monkeypatch.setattr(memory, "host_memory", lambda: (needed[0], 1 << 40))
    engine = Engine.load(folder, LayerRange(0, 4))
    engine.open(1, Sampling())
    with pytest.raises(Overloaded, match="a smaller context makes room for more"):
        engine.open(2, Sampling())


def test_a_device_that_its_first_part_fills_has_no_room_for_the_second(qwen, monkeypatch):
    half = _plan(qwen[0], LayerRange(14, 21), slots=2, context=512).total
    _fake_gpus(monkeypatch, cuda_0=half)
    with pytest.raises(NotEnoughMemory):
        memory.plan_load(qwen[0], LayerRange(14, 28), dtype="float16", devices=("cuda:0", "cuda:0"), context=512)


def test_the_worker_plans_as_it_loads(tiny, monkeypatch):
    """With what it holds given up first, and the draft that it would find."""
    folder = str(tiny("llama").folder)
    operations = Operations(threads=None, progress=lambda *_: None)
    asked = {"folder": folder, "layers": [0, 4], "dtype": "float32", "codec": "exact", "draft": "auto"}
    operations.perform("load", {**asked, "context": 64}, b"")
    monkeypatch.setattr("peerllm.engine.operations.shipped_for", lambda target, progress: tiny("llama").draft)
    answer, _ = operations.perform("plan", {**asked, "context": 400}, b"")
    assert answer["context"] == 400
    (words,) = answer["words"]
    assert words.startswith("cpu: ") and "keys and values of 400 positions" in words and "draft model" in words
    with pytest.raises(EngineError, match="no model is loaded"):
        operations.perform("tokenize", {"prompt": "x"}, b"")
    needed = _plan(folder, LayerRange(0, 4), dtype="float32", context=511, is_gpu=False).total
    monkeypatch.setattr(memory, "host_memory", lambda: (needed, 1 << 40))
    with pytest.raises(NotEnoughMemory):
        operations.perform("plan", {**asked, "draft": "none", "context": 512, "is_context_named": True}, b"")
    monkeypatch.setattr(memory, "host_memory", lambda: (needed * 32 // 31, 1 << 40))
    answer, _ = operations.perform("plan", {**asked, "draft": "none", "context": 512}, b"")
    assert answer["context"] == 256
