"""Requests to a server of completions, and what becomes of those that fail."""

from __future__ import annotations

import http.client
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs

from nnxdsl.config.objectives.engine import Server
from nnxdsl.config.objectives.teacher_server import TeacherServer
from nnxdsl.errors import RunError

MOST_REQUESTS = 64
"""At one time."""
TRIES = 4
"""Of a request that the server cannot take now; and of the first one, if the server is not up yet."""
BUSY = (429, 502, 503, 504)


@attrs.define
class Client:
    """Sends requests to a server.

    Attributes:
        settings: Where it is.
        path: The path of these settings, which errors name.
        has_weights: Whether the server has weights of this run: it is then not asked again once it is back.
    """

    settings: Server | TeacherServer
    path: str = "objective.engine"
    has_weights: bool = False
    _is_closed: threading.Event = attrs.field(factory=threading.Event, init=False)

    def close(self) -> None:
        """Ends what waits to be asked again."""
        self._is_closed.set()

    def get(self, route: str) -> Any:
        """The answer in JSON; errors as of `post`."""
        return self._request(urllib.request.Request(self.settings.url.rstrip("/") + route))

    def models(self) -> list[str]:
        """The names of the models that the server has, at least one; errors as of `post`."""
        answer = self.get("/v1/models")
        try:
            names = [str(one["id"]) for one in answer["data"]]
        except (KeyError, TypeError):
            names = []
        if not names:
            raise self.error("names no model at /v1/models; expected nnxdsl serve or vLLM")
        return names

    def post(self, route: str, body: Mapping[str, Any], *, may_be_missing: bool = False, is_json: bool = True) -> Any:
        """The answer in JSON; None for an empty one, for text, and for a route that may be missing and is.

        Raises:
            RunError: The server does not answer, or refuses.
        """
        request = urllib.request.Request(self.settings.url.rstrip("/") + route, json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        return self._request(request, may_be_missing=may_be_missing, is_json=is_json)

    def post_each(self, route: str, bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The answers to several requests that are sent at one time; errors as of `post`."""
        pool = ThreadPoolExecutor(MOST_REQUESTS, "requests")
        waiting = [pool.submit(self.post, route, body) for body in bodies]
        try:
            return [each.result() for each in waiting]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # an error is not to wait for the others

    def _request(self, request: urllib.request.Request, *, may_be_missing: bool = False, is_json: bool = True) -> Any:
        if key := os.environ.get(self.settings.api_key_variable):
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        for number in range(1, TRIES + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.settings.timeout) as answer:
                    content = answer.read()
                return json.loads(content) if content and is_json else None
            except urllib.error.HTTPError as error:
                if error.code == 404 and may_be_missing:
                    return None
                if error.code not in BUSY or number == TRIES:
                    raise self.error(f"answers {error.code}: {_message(error)}{_hint(error.code, request)}") from error
            except TimeoutError as error:  # one that hangs is not asked again
                raise self.error(f"does not answer within timeout={self.settings.timeout:g} seconds") from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                if number == TRIES or self.has_weights:  # once it is back, its weights might be others
                    raise self.error(f"does not answer: {error!r}") from error
            if self._is_closed.wait(2 ** (number - 1)):
                break
        raise self.error("is no longer needed: the run ends")

    def error(self, message: str) -> RunError:
        """An error that says what the server does."""
        return RunError(f"{self.path}: the server at {self.settings.url} {message}")


def _message(error: urllib.error.HTTPError) -> str:
    """What the server says about an error."""
    text = error.read().decode(errors="replace")
    try:
        body = json.loads(text)
        return str(body["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500] or error.reason


def _hint(code: int, request: urllib.request.Request) -> str:
    """What to do about it."""
    route = request.full_url.rpartition("/")[2]
    if route not in ("collective_rpc", "load_lora_adapter"):
        return ""
    if code == 403:
        return "; set weights_directory of the engine to that directory"
    if route == "load_lora_adapter":
        return (
            "; start it so that it loads adapters: nnxdsl serve MODEL --weights-directory DIR, or vLLM with "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora and --max-lora-rank"
        )
    return (
        "; start it so that it loads new weights: nnxdsl serve MODEL --weights-directory DIR, or vLLM (0.32 was tried) "
        "with VLLM_SERVER_DEV_MODE=1"
    )
