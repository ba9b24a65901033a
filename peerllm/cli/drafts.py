"""What a user names with `--draft`, as the daemon and its worker take it."""

from __future__ import annotations

from pathlib import Path

from peerllm.protocol.errors import BadRequest

HELP = "none, ngram, a draft's folder (model:PATH is the same), or auto: the model's in this package, else ngram"


def draft_named(words: str) -> str:
    """`none`, `ngram`, `auto` or `model:PATH` of what a user typed.

    Raises:
        BadRequest: none of the words, and no folder.
    """
    if words in ("none", "ngram", "auto") or (words.startswith("model:") and words != "model:"):
        return words
    folder = Path(words).expanduser()
    if words and folder.is_dir():
        return f"model:{folder.absolute()}"
    raise BadRequest(f"--draft is {HELP}; got {words!r}")


def default_draft(model: str) -> str:
    """The draft in this package for the model of that name, and n-gram look-up where there is none."""
    from peerllm.models.drafts import shipped

    folder = shipped(model)
    return "ngram" if folder is None else f"model:{folder}"


def short_name(draft: str) -> str:
    """For a table: a draft's folder without the path to it."""
    kind, _, path = draft.partition(":")
    return f"{kind}:{Path(path).name}" if path else draft
