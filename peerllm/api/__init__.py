"""The OpenAI-compatible HTTP API on the Unix socket.

`serve(backend, path)` is all that the daemon calls; `Backend` is all that the API asks of the daemon.
"""

from peerllm.api.backend import Backend
from peerllm.api.server import Server, serve

__all__ = ["Backend", "Server", "serve"]
