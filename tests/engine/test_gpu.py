"""On a CUDA device: graphs and fused kernels against the eager modules. Needs torch and transformers alone."""

from __future__ import annotations

import random
import time

import pytest
import torch

from peerllm.engine.choosing import Chooser, SamplingState
from peerllm.engine.drafting.graph import GraphDrafter
from peerllm.engine.engine import Engine
from peerllm.engine.module_slice import ModuleSlice
from peerllm.engine.runner import EagerRunner, GraphPool, GraphRunner
from peerllm.engine.running import make_static
from peerllm.engine.sampling import choose
from peerllm.engine.shapes import named_config, random_slice
from peerllm.protocol.identity import LayerRange
from peerllm.protocol.requests import Sampling
from tests import tiny_models
from tests.engine import cuts
from tests.engine.distances import Comparison, Distance, random_rewinds, rounded
from tests.engine.pairs import GREEDY, Pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
PATHS = ("graph", "fused")
REWINDS = 1000
# Of a logit: float32 through four layers, and a few rows of float16. Thousands of rows of half precision are held to
# `distances.Comparison`.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.25}
FAMILIES = {
    "llama": {"hidden": 256, "heads": 8, "kv_heads": 2},
    "qwen2": {"hidden": 256, "heads": 4, "kv_heads": 4},
    "qwen3": {"hidden": 512, "heads": 4, "kv_heads": 2},
    "mistral": {"hidden": 256, "heads": 4, "kv_heads": 1},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            root = tmp_path_factory.mktemp(family)
            folder = tiny_models.make_model(root / "target", family, is_tied=family == "qwen2", **FAMILIES[family])
            made[family] = folder, tiny_models.make_draft(root / "draft", folder, blur=0.01)
        return made[family]

    return get


def _engine(folder, layers, path, **options):
    return Engine.load(
        folder, layers, devices=("cuda:0",), path=path, **{"dtype": "float16", "context": 256, "slots": 4, **options}
    )


@torch.inference_mode()
def test_after_1000_random_rewinds_float32_logits_are_those_of_the_modules(folders):
    folder, _ = folders("llama")
    engines = [_engine(folder, LayerRange(0, 4), each, dtype="float32") for each in (*PATHS, "eager")]
    found = [Distance() for _ in PATHS]
    for *ours, theirs in random_rewinds(engines, REWINDS, seed=11):
        for distance, logits in zip(found, ours, strict=True):
            assert bool(torch.isfinite(logits).all())
            distance.add(logits, theirs)
    for path, distance in zip(PATHS, found, strict=True):
        print(
            f"{path} llama float32: largest difference {distance.worst:.4g}; gaps of other choices {distance.otherwise}"
        )
        assert distance.worst < TOLERANCE[torch.float32]
        assert all(gap < 2 * TOLERANCE[torch.float32] for gap in distance.otherwise)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "dtype", "weights"),
    [
        ("llama", "float16", "unquantised"),
        ("mistral", "bfloat16", "unquantised"),
        ("qwen2", "float16", "int8"),
        ("qwen2", "float16", "unquantised"),
        ("qwen3", "float16", "unquantised"),
    ],
)
def test_after_1000_random_rewinds_half_precision_is_as_near_to_float32_as_the_modules(folders, family, dtype, weights):
    folder, _ = folders(family)
    layers, kind = LayerRange(0, 4), getattr(torch, dtype)
    engines = [_engine(folder, layers, each, dtype=dtype, weights=weights) for each in (*PATHS, "eager")]
    engines.append(rounded(_engine(folder, layers, "eager", dtype="float32", weights=weights), kind))
    found = [Comparison(kind) for _ in PATHS]
    for *ours, eager, reference in random_rewinds(engines, REWINDS, seed=11):
        for comparison, logits in zip(found, ours, strict=True):
            comparison.add(logits, eager, reference)
    for path, comparison in zip(PATHS, found, strict=True):
        print(f"{path} {family} {dtype} {weights} {comparison.words()}")
    assert [comparison.faults() for comparison in found] == [[] for _ in PATHS]


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "float16"), ("mistral", "bfloat16"), ("qwen2", "float16"), ("qwen3", "float16")]
)
def test_after_1000_random_rewinds_a_drafts_step_is_as_near_to_float32_as_the_modules(folders, family, dtype):
    folder, _ = folders(family)
    layers, kind = LayerRange(0, 4), getattr(torch, dtype)
    engines = [_RowByRow(_engine(folder, layers, "eager", dtype=dtype)), _engine(folder, layers, "eager", dtype=dtype)]
    engines.append(rounded(_engine(folder, layers, "eager", dtype="float32"), kind))
    comparison = Comparison(kind)
    for path, eager, reference in random_rewinds(engines, REWINDS, seed=5):
        comparison.add(path, eager, reference)
    print(f"a draft's step {family} {dtype} {comparison.words()}")
    assert comparison.faults() == []


