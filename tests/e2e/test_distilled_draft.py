"""A draft that was made for the target, in a room of two daemons."""

from __future__ import annotations

from pathlib import Path

import pytest

from peerllm.cli.demo_processes import DemoFailed, stage
from tests.e2e.rooms import room_of_two, start_daemon, start_signaling
from tests.engine.cut_drafts import whole_draft
from tests.tiny_models import make_model

PROMPT = "the tide and the moon"


def test_a_draft_named_by_its_folder_is_right_for_its_target_and_changes_no_text(
    tiny_model: Path, tmp_path: Path
) -> None:
    draft = whole_draft(tmp_path / "draft", tiny_model, list(range(304)))
    with room_of_two(str(tiny_model), up=("--draft", str(draft)), join=("--draft", str(draft))) as room:
        plain = room.first.complete(PROMPT, max_tokens=24, draft_length=0)
        for daemon in (room.first, room.second):
            answer = daemon.complete(PROMPT, max_tokens=24, draft_length=6)
            assert answer["text"] == plain["text"]
            assert answer["ledger"]["acceptance_rate"] > 0.9, "all of the target's layers and tokens"


def test_a_draft_for_another_target_is_refused_with_what_differs(tiny_model: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", "llama", seed=9)
    draft = whole_draft(tmp_path / "draft", other, list(range(100)))
    with stage() as here:
        signaling = start_signaling(here)
        daemon = start_daemon(here, "first", signaling, "up", "--model", str(tiny_model), "--draft", str(draft))
        with pytest.raises(DemoFailed, match="is a draft for tiny and not for this model"):
            daemon.child.wait_for("Room code:", 60)
