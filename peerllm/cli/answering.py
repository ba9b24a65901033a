"""What `ask` and `chat` share: sampling options, and an answer as it streams in."""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import dataclass, field
from typing import Any, TextIO

from peerllm.cli.client import Client
from peerllm.cli.progress import Progress, Waiting
from peerllm.cli.terminal import printable

CHAT = "/v1/chat/completions"


@dataclass
class Reply:
    """An answer, filled in as it comes: what is there when it is cut off counts."""

    text: str = ""
    finish_reason: str | None = None
    model: str | None = None
    seed: int | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    ledger: dict[str, Any] = field(default_factory=dict)

    def take(self, event: dict[str, Any]) -> str:
        """Takes in one chunk of a chat completion; gives the text that it adds."""
        self.model = event.get("model") or self.model
        self.seed = event.get("seed", self.seed)
        self.usage = event.get("usage") or self.usage
        self.ledger = event.get("ledger") or self.ledger
        added = ""
        for choice in event.get("choices", ()):
            added += choice.get("delta", {}).get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.text += added
        return added


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="at most so many tokens (default: the context's)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample among the likeliest tokens of this mass")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given four times")
    parser.add_argument("--draft-length", type=int, metavar="K", help="candidates a block; 0 decodes without drafting")


def chat_body(args: argparse.Namespace, messages: list[dict[str, str]]) -> dict[str, Any]:
    """The request for a streamed answer to `messages`, with what the sampling arguments say."""
    system = [{"role": "system", "content": args.system}] if args.system is not None else []
    options = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "seed": args.seed,
        "stop": args.stop,
        "draft_length": args.draft_length,
    }
    given = {name: value for name, value in options.items() if value is not None}
    return {"messages": system + messages, "stream_options": {"include_usage": True}, **given}


def stream_answer(client: Client, body: dict[str, Any], reply: Reply, output: TextIO | None) -> None:
    """Fills `reply`, writing text to `output` as it comes. When this is left early, the connection is closed and the
    daemon stops.

    Raises:
        PeerllmError: no daemon, or what it answered.
    """
    on_terminal = output is not None and output.isatty()
    with (
        Waiting("Waiting for the answer …", Progress(sys.stderr)) as waiting,
        contextlib.closing(client.stream(CHAT, body)) as events,
    ):
        for event in events:
            added = reply.take(event)
            if added and output is not None:
                waiting.stop()
                output.write(printable(added) if on_terminal else added)
                output.flush()
