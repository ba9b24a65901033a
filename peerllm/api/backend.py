"""What the API needs of the daemon behind it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from peerllm.protocol.requests import Event, GenerateRequest, ModelInfo


class Backend(Protocol):
    def models(self) -> list[ModelInfo]:
        """The models that requests may name; empty while the daemon does not know yet."""
        ...

    def health(self) -> tuple[bool, str]:
        """Is an answer possible now, and if not, the cause in words."""
        ...

    def status(self) -> dict[str, Any]:
        """Plain JSON values; docs/architecture.md has the keys."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """TextDelta…, then one Finished.

        The API runs one task for each answer from its first step to its end. A client that goes away cancels that
        task, so the generator sees CancelledError at its own await, or GeneratorExit at its yield: either must stop the
        answer within one round. After Finished it is left alone to tidy up.

        Raises:
            PeerllmError: the API answers with its `status`, `code`, `message` and `param`. Overloaded becomes a 429
                with Retry-After.
        """
        ...
