"""The other routes, and refusals by path, method and state."""

from __future__ import annotations

import json
from typing import Any

import pytest

from peerllm.protocol.requests import ModelInfo


async def test_models_lists_what_the_backend_serves(start: Any, http: Any, scripted: Any) -> None:
    await start(scripted())
    async with http.get("/v1/models") as response:
        listed = await response.json()
    model = {"id": "tiny", "object": "model", "created": 7, "owned_by": "peerllm", "context_length": 64, "layers": 4}
    assert listed == {"object": "list", "data": [model]}
    async with http.get("/v1/models/tiny") as response:
        assert await response.json() == model


async def test_a_models_name_may_have_slashes(start: Any, http: Any, scripted: Any) -> None:
    backend = scripted()
    backend.known = [ModelInfo(name="someone/small")]
    await start(backend)
    async with http.get("/v1/models/someone/small") as response:
        assert (await response.json())["id"] == "someone/small"
    async with http.get("/v1/models/someone/other") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "model_not_found"


async def test_health_says_the_cause(start: Any, http: Any, scripted: Any) -> None:
    backend = scripted()
    await start(backend)
    async with http.get("/healthz") as response:
        assert (response.status, await response.json()) == (200, {"status": "ok"})
    backend.is_well = False
    async with http.get("/healthz") as response:
        assert response.status == 503
        assert await response.json() == {"status": "unavailable", "cause": "the other peer is away"}


async def test_status_is_the_backends(start: Any, http: Any, scripted: Any) -> None:
    await start(scripted())
    async with http.get("/status") as response:
        assert await response.json() == {"state": "ready"}


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/healthz", 405, "method_not_allowed"),
    ],
)
async def test_other_paths_and_methods_are_refused_in_openais_shape(
    start: Any, http: Any, scripted: Any, method: str, path: str, status: int, code: str
) -> None:
    await start(scripted())
    async with http.request(method, path) as response:
        assert response.status == status
        error = (await response.json())["error"]
    assert error["code"] == code
    assert error.keys() == {"message", "type", "param", "code"}
    assert ("Allow" in response.headers) == (status == 405)


async def test_a_wrong_parameter_reaches_no_backend(start: Any, http: Any, scripted: Any, chat_body: Any) -> None:
    backend = scripted()
    await start(backend)
    async with http.post("/v1/chat/completions", json=chat_body(n=2)) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert (error["param"], error["type"], error["code"]) == ("n", "invalid_request_error", "unsupported_parameter")
    async with http.post("/v1/chat/completions", data=b"{") as response:
        assert response.status == 400
    assert backend.requests == []


async def test_a_fault_of_the_backends_status_is_told_to_nobody(
    start: Any, http: Any, scripted: Any, monkeypatch: Any
) -> None:
    backend = scripted()

    def broken() -> dict[str, Any]:
        raise KeyError("a secret")

    monkeypatch.setattr(backend, "status", broken)
    await start(backend)
    async with http.get("/status") as response:
        assert response.status == 500
        text = await response.text()
    assert json.loads(text)["error"]["code"] == "internal_error"
    assert "secret" not in text
