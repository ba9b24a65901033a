"""The drafting peer's work: answers, one after the other, over the engine and the link."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from peerllm.daemon.answer import RESYNC, Answer, Inbox, Workplace
from peerllm.decoding.draft_length import AdaptiveDraftLength, DraftLengthPolicy, FixedDraftLength
from peerllm.decoding.drafting import DraftingSession
from peerllm.protocol import limits
from peerllm.protocol.errors import PeerllmError, WorkerDied, WorkerHung
from peerllm.protocol.messages import Message, PrefillTaken, Refusal, SessionState, Verdict
from peerllm.protocol.requests import Event, Finished, GenerateRequest, TextDelta
from peerllm.telemetry.ledger import RoundLedger


class Drafter:
    """Makes answers. `take` is given every message of the verifying peer; `link_is_up_again` tells of a reconnect."""

    def __init__(self, work: Workplace, *, draft_length: int | None = None) -> None:
        self._work = work
        self._draft_length = draft_length
        self._inboxes: dict[int, Inbox] = {}
        self._adaptive = AdaptiveDraftLength(min(16, work.boundary.max_candidates))
        self.ledger = RoundLedger()
        """Of all answers so far."""

    def take(self, message: Message) -> None:
        if not isinstance(message, Verdict | SessionState | PrefillTaken | Refusal) or message.session is None:
            return
        if inbox := self._inboxes.get(message.session):
            if isinstance(message, PrefillTaken):
                inbox.took(message.length)
            else:
                inbox.put(message.error() if isinstance(message, Refusal) else message)

    def link_is_up_again(self) -> None:
        for inbox in self._inboxes.values():
            inbox.put(RESYNC)

    def fail(self, error: PeerllmError) -> None:
        """Ends every answer in the making."""
        for inbox in self._inboxes.values():
            inbox.put(error)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """TextDelta as rounds make text final, then one Finished.

        Raises:
            PeerllmError: the prompt does not fit, the other peer is away or refuses, the engine failed.
        """
        began = time.monotonic()
        loaded, prompt = await self._tokenize(request)
        drafting = DraftingSession(
            prompt,
            context=self._work.boundary.context,
            max_tokens=request.max_tokens,
            eos_token_ids=frozenset(loaded["eos_token_ids"]),
            policy=self._policy(request),
            max_candidates=self._work.boundary.max_candidates,
        )
        answer = Answer(self._work, request, drafting, vocabulary=int(loaded["vocabulary"]), began=began)
        inbox = self._inboxes[answer.session] = Inbox()
        try:
            await answer.open()
            while drafting.finish is None:
                text = await answer.play_round(inbox)
                if text:
                    yield TextDelta(text=text)
                if answer.is_stopped:
                    break
            if text := await answer.finish_text():
                yield TextDelta(text=text)
            yield Finished(reason=answer.finish_reason, usage=answer.usage, ledger=answer.ledger.summary())
        finally:
            self.ledger.include(answer.ledger)
            del self._inboxes[answer.session]
            await answer.close()

    async def _tokenize(self, request: GenerateRequest) -> tuple[dict[str, Any], list[int]]:
        """What the engine said of the loaded model, and the prompt's tokens. A worker that dies over it is waited for,
        as during the answer."""
        what: dict[str, Any] = {"prompt": request.prompt or ""}
        if request.messages is not None:
            what = {"messages": [{"role": message.role, "content": message.content} for message in request.messages]}
        engine = self._work.engine
        deaths = 0
        while True:
            loaded = await engine.until_loaded()
            try:
                return loaded, (await engine.call("tokenize", **what)).values["tokens"]
            except (WorkerDied, WorkerHung):
                deaths += 1
                if deaths > limits.MAX_WORKER_DEATHS:
                    raise

    def _policy(self, request: GenerateRequest) -> DraftLengthPolicy:
        length = self._draft_length if request.draft_length is None else request.draft_length
        return self._adaptive if length is None else FixedDraftLength(length)
