"""Losses that compare the rows of a batch, computed in parts: the same step as in one, but for rounding.

The default tests have one of them in test_matrix.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from small_lab.model import Small

from nnxdsl import Adapter, Experiment, Memory, Model, Objective, compile
from nnxdsl.data.batch import PairBatch, SequenceBatch
from nnxdsl.program import precomputed
from nnxdsl.program.compile import TrainState

LORA = Adapter.LoRA(rank=2, alpha=4.0, dropout=0.25)
CACHED = Memory(reference="cached")
MPO = Objective.Sum(terms=(Objective.AOTUnpaired(beta=0.5), Objective.ChosenSFT()), weights=(0.7, 1.0))
EXPERTS = Model.Mixtral("tiny", router_aux_loss_coef=0.5)
CASES: dict[str, dict[str, Any]] = {
    "KTO, LoRA": {"objective": Objective.KTO(beta=0.5), "adapter": LORA},
    "KTO, known": {"objective": Objective.KTO(beta=0.5), "memory": CACHED},
    "AOT, full": {"objective": Objective.AOT(beta=0.5)},
    "BCO, LoRA": {"objective": Objective.BCO(beta=0.5, shift="batch"), "adapter": LORA},
    "sum, LoRA": {"objective": MPO, "adapter": LORA, "memory": Memory(remat="full", reference="online")},
    "routers, pairs": {"objective": Objective.CPO(), "model": EXPERTS},
    "routers, tokens": {"objective": Objective.SFT(loss_on="all"), "model": EXPERTS},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_batch_in_parts_is_the_batch(
    name: str,
    experiment: Callable[..., Experiment],
    pairs: Callable[..., PairBatch],
    sequences: Callable[..., SequenceBatch],
    trained: Callable[..., TrainState],
    with_b: Callable[[TrainState], TrainState],
) -> None:
    """In 1, 2 and 4 parts: unequal lengths, two rows of weight 0, and a part of four in which all are."""
    fields: dict[str, Any] = {"model": Small(layers=1, pattern=1), **CASES[name]}
    objective = fields["objective"]
    batch = (sequences if objective.batch_kind == "sequences" else pairs)(8, seed=1)
    batch = batch._replace(weight=np.array([1, 0, 1, 1, 1, 0, 1, 1], np.float32))
    if isinstance(batch, PairBatch) and objective.batch_kind == "feedback":
        batch = batch._replace(desirable=np.array([1, 0, 1, 0, 0, 1, 1, 0], np.float32))
    actual: dict[int, Any] = {}
    for parts in (1, 2, 4) if name == "AOT, full" else (1, 4):
        program = compile(experiment(**fields, batch_size=8, microbatch_size=8 // parts))
        assert program.experiment.compares_parts == (parts > 1)
        first = trained(program)
        asked = precomputed.with_reference_logps(program, first, batch) if fields.get("memory") == CACHED else batch
        # Further from the reference, so that no margin is zero, with a full model as with an adapter.
        state = with_b(first)._replace(trainable=jax.tree.map(lambda x: 1.1 * x, with_b(first).trainable))
        state, metrics = program.step(state, asked)
        actual[parts] = jax.device_get((state.trainable, metrics))
    whole, whole_metrics = actual.pop(1)
    assert whole_metrics["grad_norm"] > 0.01
    for leaves, metrics in actual.values():
        assert metrics.keys() == whole_metrics.keys()
        for key, value in whole_metrics.items():
            # Rewards are small differences of log-probabilities of about 50, and have the rounding of those.
            atol = 5e-6 if key.startswith("reward") else 1e-7
            np.testing.assert_allclose(metrics[key], value, rtol=2e-6, atol=atol, err_msg=key)
        for path, value in whole.items():
            np.testing.assert_allclose(leaves[path], value, rtol=1e-6, atol=1e-6 * np.abs(value).max(), err_msg=path)
