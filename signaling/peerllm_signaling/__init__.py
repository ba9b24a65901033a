"""Rooms over WebSocket: the server learns numbers, addresses and times, and nothing of what is said."""
