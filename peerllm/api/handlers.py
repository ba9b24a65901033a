"""The routes: from an HTTP request to the backend, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from aiohttp import web

from peerllm.api import shapes
from peerllm.api.answers import Answer, Answers
from peerllm.api.backend import Backend
from peerllm.api.errors import RequestTooSlow, UnknownModel, error_body, error_response, http_error_response
from peerllm.api.parameters import ApiRequest, parse_body, parse_chat, parse_completion
from peerllm.protocol import limits
from peerllm.protocol.errors import BadRequest, PeerllmError
from peerllm.protocol.requests import Finished

log = structlog.get_logger()

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Handlers:
    """Serves `backend`. `keepalive_seconds` is how long a stream may be silent; `stall_seconds` how long a request's
    body may take."""

    def __init__(self, backend: Backend, answers: Answers, *, keepalive_seconds: float, stall_seconds: float) -> None:
        self._backend = backend
        self._answers = answers
        self._keepalive_seconds = keepalive_seconds
        self._stall_seconds = stall_seconds

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completion),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{name:.+}", self.model),
            web.get("/healthz", self.health),
            web.get("/status", self.status),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse_chat(await self._body(request)), is_chat=True)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, parse_completion(await self._body(request)), is_chat=False)

    async def models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [shapes.model(info) for info in self._backend.models()]})

    async def model(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        for info in self._backend.models():
            if info.name == name:
                return web.json_response(shapes.model(info))
        raise UnknownModel("This daemon does not serve the model; GET /v1/models lists what it serves.", param="model")

    async def health(self, request: web.Request) -> web.StreamResponse:
        is_well, cause = self._backend.health()
        if is_well:
            return web.json_response({"status": "ok"})
        return web.json_response({"status": "unavailable", "cause": cause}, status=503)

    async def status(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self._backend.status())

    async def _body(self, request: web.Request) -> dict[str, Any]:
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise BadRequest("Compressed requests are not served.")
        try:
            async with asyncio.timeout(self._stall_seconds):
                data = await request.read()
        except TimeoutError:
            raise RequestTooSlow(f"The request's body did not come within {self._stall_seconds:g} s.") from None
        if len(data) > limits.MAX_API_BODY_BYTES:
            raise web.HTTPRequestEntityTooLarge(limits.MAX_API_BODY_BYTES, len(data))
        return parse_body(data)

    async def _answer(self, request: web.Request, asked: ApiRequest, *, is_chat: bool) -> web.StreamResponse:
        shape = shapes.AnswerShape(
            is_chat=is_chat,
            model=self._model_name(asked),
            seed=asked.body.sampling.seed,
            includes_usage=asked.includes_usage,
        )
        answer = self._answers.start(self._backend.generate(asked.body))
        try:
            if asked.is_streamed:
                return await self._stream(request, answer, shape)
            return await self._whole(request, answer, shape)
        finally:
            await answer.close()

    def _model_name(self, asked: ApiRequest) -> str:
        """The model that answers. A daemon that does not know its model yet lets any name pass to the backend, whose
        error is the better one."""
        names = [info.name for info in self._backend.models()]
        if names and asked.model and asked.model not in names:
            raise UnknownModel(f"This daemon serves {', '.join(names)}, not what 'model' asks for.", param="model")
        return asked.model or (names[0] if names else "")

    async def _whole(self, request: web.Request, answer: Answer, shape: shapes.AnswerShape) -> web.StreamResponse:
        texts = []
        while not isinstance(event := await answer.next(), Finished):
            if event is not None:
                texts.append(event.text)
        response = web.json_response(shape.whole("".join(texts), event))
        # Sent here, so that the client does not wait while the backend tidies up.
        await response.prepare(request)
        await response.write_eof()
        return response

    async def _stream(self, request: web.Request, answer: Answer, shape: shapes.AnswerShape) -> web.StreamResponse:
        # An error that comes first still gets its HTTP status.
        event = await answer.next(self._keepalive_seconds)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        try:
            opening = shape.opening()
            if opening is not None:
                await response.write(shapes.sse(opening))
            while not isinstance(event, Finished):
                await response.write(shapes.SSE_KEEPALIVE if event is None else shapes.sse(shape.delta(event.text)))
                event = await answer.next(self._keepalive_seconds)
        except PeerllmError as error:
            log.info("api_answer_broken", error=error.code)
            await response.write(shapes.sse(error_body(error)))
        else:
            await response.write(shapes.sse(shape.end(event)))
            if shape.includes_usage:
                await response.write(shapes.sse(shape.usage_chunk(event)))
            await response.write(shapes.SSE_DONE)
        await response.write_eof()
        return response


@web.middleware
async def errors_in_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every refusal in OpenAI's shape, whoever raised it."""
    try:
        return await handler(request)
    except PeerllmError as error:
        return error_response(error)
    except web.HTTPException as error:
        return http_error_response(error)
    except ConnectionError:
        return web.Response()  # the client is gone: nobody reads this
    except Exception:
        log.exception("api_request_failed", path=request.path)
        return error_response(PeerllmError("The daemon met an internal error; its log has the details."))


def application(handlers: Handlers, request_began: Callable[[asyncio.Transport | None], None]) -> web.Application:
    """`request_began` is told of each request whose head has come in."""

    @web.middleware
    async def announce(request: web.Request, handler: Handler) -> web.StreamResponse:
        request_began(request.transport)
        if (request.content_length or 0) > limits.MAX_API_BODY_BYTES:
            raise web.HTTPRequestEntityTooLarge(limits.MAX_API_BODY_BYTES, request.content_length or 0)
        return await handler(request)

    # One more than is allowed: releases of aiohttp differ in whether the size itself is too large.
    app = web.Application(client_max_size=limits.MAX_API_BODY_BYTES + 1, middlewares=[errors_in_shape, announce])
    app.add_routes(handlers.routes())
    return app
