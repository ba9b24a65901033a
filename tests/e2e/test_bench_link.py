"""`peerllm bench link` between two processes: what it prints, and that both end."""

from __future__ import annotations

import json

from peerllm.cli.demo_processes import stage
from tests.e2e.rooms import START_SECONDS, start_signaling


def test_both_ends_finish_and_the_joiner_prints_the_figures() -> None:
    with stage() as here:
        signaling = start_signaling(here)
        common = ("--signaling", signaling, "--loopback", "--rtt", "20", "--samples", "3")
        opener = here.start("opener", "peerllm", "bench", "link", *common)
        code = opener.wait_for(r"peerllm bench link (\S+)", START_SECONDS)[1]
        joiner = here.start("joiner", "peerllm", "bench", "link", code, "--json", *common)
        figures = json.loads(joiner.wait_for(r"(?s)\{.*^\}", START_SECONDS)[0])
        assert (opener.wait_end(10), joiner.wait_end(10)) == (0, 0)
    assert figures["path"] == "loopback"
    assert figures["rtt_ms"] > 19
    sizes = {block["bytes"] for block in figures["blocks"]}
    assert {16, 16_000, 64_000, 200_000, 262_144} <= sizes
    for block in figures["blocks"]:
        assert 19 < block["p50_ms"] <= block["p95_ms"] <= block["p99_ms"]
        assert {block["direction"] for block in figures["blocks"]} == {"in", "out"}
