"""The decoder takes plain values and refuses everything else, quickly and without allocating."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import random
import struct
import time
import tracemalloc
from typing import Any

import cbor2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peerllm.protocol import cbor, limits
from peerllm.protocol.errors import ProtocolError
from peerllm.protocol.messages import Message, decode_message

MAX_SECONDS = 0.010
MAX_ALLOCATED = 4 * limits.MIB
FUZZ_INPUTS = int(os.environ.get("PEERLLM_FUZZ_INPUTS", "1000"))
"""`PEERLLM_FUZZ_INPUTS=1000000 pytest tests/protocol/test_cbor.py -k fuzz` is the long run."""

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 64), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=40)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8), inner, max_size=6),
    max_leaves=20,
)


def head(kind: int, argument: int) -> bytes:
    return bytes([kind << 5 | 26]) + struct.pack(">I", argument)


def attempt(data: bytes) -> Any:
    try:
        return cbor.decode(data)
    except ProtocolError as error:
        return error


def cost(data: bytes) -> tuple[float, int]:
    """Processor seconds (the best of five: others use this machine too) and peak bytes of decoding `data`."""
    seconds = math.inf
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            begun = time.thread_time()
            attempt(data)
            seconds = min(seconds, time.thread_time() - begun)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        attempt(data)
        return seconds, tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
        gc.enable()


@given(plain)
def test_what_is_encoded_comes_back(value: Any) -> None:
    assert cbor.decode(cbor.encode(value)) == value


@given(plain)
def test_another_implementation_reads_the_same(value: Any) -> None:
    data = cbor.encode(value)
    assert cbor.decode(data) == cbor2.loads(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "cut short"),
        (cbor.encode({"a": 1}) + b"\x00", "trailing"),
        (b"\x81" * 9 + b"\x00", "deep"),
        (b"\x81" * 100_000, "deep"),
        (b"\x9f\x00\xff", "indefinite"),
        (b"\xbf\x61a\x00\xff", "indefinite"),
        (b"\x5f\x41a\xff", "indefinite"),
        (b"\x7f\x61a\xff", "indefinite"),
        (b"\xff", "indefinite"),
        (b"\xa2\x61a\x00\x61a\x01", "twice"),
        (b"\xa1\x00\x00", "not text"),
        (b"\xa1\x41a\x00", "not text"),
        (b"\xa1\x80\x00", "not text"),
        (b"\xc1\x00", "tags"),
        (b"\xc2\x41\x01", "tags"),  # a bignum
        (b"\xd8\x1c\x80", "tags"),  # a shared value
        (b"\xd8\x1d\x00", "tags"),  # a reference to one
        (b"\xd9\x01\x00\x80", "tags"),  # string references
        (b"\xd9\xd9\xf7\x00", "tags"),  # self-described CBOR
        (b"\xf7", "simple"),
        (b"\xf0", "simple"),
        (b"\xf8\x14", "simple"),
        (b"\xf8\xff", "simple"),
        (b"\xf9\x7e\x00", "finite"),
        (b"\xf9\x7c\x00", "finite"),
        (b"\xfb" + struct.pack(">d", -math.inf), "finite"),
        (b"\x62\xff\xfe", "UTF-8"),
        (b"\x63\xed\xa0\x80", "UTF-8"),  # a surrogate
        (b"\x1c", "not CBOR"),
        (b"\x1b\x00", "cut short"),
        (b"\x45abc", "cut short"),
        (b"\x9b" + b"\xff" * 8, "cut short"),
        (b"\xbb" + b"\xff" * 8, "cut short"),
        (b"\x5b" + b"\xff" * 8, "cut short"),
    ],
)
def test_what_is_not_plain_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        cbor.decode(data)


def test_a_message_that_is_too_long_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match="at most 10"):
        cbor.decode(b"\xff" * 11, max_bytes=10)


def test_the_largest_messages_of_ours_are_taken() -> None:
    hidden = bytes(limits.MAX_HIDDEN_BYTES)
    assert (
        cbor.decode(cbor.encode({"hidden": hidden, "tokens": list(range(limits.MAX_LIST_ITEMS))}))["hidden"] == hidden
    )
    assert cbor.decode(cbor.encode({"prompt": "字" * 349_000}))


def test_a_long_text_counts_for_what_it_takes_once_it_is_there() -> None:
    texts = ["a" * 524_282 + "😀", *["a" * 20_000] * 20]  # four times as wide, and then one each
    assert cbor.decode(cbor.encode(texts)) == texts


def test_what_would_be_refused_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="values"):
        cbor.encode(list(range(limits.MAX_CBOR_ITEMS + 1)))
    with pytest.raises(ProtocolError, match="text"):
        cbor.encode("a" * 900_000 + "😀")


FULL = limits.MAX_MESSAGE_BYTES
COUNT = limits.MAX_CBOR_ITEMS - 1
HOSTILE = {
    "arrays": head(4, COUNT) + b"\x80" * COUNT,
    "more arrays than allowed": head(4, 1 << 20) + b"\x80" * (1 << 20),
    "maps": head(4, COUNT) + b"\xa0" * COUNT,
    "integers": head(4, COUNT) + (b"\x3b" + b"\xff" * 8) * COUNT,
    "keys": head(5, COUNT // 2) + b"".join(b"\x64%04x\x80" % each for each in range(COUNT // 2)),
    "nested arrays": b"\x81" * FULL,
    "arrays at every level": b"\x98\xff" * (FULL // 2),
    "a length without content": b"\x9b" + b"\xff" * 8 + b"\x80" * 1000,
    "ASCII": head(3, FULL - 5) + b"a" * (FULL - 5),
    "ASCII and an emoji": head(3, FULL - 5) + b"a" * (FULL - 9) + "😀".encode(),
    "less ASCII and an emoji": head(3, 786_432) + b"a" * 786_428 + "😀".encode(),
    "ASCII between wider characters": head(3, 786_432) + "Ā".encode() + b"a" * 786_426 + "😀".encode(),
    "the same, as much as is taken": head(3, 524_288) + "Ā".encode() + b"a" * 524_282 + "😀".encode(),
    "the same, beside maps": head(4, COUNT // 3)
    + b"\xa1\x60\xa0" * (COUNT // 3 - 1)
    + (head(3, 500_000) + "Ā".encode() + b"a" * 499_994 + "😀".encode()),
    "Latin after ASCII": head(3, FULL - 5) + b"a" * (FULL - 7) + "é".encode(),
    "Latin": head(3, FULL // 2 * 2 - 6) + "é".encode() * (FULL // 2 - 3),
    "Chinese": head(3, FULL // 3 * 3 - 6) + "字".encode() * (FULL // 3 - 2),
    "texts": head(4, 8000) + (head(3, 126) + "字".encode() * 42) * 8000,
    "texts, each with an emoji": head(4, 8000) + (head(3, 126) + b"a" * 122 + "😀".encode()) * 8000,
    "bytes": head(2, FULL - 5) + bytes(FULL - 5),
    "text that is not UTF-8": head(3, FULL - 5) + b"a" * (FULL - 6) + b"\xff",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_input_costs_neither_time_nor_memory(kind: str) -> None:
    seconds, allocated = cost(HOSTILE[kind][:FULL])
    assert seconds < MAX_SECONDS
    assert allocated < MAX_ALLOCATED


# --- Fuzzing: anything at all gives a value or a ProtocolError --------------------------------------------------------

pieces = (
    st.binary(max_size=12)
    | plain.map(cbor2.dumps)
    | st.sampled_from([b"\x81", b"\xa1\x61a", b"\xc1", b"\x9f", b"\xff", b"\xf9\x7e\x00", b"\x9b" + b"\xff" * 8])
    | st.builds(head, st.integers(0, 7), st.integers(0, 1 << 16))
)


@st.composite
def nearly_messages(draw: st.DrawFn) -> bytes:
    """A message of ours in which a field is something else, or a few bytes are others."""
    kind = draw(st.sampled_from(Message.__subclasses__()))
    value: dict[str, Any] = {"t": kind.TYPE}
    for name in kind.__dataclass_fields__:
        if draw(st.integers(0, 9)):
            value[name] = draw(plain)
    data = bytearray(cbor2.dumps(value))
    for _ in range(draw(st.integers(0, 3))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


def check_any(data: bytes) -> None:
    begun = time.thread_time()
    with contextlib.suppress(ProtocolError):
        decode_message(data)
    seconds = time.thread_time() - begun
    if seconds >= MAX_SECONDS:  # perhaps the machine was busy: it has to be slow every time
        assert cost(data)[0] < MAX_SECONDS


@settings(max_examples=FUZZ_INPUTS, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(pieces, max_size=8).map(b"".join) | nearly_messages())
def test_fuzz_gives_a_message_or_a_protocol_error(data: bytes) -> None:
    check_any(data)


@pytest.mark.parametrize("seed", range(4))
def test_fuzz_by_mutation_gives_a_message_or_a_protocol_error(seed: int) -> None:
    """Forty times as many inputs as hypothesis makes in the time: real messages with bytes changed, cut, doubled."""
    chance = random.Random(seed)
    corpus = [*(data[:400] for data in HOSTILE.values()), *(cbor.encode(each) for each in EXAMPLES)]
    peak_checked = 0
    for count in range(FUZZ_INPUTS * 10):
        data = bytearray(chance.choice(corpus))
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(data) + 1)
            match chance.randrange(4):
                case 0:
                    data[at : at + 1] = bytes([chance.randrange(256)])
                case 1:
                    del data[at : at + chance.randrange(1, 5)]
                case 2:
                    data[at:at] = chance.randbytes(chance.randrange(1, 9))
                case _:
                    data += data[at : at + 64]
        check_any(bytes(data))
        if count % 500 == 0:
            peak_checked += 1
            assert cost(bytes(data))[1] < MAX_ALLOCATED
    assert peak_checked


EXAMPLES: list[Any] = [
    {"t": 3, "opener_layers": {"first": 0, "last": 15}, "joiner_layers": {"first": 15, "last": 30}, "dtype": "float32"},
    {"t": 19, "session": 1, "round": 7, "start": 90, "candidates": list(range(64)), "hidden": bytes(300)},
    {"t": 20, "session": 1, "round": 7, "accepted": 3, "next_token": 41, "layers_us": 1500},
    {"t": 32, "request": 9, "body": {"messages": [{"role": "user", "content": "Hello, 世界 😀"}], "stop": ["\n"]}},
    {"t": 6, "code": "model_mismatch", "reason": "because", "param": None, "session": None},
]
