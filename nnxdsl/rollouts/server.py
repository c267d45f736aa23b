"""Sampling by a server that speaks OpenAI's protocol with the token ids of vLLM: `nnxdsl serve`, or vLLM."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Collection
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
from nnxdsl.formats import hf, peft
from nnxdsl.generate.sampler import Completion
from nnxdsl.program.architecture import model_type
from nnxdsl.program.compile import Program, TrainState
from nnxdsl.rollouts.client import Client
from nnxdsl.rollouts.engine import Engine, Requests, build, seed_of
from nnxdsl.runtime import distributed
from nnxdsl.storage.atomic_dir import atomic_directory
from nnxdsl.weights.sources import starts_from_pissa

CLOSE_SECONDS = 5.0
"""Most seconds that a server has to forget the last adapter of a run that ends."""


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
    _prefix: str = attrs.field(factory=lambda: secrets.token_hex(4), init=False)
    """Of adapters' names, so that those of a process that was killed are no others."""
    _client: Client = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._client = Client(self.settings)

    def close(self) -> None:
        """Ends requests, and deletes the weights."""
        self._client.close()
        if self.settings.adapter_only and self._model is not None:
            settings = attrs.evolve(self.settings, timeout=min(self.settings.timeout, CLOSE_SECONDS))
            with contextlib.suppress(RunError):  # it may be gone
                _unload(Client(settings, has_weights=True), self._model)
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
        write = write_adapter if self.settings.adapter_only else write_policy
        write(self.program, state, target)
        self._written.append(target)
        return target

    def sample(self, weights: Path, requests: Requests) -> list[Completion]:
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
        rows = enumerate(zip(requests.prompts, requests.limits, strict=True))
        bodies = [
            {**fixed, "prompt": list(prompt), "max_tokens": limit, "seed": _seed(requests.seed, row)}
            for row, (prompt, limit) in rows
        ]
        return [self._completion(answer) for answer in self._client.post_each("/v1/completions", bodies)]

    def _completion(self, answer: Any) -> Completion:
        """One completion."""
        try:
            (choice,) = answer["choices"]
            ids, token_logprobs = [int(token) for token in choice["token_ids"]], choice["logprobs"]["token_logprobs"]
            logps, finish_reason = np.array(token_logprobs, np.float32), choice["finish_reason"]
        except (KeyError, TypeError, ValueError):
            ids, logps, finish_reason = [], np.zeros(0, np.float32), ""
        if not ids or logps.shape != (len(ids),) or not np.isfinite(logps).all():
            raise self._client.error(
                "answers without token ids and a log-probability of each; expected nnxdsl serve or vLLM (0.32 was "
                "tried; transformers serve gives none)"
            )
        if finish_reason == "stop" and ids[-1] not in self.stop_ids:
            raise self._client.error(
                f"ended a completion with token {ids[-1]}, at which this run's tokenizer does not stop; serve the "
                f"model with the same tokenizer and generation_config.json"
            )
        return Completion(ids, logps, np.zeros_like(logps), len(ids))

    def _load(self, weights: Path) -> None:
        """Has the server load the weights, or the adapter."""
        if self.settings.adapter_only:
            self._load_adapter(weights)
        else:
            self._load_weights(weights)
        self._loaded, self._client.has_weights = weights, True

    def _load_adapter(self, weights: Path) -> None:
        """Has the server load the adapter under a new name, and forget those before."""
        run = self.program.experiment.id
        if self._model is None:  # those of a process that was killed
            before = [name for name in self._client.models() if name.startswith(f"{run}-")]
        else:
            before = [self._model]
        name = f"{run}-{self._prefix}-{weights.name}"
        self._client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(weights)}, is_json=False)
        for other in before:
            _unload(self._client, other)
        self._model = name

    def _load_weights(self, weights: Path) -> None:
        """Has the server load the weights in place of those that it has."""
        if self._model is None:
            self._model = self._client.models()[0]
        self._client.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}})
        self._client.post("/reset_prefix_cache", {}, may_be_missing=True)


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


def write_adapter(program: Program, state: TrainState, target: Path) -> None:
    """Writes the policy's adapter in PEFT's format, float32.

    Args:
        program: Of an experiment with an adapter.
        state: Whose policy.
        target: The directory, which does not exist.
    """
    experiment, adapter = program.experiment, program.experiment.adapter
    assert isinstance(adapter, LowRank)
    leaves = {
        path: np.asarray(leaf, np.float32) for path, leaf in state.trainable.items() if lora_math.is_adapter(path)
    }
    kind, is_pissa = model_type(experiment), starts_from_pissa(experiment)
    with atomic_directory(target) as place:
        peft.write(
            place,
            program.blueprint.config,
            leaves,
            adapter=adapter,
            base=None,
            model_type=kind,
            is_pissa=is_pissa,
        )


def _unload(client: Client, name: str) -> None:
    """Has a server forget an adapter."""
    client.post("/v1/unload_lora_adapter", {"lora_name": name}, is_json=False)


def _seed(seed: int, row: int) -> int:
    """The seed of one completion, below 2^31."""
    return seed_of(f"nnxdsl server 1: {seed}, {row}") >> 1
