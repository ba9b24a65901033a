"""A model hub's files through huggingface_hub: only those that a peer's layers need, into the hub's own cache."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from peerllm.models.allowlist import ModelShape, check_config, check_files, check_folder
from peerllm.models.cache import Progress, no_progress
from peerllm.models.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, read_index, read_json
from peerllm.models.description import ModelDescription, describe_folder, description_of
from peerllm.models.hub_client import (
    Repository,
    cache_dir,
    cached_snapshot,
    check_hash,
    download,
    look_up,
    noted,
    remote_header,
)
from peerllm.models.identity import (
    check_entries,
    config_hash,
    main_dtype,
    tensor_dtypes,
    tensors_hash,
    vocabulary_hash,
)
from peerllm.models.layout import all_tensors, range_tensors
from peerllm.protocol.errors import DownloadNeeded, ModelError
from peerllm.protocol.identity import LayerRange, ModelIdentity

_SMALL_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    INDEX_FILE,
)
"""Fetched with config.json, where they exist, before anything is agreed; a few megabytes."""


def describe(
    model: str, revision: str | None, *, allow_download: bool, progress: Progress = no_progress
) -> ModelDescription:
    """As `library.describe`, for a hub id. What the cache has of the model is taken without asking the hub."""
    snapshot = cached_snapshot(model, revision)
    if snapshot is not None and _has_headers(snapshot):
        found = describe_snapshot(snapshot, model, progress)
        if not any(snapshot.glob("*.safetensors")):
            _agree_to(found.download_bytes, model, allow_download)
        return found
    repository = look_up(model, revision)
    check_files(list(repository.sizes), model)
    progress(f"describing {model}", 0.0)
    # First, so that what is refused costs one small file.
    config = download(repository, "config.json")
    shape = check_config(read_json(config), model)
    for done, file in enumerate(_SMALL_FILES):
        if file in repository.sizes:
            download(repository, file)
        progress(f"describing {model}", (done + 1) / len(_SMALL_FILES))
    if revision != repository.commit:
        # By its branch once more, so that the cache notes which commit the branch is at.
        download(replace(repository, commit=revision or "main"), "config.json")
    found = _describe_remote(repository, shape, config.parent)
    _agree_to(found.download_bytes, model, allow_download)
    return found


def describe_snapshot(snapshot: Path, model: str, progress: Progress = no_progress) -> ModelDescription:
    """What the cache has of a model at a commit. Hashes and sizes of the files that are absent are the hub's, as noted
    when they were first seen, or asked for now; without them only what is here can be compared with another peer."""
    found = describe_folder(snapshot, name=model, source=model, revision=snapshot.name, progress=progress)
    if not found.download_bytes:
        return found
    try:
        repository = noted(model, snapshot.name) or look_up(model, snapshot.name)
    except ModelError:
        return found
    weights = set(Checkpoint.open(snapshot).files().values())
    absent = [file for file in weights if not (snapshot / file).exists()]
    files = {file: digest for file, digest in repository.hashes.items() if file in weights}
    return replace(
        found,
        identity=replace(found.identity, files=files | dict(found.identity.files)),
        download_bytes=sum(repository.sizes.get(file, 0) for file in absent),
    )


def fetch(
    model: str,
    revision: str | None,
    layers: LayerRange,
    *,
    allow_download: bool = True,
    progress: Progress = no_progress,
) -> Path:
    """The snapshot's folder with the files that hold `layers`. As `library.fetch`."""
    snapshot = cached_snapshot(model, revision)
    if snapshot is None or not (_has_headers(snapshot) or (snapshot / "tokenizer.json").exists()):
        describe(model, revision, allow_download=True, progress=progress)
        snapshot = cached_snapshot(model, revision)
    if snapshot is None:
        raise ModelError(f"{model} did not arrive in the cache")
    shape = check_folder_config(snapshot, model)
    missing = [file for file in _files_of(snapshot, shape, layers) if not (snapshot / file).exists()]
    if not missing:
        return snapshot
    repository = look_up(model, snapshot.name)
    absent = [file for file in missing if file not in repository.sizes]
    if absent:
        raise ModelError(f"{model} lacks {absent[0]} on the hub")
    total = sum(repository.sizes[file] for file in missing)
    if not allow_download:
        raise DownloadNeeded(
            f"{in_words(total)} of {model} ({total} bytes of weights, for layers {layers}) are not on this machine"
        )
    _check_room(total, snapshot)
    before = 0
    for file in missing:
        size = repository.sizes[file]
        reached = _Reached(progress, f"downloading {file}", before, size, total)
        check_hash(download(repository, file, reached), repository.hashes.get(file), progress)
        before += size
    return snapshot


