"""The ten steps that tests/reference/make_replay_objectives.py has taken in float64, taken by a program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

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
from nnxdsl.data import BatchSampler, BytesTokenizer, load
from nnxdsl.program import precomputed
from small_lab.model import Small

REPLAY = Path(__file__).parents[2] / "reference" / "replay"
ADAMW = Optimizer.AdamW(
    schedule=Schedule.WarmupCosine(peak_lr=4e-3, warmup_ratio=0.2, final_ratio=0.1), weight_decay=0.1, max_grad_norm=1.0
)


def asked(case: dict[str, Any]) -> Experiment:
    """The experiment of a stored case."""
    objective = from_dict(case["objective"], expected=Objective)
    source = Data.Feedback if objective.batch_kind == "feedback" else Data.Preferences
    fields: dict[str, Any] = {}
    if "synced" in case:
        fields["reference"] = Reference.Synced(**case["synced"])
    if "uniform" in case:
        fields["reference"] = Reference.Uniform()
    return Experiment(
        name="replay",
        model=Small(weights=Weights.HF(str(REPLAY / "model")), tokenizer=Tokenizer.Bytes()),
        adapter=Adapter.LoRA(rank=3, alpha=6.0),
        objective=objective,
        data=source(
            str(REPLAY / "pairs.jsonl"), max_prompt_length=16, max_completion_length=16, order=Order.AsInFile()
        ),
        optimizer=ADAMW,
        batch_size=4,
        steps=10,
        precision=Precision(compute="float32"),
        **fields,
    )


def steps(case: dict[str, Any]) -> list[dict[str, float]]:
    """Of every step the metrics that are stored of it."""
    experiment = asked(case)
    program = compile(experiment)
    state = first = program.init()
    first = first._replace(step=first.step.copy(), trainable={p: x.copy() for p, x in first.trainable.items()})
    rows = load(experiment.data, BytesTokenizer(), vocabulary=320)
    batches = BatchSampler(rows, batch_size=4, seed=0, order=experiment.data.order)
    result = []
    for step, expected in enumerate(case["steps"]):
        batch = batches.batch_at(step)
        if experiment.reference_mode == "cached":
            batch = precomputed.with_reference_logps(program, first, batch)
        state, metrics = program.step(state, batch)
        result.append({key: float(metrics[key]) for key in expected})
    assert np.isfinite(result[-1]["loss"])
    return result
