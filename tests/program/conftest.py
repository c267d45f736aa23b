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
import pytest

PACKAGES = Path(__file__).parent / "packages"
sys.path.insert(0, str(PACKAGES))

from small_lab import samples  # noqa: E402
from small_lab.model import Small  # noqa: E402

from nnxdsl import Data, Experiment, Memory, Objective, Optimizer, Reference, Schedule  # noqa: E402
from nnxdsl.data.batch import PairBatch, SequenceBatch  # noqa: E402
from nnxdsl.program.compile import TrainState  # noqa: E402


@pytest.fixture(scope="session")
def on_eight_devices() -> Callable[..., Any]:
    """Runs a script of this directory in a process with eight virtual devices; gives the JSON that it prints."""

    def run(script: str, *words: str) -> Any:
        environment = {
            **os.environ,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}",
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
        if objective.batch_kind == "pairs":
            fields.setdefault("data", Data.Preferences("none.jsonl", max_prompt_length=16, max_completion_length=16))
        elif objective.batch_kind == "feedback":
            fields.setdefault("data", Data.Feedback("none.jsonl", max_prompt_length=16, max_completion_length=16))
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

    return samples.pairs


@pytest.fixture(scope="session")
def sequences() -> Callable[..., SequenceBatch]:
    """Makes a batch of sequences of unequal lengths, with about half of their tokens as targets."""

    return samples.sequences


@pytest.fixture(scope="session")
def trained() -> Callable[..., TrainState]:
    """Makes a first state whose base has sharp logits and norms away from zero, as a trained model has."""

    return samples.trained


@pytest.fixture(scope="session")
def with_b() -> Callable[[TrainState], TrainState]:
    """A state whose adapters are no longer the identity."""

    return samples.with_b
