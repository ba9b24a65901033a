"""SCTP (RFC 9260) for blocks that must arrive in one round trip. Sans-I/O: packets and time in, packets out.

    wire       packets of DATA and SACK, packed and parsed without an object for each field
    window     how much may be in flight and how fast it leaves: a window that follows the path's delay
    sender     what is on its way; loss judged by time (RACK, RFC 8985), a probe for the tail, T3
    receiver   what has arrived: SACK every second packet, messages out of fragments

The handshake, stream resets and all rare chunks stay aiortc's; `aiortc_private.SctpTransport` joins the two.
"""
