"""ICE, DTLS, SCTP, frames, liveness, reconnect: one authenticated channel between two peers.

    Link            what the daemon holds: outlives its connections          link.py
    Connection      one epoch: signaling, HELLO, pings, credits              connection.py
    Transport       one stack of ICE, DTLS and SCTP with its data channel    transport.py
    bench, nat      what a link carries; which NAT is before this machine
    frames, outbox, inbox, liveness, hello, greeting, sctp                   sans-I/O

aiortc's and aioice's private attributes are touched in `aiortc_private` and `aioice_private` alone.
"""

from peerllm.link.config import LinkConfig, LinkState, LinkStats, TurnServer, Urgency
from peerllm.link.link import Link
from peerllm.link.signaling import Attempt, SeatedPeer

__all__ = ["Attempt", "Link", "LinkConfig", "LinkState", "LinkStats", "SeatedPeer", "TurnServer", "Urgency"]
