"""What is on its way: chunks in flight, what is lost, what leaves next and when."""

from __future__ import annotations

from collections import deque

from peerllm.link.sctp import wire
from peerllm.link.sctp.window import PACKET, Window
from peerllm.link.sctp.wire import FIRST_FRAGMENT, IMMEDIATE, LAST_FRAGMENT, UNORDERED, Prefix, SackChunk
from peerllm.protocol import limits

_MIN_BURST = 4 * PACKET
_BURST_SECONDS = 0.01
"""What a late timer may catch up at once: a busy machine wakes us late."""
_FIRST_BURST = limits.SCTP_INITIAL_PACKETS * PACKET
"""What leaves at once after a pause: a train, whose answers' spacing is the bottleneck's rate and not our pacing's."""
_MAX_T3_SECONDS = 8.0
_REORDERING_FLOOR_SECONDS = 0.004
_REORDERING_SHARE = 1 / 16
_REORDERING_ROUNDS = 16
_MAX_REORDERING_MULTIPLE = 16
_MAX_JUDGED = 1024


class Chunk:
    """One DATA chunk from the moment it has a TSN until it is acknowledged."""

    __slots__ = (
        "flags",
        "is_acked",
        "is_in_flight",
        "payload",
        "protocol",
        "sending",
        "sends",
        "sent_at",
        "sequence",
        "size",
        "stream_id",
        "tsn",
    )

    def __init__(self, tsn: int, flags: int, stream_id: int, sequence: int, protocol: int, payload: bytes) -> None:
        self.tsn = tsn
        self.flags = flags
        self.stream_id = stream_id
        self.sequence = sequence
        self.protocol = protocol
        self.payload = payload
        self.size = len(payload) + wire.COMMON_BYTES + wire.DATA_BYTES
        self.sends = 0
        self.sending = 0
        self.sent_at = 0.0
        self.is_acked = False
        self.is_in_flight = False


