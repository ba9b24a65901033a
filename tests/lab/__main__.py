"""A lab for people: `python -m tests.lab up --rtt 80 --loss 0.5 --nat symmetric`, until Ctrl-C.

Lines typed while it runs change it: `a loss=2`, `b cut`, `b restore`, `a address`, `a rate=20 buffer=1000`.
"""

from __future__ import annotations

import argparse
import signal
import sys

from tests.lab import figures
from tests.lab.net import NATS, PUBLIC, Lab, missing

_UNITS = {"loss": 0.01, "jitter": 0.001, "delay": 0.001, "rate": 1e6, "buffer": 0.001, "mtu": 1}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__)
    commands = parser.add_subparsers(required=True)
    up = commands.add_parser("up", help="make the lab and keep it until Ctrl-C")
    up.add_argument("--rtt", type=float, default=80.0, metavar="MS", help="round trip between a and b")
    up.add_argument("--loss", type=float, default=0.0, metavar="PERCENT", help="of what a and b send")
    up.add_argument("--jitter", type=float, default=0.0, metavar="MS")
    up.add_argument("--rate", type=float, default=0.0, metavar="MBIT", help="of a's and b's uplink")
    up.add_argument("--buffer", type=float, default=100.0, metavar="MS")
    up.add_argument("--nat", choices=NATS, action="append", help="of a and b, or twice: of a, of b")
    up.add_argument("--ipv6", choices=("", "also", "only"), default="")
    up.set_defaults(run=_up)
    bench = commands.add_parser("figures", help="the link's benchmarks")
    bench.add_argument("names", nargs="*", choices=[*figures.ALL, []], help="which; all of ours without any")
    bench.add_argument("--samples", type=int, default=200)
    bench.set_defaults(run=lambda arguments: figures.main(arguments.names, arguments.samples))
    return parser.parse_args()


def main() -> None:
    reason = missing()
    if reason is not None:
        raise SystemExit(reason)
    arguments = _parse()
    arguments.run(arguments)


def _up(arguments: argparse.Namespace) -> None:
    nats = arguments.nat or ["none"]
    lab = Lab(
        nat=(nats[0], nats[-1]),
        rtt_ms=arguments.rtt,
        loss=arguments.loss / 100,
        jitter_ms=arguments.jitter,
        rate_mbit=arguments.rate,
        buffer_ms=arguments.buffer,
        ipv6=arguments.ipv6,
    )
    with lab:
        for host in lab.hosts.values():
            print(f"host {host.name}: {host.address:15}  ip netns exec {host.namespace} bash")
        print(f"the public host is {PUBLIC}; Ctrl-C ends the lab")
        try:
            for line in sys.stdin:
                _change(lab, line.split())
            signal.pause()  # no more lines will come; the lab stays
        except KeyboardInterrupt:
            print()


def _change(lab: Lab, words: list[str]) -> None:
    if not words or words[0] not in lab.hosts:
        print("first the host: a, b or p")
        return
    port, *changes = words
    for change in changes:
        name, _, value = change.partition("=")
        if change in ("cut", "restore"):
            lab.shape(port, is_cut=change == "cut")
        elif change == "address":
            lab.change_address(port)
            print(f"{port} is {lab.hosts[port].address} now")
        elif name in _UNITS:
            lab.shape(port, **{name: float(value) * _UNITS[name]})
        else:
            print(f"{change!r} is not one of cut, restore, address, {', '.join(f'{each}=' for each in _UNITS)}")


if __name__ == "__main__":
    main()
