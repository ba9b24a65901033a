"""A daemon in the foreground: state directory, socket, node, signals."""

from __future__ import annotations

import asyncio
import signal

import structlog

from peerllm.api import serve
from peerllm.daemon.config import DaemonConfig
from peerllm.daemon.events import Person
from peerllm.daemon.node import Node
from peerllm.rooms.keys import StateLock
from peerllm.telemetry.watchdog import LoopWatchdog

log = structlog.get_logger(__name__)


async def run(config: DaemonConfig, person: Person) -> None:
    """Serves until SIGINT or SIGTERM, or until the room cannot go on.

    Raises:
        PeerllmError: why it could not go on; for the user.
    """
    with StateLock(config.state_dir):
        await _serve(config, person)


async def _serve(config: DaemonConfig, person: Person) -> None:
    async with LoopWatchdog() as watchdog:
        node = Node(config, person, watchdog=watchdog)
        server = await serve(node, config.socket, group=config.socket_group)
        running = asyncio.create_task(node.run(), name="node")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, running.cancel)
        try:
            await running
        except asyncio.CancelledError:
            log.info("stopping")
        finally:
            await asyncio.gather(server.close(), node.close())
