"""The Unix socket's place in the file system: private from its first moment, and never taken from a live daemon.

A lock file beside the socket says who may touch the socket's path. It is never unlinked: a daemon that unlinked it
could take away the lock of a second one that opened it in between, and a third would then get a lock of its own.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import socket
import stat
from pathlib import Path

from peerllm.protocol import limits
from peerllm.protocol.errors import SocketError


class Listener:
    """A bound, not yet listening socket at `path`, and the lock on that path. `close` gives both back.

    Args:
        path: where; its folder must exist, and nobody else may be able to replace files in it.
        group: members of this group may connect too (mode 0660); otherwise only the owner (0600).

    Raises:
        SocketError: the reason, and what to do, in words.
    """

    def __init__(self, path: str | os.PathLike[str], *, group: str | None = None) -> None:
        self.path = _checked_path(os.fspath(path))
        group_id = None if group is None else _group_id(group)
        self._lock = _lock(self.path)
        try:
            _remove_stale(self.path)
            self.socket = _bind(self.path, group_id)
        except BaseException:
            os.close(self._lock)
            raise
        status = self.path.lstat()
        self._identity = (status.st_dev, status.st_ino)

    def close(self) -> None:
        """Removes the socket if it is still ours, then gives the lock back. May be called twice."""
        if self._lock < 0:
            return
        self.socket.close()
        try:
            status = self.path.lstat()
            if (status.st_dev, status.st_ino) == self._identity:
                self.path.unlink()
        except OSError:
            pass  # gone already, or its folder is
        finally:
            os.close(self._lock)
            self._lock = -1


def _checked_path(path: str) -> Path:
    if path.startswith(("\0", "@")) or "\0" in path:
        raise SocketError("Abstract socket names have no owner and no mode; give --socket a path in a folder of yours.")
    size = len(os.fsencode(path))
    if size > limits.MAX_SOCKET_PATH_BYTES:
        raise SocketError(
            f"The socket's path is {size} bytes long and the system allows {limits.MAX_SOCKET_PATH_BYTES}: {path}. "
            "Give --socket a shorter one."
        )
    place = Path(path)
    try:
        folder = place.parent.stat()
    except OSError as error:
        raise SocketError(
            f"The folder {place.parent} for the socket cannot be used ({error.strerror}). Make it, or give --socket "
            "another path."
        ) from error
    if folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
        raise SocketError(
            f"Everyone may replace files in {place.parent}, so a socket there is nobody's. Give --socket another path."
        )
    return place


def _group_id(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise SocketError(f"There is no group {name!r} on this machine to give the socket to.") from None


def _lock(path: Path) -> int:
    lock_path = path.with_name(path.name + ".lock")
    try:
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise SocketError(f"The lock file {lock_path} cannot be opened ({error.strerror}).") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise SocketError(f"The lock file {lock_path} cannot be locked ({error.strerror}).") from error
        raise SocketError(
            f"Another peerllm daemon has the socket {path}. Stop it, or give this one another path with --socket."
        ) from None
    return lock


def _remove_stale(path: Path) -> None:
    """Under the lock: removes the socket that a killed daemon left behind, and nothing else."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketError(f"{path} exists and is not a socket; nothing was removed. Give --socket another path.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full backlog is a live listener too
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except FileNotFoundError:
            return
        except BlockingIOError:
            pass
        except OSError as error:
            raise SocketError(f"The socket {path} is there and cannot be tried ({error.strerror}).") from error
    raise SocketError(f"Another program listens on {path}. Give --socket another path.")


def _bind(path: Path, group_id: int | None) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # On Linux the file gets the mode of the unbound socket, less the umask: it never exists with another one.
        os.fchmod(sock.fileno(), 0o600)
        sock.bind(os.fspath(path))
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & 0o077:
            path.unlink()
            raise SocketError(f"The socket {path} came to be with mode {mode:o}; this system cannot make it private.")
        # Nobody can connect before listen(), so a group's members find the door either shut or theirs.
        if group_id is not None:
            os.chown(path, -1, group_id, follow_symlinks=False)
        path.chmod(0o600 if group_id is None else 0o660)
    except OSError as error:
        sock.close()
        raise SocketError(f"The socket {path} cannot be made ({error.strerror}).") from error
    except BaseException:
        sock.close()
        raise
    return sock
