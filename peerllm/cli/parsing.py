"""Command lines as people type them: options before, between and after the words."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

_MAX_RTT_MS = 10_000.0
"""Far beyond any path; an exchange is not waited for much longer."""


class CommandParser(argparse.ArgumentParser):
    """A subcommand's parser, for which `--json CODE` and `CODE --json` are the same.

    argparse alone gives an optional positional its default as soon as it meets an option, and then has no place for the
    word that comes after it. Its own answer to that, intermixed parsing, is for parsers without subcommands: so each
    subcommand is parsed that way, and the command line as a whole is not.
    """

    _is_intermixed = False

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        # After "--" everything is a word, which the second pass of intermixed parsing does not know any more; and a
        # choice between a word and an option has no such parsing.
        if self._is_intermixed or "--" in (args or ()) or self._has_choice_with_positional():
            return super().parse_known_args(args, namespace)
        self._is_intermixed = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_intermixed = False

    def _has_choice_with_positional(self) -> bool:
        return any(not each.option_strings for group in self._mutually_exclusive_groups for each in actions(group))


def actions(group: Any) -> list[argparse.Action]:
    """Of a group of options."""
    return list(group._group_actions)


def milliseconds(words: str) -> float:
    """A round trip to add to the link, as an option's type."""
    try:
        value = float(words)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= _MAX_RTT_MS:
        raise argparse.ArgumentTypeError(f"a round trip is a number of milliseconds from 0 to {_MAX_RTT_MS:.0f}")
    return value
