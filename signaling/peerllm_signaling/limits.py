"""Every bound of the signaling server, named, with its reason. Nothing else here contains such a number."""

from __future__ import annotations

KIB = 1024

# --- Messages -----------------------------------------------------------------------------------------------
MAX_BODY_BYTES = 16 * KIB
"""What one peer may say to another in one message."""
MAX_FRAME_BYTES = MAX_BODY_BYTES + 256
"""One WebSocket message: a body, the peers' seal around it, and the claim's number before it."""
MAX_GREETING_BYTES = 512
"""The PAKE message that a claim begins with; it has 42 bytes today."""
MAX_QUEUED_BYTES = 256 * KIB
"""What may wait for one reader. A reader that lets more pile up is too slow and is dropped."""
MAX_QUEUED_MESSAGES = 512

# --- Connections --------------------------------------------------------------------------------------------
MAX_CONNECTIONS = 150_000
MAX_CONNECTIONS_PER_ADDRESS = 256
"""An office behind one address; a single host cannot use up the server's descriptors."""
MAX_ADDRESSES = 200_000
"""Addresses whose budgets are remembered at once."""
FRAMES_PER_MINUTE = 6000
FRAMES_BURST = 1000
"""Of any kind, on one connection: more than an opener under a flood of claims has to answer."""
REQUEST_SECONDS = 10.0
"""A connection that is no WebSocket by then is cut, and a TLS handshake that is not over too."""
SILENT_SECONDS = 10.0
"""A connection that has not said what it wants by then is closed."""
HEARTBEAT_SECONDS = 20.0
"""A WebSocket ping so often; without an answer within half of it the connection is half open and is dropped."""
DRAIN_SECONDS = 1.0
"""How long SIGTERM lets farewells go out."""

# --- Rooms --------------------------------------------------------------------------------------------------
MAX_ROOMS = 100_000
MAX_UNPAIRED_ROOMS_PER_ADDRESS = 10
ROOM_SECONDS = 600.0
"""An unpaired room's life."""
ABSENT_SECONDS = 30.0
"""How long a room waits for an opener whose connection broke."""
MIN_ROOM_DIGITS = 4
NUMBERS_PER_ROOM = 100
"""Numbers are drawn from at least so many times the rooms that are open, so that a guessed number is rarely a room."""
MAX_SEATS = 15
"""Peers that a room admits besides the one who opened it."""

# --- Claims -------------------------------------------------------------------------------------------------
MAX_CLAIMS = 8
"""Claims on one room under way at once."""
MAX_WAITING_CLAIMS = 8
"""Claims on one room that wait for one of these places. A longer line would only make an honest claimer wait longer
behind those who say nothing; one that finds it full tries again."""
CLAIM_SECONDS = 10.0
CLAIM_SILENT_SECONDS = 1.0
"""A claimer whose turn it is to speak gives its place to one who waits after so long."""
CLAIM_SILENT_CROWDED_SECONDS = 0.5
"""The same when the line is full. An honest claimer needs a round trip and 20 ms."""
MAX_SILENT_GROUPS = 256
"""Addresses that were silent, remembered for each room."""
MAX_CLAIM_MESSAGES = 4
"""Messages of each side in one claim: the exchange needs three of the claimer, two of the opener."""

# --- Budgets: messages a minute, and how many at once -------------------------------------------------------
JOINS_PER_MINUTE = 30
MESSAGES_PER_MINUTE = 64
"""Of an unpaired connection and of its address on one room."""
PAIR_MESSAGES_PER_MINUTE = 600
PAIR_MESSAGES_BURST = 300
"""Of a pair that proved its rendezvous: both ends came with the same 256 bits that nobody else can compute."""
MEETINGS_PER_MINUTE = 600
MEETINGS_BURST = 300
"""For each address: after a restart of the server all pairs behind one address return at once."""

# --- Meetings -----------------------------------------------------------------------------------------------
MEETING_ID_BYTES = 32
MAX_MEETING_IDS = 3
"""Yesterday's, today's and tomorrow's."""
MAX_MEETINGS = 100_000
"""Connections that wait at, or are paired by, a rendezvous."""

# --- STUN and TURN ------------------------------------------------------------------------------------------
STUN_PER_SECOND = 10
STUN_BURST = 30
MAX_STUN_REQUEST_BYTES = 256
TURN_SECONDS = 3600.0
"""Life of TURN credentials; peers renew them before."""
