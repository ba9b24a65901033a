"""What to do about what `doctor` found: a line for each thing that is not well. Pure: a report in, lines out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from peerllm.protocol import limits

SLOW_SIGNALING_MS = 2000.0
STALL_MS = 200.0
"""A test machine with two busy cores has stalls of 50 to 100 ms; what a ping or a round notices begins here."""
MUCH_LOSS = 0.01
FEW_MBIT = 2.0
"""A block of 64 KB takes a quarter of a second."""
LITTLE_FREE = 0.2
"""The share of a GPU's memory below which something else has most of it."""
LITTLE_MEMORY_BYTES = 2048 * limits.MIB

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Advice:
    text: str
    prevents: bool = False
    """peerllm cannot work before this is mended."""


def advice(report: Report) -> list[Advice]:
    """The most serious first."""
    found = [
        *_signaling(report["signaling"]),
        *_nat(report),
        *_relays(report),
        *_link(report),
        *_machine(report["machine"]),
        *_stalls(report),
        *_daemon(report.get("daemon")),
    ]
    return sorted(found, key=lambda each: not each.prevents)


def _signaling(signaling: Report) -> Iterator[Advice]:
    if signaling["url"] is None:
        yield Advice(
            "No signaling server is named: pass --signaling wss://HOST:PORT, or set PEERLLM_SIGNALING.", prevents=True
        )
    elif signaling["error"] is not None:
        yield Advice(signaling["error"], prevents=True)
    elif signaling["connect_ms"] > SLOW_SIGNALING_MS:
        yield Advice(
            f"The signaling server took {signaling['connect_ms'] / 1000:.1f} s to reach: every start and every "
            "reconnect waits for it. Use one that is nearer."
        )


def _nat(report: Report) -> Iterator[Advice]:
    nat, is_up = report["nat"], _is_up(report)
    has_relay = any(each["answers"] for each in report["relays"])
    if nat["kind"] == "udp-blocked":
        if has_relay or is_up:
            yield Advice(
                "This network lets no UDP out, so everything goes through the relay, which costs time. Ask whoever "
                "runs the network to let UDP out."
            )
        else:
            yield Advice(
                "This network lets no UDP out, and no relay answers: no peer beyond it can be reached. Let UDP out, or "
                "give the signaling server a relay with TLS on port 443 (docs/relay.md).",
                prevents=True,
            )
    elif nat["kind"] == "symmetric":
        needs = "A peer behind another NAT of that kind, or one that filters by port, is reached "
        needs += "through the relay alone" if has_relay else "by no way, as no relay answers (docs/relay.md)"
        yield Advice(
            "This machine is behind a NAT that gives each connection another port. "
            f"{needs}. IPv6, or a router that keeps the port, would help."
        )
    elif nat["why_unknown"] == "the signaling server offers no STUN":
        yield Advice(
            "The signaling server offers no STUN, so only peers on the same network find each other directly. Start it "
            "without --no-stun."
        )
    elif nat["why_unknown"] == "only one STUN port of the signaling server answers":
        yield Advice(
            "Only one of the signaling server's two STUN ports answers, so the kind of NAT is not known. Let UDP "
            "through to both (signaling/README.md)."
        )


def _relays(report: Report) -> Iterator[Advice]:
    if report["nat"]["kind"] == "udp-blocked":
        silent = [each for each in report["relays"] if not each["answers"] and each["transport"] != "udp"]
    else:
        silent = [each for each in report["relays"] if not each["answers"]]
    for each in silent:
        what = "its certificate is valid for that name" if each["transport"] == "tls" else "a firewall lets it through"
        yield Advice(
            f"The relay {each['host']}:{each['port']} gives nothing over {each['transport'].upper()}: see whether it "
            f"runs, knows the signaling server's secret, and {what}."
        )


def _link(report: Report) -> Iterator[Advice]:
    link = report["link"]
    if link is None:
        return
    if link["error"] is not None:
        if report["signaling"]["url"] is not None and report["signaling"]["error"] is None:
            yield Advice(_sentence(link["error"]), prevents=True)
        return
    if link.get("replaced"):
        times = "once" if link["replaced"] == 1 else f"{link['replaced']} times"
        yield Advice(
            f"The connection was lost and made anew {times} while it was measured: the network changed, or lets "
            "nothing through now and then. Measure again; on Wi-Fi, try a cable."
        )
    if link["path"] == "relayed":
        yield Advice(
            "The two reach each other through the relay: a detour for every round. IPv6 on both sides, or a router "
            "that keeps the port, makes it direct."
        )
    loss = {"out": link.get("loss_out") or 0.0, "in": link.get("loss_in") or 0.0}
    if max(loss.values()) > MUCH_LOSS:
        yield Advice(
            f"{loss['out']:.1%} of the datagrams out and {loss['in']:.1%} of those in are lost, and each costs a round "
            "its time again. Use a cable in place of Wi-Fi, and look for what else fills the line."
        )
    for direction, words in (("mbit_out", "out"), ("mbit_in", "in")):
        rate = link.get(direction)
        if rate is not None and rate < FEW_MBIT:
            yield Advice(
                f"The path carries {rate:.1f} Mbit/s {words}: prompts take long. `peerllm up --codec int8` sends a "
                "quarter of the bytes."
            )
    other = link.get("other_release")
    if other is not None and other != report["release"]:
        yield Advice(f"The other peer runs peerllm {other} and this one {report['release']}: update the older.")


def _sentence(words: str) -> str:
    """An error's words stand on a line of their own here."""
    return words[:1].upper() + words[1:] + ("" if words.endswith((".", "!", "?", "…")) else ".")


def _machine(machine: Report) -> Iterator[Advice]:
    if machine["error"] is not None:
        yield Advice(f"The engine does not start here: {machine['error']}. Install peerllm anew.", prevents=True)
        return
    gpus = [each for each in machine["devices"] if each["device"] != "cpu"]
    if not gpus:
        yield Advice(
            f"torch {machine['torch']} finds no GPU, so the processor computes. If there is one: its driver, and a "
            "torch that was built for it, are missing."
        )
    for each in gpus:
        if each["free_bytes"] < LITTLE_FREE * each["total_bytes"]:
            yield Advice(
                f"{each['device']} has {each['free_bytes'] / 1e9:.1f} of {each['total_bytes'] / 1e9:.1f} GB free: end "
                "what else uses it, or take another with --device."
            )
    host = next((each for each in machine["devices"] if each["device"] == "cpu"), None)
    if host is not None and host["total_bytes"] > 0 and host["free_bytes"] < LITTLE_MEMORY_BYTES:
        yield Advice(f"{host['free_bytes'] / 1e9:.1f} GB of memory are free: little for a model. End other programs.")


def _stalls(report: Report) -> Iterator[Advice]:
    daemon = report.get("daemon") or {}
    for whose, loop in (("", report["loop"]), (" in the daemon that runs", daemon.get("loop") or {})):
        if loop.get("worst_ms", 0.0) > STALL_MS:
            yield Advice(
                f"The event loop stood still for {loop['worst_ms']:.0f} ms{whose}: the machine has too little to "
                "spare. Leave it a core with --threads."
            )


def _daemon(daemon: Report | None) -> Iterator[Advice]:
    if daemon is not None and not daemon["well"]:
        yield Advice(f"The daemon that runs is not well: {daemon['cause']}.")


def _is_up(report: Report) -> bool:
    return report["link"] is not None and report["link"]["error"] is None
