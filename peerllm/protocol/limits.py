"""Every bound of the project, named, with its reason. Nothing else contains such a number."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB

# --- CBOR -------------------------------------------------------------------------------------------------------
MAX_CBOR_DEPTH = 8
"""Our deepest message is a request in an introduction: 5. Deeper input is hostile."""
MAX_CBOR_ITEMS = 8192
"""Values in one message, keys included: twice what the longest list holds. A message of a mebibyte could have a
million, and building them would take 100 ms and 60 MiB."""
MAX_CBOR_TEXT_BYTES = 3 * MIB
"""What decoding a message's text may take in memory: Python makes all characters of a text as wide as the widest, so a
mebibyte of ASCII with one emoji in it becomes four, and six while it does. A mebibyte of Latin or of Chinese
is taken."""

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
MESSAGE_OVERHEAD_BYTES = 1 * KIB
"""What a queued message counts beyond its content, so that many empty ones are bounded too."""
MAX_SLICE_BYTES = 16 * KIB
"""A message is cut into slices of at most this, so that a verdict never waits behind a prefill."""
MAX_CANDIDATES = 64
"""Candidates in a block; a block has one row more."""
MAX_CONTEXT = 1 << 20
"""Positions in a sequence. No model that we know goes further."""
MIN_CONTEXT = 16
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
MAX_QUEUED_REQUESTS = 24
"""Requests that wait for their turn; one more is answered 429."""
CLIENT_STALL_SECONDS = 30.0
"""A client that does not empty its socket, or does not send a whole request, in so long is dropped."""
SSE_KEEPALIVE_SECONDS = 5.0
"""A stream that has nothing to say sends a comment so often. The first one also ends the time in which an error can
still have an HTTP status of its own."""
RETRY_AFTER_SECONDS = 2
"""What a 429 tells the client to wait: about one short answer."""
API_CROWDED_SECONDS = 1.0
"""A client beyond MAX_API_CLIENTS gets so long to send its request before it is refused."""
API_CLOSE_SECONDS = 1.0
"""How long a closing daemon waits for clients to take their last event."""
MAX_SOCKET_PATH_BYTES = 107
"""sockaddr_un's sun_path on Linux, less its terminating zero."""
DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions where the request has none, as OpenAI's API has it."""
RANDOM_SEED_BITS = 53
"""A seed of our choosing survives JSON readers that hold numbers as doubles."""

# --- The command line ---------------------------------------------------------------------------------------------
DAEMON_CONNECT_SECONDS = 5.0
DAEMON_SILENCE_SECONDS = 60.0
"""A daemon whose stream carries not even a keep-alive comment for so long is stuck."""
PROGRESS_SECONDS = 1.0
"""What takes longer than this shows progress."""

# --- Telemetry ------------------------------------------------------------------------------------------------------
MAX_LEDGER_ROUNDS = 4096
"""Rounds of which a ledger keeps the times, for its medians; its counts go on."""
WATCHDOG_SECONDS = 0.005
"""How often the event loop's watchdog looks at the clock: a tenth of LOOP_BLOCKED_SECONDS."""

# --- The engine -----------------------------------------------------------------------------------------------------
MAX_SESSIONS = 4
"""Sequences that an engine holds at once: each takes a whole context's keys and values."""
MAX_GPU_SESSIONS = 2
"""The same on a GPU, whose memory is taken at once and not as it is written."""
ATTENTION_SCORES_BYTES = 128 * MIB
"""A block's attention scores where they are made whole (graphs of the modules); heads beyond it take turns."""
ATTENTION_SCORE_BYTES = 8
"""Of one of them at the most: float32, before the softmax and after it."""
VERDICT_ROWS_AT_ONCE = 16
"""Rows whose tokens are chosen at once: noise and a sort take thirty bytes for each token of the vocabulary."""
LEAST_TEMPERATURE = 1e-6
"""Logits over less than this would leave float32's range; over as much the noise decides nothing but ties."""
LEAST_CONTEXT = 256
"""Where nobody named a context, fewer positions than these are not worth loading for."""

