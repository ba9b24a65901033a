"""The one place that touches aiortc's private attributes: ORTC objects over our ICE connection, quiet when they end.

`tests/link/test_private_attributes.py` fails when the library changes under it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
from collections.abc import Callable
from typing import Any, NamedTuple

import structlog
from aiortc import (
    RTCCertificate,
    RTCDtlsTransport,
    RTCIceGatherer,
    RTCIceTransport,
    RTCSctpTransport,
)
from aiortc.rtcsctptransport import DataChunk

from peerllm.link.aioice_private import IceConnection

SUPPORTED = "1.16."
_VERSION = importlib.metadata.version("aiortc")
if not _VERSION.startswith(SUPPORTED):
    raise ImportError(
        f"peerllm.link knows the insides of aiortc {SUPPORTED}x, and {_VERSION} is installed; "
        f"install aiortc=={SUPPORTED}* or a release of peerllm that knows {_VERSION}"
    )

log = structlog.get_logger(__name__)


class Counters(NamedTuple):
    bytes_sent: int
    bytes_received: int
    packets_sent: int
    packets_received: int


def ice_transport(connection: IceConnection) -> RTCIceTransport:
    """aiortc's ICE transport over a connection of ours."""
    gatherer = RTCIceGatherer(iceServers=[])
    gatherer._connection = connection
    return RTCIceTransport(gatherer)


class DtlsTransport(RTCDtlsTransport):  # type: ignore[misc]
    def __init__(self, transport: RTCIceTransport, certificate: RTCCertificate) -> None:
        super().__init__(transport, [certificate])

    def counters(self) -> Counters:
        stats = self._get_stats()[self._stats_id]
        return Counters(stats.bytesSent, stats.bytesReceived, stats.packetsSent, stats.packetsReceived)

    async def stop(self) -> None:
        """As aiortc's, and its task has ended afterwards."""
        task = self._task
        await super().stop()
        if task is not None:
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await task


class StockSctpTransport(RTCSctpTransport):  # type: ignore[misc]
    """aiortc's own, with failures that end the association instead of a task nobody looks at."""

    def __init__(self, transport: RTCDtlsTransport) -> None:
        super().__init__(transport)
        self.retransmitted = 0
        self.on_broken: Callable[[], None] | None = None

    @property
    def wants_more(self) -> bool:
        """Its queue beside the channel's own holds one message at most."""
        return True

    async def _send_chunk(self, chunk: Any) -> None:
        if isinstance(chunk, DataChunk) and chunk._sent_count > 1:
            self.retransmitted += 1
        # Timers and flushes run in tasks of their own, also while the connection ends under them.
        with contextlib.suppress(ConnectionError):
            await super()._send_chunk(chunk)

    async def _handle_data(self, data: bytes) -> None:
        try:
            await super()._handle_data(data)
        except Exception as error:
            # Asserts and parse errors of aiortc's on what a peer sent would end the DTLS task without a word.
            log.warning("sctp.broken", error=repr(error))
            if self.on_broken is not None:
                self.on_broken()
