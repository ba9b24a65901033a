"""The socket's place in the file system: private, locked, never stolen, never in the way."""

from __future__ import annotations

import grp
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from peerllm.api.listener import Listener
from peerllm.protocol import limits
from peerllm.protocol.errors import SocketError


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_the_socket_is_private_from_its_first_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s"
    seen = []
    real_chmod = Path.chmod

    def watched(self: Path, mode: int, **more: bool) -> None:
        seen.append(mode_of(self))
        real_chmod(self, mode, **more)

    monkeypatch.setattr(Path, "chmod", watched)
    listener = Listener(path)
    assert seen == [0o600]
    assert mode_of(path) == 0o600
    assert mode_of(tmp_path / "s.lock") == 0o600
    listener.close()


@pytest.mark.usefixtures("open_umask")
def test_a_system_that_makes_it_public_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fchmod", lambda fd, mode: None)
    with pytest.raises(SocketError, match="private"):
        Listener(tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_named_group_gets_it_only_after_it_was_private(tmp_path: Path) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    listener = Listener(tmp_path / "s", group=group)
    assert mode_of(tmp_path / "s") == 0o660
    assert (tmp_path / "s").stat().st_gid == os.getgid()
    listener.close()


def test_a_group_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(SocketError, match="no-such-group"):
        Listener(tmp_path / "s", group="no-such-group")
    assert list(tmp_path.iterdir()) == []


def test_a_second_daemon_is_refused_and_the_first_lives_on(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = Listener(path)
    first.socket.listen()
    inode = path.lstat().st_ino
    with pytest.raises(SocketError, match="Another peerllm daemon"):
        Listener(path)
    assert path.lstat().st_ino == inode
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    first.close()


def test_the_lock_holds_even_while_the_socket_file_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = Listener(path)
    path.unlink()
    with pytest.raises(SocketError, match="Another peerllm daemon"):
        Listener(path)
    first.close()


def test_the_lock_file_stays_and_the_next_daemon_uses_the_same_one(tmp_path: Path) -> None:
    path = tmp_path / "s"
    Listener(path).close()
    inode = (tmp_path / "s.lock").stat().st_ino
    assert not path.exists()
    second = Listener(path)
    assert (tmp_path / "s.lock").stat().st_ino == inode
    second.close()
    second.close()


def test_a_killed_daemons_socket_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "s"
    code = (
        "import os, signal, sys\n"
        "from peerllm.api.listener import Listener\n"
        "Listener(sys.argv[1]).socket.listen()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=False, timeout=30)
    assert path.is_socket()
    Listener(path).close()
    assert not path.exists()


def test_a_live_listener_without_our_lock_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(SocketError, match="Another program listens"):
            Listener(path)
        assert path.is_socket()


def test_a_live_listener_with_a_full_backlog_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as waiting:
        other.bind(str(path))
        other.listen(0)
        waiting.connect(str(path))
        with pytest.raises(SocketError, match="Another program listens"):
            Listener(path)
        assert path.is_socket()


def test_a_file_that_is_not_a_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("mine")
    with pytest.raises(SocketError, match="not a socket"):
        Listener(path)
    assert path.read_text() == "mine"


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    (tmp_path / "s").symlink_to(tmp_path / "target")
    with pytest.raises(SocketError, match="not a socket"):
        Listener(tmp_path / "s")
    (tmp_path / "t.lock").symlink_to(tmp_path / "target")
    with pytest.raises(SocketError, match="lock file"):
        Listener(tmp_path / "t")


@pytest.mark.parametrize("name", ["\0peerllm", "@peerllm", "/tmp/a\0b"])
def test_abstract_names_are_refused(name: str) -> None:
    with pytest.raises(SocketError, match="Abstract"):
        Listener(name)


def test_a_path_that_is_too_long_is_refused_with_both_numbers(tmp_path: Path) -> None:
    longest = str(tmp_path / "x")
    longest += "x" * (limits.MAX_SOCKET_PATH_BYTES - len(longest))
    Listener(longest).close()
    with pytest.raises(
        SocketError, match=f"{limits.MAX_SOCKET_PATH_BYTES + 1} bytes .* {limits.MAX_SOCKET_PATH_BYTES}"
    ):
        Listener(longest + "x")


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SocketError, match="nowhere"):
        Listener(tmp_path / "nowhere" / "s")


def test_a_folder_in_which_everyone_may_replace_files_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(SocketError, match="Everyone"):
        Listener(tmp_path / "s")
    tmp_path.chmod(0o1777)
    Listener(tmp_path / "s").close()


def test_close_leaves_a_socket_that_is_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "s"
    listener = Listener(path)
    path.unlink()
    path.write_text("another's")
    listener.close()
    assert path.read_text() == "another's"


def test_of_many_that_start_at_once_beside_a_stale_socket_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    barrier = threading.Barrier(8)
    winners: list[Listener] = []
    losers: list[SocketError] = []

    def begin() -> None:
        barrier.wait()
        try:
            listener = Listener(path)
            listener.socket.listen()
            winners.append(listener)
        except SocketError as error:
            losers.append(error)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 1
    assert len(losers) == 7
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    winners[0].close()