# --- Model files ----------------------------------------------------------------------------------------------------
MAX_CHECKPOINT_HEADER_BYTES = 16 * MIB
"""A safetensors header: MAX_LAYERS layers of a dozen tensors, 150 bytes each, are 2 MiB."""
MAX_MODEL_JSON_BYTES = 32 * MIB
"""config.json, an index of weight files, tokenizer_config.json; all before anything of them is believed."""
MAX_WIDTH = 1 << 24
"""Any one dimension of a layer that config.json names."""
HUB_SECONDS = 20.0
"""How long the hub may take to answer a question about a model."""
WEIGHT_STAGING_BYTES = 16 * MIB
"""Weights on their way to another dtype or device pass through one buffer of this size."""

# --- The worker's pipe ----------------------------------------------------------------------------------------------
MAX_PIPE_HEADER_BYTES = 2 * MIB
MAX_PIPE_FRAME_BYTES = 8 * MIB

# --- Signaling ------------------------------------------------------------------------------------------------------
MAX_SIGNALING_BYTES = 16 * KIB
MAX_REMOTE_CANDIDATES = 16

# --- Rooms ------------------------------------------------------------------------------------------------------------
ROOM_CODE_WORDS = 3
"""Of 2,048: 33 bits, and a room closes after MAX_WRONG_GUESSES of them."""
MAX_ROOM_DIGITS = 12
MAX_WRONG_GUESSES = 10
MAX_CLAIMS = 8
"""Claims on one room that are answered at once, whatever the signaling server passes on."""
MAX_CLAIM_TASKS = 4 * MAX_CLAIMS
"""Those included that are gone and whose arithmetic is not done."""
SPAKE2_SECONDS = 0.02
"""The opener's answer to each message of a claim takes so long: several times what the arithmetic needs, so that its
time says nothing of the words."""
CLAIM_SECONDS = 10.0
JOIN_SECONDS = 15.0
"""From the command to a seat or an error that names the cause."""
ROOM_MISSING_SECONDS = 4.0
"""How long a joiner takes "no such room" for a server that was started anew and whose openers are on their way back. A
mistyped number costs its user as long, and the pause below keeps it to a few of an address's thirty joins a minute."""
ROOM_MISSING_PAUSE_SECONDS = 1.0
MAX_GREETING_BYTES = 512
"""The PAKE message: 42 bytes today; a later release may append."""
SIGNALING_CONNECT_SECONDS = 5.0
SIGNALING_HEARTBEAT_SECONDS = 10.0
"""A ping to the signaling server so often; no answer within half of it: the socket is half open."""
SIGNALING_PROBE_SECONDS = 1.0
"""How long a socket that is under suspicion may take to answer before a fresh one is opened."""
SIGNALING_STAGGER_SECONDS = 0.7
"""While an attempt to reach it again is silent, so often another begins beside it, so that the moment when a network
returns is not slept through in a TCP retransmission."""
SIGNALING_EAGER_SECONDS = 120.0
"""Attempts are staggered for so long; then each has its SIGNALING_CONNECT_SECONDS to itself."""
SIGNALING_RETRY_SECONDS = (0.1, 0.3, 0.6, 1.0, 2.0)
"""Pauses between attempts to reach the signaling server again, the last one for ever; each shortened at random."""
SIGNALING_RESTART_SECONDS = 60.0
"""How long the opener of a room that nobody joined yet tries to get it back after its connection broke."""
MAX_SIGNALING_FRAME_BYTES = MAX_SIGNALING_BYTES + 256
"""A sealed body and its envelope."""
MAX_QUEUED_SIGNALING = 256
"""Messages of one attempt that wait to be read."""
TURN_RENEWED_AFTER = 0.75
"""The share of their life after which TURN credentials are renewed."""
ATTEMPT_SECONDS = 3.5
"""For the handshake of one attempt, the other peer's absence included: less than SIGNALING_SECONDS, so that the error
is the one that knows the cause."""
ABSENCE_SECONDS = 2.0
"""How long the other peer may be gone from the rendezvous before an attempt under way is given up."""
MAX_INTRODUCTIONS = MAX_PEERS
MAX_ICE_SERVERS = 8

