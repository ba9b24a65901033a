"""`peerllm doctor [CODE]`: what keeps this machine, or two of them, from working well, and what to do about it.

Alone it looks at this machine and its network. `--wait` opens a room and prints its code for the other machine, whose
`peerllm doctor CODE` measures the link between the two.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peerllm.cli.client import Client, socket_path
from peerllm.cli.daemon_options import Terminal, add_signaling_arguments, is_insecure
from peerllm.cli.ending import ends_like_ctrl_c
from peerllm.cli.folders import private_folder
from peerllm.cli.terminal import one_line, size
from peerllm.protocol.errors import BadRequest, PeerllmError

EXIT_PREVENTED = 1
_LABEL_WIDTH = 14
_DAEMON_SECONDS = 3.0
_PATIENCE_SECONDS = 10.0
"""How long a link that was lost is sought: whoever asks for a diagnosis wants it now."""
Line = tuple[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", nargs="?", metavar="CODE", help="join this room and measure the link to its other side")
    parser.add_argument("--wait", action="store_true", help="open a room and wait for the other machine")
    add_signaling_arguments(parser)
    parser.add_argument("--loopback", action="store_true", help="keep the link on 127.0.0.1 (both on one machine)")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.add_argument("--log-level", default="error", choices=("debug", "info", "warning", "error"))


def run(args: argparse.Namespace) -> int:
    """0, or EXIT_PREVENTED when something that was found prevents peerllm from working."""
    import uvloop

    from peerllm.daemon.advice import advice
    from peerllm.daemon.config import DaemonConfig
    from peerllm.daemon.doctor import examine
    from peerllm.rooms.codes import RoomCode
    from peerllm.telemetry.logging import configure_logging

    if args.code is not None:
        if args.wait:
            raise BadRequest("--wait opens a room, and CODE joins one: give one of the two")
        RoomCode.parse(args.code)
    configure_logging(args.log_level)
    daemon = _Daemon(socket_path(args.socket))
    with ends_like_ctrl_c(), private_folder("doctor") as folder:
        config = DaemonConfig(
            signaling=args.signaling or "",
            state_dir=folder,  # keys of its own: a daemon may be running with this user's
            socket=folder / "unused",
            room_code=args.code,
            is_insecure=is_insecure(args),
            is_loopback=args.loopback,
            kept_seconds=_PATIENCE_SECONDS,
        )
        person = Terminal(
            config,
            join_command="peerllm doctor",
            second_home="",
            stream=sys.stderr if args.json else sys.stdout,
        )
        report = uvloop.run(examine(config, person, is_alone=args.code is None and not args.wait))
        person.done()
    report["daemon"] = daemon.status()
    found = advice(report)
    report["works"] = not any(each.prevents for each in found)
    report["advice"] = [{"text": each.text, "prevents": each.prevents} for each in found]
    print(json.dumps(report, indent=1) if args.json else "\n".join(lines(report)))
    return 0 if report["works"] else EXIT_PREVENTED


class _Daemon:
    """Asks the daemon that may be running; one that is stuck is left to itself after _DAEMON_SECONDS."""

    def __init__(self, path: Path) -> None:
        self._found: dict[str, Any] | None = None
        self._thread = threading.Thread(target=self._ask, args=(path,), daemon=True)
        self._thread.start()

    def _ask(self, path: Path) -> None:
        try:
            self._found = Client(path).get("/status")
        except PeerllmError:
            self._found = None

    def status(self) -> dict[str, Any] | None:
        self._thread.join(_DAEMON_SECONDS)
        if self._thread.is_alive():
            return {"state": "silent", "well": False, "cause": "it does not answer on its socket", "loop": None}
        if self._found is None:
            return None
        health = self._found.get("health") or {}
        return {
            "state": self._found.get("state"),
            "well": bool(health.get("well", True)),
            "cause": str(health.get("cause", "")),
            "loop": self._found.get("loop"),
        }


def lines(report: dict[str, Any]) -> list[str]:
    """What was found, for people, and the advice after it."""
    found = [
        f"{label:<{_LABEL_WIDTH}}{text}"
        for label, text in (
            *_signaling(report["signaling"]),
            *_network(report),
            *_link(report["link"]),
            *_machine(report),
        )
    ]
    found.append("")
    found += [("Prevents it: " if each["prevents"] else "Advice: ") + each["text"] for each in report["advice"]]
    if not report["advice"]:
        found.append("All is well.")
    return [one_line(line) for line in found]


def _signaling(signaling: dict[str, Any]) -> Iterator[Line]:
    if signaling["url"] is None:
        yield "signaling", "none is named"
    elif signaling["error"] is not None:
        yield "signaling", f"{signaling['url']} cannot be used"
    else:
        yield (
            "signaling",
            f"{signaling['url']} reached in {signaling['connect_ms']:.0f} ms, answers in "
            f"{signaling['round_trip_ms']:.0f} ms",
        )


def _network(report: dict[str, Any]) -> Iterator[Line]:
    nat = report["nat"]
    kind = nat["kind"].replace("udp-blocked", "UDP is blocked")
    seen = ", ".join(f"{each['local']} is seen as {each['seen']}" for each in nat["addresses"])
    yield "NAT", f"{kind}{': ' + nat['why_unknown'] if nat['why_unknown'] else ''}{f' ({seen})' if seen else ''}"
    candidates = ", ".join(f"{each['kind']} {_endpoint(each)}" for each in report["candidates"])
    yield "candidates", candidates or "none"
    for each in report["relays"]:
        answers = f"answers in {each['ms']:.0f} ms" if each["answers"] else "gives nothing"
        yield "relay", f"{_endpoint({'address': each['host'], **each})} over {each['transport'].upper()} {answers}"
    if not report["relays"]:
        yield "relay", "none is offered"


def _endpoint(each: dict[str, Any]) -> str:
    address = each["address"]
    return f"[{address}]:{each['port']}" if ":" in address else f"{address}:{each['port']}"


def _link(link: dict[str, Any] | None) -> Iterator[Line]:
    if link is None:
        return
    if link["path"] is None:
        yield "link", "there is none"
        return
    parts = [f"{link['path']}, up after {link['seconds_to_up']:.1f} s"]
    if link.get("rtt_ms") is not None:
        p95 = f" (p95 {link['rtt_p95_ms']:.1f})" if link.get("rtt_p95_ms") is not None else ""
        parts.append(f"round trip {link['rtt_ms']:.1f} ms{p95}")
    if link.get("loss_out") is not None:
        parts.append(f"loss {link['loss_out']:.1%} out, {link['loss_in']:.1%} in")
    if link["error"] is not None:
        parts.append("and it broke")
    yield "link", ", ".join(parts)
    if link.get("mbit_out") is not None:
        yield (
            "throughput",
            f"{link['mbit_out']:.1f} Mbit/s out, {link['mbit_in']:.1f} Mbit/s in, {link['retransmitted']} packets sent "
            "again",
        )
    elif link.get("is_measured_there"):
        yield "throughput", "measured by the other side: its report has it"
    if link.get("other_release") is not None:
        yield "other peer", f"peerllm {link['other_release']}"


def _machine(report: dict[str, Any]) -> Iterator[Line]:
    loop = report["loop"]
    yield "event loop", f"stood still for {loop['worst_ms']:.0f} ms at the most"
    machine = report["machine"]
    if machine["error"] is not None:
        yield "engine", "does not start"
    if not any(each["device"] != "cpu" for each in machine.get("devices", ())):
        yield "GPU", "none"
    for each in machine.get("devices", ()):
        label = "memory" if each["device"] == "cpu" else "GPU"
        name = "" if each["device"] == "cpu" else f"{each['device']} {each['name']}, "
        yield label, f"{name}{size(each['free_bytes'])} of {size(each['total_bytes'])} free"
    yield "versions", ", ".join(f"{name} {value}" for name, value in report["versions"].items())
    daemon = report["daemon"]
    if daemon is not None:
        yield "daemon", f"{daemon['state']}" + ("" if daemon["well"] else f": {daemon['cause']}")
