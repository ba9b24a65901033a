"""The `peerllm` command: one file for each subcommand."""
