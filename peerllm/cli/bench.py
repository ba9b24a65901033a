"""`peerllm bench`: `link [CODE]` opens a room and waits, or joins one and measures; `e2e` is in `bench_e2e`."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from peerllm.cli import bench_e2e
from peerllm.cli.daemon_options import Terminal, add_signaling_arguments, is_insecure
from peerllm.cli.ending import ends_like_ctrl_c
from peerllm.cli.folders import private_folder
from peerllm.cli.parsing import actions, milliseconds
from peerllm.protocol.errors import BadRequest

_PATIENCE_SECONDS = 10.0
"""How long a link that was lost is sought: somebody waits for the figures."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=("link", "e2e"),
        metavar="{link,e2e}",
        help="link: how long a block takes between two machines, by its size. e2e: tokens a second of two daemons on "
        "this machine, with planted models and a chosen acceptance",
    )
    parser.add_argument(
        "code", nargs="?", metavar="CODE", help="link: join this room and measure; without it, open one"
    )
    parser.add_argument(
        "--rtt", type=milliseconds, metavar="MS", help="add this round trip to the link (e2e: default 86)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    groups = {what: parser.add_argument_group(what) for what in ("link", "e2e")}
    _add_link_arguments(groups["link"])
    bench_e2e.add_arguments(groups["e2e"])
    parser.set_defaults(options_of={what: actions(group) for what, group in groups.items()})


def _add_link_arguments(parser: argparse._ArgumentGroup) -> None:
    add_signaling_arguments(parser)
    parser.add_argument("--samples", type=int, default=200, metavar="N", help="exchanges of each size (default 200)")
    parser.add_argument("--loopback", action="store_true", help="keep the link on 127.0.0.1 (both on one machine)")
    parser.add_argument("--log-level", default="warning", choices=("debug", "info", "warning", "error"))


def run(args: argparse.Namespace) -> int:
    for what, options in args.options_of.items():
        for each in options:
            if what != args.what and getattr(args, each.dest) != each.default:
                raise BadRequest(f"{each.option_strings[0]} is an option of bench {what}, not of bench {args.what}")
    if args.what == "link":
        return _bench_link(args)
    if args.code is not None:
        raise BadRequest("bench e2e opens a room of its own; it takes no code")
    return bench_e2e.run(args)


def _bench_link(args: argparse.Namespace) -> int:
    import uvloop

    from peerllm.daemon.bench import bench_link
    from peerllm.daemon.config import DaemonConfig
    from peerllm.telemetry.logging import configure_logging

    if not args.signaling:
        raise BadRequest("no signaling server is named: pass --signaling ws://HOST:PORT, or set PEERLLM_SIGNALING")
    if args.samples < 1:
        raise BadRequest("--samples is a number from 1 up")
    configure_logging(args.log_level)
    # Keys of its own: a daemon may be running with this user's.
    with ends_like_ctrl_c(), private_folder("bench") as folder:
        config = DaemonConfig(
            signaling=args.signaling,
            state_dir=folder,
            socket=folder / "unused",
            room_code=args.code,
            is_insecure=is_insecure(args),
            is_loopback=args.loopback,
            added_rtt_ms=args.rtt or 0.0,
            kept_seconds=_PATIENCE_SECONDS,
        )
        person = Terminal(
            config,
            join_command="peerllm bench link",
            second_home="",
            stream=sys.stderr if args.json else sys.stdout,
        )
        figures = uvloop.run(bench_link(config, person, samples=args.samples))
        person.done()
    if figures is not None:
        print(json.dumps(figures, indent=1) if args.json else _table(figures))
    return 0


def _table(figures: dict[str, Any]) -> str:
    lines = [
        f"{figures['path']}, round trip {figures['rtt_ms']:.1f} ms at the least",
        f"{'bytes':>9} {'direction':>9} {'p50 ms':>9} {'p95 ms':>9} {'p99 ms':>9} {'retransmitted':>14}",
    ]
    lines += [
        f"{block['bytes']:>9} {block['direction']:>9} {block['p50_ms']:>9.1f} {block['p95_ms']:>9.1f} "
        f"{block['p99_ms']:>9.1f} {block['retransmitted']:>14}"
        for block in figures["blocks"]
    ]
    return "\n".join(lines)
