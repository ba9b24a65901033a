"""A link's end as a process on a host of the lab: `python -m tests.lab.peer left|right '{"own_sctp": true}'`.

The room is the process that started it: attempts and their bodies pass over standard input and output as lines of JSON,
beside commands and their results. So the lab's network carries the links and nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import sys
import time
from typing import Any

import structlog
import uvloop

from peerllm.link import Link, LinkConfig, LinkState, TurnServer, bench
from peerllm.protocol.errors import PeerllmError

IDS = {"left": b"\1" * 32, "right": b"\2" * 32}


def tell(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


class PipeAttempt:
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.session_key = bytes([epoch % 256]) * 32
        self.inbox: asyncio.Queue[bytes] = asyncio.Queue()

    async def send(self, body: bytes) -> None:
        tell(room="body", epoch=self.epoch, body=base64.b64encode(body).decode())

    async def receive(self) -> bytes:
        return await self.inbox.get()


class PipeSeat:
    def __init__(self, name: str) -> None:
        self.local_id = IDS[name]
        self.remote_id = IDS["right" if name == "left" else "left"]
        self.is_opener = name == "left"
        self._attempts: dict[int, PipeAttempt] = {}
        self._begun: asyncio.Queue[PipeAttempt] = asyncio.Queue()

    async def begin(self, epoch: int) -> PipeAttempt:
        tell(room="begin", epoch=epoch)
        self._attempts[epoch] = PipeAttempt(epoch)
        return self._attempts[epoch]

    async def accept(self) -> PipeAttempt:
        return await self._begun.get()

    def suspect(self) -> None: ...

    async def close(self) -> None: ...

    def take(self, message: dict[str, Any]) -> None:
        epoch = message["epoch"]
        if message["room"] == "begin":
            self._attempts[epoch] = PipeAttempt(epoch)
            self._begun.put_nowait(self._attempts[epoch])
        elif epoch in self._attempts:
            self._attempts[epoch].inbox.put_nowait(base64.b64decode(message["body"]))


async def run(name: str, options: dict[str, Any]) -> None:
    options["turn"] = tuple(TurnServer(**server) for server in options.get("turn", ()))
    options["stun"] = tuple((host, port) for host, port in options.get("stun", ()))
    seat = PipeSeat(name)
    link = Link(seat, LinkConfig(**options), lambda: name.encode(), lambda body: None)
    link.on_state = lambda state: tell(state=state.value, at=time.monotonic(), epoch=link.epoch)
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    tasks: set[asyncio.Task[None]] = set()
    try:
        while line := await reader.readline():
            message = json.loads(line)
            if "room" in message:
                seat.take(message)
            elif message["do"] == "close":
                break
            else:
                task = asyncio.create_task(_do(link, message))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
    finally:
        for task in tasks:
            task.cancel()
        begun = time.monotonic()
        await link.close()
        tell(closed_in=time.monotonic() - begun)


async def _do(link: Link, message: dict[str, Any]) -> None:
    name = message.pop("do")
    begun = time.monotonic()
    try:
        result: Any = None
        if name == "start":
            await link.start()
            result = {"path": link.stats().path, "seconds": time.monotonic() - begun, "epoch": link.epoch}
        elif name == "serve":
            await bench.serve(link)
        elif name == "measure":
            result = await bench.measure(link, **message)
        elif name == "steady":
            result = await bench.measure_steady(link, **message)
        elif name == "bulk":
            result = await bench.measure_bulk(link, **message)
        elif name == "stats":
            result = _stats(link)
        tell(done=name, result=result)
    except PeerllmError as error:
        tell(done=name, error=error.code, message=error.message)


def _stats(link: Link) -> dict[str, Any]:
    """LinkStats, this process's seconds of CPU, and what our SCTP believes of the path."""
    stats = link.stats()
    values = {name: getattr(stats, name) for name in type(stats).__slots__}
    values = {name: value.value if isinstance(value, LinkState) else value for name, value in values.items()}
    values["cpu"] = time.process_time()
    association = getattr(link._current._transport._sctp, "_association", None) if link._current is not None else None
    if association is not None:
        window = association.sender.window
        for name in ("size", "base", "smoothed", "variation", "train_rate"):
            values[f"window_{name}"] = getattr(window, name)
    return values


def main() -> None:
    logging.basicConfig(stream=sys.stderr)
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    )
    uvloop.run(run(sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}))


if __name__ == "__main__":
    main()
