"""The drafting peer's work: answers, one after the other, over the engine and the link."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

from peerllm.daemon.answer import RESYNC, Answer, Inbox, Workplace
from peerllm.decoding.draft_length import AdaptiveDraftLength, DraftLengthPolicy, FixedDraftLength
from peerllm.decoding.drafting import DraftingSession
from peerllm.protocol.errors import PeerllmError
from peerllm.protocol.messages import Message, Refusal, SessionState, Verdict
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
        if not isinstance(message, Verdict | SessionState | Refusal) or message.session is None:
            return
        if inbox := self._inboxes.get(message.session):
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
        loaded = await self._work.engine.until_loaded()
        prompt = await self._tokenize(request)
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

    async def _tokenize(self, request: GenerateRequest) -> list[int]:
        if request.messages is not None:
            messages = [{"role": message.role, "content": message.content} for message in request.messages]
            reply = await self._work.engine.call("tokenize", messages=messages)
        else:
            reply = await self._work.engine.call("tokenize", prompt=request.prompt or "")
        tokens: list[int] = reply.values["tokens"]
        return tokens

    def _policy(self, request: GenerateRequest) -> DraftLengthPolicy:
        length = self._draft_length if request.draft_length is None else request.draft_length
        return self._adaptive if length is None else FixedDraftLength(length)