class Sender:
    """
    Args:
        first_tsn: of the first chunk.
        prefix: of its packets.
        max_packet_bytes: an SCTP packet's, all headers of SCTP included; may be raised later.
    """

    def __init__(self, first_tsn: int, prefix: Prefix, max_packet_bytes: int) -> None:
        self.window = Window()
        self.max_packet_bytes = max_packet_bytes
        self.retransmitted = 0
        self.in_flight = 0
        self.queued_bytes = 0
        """Of chunks that were never sent."""
        self.next_tsn = first_tsn
        self._prefix = prefix
        self._acked_tsn = (first_tsn - 1) % wire.MODULO
        self._queue: deque[Chunk] = deque()
        self._unacked: deque[Chunk] = deque()
        """Every chunk that was sent, from the cumulative TSN on: its index is its distance."""
        self._by_time: deque[tuple[Chunk, int]] = deque()
        self._lost: deque[Chunk] = deque()
        self._sequences: dict[int, int] = {}
        self._seen_gaps: dict[int, int] = {}
        self._rack: tuple[float, int] = (0.0, 0)
        """When the newest of what has arrived was sent, and how many sendings there were until then."""
        self._sendings = 0
        self._rack_rtt = 0.0
        self._reordering_multiple = 1
        self._reordering_until = 0.0
        self._reordering_raised = 0.0
        self._judged_lost: set[int] = set()
        self._rack_at: float | None = None
        self._probe_at: float | None = None
        self._t3_at: float | None = None
        self._t3_backoff = 0
        self._paced_at = 0.0
        self._allowance = float(_MIN_BURST)
        self._paced_until: float | None = None
        self._remote_window = limits.SCTP_MAX_WINDOW_BYTES

    @property
    def payload_bytes(self) -> int:
        """What a full packet carries of a message."""
        return (self.max_packet_bytes - wire.COMMON_BYTES - wire.DATA_BYTES) & ~3

    # --- From above ---------------------------------------------------------------------------------------------------

    def put(self, stream_id: int, protocol: int, message: bytes, *, ordered: bool) -> None:
        """Cuts a message, which is not empty, into chunks that wait for the window."""
        sequence = self._sequences.get(stream_id, 0) if ordered else 0
        if ordered:
            self._sequences[stream_id] = (sequence + 1) & 0xFFFF
        room = self.payload_bytes
        flags = FIRST_FRAGMENT if ordered else FIRST_FRAGMENT | UNORDERED
        for at in range(0, len(message), room):
            if at + room >= len(message):
                flags |= LAST_FRAGMENT
            self._queue.append(Chunk(self.next_tsn, flags, stream_id, sequence, protocol, message[at : at + room]))
            self.next_tsn = (self.next_tsn + 1) % wire.MODULO
            flags &= ~FIRST_FRAGMENT
        self.queued_bytes += len(message)

    # --- What leaves --------------------------------------------------------------------------------------------------

    def poll(self, now: float, sack: bytes = b"") -> list[bytes]:
        """Packets to send now. A `sack` that waits goes along with the first that has room, or alone."""
        packets: list[bytes] = []
        if self._lost or self._queue:
            self._replenish(now)
            while self._lost or self._queue:
                chunk = self._lost[0] if self._lost else self._queue[0]
                if chunk.is_acked:
                    self._lost.popleft()
                    continue
                if self.in_flight and not self._has_window(chunk):
                    self.window.limited()
                    break
                if self._allowance <= 0:
                    break
                if self._lost:
                    self._lost.popleft()
                    self.retransmitted += 1
                else:
                    self._queue.popleft()
                    self._unacked.append(chunk)
                    self.queued_bytes -= len(chunk.payload)
                packets.append(self._send(chunk, now, sack))
                if sack and len(packets[-1]) > chunk.size + 3:
                    sack = b""
            self._paced_until = self._when_allowed(now)
        if sack:
            packets.append(self._prefix.packet(sack))
        return packets

    def _has_window(self, chunk: Chunk) -> bool:
        return self.in_flight + chunk.size <= self.window.size and self.in_flight + chunk.size <= self._remote_window

    def _replenish(self, now: float) -> None:
        rate = self.window.rate
        if rate is None:
            self._allowance = limits.SCTP_MAX_WINDOW_BYTES
            return
        burst = max(_MIN_BURST, rate * _BURST_SECONDS)
        self._allowance = min(self._allowance + rate * (now - self._paced_at), burst)
        if not self.in_flight:
            self._allowance = _FIRST_BURST
        self._paced_at = now

    def _when_allowed(self, now: float) -> float | None:
        """When pacing, and nothing but pacing, will let more go."""
        if self._allowance > 0 or not (self._lost or self._queue):
            return None
        rate = self.window.rate
        return None if rate is None else now + max(0.001, -self._allowance / rate)

    def _send(self, chunk: Chunk, now: float, sack: bytes = b"") -> bytes:
        chunk.sends += 1
        chunk.sent_at = now
        self._sendings += 1
        chunk.sending = self._sendings
        if not chunk.is_in_flight:
            chunk.is_in_flight = True
            self.in_flight += chunk.size
        self._allowance -= chunk.size
        self._by_time.append((chunk, chunk.sends))
        flags = chunk.flags
        if not self._queue and not self._lost:
            flags |= IMMEDIATE
        data = wire.data_chunk(flags, chunk.tsn, chunk.stream_id, chunk.sequence, chunk.protocol, chunk.payload)
        if self._t3_at is None:
            self._t3_at = now + self._t3_seconds()
        self._probe_at = now + self._probe_seconds()
        if sack and chunk.size + len(sack) <= self.max_packet_bytes:
            return self._prefix.packet(sack, data)
        return self._prefix.packet(data)

    # --- What comes back ----------------------------------------------------------------------------------------------

    def take(self, sack: SackChunk, now: float) -> None:
        """One SACK.

        Raises:
            ValueError: it acknowledges what was never sent.
        """
        ahead = wire.distance(sack.cumulative, self._acked_tsn)
        if ahead < 0:
            return  # overtaken by a later one
        if ahead > len(self._unacked):
            raise ValueError("a SACK of what was never sent")
        self._remote_window = max(sack.window, PACKET)
        delivered = 0
        newest: Chunk | None = None
        for _ in range(ahead):
            chunk = self._unacked.popleft()
            if not chunk.is_acked:
                delivered += self._acked(chunk)
                if newest is None or chunk.sending > newest.sending:
                    newest = chunk
        self._acked_tsn = sack.cumulative
        for chunk in self._newly_in_gaps(sack, ahead):
            delivered += self._acked(chunk)
            if newest is None or chunk.sending > newest.sending:
                newest = chunk
        if sack.duplicates:
            self._duplicates_told(sack.duplicates, now)
        if newest is not None:
            self._advance(newest, now)
        if delivered:
            self._t3_backoff = 0
            sent_at = newest.sent_at if newest is not None else now
            self.window.delivered(delivered, sent_at, self.in_flight + delivered, now)
            self._t3_at = now + self._t3_seconds() if self._has_outstanding() else None
        self._find_lost(now)
        if not self._has_outstanding():
            self._t3_at = self._probe_at = self._rack_at = None
        elif delivered:
            self._probe_at = now + self._probe_seconds()

    def _has_outstanding(self) -> bool:
        return self.in_flight > 0 or bool(self._lost)

    def _newly_in_gaps(self, sack: SackChunk, ahead: int) -> list[Chunk]:
        """Chunks of gap blocks, without those that an earlier SACK already told of."""
        found: list[Chunk] = []
        seen: dict[int, int] = {}
        unacked = self._unacked
        before = 1
        for first, last in sack.gaps:
            if first <= before or last < first or last > len(unacked):
                raise ValueError("a SACK whose gap blocks are out of order or beyond what was sent")
            before = last
            begin = (sack.cumulative + first) % wire.MODULO
            known = self._seen_gaps.get(begin)
            start = first
            if known is not None:
                start = max(first, wire.distance(known, sack.cumulative) + 1)
            seen[begin] = (sack.cumulative + last) % wire.MODULO
            for position in range(start, last + 1):
                chunk = unacked[position - 1]
                if not chunk.is_acked:
                    found.append(chunk)
        self._seen_gaps = seen
        return found

    def _acked(self, chunk: Chunk) -> int:
        chunk.is_acked = True
        if chunk.is_in_flight:
            chunk.is_in_flight = False
            self.in_flight -= chunk.size
        return chunk.size

    def _advance(self, newest: Chunk, now: float) -> None:
        """RFC 8985 section 6.2, steps 1 and 2."""
        rtt = now - newest.sent_at
        if newest.sends > 1 and self.window.base is not None and rtt < self.window.base:
            return  # the answer to an earlier sending of it
        if newest.sends == 1:
            self.window.sampled(rtt, now)
        self._rack_rtt = rtt
        self._rack = max(self._rack, (newest.sent_at, newest.sending))

    def _find_lost(self, now: float) -> None:
        """RFC 8985 section 6.2, step 5: lost is what was sent a reordering window before something that arrived."""
        self._rack_at = None
        if now > self._reordering_until:
            self._reordering_multiple = 1
        reordering = self._reordering_seconds()
        while self._by_time:
            chunk, sends = self._by_time[0]
            if chunk.is_acked or chunk.sends != sends or not chunk.is_in_flight:
                self._by_time.popleft()
                continue
            if (chunk.sent_at, chunk.sending) >= self._rack:
                return
            due = chunk.sent_at + self._rack_rtt + reordering
            if now < due:
                self._rack_at = due
                return
            self._by_time.popleft()
            self._mark_lost(chunk)

    def _mark_lost(self, chunk: Chunk) -> None:
        chunk.is_in_flight = False
        self.in_flight -= chunk.size
        self._lost.append(chunk)
        self.window.lost(chunk.size)
        if len(self._judged_lost) >= _MAX_JUDGED:
            self._judged_lost.clear()
        self._judged_lost.add(chunk.tsn)

    def _reordering_seconds(self) -> float:
        base = self.window.base or 0.0
        window = max(_REORDERING_FLOOR_SECONDS, base * _REORDERING_SHARE) * self._reordering_multiple
        return min(window, max(self.window.smoothed or window, _REORDERING_FLOOR_SECONDS))

    def _duplicates_told(self, duplicates: tuple[int, ...], now: float) -> None:
        """What was taken for lost had arrived: the window for reordering was too small, for the next while
        (RFC 8985 section 6.2, step 4)."""
        if self._judged_lost.isdisjoint(duplicates):
            return
        self._judged_lost.difference_update(duplicates)
        self.window.was_spurious()
        if now >= self._reordering_raised:
            rtt = self.window.smoothed or 0.0
            self._reordering_multiple = min(self._reordering_multiple + 1, _MAX_REORDERING_MULTIPLE)
            self._reordering_raised = now + rtt
            self._reordering_until = now + _REORDERING_ROUNDS * rtt

    # --- Timers -------------------------------------------------------------------------------------------------------

    @property
    def next_timer(self) -> float | None:
        times = [at for at in (self._paced_until, self._rack_at, self._probe_at, self._t3_at) if at is not None]
        return min(times) if times else None

    def fire(self, now: float) -> list[bytes]:
        """What timers have to say; `poll` afterwards. A probe is a packet that no window holds back."""
        if self._paced_until is not None and now >= self._paced_until:
            self._paced_until = None
        if self._rack_at is not None and now >= self._rack_at:
            self._find_lost(now)
        if self._t3_at is not None and now >= self._t3_at:
            self._t3_expired(now)
        elif self._probe_at is not None and now >= self._probe_at:
            self._probe_at = None
            return self._probe(now)
        return []

    def _probe_seconds(self) -> float:
        """RFC 8985 section 7.2, nearer to the round trip: our receiver answers the last packet at once."""
        window = self.window
        if window.smoothed is None:
            return limits.SCTP_FIRST_T3_SECONDS / 2
        return window.smoothed + max(2 * window.variation, window.smoothed / 16, 0.008)

    def _probe(self, now: float) -> list[bytes]:
        """The last chunk once more: its SACK tells what is lost before it (RFC 8985 section 7.3)."""
        for chunk in reversed(self._unacked):
            if not chunk.is_acked and chunk.is_in_flight:
                self.retransmitted += 1
                packet = self._send(chunk, now)
                self._probe_at = None
                return [packet]
        return []

    def _t3_seconds(self) -> float:
        window = self.window
        if window.smoothed is None:
            first = limits.SCTP_FIRST_T3_SECONDS
        else:
            first = max(window.smoothed + 4 * window.variation, window.smoothed * 1.5) + limits.SCTP_MIN_T3_SECONDS
        return float(min(first * 2**self._t3_backoff, _MAX_T3_SECONDS))

    def _t3_expired(self, now: float) -> None:
        """RFC 9260 section 6.3.3: everything in flight is taken for lost, and the timer doubles."""
        self._t3_backoff += 1
        self._lost.clear()
        for chunk in self._unacked:
            if not chunk.is_acked:
                if chunk.is_in_flight:
                    chunk.is_in_flight = False
                    self.in_flight -= chunk.size
                self._lost.append(chunk)
        self._by_time.clear()
        self._probe_at = self._rack_at = None
        self._allowance = float(_MIN_BURST)
        self.window.timed_out()
        self._t3_at = now + self._t3_seconds() if self._lost else None
