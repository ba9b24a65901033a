"""One association's two halves with their timers: chunks and time in, packets out."""

from __future__ import annotations

from collections.abc import Callable

from peerllm.link.sctp import wire
from peerllm.link.sctp.receiver import Receiver
from peerllm.link.sctp.sender import Sender
from peerllm.link.sctp.wire import DataChunk, Prefix, SackChunk


class Association:
    """
    Args:
        first_tsn: of the first chunk of ours.
        last_tsn: the TSN before the other side's first.
        prefix: of our packets.
        max_packet_bytes: an SCTP packet's; `sender.max_packet_bytes` may be raised later.
        deliver: called with stream, protocol and message.
    """

    def __init__(
        self,
        *,
        first_tsn: int,
        last_tsn: int,
        prefix: Prefix,
        max_packet_bytes: int,
        deliver: Callable[[int, int, bytes], None],
    ) -> None:
        self.sender = Sender(first_tsn, prefix, max_packet_bytes)
        self.receiver = Receiver(last_tsn, deliver)

    def receive(self, chunks: list[DataChunk | SackChunk], now: float) -> None:
        """The chunks of one packet; `poll` afterwards.

        Raises:
            ValueError: a SACK that no honest receiver sends.
        """
        for chunk in chunks:
            if isinstance(chunk, DataChunk):
                self.receiver.take(chunk, now)
            else:
                self.sender.take(chunk, now)

    def poll(self, now: float) -> list[bytes]:
        """Packets to send now, timers that are due included."""
        sender, receiver = self.sender, self.receiver
        timer = sender.next_timer
        packets = sender.fire(now) if timer is not None and now >= timer else []
        due = receiver.sack_due
        is_sack_due = due is not None and (due <= now or sender.queued_bytes > 0)
        packets += sender.poll(now, receiver.make_sack() if is_sack_due else b"")
        return packets

    @property
    def next_timer(self) -> float | None:
        """When `poll` has to be called if nothing happens before."""
        one, other = self.sender.next_timer, self.receiver.sack_due
        if one is None or other is None:
            return other if one is None else one
        return min(one, other)


__all__ = ["Association", "Prefix", "wire"]
