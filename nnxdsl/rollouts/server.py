"""Sampling by a server that speaks OpenAI's protocol with the token ids of vLLM: `nnxdsl serve`, or vLLM."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import jax
import numpy as np

from nnxdsl.adapters import lora_math
from nnxdsl.config.adapter import LowRank
from nnxdsl.config.objectives import engine as config
from nnxdsl.config.objectives.online import Online
from nnxdsl.errors import RunError
from nnxdsl.formats import hf
from nnxdsl.generate.sampler import Completion
from nnxdsl.program.architecture import model_type
from nnxdsl.program.compile import Program, TrainState
from nnxdsl.rollouts.engine import Engine, build
from nnxdsl.runtime import distributed
from nnxdsl.storage.atomic_dir import atomic_directory

MOST_REQUESTS = 64
"""At one time."""
TRIES = 4
"""Of a request that the server cannot take now; and of the first one, if the server is not up yet."""
BUSY = (429, 502, 503, 504)


@build.register
def _(engine: config.Server, program: Program, stop_ids: Collection[int], home: Path) -> Engine:
    if not distributed.is_single_process():
        raise RunError("objective.engine: a server samples for runs of one process; leave it out")
    return ServerEngine(engine, program, frozenset(stop_ids), home)


@attrs.define
class ServerEngine:
    """Samples by a server, which gets the weights of the policy whenever they have changed.

    Attributes:
        settings: Where it is.
        program: Of an experiment whose objective is `Online`.
        stop_ids: Token ids that end a completion.
        home: The directory of runs.
    """

    settings: config.Server
    program: Program
    stop_ids: frozenset[int]
    home: Path
    _model: str | None = attrs.field(default=None, init=False)
    _written: list[Path] = attrs.field(factory=list, init=False)
    """Directories with weights that may still be loaded, the oldest first."""
    _loaded: Path | None = attrs.field(default=None, init=False)
    _is_closed: threading.Event = attrs.field(factory=threading.Event, init=False)

    def close(self) -> None:
        """Ends requests, and deletes the weights."""
        self._is_closed.set()
        shutil.rmtree(self._place, ignore_errors=True)

    @property
    def _place(self) -> Path:
        """The directory of this run's weights, by the path at which the server finds it."""
        root = self.settings.weights_directory
        place = self.home / "server_weights" if root is None else Path(root)
        return place.absolute() / self.program.experiment.id

    @property
    def max_logp_difference(self) -> float:
        """See `Engine.max_logp_difference`."""
        return self.settings.max_logp_difference

    def weights(self, state: TrainState) -> Path:
        """The directory to which the policy is written.

        Raises:
            RunError: It cannot be written.
        """
        target = self._place / f"step-{int(state.step):08}"
        if target in self._written:
            return target
        self._written = self._written[max(len(self._written) - self.settings.max_staleness, 0) :]
        for other in self._place.glob("*"):  # too old, or of a process that was killed
            if other not in self._written:
                shutil.rmtree(other, ignore_errors=True)
        write_policy(self.program, state, target)
        self._written.append(target)
        return target

    def sample(
        self,
        weights: Path,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        seed: int,
        *,
        batch_size: int,
        prompt_length: int,
        max_completion_length: int,
    ) -> list[Completion]:
        """See `Engine.sample`.

        Raises:
            RunError: The server does not answer, refuses, or answers without token ids or their log-probabilities.
        """
        if self._loaded != weights:
            self._load(weights)
        objective = self.program.experiment.objective
        assert isinstance(objective, Online)
        fixed = {
            "model": self._model,
            "temperature": objective.temperature,
            "top_k": objective.top_k or 0,
            "top_p": objective.top_p or 1.0,
            "min_p": 0.0,  # what is not given, vLLM takes from the model's generation_config.json
            "repetition_penalty": 1.0,
            "stop_token_ids": sorted(self.stop_ids),
            "logprobs": 0,
            "return_token_ids": True,
        }
        rows = zip(prompts, limits, strict=True)
        bodies = [
            {**fixed, "prompt": list(prompt), "max_tokens": limit, "seed": _seed(seed, row)}
            for row, (prompt, limit) in enumerate(rows)
        ]
        pool = ThreadPoolExecutor(MOST_REQUESTS, "requests")
        waiting = [pool.submit(self._complete, body) for body in bodies]
        try:
            return [each.result() for each in waiting]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # an error is not to wait for the others

    def _complete(self, body: Mapping[str, Any]) -> Completion:
        """One completion."""
        answer = self._post("/v1/completions", body)
        try:
            (choice,) = answer["choices"]
            ids, found = [int(token) for token in choice["token_ids"]], choice["logprobs"]["token_logprobs"]
            logps, finish_reason = np.array(found, np.float32), choice["finish_reason"]
        except (KeyError, TypeError, ValueError):
            ids, logps, finish_reason = [], np.zeros(0, np.float32), ""
        if not ids or logps.shape != (len(ids),) or not np.isfinite(logps).all():
            raise self._error(
                "answers without token ids and a log-probability of each; expected nnxdsl serve or vLLM (0.32 was "
                "tried; transformers serve gives none)"
            )
        if finish_reason == "stop" and ids[-1] not in self.stop_ids:
            raise self._error(
                f"ended a completion with token {ids[-1]}, at which this run's tokenizer does not stop; serve the "
                f"model with the same tokenizer and generation_config.json"
            )
        return Completion(ids, logps, np.zeros_like(logps), len(ids))

    def _load(self, weights: Path) -> None:
        """Has the server load the weights."""
        if self._model is None:
            try:
                self._model = str(self._get("/v1/models")["data"][0]["id"])
            except (KeyError, TypeError, IndexError):
                raise self._error("names no model at /v1/models; expected nnxdsl serve or vLLM") from None
        self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}})
        self._post("/reset_prefix_cache", {}, may_be_missing=True)
        self._loaded = weights

    def _get(self, route: str) -> Any:
        return self._request(urllib.request.Request(self.settings.url.rstrip("/") + route))

    def _post(self, route: str, body: Mapping[str, Any], *, may_be_missing: bool = False) -> Any:
        """The answer in JSON, None for an empty one."""
        request = urllib.request.Request(self.settings.url.rstrip("/") + route, json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        return self._request(request, may_be_missing=may_be_missing)

    def _request(self, request: urllib.request.Request, *, may_be_missing: bool = False) -> Any:
        if key := os.environ.get(self.settings.api_key_variable):
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        for number in range(1, TRIES + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.settings.timeout) as answer:
                    content = answer.read()
                return json.loads(content) if content else None
            except urllib.error.HTTPError as error:
                if error.code == 404 and may_be_missing:
                    return None
                if error.code not in BUSY or number == TRIES:
                    raise self._error(f"answers {error.code}: {_message(error)}{_hint(error.code, request)}") from error
            except TimeoutError as error:  # one that hangs is not asked again
                raise self._error(f"does not answer within timeout={self.settings.timeout:g} seconds") from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                if number == TRIES or self._loaded is not None:  # once it is back, its weights might be others
                    raise self._error(f"does not answer: {error!r}") from error
            if self._is_closed.wait(2 ** (number - 1)):
                break
        raise self._error("is no longer needed: the run ends")

    def _error(self, message: str) -> RunError:
        return RunError(f"objective.engine: the server at {self.settings.url} {message}")


def write_policy(program: Program, state: TrainState, target: Path) -> None:
    """Writes the policy in the Hub's format, its adapter merged, in the dtype in which it is computed.

    Args:
        program: Of an experiment without quantization.
        state: Whose policy.
        target: The directory, which does not exist.
    """
    blueprint, adapter = program.blueprint, program.experiment.adapter
    _, leaves = program.policy(state)

    def value(path: str) -> jax.Array:
        weight = leaves[path]
        if isinstance(adapter, LowRank) and path + lora_math.A in leaves:
            weight = lora_math.merged(adapter, path, weight, lambda name: np.asarray(leaves[name], np.float32))
        return weight.astype(blueprint.compute)

    shapes = {path: jax.ShapeDtypeStruct(leaf.shape, blueprint.compute) for path, leaf in blueprint.base.items()}
    with atomic_directory(target) as place:
        hf.write(place, blueprint.config, shapes, value=value, like=model_type(program.experiment))


def _seed(seed: int, row: int) -> int:
    """The seed of one completion, below 2^31."""
    return int.from_bytes(hashlib.sha256(f"nnxdsl server 1: {seed}, {row}".encode()).digest()[:4], "little") >> 1


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
    if not request.full_url.endswith("/collective_rpc"):
        return ""
    if code == 403:
        return "; set weights_directory of the engine to that directory"
    return (
        "; start it so that it loads new weights: nnxdsl serve MODEL --weights-directory DIR, or vLLM (0.32 was tried) "
        "with VLLM_SERVER_DEV_MODE=1"
    )
