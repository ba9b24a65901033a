"""The hub through huggingface_hub's public functions: metadata, single files into its cache, its errors as ours."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peerllm.models.cache import Progress, cache_folder, sha256_of, write_note
from peerllm.models.checkpoint import SINGLE_FILE, read_json
from peerllm.protocol import limits
from peerllm.protocol.errors import ModelError, ModelNotFound, ModelUnsupported

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Repository:
    """What the hub says of one commit of a model."""

    model: str
    commit: str
    sizes: dict[str, int]
    """File name to bytes."""
    hashes: dict[str, str]
    """Weight file name to sha256."""
    dtype: str | None
    """The one dtype of all weights, where the hub knows it and there is only one."""


def remote_header(repository: Repository) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of each tensor of a model in one file, by a ranged request; every peer needs that file."""
    with _errors_of_hub(repository.model):
        header = _api().parse_safetensors_file_metadata(
            repository.model, SINGLE_FILE, revision=repository.commit, timeout=limits.HUB_SECONDS
        )
    return {
        name: (_DTYPES.get(str(tensor.dtype), str(tensor.dtype)), tuple(tensor.shape))
        for name, tensor in header.tensors.items()
    }


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def cache_dir() -> Path:
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


def cached_snapshot(model: str, revision: str | None) -> Path | None:
    """The folder of this commit (or of the branch, as it was last seen) in the cache."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", cache_dir=cache_dir(), revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def look_up(model: str, revision: str | None) -> Repository:
    with _errors_of_hub(model):
        info = _api().model_info(model, revision=revision, files_metadata=True, timeout=limits.HUB_SECONDS)
    siblings = info.siblings or []
    parameters = getattr(info.safetensors, "parameters", None) or {}
    dtypes = {_DTYPES.get(name) for name, count in parameters.items() if count}
    if not info.sha:
        raise ModelError(f"the hub gave no commit for {model}")
    repository = Repository(
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


def noted(model: str, commit: str) -> Repository | None:
    """What the hub said of this commit when it was last asked; a commit never changes."""
    try:
        return Repository(**read_json(_note(model, commit)))
    except (ModelError, TypeError):
        return None


def download(repository: Repository, file: str, report: Callable[[int], None] | None = None) -> Path:
    """One file into the cache; `report` gets the bytes of it that are here."""
    from huggingface_hub import hf_hub_download

    with _errors_of_hub(repository.model):
        return Path(
            hf_hub_download(
                repository.model,
                file,
                revision=repository.commit,
                endpoint=_endpoint(),
                cache_dir=cache_dir(),
                tqdm_class=_bar(report),
            )
        )


def check_hash(path: Path, expected: str | None, progress: Progress) -> None:
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
            f"{model} is not on this machine, or not all of it, and {where} cannot be reached or broke off: "
            f"{_first_line(error)}"
        ) from error
    except (errors.NotASafetensorsRepoError, errors.SafetensorsParsingError) as error:
        raise ModelUnsupported(f"{model} has no readable safetensors: {_first_line(error)}") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelError(f"the disk is full: {model} does not fit into {cache_dir()}") from error
        raise ModelError(f"{model} cannot be downloaded: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
