"""Values from a peer or a user become dataclasses field by field, or an error that names the field."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerllm.protocol import fields
from peerllm.protocol.errors import ProtocolError
from peerllm.protocol.messages import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    count: int = fields.uint(7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str = fields.text(4)
    size: int = fields.uint(100, minimum=10, default=50)
    ratio: float = fields.real(0.0, 2.0, default=1.0)
    is_on: bool = fields.flag(default=False)
    kind: str = fields.choice(("a", "b"), default="a")
    data: bytes = fields.blob(3, default=b"")
    numbers: tuple[int, ...] = fields.uint_list(2, 9, default=())
    words: tuple[str, ...] = fields.text_list(2, 3, default=())
    extra: dict[str, Any] = fields.plain_map(2, default_factory=dict)
    inner: Inner | None = fields.optional(fields.nested(Inner))
    inners: tuple[Inner, ...] = fields.nested_list(Inner, 2, default=())


def outer(**values: Any) -> Outer:
    return fields.from_map(Outer, {"name": "x", **values})


def test_what_is_left_out_has_its_default() -> None:
    made = outer()
    assert (made.size, made.inner, made.numbers, made.extra) == (50, None, (), {})


def test_nested_values_are_built_and_taken_apart_again() -> None:
    made = outer(inner={"count": 1}, inners=[{"count": 2}, {"count": 3}], numbers=[1, 2])
    assert made.inners == (Inner(count=2), Inner(count=3))
    assert fields.from_map(Outer, fields.to_map(made)) == made


def test_keys_of_a_later_release_are_ignored() -> None:
    assert outer(novelty=[1, {"deep": True}]) == outer()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "abcde"),
        ("name", b"x"),
        ("name", None),
        ("size", 9),
        ("size", 101),
        ("size", True),
        ("size", 50.0),
        ("size", "50"),
        ("size", 10**400),
        ("ratio", math.nan),
        ("ratio", math.inf),
        ("ratio", 10**400),
        ("ratio", -(10**400)),
        ("ratio", True),
        ("ratio", "1"),
        ("is_on", 1),
        ("is_on", None),
        ("kind", "c"),
        ("kind", ["a"]),
        ("data", b"1234"),
        ("data", "123"),
        ("data", bytearray(b"1")),
        ("numbers", [1, 2, 3]),
        ("numbers", [10]),
        ("numbers", [True]),
        ("numbers", {"0": 1}),
        ("numbers", 7),
        ("words", ["abcd"]),
        ("words", "ab"),
        ("words", [b"a"]),
        ("extra", {"a": 1, "b": 2, "c": 3}),
        ("extra", [1]),
        ("inner", {"count": 8}),
        ("inner", {}),
        ("inner", 3),
        ("inners", [{"count": 1}] * 3),
        ("inners", [None]),
        ("inners", {"count": 1}),
    ],
)
def test_a_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ProtocolError, match=r"Outer\.|Inner"):
        outer(**{field: value})


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ProtocolError, match=r"Outer\.name is missing"):
        fields.from_map(Outer, {})


@pytest.mark.parametrize("value", [None, [], "text", 3, [("name", "x")]])
def test_what_is_no_map_is_refused(value: Any) -> None:
    with pytest.raises(ProtocolError, match="not a map"):
        fields.from_map(Outer, value)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KINDS: list[Any] = [Outer, *Message.__subclasses__()]


@given(st.data())
def test_anything_at_all_gives_an_instance_or_a_protocol_error(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    names = list(kind.__dataclass_fields__)
    value = data.draw(st.dictionaries(st.sampled_from(names) if names else st.text(max_size=3), json_like))
    try:
        made: Any = fields.from_map(kind, value)
    except ProtocolError:
        return
    assert type(made) is kind
