"""`peerllm bench e2e`: two daemons on this machine over the real link. Planted models: real work, known acceptance.

The two halves of a model of `--shape` and a draft of `--draft-shape`, whose weights are made on the device. Whatever
the acceptance, the answer is known beforehand, and is checked.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peerllm.cli.bench_machine import halves, settled
from peerllm.cli.client import Client
from peerllm.cli.demo_processes import Child, DemoFailed, Stage, stage
from peerllm.cli.terminal import printable
from peerllm.protocol import limits
from peerllm.protocol.errors import BadRequest, PeerllmError
from peerllm.protocol.identity import LayerRange

_START_SECONDS = 120.0
_RTT_MS = 86.0
"""The published run's."""
_READY_SECONDS = 300.0
"""Of both daemons: kernels are compiled and graphs captured for the first time."""
_PROMPT = "What follows is known beforehand, and all of the work is done all the same. Begin at "
_READY = r"Ready: (\S+), layers (\S+) of (\d+) here"
EXIT_USAGE = 2
"""As argparse's: what was asked for cannot be on this machine."""
PARTS = ("draft", "own_layers", "encode", "network", "their_layers", "verdict", "total")


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--shape", metavar="S", help="of the target (default qwen2.5-7b, on a CPU qwen2.5-tiny)")
    parser.add_argument("--draft-shape", metavar="S", help="of the draft (default qwen2.5-0.5b, on a CPU qwen2.5-tiny)")
    parser.add_argument(
        "--agree",
        type=_rates,
        default=(0.90, 0.80, 0.68),
        metavar="A,B,…",
        help="shares of tokens at which draft and target agree (default 0.90,0.80,0.68); @FILE is a recorded trace, "
        "a 1 or a 0 for each place",
    )
    parser.add_argument("--draft-length", type=int, default=8, metavar="K", help="candidates a block (default 8)")
    parser.add_argument(
        "--tokens", type=_counts, default=(64, 512), metavar="N,M", help="lengths of the answers (default 64,512)"
    )
    parser.add_argument("--codec", default="int8", choices=("exact", "int8"), help="on the link (default int8)")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="without it, the daemons choose")
    parser.add_argument("--weights", choices=("auto", "int8"), help="of both halves")
    parser.add_argument("--context", type=int, default=2048, metavar="N")
    parser.add_argument(
        "--devices",
        "--device",
        dest="devices",
        type=_devices,
        metavar="A,B,…",
        help="of both daemons; default: the first GPU",
    )
    parser.add_argument(
        "--draft-device", type=_device, metavar="DEVICE", help="where the draft goes on while the layers compute"
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads of each engine (default on a CPU: half of its cores)"
    )


def _rates(words: str) -> tuple[float | str, ...]:
    """Rates, and traces as `engine.planting` takes them."""
    found: list[float | str] = []
    for each in words.split(","):
        if each.startswith("@"):
            found.append(_trace(Path(each[1:])))
            continue
        value = float(each)
        if not 0.0 <= value <= 1.0:
            raise argparse.ArgumentTypeError("shares are from 0 to 1")
        found.append(value)
    if len(found) > 8:
        raise argparse.ArgumentTypeError("at most eight shares")
    return tuple(found)


def _trace(path: Path) -> str:
    try:
        places = "".join(path.read_text(encoding="ascii").split())
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{path}: {getattr(error, 'strerror', None) or 'no text'}") from None
    if not re.fullmatch("[01]{1,4096}", places):
        raise argparse.ArgumentTypeError(f"{path} is no trace: from 1 to 4096 times 0 or 1")
    return f"t{places}"


def _counts(words: str) -> tuple[int, ...]:
    values = tuple(int(each) for each in words.split(","))
    if not all(2 <= each <= 16384 for each in values):
        raise argparse.ArgumentTypeError("lengths from 2 to 16384 tokens")
    return values


