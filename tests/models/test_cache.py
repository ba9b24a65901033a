from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from peerllm.models.cache import build_folder, cache_folder, is_whole, sha256_of
from peerllm.protocol.errors import ModelError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERLLM_CACHE", str(tmp_path / "cache"))


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("PEERLLM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/peerllm")
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == Path.home() / ".cache" / "peerllm"


def write_two(folder: Path) -> None:
    (folder / "a").write_bytes(b"12345")
    (folder / "b").write_bytes(b"")


def test_a_folder_is_built_once(tmp_path: Path) -> None:
    calls: list[Path] = []

    def build(folder: Path) -> None:
        calls.append(folder)
        write_two(folder)

    for _ in range(2):
        assert build_folder(tmp_path / "made", build) == tmp_path / "made"
    assert len(calls) == 1 and not calls[0].exists()
    assert (tmp_path / "made" / "a").read_bytes() == b"12345"


def test_a_build_that_fails_leaves_nothing_and_the_next_one_succeeds(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        write_two(folder)
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError):
        build_folder(tmp_path / "made", fail)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    assert is_whole(build_folder(tmp_path / "made", write_two))


@pytest.mark.parametrize("damage", ["shorten", "remove", "manifest", "unfinished"])
def test_a_damaged_folder_is_built_anew(tmp_path: Path, damage: str) -> None:
    target = build_folder(tmp_path / "made", write_two)
    if damage == "shorten":
        (target / "a").write_bytes(b"1234")
    elif damage == "remove":
        (target / "b").unlink()
    elif damage == "manifest":
        (target / "whole.json").write_text('{"a":')
    else:
        (target / "whole.json").unlink()
    assert not is_whole(target)
    build_folder(target, write_two)
    assert is_whole(target) and (target / "a").read_bytes() == b"12345"


KILLED = """
import sys, time
from pathlib import Path
from peerllm.models.cache import build_folder

def build(folder):
    (folder / "a").write_bytes(b"123")
    print("half", flush=True)
    time.sleep(100)

build_folder(Path(sys.argv[1]), build)
"""


def test_a_build_killed_half_way_is_never_taken_for_a_whole_one(tmp_path: Path) -> None:
    target = tmp_path / "made"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(target)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"half\n"
        waiting: list[Path] = []
        # Another process waits for the lock meanwhile, and gets it when the first one dies.
        second = threading.Thread(target=lambda: waiting.append(build_folder(target, write_two)))
        second.start()
        second.join(0.2)
        assert second.is_alive() and not target.exists()
        process.send_signal(signal.SIGKILL)
        second.join(20)
    assert waiting == [target] and (target / "a").read_bytes() == b"12345"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["made"]


def test_a_full_disk_is_an_error_that_says_so(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        raise OSError(28, os.strerror(28))

    with pytest.raises(ModelError, match=r"made cannot be written: No space left"):
        build_folder(tmp_path / "made", fill)


def test_a_hash_is_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    seen: list[float] = []
    assert sha256_of(path, lambda stage, fraction: seen.append(fraction)) == hashlib.sha256(b"one").hexdigest()
    assert seen == [1.0]
    sha256_of(path, lambda stage, fraction: seen.append(fraction))
    assert seen == [1.0]
    path.write_bytes(b"two")
    os.utime(path, ns=(time.time_ns(), time.time_ns() + 1))
    assert sha256_of(path) == hashlib.sha256(b"two").hexdigest()


def test_a_damaged_note_of_a_hash_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    sha256_of(path)
    (note,) = (tmp_path / "cache" / "hashes").iterdir()
    for content in ("", "{", "[]", '{"size": 3}', note.read_text().replace('"sha256": "', '"sha256": "z')):
        note.write_text(content)
        assert sha256_of(path) == hashlib.sha256(b"one").hexdigest()


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("PEERLLM_CACHE", str(tmp_path / "file"))
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    assert sha256_of(path) == hashlib.sha256(b"one").hexdigest()


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="weights cannot be read"):
        sha256_of(tmp_path / "weights")
