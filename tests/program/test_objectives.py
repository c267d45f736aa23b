"""Every objective of pairs in a small model: adapters learn, what is frozen stays, and batching changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from small_lab.model import Small

from nnxdsl import Adapter, Divergence, Experiment, Objective, compile, losses
from nnxdsl.config.core.base import members
from nnxdsl.data import Pairs
from nnxdsl.data.dataset import TokenizedRows
from nnxdsl.data.loaders.report import Report
from nnxdsl.data.packing import Size, fit
from nnxdsl.data.ragged import RaggedBuilder
from nnxdsl.losses.base import WeightedMean
from nnxdsl.program.compile import Program, TrainState

RPO = Objective.Sum(terms=(Objective.DPO(), Objective.ChosenSFT()), weights=(1.0, 0.2))
ALL: dict[str, Any] = {
    **{
        name: cls()
        for name, cls in members(Objective).items()
        if cls.batch_kind == "pairs" and cls is not Objective.Sum
    },
    "Sum": RPO,
    "JensenShannon": Objective.DPO(divergence=Divergence.JensenShannon()),
}
LENGTHS = [(5, 7, 2), (11, 3, 9), (2, 1, 16), (16, 12, 8)]


def dataset() -> Pairs:
    draw = np.random.default_rng(1)
    parts = {}
    for index, name in enumerate(("prompt", "chosen", "rejected")):
        builder = RaggedBuilder()
        for lengths in LENGTHS:
            builder.add(draw.integers(1, 48, lengths[index]).tolist())
        parts[name] = builder.build()
    size = len(LENGTHS)
    report = Report(source="rows.jsonl", rows=size, accepted=size, cut={}, dropped={}, odd={}, first={}, lengths={})
    return Pairs(
        TokenizedRows(parts, [f"rows.jsonl:{row + 1}" for row in range(size)], report, "digest", is_chat=False)
    )


def mean(ratio: WeightedMean) -> float:
    return float(ratio.total) / float(ratio.count)


def program_of(objective: Any, experiment: Callable[..., Experiment]) -> Program:
    fields = {"model": Small(layers=1, pattern=1), "adapter": Adapter.LoRA(rank=2), "microbatch_size": 2}
    return compile(experiment(objective=objective, **fields))


@pytest.mark.extended
@pytest.mark.parametrize("name", [n if n == "Sum" else pytest.param(n, marks=pytest.mark.slow) for n in ALL])
def test_it_trains(
    name: str,
    experiment: Callable[..., Experiment],
    trained: Callable[..., TrainState],
    with_b: Callable[[TrainState], TrainState],
) -> None:
    objective = ALL[name]
    program, batch = program_of(objective, experiment), dataset().batch(np.arange(len(LENGTHS)), 4)
    first = trained(program)
    assert first.reference == {}  # an adapter's base is its reference
    assert (program.reference(first) is None) == (not objective.needs_reference)
    state = with_b(first)

    # The loss of all rows at one time, from what both models say of them.
    policy, reference = program.score(state, batch).loss_inputs, program.score(first, batch).loss_inputs
    assert isinstance(policy, losses.PairLogps)
    whole = losses.build(objective)(policy, reference if objective.needs_reference else None, np.ones(4, np.float32))
    before, frozen = jax.device_get((state.trainable, state.frozen))
    state, metrics = program.step(state, batch)  # in two parts
    assert float(metrics["loss"]) == pytest.approx(mean(whole.loss), rel=1e-5)
    for metric, ratio in whole.metrics.items():
        assert float(metrics[metric]) == pytest.approx(mean(ratio), rel=1e-5, abs=1e-5), metric

    for _ in range(2):
        assert all(np.isfinite(value) for value in metrics.values())
        state, metrics = program.step(state, batch)
    for path, leaf in frozen.items():
        np.testing.assert_array_equal(state.frozen[path], leaf, err_msg=path)
    assert all(np.isfinite(leaf).all() for leaf in state.trainable.values())
    assert all((np.asarray(state.trainable[path]) != leaf).any() for path, leaf in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["IPO", "AOT", "ORPO", "Sum"])
def test_pairs_side_by_side_are_pairs_alone(
    name: str,
    experiment: Callable[..., Experiment],
    trained: Callable[..., TrainState],
    with_b: Callable[[TrainState], TrainState],
) -> None:
    program = program_of(ALL[name], experiment)
    state, pairs, rows = with_b(trained(program)), dataset(), np.arange(len(LENGTHS))
    size = Size(blocks=2, rows=2, length=48, targets=96, items=4)
    layout = fit(*pairs.packing_lengths(), size)
    assert layout is not None
    gradients = jax.jit(program.policy_loss.grads)
    arrays = state.trainable, state.frozen, state.reference
    (alone, terms), (beside, others) = (
        jax.device_get(gradients(*arrays, batch)) for batch in (pairs.batch(rows, 4), pairs.packed(rows, size, layout))
    )
    assert mean(others.loss) == pytest.approx(mean(terms.loss), rel=1e-5)
    for metric, ratio in terms.metrics.items():
        assert mean(others.metrics[metric]) == pytest.approx(mean(ratio), rel=1e-5, abs=1e-5), metric
    scale = max(np.abs(leaf).max() for leaf in alone.values())
    for path, leaf in alone.items():
        np.testing.assert_allclose(beside[path], leaf, rtol=1e-4, atol=1e-4 * scale, err_msg=path)
