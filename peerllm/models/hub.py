"""A model hub's files through huggingface_hub: only those that a peer's layers need, into the hub's own cache."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from peerllm.models.allowlist import ModelShape, check_config, check_files, check_folder
from peerllm.models.cache import Progress, cache_folder, no_progress, sha256_of, write_note
from peerllm.models.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, read_index, read_json
from peerllm.models.description import ModelDescription, describe_folder, description_of
from peerllm.models.identity import (
    check_entries,
    config_hash,
    main_dtype,
    tensor_dtypes,
    tensors_hash,
    vocabulary_hash,
)
from peerllm.models.layout import all_tensors, range_tensors
from peerllm.protocol.errors import DownloadNeeded, ModelError, ModelNotFound, ModelUnsupported
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
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_METADATA_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class _Repository:
    """What the hub says of one commit of a model."""

    model: str
    commit: str
    sizes: dict[str, int]
    """File name to bytes."""
    hashes: dict[str, str]
    """Weight file name to sha256."""
    dtype: str | None
    """The one dtype of all weights, where the hub knows it and there is only one."""


def describe(
    model: str, revision: str | None, *, allow_download: bool, progress: Progress = no_progress
) -> ModelDescription:
    """As `library.describe`, for a hub id. What the cache has of the model is taken without asking the hub."""
    snapshot = _cached_snapshot(model, revision)
    if snapshot is not None and _has_headers(snapshot):
        found = describe_snapshot(snapshot, model, progress)
        if not any(snapshot.glob("*.safetensors")):
            _agree_to(found.download_bytes, model, allow_download)
        return found
    repository = _look_up(model, revision)
    check_files(list(repository.sizes), model)
    progress(f"describing {model}", 0.0)
    # First, so that what is refused costs one small file.
    config = _download(repository, "config.json")
    shape = check_config(read_json(config), model)
    for done, file in enumerate(_SMALL_FILES):
        if file in repository.sizes:
            _download(repository, file)
        progress(f"describing {model}", (done + 1) / len(_SMALL_FILES))
    if revision != repository.commit:
        # By its branch once more, so that the cache notes which commit the branch is at.
        _download(replace(repository, commit=revision or "main"), "config.json")
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
        repository = _noted(model, snapshot.name) or _look_up(model, snapshot.name)
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
    snapshot = _cached_snapshot(model, revision)
    if snapshot is None or not (_has_headers(snapshot) or (snapshot / "tokenizer.json").exists()):
        describe(model, revision, allow_download=True, progress=progress)
        snapshot = _cached_snapshot(model, revision)
    if snapshot is None:
        raise ModelError(f"{model} did not arrive in the cache")
    shape = check_folder_config(snapshot, model)
    missing = [file for file in _files_of(snapshot, shape, layers) if not (snapshot / file).exists()]
    if not missing:
        return snapshot
    repository = _look_up(model, snapshot.name)
    absent = [file for file in missing if file not in repository.sizes]
    if absent:
        raise ModelError(f"{model} lacks {absent[0]} on the hub")
    total = sum(repository.sizes[file] for file in missing)
    _agree_to(total, model, allow_download)
    _check_room(total, snapshot)
    before = 0
    for file in missing:
        size = repository.sizes[file]
        reached = _Reached(progress, f"downloading {file}", before, size, total)
        _check_hash(_download(repository, file, reached), repository.hashes.get(file), progress)
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
        repositories = scan_cache_dir(_cache_dir()).repos
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


def _describe_remote(repository: _Repository, shape: ModelShape, snapshot: Path) -> ModelDescription:
    """From the small files and the hub's own metadata. Of several weight files none is opened."""
    if (snapshot / INDEX_FILE).exists():
        files = read_index(snapshot / INDEX_FILE)
        known: dict[str, str] = {}
        default = repository.dtype or shape.dtype
        if default is None:
            raise ModelError(f"{repository.model} does not say of which dtype its weights are")
    else:
        entries = _remote_header(repository)
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


def _remote_header(repository: _Repository) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of each tensor of a model in one file, by a ranged request; every peer needs that file."""
    with _errors_of_hub(repository.model):
        header = _api().parse_safetensors_file_metadata(
            repository.model, SINGLE_FILE, revision=repository.commit, timeout=_METADATA_SECONDS
        )
    return {
        name: (_DTYPES.get(str(tensor.dtype), str(tensor.dtype)), tuple(tensor.shape))
        for name, tensor in header.tensors.items()
    }


# --- The hub ----------------------------------------------------------------------------------------------------------


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _cache_dir() -> Path:
    """The hub's cache: read at each call, so that the environment of now counts and not that of the import."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if named:
        return Path(named).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(endpoint=_endpoint())


