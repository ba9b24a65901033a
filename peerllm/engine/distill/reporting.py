"""A run's figures in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peerllm.engine.distill.gain import CpuCost, Gain, Times


def count(tokens: float) -> str:
    """1234567 as 1.23 M."""
    if tokens >= 1e6:
        return f"{tokens / 1e6:.2f} M"
    return f"{tokens / 1e3:.1f} k" if tokens >= 1e4 else f"{tokens:.0f}"


def status_line(report: Mapping[str, Any]) -> str:
    """Where the run is, how fast, and the loss."""
    parts = [
        f"{report['progress']:.0%} done in {report['seconds'] / 60:.1f} min",
        f"{count(report['made'])} tokens of answers made, generating {report['tokens_per_second']:,.0f}/s",
    ]
    if report["training_tokens_per_second"]:
        parts.append(f"trained on {count(report['trained'])} at {report['training_tokens_per_second']:,.0f}/s")
    if report.get("divergence") is not None:
        parts.append(f"loss {report['loss']:.3f} ({report['divergence']:.3f} above the target's own entropy)")
    return " · ".join(parts)


def evaluation_lines(evaluations: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each set of answers."""
    lines = []
    for name, found in evaluations.items():
        per_round, drafted = found["per_round"], found["drafted"]
        lines.append(
            f"  {name:<18} {found['answers']:>4} answers · agreement {found['agreement']:.3f} · tokens per round "
            f"K=4 {per_round['4']:.2f}, K=8 {per_round['8']:.2f}, own stop {per_round['stop']:.2f} "
            f"(of {drafted['stop']:.1f} drafted)"
        )
    return lines


def times_line(times: Times) -> str:
    listed = ", ".join(f"{rows}: {ms:.2f}" for rows, ms in times.blocks.items())
    return f"Measured here: a drafted token {times.draft_token:.2f} ms; the target's block, ms by its rows: {listed}"


def gain_lines(name: str, gains: list[Gain]) -> list[str]:
    lines = [f"Expected on {name}, both peers like this machine:"]
    for gain in gains:
        stop = f", stopping below {gain.stop:g}" if gain.stop else ""
        how = f"with K = {gain.length}{stop}" if gain.length else "without drafting"
        lines.append(
            f"  {gain.round_trip_ms:>4.0f} ms round trip: {gain.tokens_per_second:.1f} tokens/s, "
            f"{gain.times_plain:.2f} times plain decoding ({gain.plain_tokens_per_second:.1f}), {how}"
        )
    return lines


def cpu_line(cost: CpuCost | None) -> str:
    if cost is None:
        return "Cost on a CPU: not measured, the target does not fit this machine's memory in float32."
    return cpu_words(cost.draft_ms, cost.target_ms, cost.share)


def cpu_words(draft_ms: float, target_ms: float, share: float) -> str:
    return (
        f"Cost on a CPU, one thread, float32: {draft_ms:.1f} ms a drafted token, {target_ms:.1f} ms one of "
        f"the target's: {share:.0%} of it."
    )


def figures_table(figures: Mapping[str, Any]) -> list[str]:
    """A report in Markdown, for the model card: what `evaluation_lines`, `times_line` and `gain_lines` say."""
    lines = [
        "| prompts | answers | agreement | tokens a round, K = 4 | K = 8 | own stop (drafted) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in figures.get("evaluations", {}).items():
        per_round, drafted = found["per_round"], found["drafted"]
        lines.append(
            f"| {name} | {found['answers']} | {found['agreement']:.3f} | {per_round['4']:.2f} | {per_round['8']:.2f} "
            f"| {per_round['stop']:.2f} ({drafted['stop']:.1f}) |"
        )
    times = figures.get("times")
    if times is not None:
        listed = ", ".join(f"{rows}: {ms:.2f}" for rows, ms in times["block_ms"].items())
        lines += [
            "",
            f"On the device of the run a drafted token takes {times['draft_token_ms']:.2f} ms, the target's block, ms "
            f"by its rows: {listed}. With both peers like that device:",
            "",
            "| prompts | round trip | tokens/s | plain | times | K |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for name, gains in figures.get("gains", {}).items():
            lines += [
                f"| {name} | {gain['round_trip_ms']:.0f} ms | {gain['tokens_per_second']:.1f} "
                f"| {gain['plain_tokens_per_second']:.1f} | {gain['times_plain']:.2f} "
                f"| {gain['length']}{', stopping below ' + format(gain['stop'], 'g') if gain['stop'] else ''} |"
                for gain in gains
            ]
    cost = figures.get("cpu")
    if cost is not None:
        lines += ["", cpu_words(cost["draft_ms"], cost["target_ms"], cost["share"])]
    return lines
