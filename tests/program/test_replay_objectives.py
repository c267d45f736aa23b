"""Ten steps with every objective against an independent replay in float64; `make_replay_objectives.py` has made it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_lab.model import Small

from nnxdsl import (
    Adapter,
    Data,
    Experiment,
    Objective,
    Optimizer,
    Order,
    Precision,
    Reference,
    Schedule,
    Tokenizer,
    Weights,
    compile,
    from_dict,
)
from nnxdsl.data import Batches, BytesTokenizer, load
from nnxdsl.spec.base import members

REPLAY = Path(__file__).parents[1] / "reference" / "replay"
STORED: dict[str, Any] = json.loads((REPLAY / "objectives.json").read_text())
ADAMW = Optimizer.AdamW(
    schedule=Schedule.WarmupCosine(peak_lr=4e-3, warmup_ratio=0.2, final_ratio=0.1), weight_decay=0.1, max_grad_norm=1.0
)
LOSS, NORM = 2e-5, 1e-4
"""Largest relative differences of losses and of gradient norms over ten steps: float32 here, float64 there."""
CANCELLED = 5e-6
"""Largest difference of a loss that is what is left of terms of about 1."""
NATS = 2e-5
"""Largest difference of a log-probability of about 50 nats, and of a reward by `beta` of it."""


def kinds(objective: dict[str, Any]) -> set[str]:
    return {objective["type"]} | {kind for term in objective.get("terms", ()) for kind in kinds(term)}


def test_every_objective_is_replayed() -> None:
    wanted = {name for name, cls in members(Objective).items() if cls.reads in ("pairs", "feedback")}
    assert set.union(*(kinds(case["objective"]) for case in STORED.values())) == wanted


QUICK: tuple[str, ...] = ()
"""Runs that the default tests make; each compiles a program of its own."""


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in STORED])
def test_ten_steps_equal_the_replay(name: str) -> None:
    case = STORED[name]
    objective = from_dict(case["objective"], expected=Objective)
    source = Data.Feedback if objective.reads == "feedback" else Data.Preferences
    data = source(str(REPLAY / "pairs.jsonl"), max_prompt_length=16, max_response_length=16, order=Order.AsInFile())
    fields: dict[str, Any] = {}
    if "synced" in case:
        fields["reference"] = Reference.Synced(**case["synced"])
    if "uniform" in case:
        fields["reference"] = Reference.Uniform()
    experiment = Experiment(
        name="replay",
        model=Small(weights=Weights.HF(str(REPLAY / "model")), tokenizer=Tokenizer.Bytes()),
        adapter=Adapter.LoRA(rank=3, alpha=6.0),
        objective=objective,
        data=data,
        optimizer=ADAMW,
        batch_size=4,
        steps=10,
        precision=Precision(compute="float32"),
        **fields,
    )
    program = compile(experiment)
    state = first = program.init()
    first = first._replace(step=first.step.copy(), trainable={p: x.copy() for p, x in first.trainable.items()})
    batches = Batches(load(data, BytesTokenizer(), vocabulary=320), batch_size=4, seed=0, order=data.order)
    beta = case["objective"].get("beta", 1.0)
    for step, expected in enumerate(case["steps"]):
        batch = batches.at(step)
        if experiment.reference_mode == "cached":
            batch = program.referenced(first, batch)
        state, metrics = program.step(state, batch)
        found = {key: float(metrics[key]) for key in expected}
        assert found["loss"] == pytest.approx(expected["loss"], rel=LOSS, abs=CANCELLED), step
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=NORM), step
        for key in expected.keys() - {"loss", "grad_norm"}:
            scale = beta if key.startswith("rewards/") else 1.0
            assert found[key] == pytest.approx(expected[key], rel=1e-5, abs=max(scale, 0.01) * NATS), (step, key)
    assert np.isfinite(found["loss"])
