"""`peerllm distill`: a draft model for a target, made out of the target alone (docs/distill.md)."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from peerllm.cli.progress import Progress
from peerllm.cli.terminal import printable
from peerllm.protocol.errors import BadRequest

_MOST_NAME_BYTES = 240
"""A file's name while it is written is somewhat longer; file systems take 255."""
EXIT_STOPPED = 3
"""The stretch ended before the recipe was done; `--resume` goes on."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, metavar="M", help="a folder, a hub id, or the embedded model's name")
    parser.add_argument("--out", required=True, type=Path, metavar="D", help="the draft's folder")
    recipe = parser.add_argument_group("the recipe, which a run keeps")
    recipe.add_argument("--layers", type=int, metavar="N", help="layers of the draft; default: by their cost")
    recipe.add_argument(
        "--init-from",
        type=_numbers,
        metavar="I,J",
        help="the target's layers that they begin as",
    )
    recipe.add_argument("--vocab-top", type=int, metavar="V", help="tokens of the head (default 16384)")
    amount = recipe.add_mutually_exclusive_group()
    amount.add_argument("--tokens", type=_count, metavar="N", help="of the target's answers (default 40M)")
    amount.add_argument("--hours", type=float, metavar="H", help="of computing instead, all stretches together")
    recipe.add_argument("--prompts", type=Path, metavar="FILE", help="one on each line; default: the target makes them")
    recipe.add_argument("--prompt-tokens", type=_count, metavar="N", help="of a prompt at most (default 96)")
    recipe.add_argument("--answer-tokens", type=_count, metavar="N", help="of an answer at most (default 256)")
    recipe.add_argument(
        "--temperatures", type=_reals, metavar="A,B", help="of the answers, in turns (default 0,0,0.8,1)"
    )
    recipe.add_argument("--reuse", type=_count, metavar="N", help="how often an answer is trained on (default 3)")
    recipe.add_argument("--step-tokens", type=_count, metavar="N", help="of one optimiser step (default 32768)")
    recipe.add_argument(
        "--learning-rate",
        type=float,
        metavar="R",
        help="at its highest (default: by the target's width, at most 0.008)",
    )
    recipe.add_argument("--held-out-every", type=_count, metavar="N", help="one prompt of so many judges (default 64)")
    recipe.add_argument("--seed", type=int, metavar="N", help="of the prompts and answers (default 0)")
    here = parser.add_argument_group("how it is run here")
    here.add_argument("--resume", action="store_true", help="go on with the run in D, where there is one")
    here.add_argument("--device", metavar="DEVICE", help="cuda:0, cpu; default: the first GPU, else cpu")
    here.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="of the target")
    here.add_argument("--slots", type=_count, metavar="N", help="answers made at once (default 1024; CPU 16)")
    here.add_argument("--threads", type=_count, metavar="N", help="CPU threads")
    here.add_argument("--report-minutes", type=float, default=3.0, metavar="M", help="between checkpoints (default 3)")
    here.add_argument("--stop-after", type=float, metavar="MINUTES", help="end this stretch; --resume goes on")
    here.add_argument(
        "--evaluation-prompts", type=int, default=100, metavar="N", help="that judge it, of each kind (default 100)"
    )
    here.add_argument("--plot", type=Path, metavar="FILE.svg", help="the run's figures as a picture")
    here.add_argument("--export-hf", type=Path, metavar="DIR", help="also write a whole Hugging Face model of it")
    here.add_argument("--yes", action="store_true", help="download the target without asking")


def run(args: argparse.Namespace) -> int:
    progress = Progress(sys.stderr)

    def say(line: str) -> None:
        progress.clear()
        print(printable(line), flush=True)

    _check(args)
    # Imported here: `peerllm --help` needs no torch.
    from peerllm.engine.distill.options import Settings
    from peerllm.engine.distill.run import Distillation

    settings = Settings(
        target=args.target,
        out=args.out.expanduser().absolute(),
        device=args.device,
        dtype=args.dtype,
        slots=args.slots,
        resume=args.resume,
        prompts=args.prompts,
        report_seconds=60 * args.report_minutes,
        stop_after_minutes=args.stop_after,
        evaluation_prompts=args.evaluation_prompts,
        plot=args.plot,
        export_hf=args.export_hf,
        allow_download=args.yes,
        threads=args.threads,
    )
    wishes = {
        "layers": args.layers,
        "init_from": args.init_from,
        "vocab_top": args.vocab_top,
        "tokens": args.tokens,
        "hours": args.hours,
        "prompt_tokens": args.prompt_tokens,
        "answer_tokens": args.answer_tokens,
        "temperatures": args.temperatures,
        "reuse": args.reuse,
        "step_tokens": args.step_tokens,
        "learning_rate": args.learning_rate,
        "held_out_every": args.held_out_every,
        "seed": args.seed,
    }
    with _stopping() as stop:
        run = Distillation(settings, wishes, say=say, progress=progress.update, is_stopping=lambda: bool(stop))
        progress.done()
        is_done = run.run()
    if is_done:
        say(f"Done. Use it: peerllm up --model {args.target} --draft {args.out}")
        return 0
    say("The recipe is not done; the same command with --resume goes on.")
    return EXIT_STOPPED


@contextmanager
def _stopping() -> Iterator[list[int]]:
    """A list that Ctrl-C and SIGTERM put something in; the second one ends at once."""
    asked: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check(args: argparse.Namespace) -> None:
    """Raises BadRequest for what no run could use."""
    if args.report_minutes <= 0:
        raise BadRequest("--report-minutes is more than 0")
    if args.evaluation_prompts < 0:
        raise BadRequest("--evaluation-prompts is a number from 0 up")
    for path in (args.plot, args.export_hf):
        if path is None:
            continue
        folder = path.absolute().parent
        if not folder.is_dir():
            raise BadRequest(f"{folder} is no folder here")
        if not os.access(folder, os.W_OK) or len(os.fsencode(path.name)) > _MOST_NAME_BYTES:
            raise BadRequest(f"{path} cannot be written")
    if args.plot is not None and args.plot.exists() and not args.plot.is_file():
        raise BadRequest(f"--plot {args.plot} is there and no file")
    exported: Path | None = args.export_hf
    if exported is None:
        return
    if exported.exists() and (not exported.is_dir() or any(exported.iterdir())):
        raise BadRequest(f"{exported} is no folder or not empty; name a new one with --export-hf")
    if exported.absolute() == args.out.expanduser().absolute():
        raise BadRequest("--export-hf and --out are the same folder")


def _count(words: str) -> int:
    """A number from 1 up, also as 40M or 500k."""
    factor = {"k": 1_000, "M": 1_000_000}.get(words[-1:], 1)
    try:
        value = int(float(words[:-1]) * factor) if factor > 1 else int(words)
    except OverflowError:
        raise argparse.ArgumentTypeError("too large a number") from None
    if value < 1:
        raise argparse.ArgumentTypeError("a number from 1 up")
    return value


def _numbers(words: str) -> tuple[int, ...]:
    return tuple(int(each) for each in words.split(","))


def _reals(words: str) -> tuple[float, ...]:
    return tuple(float(each) for each in words.split(","))