def _cached_snapshot(model: str, revision: str | None) -> Path | None:
    """The folder of this commit (or of the branch, as it was last seen) in the cache."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", cache_dir=_cache_dir(), revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def _has_headers(snapshot: Path) -> bool:
    """Whether the snapshot can be described without the hub: tokenizer, and index or weights."""
    has_names = (snapshot / INDEX_FILE).exists() or (snapshot / SINGLE_FILE).exists()
    return has_names and (snapshot / "tokenizer.json").exists()


def _look_up(model: str, revision: str | None) -> _Repository:
    with _errors_of_hub(model):
        info = _api().model_info(model, revision=revision, files_metadata=True, timeout=_METADATA_SECONDS)
    siblings = info.siblings or []
    parameters = getattr(info.safetensors, "parameters", None) or {}
    dtypes = {_DTYPES.get(name) for name, count in parameters.items() if count}
    if not info.sha:
        raise ModelError(f"the hub gave no commit for {model}")
    repository = _Repository(
        model=model,
        commit=info.sha,
        sizes={each.rfilename: each.size or 0 for each in siblings},
        hashes={each.rfilename: each.lfs.sha256 for each in siblings if each.lfs is not None},
        dtype=dtypes.pop() if len(dtypes) == 1 else None,
    )
    write_note(_note(model, info.sha), asdict(repository))
    return repository


def _note(model: str, commit: str) -> Path:
    return cache_folder() / "hub" / f"{model.replace('/', '--')}@{commit}.json"


def _noted(model: str, commit: str) -> _Repository | None:
    """What the hub said of this commit when it was last asked; a commit never changes."""
    try:
        return _Repository(**read_json(_note(model, commit)))
    except (ModelError, TypeError):
        return None


def _download(repository: _Repository, file: str, report: Callable[[int], None] | None = None) -> Path:
    """One file into the cache; `report` gets the bytes of it that are here."""
    from huggingface_hub import hf_hub_download

    with _errors_of_hub(repository.model):
        return Path(
            hf_hub_download(
                repository.model,
                file,
                revision=repository.commit,
                endpoint=_endpoint(),
                cache_dir=_cache_dir(),
                tqdm_class=_bar(report),
            )
        )


def _check_hash(path: Path, expected: str | None, progress: Progress) -> None:
    """A file as it arrived against the hub's hash: neither HTTP nor huggingface_hub compares them."""
    if expected is None or sha256_of(path, progress) == expected:
        return
    path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    raise ModelError(f"{path.name} arrived damaged; fetch it again")


def _bar(report: Callable[[int], None] | None) -> Any:
    """A progress bar that draws nothing and reports bytes: the worker's output is a log."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._bytes = int(options.get("initial") or 0)
            options.pop("name", None)
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self._bytes += int(n or 0)
            if report is not None:
                report(self._bytes)
            return None

    return Bar


def _agree_to(size: int, model: str, allow_download: bool) -> None:
    if size and not allow_download:
        raise DownloadNeeded(
            f"{model} is not on this machine: {size / 1e9:.2f} GB of weights ({size} bytes) to download"
        )


def _check_room(size: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise ModelError(
            f"the disk is full: {size / 1e9:.2f} GB are to be downloaded to {folder}, {free / 1e9:.2f} GB free"
        )


@contextmanager
def _errors_of_hub(model: str) -> Iterator[None]:
    """The hub's, the network's and the disk's errors as ours."""
    from huggingface_hub import errors

    # The HTTP library below huggingface_hub differs between its releases; this is the root of its errors.
    http_error = errors.HfHubHTTPError.__mro__[1]
    where = _endpoint() or "the hub"
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelNotFound(
            f"{model} is gated: accept its terms on the hub, and log in there (HF_TOKEN or `hf auth login`)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFound(f"{model} has no such revision on the hub") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"{model} is not on the hub, or is private (then log in: HF_TOKEN or `hf auth login`)"
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise ModelNotFound(f"{model} lacks a file that is needed: {_first_line(error)}") from error
    except errors.HfHubHTTPError as error:
        if error.response is not None and error.response.status_code in (401, 403):
            raise ModelNotFound(f"{where} refuses access to {model}; log in (HF_TOKEN or `hf auth login`)") from error
        raise ModelError(f"{where} failed with {model}: {_first_line(error)}; try again later") from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, http_error) as error:  # type: ignore[misc]
        raise ModelNotFound(
            f"{model} is not on this machine, not all of it, and {where} cannot be reached or broke off: "
            f"{_first_line(error)}"
        ) from error
    except (errors.NotASafetensorsRepoError, errors.SafetensorsParsingError) as error:
        raise ModelUnsupported(f"{model} has no readable safetensors: {_first_line(error)}") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelError(f"the disk is full: {model} does not fit into {_cache_dir()}") from error
        raise ModelError(f"{model} cannot be downloaded: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
