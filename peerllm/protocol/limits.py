"""Every bound of the project, named, with its reason. Nothing else contains such a number."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB

# --- CBOR -------------------------------------------------------------------------------------------------------
MAX_CBOR_DEPTH = 8
"""Our deepest message is a request in an introduction: 5. Deeper input is hostile."""

# --- Messages over a link -----------------------------------------------------------------------------------------
MAX_MESSAGE_BYTES = 1 * MIB + 64 * KIB
"""One message over a link: a whole API request (1 MiB) and its envelope."""
MAX_HIDDEN_BYTES = 1 * MIB
"""Hidden states in one message: 65 rows of width 4,096 in fp16 are half of this. A block's length obeys it."""
PREFILL_CHUNK_BYTES = 256 * KIB
"""Hidden states in one prefill chunk, so that several are on their way within MAX_UNPROCESSED_BYTES."""
PREFILL_CHUNK_ROWS = 128
MAX_UNPROCESSED_BYTES = 2 * MIB
"""Bytes that may wait on a link or on a worker's pipe before the sender has to stop."""
MAX_SLICE_BYTES = 16 * KIB
"""A message is cut into slices of at most this, so that a verdict never waits behind a prefill."""
MAX_CANDIDATES = 64
"""Candidates in a block; a block has one row more."""
MAX_CONTEXT = 1 << 20
"""Positions in a sequence. No model that we know goes further."""
MAX_VOCABULARY = 1 << 20
MAX_LAYERS = 1024
MAX_TEXT_CHARS = 64 * KIB
"""Text in one event of an answer, a reason, a name."""
MAX_NAME_CHARS = 256
MAX_LIST_ITEMS = 4096
MAX_PEERS = 16
"""Peers in one room's chain."""
MAX_STOP_STRINGS = 4
"""As OpenAI's API has it."""
MAX_STOP_CHARS = 512
MAX_DRAFT_LENGTH = MAX_CANDIDATES

# --- The local API --------------------------------------------------------------------------------------------------
MAX_API_BODY_BYTES = 1 * MIB
MAX_API_CLIENTS = 32
MAX_QUEUED_REQUESTS = 64
"""Requests that wait for their turn; one more is answered 429."""
CLIENT_STALL_SECONDS = 30.0
"""A client that takes nothing from its socket for so long is dropped."""

# --- The worker's pipe ----------------------------------------------------------------------------------------------
MAX_PIPE_HEADER_BYTES = 2 * MIB
MAX_PIPE_FRAME_BYTES = 8 * MIB

# --- Signaling ------------------------------------------------------------------------------------------------------
MAX_SIGNALING_BYTES = 16 * KIB
MAX_REMOTE_CANDIDATES = 16

# --- Time, seconds ----------------------------------------------------------------------------------------------------
HELLO_SECONDS = 5.0
PING_SECONDS = 1.0
SUSPECT_SECONDS = 3.0
DOWN_SECONDS = 10.0
SESSION_KEPT_SECONDS = 120.0
"""How long a session and its cache outlive the link."""
ROUND_DEADLINE_SECONDS = 10.0
"""A round's deadline is the larger of this and ROUND_DEADLINE_FACTOR times the median round."""
ROUND_DEADLINE_FACTOR = 20
HEARTBEAT_SECONDS = 0.5
WORKER_HUNG_SECONDS = 10.0
"""A worker whose heartbeat thread is silent for so long is stopped, swapped out or dead."""
LOOP_BLOCKED_SECONDS = 0.05
"""The daemon's event loop is never blocked for longer; the watchdog logs it."""
