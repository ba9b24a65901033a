"""Sans-I/O: rounds, how far to draft, stops and limits, recovery. No sockets, clocks or tensors."""
