"""A small HTTP server that answers like the model hub, as far as huggingface_hub asks: a model's metadata, HEAD and GET
of files at a commit, and for large files a redirect to another place with the linked file's hash."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "abcd"


@dataclass
class Repository:
    folder: Path
    commit: str = COMMIT
    refuses: tuple[int, str] | None = None
    """HTTP status and X-Error-Code of every answer about it."""
    refuses_files: tuple[int, str] | None = None
    """The same, but of its files only: of a gated model everyone may see the metadata."""
    has_parameters: bool = True
    """Whether the metadata says of which dtypes the weights are."""
    cuts_at: int | None = None
    """GET of a large file gives so many bytes and then hangs up."""
    flips_a_byte: bool = False
    """GET of a large file gives a last byte that is wrong."""

    def metadata(self, model: str) -> dict[str, Any]:
        siblings: list[dict[str, Any]] = []
        for path in sorted(self.folder.iterdir()):
            data = path.read_bytes()
            entry: dict[str, Any] = {"rfilename": path.name, "size": len(data), "blobId": git_hash(data)}
            if is_large(path.name):
                entry["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 134}
            siblings.append(entry)
        found: dict[str, Any] = {"id": model, "modelId": model, "sha": self.commit, "siblings": siblings, "tags": []}
        if self.has_parameters:
            found["safetensors"] = {"parameters": {"F32": 1000}, "total": 1000}
        return found


@dataclass
class Hub:
    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    """(method, path, Range) of all that was asked."""

    def asked_for(self, suffix: str) -> set[str]:
        """Names of the files with this ending that were asked for in any way."""
        paths = [path for _, path, _ in self.requests if "/resolve/" in path or path.startswith("/large/")]
        return {path.rsplit("/", 1)[1] for path in paths if path.endswith(suffix)}


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if path.startswith("/large/"):
            model, _, file = path.removeprefix("/large/").rpartition("/")
            self._file(self.hub.repositories[model], file)
        elif path.startswith("/api/models/"):
            model, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            repository = self._repository(model, revision or "main")
            if repository is not None:
                self._send(json.dumps(repository.metadata(model)).encode(), {"Content-Type": "application/json"})
        elif "/resolve/" in path:
            model, _, rest = path.removeprefix("/").partition("/resolve/")
            revision, _, file = rest.partition("/")
            repository = self._repository(model, revision)
            if repository is not None and repository.refuses_files is not None:
                self._error(*repository.refuses_files)
            elif repository is not None:
                self._resolve(model, repository, file)
        else:
            self._error(404, "EntryNotFound")

    def _repository(self, model: str, revision: str) -> Repository | None:
        repository = self.hub.repositories.get(model)
        if repository is None:
            self._error(401, "RepoNotFound")
        elif repository.refuses is not None:
            self._error(*repository.refuses)
        elif revision not in ("main", repository.commit):
            self._error(404, "RevisionNotFound")
        else:
            return repository
        return None

    def _resolve(self, model: str, repository: Repository, file: str) -> None:
        path = repository.folder / file
        if "/" in file or not path.is_file():
            self._error(404, "EntryNotFound", {"X-Repo-Commit": repository.commit})
            return
        if not is_large(file):
            self._file(repository, file)
            return
        data = path.read_bytes()
        linked = {"X-Linked-ETag": f'"{sha256(data)}"', "X-Linked-Size": str(len(data))}
        location = {"Location": f"{self.hub.url}/large/{model}/{file}", "X-Repo-Commit": repository.commit}
        self._send(b"", linked | location, status=302)

    def _file(self, repository: Repository, file: str) -> None:
        data = (repository.folder / file).read_bytes()
        tag = sha256(data) if is_large(file) else git_hash(data)
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": repository.commit, "Accept-Ranges": "bytes"}
        if repository.flips_a_byte and is_large(file):
            data = data[:-1] + bytes([data[-1] ^ 1])
        asked = self.headers.get("Range")
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            self._send(data[start : end + 1], headers, status=206)
        elif repository.cuts_at is not None and is_large(file):
            self._send(data, headers, cuts_at=repository.cuts_at)
        else:
            self._send(data, headers)

    def _error(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self._send(b"{}", {"X-Error-Code": code, "X-Error-Message": code} | (headers or {}), status=status)

    def _send(
        self, body: bytes, headers: dict[str, str], *, status: int = HTTPStatus.OK, cuts_at: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cuts_at])
        if cuts_at is not None:
            self.close_connection = True


@contextmanager
def serving() -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    server.RequestHandlerClass = type("Handler", (_Handler,), {"hub": hub})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
