"""`peerllm models`: what is in this machine's cache, and which of it the daemon serves now."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from peerllm.cli.client import Client, socket_path
from peerllm.cli.progress import Progress, Waiting
from peerllm.cli.terminal import printable, size
from peerllm.protocol.errors import SocketError
from peerllm.protocol.requests import ModelInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one list of objects")


def run(args: argparse.Namespace) -> int:
    served = _served(args)
    with Waiting("Looking through the cache …", Progress()):
        # Only here: it may import what takes seconds.
        from peerllm.models import cached_models

        cached = cached_models()
    if args.json:
        print(json.dumps([asdict(model) | {"served": model.name in served} for model in cached]))
    else:
        print("\n".join(lines(cached, served)))
    return 0


def lines(cached: Iterable[ModelInfo], served: set[str]) -> list[str]:
    """A line for each model in the cache, and for what the daemon serves from elsewhere (a folder of the user's)."""
    shown = [_line(model.name, model.details, model.name in served) for model in cached]
    known = {model.name for model in cached}
    shown += [_line(name, {}, True) for name in sorted(served - known)]
    return shown or ["No models in the cache. 'peerllm up --model HUB_ID' fetches one."]


def _line(name: str, details: Mapping[str, Any], is_served: bool) -> str:
    facts = []
    if details.get("layers"):
        facts.append(f"{details['layers']} layers")
    if details.get("bytes"):
        facts.append(size(details["bytes"]))
    if is_served:
        facts.append("served now")
    if details.get("folder"):
        facts.append(str(details["folder"]))
    return printable(f"{name}  {', '.join(facts)}".rstrip())


def _served(args: argparse.Namespace) -> set[str]:
    """The names that a daemon serves; none where no daemon runs."""
    try:
        answer = Client(socket_path(args.socket)).get("/v1/models")
    except SocketError:
        return set()
    return {str(model.get("id")) for model in answer.get("data", ())}
