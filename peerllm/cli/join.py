"""`peerllm join CODE`: joins a room and serves it."""

from __future__ import annotations

import argparse
import sys

from peerllm.cli.daemon_options import add_daemon_arguments, config_of, run_daemon


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "code",
        nargs="?",
        metavar="CODE",
        help="the room code, such as 4127-copper-walnut-anchor; without it, asked for, or read from standard input",
    )
    parser.add_argument(
        "--model", metavar="M", help="this machine's copy of the room's model, if it is not in the cache"
    )
    add_daemon_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from peerllm.rooms.codes import RoomCode

    if args.code is None:
        config_of(args)  # what else is wrong is said before anything is asked
        args.code = _asked_for()
    RoomCode.parse(args.code)  # a slip of the tongue is said at once
    return run_daemon(args, config_of(args, room_code=args.code, model=args.model))


def _asked_for() -> str:
    """A code that is typed here is not seen in the machine's list of processes. Raises BadRequest without one."""
    from peerllm.protocol.errors import BadRequest

    if sys.stdin.isatty():
        print("Room code: ", end="", flush=True)
    code = sys.stdin.readline().strip()
    if not code:
        raise BadRequest("no room code was given: peerllm join CODE, or CODE on standard input")
    return code
