"""A device that runs out of memory in spite of the plan: a typed error in words, and the worker goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from peerllm.engine import worker
from peerllm.engine.operations import Operations
from peerllm.protocol.errors import NotEnoughMemory

CUDA = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 15.00 GiB.\nSee documentation for Memory Management"
)
ERRORS = [
    CUDA,
    MemoryError("no more"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"),
]
LOAD = {"layers": [2, 4], "dtype": "float32", "codec": "exact", "context": 64, "draft": "none"}


def _raise(error: Exception) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: str(error)[:20])
def test_loading_that_runs_out_of_memory_is_refused_in_words_and_can_be_tried_again(tiny, monkeypatch, error):
    operations = Operations(threads=None, progress=lambda *_: None)
    header = {**LOAD, "folder": str(tiny("llama").folder)}
    monkeypatch.setattr("peerllm.engine.engine.load_weights", _raise(error))
    with pytest.raises(
        NotEnoughMemory, match=r"load: memory ran out in spite of the plan .*smaller --context"
    ) as caught:
        operations.perform("load", header, b"")
    assert "\n" not in caught.value.message and str(error).splitlines()[0] in caught.value.message
    assert caught.value.__context__ is None, "the frames of the error would keep what was loaded"
    monkeypatch.undo()
    assert operations.perform("load", header, b"")[0]["context"] == 64


def test_another_error_stays_what_it_is(tiny, monkeypatch):
    operations = Operations(threads=None, progress=lambda *_: None)
    monkeypatch.setattr("peerllm.engine.engine.load_weights", _raise(RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ"):
        operations.perform("load", {**LOAD, "folder": str(tiny("llama").folder)}, b"")


class _Pipe:
    """Requests that are there, and the answers to them."""

    def __init__(self, *requests: tuple[dict[str, Any], bytes]) -> None:
        self.requests = requests
        self.sent: list[dict[str, Any]] = []

    def frames(self):
        yield from self.requests

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        if "event" not in header:
            self.sent.append(header)


def test_a_round_that_runs_out_of_memory_is_answered_and_the_worker_goes_on(tiny, monkeypatch, capfd):
    model = tiny("llama")
    rows = bytes(64 * 4)
    verify = {"op": "verify", "session": 1, "start": 0, "candidates": []}
    pipe = _Pipe(
        ({"id": 1, "op": "load", **LOAD, "folder": str(model.folder)}, b""),
        ({"id": 2, "op": "open", "session": 1}, b""),
        ({"id": 3, **verify}, rows),
        ({"id": 4, **verify}, rows),
    )
    monkeypatch.setattr("peerllm.engine.runner.judge", _once(_raise(CUDA), monkeypatch))
    worker.serve(pipe, None)  # type: ignore[arg-type]
    assert [each["id"] for each in pipe.sent] == [1, 2, 3, 4]
    error = pipe.sent[2]["error"]
    assert error["code"] == "not_enough_memory" and "verify: memory ran out" in error["message"]
    assert "ok" in pipe.sent[3]
    assert "Traceback" not in capfd.readouterr().err


def _once(fail: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def first(*_: Any, **__: Any) -> None:
        monkeypatch.undo()
        fail()

    return first
