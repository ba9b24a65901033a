"""A run's figures as SVG, written by hand: three charts over the tokens that the target made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _MARGIN, _GAP = 720, 220, 56, 44
_LEGEND = 125
"""For each of up to four names, beside the chart's own."""
_COLOURS = ("#1f6feb", "#d29922", "#2da44e", "#cf222e")


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    points: tuple[tuple[float, float], ...]
    """(millions of tokens, value)."""


def run_chart(title: str, reports: Sequence[dict[str, Any]]) -> str:
    """The whole SVG of a run's reports, as `run.Distillation` writes them."""
    charts: list[tuple[str, list[Line]]] = [
        ("divergence from the target, nats a token", [_line("training", reports, "divergence")]),
        ("agreement", _by_set(reports, "agreement", None)),
        ("tokens per round, K = 8", _by_set(reports, "per_round", "8")),
    ]
    height = len(charts) * (_HEIGHT + _GAP) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_WIDTH / 2:g}" y="22" text-anchor="middle" font-size="15">{escape(title)}</text>',
    ]
    # One scale for all three, so that what stands below each other happened together.
    across = _span([report["made"] / 1e6 for report in reports]) if reports else (0.0, 1.0)
    for index, (name, lines) in enumerate(charts):
        parts += _chart(name, [line for line in lines if line.points], 40 + index * (_HEIGHT + _GAP), across)
    return "\n".join([*parts, "</svg>", ""])


def _line(name: str, reports: Sequence[dict[str, Any]], key: str) -> Line:
    return Line(name, tuple((r["made"] / 1e6, r[key]) for r in reports if r.get(key) is not None))


def _by_set(reports: Sequence[dict[str, Any]], key: str, inner: str | None) -> list[Line]:
    names = dict.fromkeys(name for report in reports for name in report.get("evaluations", {}))
    lines = []
    for name in names:
        points = []
        for report in reports:
            found = report.get("evaluations", {}).get(name)
            if found:
                value = found[key] if inner is None else found[key][inner]
                points.append((report["made"] / 1e6, value))
        lines.append(Line(name, tuple(points)))
    return lines


def _chart(name: str, lines: Sequence[Line], top: int, across: tuple[float, float]) -> list[str]:
    left, right, bottom = _MARGIN, _WIDTH - 16, top + _HEIGHT - 28
    points = [point for line in lines for point in line.points]
    parts = [f'<text x="{left}" y="{top + 10}">{escape(name)}</text>']
    if not points:
        return [*parts, f'<text x="{left}" y="{top + 40}" fill="#666">nothing measured</text>']
    low_x, high_x = across
    low_y, high_y = _span([y for _, y in points])

    def place(x: float, y: float) -> str:
        column = left + (x - low_x) / (high_x - low_x) * (right - left)
        down = bottom - (y - low_y) / (high_y - low_y) * (bottom - top - 24)
        return f"{column:.1f},{down:.1f}"

    for step in range(5):
        share = step / 4
        y = bottom - share * (bottom - top - 24)
        value = low_y + share * (high_y - low_y)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#444">{value:.3g}</text>')
        x = left + share * (right - left)
        label = f"{low_x + share * (high_x - low_x):.3g}"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" fill="#444">{label}</text>')
    parts.append(f'<text x="{right}" y="{bottom + 28}" text-anchor="end" fill="#444">million tokens made</text>')
    for index, line in enumerate(lines):
        colour = _COLOURS[index % len(_COLOURS)]
        drawn = " ".join(place(x, y) for x, y in line.points)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="2"/>')
        first = place(*line.points[-1]).split(",")
        parts.append(f'<circle cx="{first[0]}" cy="{first[1]}" r="3" fill="{colour}"/>')
        x = right - _LEGEND * (len(lines) - index)
        parts.append(f'<text x="{x}" y="{top + 10}" fill="{colour}">{escape(line.name)}</text>')
    return parts


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low < 1e-9:
        return 0.0, 2 * high if high > 0 else 1.0
    return low, high