class _Reached:
    """Turns bytes of one file into the fraction of all files; two bars (received, written) may report in turn."""

    def __init__(self, progress: Progress, stage: str, before: int, size: int, total: int) -> None:
        self._progress = progress
        self._stage = stage
        self._before = before
        self._size = size
        self._total = max(1, total)
        self._done = 0

    def __call__(self, done: int) -> None:
        self._done = max(self._done, min(done, self._size))
        self._progress(self._stage, (self._before + self._done) / self._total)


def cached_snapshots() -> Iterator[tuple[Path, str, str]]:
    """(folder, hub id, commit) of each model commit in the hub's cache, the newest first."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(cache_dir()).repos
    except (CacheNotFound, OSError, ValueError):
        return
    models = [each for each in repositories if each.repo_type == "model"]
    for repository in sorted(models, key=lambda each: str(each.repo_id)):
        for commit in sorted(repository.revisions, key=lambda each: each.last_modified, reverse=True):
            yield Path(commit.snapshot_path), repository.repo_id, commit.commit_hash


def check_folder_config(snapshot: Path, model: str) -> ModelShape:
    """The shape of a snapshot whose weights may all be absent still."""
    if (snapshot / INDEX_FILE).exists() or (snapshot / SINGLE_FILE).exists():
        return check_folder(snapshot)
    return check_config(read_json(snapshot / "config.json"), model)


def _files_of(snapshot: Path, shape: ModelShape, layers: LayerRange) -> list[str]:
    """The weight files that hold `layers`."""
    if not (snapshot / INDEX_FILE).exists():
        return [SINGLE_FILE]
    files = read_index(snapshot / INDEX_FILE)
    wanted = range_tensors(shape, layers)
    missing = next((name for name in wanted if name not in files), None)
    if missing is not None:
        raise ModelError(f"{snapshot / INDEX_FILE} lacks tensor {missing!r}, which config.json asks for")
    return sorted({files[name] for name in wanted})


def _describe_remote(repository: Repository, shape: ModelShape, snapshot: Path) -> ModelDescription:
    """From the small files and the hub's own metadata. Of several weight files none is opened."""
    if (snapshot / INDEX_FILE).exists():
        files = read_index(snapshot / INDEX_FILE)
        known: dict[str, str] = {}
        default = repository.dtype or shape.dtype
        if default is None:
            raise ModelError(f"{repository.model} does not say of which dtype its weights are")
    else:
        entries = remote_header(repository)
        check_entries(shape, entries, repository.model)
        files = dict.fromkeys(entries, SINGLE_FILE)
        known = {name: dtype for name, (dtype, _) in entries.items() if name in all_tensors(shape)}
        default = main_dtype(known) if known else "float32"
    dtypes = tensor_dtypes(shape, frozenset(files), known, default)
    weights = set(files.values())
    identity = ModelIdentity(
        config=config_hash(shape),
        vocabulary=vocabulary_hash(snapshot),
        tensors=tensors_hash(shape, dtypes),
        layers=shape.layers,
        files={file: digest for file, digest in repository.hashes.items() if file in weights},
    )
    absent = [file for file in weights if not (snapshot / file).exists()]
    return description_of(
        shape,
        identity,
        dtypes,
        name=repository.model,
        source=repository.model,
        revision=repository.commit,
        folder=snapshot,
        download_bytes=sum(repository.sizes.get(file, 0) for file in absent),
    )


def _has_headers(snapshot: Path) -> bool:
    """Whether the snapshot can be described without the hub: tokenizer, and index or weights."""
    has_names = (snapshot / INDEX_FILE).exists() or (snapshot / SINGLE_FILE).exists()
    return has_names and (snapshot / "tokenizer.json").exists()


def _agree_to(size: int, model: str, allow_download: bool) -> None:
    """Before the layers are shared out, the whole model is the most that this machine may have to download."""
    if size and not allow_download:
        raise DownloadNeeded(
            f"{model} is not on this machine: what its layers need of {in_words(size)} ({size} bytes of weights) is to "
            "be downloaded"
        )


def in_words(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def _check_room(size: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise ModelError(
            f"the disk is full: {in_words(size)} are to be downloaded to {folder}, {in_words(free)} are free"
        )
