"""A daemon that dies and is started again by its supervisor: the room goes on, and so does what was being said."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.rooms import kill, room_of_two, start_daemon, wait_ready

from peerllm.protocol.errors import PeerllmError

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