# --- One link -------------------------------------------------------------------------------------------------------
MAX_HELLO_BYTES = 8 * KIB
"""A HELLO's body: it has to fit one slice, before anything else is known of the other side."""
MIN_HELLO_BYTES = 1024
"""A shorter HELLO is padded to this: a path too narrow for a full packet is found before a block vanishes in it."""
MESSAGE_OVERHEAD_BYTES = 64
"""What a message counts against MAX_UNPROCESSED_BYTES beside its bytes: a flood of empty ones is bounded too."""
MAX_BULK_BYTES = MAX_UNPROCESSED_BYTES * 3 // 4
"""The share of MAX_UNPROCESSED_BYTES that prefill may take: a round always finds room."""
SCTP_SAFE_PACKET_BYTES = 1120
"""With IP, UDP and DTLS a packet of 1,200 bytes on IPv4 and 1,220 on IPv6: what any path of today carries."""
SCTP_PROBED_PACKET_BYTES = (1400, 1188)
"""Tried when the association is up. The larger fits Ethernet over IPv6 and a relay, the smaller the least MTU of IPv6.
Multiples of 4, as a heartbeat is padded to one."""
SCTP_INITIAL_PACKETS = 16
"""In flight before the path was measured: a block of 16 KB needs no second round trip even then."""
SCTP_MIN_PACKETS = 4
SCTP_MAX_WINDOW_BYTES = 4 * MIB
MAX_SCTP_RECEIVE_BYTES = 4 * MIB
"""Fragments that may wait for their message's others: two windows' worth."""
SCTP_FIRST_T3_SECONDS = 1.0
SCTP_MIN_T3_SECONDS = 0.2
MAX_ATTEMPTS = 10
"""Connections that are being made at the same time for one link; the oldest gives way. Begun one a second, each has the
whole of SIGNALING_SECONDS and ICE_SECONDS: with fewer, a path that takes as long to make would never be made again."""

# --- Time, seconds ----------------------------------------------------------------------------------------------------
SIGNALING_SECONDS = 4.0
"""From the begin of an attempt to the other side's description."""
ICE_SECONDS = 6.0
"""From then to an open data channel: ICE, DTLS and SCTP."""
HELLO_SECONDS = 5.0
LINK_START_SECONDS = 12.0
"""The first connection, all attempts together; a clear message within 15 s is promised."""
LINK_CLOSE_SECONDS = 2.0
FIRST_ATTEMPT_SECONDS = 3.0
"""At the start another attempt begins beside one that is so old."""
DIRECT_RETRY_SECONDS = 60.0
"""A relayed link looks for a direct path after so long, and then after twice as long each time, up to the next."""
MAX_DIRECT_RETRY_SECONDS = 1800.0
RETRY_SECONDS = 0.5
"""Before the room is asked again after it refused."""
REPLACEMENT_SECONDS = 1.0
"""The same for a link that was UP before: one attempt a second."""
PING_SECONDS = 1.0
SUSPECT_SECONDS = 3.0
DOWN_SECONDS = 10.0
SESSION_KEPT_SECONDS = 120.0
"""How long a session and its cache outlive the link."""
ROUND_DEADLINE_SECONDS = 10.0
"""A round's deadline is the larger of this and ROUND_DEADLINE_FACTOR times the median round."""
ROUND_DEADLINE_FACTOR = 20
PREFILL_DEADLINE_SECONDS = 60.0
"""The same floor for one prefill chunk: the first of a large model on a cold CPU is slow and well."""
HEARTBEAT_SECONDS = 0.5
WORKER_HUNG_SECONDS = 6.0
"""A worker whose heartbeat thread is silent for so long is stopped, swapped out or dead."""
MAX_FAILED_RESTARTS = 3
"""Of a worker, in a row: then whoever waits for it is told."""
MAX_WORKER_DEATHS = 3
"""In one session: a worker that dies for the fourth time dies of what it computes."""
PEER_LOADING_SECONDS = 900.0
"""How long an answer waits for a peer that says that it loads."""
LOOP_BLOCKED_SECONDS = 0.05
"""The daemon's event loop is never blocked for longer; the watchdog logs it."""
