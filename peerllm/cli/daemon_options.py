"""What `up` and `join` share: options, the person at the terminal, and running the daemon in the foreground."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from peerllm.cli.client import default_state_dir, socket_path
from peerllm.cli.drafts import HELP, draft_named
from peerllm.cli.terminal import printable
from peerllm.protocol.errors import BadRequest, PeerllmError

if TYPE_CHECKING:
    from peerllm.daemon.config import DaemonConfig
    from peerllm.daemon.events import Notice

CODECS = ("exact", "int8")
DTYPES = ("float32", "float16", "bfloat16")
WEIGHTS = ("auto", "int8")


def add_daemon_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", metavar="A:B", help="hold layers A to B - 1; without it, shared by free memory")
    parser.add_argument(
        "--draft",
        metavar="DRAFT",
        help=f"{HELP} (the default); used by the peer that holds layer 0",
    )
    parser.add_argument(
        "--draft-length", type=int, metavar="K", help="candidates a block; without it, chosen round by round"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="compute in this dtype; without it, the best of both machines")
    parser.add_argument(
        "--weights", choices=WEIGHTS, help="of this peer's layers: auto (default) as they come, int8 in half of float16"
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens that the caches hold; default: the model's, or what fits both peers",
    )
    parser.add_argument(
        "--devices",
        "--device",
        dest="devices",
        metavar="A,B,…",
        help="cpu, cuda:0, …; several share the layers; default: the first GPU, else cpu",
    )
    parser.add_argument(
        "--draft-device", metavar="DEVICE", help="where the draft model goes on guessing while the layers compute"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of the engine")
    add_signaling_arguments(parser)
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="keys and their lock; one daemon each")
    parser.add_argument(
        "--keep",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds that answers wait for a silent peer (default 120)",
    )
    parser.add_argument("--yes", action="store_true", help="download without asking")
    # For one machine: the demo and the tests.
    parser.add_argument(
        "--loopback", action="store_true", help="keep the link on 127.0.0.1 (both peers on one machine)"
    )
    parser.add_argument("--rtt", type=float, default=0.0, metavar="MS", help="add this round trip to the link")
    parser.add_argument("--log-level", default="warning", choices=("debug", "info", "warning", "error"))


def add_signaling_arguments(parser: argparse._ActionsContainer) -> None:
    """Which signaling server, for every command that talks to one."""
    parser.add_argument(
        "--signaling",
        metavar="URL",
        default=os.environ.get("PEERLLM_SIGNALING"),
        help="ws://HOST:PORT of peerllm-signaling (or PEERLLM_SIGNALING)",
    )
    parser.add_argument(
        "--insecure", action="store_true", help="allow ws:// to a server beyond this machine (or PEERLLM_INSECURE=1)"
    )


def is_insecure(args: argparse.Namespace) -> bool:
    return bool(args.insecure) or os.environ.get("PEERLLM_INSECURE") == "1"


def config_of(args: argparse.Namespace, **more: object) -> DaemonConfig:
    """Raises BadRequest, LayersMismatch for options that make no sense."""
    from peerllm.daemon.config import DaemonConfig
    from peerllm.protocol import limits
    from peerllm.protocol.identity import LayerRange
    from peerllm.rooms.server import check_url

    if not args.signaling:
        raise BadRequest(
            "no signaling server is named: start one with `peerllm-signaling --host 127.0.0.1 --port 8790` and pass "
            "--signaling ws://127.0.0.1:8790, or set PEERLLM_SIGNALING"
        )
    if args.draft_length is not None and not 0 <= args.draft_length <= limits.MAX_DRAFT_LENGTH:
        raise BadRequest(f"--draft-length is from 0 to {limits.MAX_DRAFT_LENGTH}")
    draft = draft_named(args.draft or "auto")
    for name in ("threads", "context"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise BadRequest(f"--{name} is a number from 1 up")
    if args.context is not None and args.context < limits.MIN_CONTEXT:
        raise BadRequest(f"--context is a number from {limits.MIN_CONTEXT} up: a prompt and an answer have to fit")
    insecure = is_insecure(args)
    check_url(args.signaling, insecure=insecure)
    return DaemonConfig(
        signaling=args.signaling,
        state_dir=args.state_dir or default_state_dir(),
        socket=socket_path(args.socket),
        draft=draft,
        draft_length=args.draft_length,
        layers=None if args.layers is None else LayerRange.parse(args.layers),
        dtype=args.dtype,
        context=args.context,
        weights=args.weights,
        devices=() if args.devices is None else tuple(args.devices.split(",")),
        draft_device=args.draft_device,
        threads=args.threads,
        is_download_allowed=args.yes,
        is_insecure=insecure,
        is_loopback=args.loopback,
        added_rtt_ms=args.rtt,
        kept_seconds=args.keep,
        **more,  # type: ignore[arg-type]
    )


class Terminal:
    """The person: notices become lines, what takes long becomes progress."""

    def __init__(
        self,
        config: DaemonConfig,
        *,
        join_command: str = "peerllm join",
        second_home: str = " --state-dir ./second --socket ./second.sock",
        stream: TextIO | None = None,
    ) -> None:
        from peerllm.cli.progress import Progress

        self._config = config
        self._join_command = join_command
        self._second_home = second_home  # two daemons on one machine need two
        self._stream = stream
        self._progress = Progress(sys.stderr)
        self._last: Notice | None = None

    def tell(self, notice: Notice) -> None:
        from peerllm.daemon import events

        if isinstance(notice, events.Progress):
            self._progress.update(notice.stage, notice.fraction)
            return
        if notice == self._last:
            return  # "waiting" once is enough, however often it is tried
        self._last = notice
        self._progress.done()
        if isinstance(notice, events.Trouble):
            print(printable(notice.message), file=sys.stderr, flush=True)
        else:
            print(self._words(notice), file=self._stream or sys.stdout, flush=True)

    def done(self) -> None:
        """Clears the progress that was shown last."""
        self._progress.done()

    def _words(self, notice: Notice) -> str:
        from peerllm.daemon import events

        if isinstance(notice, events.RoomOpened):
            options = f"--signaling {self._config.signaling}" + " --insecure" * self._config.is_insecure
            if self._config.is_loopback:
                options += " --loopback" + self._second_home
            return (
                f"Room code: {notice.code}\nOn the other machine, type:\n"
                f"  {self._join_command} {notice.code} {options}\nWaiting for the other peer …"
            )
        if isinstance(notice, events.PeerSeated):
            return f"The other peer is here; this room is {notice.room} from now on. Connecting …"
        if isinstance(notice, events.WrongGuess):
            return f"Somebody tried wrong words for this room: {notice.guesses} so far. {notice.left} more close it."
        if isinstance(notice, events.Connected):
            rtt = "" if notice.rtt_ms is None else f", round trip {notice.rtt_ms:.0f} ms"
            return f"Connected ({notice.path or 'unknown path'}{rtt})."
        if isinstance(notice, events.ReadyToServe):
            role = "drafts" if notice.is_drafting else "verifies"
            most = f" of the model's {notice.max_context}" if notice.context < notice.max_context else ""
            return (
                f"Ready: {printable(notice.model)}, layers {notice.layers} of {notice.all_layers} here, "
                f"context {notice.context}{most}; this peer {role}.\n"
                f'Ask: peerllm ask "…" --socket {self._config.socket}'
            )
        raise TypeError(f"no words for {type(notice).__name__}")

    async def may_download(self, question: str) -> bool:
        self._progress.done()
        if not sys.stdin.isatty():
            return False
        print(f"{printable(question)}\nDownload it? [y/N] ", end="", flush=True)
        return (await _typed_line()).strip().lower() in ("y", "yes")


async def _typed_line() -> str:
    """A line from the terminal. Not read in a thread: nothing ends a thread that waits there, so Ctrl-C would not."""
    is_typed = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin, is_typed.set)
    try:
        await is_typed.wait()
    finally:
        loop.remove_reader(sys.stdin)
    return sys.stdin.readline()


def run_daemon(args: argparse.Namespace, config: DaemonConfig) -> int:
    """The daemon in the foreground, until it is stopped. Gives the exit status."""
    import uvloop

    from peerllm.daemon.main import run
    from peerllm.telemetry.logging import configure_logging

    configure_logging(args.log_level)
    try:
        uvloop.run(run(config, Terminal(config)))
    except PeerllmError as error:
        print(f"peerllm: {printable(error.message)}", file=sys.stderr)
        return 1
    return 0