class _RowByRow:
    """What `random_rewinds` wants of an engine, by the one kernel that a draft's step is."""

    def __init__(self, engine):
        self.part, self._cache, self._runner = engine.part, engine._cache, self
        self._static = make_static(engine.part, engine._cache, "fused", max_rows=1, is_draft=True)
        assert self._static._one_kernel is not None, "this model is small, and this test is for a large GPU"
        self._step = GraphPool(engine.part.device).capture(lambda: self._static.forward(1))

    def forward(self, slot, tokens):
        self._static.slots.fill_(slot)
        rows = []
        for index, token in enumerate(tokens):
            self._cache.positions[slot] = self._cache.lengths[slot] + index
            self._static.tokens[0] = token
            self._step.replay()
            rows.append(self._static.hidden[0].clone())
        return torch.stack(rows)


@torch.inference_mode()
@pytest.mark.parametrize("path", ["fused"])
def test_a_row_is_the_same_bit_for_bit_alone_and_in_any_narrow_block(folders, path):
    for family, weights in (("llama", "unquantised"), ("qwen3", "unquantised"), ("qwen2", "int8")):
        engine = _engine(folders(family)[0], LayerRange(0, 4), path, weights=weights)
        rng = random.Random(2)
        inputs_of = engine.part.inputs_of
        prompt = [rng.randrange(300) for _ in range(100)]
        tokens = [rng.randrange(300) for _ in range(13)]
        alone = []
        engine._runner.forward(0, inputs_of(prompt))
        engine._cache.advance([0], 100)
        for token in tokens:
            alone.append(engine._runner.forward(0, inputs_of([token])).clone()[0])
            engine._cache.advance([0], 1)
        for count in (2, 3, 5, 9, 13):
            engine._cache.rewind(0, 100)
            block = engine._runner.forward(0, inputs_of(tokens[:count]))
            assert torch.equal(block, torch.stack(alone[:count])), count


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "how", [GREEDY, Sampling(temperature=0.8, seed=5), Sampling(temperature=0.8, top_p=0.9, seed=5)]
)
def test_speculative_text_is_that_of_plain_decoding(folders, path, how):
    folder, draft = folders("qwen3")
    options = {"devices": ("cuda:0",), "dtype": "float16", "context": 256, "path": path}
    pair = Pair.load(folder, draft=f"model:{draft}", **options)
    assert isinstance(pair.first.drafter, GraphDrafter)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    differ = accepted = drafted = 0
    for text in tiny_models.PROMPTS:
        prompt = tokenizer.encode(text)
        plain = pair.generate(prompt, 32, 0, how).tokens
        for length in (1, 4, 8):
            run = pair.generate(prompt, 32, length, how)
            differ += run.tokens != plain
            accepted, drafted = accepted + run.accepted, drafted + run.drafted
    print(f"{path}: {differ} of {3 * len(tiny_models.PROMPTS)} answers differ; {accepted} of {drafted} accepted")
    assert accepted > 0.2 * drafted
    # Fused narrow blocks are equal bit for bit. Graphs of the modules reduce in another order for each length.
    assert differ <= (0 if path == "fused" else 6)


@pytest.mark.parametrize("path", PATHS)
def test_identical_models_agree_always_and_the_first_token_after_a_rollback_is_right(folders, path):
    folder, _ = folders("llama")
    options = {"devices": ("cuda:0",), "dtype": "float32", "context": 256, "path": path}
    pair = Pair.load(folder, draft=f"model:{folder}", **options)
    plain = Pair.load(folder, **{**options, "path": "eager"})
    prompt = [5, 6, 7, 8, 9]
    expected = plain.generate(prompt, 100, 0).tokens
    for length in (1, 2, 5, 8, 64):
        run = pair.generate(prompt, 100, length)
        assert run.tokens == expected
        assert run.accepted >= 0.97 * run.drafted, length


