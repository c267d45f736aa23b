"""Sampling by a server that speaks OpenAI's protocol with the token ids of vLLM: `nnxdsl serve`, or vLLM."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
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
"""Of a request whose connection fails, or that the server cannot take now."""
BUSY = (429, 502, 503, 504)


@build.register
def _(engine: config.Server, program: Program, stop_ids: Collection[int], home: Path) -> Engine:
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
    _version: int | None = attrs.field(default=None, init=False)

    @property
    def max_logp_difference(self) -> float:
        """See `Engine.max_logp_difference`."""
        return self.settings.max_logp_difference

    def sample(
        self,
        state: TrainState,
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
        if not distributed.is_single_process():
            raise RunError("objective.engine: a server samples for runs of one process")
        if self._version != (version := int(state.step)):
            self._load_weights(state, version)
            self._version = version
        objective = self.program.experiment.objective
        assert isinstance(objective, Online)
        fixed = {
            "model": self._model,
            "temperature": objective.temperature,
            "top_k": objective.top_k or 0,
            "top_p": objective.top_p or 1.0,
            "stop_token_ids": sorted(self.stop_ids),
            "logprobs": 0,
            "return_token_ids": True,
        }
        rows = zip(prompts, limits, strict=True)
        bodies = [
            {**fixed, "prompt": list(prompt), "max_tokens": limit, "seed": _seed(seed, row)}
            for row, (prompt, limit) in enumerate(rows)
        ]
        with ThreadPoolExecutor(MOST_REQUESTS) as pool:
            waiting = [pool.submit(self._complete, body) for body in bodies]
            try:
                return [each.result() for each in waiting]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _complete(self, body: Mapping[str, Any]) -> Completion:
        """One completion."""
        (choice,) = self._post("/v1/completions", body)["choices"]
        ids, logps = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if not ids or not logps or len(ids) != len(logps) or not np.isfinite(np.array(logps, float)).all():
            raise self._error(
                "answers without token ids and a log-probability of each; expected nnxdsl serve, or vLLM 0.10.2 "
                "or newer (transformers serve has none)"
            )
        if choice.get("finish_reason") == "stop" and ids[-1] not in self.stop_ids:
            raise self._error(
                f"ended a completion with token {ids[-1]}, at which this run's tokenizer does not stop; serve the "
                f"model with the same tokenizer and generation_config.json"
            )
        found = np.array(logps, np.float32)
        return Completion(list(ids), found, np.zeros_like(found), len(ids))

    def _load_weights(self, state: TrainState, version: int) -> None:
        """Writes the weights, and has the server load them."""
        if self._model is None:
            self._model = self._get("/v1/models")["data"][0]["id"]
        root = self.settings.weights_directory
        place = Path(root) if root is not None else self.home / "server_weights" / self.program.experiment.id
        place.mkdir(parents=True, exist_ok=True)
        target = (place / f"step-{version:08}").resolve()
        shutil.rmtree(target, ignore_errors=True)
        write_policy(self.program, state, target)
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(target)}}
        self._post("/collective_rpc", call)
        self._post("/reset_prefix_cache", {}, may_be_missing=True)
        for other in place.glob("step-*"):
            if other.resolve() != target:
                shutil.rmtree(other, ignore_errors=True)

    def _get(self, route: str) -> Any:
        return self._request(urllib.request.Request(self.settings.url.rstrip("/") + route))

    def _post(self, route: str, body: Mapping[str, Any], *, may_be_missing: bool = False) -> Any:
        """The answer in JSON, None for an empty one."""
        request = urllib.request.Request(self.settings.url.rstrip("/") + route, json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        return self._request(request, may_be_missing=may_be_missing)

    def _request(self, request: urllib.request.Request, *, may_be_missing: bool = False) -> Any:
        if key := os.environ.get(self.settings.api_key_variable):
            request.add_header("Authorization", f"Bearer {key}")
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
            except (OSError, ValueError) as error:
                if number == TRIES:
                    raise self._error(f"does not answer: {error}") from error
            time.sleep(2 ** (number - 1))
        raise AssertionError

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
    if code == 404 and request.full_url.endswith("/collective_rpc"):
        return (
            "; start it so that it loads new weights: nnxdsl serve MODEL --weights-directory DIR, or vLLM with "
            "VLLM_SERVER_DEV_MODE=1"
        )
    return ""
