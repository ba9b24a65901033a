"""What is shown on a terminal: text that is not ours, which must not steer it, and sizes for people."""

from __future__ import annotations

_KEPT = "\n\t"
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in _KEPT}
_CONTROLS[ord("\r")] = ""


def printable(text: str) -> str:
    """`text` with control characters (C0, C1, escape sequences' first bytes) made visible; line ends and tabs stay.
    Models and peers say what they like, and terminals obey control characters."""
    return text.translate(_CONTROLS)


def one_line(text: str) -> str:
    """`text` printable, and on one line: what a peer says makes no lines of its own."""
    return printable(text).replace("\n", " ")


def size(count: int) -> str:
    """Bytes in words: 512 B, 1.2 kB, 538.1 MB."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"
