"""Small experiments, batches and weights that look trained, for the tests of the compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

PACKAGES = Path(__file__).parent / "packages"
sys.path.insert(0, str(PACKAGES))

from small_lab.model import Small  # noqa: E402

from nnxdsl import Data, Experiment, Memory, Objective, Optimizer, Reference, Schedule  # noqa: E402
from nnxdsl.data.batch import PairBatch, SequenceBatch  # noqa: E402
from nnxdsl.program.compiler import Program, State  # noqa: E402

VOCAB = 48


@pytest.fixture(scope="session")
def on_eight_devices() -> Callable[..., Any]:
    """Runs a script of this directory in a process with eight virtual devices; gives the JSON that it prints."""

    def run(script: str, *words: str) -> Any:
        environment = {
            **os.environ,
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(PACKAGES), str(PACKAGES.parents[2])]),
        }
        command = [sys.executable, str(PACKAGES.with_name(script)), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="session")
def experiment() -> Callable[..., Experiment]:
    """Makes a small experiment; DPO on pairs unless told otherwise, with a reference that is asked at every step.

    The data file is never opened.
    """

    def make(**fields: Any) -> Experiment:
        objective = fields.setdefault("objective", Objective.DPO(beta=0.5))
        if objective.reads == "pairs":
            fields.setdefault("data", Data.Preferences("none.jsonl", max_prompt_length=16, max_response_length=16))
        elif objective.reads == "feedback":
            fields.setdefault("data", Data.Feedback("none.jsonl", max_prompt_length=16, max_response_length=16))
        else:
            fields.setdefault("data", Data.Text("none.jsonl", max_length=32))
        fields.setdefault("optimizer", Optimizer.SGD(schedule=Schedule.Constant(lr=0.1), max_grad_norm=None))
        memory = fields.get("memory", Memory())
        has_model = not isinstance(fields.get("reference"), Reference.Uniform)
        if objective.needs_reference and has_model and memory.reference == "auto":
            fields["memory"] = attrs.evolve(memory, reference="online")
        return Experiment(**{"name": "small", "model": Small(), "batch_size": 4, "steps": 10, **fields})

    return make


@pytest.fixture(scope="session")
def pairs() -> Callable[..., PairBatch]:
    """Makes a batch of pairs of unequal lengths; the ids of `fill` rows at the end have weight 0."""

    def make(rows: int, *, seed: int = 0, prompt: int = 8, response: int = 8, fill: int = 0) -> PairBatch:
        draw = np.random.default_rng(seed)
        lengths = {
            name: draw.integers(1, size + 1, rows).astype(np.int32)
            for name, size in (("prompt", prompt), ("chosen", response), ("rejected", response))
        }
        ids = {
            name: draw.integers(1, VOCAB, (rows, size)).astype(np.int32)
            for name, size in (("prompt", prompt), ("chosen", response), ("rejected", response))
        }
        slots = {name: np.arange(array.shape[1]) for name, array in ids.items()}
        return PairBatch(
            prompt=np.where(slots["prompt"] >= prompt - lengths["prompt"][:, None], ids["prompt"], 0),
            chosen=np.where(slots["chosen"] < lengths["chosen"][:, None], ids["chosen"], 0),
            rejected=np.where(slots["rejected"] < lengths["rejected"][:, None], ids["rejected"], 0),
            prompt_length=lengths["prompt"],
            chosen_length=lengths["chosen"],
            rejected_length=lengths["rejected"],
            weight=np.array([1.0] * (rows - fill) + [0.0] * fill, np.float32),
        )

    return make


@pytest.fixture(scope="session")
def sequences() -> Callable[..., SequenceBatch]:
    """Makes a batch of sequences of unequal lengths, with about half of their tokens as targets."""

    def make(rows: int, *, seed: int = 0, length: int = 16, fill: int = 0) -> SequenceBatch:
        draw = np.random.default_rng(seed)
        lengths = draw.integers(2, length + 1, rows).astype(np.int32)
        real = np.arange(length) < lengths[:, None]
        mask = real & (draw.random((rows, length)) < 0.5)
        mask[:, 1] = True
        mask[:, 0] = False
        return SequenceBatch(
            tokens=np.where(real, draw.integers(1, VOCAB, (rows, length)), 0).astype(np.int32),
            length=lengths,
            loss_mask=mask,
            weight=np.array([1.0] * (rows - fill) + [0.0] * fill, np.float32),
        )

    return make


@pytest.fixture(scope="session")
def trained() -> Callable[..., State]:
    """Makes a first state whose base has sharp logits and norms away from zero, as a trained model has."""

    def make(program: Program, seed: int = 0) -> State:
        return program.init(Trained(program, seed))

    return make


class Trained:
    """A source of weights with values that a trained model might have."""

    def __init__(self, program: Program, seed: int) -> None:
        self.base, self.seed = program.blueprint.base, seed

    def leaf(self, path: str) -> np.ndarray:
        shape = self.base[path].shape
        draw = np.random.default_rng([self.seed, *path.encode()])
        spread = 0.3 if path.endswith("norm.scale") else 1.5 * shape[-1 if "embed" in path else -2] ** -0.5
        return (draw.standard_normal(shape) * spread).astype(np.float32)


@pytest.fixture(scope="session")
def with_b() -> Callable[[State], State]:
    """A state whose adapters are no longer the identity."""

    def change(state: State) -> State:
        draw = np.random.default_rng(5)
        leaves = {
            path: jax.device_put(jnp.asarray(draw.standard_normal(leaf.shape) * 0.2, leaf.dtype), leaf.sharding)
            if path.endswith("_lora_b")
            else leaf
            for path, leaf in state.trainable.items()
        }
        return state._replace(trainable=leaves)

    return change