@pytest.mark.parametrize("path", PATHS)
def test_identical_models_agree_always_with_top_p_too(folders, path):
    folder, _ = folders("llama")
    pair = Pair.load(folder, draft=f"model:{folder}", devices=("cuda:0",), dtype="float32", context=256, path=path)
    assert isinstance(pair.first.drafter, GraphDrafter)
    how = Sampling(temperature=1.0, top_p=0.9, seed=6)
    for length in (1, 4, 8):
        run = pair.generate([5, 6, 7, 8, 9], 100, length, how)
        assert run.accepted == run.drafted > 0, length


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["normal", "ties", "peaks"])
def test_fused_cuts_of_a_whole_vocabulary_are_the_references(kind):
    vocabulary = 152_064
    samplings = cuts.samplings(vocabulary)
    rows = len(samplings)
    logits = cuts.logits_of(kind, rows, vocabulary, seed=3).cuda()
    state = SamplingState.make(torch.arange(rows, device="cuda") * 7)
    for slot, each in enumerate(samplings):
        state.put(slot, each)
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    chooser = _fused_chooser(rows, vocabulary)
    choices, flags = (each.tolist() for each in chooser.choose(logits, slots, state))
    again = chooser.choose(logits, slots, state)[0].tolist()
    in_torch = Chooser(vocabulary=vocabulary, is_cutting=True).choose(logits, slots, state)[0].tolist()
    assert not any(flags) and choices == again
    near = 0
    for row, how in enumerate(samplings):
        expected = int(choose(logits[row : row + 1], how, torch.tensor([7 * row + 1], device="cuda")))
        if cuts.is_near(logits[row].cpu(), how, 7 * row + 1):
            near += 1
            print(f"{kind}: the last bits decide for {how}; {choices[row]}, {in_torch[row]} and {expected}")
        else:
            assert choices[row] == in_torch[row] == expected, how
    assert near <= 6


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["normal", "hot", "flat"])
@pytest.mark.parametrize(("vocabulary", "is_head_cut"), [(152_064, False), (49_152, False), (32_000, True)])
def test_fused_cuts_of_rows_without_peaks_are_the_references(vocabulary, is_head_cut, kind):
    """More tokens contend than are listed. Each row alone, all at once, and in a graph between other rows."""
    pairs = [(k, p) for k in (0, 400, 1000, 20_000) for p in (1.0, 0.999, 0.9, 0.3, 1e-4) if k or p < 1.0]
    samplings = [Sampling(temperature=1.0, top_k=k, top_p=p, seed=i << 33) for i, (k, p) in enumerate(pairs)]
    rows = len(samplings)
    ids = torch.arange(vocabulary, device="cuda") * 4 + 1 if is_head_cut else None
    logits = cuts.logits_of(kind, rows, vocabulary, seed=5).half().cuda()
    state = SamplingState.make(torch.arange(rows, device="cuda") * 7)
    for slot, each in enumerate(samplings):
        state.put(slot, each)
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    chooser = _fused_chooser(rows, vocabulary, tokens=ids)
    alone = [int(chooser.choose(logits[row:], slots[row : row + 1], state)[0]) for row in range(rows)]
    at_once = chooser.choose(logits, slots, state)[0]
    assert at_once.tolist() == alone
    static = logits.clone()
    graph = GraphPool(logits.device).capture(lambda: chooser.choose(static, slots, state))
    for _ in range(20):
        static.copy_(logits.flip(0))
        graph.replay()
        static.copy_(logits)
        graph.replay()
        assert at_once.tolist() == alone
    in_torch = Chooser(vocabulary=vocabulary, tokens=ids, is_cutting=True).choose(logits, slots, state)[0].tolist()
    differ = [how for how, ours, theirs in zip(samplings, alone, in_torch, strict=True) if ours != theirs]
    print(f"{kind}, {vocabulary} tokens: others are chosen for {differ}")
    # Where so many are left, one of them is always as near to a cut as the last bits.
    assert len(differ) <= 1


