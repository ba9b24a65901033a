"""The one place that touches aiortc's private attributes: ORTC objects over our ICE connection, quiet when they end.

`tests/link/test_private_attributes.py` fails when the library changes under it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import structlog
from aiortc import (
    RTCCertificate,
    RTCDtlsParameters,
    RTCDtlsTransport,
    RTCIceGatherer,
    RTCIceTransport,
    RTCSctpTransport,
)
from aiortc.rtcdtlstransport import State as DtlsState
from aiortc.rtcsctptransport import (
    WEBRTC_BINARY,
    WEBRTC_DCEP,
    DataChunk,
    HeartbeatAckChunk,
    HeartbeatChunk,
    SackChunk,
)
from OpenSSL import SSL

from peerllm.link.aioice_private import IceConnection
from peerllm.link.sctp import wire
from peerllm.link.sctp.association import Association
from peerllm.protocol import limits

SUPPORTED = "1.16."
_VERSION = importlib.metadata.version("aiortc")
if not _VERSION.startswith(SUPPORTED):
    raise ImportError(
        f"peerllm.link knows the insides of aiortc {SUPPORTED}x, and {_VERSION} is installed; "
        f"install aiortc=={SUPPORTED}* or a release of peerllm that knows {_VERSION}"
    )

_MAX_RECORD_BYTES = 2048
_PROBE_INFO = 1
"""The heartbeat's one parameter (RFC 9260 section 3.3.5)."""
_PROBE_AFTER_SECONDS = (0.0, 1.0, 4.0)
_SLICE_SECONDS = 0.004
_CANCEL_AGAIN_SECONDS = 0.02

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


async def _end(task: asyncio.Task[None]) -> None:
    """Cancels until it has ended. Before Python 3.12, `asyncio.wait_for`, with which aiortc's handshake waits for
    datagrams, forgets a cancellation that comes together with one."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_AGAIN_SECONDS)
    if not task.cancelled():
        task.exception()  # seen, though nobody may ask: its stack is being closed


class DtlsTransport(RTCDtlsTransport):  # type: ignore[misc]
    """aiortc's handshake; then, for our SCTP, a way for data without a queue, a coroutine and a task switch."""

    def __init__(self, transport: RTCIceTransport, certificate: RTCCertificate) -> None:
        super().__init__(transport, [certificate])
        self._direct: IceConnection | None = None
        self._take: Callable[[bytes], None] | None = None
        self._sent = [0, 0]
        self._received = [0, 0]

    async def start(self, remoteParameters: RTCDtlsParameters) -> None:
        """As aiortc's, and a cancellation ends it."""
        handshake = asyncio.create_task(super().start(remoteParameters))
        try:
            await asyncio.wait([handshake])
        finally:
            await _end(handshake)
        handshake.result()

    def go_direct(self, connection: IceConnection, take: Callable[[bytes], None]) -> None:
        """From now on `take` gets each decrypted packet as its datagram arrives."""
        self._direct, self._take = connection, take
        connection.on_datagram = self._datagram

    def _datagram(self, data: bytes) -> None:
        take = self._take
        if take is None or self._state != DtlsState.CONNECTED:
            return
        self._received[0] += len(data)
        self._received[1] += 1
        try:
            self._ssl.bio_write(data)
            plain = self._ssl.recv(_MAX_RECORD_BYTES)
        except SSL.ZeroReturnError:
            self._set_state(DtlsState.CLOSED)
            return
        except SSL.Error:
            # No data in it: a repeated flight of the handshake, which OpenSSL may have an answer to.
            self._flush()
            return
        take(plain)

    def send_now(self, data: bytes) -> None:
        """As `_send_data`; what cannot be sent is dropped, as a network does."""
        if self._state == DtlsState.CONNECTED:
            with contextlib.suppress(SSL.Error):
                self._ssl.send(data)
                self._flush()

    def _flush(self) -> None:
        try:
            data = self._ssl.bio_read(_MAX_RECORD_BYTES)
        except SSL.Error:
            return
        if self._direct is not None and self._direct.send_now(data):
            self._sent[0] += len(data)
            self._sent[1] += 1

    def counters(self) -> Counters:
        stats = self._get_stats()[self._stats_id]
        return Counters(
            stats.bytesSent + self._sent[0],
            stats.bytesReceived + self._received[0],
            stats.packetsSent + self._sent[1],
            stats.packetsReceived + self._received[1],
        )

    async def stop(self) -> None:
        """As aiortc's, and its task has ended afterwards."""
        task = self._task
        await super().stop()
        self._take = None
        if task is not None:
            await _end(task)


