"""Text for a terminal that is not ours: models and peers say what they like, terminals obey control characters."""

from __future__ import annotations

_KEPT = "\n\t"
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in _KEPT}
_CONTROLS[ord("\r")] = ""


def printable(text: str) -> str:
    """`text` with control characters (C0, C1, escape sequences' first bytes) made visible; line ends and tabs stay."""
    return text.translate(_CONTROLS)
