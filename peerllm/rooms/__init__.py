"""Room codes, SPAKE2, sealed signaling."""
