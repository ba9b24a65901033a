"""What a daemon tells the person at its terminal."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from peerllm.protocol.identity import LayerRange


@dataclass(frozen=True, slots=True)
class RoomOpened:
    code: str


@dataclass(frozen=True, slots=True)
class WrongGuess:
    """Somebody tried wrong words; the room closes when none are `left`."""

    guesses: int
    left: int


@dataclass(frozen=True, slots=True)
class PeerSeated:
    """The room's lasting name, by which both peers meet again without words."""

    room: str


@dataclass(frozen=True, slots=True)
class Connected:
    path: str | None
    rtt_ms: float | None


@dataclass(frozen=True, slots=True)
class Progress:
    """`stage` in words; `fraction` from 0 to 1."""

    stage: str
    fraction: float


@dataclass(frozen=True, slots=True)
class ReadyToServe:
    """Both peers are ready."""

    model: str
    layers: LayerRange
    all_layers: int
    is_drafting: bool
    context: int
    max_context: int
    """The model's."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something is amiss and is being dealt with."""

    message: str


Notice = RoomOpened | PeerSeated | WrongGuess | Connected | Progress | ReadyToServe | Trouble


class Person(Protocol):
    """The person at the terminal, or whoever stands in for one."""

    def tell(self, notice: Notice) -> None: ...

    async def may_download(self, question: str) -> bool:
        """Asks; False where nobody can answer."""
        ...


Tell = Callable[[Notice], None]
Ask = Callable[[str], Awaitable[bool]]
