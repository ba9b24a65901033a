"""A worker process and the daemon's end of its pipe, for tests that speak to one without a daemon."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import IO

from peerllm.protocol.pipe import FrameReader, encode_frame


class Worker:
    """A worker process and the daemon's end of its pipe."""

    def __init__(self, *arguments: str, environment: Mapping[str, str] | None = None, stderr: IO | None = None) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(60)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "peerllm.engine.worker", "--fd", str(theirs.fileno()), *arguments],
            pass_fds=[theirs.fileno()],
            env=os.environ | (environment or {}),
            stderr=stderr,
        )
        theirs.close()
        self._reader = FrameReader()
        self._frames: deque = deque()
        self._number = 0
        self.events: list[tuple[float, dict]] = []

    def ask(self, op, payload=b"", **fields) -> int:
        self._number += 1
        for buffer in encode_frame({"op": op, "id": self._number, **fields}, payload):
            self.socket.sendall(buffer)
        return self._number

    def frame(self):
        while not self._frames:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._frames.extend(self._reader.feed(data))
        return self._frames.popleft()

    def answer(self, number):
        while True:
            header, payload = self.frame()
            if "event" in header:
                self.events.append((time.monotonic(), header))
                continue
            assert header["id"] == number
            return header, payload

    def call(self, op, payload=b"", **fields):
        header, out = self.answer(self.ask(op, payload, **fields))
        assert "error" not in header, header
        return header["ok"], out

    def load(self, folder, layers=(0, 2), **options):
        """The answer to `load`, on the CPU in float32 unless `options` say otherwise."""
        fields = {"dtype": "float32", "devices": ["cpu"], "codec": "exact", "context": 256, "draft": "ngram", **options}
        return self.call("load", folder=str(folder), layers=list(layers), **fields)[0]

    def stop(self):
        self.socket.close()
        try:
            return self.process.wait(10)
        finally:
            self.process.kill()
