"""`peerllm ask "…"`: one question, the answer as it comes."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from peerllm.cli.answering import Reply, add_sampling_arguments, chat_body, stream_answer
from peerllm.cli.client import Client, socket_path
from peerllm.protocol import limits
from peerllm.protocol.errors import BadRequest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the question; - reads it from standard input")
    add_sampling_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one object with text, usage and ledger at the end")


def run(args: argparse.Namespace) -> int:
    client = Client(socket_path(args.socket))
    prompt = _standard_input() if args.prompt == "-" else args.prompt
    reply = Reply()
    try:
        stream_answer(
            client, chat_body(args, [{"role": "user", "content": prompt}]), reply, None if args.json else sys.stdout
        )
    finally:
        # Also after Ctrl-C or an error: what comes next begins on a line of its own.
        if not args.json and reply.text and not reply.text.endswith("\n"):
            print(flush=True)
    if args.json:
        print(json.dumps(asdict(reply)))
    elif reply.finish_reason == "length" and sys.stderr.isatty():
        print("(cut off: --max-tokens, or the context is full)", file=sys.stderr)
    return 0


def _standard_input() -> str:
    data = sys.stdin.buffer.read(limits.MAX_API_BODY_BYTES + 1)
    if len(data) > limits.MAX_API_BODY_BYTES:
        raise BadRequest(
            f"Standard input has more than {limits.MAX_API_BODY_BYTES} bytes, the most that a request holds."
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"Standard input is not UTF-8 text (byte {error.start}).") from None
