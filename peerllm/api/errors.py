"""Errors in the shape that OpenAI's clients expect: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from peerllm.protocol import limits
from peerllm.protocol.errors import BadRequest, PeerllmError


class UnknownModel(BadRequest):
    """The request names a model that this daemon does not serve. OpenAI's code for it is also that of ModelNotFound,
    which is another thing: a model that a peer could not find."""

    code = "model_not_found"
    status = 404


class RequestTooSlow(BadRequest):
    code = "request_timeout"
    status = 408


_TYPES = {400: "invalid_request_error", 404: "invalid_request_error", 429: "rate_limit_error"}
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def _type_of(status: int) -> str:
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_body(error: PeerllmError) -> dict[str, Any]:
    return _body(error.message, _type_of(error.status), error.param, error.code)


def _body(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: PeerllmError) -> web.Response:
    headers = {"Retry-After": str(limits.RETRY_AFTER_SECONDS)} if error.status == 429 else None
    return web.json_response(error_body(error), status=error.status, headers=headers)


def http_error_response(error: web.HTTPException) -> web.Response:
    """aiohttp's own refusals (no such route, wrong method, body too large) in the same shape."""
    message = error.reason
    if error.status == 413:
        message = f"A request may have {limits.MAX_API_BODY_BYTES} bytes at most."
    elif error.status == 404:
        message = "There is no such path here. See docs/api.md for what is served."
    body = _body(message, _type_of(error.status), None, _CODES.get(error.status, "invalid_request"))
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
    return web.json_response(body, status=error.status, headers=headers)


def raw_response(error: PeerllmError) -> bytes:
    """The whole HTTP answer as bytes, for a connection that no request handler serves."""
    body = json.dumps(error_body(error)).encode()
    head = (
        f"HTTP/1.1 {error.status} {error.code}\r\n"
        f"Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n"
        f"Retry-After: {limits.RETRY_AFTER_SECONDS}\r\n"
        f"Connection: close\r\n\r\n"
    )
    return head.encode() + body
