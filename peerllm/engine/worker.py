"""The engine worker: `python -m peerllm.engine.worker --fd N`, the daemon's child that owns torch.

Frames of `protocol.pipe` over a socket pair; the operations and the events are in docs/architecture.md. Three threads:
one reads, so that the daemon's end is noticed in mid-compute; one beats, from before torch is imported; the main one
computes. What waits between reading and computing is bounded, so that the daemon feels backpressure.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from typing import Any

from peerllm.protocol import limits
from peerllm.protocol.errors import EngineError, PeerllmError, ProtocolError
from peerllm.protocol.pipe import FrameReader, encode_frame

_READ_BYTES = 256 * limits.KIB
_HANG_UP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
_NICENESS = 5
_PROGRESS_SECONDS = 0.1
"""Progress goes out at most so often, and always at an end."""


class Pipe:
    """The worker's end: frames in through a bounded queue, frames out under a lock."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._connection = connection
        self._write_lock = threading.Lock()
        self._changed = threading.Condition()
        self._waiting: deque[tuple[dict[str, Any], bytes, int]] = deque()
        self._waiting_bytes = 0

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Writes one frame whole; waits while the daemon does not read. The daemon's end ends this process."""
        buffers = encode_frame(header, payload)
        try:
            with self._write_lock:
                for buffer in buffers:
                    self._connection.sendall(buffer)
        except OSError:
            _leave()

    def frames(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Frames in order, for the main thread; waits for each."""
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                header, payload, size = self._waiting.popleft()
                self._waiting_bytes -= size
                self._changed.notify_all()
            yield header, payload

    def read_forever(self) -> None:
        """The reading thread. Ends the process, whatever it computes, when the daemon's end is closed."""
        reader = FrameReader()
        try:
            while True:
                self._wait_for_room()
                data = self._connection.recv(_READ_BYTES)
                if not data:
                    _leave()
                for header, payload in reader.feed(data):
                    self._put(header, payload)
        except OSError:
            _leave()
        except ProtocolError as error:
            # The stream has no next frame to find any more.
            sys.stderr.write(f"engine worker: {error}\n")
            _leave(1)

    def _put(self, header: dict[str, Any], payload: bytes) -> None:
        size = len(payload) + limits.KIB
        with self._changed:
            self._waiting.append((header, payload, size))
            self._waiting_bytes += size
            self._changed.notify_all()

    def _wait_for_room(self) -> None:
        """Returns when little enough waits. A closed end is noticed all the same: nothing is read, but polled."""
        poll = select.poll()
        poll.register(self._connection, _HANG_UP)
        while True:
            with self._changed:
                if self._waiting_bytes <= limits.MAX_UNPROCESSED_BYTES:
                    return
                self._changed.wait(timeout=limits.HEARTBEAT_SECONDS / 5)
            if poll.poll(0):
                _leave()


def _leave(code: int = 0) -> None:
    # Not sys.exit: this may be any thread, and the main one may be in the middle of a kernel.
    os._exit(code)


def _beat(pipe: Pipe) -> None:
    while True:
        pipe.send({"event": "beat"})
        time.sleep(limits.HEARTBEAT_SECONDS)


class _Progress:
    """Tells the daemon how far an operation is, not too often."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._last = 0.0
        self._stage = ""

    def __call__(self, stage: str, fraction: float) -> None:
        now = time.monotonic()
        if stage == self._stage and fraction < 1.0 and now - self._last < _PROGRESS_SECONDS:
            return
        self._stage, self._last = stage, now
        self._pipe.send({"event": "progress", "stage": stage, "fraction": round(min(1.0, max(0.0, fraction)), 4)})


class _Refusing:
    """Stands in for the operations when torch or transformers cannot be used: every request gets the reason."""

    def __init__(self, error: EngineError) -> None:
        self._error = error

    def perform(self, op: str, header: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        raise self._error


def _operations(threads: int | None, progress: _Progress) -> Any:
    from peerllm.engine.versions import check_versions

    try:
        check_versions()
        from peerllm.engine.operations import Operations
    except EngineError as error:
        return _Refusing(error)
    except ImportError as error:
        return _Refusing(EngineError(f"the engine cannot start: {error}; install torch and transformers"))
    return Operations(threads=threads, progress=progress)


def serve(pipe: Pipe, threads: int | None) -> None:
    """Answers requests in order, for ever. An error is an answer; the worker survives it."""
    operations = _operations(threads, _Progress(pipe))
    for header, payload in pipe.frames():
        number = header.get("id")
        op = header.get("op")
        try:
            if type(op) is not str:
                raise ProtocolError("a request without an operation")
            answer, out = operations.perform(op, header, payload)
        except PeerllmError as error:
            pipe.send({"id": number, "error": {"code": error.code, "message": error.message, "param": error.param}})
        except Exception as error:  # the boundary of the process: torch raises what it likes
            traceback.print_exc()
            words = f"{op}: {type(error).__name__}: {error}"[:2000]
            pipe.send({"id": number, "error": {"code": EngineError.code, "message": words, "param": None}})
        else:
            pipe.send({"id": number, "ok": answer}, out)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m peerllm.engine.worker", description=__doc__.splitlines()[0])
    parser.add_argument("--fd", type=int, required=True, help="the worker's end of a socket pair")
    parser.add_argument("--threads", type=int, default=None, help="threads that torch may use")
    options = parser.parse_args(arguments)
    # Ctrl-C on a terminal reaches the whole group; the daemon decides, and closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # On a machine whose cores are all busy computing, the daemon's loop (pings, verdicts, clients) goes first.
    os.nice(_NICENESS)
    pipe = Pipe(socket.socket(fileno=options.fd))
    threading.Thread(target=pipe.read_forever, name="read", daemon=True).start()
    threading.Thread(target=_beat, args=(pipe,), name="beat", daemon=True).start()
    serve(pipe, options.threads)


if __name__ == "__main__":
    main()
