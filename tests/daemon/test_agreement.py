from dataclasses import replace

import pytest

from peerllm.daemon.agreement import check_own_range, check_plan, chosen_devices, free_bytes, make_plan, offered_dtypes
from peerllm.protocol.errors import LayersMismatch, ModelMismatch, PeerllmError
from peerllm.protocol.identity import LayerRange, ModelIdentity
from peerllm.protocol.messages import Answer, Offer

IDENTITY = ModelIdentity(config="c", vocabulary="v", tensors="t", layers=30, files={"model.safetensors": "a"})


def offer(**changes: object) -> Offer:
    values: dict[str, object] = {
        "name": "tiny",
        "identity": IDENTITY,
        "codec": "exact",
        "dtypes": ("float32",),
        "free_bytes": 100,
        "context": 512,
    }
    return Offer(**(values | changes))  # type: ignore[arg-type]


def answer(**changes: object) -> Answer:
    values: dict[str, object] = {"identity": IDENTITY, "dtypes": ("float32",), "free_bytes": 100, "context": 256}
    return Answer(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("opener", "joiner", "free", "expected"),
    [
        (None, None, (100, 100), ("0:15", "15:30")),
        (None, None, (100, 200), ("0:10", "10:30")),
        (None, None, (10**12, 1), ("0:29", "29:30")),
        (None, None, (0, 0), ("0:15", "15:30")),
        ("0:12", None, (100, 100), ("0:12", "12:30")),
        (None, "20:30", (100, 100), ("0:20", "20:30")),
        ("20:30", None, (100, 100), ("20:30", "0:20")),
        (None, "0:12", (100, 100), ("12:30", "0:12")),
        ("18:30", "0:18", (100, 100), ("18:30", "0:18")),
    ],
)
def test_layers_are_shared_as_named_or_by_free_memory(
    opener: str | None, joiner: str | None, free: tuple[int, int], expected: tuple[str, str]
) -> None:
    plan = make_plan(
        offer(layers=opener and LayerRange.parse(opener), free_bytes=free[0]),
        answer(layers=joiner and LayerRange.parse(joiner), free_bytes=free[1]),
    )
    assert (str(plan.opener_layers), str(plan.joiner_layers)) == expected
    assert plan.context == 256


@pytest.mark.parametrize(
    ("opener", "joiner", "why"),
    [
        ("0:20", "15:30", "15:20 are held twice"),
        ("0:10", "15:30", "10:15 are held by nobody"),
        ("0:15", "15:29", "29:30 are held by nobody"),
        ("5:30", None, "are held by nobody|are empty"),
        ("0:30", None, "empty"),
        ("0:0", "0:30", "empty"),
        ("0:15", "15:31", "beyond the model"),
        ("3:9", None, "9:30 are held by nobody"),
    ],
)
def test_ranges_that_overlap_or_leave_a_gap_are_refused_in_words(opener: str, joiner: str | None, why: str) -> None:
    if opener == "5:30":
        plan = make_plan(offer(layers=LayerRange.parse(opener)), answer())
        assert str(plan.joiner_layers) == "0:5"
        return
    with pytest.raises(LayersMismatch, match=why):
        make_plan(offer(layers=LayerRange.parse(opener)), answer(layers=joiner and LayerRange.parse(joiner)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config": "x"}, "configuration"),
        ({"vocabulary": "x"}, "vocabulary"),
        ({"tensors": "x"}, "tensors"),
        ({"files": {"model.safetensors": "b"}}, "the weights in model.safetensors"),
    ],
)
def test_another_model_is_refused_and_what_differs_is_named(change: dict[str, object], words: str) -> None:
    with pytest.raises(ModelMismatch, match=words):
        make_plan(offer(), answer(identity=replace(IDENTITY, **change)))  # type: ignore[arg-type]


def test_int8_weights_may_differ_and_let_a_peer_hold_more_layers() -> None:
    small = replace(IDENTITY, weights="int8")
    plan = make_plan(offer(dtypes=("float16",)), answer(identity=small, dtypes=("float16",), free_bytes=100))
    assert (str(plan.opener_layers), str(plan.joiner_layers)) == ("0:10", "10:30")


def test_a_peer_that_holds_other_files_compares_what_both_know() -> None:
    other = replace(IDENTITY, files={"model-00002.safetensors": "z"})
    assert make_plan(offer(), answer(identity=other)).dtype == "float32"


def test_the_dtype_is_the_openers_best_that_both_compute_in() -> None:
    plan = make_plan(offer(dtypes=("bfloat16", "float16", "float32")), answer(dtypes=("float16", "float32")))
    assert plan.dtype == "float16"
    with pytest.raises(ModelMismatch, match="no dtype in common"):
        make_plan(offer(dtypes=("bfloat16",)), answer(dtypes=("float16",)))


def test_a_plan_that_does_not_follow_from_what_was_said_is_refused() -> None:
    plan = make_plan(offer(), answer())
    check_plan(plan, offer(), answer())
    greedy = replace(plan, opener_layers=LayerRange(0, 1), joiner_layers=LayerRange(1, 30))
    with pytest.raises(LayersMismatch, match="planned layers 1:30"):
        check_plan(greedy, offer(), answer())
    with pytest.raises(ModelMismatch):
        check_plan(replace(plan, context=512), offer(), answer())


def test_a_dtype_or_device_that_the_machine_lacks_is_refused_with_what_it_has() -> None:
    machine = {"dtypes": ["float16", "float32"], "devices": [{"device": "cuda:0"}, {"device": "cpu"}]}
    gpu, cpu = ([each] for each in machine["devices"])
    assert offered_dtypes(machine, None, gpu) == ("float16", "float32")
    assert offered_dtypes(machine, None, cpu) == ("float32", "bfloat16"), "a GPU that is not used has no say"
    assert chosen_devices(machine, ("cpu",)) == [{"device": "cpu"}]
    assert chosen_devices(machine, ()) == [{"device": "cuda:0"}]
    with pytest.raises(PeerllmError, match="float16, float32"):
        offered_dtypes(machine, "bfloat16", gpu)
    with pytest.raises(PeerllmError, match="cuda:0, cpu"):
        chosen_devices(machine, ("cuda:0", "cuda:3"))


def test_several_devices_are_free_together_and_one_named_twice_once() -> None:
    devices = [{"device": "cuda:0", "free_bytes": 8}, {"device": "cuda:1", "free_bytes": 4}]
    assert free_bytes(chosen_devices({"devices": devices}, ("cuda:0", "cuda:1"))) == 12
    assert free_bytes(chosen_devices({"devices": devices}, ("cuda:1", "cuda:1"))) == 4


@pytest.mark.parametrize("named", ["0:12", "12:30", "0:29", "29:30"])
def test_a_range_at_either_end_can_work(named: str) -> None:
    check_own_range(LayerRange.parse(named), 30)


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("0:30", "the whole model"),
        ("0:31", "beyond the model"),
        ("5:5", "empty"),
        ("0:0", "empty"),
        ("5:10", "held by nobody"),
        ("40:50", "beyond the model"),
        ("12:3", "empty"),
    ],
)
def test_a_range_that_no_partner_could_complete_is_refused_before_there_is_one(named: str, why: str) -> None:
    with pytest.raises(LayersMismatch, match=why):
        check_own_range(LayerRange.parse(named), 30)
