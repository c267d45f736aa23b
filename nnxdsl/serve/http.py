"""The routes of the server, and what is checked before a request is read."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import attrs
from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from nnxdsl.errors import RunError
from nnxdsl.generate.pretrained import Pretrained
from nnxdsl.serve.errors import Refused, error_response
from nnxdsl.serve.server import Server
from nnxdsl.serve.weights import ServedWeights

MOST_BYTES = 2**24
"""Of a request's body."""


@attrs.frozen(eq=False)
class Gate:
    """Refuses requests without the key, and bodies that are too large, before they are read.

    Attributes:
        app: What answers the others.
        api_key: The key; None for none.
    """

    app: ASGIApp
    api_key: str | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets a request through, or answers it."""
        answer = self.app if scope["type"] != "http" else self._refusal(HTTPRequest(scope)) or self.app
        await answer(scope, receive, send)

    def _refusal(self, request: HTTPRequest) -> Response | None:
        header = request.headers.get("authorization", "").encode("latin-1")  # as starlette decodes it
        needs_key = self.api_key is not None and request.url.path != "/health"
        if needs_key and not secrets.compare_digest(header, f"Bearer {self.api_key}".encode()):
            return error_response(401, "the key is not that of the server; send it as a bearer token")
        size = request.headers.get("content-length", "")
        if request.method == "POST" and not (size.isdecimal() and int(size) <= MOST_BYTES):
            return error_response(413, f"expected a body of at most {MOST_BYTES:,} bytes, and its content-length")
        return None


def make_app(
    model: Pretrained, name: str, api_key: str | None = None, weights_directory: Path | None = None
) -> FastAPI:
    """The server of a model.

    Args:
        model: The model.
        name: What clients call it.
        api_key: What requests must have as a bearer token; None for nothing.
        weights_directory: New weights are loaded from directories below it; None for no new weights.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        server.batches.close()

    server = Server(model, name)
    app = FastAPI(title="nnxdsl", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.get("/health")(lambda: Response())
    app.get("/v1/models")(server.models)
    app.post("/v1/completions", response_model=None)(server.completions)
    app.post("/v1/chat/completions", response_model=None)(server.chat)

    if weights_directory is not None:
        weights = ServedWeights(server, weights_directory)
        app.post("/collective_rpc")(weights.call)
        app.post("/v1/load_lora_adapter")(weights.load_adapter)
        app.post("/v1/unload_lora_adapter")(weights.unload_adapter)
        app.post("/pause")(server.pause)
        app.post("/resume")(server.resume)
        app.get("/is_paused")(server.is_paused)

    app.add_middleware(Gate, api_key=api_key)

    @app.exception_handler(HTTPException)
    async def refused(request: HTTPRequest, error: HTTPException) -> Response:
        return error_response(error.status_code, error.detail, error.param if isinstance(error, Refused) else None)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: HTTPRequest, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = "" if first["type"] == "json_invalid" else ".".join(str(part) for part in first["loc"][1:])
        message = first["msg"].removeprefix("Value error, ")
        return error_response(400, f"{field}: {message}" if field else message, field or None)

    @app.exception_handler(RunError)
    async def ended(request: HTTPRequest, error: RunError) -> Response:
        return error_response(503, str(error))

    @app.exception_handler(Exception)
    async def failed(request: HTTPRequest, error: Exception) -> Response:
        return error_response(500, f"{type(error).__name__}: {error}")

    return app
