"""The state directory: keys with mode 0600, rooms that last, one daemon at a time."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from peerllm.protocol.errors import ProtocolError, RoomError, RoomNotFound
from peerllm.rooms.keys import KeyStore, KnownRoom, StateLock, meeting_ids, room_name, seconds_to_next_day

DAY = 86400.0


LOCK = "import sys, pathlib; from peerllm.rooms.keys import StateLock; StateLock(pathlib.Path(sys.argv[1])).acquire()"


def known(name: str, *, met_at: int = 0) -> KnownRoom:
    return KnownRoom(
        name=name, peer="ab" * 32, is_opener=True, signaling="ws://127.0.0.1:1", paired_at=5, met_at=met_at
    )


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_key_is_made_once_and_kept_with_mode_0600(tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "state")
    old = os.umask(0)
    try:
        made = store.identity().private_bytes_raw()
    finally:
        os.umask(old)
    assert KeyStore(tmp_path / "state").identity().private_bytes_raw() == made
    assert mode(tmp_path / "state") == 0o700
    assert mode(tmp_path / "state" / "identity.key") == 0o600
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["identity.key"]


def test_a_key_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    store.identity()
    (tmp_path / "identity.key").chmod(0o644)
    store.identity()
    assert mode(tmp_path / "identity.key") == 0o600


def test_a_damaged_key_is_told_and_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "identity.key").write_bytes(b"short")
    with pytest.raises(RoomError, match="5 bytes instead of 32"):
        KeyStore(tmp_path).identity()
    assert (tmp_path / "identity.key").read_bytes() == b"short"


def test_a_directory_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RoomError, match="cannot be used"):
        KeyStore(tmp_path / "file" / "state").identity()
    with pytest.raises(RoomError, match="cannot be remembered"):
        KeyStore(tmp_path / "file" / "state").remember(known("one"))


def test_rooms_are_remembered_listed_and_forgotten(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    store.remember(known("copper-winter", met_at=10))
    store.remember(known("zoo-anchor", met_at=20))
    assert [room.name for room in store.rooms()] == ["zoo-anchor", "copper-winter"]
    assert store.room().name == "zoo-anchor"
    assert store.room("Copper Winter").name == "copper-winter"
    assert mode(tmp_path / "rooms" / "zoo-anchor.json") == 0o600
    store.forget("zoo-anchor")
    assert [room.name for room in store.rooms()] == ["copper-winter"]
    with pytest.raises(RoomNotFound, match="Known: copper-winter"):
        store.forget("zoo-anchor")


def test_no_room_at_all_is_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RoomNotFound, match="peerllm up"):
        KeyStore(tmp_path).room()


@pytest.mark.parametrize("name", ["../identity", "/etc/passwd", "..", ""])
def test_a_rooms_name_never_leads_out_of_the_directory(tmp_path: Path, name: str) -> None:
    store = KeyStore(tmp_path)
    store.identity()
    store.remember(known("copper-winter"))
    with pytest.raises(RoomNotFound):
        store.forget(name)
    assert (tmp_path / "identity.key").exists()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"name": "other"}', '{"name": "broken", "peer": "AB", "is_opener": true}']
)
def test_a_room_file_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path, content: str) -> None:
    store = KeyStore(tmp_path)
    store.remember(known("copper-winter"))
    (tmp_path / "rooms" / "broken.json").write_text(content)
    assert [room.name for room in store.rooms()] == ["copper-winter"]


def test_a_second_daemon_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    with StateLock(tmp_path):
        other = subprocess.run(
            [sys.executable, "-c", LOCK, tmp_path], capture_output=True, text=True, timeout=30, check=False
        )
        assert "Another peerllm daemon uses" in other.stderr
        with pytest.raises(RoomError, match="--state-dir"):
            StateLock(tmp_path).acquire()
    assert (tmp_path / "lock").exists()  # never unlinked
    with StateLock(tmp_path):
        pass


def test_a_daemon_that_was_killed_leaves_no_lock(tmp_path: Path) -> None:
    code = LOCK + "; print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.kill()
        process.wait()
    with StateLock(tmp_path):
        pass


# --- The rendezvous ---------------------------------------------------------------------------------------------------

ONE, TWO, THREE = (X25519PrivateKey.from_private_bytes(bytes([each]) * 32) for each in (1, 2, 3))


def public(private: X25519PrivateKey) -> bytes:
    return private.public_key().public_bytes_raw()


def test_two_meet_at_one_place_and_nobody_else_does() -> None:
    assert meeting_ids(ONE, public(TWO), 0) == meeting_ids(TWO, public(ONE), 0)
    assert not set(meeting_ids(ONE, public(TWO), 0)) & set(meeting_ids(ONE, public(THREE), 0))


def test_the_place_changes_with_the_utc_day() -> None:
    before, after = meeting_ids(ONE, public(TWO), 10 * DAY - 1), meeting_ids(ONE, public(TWO), 10 * DAY)
    assert before[1] not in after[1:]
    assert before[1:] == after[:2]


@pytest.mark.parametrize("apart", [0.0, 1.0, DAY, 2 * DAY - 1])
def test_clocks_may_differ(apart: float) -> None:
    now = 20_000 * DAY + 7
    assert set(meeting_ids(ONE, public(TWO), now)) & set(meeting_ids(TWO, public(ONE), now + apart))


def test_the_next_day_begins_at_midnight_utc() -> None:
    assert seconds_to_next_day(3 * DAY + 100) == DAY - 100


def test_a_key_of_small_order_is_no_peer() -> None:
    with pytest.raises(ProtocolError):
        meeting_ids(ONE, bytes(32), 0)


def test_both_ends_give_the_room_one_name() -> None:
    assert room_name(public(ONE), public(TWO)) == room_name(public(TWO), public(ONE))
    assert room_name(public(ONE), public(TWO)) != room_name(public(ONE), public(THREE))


def test_a_state_directory_that_cannot_be_one_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RoomError, match="cannot be used"):
        StateLock(tmp_path / "file").acquire()
