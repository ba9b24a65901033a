from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from peerllm import models
from peerllm.models.allowlist import check_folder
from peerllm.models.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from peerllm.models.layout import range_tensors
from peerllm.protocol.errors import BadRequest, DownloadNeeded, ModelError, ModelNotFound, ModelUnsupported
from peerllm.protocol.identity import LayerRange
from tests import tiny_models
from tests.models.hub_server import COMMIT, Hub, Repository, serving

MODEL = "someone/tiny-model"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers in five files and more."""
    folder = tiny_models.make_model(tmp_path_factory.mktemp("hub") / "tiny", "qwen2", layers=6, shards=5, is_tied=True)
    assert len(list(folder.glob("*.safetensors"))) >= 5
    return folder


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_model(tmp_path_factory.mktemp("hub") / "single", "llama")


@pytest.fixture
def hub(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setenv("PEERLLM_CACHE", str(tmp_path / "cache"))
        hub.repositories[MODEL] = Repository(original)
        yield hub


def wanted_files(folder: Path, layers: LayerRange) -> set[str]:
    files = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    return {files[name] for name in range_tensors(check_folder(folder), layers)}


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_describing_asks_before_it_downloads_and_touches_no_weights(hub: Hub, original: Path) -> None:
    with pytest.raises(DownloadNeeded, match=str(weight_bytes(original))):
        models.describe(MODEL)
    assert not hub.asked_for(".safetensors") and hub.asked_for("tokenizer.json")


def test_a_description_from_the_hub_is_that_of_the_folder(hub: Hub, original: Path) -> None:
    ours = models.describe(str(original))
    hubs = models.describe(MODEL, allow_download=True)
    assert not hub.asked_for(".safetensors")
    assert hubs.identity == ours.identity
    assert (hubs.name, hubs.source, hubs.revision) == (MODEL, MODEL, COMMIT)
    assert (ours.name, ours.source, ours.revision, ours.download_bytes) == ("tiny", None, None, 0)
    assert hubs.download_bytes == weight_bytes(original)
    alike = ("layers", "hidden_size", "kv_width", "vocabulary", "max_context", "dtype", "layer_bytes", "head_bytes")
    assert all(getattr(hubs, name) == getattr(ours, name) for name in alike)


@pytest.mark.parametrize("layers", [LayerRange(0, 3), LayerRange(3, 6), LayerRange(2, 4)])
def test_files_of_other_layers_are_never_asked_for(hub: Hub, original: Path, layers: LayerRange) -> None:
    wanted = wanted_files(original, layers)
    assert wanted < {path.name for path in original.glob("*.safetensors")}
    description = models.describe(MODEL, allow_download=True)
    seen: list[tuple[str, float]] = []
    folder = models.fetch(description, layers, progress=lambda *report: seen.append(report))
    assert hub.asked_for(".safetensors") == wanted
    assert {path.name for path in folder.glob("*.safetensors")} == wanted
    fractions = [fraction for stage, fraction in seen if stage.startswith("downloading")]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0
    ours, theirs = Checkpoint.open(folder), Checkpoint.open(original)
    for name, shape in range_tensors(check_folder(original), layers).items():
        pair = [torch.empty(shape), torch.ones(shape)]
        ours.read_into(name, pair[0])
        theirs.read_into(name, pair[1])
        assert torch.equal(*pair)
    assert models.Tokenizer.load(folder).encode_prompt("hello")


def test_what_is_here_is_described_and_fetched_again_without_the_hub(hub: Hub, original: Path) -> None:
    layers = LayerRange(0, 2)
    first = models.describe(MODEL, allow_download=True)
    models.fetch(MODEL, layers, revision=first.revision)
    hub.requests.clear()
    again = models.describe(MODEL)
    assert models.fetch(MODEL, layers, revision=again.revision) == models.fetch(again, layers)
    assert hub.requests == []
    assert again.identity.differences(first.identity) == []
    assert again.identity == first.identity
    here = sum((original / name).stat().st_size for name in wanted_files(original, layers))
    assert again.download_bytes == weight_bytes(original) - here
    (listed,) = models.cached_models()
    assert listed.name == MODEL and listed.details["layers"] == "2 of 6"


def test_more_layers_are_fetched_later_and_only_with_leave(hub: Hub, original: Path) -> None:
    models.fetch(MODEL, LayerRange(0, 2))
    before = wanted_files(original, LayerRange(0, 2))
    missing = wanted_files(original, LayerRange(0, 6)) - before
    hub.requests.clear()
    size = sum((original / name).stat().st_size for name in missing)
    with pytest.raises(DownloadNeeded, match=f"{size} bytes"):
        models.fetch(MODEL, LayerRange(0, 6), allow_download=False)
    models.fetch(MODEL, LayerRange(0, 6))
    assert hub.asked_for(".safetensors") == missing
    assert models.describe(MODEL).download_bytes == 0


def test_a_model_in_one_file_is_described_from_its_header_alone(hub: Hub, single: Path) -> None:
    hub.repositories[MODEL].folder = single
    found = models.describe(MODEL, allow_download=True)
    assert found.identity == models.describe(str(single)).identity
    ranged = [asked for method, path, asked in hub.requests if method == "GET" and path.endswith(SINGLE_FILE)]
    assert ranged and all(asked and asked.startswith("bytes=") for asked in ranged)
    folder = models.fetch(found, LayerRange(0, 2))
    assert (folder / SINGLE_FILE).stat().st_size == (single / SINGLE_FILE).stat().st_size
    assert models.describe(MODEL).identity == found.identity


def test_without_the_hubs_word_on_dtypes_the_config_says_it(hub: Hub, original: Path) -> None:
    hub.repositories[MODEL].has_parameters = False
    assert models.describe(MODEL, allow_download=True).identity == models.describe(str(original)).identity


def test_what_is_not_supported_costs_one_small_file(hub: Hub, original: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(original, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"use_sliding_window": True, "sliding_window": 64}))
    hub.repositories[MODEL].folder = folder
    with pytest.raises(ModelUnsupported, match="sliding-window"):
        models.describe(MODEL, allow_download=True)
    assert hub.asked_for("") == {"config.json"}


def test_pickle_only_is_refused_before_any_file_is_asked_for(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "pickle").mkdir()
    for name in ("config.json", "pytorch_model.bin", "tokenizer.json"):
        (tmp_path / "pickle" / name).write_bytes(b"{}")
    hub.repositories[MODEL].folder = tmp_path / "pickle"
    with pytest.raises(ModelUnsupported, match="pickle"):
        models.describe(MODEL, allow_download=True)
    assert hub.asked_for("") == set()


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        ((401, "RepoNotFound"), "is not on the hub, or is private"),
        ((404, "RepoNotFound"), "is not on the hub, or is private"),
        ((403, "GatedRepo"), "is gated: accept its terms"),
        ((401, "Unauthorized"), "log in"),
        ((403, "Forbidden"), "refuses access"),
    ],
)
def test_what_the_hub_refuses_is_said_in_words(hub: Hub, refusal: tuple[int, str], reason: str) -> None:
    hub.repositories[MODEL].refuses = refusal
    with pytest.raises(ModelNotFound, match=reason):
        models.describe(MODEL, allow_download=True)


@pytest.mark.parametrize("refusal", [(403, "GatedRepo"), (401, "GatedRepo")])
def test_a_gated_model_whose_metadata_is_public_is_said_to_be_gated(hub: Hub, refusal: tuple[int, str]) -> None:
    hub.repositories[MODEL].refuses_files = refusal
    with pytest.raises(ModelNotFound, match="is gated"):
        models.describe(MODEL)


def test_a_hub_in_trouble_is_an_error_to_try_again(hub: Hub) -> None:
    hub.repositories[MODEL].refuses = (500, "Oops")
    with pytest.raises(ModelError, match="try again later"):
        models.describe(MODEL, allow_download=True)


def test_a_revision_that_is_not_there_is_an_error(hub: Hub) -> None:
    with pytest.raises(ModelNotFound, match="no such revision"):
        models.describe(MODEL, revision="v9", allow_download=True)
    assert models.describe(MODEL, revision=COMMIT, allow_download=True).revision == COMMIT


def test_a_hub_that_cannot_be_reached_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelNotFound, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        models.describe(MODEL)


def test_offline_only_the_cache_is_used(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    models.fetch(MODEL, LayerRange(0, 6))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert models.describe(MODEL).download_bytes == 0
    with pytest.raises(ModelNotFound, match="cannot be reached"):
        models.describe("someone/else")
    assert hub.requests == []


def test_a_full_disk_is_said_before_the_download(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    description = models.describe(MODEL, allow_download=True)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 0))
    with pytest.raises(ModelError, match="the disk is full"):
        models.fetch(description, LayerRange(0, 2))
    assert not hub.asked_for(".safetensors")


def test_a_download_that_breaks_off_leaves_no_file_that_could_be_taken_for_whole(
    hub: Hub, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    description = models.describe(MODEL, allow_download=True)
    hub.repositories[MODEL].cuts_at = 100
    with pytest.raises(ModelError, match="broke off"):
        models.fetch(description, LayerRange(0, 1))
    assert not list((Path(description.folder or "")).glob("*.safetensors"))
    hub.repositories[MODEL].cuts_at = None
    folder = models.fetch(description, LayerRange(0, 1))
    for name in wanted_files(original, LayerRange(0, 1)):
        assert (folder / name).read_bytes() == (original / name).read_bytes()


def test_a_cache_that_another_program_filled_serves_without_the_hub(hub: Hub, original: Path, tmp_path: Path) -> None:
    layers = LayerRange(0, 2)
    models.fetch(MODEL, layers)
    shutil.rmtree(tmp_path / "cache")
    asked = models.describe(MODEL)
    assert asked.identity == models.describe(str(original)).identity
    shutil.rmtree(tmp_path / "cache")
    hub.repositories[MODEL].refuses = (500, "Away")
    alone = models.describe(MODEL)
    assert alone.identity.files.keys() == wanted_files(original, layers)
    # Headers of the files that are not here cannot be counted.
    assert 0.9 * asked.download_bytes < alone.download_bytes <= asked.download_bytes


def test_a_file_that_arrives_damaged_is_thrown_away(hub: Hub, original: Path) -> None:
    description = models.describe(MODEL, allow_download=True)
    repository = hub.repositories[MODEL]
    repository.flips_a_byte = True
    with pytest.raises(ModelError, match="arrived damaged"):
        models.fetch(description, LayerRange(0, 1))
    assert not list(Path(description.folder or "").glob("*.safetensors"))
    repository.flips_a_byte = False
    models.fetch(description, LayerRange(0, 1))


@pytest.mark.parametrize(
    "revision", ["../../x", "a/../b", "/etc", "~x", "a b", "", "-x", "a//b", "x" * 200, "main\n", "a\\b"]
)
def test_a_revision_is_no_path(hub: Hub, revision: str) -> None:
    with pytest.raises(BadRequest, match="revision"):
        models.describe(MODEL, revision=revision)
    assert hub.requests == []
