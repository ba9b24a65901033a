"""`peerllm status`: peers, layer ranges, link, and where a round's time goes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from peerllm.cli.client import Client, socket_path
from peerllm.cli.terminal import printable, size

_PARTS = {
    "draft": "draft",
    "own_layers": "own layers",
    "encode": "encode",
    "network": "network",
    "their_layers": "their layers",
    "verdict": "verdict",
    "total": "whole round",
}
_LABEL_WIDTH = 14


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the daemon's own answer")


def run(args: argparse.Namespace) -> int:
    status = Client(socket_path(args.socket)).get("/status")
    if args.json:
        print(json.dumps(status, indent=2))
    else:
        print("\n".join(lines(status)))
    return 0


def lines(status: dict[str, Any]) -> list[str]:
    """What the status says, for people. Parts that the daemon does not know yet are left out."""
    return [
        printable(f"{label:<{_LABEL_WIDTH}}{text}")
        for label, text in (
            *_daemon(status),
            *_model(status.get("model") or {}),
            *_peers(status.get("peers") or []),
            *_link(status.get("link") or {}),
            *_work(status),
            *_ledger(status.get("ledger") or {}),
        )
    ]


Line = tuple[str, str]


def _daemon(status: dict[str, Any]) -> Iterator[Line]:
    health = status.get("health") or {}
    cause = "" if health.get("well", True) else f": {health.get('cause')}"
    yield "peerllm", f"{status.get('release')}, {status.get('state')}{cause}"


def _model(model: dict[str, Any]) -> Iterator[Line]:
    if model:
        context, most = model.get("context"), model.get("max_context")
        less = "" if most in (None, context) else f" of the model's {most}"
        yield (
            "model",
            f"{model.get('name')}, {model.get('layers')} layers in {model.get('dtype')}, context {context}{less}, "
            f"codec {model.get('codec')}",
        )


def _peers(peers: list[dict[str, Any]]) -> Iterator[Line]:
    for peer in peers:
        who = "this peer" if peer.get("self") else f"peer {str(peer.get('id') or '')[:8]}".rstrip()
        layers = peer.get("layers")
        if isinstance(layers, list) and len(layers) == 2:
            layers = f"{layers[0]}:{layers[1]}"
        weights = "" if peer.get("weights") in (None, "unquantised") else f" as {peer['weights']}"
        drafts = f"drafts with {peer['draft']}" if peer.get("draft") else "drafts"
        yield who, f"layers {layers}{weights}, {drafts if peer.get('drafting') else 'verifies'}"


def _link(link: dict[str, Any]) -> Iterator[Line]:
    if not link:
        return
    rtt = link.get("rtt_ms")
    parts = [str(link.get("state"))]
    if link.get("path"):
        parts.append(str(link["path"]))
    if rtt is not None:
        parts.append(f"round trip {rtt:.1f} ms")
    parts.append(f"epoch {link.get('epoch')}")
    parts.append(f"sent {size(link.get('bytes_sent') or 0)}, received {size(link.get('bytes_received') or 0)}")
    parts.append(f"{link.get('retransmitted', 0)} packets sent again")
    yield "link", ", ".join(parts)


def _work(status: dict[str, Any]) -> Iterator[Line]:
    worker, queue = status.get("worker") or {}, status.get("queue") or {}
    if worker:
        age = worker.get("beat_age_s")
        beat = "no heartbeat yet" if age is None else f"heartbeat {age:.1f} s ago"
        yield "worker", f"{worker.get('state')}, {beat}, restarted {worker.get('restarts', 0)} times"
    if queue:
        yield "requests", f"{queue.get('active', 0)} running, {queue.get('waiting', 0)} waiting"


def _ledger(ledger: dict[str, Any]) -> Iterator[Line]:
    if not ledger.get("rounds"):
        return
    parts = [f"{ledger['rounds']}", f"{ledger.get('tokens')} tokens"]
    for key, words in (
        ("tokens_per_second", "{:.1f} tokens/s"),
        ("tokens_per_round", "{:.2f} tokens a round"),
        ("acceptance_rate", "{:.0%} of candidates accepted"),
        ("time_to_first_token_ms", "first token after {:.0f} ms"),
    ):
        if ledger.get(key) is not None:
            parts.append(words.format(ledger[key]))
    yield "rounds", ", ".join(parts)
    medians = ledger.get("medians_ms") or {}
    times = [f"{words} {medians[part]:.1f}" for part, words in _PARTS.items() if medians.get(part) is not None]
    if times:
        yield "median ms", ", ".join(times)
