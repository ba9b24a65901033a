"""How two peers agree on what to run: the opener offers, the joiner answers, the opener plans.

Nothing is loaded before.
"""

from __future__ import annotations

from typing import Any

from peerllm.protocol.errors import LayersMismatch, ModelMismatch
from peerllm.protocol.identity import INT8, LayerRange, ModelIdentity, check_chain, share_layers
from peerllm.protocol.messages import Answer, Offer, Plan
from peerllm.protocol.tensors import DTYPE_BYTES


def check_same_model(ours: ModelIdentity, theirs: ModelIdentity, name: str) -> None:
    """Raises ModelMismatch that says what differs."""
    if found := ours.differences(theirs):
        raise ModelMismatch(
            f"the two sides' copies of {name} are not the same model: they differ in {', '.join(found)}; "
            "both sides need the same files"
        )


def check_own_range(named: LayerRange, layers: int) -> None:
    """What is wrong with a named range whoever the other peer is, so that it is said before there is one.

    Raises:
        LayersMismatch: empty, beyond the model, the whole of it, or neither its beginning nor its end.
    """
    if len(named) == layers:
        raise LayersMismatch(f"layers {named} are the whole model; the other peer has to hold at least one layer")
    # The other peer would hold exactly the rest.
    rest = LayerRange(named.last, layers) if named.first == 0 else LayerRange(0, named.first)
    check_chain(sorted((named, rest)), layers)


def common_dtype(offered: tuple[str, ...], answered: tuple[str, ...]) -> str:
    """The opener's first choice that the joiner can compute in too. Raises ModelMismatch if there is none."""
    for dtype in offered:
        if dtype in answered:
            return dtype
    raise ModelMismatch(
        f"no dtype in common: one side computes in {', '.join(offered)}, the other in {', '.join(answered)}; "
        "set --dtype to one that both can"
    )


def make_plan(offer: Offer, answer: Answer) -> Plan:
    """The division of layers and the dtype.

    The opener holds layer 0 unless the named ranges say otherwise.

    Raises:
        ModelMismatch, LayersMismatch: in words for both users.
    """
    check_same_model(offer.identity, answer.identity, offer.name)
    dtype = common_dtype(offer.dtypes, answer.dtypes)
    is_opener_first = _is_opener_first(offer.layers, answer.layers)
    wanted = [offer.layers, answer.layers]
    free = [_room(each.free_bytes, each.identity, dtype) for each in (offer, answer)]
    if not is_opener_first:
        wanted.reverse()
        free.reverse()
    chain = share_layers(offer.identity.layers, wanted, free)
    if not is_opener_first:
        chain.reverse()
    return Plan(
        opener_layers=chain[0],
        joiner_layers=chain[1],
        dtype=dtype,
        context=min(offer.context, answer.context),
    )


def _room(free_bytes: int, identity: ModelIdentity, dtype: str) -> int:
    """Free memory, counted as if its weights were of `dtype`: int8 ones take a part of that."""
    return free_bytes * DTYPE_BYTES[dtype] if identity.weights == INT8 else free_bytes


def _is_opener_first(opener: LayerRange | None, joiner: LayerRange | None) -> bool:
    if opener is not None and joiner is not None:
        return opener.first <= joiner.first
    if opener is not None:
        return opener.first == 0
    return joiner is None or joiner.first != 0


def check_plan(plan: Plan, offer: Offer, answer: Answer) -> None:
    """What the opener planned is what this joiner agreed to. Raises LayersMismatch, ModelMismatch."""
    expected = make_plan(offer, answer)
    if (plan.opener_layers, plan.joiner_layers) != (expected.opener_layers, expected.joiner_layers):
        raise LayersMismatch(
            f"the other side planned layers {plan.joiner_layers} for this one; {expected.joiner_layers} follows from "
            "what both asked for"
        )
    if plan.dtype not in answer.dtypes or plan.context > answer.context:
        raise ModelMismatch("the other side planned a dtype or a context that this one cannot serve")


_CPU_DTYPES = ("float32", "bfloat16")


def offered_dtypes(machine: dict[str, Any], wanted: str | None, chosen: list[dict[str, Any]]) -> tuple[str, ...]:
    """What this machine computes in on the `chosen` devices, best first; `wanted` alone if the user named one.

    Raises:
        ModelMismatch: the machine cannot compute in it.
    """
    # The machine's list is that of its GPUs where it has any.
    is_cpu = all(device["device"] == "cpu" for device in chosen)
    able = _CPU_DTYPES if is_cpu else tuple(machine["dtypes"])
    if wanted is None:
        return able
    if wanted not in able:
        raise ModelMismatch(f"this machine cannot compute in {wanted}; it can in {', '.join(able)}")
    return (wanted,)


def chosen_devices(machine: dict[str, Any], wanted: tuple[str, ...]) -> list[dict[str, Any]]:
    """The devices that will hold the layers: those that the user named, else the machine's first.

    Raises:
        ModelMismatch: the machine has no such device.
    """
    devices: list[dict[str, Any]] = machine["devices"]
    return [_device(devices, name) for name in wanted] if wanted else devices[:1]


def free_bytes(chosen: list[dict[str, Any]]) -> int:
    """Of all of them; one that is named twice counts once."""
    return sum({device["device"]: int(device["free_bytes"]) for device in chosen}.values())


def _device(devices: list[dict[str, Any]], wanted: str) -> dict[str, Any]:
    for device in devices:
        if device["device"] == wanted or device["device"].partition(":")[0] == wanted:
            return device
    raise ModelMismatch(
        f"this machine has no device {wanted}; it has {', '.join(device['device'] for device in devices)}"
    )
