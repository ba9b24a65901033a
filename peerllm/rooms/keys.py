"""The state directory: the long-term key, the peers met before, and a lock against a second daemon.

Files are made with mode 0600 from their first moment and appear whole or not at all. Nothing in them changes with use
but the time of the last meeting: restoring an old copy loses rooms made since, and nothing else.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from peerllm.protocol.errors import ProtocolError, RoomError, RoomNotFound
from peerllm.protocol.fields import checked, flag, from_map, text, to_map, uint
from peerllm.rooms.words import WORDS

_KEY_FILE = "identity.key"
_ROOMS = "rooms"
_KEY_BYTES = 32
_SECONDS_A_DAY = 86400


def _hex_key(value: Any) -> str:
    if type(value) is not str or len(value) != 2 * _KEY_BYTES or set(value) - set("0123456789abcdef"):
        raise ValueError("not a public key in hexadecimal")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRoom:
    """A pairing that lasts: two peers that once shared a code. Both ends give it the same name."""

    name: str = text(64)
    peer: str = checked(_hex_key)
    """The other's public key, hexadecimal."""
    is_opener: bool = flag()
    signaling: str = text(2048)
    paired_at: int = uint()
    """Unix time."""
    met_at: int = uint(default=0)

    @property
    def remote_key(self) -> bytes:
        return bytes.fromhex(self.peer)


class KeyStore:
    """Reads and writes the state directory. Its methods block for as long as a disk takes."""

    def __init__(self, state_dir: Path) -> None:
        self._dir = state_dir

    def identity(self) -> X25519PrivateKey:
        """This peer's long-term key, made on first use.

        Raises:
            RoomError: the directory or the file cannot be used; says what to do.
        """
        path = self._dir / _KEY_FILE
        try:
            self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists():
                key = X25519PrivateKey.generate()
                _write_whole(path, key.private_bytes_raw(), replace=False)
            raw = path.read_bytes()
            if path.stat().st_mode & 0o077:  # restored by something that does not keep modes
                path.chmod(0o600)
        except OSError as error:
            raise RoomError(f"The key in {path} cannot be used: {error.strerror or error}.") from error
        if len(raw) != _KEY_BYTES:
            raise RoomError(
                f"The key in {path} is damaged ({len(raw)} bytes instead of {_KEY_BYTES}). Move the file away to begin "
                f"with a new one; rooms made with the old key then have to be joined anew."
            )
        return X25519PrivateKey.from_private_bytes(raw)

    def rooms(self) -> list[KnownRoom]:
        """All known rooms, the one met last first. Files that cannot be read are left out."""
        found = []
        for path in sorted((self._dir / _ROOMS).glob("*.json")):
            try:
                room = from_map(KnownRoom, json.loads(path.read_bytes()))
            except (OSError, ValueError, ProtocolError):
                continue
            if path.stem == room.name:
                found.append(room)
        return sorted(found, key=lambda room: max(room.met_at, room.paired_at), reverse=True)

    def room(self, name: str | None = None) -> KnownRoom:
        """The room of that name, or without one the room met last.

        Raises:
            RoomNotFound: there is none; lists those there are.
        """
        rooms = self.rooms()
        if name is None and rooms:
            return rooms[0]
        wanted = "" if name is None else "-".join(name.lower().split())
        for room in rooms:
            if room.name == wanted:
                return room
        if not rooms:
            raise RoomNotFound("No room is known here yet. Open one with `peerllm up`, or join one with its code.")
        raise RoomNotFound(f"No room {wanted!r} is known here. Known: {', '.join(room.name for room in rooms)}.")

    def knows(self, name: str) -> bool:
        """Whether the room of exactly that name is there. A directory that cannot be read says nothing: True."""
        try:
            (self._dir / _ROOMS / f"{name}.json").stat()
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return True

    def remember(self, room: KnownRoom) -> None:
        """Raises RoomError when it cannot be written."""
        try:
            folder = self._dir / _ROOMS
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write_whole(folder / f"{room.name}.json", json.dumps(to_map(room), indent=1).encode(), replace=True)
        except OSError as error:
            raise RoomError(f"The room cannot be remembered in {self._dir}: {error.strerror or error}.") from error

    def forget(self, name: str) -> KnownRoom:
        """Deletes it: the two peers need a new code to meet again. Raises RoomNotFound."""
        room = self.room(name)
        (self._dir / _ROOMS / f"{room.name}.json").unlink(missing_ok=True)
        return room


class StateLock:
    """Holds the state directory for one daemon. The lock file is never unlinked: else two could hold two files."""

    def __init__(self, state_dir: Path) -> None:
        self._dir = state_dir
        self._fd = -1

    def acquire(self) -> None:
        """Raises RoomError when another process has it."""
        try:
            self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self._dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RoomError(f"The state directory {self._dir} cannot be used: {error.strerror or error}.") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise RoomError(
                f"Another peerllm daemon uses {self._dir}. Stop it, or give this one a --state-dir of its own."
            ) from error
        self._fd = fd

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> StateLock:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def room_name(one: bytes, other: bytes) -> str:
    """Three words of the room's two public keys, the same at both ends."""
    digest = int.from_bytes(hashlib.sha256(b"peerllm room name" + b"".join(sorted((one, other)))).digest())
    return "-".join(WORDS[(digest >> shift) % len(WORDS)] for shift in (0, 11, 22))


def meeting_ids(private: X25519PrivateKey, remote: bytes, unix_time: float) -> tuple[bytes, ...]:
    """Where the two meet: HMAC(static shared secret, UTC day), for yesterday, today and tomorrow, so that clocks may
    differ by a day. Only the two can compute it, and one day's says nothing of another's.

    Raises:
        ProtocolError: `remote` is no honest peer's key.
    """
    try:
        shared = private.exchange(X25519PublicKey.from_public_bytes(remote))
    except ValueError:
        raise ProtocolError("a public key that no honest peer has") from None
    secret = hmac.digest(b"peerllm rendezvous 1", shared, "sha256")
    today = int(unix_time // _SECONDS_A_DAY)
    return tuple(hmac.digest(secret, str(day).encode(), "sha256") for day in (today - 1, today, today + 1))


def seconds_to_next_day(unix_time: float) -> float:
    return _SECONDS_A_DAY - unix_time % _SECONDS_A_DAY


def _write_whole(path: Path, data: bytes, *, replace: bool) -> None:
    """With mode 0600. Without `replace`, a file that is there stays."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            draft.replace(path)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
