"""A room whose model comes from a hub: each peer has a cache and a hub of its own, so that the hub's log is its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from peerllm.cli.demo_processes import DemoFailed, stage
from peerllm.models.allowlist import check_folder
from peerllm.models.checkpoint import INDEX_FILE
from peerllm.models.layout import range_tensors
from peerllm.protocol.identity import LayerRange
from tests.e2e.rooms import room_code, start_daemon, start_signaling, wait_ready
from tests.models.hub_server import Hub, Repository, serving
from tests.tiny_models import PROMPTS, generate_greedily, load_whole, make_model

MODEL = "someone/tiny-model"
LAYERS = 6
OPENER, JOINER = LayerRange(0, 3), LayerRange(3, LAYERS)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "qwen2", layers=LAYERS, shards=5, is_tied=True)


@pytest.fixture
def hubs(original: Path) -> Iterator[tuple[Hub, Hub]]:
    """The opener's and the joiner's."""
    with serving() as openers, serving() as joiners:
        for hub in (openers, joiners):
            hub.repositories[MODEL] = Repository(original)
        yield openers, joiners


def home_of(hub: Hub, folder: Path) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder / "hub"),
        "HF_HUB_CACHE": str(folder / "hub"),
        "PEERLLM_CACHE": str(folder / "cache"),
    }


def files_of(folder: Path, layers: LayerRange) -> set[str]:
    """The weight files that hold `layers`."""
    weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    return {weight_map[name] for name in range_tensors(check_folder(folder), layers)}


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_each_peer_fetches_the_files_of_its_own_layers_and_both_answer_with_the_models_own_text(
    hubs: tuple[Hub, Hub], original: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    openers, joiners = hubs
    up = ("up", "--model", MODEL, "--layers", str(OPENER), "--yes")
    with stage() as here:
        signaling = start_signaling(here)
        first = start_daemon(here, "first", signaling, *up, env=home_of(openers, tmp_path / "first"))
        join = ("join", room_code(first), "--yes")
        second = start_daemon(here, "second", signaling, *join, env=home_of(joiners, tmp_path / "second"))
        for daemon in (first, second):
            wait_ready(daemon)
        tokenizer, whole = AutoTokenizer.from_pretrained(str(original)), load_whole(original)
        for prompt in PROMPTS[:2]:
            expected = generate_greedily(whole, tokenizer(prompt)["input_ids"], 16)
            if tokenizer.eos_token_id in expected:
                expected = expected[: expected.index(tokenizer.eos_token_id)]
            for daemon in (first, second):
                text = daemon.complete(prompt, max_tokens=16)["text"]
                assert text == tokenizer.decode(expected, skip_special_tokens=True)
    for hub, layers in ((openers, OPENER), (joiners, JOINER)):
        wanted = files_of(original, layers)
        assert wanted < files_of(original, LayerRange(0, LAYERS))
        assert hub.asked_for(".safetensors") == wanted


def test_a_joiner_that_nobody_can_ask_downloads_no_weights_and_both_sides_say_why(
    hubs: tuple[Hub, Hub], original: Path, tmp_path: Path
) -> None:
    openers, joiners = hubs
    with stage() as here:
        signaling = start_signaling(here)
        up = ("up", "--model", MODEL, "--yes")
        first = start_daemon(here, "first", signaling, *up, env=home_of(openers, tmp_path / "first"))
        join = ("join", room_code(first))
        second = start_daemon(here, "second", signaling, *join, env=home_of(joiners, tmp_path / "second"))
        why = rf"{MODEL} is not on this machine: .*\({weight_bytes(original)} bytes .*--yes"
        with pytest.raises(DemoFailed, match=rf"peerllm: {why}"):
            second.child.wait_for("Ready:", 60)
        with pytest.raises(DemoFailed, match=rf"the other peer says: {why}"):
            first.child.wait_for("Ready:", 60)
    assert not joiners.asked_for(".safetensors")
    assert not openers.asked_for(".safetensors")
