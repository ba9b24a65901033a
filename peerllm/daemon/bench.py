"""`peerllm bench link`: how long blocks take between two machines, over the room and the link of the real thing."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from peerllm.daemon.config import DaemonConfig
from peerllm.daemon.events import Connected, Person, Progress
from peerllm.daemon.meeting import make_link, meet, tell_states
from peerllm.link import Link, bench
from peerllm.rooms import Room, SeatedPeer
from peerllm.rooms.keys import StateLock


async def bench_link(config: DaemonConfig, person: Person, *, samples: int) -> dict[str, Any] | None:
    """The joiner's figures (see link.bench.measure); None for the opener, which answers until the joiner is done.

    Raises:
        PeerllmError: no room, no path, the other side went away or says what it may not.
    """
    with StateLock(config.state_dir):
        peer, room = await meet(config, person.tell)
        link = make_link(config, peer, hello=lambda: b"", on_hello=lambda body: None)
        async with told_of_its_end(link, peer, room):
            await link.start()
            stats = link.stats()
            person.tell(Connected(stats.path, stats.rtt_ms))
            tell_states(link, person.tell)
            if peer.is_opener:
                await bench.serve(link)
                return None
            person.tell(Progress("measuring", 0.0))
            figures = await bench.measure(link, samples=samples)
            await bench.finish(link)
            return figures


@contextlib.asynccontextmanager
async def told_of_its_end(link: Link, peer: SeatedPeer, room: Room | None) -> AsyncIterator[None]:
    """Closes all three at the end, and tells the other side where that comes before its time."""
    try:
        yield
    except bench.Left:
        raise
    except BaseException:  # Ctrl-C is one too: the other side is not left waiting for this one
        await bench.leave(link)
        raise
    finally:
        await link.close()
        await peer.close()
        if room is not None:
            await room.close()
