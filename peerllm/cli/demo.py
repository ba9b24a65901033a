"""`peerllm demo`: the main job on one machine, over a real data channel on 127.0.0.1, and what it gained.

A signaling server and two daemons, each a process of its own; a room, its code; the model's layers in two halves. The
question goes to the first daemon's socket with speculation and without, and to the second's; the texts have to be the
same.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerllm.cli.client import Client
from peerllm.cli.daemon_options import WEIGHTS
from peerllm.cli.demo_processes import Child, DemoFailed, Stage, stage
from peerllm.cli.drafts import HELP, default_draft, draft_named, short_name
from peerllm.cli.parsing import milliseconds
from peerllm.cli.progress import Progress
from peerllm.cli.terminal import printable
from peerllm.protocol.errors import PeerllmError

MODEL = "smollm2-135m-instruct"
PROMPT = (
    "Here is a Python function:\n\ndef area(width, height):\n    return width * height\n\n"
    "Write it again with a docstring, and then once more with type hints."
)
"""A task of the kind that n-gram look-up helps with: the answer repeats parts of the prompt."""
_START_SECONDS = 60.0
_LOAD_SECONDS = 600.0
"""The first run converts the model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rtt", type=milliseconds, default=0.0, metavar="MS", help="add this round trip to the link")
    parser.add_argument("--prompt", default=PROMPT, metavar="TEXT", help="what to ask")
    parser.add_argument("--max-tokens", type=_count, default=96, metavar="N", help="tokens in the answer at most")
    parser.add_argument("--draft", metavar="DRAFT", help=f"{HELP} (the default)")
    parser.add_argument("--model", default=MODEL, metavar="M", help="another model: a folder or a hub id")
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        help="of both daemons' layers: auto (default) as they come, int8 in half of float16",
    )
    parser.add_argument("--threads", type=_count, default=1, metavar="N", help="CPU threads of each engine (default 1)")
    parser.add_argument("--json", action="store_true", help="print the table's figures as JSON")


def _count(words: str) -> int:
    value = int(words)
    if value < 1:
        raise argparse.ArgumentTypeError("a number from 1 up")
    return value


def run(args: argparse.Namespace) -> int:
    # Named here, so that the table says which it was.
    args.draft = default_draft(args.model) if args.draft in (None, "auto") else draft_named(args.draft)
    progress = Progress(sys.stderr)
    say: Callable[[str], None] = (lambda _: None) if args.json else print
    try:
        with stage() as here:
            try:
                first, second = _open_room(here, args, progress, say)
                figures = here.while_all_live(lambda: _measure(args, Client(first), Client(second), say))
            except PeerllmError as error:
                raise DemoFailed(f"{error.message}\nThe logs end with:\n{here.log_tails()}") from error
    except KeyboardInterrupt:
        progress.done()
        print("peerllm: stopped", file=sys.stderr)
        return 130
    except PeerllmError as error:
        progress.done()
        print(f"peerllm: {error.message}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(figures, indent=2))
    else:
        _print_table(figures)
    return 0 if figures["identical"] else 1


def _open_room(
    here: Stage, args: argparse.Namespace, progress: Progress, say: Callable[[str], None]
) -> tuple[Path, Path]:
    """Both daemons' sockets, once both are ready."""
    progress.update("starting the signaling server")
    signaling = here.start("signaling", "peerllm_signaling", "--host", "127.0.0.1", "--port", "0")
    port = signaling.wait_for(r"127\.0\.0\.1:(\d+)", _START_SECONDS)[1]
    common = [
        *("--signaling", f"ws://127.0.0.1:{port}", "--loopback", "--rtt", str(args.rtt)),
        *("--threads", str(args.threads), "--draft", args.draft, "--device", "cpu"),
        *(() if args.weights is None else ("--weights", args.weights)),
    ]
    first = _start_daemon(here, "first", common, "up", "--model", args.model)
    code = _wait(here, first, r"Room code: (\S+)", progress)[1]
    progress.done()
    say(f"The first daemon opened room {code}; the second joins it.")
    second = _start_daemon(here, "second", common, "join", code, "--model", args.model)
    for child in (first, second):
        ready = _wait(here, child, r"Ready: (\S+), layers (\S+) of (\d+) here", progress)
        progress.done()
        say(f"The {child.name} daemon holds layers {ready[2]} of {ready[3]} of {ready[1]}.")
    return here.folder / "first.sock", here.folder / "second.sock"


def _start_daemon(here: Stage, name: str, common: list[str], *command: str) -> Child:
    return here.start(
        name,
        "peerllm",
        *command,
        *common,
        *("--state-dir", str(here.folder / name), "--socket", str(here.folder / f"{name}.sock")),
    )


def _wait(here: Stage, child: Child, pattern: str, progress: Progress) -> re.Match[str]:
    def show(line: str) -> None:
        # The daemon's own progress, written as plain lines into its log: "converting the model 50%".
        if match := re.fullmatch(r"([a-z][^=\[]{3,60}?)(?: (\d+)%)?", line.strip()):
            progress.update(f"{child.name} daemon: {match[1]}", None if match[2] is None else int(match[2]) / 100)

    progress.update(f"{child.name} daemon: starting")
    return here.wait_for(child, pattern, _LOAD_SECONDS, show)


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    ledger: dict[str, Any]
    first_text_ms: float
    completion_tokens: int


def _measure(args: argparse.Namespace, first: Client, second: Client, say: Callable[[str], None]) -> dict[str, Any]:
    for client in (first, second):
        _ask(client, args, max_tokens=2)  # the first answer warms caches and threads up
    say(f"\nAsking the first daemon: {args.prompt}\n")
    # Speculative, plain, plain, speculative: a machine that grows slower or faster meanwhile favours neither.
    speculative = [_ask(first, args, show=not args.json)]
    say("\n\nAsking it again without speculation, and then the second daemon, without and with …")
    plain = [_ask(client, args, draft_length=0) for client in (first, second)]
    speculative.append(_ask(second, args))
    texts = {answer.text for answer in (*plain, *speculative)}
    return {
        "identical": len(texts) == 1,
        "model": args.model,
        "draft": short_name(args.draft),
        "weights": args.weights or "auto",
        "rtt_ms": args.rtt,
        "tokens": speculative[0].completion_tokens,
        "plain": _figures(plain),
        "speculative": _figures(speculative),
        "texts": sorted(texts),
    }


def _ask(
    client: Client,
    args: argparse.Namespace,
    *,
    draft_length: int | None = None,
    max_tokens: int | None = None,
    show: bool = False,
) -> _Answer:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": args.prompt}],
        "max_tokens": max_tokens or args.max_tokens,
        "temperature": 0,
        "stream_options": {"include_usage": True},
    }
    if draft_length is not None:
        body["draft_length"] = draft_length
    ledger: dict[str, Any] = {}
    text, tokens, first_ms = "", 0, 0.0
    began = time.monotonic()
    for event in client.stream("/v1/chat/completions", body):
        for choice in event.get("choices", ()):
            piece = choice.get("delta", {}).get("content") or ""
            if piece and not text:
                first_ms = (time.monotonic() - began) * 1000
            text += piece
            if show:
                print(printable(piece), end="", flush=True)
        if usage := event.get("usage"):
            tokens = usage["completion_tokens"]
        ledger = event.get("ledger") or ledger
    if not ledger:
        raise DemoFailed("the daemon's answer came without its figures")
    return _Answer(text, ledger, first_ms, tokens)


