"""A daemon that dies and is started again by its supervisor: the room goes on, and so does what was being said."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from peerllm.protocol.errors import PeerllmError
from tests.e2e.rooms import kill, room_of_two, start_daemon, wait_ready, wait_until

LONG = {"prompt": "the tide and the moon", "max_tokens": 80, "temperature": 0}


@pytest.mark.timeout(180)
def test_an_answer_goes_on_when_the_verifying_daemon_is_killed_and_resumed(tiny_model: Path) -> None:
    with room_of_two(str(tiny_model), rtt=40.0) as room:
        undisturbed = room.first.complete(draft_length=0, **LONG)
        answer: dict[str, Any] = {}
        some_text = threading.Event()

        def ask() -> None:
            text = ""
            body = {**LONG, "draft_length": 0}
            for event in room.first.client.stream("/v1/completions", body):
                for choice in event["choices"]:
                    text += choice["text"]
                if len(text) > 20:
                    some_text.set()
            answer["text"] = text

        asking = threading.Thread(target=ask)
        asking.start()
        assert some_text.wait(30)
        kill(room.second.child.pid)
        again = start_daemon(room.stage, "second", room.signaling, "resume", "--rtt", "40")
        wait_ready(again)
        asking.join(60)
        assert answer.get("text") == undisturbed["text"]
        room.first.wait_well()
        assert again.complete(draft_length=0, **LONG)["text"] == undisturbed["text"]


@pytest.mark.timeout(180)
def test_the_room_is_whole_again_when_the_drafting_daemon_is_killed_and_resumed(tiny_model: Path) -> None:
    with room_of_two(str(tiny_model), rtt=40.0) as room:
        undisturbed = room.second.complete(**LONG)
        events = room.second.client.stream("/v1/completions", {**LONG, "draft_length": 0})
        next(events)
        kill(room.first.child.pid)
        again = start_daemon(room.stage, "first", room.signaling, "resume", "--rtt", "40")
        wait_ready(again)
        with pytest.raises(PeerllmError, match="started anew"):
            list(events)
        room.second.wait_well()
        for daemon in (again, room.second):
            assert daemon.complete(**LONG)["text"] == undisturbed["text"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("leaves", ["first", "second"])
def test_a_peer_that_is_stopped_ends_the_answer_at_once_and_may_come_back(tiny_model: Path, leaves: str) -> None:
    with room_of_two(str(tiny_model), rtt=40.0) as room:
        stays = room.second if leaves == "first" else room.first
        events = stays.client.stream("/v1/completions", {**LONG, "max_tokens": 400, "draft_length": 0})
        next(events)
        kill(getattr(room, leaves).child.pid, signal.SIGTERM)
        began = time.monotonic()
        with pytest.raises(PeerllmError) as caught:
            list(events)
        assert caught.value.code == "peer_away"
        assert time.monotonic() - began < 5
        wait_until(lambda: stays.status()["state"] == "away", 5)
        again = start_daemon(room.stage, leaves, room.signaling, "resume", "--rtt", "40")
        wait_ready(again)
        stays.wait_well()
        assert stays.complete("the tide", max_tokens=4)["tokens"] == 4


@pytest.mark.timeout(180)
def test_an_answer_whose_peer_stays_away_ends_in_a_typed_error_and_the_daemon_lives_on(tiny_model: Path) -> None:
    with room_of_two(str(tiny_model), up=("--keep", "4"), rtt=40.0) as room:
        events = room.first.client.stream("/v1/completions", {**LONG, "max_tokens": 400, "draft_length": 0})
        next(events)
        kill(room.second.child.pid)
        with pytest.raises(PeerllmError) as caught:
            list(events)
        assert caught.value.code == "peer_away"
        again = start_daemon(room.stage, "second", room.signaling, "resume", "--rtt", "40")
        wait_ready(again)
        room.first.wait_well()
        assert room.first.complete("the tide", max_tokens=4)["tokens"] == 4
