"""A prompt that keeps both engines busy for long: nobody takes a busy peer for a dead one."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.rooms import room_of_two
from tests.tiny_models import make_model

TOKENS = 8000


@pytest.mark.timeout(240)
def test_a_prefill_of_8000_tokens_costs_the_room_nothing(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", layers=16, hidden=128, context=TOKENS + 400)
    # Nearly all of it is the verifying peer's, which is busy long after the drafting peer has sent its first block.
    with room_of_two(str(model), up=("--layers", "0:1"), join=("--layers", "1:16")) as room:
        short = "the tide and the moon "
        a_few = room.first.complete(short * 100, max_tokens=1)["prompt_tokens"]
        answer: dict[str, Any] = {}
        asking = threading.Thread(
            target=lambda: answer.update(room.first.complete(short * (TOKENS * 101 // a_few), max_tokens=4))
        )
        before = [daemon.status()["link"]["epoch"] for daemon in (room.first, room.second)]
        began = time.monotonic()
        asking.start()
        polls = 0
        while asking.is_alive():
            for daemon in (room.first, room.second):
                status = daemon.status()
                assert status["health"]["well"], status["health"]
                assert status["link"]["state"] == "UP"
                polls += 1
            time.sleep(0.1)
        print(f"{answer['prompt_tokens']} tokens, {time.monotonic() - began:.1f} s, {polls} polls")
        assert answer["prompt_tokens"] >= TOKENS
        assert answer["tokens"] == 4
        assert polls > 10
        assert [daemon.status()["link"]["epoch"] for daemon in (room.first, room.second)] == before
        assert [daemon.status()["worker"]["restarts"] for daemon in (room.first, room.second)] == [0, 0]
