"""Folders for keys, sockets and logs of a moment: gone with their command, or swept by the next one if it was killed.

A folder is locked (flock on the folder itself) while its command lives; whoever can lock it finds its owner dead. What
does not hold our mark is never removed, whatever its name: a user may have called a folder of results like that.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_KINDS = ("bench", "demo", "doctor")
MARK = ".peerllm-of-a-moment"
_NAME = re.compile(f"peerllm-({'|'.join(_KINDS)})-.+")


@contextlib.contextmanager
def private_folder(kind: str, base: Path | None = None) -> Iterator[Path]:
    """A new folder in `base` (default: the system's place for such), of mode 0700; the dead ones there are removed.

    Args:
        kind: one of `_KINDS`, for the name.
    """
    base = base or Path(tempfile.gettempdir())
    _sweep(base)
    folder, lock = _make(base, kind)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make(base: Path, kind: str) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"peerllm-{kind}-", dir=base))
        # Another command's sweep may find it before it is locked: then there is another.
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            is_ours = _can_lock(lock)
            if folder.exists() and is_ours is not False:
                (folder / MARK).touch(mode=0o600)
                return folder, lock
            os.close(lock)


def _sweep(base: Path) -> None:
    for folder in base.glob("peerllm-*"):
        if not _NAME.fullmatch(folder.name):
            continue
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(lock)
                is_private = found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700
                if is_private and (folder / MARK).is_file() and _can_lock(lock):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def _can_lock(descriptor: int) -> bool | None:
    """None: this file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
