"""`peerllm rooms`: the peers that this machine can meet again; `peerllm rooms forget ROOM`."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from peerllm.cli.client import default_state_dir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("list", "forget"), default="list")
    parser.add_argument("room", nargs="?", metavar="ROOM", help="the room to forget")
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="where the keys are")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run(args: argparse.Namespace) -> int:
    from peerllm.daemon.settings import forget_settings
    from peerllm.protocol.errors import BadRequest
    from peerllm.rooms.keys import KeyStore

    state_dir = args.state_dir or default_state_dir()
    store = KeyStore(state_dir)
    if args.action == "forget":
        if not args.room:
            raise BadRequest("name the room to forget: peerllm rooms forget ROOM")
        room = store.forget(args.room)
        forget_settings(state_dir, room.name)
        print(f"Forgot {room.name}. To meet that peer again, both need a new code.")
        print("A daemon that runs with it makes no new connection; the one it has lasts until it breaks or is stopped.")
        return 0
    rooms = store.rooms()
    if args.json:
        print(json.dumps([{"name": room.name, "signaling": room.signaling, "met_at": room.met_at} for room in rooms]))
        return 0
    if not rooms:
        print("No rooms yet. Open one with `peerllm up`, or join one with its code.")
    for room in rooms:
        met = time.strftime("%Y-%m-%d %H:%M", time.localtime(max(room.met_at, room.paired_at)))
        print(f"{room.name}  last met {met}  {room.signaling}")
    return 0
