"""Our SCTP with aiortc's own on the other side, both ways round."""

from __future__ import annotations

import asyncio
import os

import pytest

from peerllm.link import LinkConfig, Urgency
from tests.link.pair import SECONDS, Pair


@pytest.mark.parametrize(("left", "right"), [(True, False), (False, True), (False, False)])
async def test_blocks_pass_between_ours_and_stock(left: bool, right: bool) -> None:
    pair = Pair(right=LinkConfig(loopback=True, own_sctp=right), own_sctp=left)
    try:
        await pair.start()
        async with asyncio.timeout(SECONDS):
            for size in (1, 4_000, 200_000, 1_000_000):
                message = os.urandom(size)
                await pair.left.link.send(message, Urgency.BULK)
                assert await pair.right.link.receive() == message
                await pair.right.link.send(message)
                assert await pair.left.link.receive() == message
    finally:
        await pair.close()
