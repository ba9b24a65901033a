"""The user's cache: folders that are there whole or not at all, and hashes of files that have not changed since."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from peerllm.protocol.errors import ModelError

Progress = Callable[[str, float], None]
"""Gets what is being done, in words, and the fraction of it that is done."""

_MANIFEST = "whole.json"
_CHUNK = 1 << 20


def no_progress(stage: str, fraction: float) -> None:
    """For callers who do not watch."""


def cache_folder() -> Path:
    """`PEERLLM_CACHE`, or `peerllm` in the user's cache folder. It need not exist yet."""
    named = os.environ.get("PEERLLM_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    # The base directory specification: a relative path there is to be ignored.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "peerllm"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on the file `path`, which stays; it ends with the process, however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_whole(folder: Path) -> bool:
    """Whether `folder` was finished by `build_folder` and each of its files still has its size."""
    try:
        sizes = json.loads((folder / _MANIFEST).read_bytes())
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def build_folder(target: Path, build: Callable[[Path], None]) -> Path:
    """`target`, made by `build` in a folder beside it and moved there only when it is whole and on the disk.

    Only one process builds; the others wait for it. What an earlier one left half done is removed.

    Raises:
        ModelError: the disk is full or cannot be written.
    """
    if is_whole(target):
        return target
    prefix = f".{target.name}.half-"
    try:
        with locked(target.parent / f".{target.name}.lock"):
            if is_whole(target):
                return target
            for left in target.parent.glob(f"{prefix}*"):
                shutil.rmtree(left, ignore_errors=True)
            shutil.rmtree(target, ignore_errors=True)
            half = target.parent / f"{prefix}{secrets.token_hex(4)}"
            half.mkdir(mode=0o755)
            try:
                build(half)
                _finish(half)
                half.rename(target)
                _sync(target.parent)
            except BaseException:
                shutil.rmtree(half, ignore_errors=True)
                raise
    except OSError as error:
        raise ModelError(f"{target} cannot be written: {error.strerror or error}") from error
    return target


def _finish(folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps(sizes, indent=1))
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path, progress: Progress = no_progress) -> str:
    """Lower-case hexadecimal sha256 of a file: hashed once, then remembered by inode, size and time of change.

    Raises:
        ModelError: the file cannot be read.
    """
    try:
        path = path.resolve()
        state = path.stat()
        key = {"size": state.st_size, "mtime_ns": state.st_mtime_ns}
        note = cache_folder() / "hashes" / f"{state.st_dev:x}-{state.st_ino:x}.json"
        known = _read_note(note, key)
        if known is not None:
            return known
        digest, done = hashlib.sha256(), 0
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                progress(f"hashing {path.name}", min(1.0, done / max(1, state.st_size)))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    write_note(note, key | {"sha256": digest.hexdigest()})
    return digest.hexdigest()


def write_note(path: Path, value: dict[str, Any]) -> None:
    """Remembers `value` as JSON. A cache that cannot be written costs the next start some time and nothing else."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        fresh.write_text(json.dumps(value))
        fresh.replace(path)


def _read_note(note: Path, key: dict[str, int]) -> str | None:
    try:
        known = json.loads(note.read_bytes())
        if all(known[name] == value for name, value in key.items()) and len(known["sha256"]) == 64:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None
