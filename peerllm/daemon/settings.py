"""What a room was served with, kept beside its keys, so that `peerllm resume` needs no options."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import structlog

from peerllm.daemon.config import DaemonConfig
from peerllm.protocol.errors import LayersMismatch
from peerllm.protocol.identity import LayerRange

log = structlog.get_logger(__name__)

_FOLDER = "settings"
_KEPT = (
    "model", "revision", "draft", "draft_length", "codec", "dtype", "context", "weights", "devices", "draft_device",
    "threads",
)  # fmt: skip
"""Fields of DaemonConfig; `layers` beside them, as text."""


def remember_settings(config: DaemonConfig, room: str) -> None:
    """Never raises: a room that is not remembered can still be resumed with options."""
    values: dict[str, Any] = {name: getattr(config, name) for name in _KEPT}
    values["layers"] = None if config.layers is None else str(config.layers)
    path = _path(config.state_dir, room)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump(values, file, indent=1)
        new.replace(path)
    except OSError as error:
        log.warning("settings_not_kept", reason=error.strerror or str(error))


def recall_settings(state_dir: Path, room: str) -> dict[str, Any]:
    """Fields of DaemonConfig for that room; none where nothing usable is kept."""
    try:
        values = json.loads(_path(state_dir, room).read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(values, dict):
        return {}
    known = {field.name for field in dataclasses.fields(DaemonConfig)}
    found = {name: value for name, value in values.items() if name in known and value is not None}
    if "devices" in found:
        found["devices"] = tuple(found["devices"])
    with contextlib.suppress(LayersMismatch, AttributeError):
        if "layers" in found:
            found["layers"] = LayerRange.parse(found["layers"])
    return found


def forget_settings(state_dir: Path, room: str) -> None:
    _path(state_dir, room).unlink(missing_ok=True)


def _path(state_dir: Path, room: str) -> Path:
    return state_dir / _FOLDER / f"{room}.json"
