"""What goes next: messages wait by urgency and leave in slices, within the credit that the other side gave."""

from __future__ import annotations

from collections import deque

from peerllm.link import frames
from peerllm.link.config import Urgency
from peerllm.protocol import limits
from peerllm.protocol.errors import ProtocolError


def cost(message_bytes: int) -> int:
    """What a message counts against the credit; both sides count the same."""
    return message_bytes + limits.MESSAGE_OVERHEAD_BYTES


class Outbox:
    """Sans-I/O, one for each epoch.

    Every message takes credit when it is put in and gives it back when the other side has processed it. Bulk has a
    smaller share, so that a round never finds the credit spent on prefill.
    """

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._queues: dict[Urgency, deque[tuple[int, bytes]]] = {urgency: deque() for urgency in Urgency}
        self._offsets = dict.fromkeys(Urgency, 0)
        self._next_id = dict.fromkeys(Urgency, 0)
        self._spent = 0
        self._credited = 0

    @property
    def unprocessed_bytes(self) -> int:
        """Of messages that wait here, are on their way, or wait at the other side."""
        return self._spent - self._credited

    @property
    def is_empty(self) -> bool:
        return not any(self._queues.values())

    def has_room(self, message_bytes: int, urgency: Urgency) -> bool:
        bound = limits.MAX_BULK_BYTES if urgency is Urgency.BULK else limits.MAX_UNPROCESSED_BYTES
        return self.unprocessed_bytes + cost(message_bytes) <= bound

    def put(self, message: bytes, urgency: Urgency) -> None:
        """The caller has asked `has_room`."""
        self._spent += cost(len(message))
        self._queues[urgency].append((self._next_id[urgency], message))
        self._next_id[urgency] = (self._next_id[urgency] + 1) & 0xFFFFFFFF

    def next_slice(self, max_bytes: int = frames.MAX_FRAME_BYTES) -> bytes | None:
        """The next frame to send, the most urgent first; at most `max_bytes` of it. None when nothing waits."""
        for urgency, queue in self._queues.items():
            if not queue:
                continue
            message_id, message = queue[0]
            offset = self._offsets[urgency]
            piece = message[offset : offset + max_bytes - frames.HEADER_BYTES]
            offset += len(piece)
            frame = frames.encode_data(urgency, self._epoch, message_id, offset - len(piece), len(message), piece)
            if offset == len(message):
                queue.popleft()
                offset = 0
            self._offsets[urgency] = offset
            return frame
        return None

    def take_credit(self, processed: int) -> None:
        """The other side has processed so much since the epoch began. Late credits, overtaken by newer, do nothing.

        Raises:
            ProtocolError: it claims more than was sent.
        """
        if processed > self._spent:
            raise ProtocolError("the peer claims to have processed more than it was sent")
        self._credited = max(self._credited, processed)