def _figures(answers: list[_Answer]) -> dict[str, Any]:
    """Means over both daemons' answers; None where there is nothing to measure."""
    ledgers = [answer.ledger for answer in answers]

    def mean(values: list[Any]) -> float | None:
        return None if None in values else round(statistics.fmean(values), 3)

    figures: dict[str, Any] = {
        key: mean([ledger[key] for ledger in ledgers])
        for key in ("tokens_per_second", "acceptance_rate", "tokens_per_round", "rounds")
    }
    figures["time_to_first_token_ms"] = mean([answer.first_text_ms for answer in answers])
    figures["medians_ms"] = {
        part: mean([ledger["medians_ms"][part] for ledger in ledgers]) for part in ledgers[0]["medians_ms"]
    }
    return figures


_ROWS = (
    ("tokens/s", "tokens_per_second", "{:.2f}"),
    ("acceptance rate", "acceptance_rate", "{:.0%}"),
    ("tokens per round", "tokens_per_round", "{:.2f}"),
    ("rounds", "rounds", "{:.0f}"),
    ("time to first token, ms", "time_to_first_token_ms", "{:.0f}"),
)
_PARTS = ("draft", "own_layers", "encode", "network", "their_layers", "verdict")


def _print_table(figures: dict[str, Any]) -> None:
    plain, speculative = figures["plain"], figures["speculative"]

    def row(label: str, left: Any, right: Any, form: str) -> None:
        cells = ("–" if value is None else form.format(value) for value in (left, right))
        print(f"  {label:<28}" + "".join(f"{cell:>14}" for cell in cells))

    weights = "" if figures["weights"] == "auto" else f", {figures['weights']} weights"
    print(f"\n{figures['model']}{weights}, draft {figures['draft']}, added round trip {figures['rtt_ms']:g} ms, "
          f"{figures['tokens']} tokens")  # fmt: skip
    print(f"  {'':<28}{'plain':>14}{'speculative':>14}")
    for label, key, form in _ROWS:
        row(label, plain[key], speculative[key], form)
    print("  where a round's time went, median ms")
    for part in _PARTS:
        row(f"  {part.replace('_', ' ')}", plain["medians_ms"][part], speculative["medians_ms"][part], "{:.1f}")
    if plain["tokens_per_second"] and speculative["tokens_per_second"]:
        ratio = speculative["tokens_per_second"] / plain["tokens_per_second"]
        print(f"Speculation: {ratio:.2f} times plain decoding.")
    if figures["identical"]:
        print("All four texts are identical: plain and speculative, through either daemon's socket.")
    else:
        print("THE TEXTS DIFFER: this is a fault; please report it with the output of --json.")
