"""`peerllm`: finds the subcommand's module and runs it. No other subcommand's module is imported."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from peerllm import __version__
from peerllm.cli.client import add_socket_argument
from peerllm.cli.parsing import CommandParser
from peerllm.cli.terminal import printable
from peerllm.protocol.errors import PeerllmError

COMMANDS = {
    "up": "open a room, print its code, and serve",
    "join": "join a room by its code, and serve",
    "resume": "meet a peer again, without a code",
    "rooms": "list the peers that can be met again; forget one",
    "ask": "ask one question and stream the answer",
    "chat": "hold a conversation",
    "status": "show peers, layer ranges, link and where a round's time goes",
    "models": "list the models on this machine",
    "bench": "measure: the link between two machines, or two whole daemons on this one",
    "doctor": "find what keeps this machine, or two of them, from working well",
    "distill": "make a draft model for a target, out of the target alone",
    "completion": "print the shell's completion of commands and room codes",
    "demo": "two peers on this machine: ask, compare, measure",
}
"""Each is a module of this package, with `add_arguments(parser)` and `run(args) -> exit status`."""

_WITHOUT_SOCKET = ("bench", "distill", "demo", "rooms", "completion")
"""Commands that ask no daemon; the demo's own have sockets of their own."""

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
"""128 and the signal's number, as a shell has it."""

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Of a full disk, mostly: nothing is wrong with the command."""


class Command(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and gives the exit status: 0, 1 for a failure, 2 for wrong usage (argparse exits), 130
    after Ctrl-C, 141 when the reader of the output went away."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:
        # Closed by whoever started this. Its number must be taken, else the next file or socket is written to.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open as long as the process lives
    try:
        return _run(words)
    except PeerllmError as error:
        print(f"peerllm: {printable(error.message)}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        print(f"peerllm: cannot write: {error.strerror}", file=sys.stderr)
        with contextlib.suppress(OSError):  # what is left in the buffer would fail once more at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _run(words: list[str]) -> int:
    name = next((word for word in words if word in COMMANDS), None)
    parser = argparse.ArgumentParser(prog="peerllm", description="One language model, run together by several people.")
    parser.add_argument("--version", action="version", version=f"peerllm {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True, parser_class=CommandParser)
    module: Command | None = None
    for each, words_of_help in COMMANDS.items():
        command = commands.add_parser(each, help=words_of_help, description=words_of_help.capitalize() + ".")
        if each == name:
            module = importlib.import_module(f"peerllm.cli.{each}")
            module.add_arguments(command)
            if each not in _WITHOUT_SOCKET:
                add_socket_argument(command)
    args = parser.parse_args(words)
    if module is None:
        parser.error("a command is needed")
    for stream in (sys.stdout, sys.stderr):
        # A terminal that lacks a character shows another one; it does not end the answer.
        getattr(stream, "reconfigure", lambda **_: None)(errors="replace")
    status = module.run(args)
    sys.stdout.flush()
    return status


if __name__ == "__main__":
    sys.exit(main())
