"""Hidden states as bytes: `exact` (elements of the dtype) and `int8` (absmax in groups of 64 within each row).

A row's code is a function of that row alone: a block's length never changes what the other side sees, which is what
makes speculation through the lossy codec lossless. The layout is in `protocol.tensors`.
"""

from __future__ import annotations

import torch

from peerllm.protocol.errors import NonFinite, ProtocolError
from peerllm.protocol.tensors import DTYPE_BYTES, INT8_GROUP, check_wire_bytes

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""The only way from a dtype's name to a dtype: a name is never looked up in torch."""

if set(DTYPES) != set(DTYPE_BYTES):
    raise ImportError("the codec and protocol.tensors disagree about the dtypes on the wire")

_LARGEST_CODE = 127.0


def encode(hidden: torch.Tensor, codec: str) -> bytes:
    """`hidden` `[rows, width]`, any device, as `protocol.tensors` lays it out.

    Raises:
        NonFinite: a value is NaN or infinite.
        ProtocolError: the codec is not known.
    """
    if codec == "exact":
        host = hidden.detach().to("cpu").contiguous()
        _refuse_non_finite(host)
        return _raw(host)
    if codec == "int8":
        codes, scales = quantise(hidden)
        host_codes, host_scales = codes.to("cpu"), scales.to("cpu")
        _refuse_non_finite(host_scales)
        return _raw(host_codes) + _raw(host_scales)
    raise ProtocolError(f"codec {codec[:32]!r} is not known")


def quantise(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes `[rows, groups * 64]` and float32 scales `[rows, groups]` of `hidden` `[rows, width]`.

    A group with a NaN or an infinity gets a scale that is not finite.
    """
    rows, width = hidden.shape
    groups = -(-width // INT8_GROUP)
    values = hidden.to(torch.float32)
    if width % INT8_GROUP:
        values = torch.nn.functional.pad(values, (0, groups * INT8_GROUP - width))
    values = values.reshape(rows, groups, INT8_GROUP)
    scales = values.abs().amax(dim=-1) / _LARGEST_CODE
    # A group of zeros divides by one; the absmax divides to 127 within rounding, hence no clamp beyond int8.
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales))
    codes = torch.nan_to_num((values / divisors[..., None]).round(), nan=0.0).clamp(-_LARGEST_CODE, _LARGEST_CODE)
    return codes.to(torch.int8).reshape(rows, groups * INT8_GROUP).contiguous(), scales.contiguous()


def dequantise(codes: torch.Tensor, scales: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """`[rows, width]` of `dtype` from what `quantise` gives."""
    rows, groups = scales.shape
    values = codes.reshape(rows, groups, INT8_GROUP).to(torch.float32) * scales[..., None]
    return values.reshape(rows, groups * INT8_GROUP)[:, :width].to(dtype)


def decode(
    data: bytes, codec: str, dtype: str, rows: int, width: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """`[rows, width]` hidden states of `dtype` on `device`, from a peer's bytes.

    Raises:
        ProtocolError: the length is not what rows and width need (checked before anything is allocated), or a value
            is not finite.
    """
    check_wire_bytes(data, codec, dtype, rows, width)
    if rows == 0:
        return torch.empty(0, width, dtype=DTYPES[dtype], device=device)
    if codec == "exact":
        hidden = torch.frombuffer(bytearray(data), dtype=DTYPES[dtype]).reshape(rows, width)
        _refuse_from_peer(hidden)
        return hidden.to(device)
    groups = -(-width // INT8_GROUP)
    buffer = bytearray(data)
    code_bytes = rows * groups * INT8_GROUP
    codes = torch.frombuffer(buffer, dtype=torch.int8, count=code_bytes).reshape(rows, groups * INT8_GROUP)
    scales = torch.frombuffer(buffer, dtype=torch.float32, offset=code_bytes).reshape(rows, groups)
    # Codes are at most 128 in size: a scale beyond this makes an infinity of a finite code in the target dtype.
    largest = torch.finfo(DTYPES[dtype]).max / 128.0
    if not bool(((scales >= 0) & (scales <= largest)).all()):
        raise ProtocolError("hidden states whose scales are not finite, negative or too large")
    return dequantise(codes.to(device), scales.to(device), width, DTYPES[dtype])


def _raw(tensor: torch.Tensor) -> bytes:
    if tensor.numel() == 0:
        return b""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def _refuse_non_finite(tensor: torch.Tensor) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise NonFinite("the layers gave hidden states that are not finite; the weights or the dtype do not fit")


def _refuse_from_peer(tensor: torch.Tensor) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise ProtocolError("hidden states that are not finite")
