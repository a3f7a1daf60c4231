"""Routes of the HTTP port, and OpenAI bodies for what no route answers."""

import asyncio
import time
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from paceline.core.errors import PacelineError, Unavailable
from paceline.gateway import chat, completions, embeddings, tokenize
from paceline.gateway.endpoint import (
    EmbeddingEndpoint,
    Endpoint,
    GeneratingEndpoint,
    JsonEndpoint,
)
from paceline.gateway.errors import body_of, http_error
from paceline.gateway.guard import Guard
from paceline.gateway.openapi import document
from paceline.gateway.serving import NO_DECODE_WORKER, Serving
from paceline.rpc.exposition import exposition
from paceline.v1.control_pb2 import ModelInfo

_CODES = {404: "not_found", 405: "method_not_allowed"}


def make_app(serving: Serving) -> Starlette:
    """The ASGI app over a Serving; tests drive it through a real server."""
    pages = Pages(serving)
    posts: dict[str, Endpoint[Any]] = {
        "/v1/chat/completions": GeneratingEndpoint(
            serving, chat.DECODER, chat.prepare_chat, "chat"
        ),
        "/v1/completions": GeneratingEndpoint(
            serving, completions.DECODER, completions.prepare_completion, "text_completion"
        ),
        "/v1/embeddings": EmbeddingEndpoint(serving, embeddings.DECODER),
        "/tokenize": JsonEndpoint(serving, tokenize.TOKENIZE, tokenize.tokenize),
        "/detokenize": JsonEndpoint(serving, tokenize.DETOKENIZE, tokenize.detokenize),
    }
    routes = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
        Route("/v1/models", pages.models),
        Route("/v1/models/{name:path}", pages.model),
        Route("/openapi.json", pages.openapi),
        Route("/livez", pages.livez),
        Route("/readyz", pages.readyz),
    ]
    if not serving.config.shares_ports:  # each process shows its own, at a port of its own
        routes.append(Route("/metrics", pages.metrics))
    guard = Middleware(Guard, serving)
    app = Starlette(
        routes=routes, middleware=[guard], exception_handlers={HTTPException: _http_exception}
    )
    app.router.redirect_slashes = False
    return app


class Pages:
    """The small GET endpoints."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._created = int(time.time())
        self._openapi = orjson.dumps(document(serving.config))

    async def models(self, request: Request) -> Response:
        data = [self._describe(model) for model in self._serving.models()]
        return _json({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        try:
            model = self._serving.model(request.path_params["name"])
            if model.unavailable:
                raise Unavailable(NO_DECODE_WORKER, retry_after_s=1)
            return _json(self._describe(model))
        except PacelineError as error:
            answer = http_error(error)
            return Response(answer.body, answer.status, answer.headers, "application/json")

    async def openapi(self, request: Request) -> Response:
        return Response(self._openapi, media_type="application/json")

    async def livez(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(self, request: Request) -> Response:
        reasons = self._serving.reasons()
        if reasons:
            return PlainTextResponse("".join(f"{reason}\n" for reason in reasons), 503)
        return PlainTextResponse("ok\n")

    async def metrics(self, request: Request) -> Response:
        registry, accept = self._serving.metrics.registry, request.headers.get("accept", "")
        kind, text = await asyncio.to_thread(exposition, registry, accept)
        return Response(text, headers={"content-type": kind})

    def _describe(self, model: ModelInfo) -> dict[str, object]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "paceline",
            "max_model_len": model.context_length,
        }


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = _CODES.get(error.status_code, "invalid_request")
    message = f"{error.detail}: {request.method} {request.url.path[:200]}"
    body = body_of(error.status_code, message, None, code)
    return Response(body, error.status_code, error.headers, "application/json")


def _json(content: dict[str, object]) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
