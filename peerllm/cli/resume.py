"""`peerllm resume [ROOM]`: meets a peer again without words, with the settings of last time."""

from __future__ import annotations

import argparse

from peerllm.cli.client import default_state_dir
from peerllm.cli.daemon_options import add_daemon_arguments, config_of, run_daemon


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("room", nargs="?", metavar="ROOM", help="a name of `peerllm rooms`; without it, the last one")
    parser.add_argument("--model", metavar="M", help="another copy of the model than last time's")
    add_daemon_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from peerllm.daemon.settings import recall_settings
    from peerllm.rooms.keys import KeyStore

    state_dir = args.state_dir or default_state_dir()
    known = KeyStore(state_dir).room(args.room)
    args.signaling = args.signaling or known.signaling
    config = config_of(args, resume=known.name)
    # What the command line says counts; the rest is as it was.
    said = {"model": args.model, "draft": args.draft, "draft_length": args.draft_length, "layers": config.layers}
    said |= {"dtype": args.dtype, "context": args.context, "weights": args.weights, "threads": args.threads}
    said |= {"devices": config.devices or None, "draft_device": args.draft_device}
    recalled = {name: value for name, value in recall_settings(state_dir, known.name).items() if said.get(name) is None}
    config = replace(config, **recalled)
    if args.model is not None:
        config = replace(config, model=args.model)
    return run_daemon(args, config)
