"""Peers that run their layers' weights differently: each says so, and the room works."""

from __future__ import annotations

from pathlib import Path

from peerllm.cli.status import lines
from tests.e2e.rooms import room_of_two


def test_one_peer_runs_int8_and_both_know_it(tiny_model: Path) -> None:
    with room_of_two(str(tiny_model), up=("--weights", "int8")) as room:
        answer = room.first.complete("the tide", max_tokens=12)
        assert answer["tokens"] == 12
        # The same weights at the same places, whoever asks.
        assert room.second.complete("the tide", max_tokens=12, draft_length=0)["text"] == answer["text"]
        for daemon, mine, theirs in ((room.first, "int8", "unquantised"), (room.second, "unquantised", "int8")):
            status = daemon.status()
            assert [(peer["self"], peer["weights"]) for peer in status["peers"]] == [(True, mine), (False, theirs)]
        # Of equal memory, int8 holds four times as many float32 layers.
        assert any("layers 0:3 as int8, drafts" in line for line in lines(room.second.status()))
