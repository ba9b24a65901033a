"""TURN credentials as coturn checks them: HMAC-SHA1 of a user name that begins with the time at which it ends."""

from __future__ import annotations

import base64
import hashlib
import hmac
from pathlib import Path

import pytest
from peerllm_signaling import limits
from peerllm_signaling.turn import TurnServers


def test_credentials_are_what_coturn_computes_and_end_by_themselves() -> None:
    made = TurnServers(("turn:127.0.0.1:3478?transport=udp",), b"north").credentials(1_800_000_000.5)
    mac = hmac.new(b"north", made["username"].encode(), hashlib.sha1).digest()
    assert made["credential"] == base64.b64encode(mac).decode()
    assert int(made["username"].split(":")[0]) == 1_800_000_000 + limits.TURN_SECONDS
    assert made["seconds"] == limits.TURN_SECONDS


def test_two_pairs_have_different_names() -> None:
    servers = TurnServers(("turn:127.0.0.1",), b"north")
    assert servers.credentials(0)["username"] != servers.credentials(0)["username"]


def test_the_secret_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("north\n")
    assert TurnServers.from_file(["turn:x"], tmp_path / "secret").secret == b"north"


def test_an_empty_secret_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("\n")
    with pytest.raises(ValueError, match="no secret"):
        TurnServers.from_file(["turn:x"], tmp_path / "secret")
