"""Errors in OpenAI's form."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException


class Refused(HTTPException):
    """A request that cannot be answered, with the field."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(status, message)
        self.param = param


def error_response(status: int, message: str, param: str | None = None) -> Response:
    """A response with an error."""
    return JSONResponse(error_body(status, message, param), status)


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
