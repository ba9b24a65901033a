"""ICE, DTLS, SCTP, frames, liveness, reconnect: one authenticated channel between two peers."""
