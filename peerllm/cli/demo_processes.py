"""The demo's processes: a signaling server and two daemons, started one after the other, and none left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

from peerllm.cli.folders import private_folder
from peerllm.protocol.errors import PeerllmError

_PR_SET_PDEATHSIG = 1
_STOP_SECONDS = 1.0
_LOOK_SECONDS = 0.2
"""Between two looks at whether the processes live."""
_LONGEST_BASE = 60
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


_T = TypeVar("_T")


class DemoFailed(PeerllmError):
    code = "demo_failed"


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP wait. One that came while Python forks would be raised in a callback of the fork's,
    where exceptions are printed and forgotten; one a little later would leave a process that nobody knows of."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    """In the child: the kernel ends it when the demo is gone, however the demo ended (Linux; elsewhere nothing)."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """A process whose standard output is read line by line; its log goes to a file that is shown if it fails."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is the demo's to handle
                preexec_fn=_begin,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
            )
        self._buffer = b""
        self._is_end_awaited = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for(self, pattern: str, timeout: float, on_log: Callable[[str], None] | None = None) -> re.Match[str]:
        """The first match in its output. Raises DemoFailed, with the end of its log, if it ends or takes too long."""
        if self._process.stdout is None:
            raise DemoFailed(f"{self.name} has no output")
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                if match := re.search(pattern, self._buffer.decode(errors="replace"), re.MULTILINE):
                    return match
                if on_log is not None:
                    on_log(self._last_log_line())
                if time.monotonic() > deadline:
                    raise DemoFailed(f"the {self.name} process took more than {timeout:.0f} s")
                if not selector.select(_LOOK_SECONDS):
                    continue
                data = os.read(self._process.stdout.fileno(), 65536)
                if not data:
                    with contextlib.suppress(subprocess.TimeoutExpired):  # its output ends a moment before it does
                        self._process.wait(_LOOK_SECONDS)
                    how = self.ended_early() or "no more output"
                    raise DemoFailed(f"the {self.name} process ended early ({how})\n{self.log_tail()}")
                self._buffer += data

    def ended_early(self) -> str | None:
        """How it ended, if it did and `wait_end` was not called."""
        status = None if self._is_end_awaited else self._process.poll()
        if status is None:
            return None
        return f"killed by signal {-status}" if status < 0 else f"exit status {status}"

    def wait_end(self, timeout: float) -> int:
        """The exit status. Raises DemoFailed if it does not end in time."""
        self._is_end_awaited = True
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"the {self.name} process did not end within {timeout:.0f} s") from None

    def log_tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-15:]
        return "\n".join(f"  {self.name}: {line}" for line in lines)

    def _last_log_line(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else ""

    def ask_to_stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def stop(self, deadline: float) -> None:
        """Waits until `deadline` (monotonic), then kills. Its worker ends with it."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Stage:
    """Where the demo plays: a private folder for sockets, keys and logs, and the processes in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children: list[Child] = []

    def start(self, name: str, *command: str, env: Mapping[str, str] | None = None) -> Child:
        """`python -m command`, with `env` besides this process's own environment."""
        with _undisturbed():
            child = Child(name, [sys.executable, "-m", *command], self.folder, env or {})
            self.adopt(child)
        return child

    def adopt(self, child: Child) -> None:
        """Ends it with the rest."""
        self._children.append(child)

    def wait_for(
        self, child: Child, pattern: str, timeout: float, on_log: Callable[[str], None] | None = None
    ) -> re.Match[str]:
        """`child.wait_for`. Raises DemoFailed also as soon as another one has ended."""

        def look(line: str) -> None:
            self.check()
            if on_log is not None:
                on_log(line)

        return child.wait_for(pattern, timeout, look)

    def while_all_live(self, work: Callable[[], _T]) -> _T:
        """What `work()`, which asks the processes, gives. Raises DemoFailed as soon as one of them has ended."""
        # A thread that still waits for an answer must not keep this process.
        asking: Future[_T] = Future()

        def run() -> None:
            try:
                asking.set_result(work())
            except BaseException as error:
                asking.set_exception(error)

        threading.Thread(target=run, name="asking", daemon=True).start()
        while not wait([asking], _LOOK_SECONDS).done:
            self.check()
        if asking.exception() is not None:
            # A process that is killed is gone a moment after its connections, and says more than they do.
            time.sleep(_LOOK_SECONDS)
            self.check()
        return asking.result()

    def check(self) -> None:
        """Raises DemoFailed if one has ended that nobody waited for."""
        for child in self._children:
            if (how := child.ended_early()) is not None:
                raise DemoFailed(f"the {child.name} process ended early ({how})")

    def log_tails(self) -> str:
        return "\n".join(child.log_tail() for child in self._children)

    def stop(self) -> None:
        for child in self._children:
            child.ask_to_stop()
        deadline = time.monotonic() + _STOP_SECONDS
        for child in self._children:
            child.stop(deadline)


@contextlib.contextmanager
def stage() -> Iterator[Stage]:
    """A stage; at its end, however it comes, every process and the folder are gone. SIGTERM counts as Ctrl-C, and so
    does SIGHUP unless it is ignored, as `nohup` has it."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in _ENDS}
    signal.signal(signal.SIGTERM, interrupt)
    if before[signal.SIGHUP] is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, interrupt)
    # A Unix socket's path has room for about a hundred characters.
    base = Path(tempfile.gettempdir() if len(tempfile.gettempdir()) <= _LONGEST_BASE else "/tmp")
    try:
        with private_folder("demo", base) as folder:
            here = Stage(folder)
            try:
                yield here
            finally:
                # A second Ctrl-C, SIGTERM or SIGHUP must not leave half of it behind.
                for number in _ENDS:
                    signal.signal(number, signal.SIG_IGN)
                here.stop()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
