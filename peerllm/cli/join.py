"""`peerllm join CODE`: joins a room and serves it."""

from __future__ import annotations

import argparse

from peerllm.cli.daemon_options import add_daemon_arguments, config_of, run_daemon


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", metavar="CODE", help="the room code, such as 4127-copper-walnut-anchor")
    parser.add_argument(
        "--model", metavar="M", help="this machine's copy of the room's model, if it is not in the cache"
    )
    add_daemon_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from peerllm.rooms.codes import RoomCode

    RoomCode.parse(args.code)  # a slip of the tongue is said at once
    return run_daemon(args, config_of(args, room_code=args.code, model=args.model))