def _fused_chooser(max_rows, vocabulary, *, tokens=None):
    from peerllm.engine.fused import has_dependent_launch
    from peerllm.engine.fused.choosing import FusedChooser

    device = torch.device("cuda")
    return FusedChooser(
        max_rows=max_rows,
        columns=vocabulary,
        vocabulary=vocabulary,
        device=device,
        is_dependent=has_dependent_launch(device),
        tokens=tokens,
        is_cutting=True,
    )


@pytest.mark.parametrize("path", PATHS)
def test_two_sessions_interleaved_are_as_if_alone(folders, path):
    from tests.engine.pairs import Run

    folder, draft = folders("llama")
    pair = Pair.load(
        folder, draft=f"model:{draft}", devices=("cuda:0",), dtype="float16", context=256, path=path, slots=2
    )
    prompts = {1: [4, 5, 6, 7], 2: list(range(40, 70))}
    alone = {number: pair.generate(prompt, 40, 4, session=number).tokens for number, prompt in prompts.items()}
    tokens = {number: list(prompt) for number, prompt in prompts.items()}
    known = dict.fromkeys(prompts, 0)
    for number, prompt in prompts.items():
        pair.open(number, GREEDY, prompt)
    for _ in range(40):
        for number in prompts:
            if len(tokens[number]) - len(prompts[number]) < 40:
                before = len(tokens[number])
                pair.step(number, known[number], tokens[number], 4, Run([]))
                known[number] = before
    for number, prompt in prompts.items():
        assert tokens[number][len(prompt) :][:40] == alone[number]


@torch.inference_mode()
def test_memory_is_flat_over_10000_rounds():
    config = named_config("qwen2.5-tiny")
    part = random_slice(config, LayerRange(2, 4), dtype=torch.float16, device="cuda")
    part.prepare(512)
    cache = part.make_cache(slots=1, capacity=512)
    runner = GraphRunner(make_static(part, cache, "fused", max_rows=128))
    rng = random.Random(1)
    rows = torch.randn(65, part.shape.width, device="cuda").half()
    used = None
    for count in range(10_000):
        length = rng.choice([1, 5, 9, 65])
        cache.rewind(0, rng.randint(0, min(cache.lengths[0], 440)))
        runner.verify(0, rows[:length], [1] * (length - 1), cache.lengths[0], GREEDY)
        cache.advance([0], length)
        if count == 100:
            used = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == used


@torch.inference_mode()
@pytest.mark.parametrize("path", PATHS)
def test_a_cache_one_token_from_full_takes_that_token(folders, path):
    engines = [_engine(folders("llama")[0], LayerRange(0, 4), each, context=100) for each in (path, "eager")]
    tokens = [index * 3 % 300 for index in range(99)]
    out = []
    for engine in engines:
        engine._runner.forward(0, engine.part.inputs_of(tokens))
        engine._cache.advance([0], 99)
        out.append(engine.part.logits(engine._runner.forward(0, engine.part.inputs_of([7]))).float())
    assert float((out[0] - out[1]).abs().max()) < TOLERANCE[torch.float16]


@torch.inference_mode()
def test_the_graphs_of_modules_and_the_eager_modules_share_one_interface():
    part = random_slice(named_config("qwen2.5-tiny"), LayerRange(0, 2), dtype=torch.float16, device="cuda")
    part.prepare(256)
    cache = part.make_cache(slots=1, capacity=256)
    graph, eager = GraphRunner(ModuleSlice(part, cache, max_rows=128)), EagerRunner(part, cache)
    tokens = torch.arange(9, device="cuda")
    one = graph.forward(0, tokens).clone()
    cache.rewind(0, 0)
    assert float((eager.forward(0, tokens) - one).abs().max()) < TOLERANCE[torch.float16]


def test_a_killed_worker_leaves_nothing_on_the_device(folders):
    from tests.engine.worker_end import Worker

    def free():
        return torch.cuda.mem_get_info(0)[0]

    torch.cuda.synchronize()
    before = free()
    worker = Worker()
    try:
        worker.load(folders("llama")[0], (0, 4), devices=["cuda:0"], dtype="float16")
        assert free() < before - (64 << 20), "weights, graphs and CUDA's own"
        worker.process.kill()
        worker.process.wait(10)
    finally:
        worker.stop()
    deadline = time.monotonic() + 10
    while free() < before - (8 << 20) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert free() >= before - (8 << 20)
