"""`peerllm up --model M`: opens a room and serves it."""

from __future__ import annotations

import argparse

from peerllm.cli.daemon_options import CODECS, add_daemon_arguments, config_of, run_daemon


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="M", help="a folder, a hub id, or smollm2-135m-instruct")
    parser.add_argument("--revision", metavar="REV", help="of a hub id")
    parser.add_argument(
        "--codec", default="exact", choices=CODECS, help="of the hidden states on the link: the dtype's own, or int8"
    )
    add_daemon_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return run_daemon(args, config_of(args, model=args.model, revision=args.revision, codec=args.codec))
