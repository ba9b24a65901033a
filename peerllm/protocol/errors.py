"""Every error that a user or a peer can meet, as one tree.

    PeerllmError
    ├── BadRequest             the request itself is wrong
    │   ├── Unsupported        a parameter that we know and do not serve
    │   └── ContextTooLong     prompt (and what was asked for) does not fit the context
    ├── Overloaded             the queue is full
    ├── RoomError              codes, seats, signaling
    │   ├── RoomNotFound, WrongCode, RoomCrowded, RoomClosed, SignalingUnreachable
    │   └── RoomIncomplete     no peer holds some of the layers yet
    ├── LinkError              the connection between two peers
    │   ├── PeerAway           not there now; it may come back
    │   └── NoPath             no network path between the two was found
    ├── ProtocolError          what the other side sent is not what it may send
    │   └── VersionMismatch
    ├── ModelError             a model, a draft, or a division of layers that cannot work
    │   ├── ModelNotFound
    │   │   └── DownloadNeeded     it can be fetched, and nobody has agreed to that yet
    │   ├── ModelUnsupported, ModelMismatch, LayersMismatch, DraftMismatch
    │   └── NotEnoughMemory
    ├── EngineError            the worker that computes
    │   └── WorkerDied, WorkerHung, NonFinite
    └── SocketError            the local Unix socket cannot be had
        └── NoDaemon           nobody listens on it

A message says what happened, to whom, and what to do. `code` is stable and travels over links and the API; `status` is
the HTTP status that the local API answers with.
"""

from __future__ import annotations

from typing import ClassVar


class PeerllmError(Exception):
    """The root. `str(error)` is a sentence for the user."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        """The request's parameter that is at fault, where there is one."""


class BadRequest(PeerllmError):
    code = "invalid_request"
    status = 400


class Unsupported(BadRequest):
    code = "unsupported_parameter"


class ContextTooLong(BadRequest):
    code = "context_length_exceeded"


class Overloaded(PeerllmError):
    code = "overloaded"
    status = 429


class RoomError(PeerllmError):
    code = "room_error"
    status = 503


class RoomNotFound(RoomError):
    code = "room_not_found"


class WrongCode(RoomError):
    code = "wrong_code"


class RoomCrowded(RoomError):
    code = "room_crowded"


class RoomClosed(RoomError):
    code = "room_closed"


class SignalingUnreachable(RoomError):
    code = "signaling_unreachable"


class RoomIncomplete(RoomError):
    code = "room_incomplete"


class LinkError(PeerllmError):
    code = "link_error"
    status = 503


class PeerAway(LinkError):
    code = "peer_away"


class NoPath(LinkError):
    code = "no_path"


class ProtocolError(PeerllmError):
    code = "protocol_error"
    status = 502


class VersionMismatch(ProtocolError):
    code = "version_mismatch"


class ModelError(PeerllmError):
    code = "model_error"
    status = 503


class ModelNotFound(ModelError):
    code = "model_not_found"


class DownloadNeeded(ModelNotFound):
    """The message names the bytes."""

    code = "download_needed"


class ModelUnsupported(ModelError):
    code = "model_unsupported"


class ModelMismatch(ModelError):
    code = "model_mismatch"


class LayersMismatch(ModelError):
    code = "layers_mismatch"


class DraftMismatch(ModelError):
    code = "draft_mismatch"


class NotEnoughMemory(ModelError):
    code = "not_enough_memory"


class EngineError(PeerllmError):
    code = "engine_error"
    status = 500


class WorkerDied(EngineError):
    code = "worker_died"
    status = 503


class WorkerHung(EngineError):
    code = "worker_hung"
    status = 503


class NonFinite(EngineError):
    code = "non_finite"


class SocketError(PeerllmError):
    code = "socket_error"
    status = 503


class NoDaemon(SocketError):
    code = "no_daemon"


def _tree(root: type[PeerllmError]) -> dict[str, type[PeerllmError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


_BY_CODE = _tree(PeerllmError)


def error_from_code(code: str, message: str, param: str | None = None) -> PeerllmError:
    """The typed error for a `code` that came over a link or a pipe; an unknown code gives a plain PeerllmError."""
    return _BY_CODE.get(code, PeerllmError)(message, param=param)
