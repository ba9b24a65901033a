"""The OpenAI-compatible HTTP API on the Unix socket."""
