"""What a room was served with comes back at `peerllm resume`."""

from __future__ import annotations

from pathlib import Path

import pytest

from peerllm.daemon.config import DaemonConfig
from peerllm.daemon.settings import recall_settings, remember_settings
from peerllm.protocol.identity import LayerRange


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weights", "int8"),
        ("devices", ("cuda:0", "cuda:1")),
        ("draft_device", "cuda:1"),
        ("layers", LayerRange(0, 4)),
        ("draft", "model:folder"),
        ("context", 512),
    ],
)
def test_what_was_set_is_recalled(tmp_path: Path, name: str, value: object) -> None:
    config = DaemonConfig(signaling="ws://h", state_dir=tmp_path, socket=tmp_path / "s", **{name: value})
    remember_settings(config, "room")
    assert recall_settings(tmp_path, "room")[name] == value


def test_what_was_not_set_is_left_to_the_command_line(tmp_path: Path) -> None:
    remember_settings(DaemonConfig(signaling="ws://h", state_dir=tmp_path, socket=tmp_path / "s"), "room")
    assert "weights" not in recall_settings(tmp_path, "room")
