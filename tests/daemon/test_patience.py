"""How long an answer waits for a verdict: as long as the other peer shows that it computes what comes before."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from peerllm.daemon.answer import Answer, Inbox, Workplace
from peerllm.daemon.boundary import Boundary
from peerllm.daemon.deadlines import StepDeadline
from peerllm.daemon.drafter import Drafter
from peerllm.decoding.draft_length import FixedDraftLength
from peerllm.decoding.drafting import DraftingSession
from peerllm.link import LinkState
from peerllm.protocol import limits
from peerllm.protocol.errors import PeerAway, WorkerDied
from peerllm.protocol.messages import CandidateBlock, PrefillTaken, SessionState, Verdict
from peerllm.protocol.requests import GenerateRequest

BOUNDARY = Boundary("exact", "float32", 8, 512)
ROUND, PREFILL = 0.05, 0.3
BLOCK = CandidateBlock(session=1, round=0, start=40, candidates=(), hidden=bytes(32))
VERDICT = Verdict(session=1, round=0, accepted=0, next_token=3)
REQUEST = GenerateRequest(prompt="the tide")


class Channel:
    def __init__(self) -> None:
        self.link = SimpleNamespace(state=LinkState.UP)
        self.sent: list[Any] = []

    async def send(self, message: Any, urgency: Any = None) -> None:
        self.sent.append(message)


@pytest.fixture
def answer() -> Answer:
    engine: Any = SimpleNamespace(restarts=0)
    channel: Any = Channel()
    work = Workplace(engine, channel, BOUNDARY, rounds=StepDeadline(ROUND), prefills=StepDeadline(PREFILL))
    drafting = DraftingSession(
        list(range(1, 42)),
        context=512,
        max_tokens=8,
        eos_token_ids=frozenset(),
        policy=FixedDraftLength(0),
        max_candidates=4,
    )
    return Answer(work, REQUEST, drafting, vocabulary=300, began=time.monotonic())


async def take_rows(inbox: Inbox, *, steps: int, pause: float) -> None:
    for step in range(1, steps + 1):
        await asyncio.sleep(pause)
        inbox.took(40 * step // steps)
    inbox.put(VERDICT)


async def test_a_peer_that_computes_a_long_prompt_is_waited_for(answer: Answer) -> None:
    inbox = Inbox()
    inbox.rows_sent = 40
    taking = asyncio.create_task(take_rows(inbox, steps=6, pause=PREFILL * 2 / 3))
    assert await answer._verdict(BLOCK, inbox) == VERDICT
    await taking


async def test_a_peer_that_stops_computing_is_not(answer: Answer) -> None:
    inbox = Inbox()
    inbox.rows_sent = 40
    inbox.took(20)
    with pytest.raises(PeerAway, match="in time"):
        await answer._verdict(BLOCK, inbox)


async def test_a_round_after_the_prompt_has_the_rounds_patience(answer: Answer) -> None:
    inbox = Inbox()
    inbox.rows_sent = inbox.rows_taken = 40
    begun = time.monotonic()
    with pytest.raises(PeerAway, match="in time"):
        await answer._verdict(BLOCK, inbox)
    assert time.monotonic() - begun < PREFILL


async def test_a_replay_is_waited_for_like_a_prompt(answer: Answer) -> None:
    answer._replay.add(0, 40, bytes(40 * 32))
    inbox = Inbox()
    inbox.put(SessionState(session=1, length=0))
    taking = asyncio.create_task(take_rows(inbox, steps=6, pause=PREFILL * 2 / 3))
    assert await answer._verdict(BLOCK, inbox) == VERDICT
    await taking


class Worker:
    """Dies over the first `deaths` calls."""

    def __init__(self, deaths: int) -> None:
        self.deaths = deaths
        self.restarts = 0

    async def until_loaded(self) -> dict[str, Any]:
        return {"vocabulary": 300, "eos_token_ids": []}

    async def call(self, op: str, **arguments: Any) -> Any:
        if self.deaths:
            self.deaths -= 1
            self.restarts += 1
            raise WorkerDied("the engine worker ended unexpectedly")
        return SimpleNamespace(values={"tokens": [1, 2, 3]})


async def test_a_question_outlives_a_worker_that_dies_as_it_comes() -> None:
    engine: Any = Worker(deaths=1)
    channel: Any = Channel()
    drafter = Drafter(Workplace(engine, channel, BOUNDARY))
    assert (await drafter._tokenize(REQUEST))[1] == [1, 2, 3]
    engine.deaths = limits.MAX_WORKER_DEATHS + 1
    with pytest.raises(WorkerDied):
        await drafter._tokenize(REQUEST)


async def test_what_the_other_peer_has_taken_reaches_the_answer() -> None:
    engine: Any = Worker(deaths=0)
    channel: Any = Channel()
    drafter = Drafter(Workplace(engine, channel, BOUNDARY))
    inbox = drafter._inboxes[1] = Inbox()
    for length in range(500):  # many chunks leave room for the verdict
        drafter.take(PrefillTaken(session=1, length=length))
    drafter.take(VERDICT)
    assert inbox.rows_taken == 499
    assert await inbox.get() == VERDICT
