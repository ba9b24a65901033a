"""The daemon's loop while the engine computes: the embedded model, a 2,000-token prompt, two cores or fewer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from peerllm.protocol import limits
from tests.e2e.rooms import RoomOfTwo, room_of_two

pytestmark = pytest.mark.embedded


@pytest.fixture(scope="module")
def embedded_room() -> Iterator[RoomOfTwo]:
    with room_of_two("smollm2-135m-instruct") as both:
        yield both


def test_a_prefill_of_2000_tokens_blocks_neither_loop_nor_status_nor_pings(embedded_room: RoomOfTwo) -> None:
    room = embedded_room
    words = "The lighthouse keeper counted the ships that passed in the night. "
    answer: dict[str, Any] = {}

    def ask() -> None:
        answer.update(room.first.complete(words * 170, max_tokens=2, draft_length=0))

    asking = threading.Thread(target=ask)
    asking.start()
    slowest = 0.0
    polls = 0
    while asking.is_alive():
        for daemon in (room.first, room.second):
            began = time.monotonic()
            status = daemon.status()
            slowest = max(slowest, time.monotonic() - began)
            assert status["health"]["well"], status["health"]
            assert status["link"]["state"] == "UP"
            polls += 1
        time.sleep(0.1)
    asking.join()
    assert answer["tokens"] == 2
    assert answer["prompt_tokens"] >= 2000
    assert polls > 20  # the prefill took long enough to show something
    print(f"prefill: {answer['ledger']['time_to_first_token_ms']:.0f} ms, slowest status {slowest * 1000:.0f} ms")
    for daemon in (room.first, room.second):
        loop = daemon.status()["loop"]
        print(loop)
        assert loop["worst_ms"] < limits.LOOP_BLOCKED_SECONDS * 1000
