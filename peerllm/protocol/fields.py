"""Field by field validation of dataclasses that come from a peer or a user.

A field is declared with its bound (`size: int = uint(100)`); `from_map` builds the dataclass from a decoded map and
raises ProtocolError that names the field. Unknown keys are ignored, so that releases may differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from peerllm.protocol.errors import ProtocolError

T = TypeVar("T")
Check = Callable[[Any], Any]
"""Takes the decoded value, gives the field's value, raises ValueError with the reason."""

_MISSING = dataclasses.MISSING


def checked(check: Check, **options: Any) -> Any:
    """A dataclass field with a check of its own; `default=` or `default_factory=` make it optional on the wire."""
    return dataclasses.field(metadata={"check": check}, **options)


def uint(maximum: int = (1 << 64) - 1, *, minimum: int = 0, **options: Any) -> Any:
    def check(value: Any) -> int:
        if type(value) is not int or not minimum <= value <= maximum:
            raise ValueError(f"not a whole number from {minimum} to {maximum}")
        return value

    return checked(check, **options)


def real(minimum: float, maximum: float, **options: Any) -> Any:
    def check(value: Any) -> float:
        # A comparison with NaN is false; with an integer of any size it is exact, and nothing overflows.
        if type(value) not in (int, float) or not minimum <= value <= maximum:
            raise ValueError(f"not a number from {minimum} to {maximum}")
        return float(value)

    return checked(check, **options)


def flag(**options: Any) -> Any:
    def check(value: Any) -> bool:
        if type(value) is not bool:
            raise ValueError("not true or false")
        return value

    return checked(check, **options)


def text_check(max_chars: int) -> Check:
    def check(value: Any) -> str:
        if type(value) is not str or len(value) > max_chars:
            raise ValueError(f"not text of at most {max_chars} characters")
        return value

    return check


def text(max_chars: int, **options: Any) -> Any:
    return checked(text_check(max_chars), **options)


def choice(allowed: tuple[str, ...], **options: Any) -> Any:
    def check(value: Any) -> str:
        if type(value) is not str or value not in allowed:
            raise ValueError(f"not one of {', '.join(allowed)}")
        return value

    return checked(check, **options)


def blob(max_bytes: int, **options: Any) -> Any:
    def check(value: Any) -> bytes:
        if type(value) is not bytes or len(value) > max_bytes:
            raise ValueError(f"not bytes, {max_bytes} at most")
        return value

    return checked(check, **options)


def uint_list(max_items: int, maximum: int, **options: Any) -> Any:
    def check(value: Any) -> tuple[int, ...]:
        if type(value) not in (list, tuple) or len(value) > max_items:
            raise ValueError(f"not a list of at most {max_items} items")
        if not all(type(item) is int and 0 <= item <= maximum for item in value):
            raise ValueError(f"an item is not a whole number from 0 to {maximum}")
        return tuple(value)

    return checked(check, **options)


def text_list(max_items: int, max_chars: int, **options: Any) -> Any:
    one = text_check(max_chars)

    def check(value: Any) -> tuple[str, ...]:
        if type(value) not in (list, tuple) or len(value) > max_items:
            raise ValueError(f"not a list of at most {max_items} texts")
        return tuple(one(item) for item in value)

    return checked(check, **options)


def plain_map(max_items: int = 256, **options: Any) -> Any:
    """A map whose content its reader validates."""

    def check(value: Any) -> dict[str, Any]:
        if type(value) is not dict or len(value) > max_items:
            raise ValueError(f"not a map of at most {max_items} entries")
        return value

    return checked(check, **options)


def nested(kind: type[Any], **options: Any) -> Any:
    """A dataclass of checked fields."""
    return checked(lambda value: from_map(kind, value), **options)


def nested_list(kind: type[Any], max_items: int, **options: Any) -> Any:
    def check(value: Any) -> tuple[Any, ...]:
        if type(value) not in (list, tuple) or len(value) > max_items:
            raise ValueError(f"not a list of at most {max_items} items")
        return tuple(from_map(kind, item) for item in value)

    return checked(check, **options)


def optional(field: Any) -> Any:
    """The same field, or None; None when it is left out."""
    inner: Check = field.metadata["check"]
    return checked(lambda value: None if value is None else inner(value), default=None)


def from_map(kind: type[T], value: Any) -> T:
    """An instance of the dataclass `kind` from a decoded map.

    Raises:
        ProtocolError: names the dataclass and the field that is missing or wrong.
    """
    if not isinstance(value, Mapping):
        raise ProtocolError(f"{kind.__name__}: not a map")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name not in value:
            if field.default is _MISSING and field.default_factory is _MISSING:
                raise ProtocolError(f"{kind.__name__}.{field.name} is missing")
            continue
        try:
            values[field.name] = field.metadata["check"](value[field.name])
        except ValueError as error:
            raise ProtocolError(f"{kind.__name__}.{field.name}: {error}") from None
    return kind(**values)


def to_map(instance: Any) -> dict[str, Any]:
    """The map that `from_map` takes; nested dataclasses become maps, tuples become lists."""
    return {field.name: _plain(getattr(instance, field.name)) for field in dataclasses.fields(instance)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_map(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
