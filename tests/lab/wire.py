"""The wire: raw frames between ports, with delay, jitter, loss, reordering, rate and buffer for each, on one machine.

    python -m tests.lab.wire PORT=DEVICE …        in a namespace that holds one end of each pair

Lines of JSON on standard input change a port while it runs: {"port": "a", "loss": 0.005}. End of input ends it.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import random
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, fields

_ETH_P_ALL = 3
_PACKET_OUTGOING = 4
_BATCH = 64
_PREAMBLE = 24
"""Bytes of Ethernet that no packet socket shows."""


@dataclass
class Shape:
    """What happens to frames that enter at a port; delay alone counts on the way out too."""

    delay: float = 0.0
    """Seconds, added to frames in and to frames out."""
    jitter: float = 0.0
    """Up to so many seconds more, each frame its own: frames overtake each other."""
    loss: float = 0.0
    rate: float = 0.0
    """Bits a second; 0 is unlimited."""
    buffer: float = 0.1
    """Seconds of the rate; what does not fit is lost."""
    mtu: int = 0
    """IP packets that are longer vanish without a word; 0 is no limit."""
    is_cut: bool = False


class Port:
    def __init__(self, name: str, device: str) -> None:
        self.name = name
        self.shape = Shape()
        self.free_at = 0.0
        self.dropped = 0
        self.waits: list[float] = []
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            self.socket.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
        self.socket.bind((device, 0))
        self.socket.setblocking(False)

    def due(self, length: int, now: float) -> float | None:
        """When a frame that enters now has left this port's queue and delay; None: it is lost."""
        shape = self.shape
        if shape.is_cut or (shape.mtu and length - 14 > shape.mtu):
            return None
        left = now
        if shape.rate:
            wait = max(0.0, self.free_at - now)
            if wait > shape.buffer:
                self.dropped += 1
                return None
            self.waits.append(wait)
            left = self.free_at = now + wait + 8 * (length + _PREAMBLE) / shape.rate
        if shape.loss and random.random() < shape.loss:
            return None
        return left + shape.delay + (random.random() * shape.jitter if shape.jitter else 0.0)


class Wire:
    def __init__(self, ports: list[Port]) -> None:
        self._ports = ports
        self._by_name = {port.name: port for port in ports}
        self._by_mac: dict[bytes, Port] = {}
        self._waiting: list[tuple[float, int, Port, bytes]] = []
        self._order = itertools.count()
        self._sockets = {port.socket.fileno(): port for port in ports}
        self._input = b""

    def run(self) -> None:
        stdin = sys.stdin.fileno()
        watched = [stdin, *self._sockets]
        while True:
            timeout = None
            if self._waiting:
                timeout = max(0.0, self._waiting[0][0] - time.monotonic())
            ready, _, _ = select.select(watched, [], [], timeout)
            self._send_due()
            for descriptor in ready:
                if descriptor == stdin:
                    if not self._command(os.read(stdin, 65536)):
                        return
                else:
                    self._receive(self._sockets[descriptor])
            self._send_due()

    def _receive(self, port: Port) -> None:
        for _ in range(_BATCH):
            try:
                frame, address = port.socket.recvfrom(65536)
            except BlockingIOError:
                return
            if address[2] == _PACKET_OUTGOING:
                continue
            due = port.due(len(frame), time.monotonic())
            self._by_mac[frame[6:12]] = port
            if due is None:
                continue
            known = None if frame[0] & 1 else self._by_mac.get(frame[:6])
            for target in [known] if known is not None else self._ports:
                if target is not port and not target.shape.is_cut:
                    heapq.heappush(self._waiting, (due + target.shape.delay, next(self._order), target, frame))

    def _send_due(self) -> None:
        waiting = self._waiting
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, port, frame = heapq.heappop(waiting)
            try:
                port.socket.send(frame)
            except OSError:
                port.dropped += 1  # its other end is gone, or its queue is full: a wire does not complain

    def _command(self, data: bytes) -> bool:
        """False at the end of input."""
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            change = json.loads(line)
            port = self._by_name[change.pop("port")]
            if change.pop("report", False):
                waits = sorted(port.waits)
                p95 = waits[int(len(waits) * 0.95)] if waits else 0.0
                print(json.dumps({"p95_wait": p95, "frames": len(waits), "dropped": port.dropped}), flush=True)
                port.waits.clear()
            for name, value in change.items():
                if name not in {field.name for field in fields(Shape)}:
                    raise SystemExit(f"a port has no {name}")
                setattr(port.shape, name, value)
            if change:
                port.free_at = 0.0
                print("{}", flush=True)
        return bool(data)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the lab, which ends this by closing its input
    with contextlib.suppress(PermissionError):
        os.nice(-10)  # a wire that waits for its turn is jitter that nobody asked for
    Wire([Port(*argument.split("=", 1)) for argument in sys.argv[1:]]).run()


if __name__ == "__main__":
    main()
