"""A lab for people: `python -m tests.lab up --rtt 80 --loss 0.5 --nat symmetric`, until Ctrl-C.

Lines typed while it runs change it: `a loss=2`, `b cut`, `b restore`, `a address`, `a rate=20 buffer=1000`.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from tests.lab import figures
from tests.lab.net import NATS, PUBLIC, Lab, missing

_UNITS = {"loss": 0.01, "jitter": 0.001, "delay": 0.001, "rate": 1e6, "buffer": 0.001, "mtu": 1}
_MOST = {"loss": 100, "mtu": 65535}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__)
    commands = parser.add_subparsers(required=True)
    up = commands.add_parser("up", help="make the lab and keep it until Ctrl-C")
    up.add_argument("--rtt", type=_amount, default=80.0, metavar="MS", help="round trip between a and b")
    up.add_argument("--loss", type=_percent, default=0.0, metavar="PERCENT", help="of what a and b send")
    up.add_argument("--jitter", type=_amount, default=0.0, metavar="MS")
    up.add_argument("--rate", type=_amount, default=0.0, metavar="MBIT", help="of a's and b's uplink")
    up.add_argument("--buffer", type=_amount, default=100.0, metavar="MS")
    up.add_argument("--nat", choices=NATS, action="append", help="of a and b, or twice: of a, of b")
    up.add_argument("--ipv6", choices=("", "also", "only"), default="")
    up.set_defaults(run=_up)
    bench = commands.add_parser("figures", help="the link's benchmarks")
    bench.add_argument("names", nargs="*", choices=[*figures.ALL, []], help="which; all of ours without any")
    bench.add_argument("--samples", type=int, default=200)
    bench.set_defaults(run=lambda arguments: figures.main(arguments.names, arguments.samples))
    arguments = parser.parse_args(words)
    if len(vars(arguments).get("nat") or ()) > 2:
        up.error("argument --nat: at most twice, of a and of b")
    return arguments


def _amount(text: str, most: float = 1e6) -> float:
    """Raises ArgumentTypeError, whose words argparse shows."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 <= value <= most:  # and nan is not either
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {most:.0f}")
    return value


def _percent(text: str) -> float:
    return _amount(text, _MOST["loss"])


def main() -> None:
    reason = missing()
    if reason is not None:
        raise SystemExit(reason)
    arguments = parse()
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
                change(lab, line.split())
            signal.pause()  # no more lines will come; the lab stays
        except KeyboardInterrupt:
            print()


def change(lab: Lab, words: list[str]) -> None:
    """What one line says; of what it says wrongly, what is wrong: the lab outlives a slip of the hand."""
    if not words or words[0] not in lab.hosts:
        print("first the host: a, b or p")
        return
    port, *changes = words
    for each in changes:
        name, _, value = each.partition("=")
        if each in ("cut", "restore"):
            lab.shape(port, is_cut=each == "cut")
        elif each == "address":
            lab.change_address(port)
            print(f"{port} is {lab.hosts[port].address} now")
        elif name in _UNITS:
            try:
                amount = _amount(value, _MOST.get(name, 1e6))
            except argparse.ArgumentTypeError as error:
                print(f"{each!r} changes nothing: {error}")
            else:
                lab.shape(port, **{name: amount * _UNITS[name]})
        else:
            print(f"{each!r} is not one of cut, restore, address, {', '.join(f'{unit}=' for unit in _UNITS)}")


if __name__ == "__main__":
    main()