def _device(word: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", word):
        raise argparse.ArgumentTypeError(f"a device is cpu, or cuda:0 and so on; got {word[:32]!r}")
    return word


def _devices(words: str) -> str:
    return ",".join(_device(each) for each in words.split(","))


def run(args: argparse.Namespace) -> int:
    """With `--json` the figures go to standard output and the table, as it comes, to standard error."""
    args.rtt = _RTT_MS if args.rtt is None else args.rtt
    try:
        _check(args)
        vars(args).update(settled(vars(args)))
    except PeerllmError as error:
        print(f"peerllm: {printable(error.message)}", file=sys.stderr)
        return EXIT_USAGE
    stream = sys.stderr if args.json else sys.stdout

    def say(line: str) -> None:
        # At once: who stops the bench half way has what was measured until then.
        print(line, file=stream, flush=True)

    try:
        with stage() as here:
            try:
                figures = _bench(here, args, say)
            except PeerllmError as error:
                raise DemoFailed(f"{error.message}\nThe logs end with:\n{here.log_tails()}") from error
    except KeyboardInterrupt:
        print("peerllm: stopped", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(figures, indent=1))
    return 0 if all(answer["is_right"] for answer in figures["answers"]) else 1


def _check(args: argparse.Namespace) -> None:
    """Raises BadRequest for what would end the bench after the planting."""
    if not 0 <= args.draft_length <= limits.MAX_DRAFT_LENGTH:
        raise BadRequest(f"--draft-length is from 0 to {limits.MAX_DRAFT_LENGTH}")
    if args.threads is not None and args.threads < 1:
        raise BadRequest("--threads is a number from 1 up")
    needed = len(_PROMPT) + 1 + max(args.tokens)
    if needed >= args.context:
        raise BadRequest(
            f"--context {args.context} does not hold the prompt and an answer of {max(args.tokens)} tokens: "
            f"more than {needed} are needed"
        )


def _bench(here: Stage, args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    began = time.monotonic()
    planted = _plant(here, args)
    seconds = {"planting": round(time.monotonic() - began, 1)}
    say(f"Planted {args.shape} and a draft of {args.draft_shape} in {seconds['planting']} s.")
    began = time.monotonic()
    children = _open_room(here, args, planted)
    for child in children:
        ready = here.wait_for(child, _READY, _READY_SECONDS)
        seconds[f"{child.name} ready"] = round(time.monotonic() - began, 1)
        say(f"The {child.name} daemon holds layers {ready[2]} of {ready[3]}; {seconds[f'{child.name} ready']} s.")
    loading = {child.name: _loading_seconds(here.folder / f"{child.name}.log") for child in children}
    for name, stages in loading.items():
        say(f"  {name}: " + ", ".join(f"{stage} {value:.1f} s" for stage, value in stages.items()))
    client = Client(here.folder / "first.sock")

    def ask(start: Sequence[Any], count: int, draft_length: int) -> dict[str, Any]:
        return here.while_all_live(lambda: _ask(client, start, count, draft_length))

    ask(planted["starts"][0][0], 16, args.draft_length)  # warms threads, connections and the link's window up
    say(_HEADER)
    answers = []
    for count in sorted(args.tokens):
        for agreement, starts in zip(args.agree, planted["starts"], strict=True):
            answer = ask(starts[0], count, args.draft_length)
            answers.append({"agreement": agreement, "draft_length": args.draft_length, **answer})
            say(_row(answers[-1]))
    plain = ask(planted["starts"][0][1], min(32, *args.tokens), 0)
    answers.append({"agreement": None, "draft_length": 0, **plain})
    say(_row(answers[-1]))
    means = {}
    for count in sorted(args.tokens):
        speeds = [each["tokens_per_second"] for each in answers[:-1] if each["tokens"] == count]
        means[str(count)] = _mean(speeds)
        say(_summary(count, means[str(count)], len(args.agree)))
    options = ("shape", "draft_shape", "agree", "rtt", "draft_length", "codec", "dtype", "weights", "context")
    return {
        **{name: getattr(args, name) for name in (*options, "devices", "draft_device", "threads")},
        "seconds": seconds,
        "loading_seconds": loading,
        "answers": answers,
        "mean_tokens_per_second": means,
        "link": client.get("/status")["link"],
    }


def _plant(here: Stage, args: argparse.Namespace) -> dict[str, Any]:
    """Folders of target and draft, and where the answers begin."""
    agree = ",".join(str(each) for each in args.agree)
    planting = here.start(
        "planting",
        "peerllm.engine.planting",
        str(here.folder),
        *("--shape", args.shape, "--draft-shape", args.draft_shape, "--agree", agree),
        *("--dtype", args.dtype or "float16"),
    )
    found: dict[str, Any] = json.loads(here.wait_for(planting, r"^(\{.*\})$", _START_SECONDS)[1])
    planting.wait_end(_START_SECONDS)
    return found


def _open_room(here: Stage, args: argparse.Namespace, planted: dict[str, Any]) -> tuple[Child, Child]:
    signaling = here.start("signaling", "peerllm_signaling", "--host", "127.0.0.1", "--port", "0")
    port = here.wait_for(signaling, r"127\.0\.0\.1:(\d+)", _START_SECONDS)[1]
    common = [
        *("--signaling", f"ws://127.0.0.1:{port}", "--loopback", "--rtt", str(args.rtt), "--log-level", "info"),
        *("--context", str(args.context), "--draft", f"model:{planted['draft']}"),
        *("--draft-length", str(args.draft_length)),
    ]
    for name in ("dtype", "weights", "devices", "draft_device", "threads"):
        if getattr(args, name) is not None:
            common += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    mine, theirs = halves(planted["layers"])

    def daemon(name: str, layers: LayerRange, *command: str) -> Child:
        return here.start(
            name,
            "peerllm",
            *command,
            *common,
            *("--model", planted["target"], "--layers", str(layers)),
            *("--state-dir", str(here.folder / name), "--socket", str(here.folder / f"{name}.sock")),
        )

    first = daemon("first", mine, "up", "--codec", args.codec)
    code = here.wait_for(first, r"Room code: (\S+)", _READY_SECONDS)[1]
    return first, daemon("second", theirs, "join", code)


def _loading_seconds(log: Path) -> dict[str, float]:
    """What the engine says of its stages, from the daemon's log."""
    for line in log.read_text(errors="replace").splitlines():
        if "layers_loaded" in line and (found := re.search(r'"seconds": (\{[^}]*\})', line)):
            stages: dict[str, float] = json.loads(found[1])
            return {name: round(value, 2) for name, value in stages.items()}
    return {}


def _ask(client: Client, start: Sequence[Any], count: int, draft_length: int) -> dict[str, Any]:
    """One answer of `count` tokens that begins at `start` (letter, token)."""
    letter, first = start
    body = {
        "prompt": _PROMPT + letter,
        "max_tokens": count,
        "temperature": 0,
        "draft_length": draft_length,
        "stream_options": {"include_usage": True},
    }
    ledger: dict[str, Any] = {}
    text, first_ms = "", 0.0
    began = time.monotonic()
    for event in client.stream("/v1/completions", body):
        for choice in event.get("choices", ()):
            if choice["text"] and not text:
                first_ms = (time.monotonic() - began) * 1000
            text += choice["text"]
        ledger = event.get("ledger") or ledger
    if not ledger:
        raise DemoFailed("the daemon's answer came without its figures")
    is_right = text == "".join(f" t{token}" for token in range(first, first + count))
    if not is_right:
        print(f"peerllm: the answer is not the planted one: {printable(text[:200])}", file=sys.stderr)
    medians = ledger["medians_ms"]
    own = (medians["draft"] or 0.0) + (medians["own_layers"] or 0.0)
    return {
        "tokens": count,
        "is_right": is_right,
        "tokens_per_second": ledger["tokens_per_second"],
        "tokens_per_round": ledger["tokens_per_round"],
        "acceptance_rate": ledger["acceptance_rate"],
        "rounds": ledger["rounds"],
        "first_token_ms": round(first_ms, 1),
        "medians_ms": medians,
        "draft_and_own_share": round(own / medians["total"], 4) if medians["total"] else None,
    }


_HEADER = (
    f"{'agree':>6}{'K':>4}{'tokens':>8}{'tok/s':>8}{'tok/round':>11}{'accepted':>10}{'first ms':>10}"
    + "".join(f"{part.replace('_', ' '):>14}" for part in PARTS)
    + f"{'draft + own':>13}"
)


def _row(answer: dict[str, Any]) -> str:
    def cell(value: Any, form: str, width: int) -> str:
        return f"{'–' if value is None else format(value, form):>{width}}"

    parts = "".join(cell(answer["medians_ms"][part], ".2f", 14) for part in PARTS)
    return (
        f"{_agreement(answer['agreement']):>6}"
        + f"{answer['draft_length']:>4}{answer['tokens']:>8}"
        + cell(answer["tokens_per_second"], ".2f", 8)
        + cell(answer["tokens_per_round"], ".2f", 11)
        + cell(answer["acceptance_rate"], ".0%", 10)
        + cell(answer["first_token_ms"], ".0f", 10)
        + parts
        + cell(answer["draft_and_own_share"], ".1%", 13)
        + ("" if answer["is_right"] else "  WRONG TEXT")
    )


def _agreement(value: float | str | None) -> str:
    if isinstance(value, str):
        return f"{value[1:].count('1') / len(value[1:]):.2f}t"
    return "–" if value is None else f"{value:.2f}"


def _mean(values: list[float | None]) -> float | None:
    """Of those that are long enough for a speed; None where none is."""
    known = [each for each in values if each is not None]
    return sum(known) / len(known) if known else None


def _summary(count: int, mean: float | None, answers: int) -> str:
    speed = "–" if mean is None else f"{mean:.2f}"
    return f"Answers of {count} tokens: {speed} tokens/s on average of {answers}."
