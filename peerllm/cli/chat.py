"""`peerllm chat`: a conversation in the terminal. Nothing of it is written anywhere."""

from __future__ import annotations

import argparse
import contextlib
import sys

from peerllm.cli.answering import Reply, add_sampling_arguments, chat_body, stream_answer
from peerllm.cli.client import Client, socket_path
from peerllm.cli.terminal import printable
from peerllm.protocol.errors import ContextTooLong, PeerllmError

_HELP = """\
/new    forget the conversation and begin again
/exit   leave (or Ctrl-D)
Ctrl-C stops an answer, or clears the line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    client = Client(socket_path(args.socket))
    on_terminal = sys.stdin.isatty()
    served = client.get("/v1/models")  # so that a daemon that is not there is found before anything is typed
    if on_terminal:
        _edit_lines()
        names = ", ".join(str(model.get("id")) for model in served.get("data", ())) or "no model yet"
        print(f"{printable(names)}. /help shows the commands.")
    messages: list[dict[str, str]] = []
    while (line := _next_line(on_terminal)) is not None:
        if line == "/exit":
            break
        if line == "/new":
            messages.clear()
        elif line == "/help":
            print(_HELP)
        elif line.strip():
            _turn(client, args, messages, line)
    return 0


def _edit_lines() -> None:
    """Lets input() edit lines, with a history in memory. Some Pythons are built without it."""
    with contextlib.suppress(ImportError):
        import readline

        readline.set_auto_history(True)


def _next_line(on_terminal: bool) -> str | None:
    """What the user typed; None at the end of the input. Ctrl-C begins the line anew."""
    while True:
        try:
            if on_terminal:
                return input("> ")
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            if not on_terminal:
                raise
            print()


def _turn(client: Client, args: argparse.Namespace, messages: list[dict[str, str]], line: str) -> None:
    """One question and its answer. Both become part of the conversation, unless there was no answer."""
    question = {"role": "user", "content": line}
    reply = Reply()
    try:
        stream_answer(client, chat_body(args, [*messages, question]), reply, sys.stdout)
        end = ""
    except KeyboardInterrupt:
        end = " [stopped]"
    except PeerllmError as error:
        end = ""
        hint = " /new begins again." if isinstance(error, ContextTooLong) else ""
        print(f"peerllm: {printable(error.message)}{hint}", file=sys.stderr)
    if reply.text:
        messages += [question, {"role": "assistant", "content": reply.text}]
    print(end, flush=True)
