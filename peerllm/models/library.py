"""Finding models: a folder of the user's, the embedded one, or the hub's cache and the hub.

What the user names may be a path. What another peer names never is: it is the embedded model's name or a hub id, and
the copy that is found has to be the same model by its identity.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from peerllm.models import embedded, hub
from peerllm.models.allowlist import check_folder
from peerllm.models.cache import Progress, is_whole, no_progress
from peerllm.models.checkpoint import Checkpoint
from peerllm.models.description import ModelDescription, describe_folder
from peerllm.models.drafts import is_draft
from peerllm.models.identity import config_hash
from peerllm.models.layout import range_tensors
from peerllm.protocol import limits
from peerllm.protocol.errors import BadRequest, ModelError, ModelMismatch, ModelNotFound, ModelUnsupported
from peerllm.protocol.identity import LayerRange, ModelIdentity
from peerllm.protocol.requests import ModelInfo

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


def describe(
    model: str, *, revision: str | None = None, allow_download: bool = False, progress: Progress = no_progress
) -> ModelDescription:
    """The model that the user names: the embedded one's name, a folder, or a hub id (`revision` is for these).

    Of a hub model nothing but config, tokenizer and index are fetched here, and what is in the cache is taken as it
    is; `allow_download` says that its weights may be fetched later.

    Raises:
        DownloadNeeded: a hub model of which no weights are here, and `allow_download` is false; names the bytes.
        ModelNotFound: no such folder, no such model on the hub, or the hub cannot be reached.
        ModelUnsupported: refused, with the reason.
        ModelError: damaged.
    """
    if model == embedded.NAME:
        return _describe_embedded(progress)
    path = _folder_named(model)
    if path is not None:
        if is_draft(path):
            raise ModelUnsupported(f"{path} is a draft, which needs its target: name it with --draft")
        return describe_folder(path, progress=progress)
    if not is_hub_id(model):
        raise ModelNotFound(f"{model} is no folder here, and no hub id (such as Qwen/Qwen2.5-7B-Instruct) either")
    _check_revision(revision)
    return hub.describe(model, revision, allow_download=allow_download, progress=progress)


def find(
    identity: ModelIdentity,
    source: str | None,
    *,
    revision: str | None = None,
    allow_download: bool = False,
    progress: Progress = no_progress,
) -> ModelDescription:
    """This machine's copy of the model that another peer offers: from the caches, or by hub id.

    Raises:
        BadRequest: `source` or `revision` is neither a hub id nor the embedded model's name (a path, perhaps).
        DownloadNeeded, ModelUnsupported, ModelError: as `describe`.
        ModelMismatch: what is found under that name is another model; says in what they differ.
        ModelNotFound: nothing here has that identity, or no such model on the hub.
    """
    _check_revision(revision)
    if source == embedded.NAME:
        return _same(_describe_embedded(progress), identity)
    if source is not None and not is_hub_id(source):
        raise BadRequest("the other peer names its model by something that is no hub id; it is not looked for")
    for folder, name, commit in _cached_folders():
        if source is not None and name != source:
            continue
        found = _if_same(folder, name, commit, identity, progress)
        if found is not None:
            return found
    if source is None:
        raise ModelNotFound(
            "the other peer's model is a folder of its own, and this machine's cache holds no copy of it; "
            "get the folder here and name it with --model"
        )
    return _same(hub.describe(source, revision, allow_download=allow_download, progress=progress), identity)


def fetch(
    model: str | ModelDescription,
    layers: LayerRange,
    *,
    revision: str | None = None,
    allow_download: bool = True,
    progress: Progress = no_progress,
) -> Path:
    """The folder with all that the peer with `layers` reads; of a hub model only those files are downloaded.

    Raises:
        DownloadNeeded: something is missing and `allow_download` is false; names the bytes for these layers.
        ModelError: a file is missing or damaged, the hub cannot be reached, the disk is full.
    """
    if isinstance(model, ModelDescription):
        revision = model.revision or revision
        model = model.source or model.folder or model.name
    if model == embedded.NAME:
        return embedded.folder(progress)
    path = _folder_named(model)
    if path is not None:
        check_layers(path, layers)
        return path
    if not is_hub_id(model):
        raise ModelNotFound(f"{model} is no folder here, and no hub id either")
    _check_revision(revision)
    folder = hub.fetch(model, revision, layers, allow_download=allow_download, progress=progress)
    check_layers(folder, layers)
    return folder


def cached_models() -> list[ModelInfo]:
    """Models that this machine can load, whole or in part, without asking anyone. Imports no torch."""
    found = []
    for folder, name, commit in _cached_folders():
        try:
            shape = check_folder(folder)
            checkpoint = Checkpoint.open(folder)
        except ModelError:
            continue  # the hub's cache holds much that is none of ours
        here = checkpoint.names()
        held = sum(range_tensors(shape, LayerRange(layer, layer + 1)).keys() <= here for layer in range(shape.layers))
        if not held:
            continue
        files = {folder / file for file in set(checkpoint.files().values())}
        details = {
            "layers": f"{held} of {shape.layers}" if held < shape.layers else str(shape.layers),
            "bytes": sum(file.stat().st_size for file in files if file.exists()),
            "revision": commit,
            "folder": str(folder),
        }
        created = int((folder / "config.json").stat().st_mtime)
        found.append(ModelInfo(name=name, created=created, context_length=shape.max_context, details=details))
    return found


def check_layers(folder: Path, layers: LayerRange) -> None:
    """Raises ModelError unless the files that hold `layers` are there and hold them in the shapes of config.json."""
    checkpoint = Checkpoint.open(folder)
    for name, size in range_tensors(check_folder(folder), layers).items():
        if checkpoint.shape(name) != size:
            raise ModelError(f"{folder}: tensor {name!r} has shape {checkpoint.shape(name)}; config.json says {size}")


def is_hub_id(model: str) -> bool:
    """Whether `model` is written as a hub id: `name` or `owner/name`. No path passes: no dots first, no `..`."""
    return bool(_HUB_ID.fullmatch(model)) and ".." not in model and "--" not in model


def _folder_named(model: str) -> Path | None:
    try:
        path = Path(model).expanduser()
        return path.absolute() if model and path.is_dir() else None
    except (OSError, RuntimeError, ValueError):
        return None  # too long for a name, an unknown user's home, a null byte


def _check_revision(revision: str | None) -> None:
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision or "//" in revision):
        raise BadRequest(f"{revision[: limits.MAX_NAME_CHARS]!r} is not a revision on the hub", param="revision")


def _describe_embedded(progress: Progress) -> ModelDescription:
    folder = embedded.folder(progress)
    return describe_folder(folder, name=embedded.NAME, source=embedded.NAME, progress=progress)


def _cached_folders() -> Iterator[tuple[Path, str, str | None]]:
    """Folder, name and revision of what may be a model in the caches."""
    if is_whole(embedded.folder_path()):
        yield embedded.folder_path(), embedded.NAME, None
    yield from hub.cached_snapshots()


def _if_same(
    folder: Path, name: str, commit: str | None, identity: ModelIdentity, progress: Progress
) -> ModelDescription | None:
    try:
        # First what is cheap to see: the weights of a stranger's model are not hashed.
        if config_hash(check_folder(folder)) != identity.config:
            return None
        if not any(folder.glob("*.safetensors")):
            return None
        found = _describe_embedded(progress) if commit is None else hub.describe_snapshot(folder, name, progress)
    except ModelError:
        return None
    return None if found.identity.differences(identity) else found


def _same(found: ModelDescription, identity: ModelIdentity) -> ModelDescription:
    differences = found.identity.differences(identity)
    if differences:
        raise ModelMismatch(f"{found.name} here is not the other peer's model; they differ in {', '.join(differences)}")
    return found
