"""Hidden states as bytes."""

import pytest
import torch

from peerllm.engine import codec
from peerllm.protocol.errors import NonFinite, ProtocolError
from peerllm.protocol.tensors import slice_rows, wire_bytes


def _hidden(rows: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 7).to(dtype)


@pytest.mark.parametrize("dtype", codec.DTYPES)
def test_exact_gives_back_every_bit(dtype):
    hidden = _hidden(5, 70, codec.DTYPES[dtype])
    data = codec.encode(hidden, "exact")
    assert len(data) == wire_bytes("exact", dtype, 5, 70)
    assert torch.equal(codec.decode(data, "exact", dtype, 5, 70), hidden)


@pytest.mark.parametrize("width", [64, 70, 128, 576])
def test_int8_is_within_half_a_step_of_each_groups_largest(width):
    hidden = _hidden(5, width)
    data = codec.encode(hidden, "int8")
    assert len(data) == wire_bytes("int8", "float32", 5, width)
    found = codec.decode(data, "int8", "float32", 5, width)
    for group in range(0, width, 64):
        part, largest = hidden[:, group : group + 64], hidden[:, group : group + 64].abs().amax(-1, keepdim=True)
        assert bool(((found[:, group : group + 64] - part).abs() <= largest / 127 * 0.501).all())


def test_int8_keeps_each_groups_largest_and_its_zeros():
    hidden = torch.zeros(2, 128)
    hidden[0, 3], hidden[1, 100] = -12.5, 3.0
    found = codec.decode(codec.encode(hidden, "int8"), "int8", "float32", 2, 128)
    assert torch.allclose(found, hidden)


def test_a_rows_code_is_the_same_in_any_block():
    hidden = _hidden(9, 576)
    whole = codec.encode(hidden, "int8")
    for row in range(9):
        assert slice_rows(whole, "int8", "float32", 9, 576, row, row + 1) == codec.encode(hidden[row : row + 1], "int8")


@pytest.mark.parametrize("name", ["exact", "int8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_sent(name, bad):
    hidden = _hidden(3, 64)
    hidden[1, 5] = bad
    with pytest.raises(NonFinite):
        codec.encode(hidden, name)


def test_what_is_not_finite_is_not_taken():
    hidden = _hidden(3, 64)
    hidden[1, 5] = float("nan")
    with pytest.raises(ProtocolError, match="not finite"):
        codec.decode(hidden.numpy().tobytes(), "exact", "float32", 3, 64)
    codes = bytes(3 * 64)
    for scale in (float("nan"), float("inf"), -1.0):
        scales = torch.tensor([1.0, scale, 1.0]).numpy().tobytes()
        with pytest.raises(ProtocolError, match="scales"):
            codec.decode(codes + scales, "int8", "float32", 3, 64)


def test_a_scale_that_overflows_the_dtype_is_refused():
    data = bytes([127] * 64) + torch.tensor([600.0]).numpy().tobytes()
    assert codec.decode(data, "int8", "float32", 1, 64)[0, 0] == 127 * 600.0
    with pytest.raises(ProtocolError, match="too large"):
        codec.decode(data, "int8", "float16", 1, 64)


@pytest.mark.parametrize("name", ["exact", "int8"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_wrong_length_is_refused(name, change):
    data = codec.encode(_hidden(3, 64), name) + b"\0"
    with pytest.raises(ProtocolError, match="bytes"):
        codec.decode(data[: len(data) - 1 + change], name, "float32", 3, 64)


def test_a_huge_claim_is_refused_before_anything_is_allocated():
    with pytest.raises(ProtocolError, match="bytes"):
        codec.decode(b"", "exact", "float32", 1 << 40, 1 << 20)


def test_unknown_codecs_and_dtypes_are_refused():
    with pytest.raises(ProtocolError):
        codec.encode(_hidden(1, 64), "gzip")
    with pytest.raises(ProtocolError):
        codec.decode(b"", "exact", "load", 0, 64)
