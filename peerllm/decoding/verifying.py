"""The verifying peer's side of one sequence: where a block may start, and the verdict that is kept for a repeat."""

from __future__ import annotations

from dataclasses import dataclass

from peerllm.protocol.errors import ProtocolError
from peerllm.protocol.messages import CandidateBlock, Verdict


@dataclass(frozen=True, slots=True)
class Judge:
    """The engine is to rewind to `start` and judge the block."""

    start: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """This round was judged before; its verdict goes out again."""

    verdict: Verdict


class VerifyingSession:
    """`length` rows are in the cache and valid. Nothing here trusts the drafting peer."""

    def __init__(self, session: int, *, context: int) -> None:
        self.session = session
        self.length = 0
        self._context = context
        self._last: Verdict | None = None

    def check_prefill(self, start: int, rows: int) -> None:
        """Raises ProtocolError unless rows `[start, start + rows)` continue or repeat what is here and fit."""
        if start > self.length:
            raise ProtocolError(f"rows from {start} on came; {self.length} are here")
        if start + rows > self._context:
            raise ProtocolError(f"rows up to {start + rows} do not fit the context of {self._context}")

    def prefilled(self, start: int, rows: int) -> None:
        self.length = start + rows

    def take(self, block: CandidateBlock) -> Judge | Repeat:
        """What to do with a block.

        Raises:
            ProtocolError: a round that is past and whose verdict is no longer kept, a start beyond the length, or
                rows beyond the context.
        """
        if self._last is not None:
            if block.round == self._last.round:
                return Repeat(self._last)
            if block.round < self._last.round:
                raise ProtocolError(f"round {block.round} is past; the last was {self._last.round}")
        if block.start > self.length:
            raise ProtocolError(f"a block that starts at {block.start}; {self.length} rows are here")
        if block.start + len(block.candidates) + 1 > self._context:
            raise ProtocolError(f"a block that ends beyond the context of {self._context}")
        return Judge(block.start)

    def judged(self, block: CandidateBlock, verdict: Verdict) -> None:
        """The rows of what was accepted stay: the committed length is start + 1 + accepted + 1, less one."""
        self.length = block.start + 1 + verdict.accepted
        self._last = verdict