class StockSctpTransport(RTCSctpTransport):  # type: ignore[misc]
    """aiortc's own, with failures that end the association instead of a task nobody looks at."""

    def __init__(self, transport: RTCDtlsTransport) -> None:
        super().__init__(transport)
        self.retransmitted = 0
        self.on_broken: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None

    slice_bytes = limits.MAX_SLICE_BYTES
    """How much to hand over in one piece."""

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


class SctpTransport(StockSctpTransport):
    """aiortc's handshake and rare chunks; DATA and SACK are `sctp.Association`'s. Speaks with the stock one."""

    def __init__(self, transport: DtlsTransport) -> None:
        super().__init__(transport)
        self._dtls = transport
        # FORWARD TSN would tell of chunks that our receiver waits for; nothing of ours is partially reliable.
        self._local_partial_reliability = False
        self._rto = limits.SCTP_FIRST_T3_SECONDS / 2
        self._association: Association | None = None
        self._inbound: wire.Prefix | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._is_polling = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._probes: list[asyncio.TimerHandle] = []

    # --- From the channel ---------------------------------------------------------------------------------------------

    @property
    def wants_more(self) -> bool:
        association = self._association
        return association is None or association.sender.queued_bytes < 2 * association.sender.max_packet_bytes

    @property
    def slice_bytes(self) -> int:  # type: ignore[override]
        """What leaves in a few milliseconds, so that something more urgent does not wait longer for its turn. Whole
        packets: every slice's last one would otherwise carry little more than its headers."""
        if self._association is None:
            return limits.MAX_SLICE_BYTES
        sender = self._association.sender
        rate = sender.window.rate
        most = limits.MAX_SLICE_BYTES if rate is None else min(rate * _SLICE_SECONDS, limits.MAX_SLICE_BYTES)
        return max(1, int(most) // sender.payload_bytes) * sender.payload_bytes

    def _data_channel_send(self, channel: Any, data: bytes | str) -> None:
        if self._association is None or self._data_channel_queue or not isinstance(data, bytes) or not data:
            super()._data_channel_send(channel, data)
            return
        self._association.sender.put(channel.id, WEBRTC_BINARY, data, ordered=channel.ordered)
        self._poll()

    async def _data_channel_flush(self) -> None:
        if self._association is None or self._association_state != self.State.ESTABLISHED:
            return
        while self._data_channel_queue:
            channel, protocol, data = self._data_channel_queue.popleft()
            if channel.id is None:
                number = self._data_channel_id
                while number in self._data_channels:
                    number += 2
                self._data_channels[number] = channel
                channel._setId(number)
            self._association.sender.put(channel.id, protocol, data, ordered=channel.ordered)
            if protocol != WEBRTC_DCEP:
                channel._addBufferedAmount(-len(data))
        self._poll()
        await self._transmit_reconfig()

    # --- From the network ---------------------------------------------------------------------------------------------

    async def _handle_data(self, data: bytes) -> None:
        self.take(data)

    def take(self, packet: bytes) -> None:
        """One packet. No exception leaves it."""
        try:
            chunks = None
            if self._inbound is not None and self._association is not None:
                if not self._inbound.has_sent(packet):
                    return
                chunks = wire.parse(packet)
            if chunks is None:
                self._spawn(super()._handle_data(packet))
            elif self._association is not None:
                self._association.receive(chunks, time.monotonic())
                self._last_received_tsn = self._association.receiver.cumulative
                self._poll()
        except ValueError as error:
            log.warning("sctp.refused", error=str(error))
            if self.on_broken is not None:
                self.on_broken()
        except Exception as error:
            log.exception("sctp.broken", error=repr(error))
            if self.on_broken is not None:
                self.on_broken()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _receive_chunk(self, chunk: Any) -> None:
        if isinstance(chunk, (DataChunk, SackChunk)):
            self._take_bundled(chunk)
        elif isinstance(chunk, HeartbeatAckChunk):
            self._probe_answered(chunk)
        else:
            await super()._receive_chunk(chunk)

    def _take_bundled(self, chunk: Any) -> None:
        """DATA or SACK beside a chunk of another kind, or before the handshake's end."""
        association = self._make_association()
        if association is not None:
            packet = bytes(wire.COMMON_BYTES) + bytes(chunk)
            association.receive(wire.parse(packet) or [], time.monotonic())
            self._last_received_tsn = association.receiver.cumulative
            self._poll()

    def _make_association(self) -> Association | None:
        if self._association is None and self._last_received_tsn is not None:
            ports = self._local_port, self._remote_port
            self._inbound = wire.Prefix(ports[1], ports[0], self._local_verification_tag)
            self._association = Association(
                first_tsn=self._local_tsn,
                last_tsn=self._last_received_tsn,
                prefix=wire.Prefix(ports[0], ports[1], self._remote_verification_tag),
                max_packet_bytes=limits.SCTP_SAFE_PACKET_BYTES,
                deliver=self._deliver,
            )
        return self._association

    def _deliver(self, stream: int, protocol: int, message: bytes) -> None:
        channel = self._data_channels.get(stream)
        if protocol == WEBRTC_BINARY and channel is not None:
            channel.emit("message", message)
        else:
            self._spawn(self._receive_quietly(stream, protocol, message))

    async def _receive_quietly(self, stream: int, protocol: int, message: bytes) -> None:
        try:
            await self._receive(stream, protocol, message)
        except Exception as error:
            log.warning("sctp.message_refused", error=repr(error))

    # --- To the network -----------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        """Sends what may leave, asks for more while there is room for it, and sets the timer."""
        association = self._association
        if association is None or self._is_polling:
            return
        self._is_polling = True
        try:
            while True:
                for packet in association.poll(time.monotonic()):
                    self._dtls.send_now(packet)
                waited = association.sender.next_tsn
                if self.wants_more and self.on_writable is not None:
                    self.on_writable()
                if association.sender.next_tsn == waited:
                    break
        finally:
            self._is_polling = False
        self._local_tsn = association.sender.next_tsn
        self.retransmitted = association.sender.retransmitted
        self._arm(association.next_timer)

    def _arm(self, at: float | None) -> None:
        if at is None or (self._timer is not None and self._timer_at <= at):
            return  # one that fires too early looks again; that costs less than to set it anew for each packet
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_later(max(0.0, at - time.monotonic()), self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer = None
        association = self._association
        if association is None:
            return
        due = association.next_timer
        if due is not None and due <= time.monotonic():
            self._poll()
        else:
            self._arm(due)

    # --- The path's packet size (RFC 8899) ----------------------------------------------------------------------------

    def _probe_packet_sizes(self) -> None:
        for size in limits.SCTP_PROBED_PACKET_BYTES:
            if self._association is not None and size > self._association.sender.max_packet_bytes:
                probe = HeartbeatChunk()
                padding = size - wire.COMMON_BYTES - 8
                probe.params.append((_PROBE_INFO, bytes(padding)))
                self._spawn(self._send_chunk(probe))

    def _probe_answered(self, chunk: Any) -> None:
        size = len(bytes(chunk)) + wire.COMMON_BYTES
        if self._association is not None and size in limits.SCTP_PROBED_PACKET_BYTES:
            sender = self._association.sender
            sender.max_packet_bytes = max(sender.max_packet_bytes, size)

    # --- aiortc's own sending, replaced -------------------------------------------------------------------------------

    async def _transmit(self) -> None:
        self._poll()

    async def _send_sack(self) -> None:
        self._sack_needed = False

    def _set_state(self, state: Any) -> None:
        if state == self.State.ESTABLISHED and self._make_association() is not None and not self._probes:
            self._probes = [self._loop.call_later(after, self._probe_packet_sizes) for after in _PROBE_AFTER_SECONDS]
        if state == self.State.CLOSED:
            self._association = None
            for timer in (self._timer, *self._probes):
                if timer is not None:
                    timer.cancel()
            self._timer = None
        super()._set_state(state)

    async def stop(self) -> None:
        await super().stop()
        if self._tasks:
            await asyncio.wait(self._tasks)
