"""LD-DPO: what lies beyond the length of the shorter completion counts less, alone and side by side, once or always."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np
import pytest
from small_lab.model import Small

from nnxdsl import Adapter, Experiment, Objective, SpecError, compile
from nnxdsl.config.core.base import declared, members
from nnxdsl.data.batch import PairBatch
from nnxdsl.losses.base import PairLogps
from nnxdsl.program import precomputed
from nnxdsl.program.compile import Program, TrainState

TAILED = ("DPO", "RobustDPO", "Hinge", "EXO", "DiscoPOP")
SHARE = 0.25


def program_of(experiment: Callable[..., Experiment], ld_alpha: float) -> Program:
    small = {"model": Small(layers=1, pattern=1), "adapter": Adapter.LoRA(rank=2)}
    return compile(experiment(objective=Objective.DPO(beta=0.5, ld_alpha=ld_alpha), **small))


def test_a_tail_counts_its_share(
    experiment: Callable[..., Experiment],
    pairs: Callable[..., PairBatch],
    trained: Callable[..., TrainState],
    with_b: Callable[[TrainState], TrainState],
) -> None:
    whole, tailed = (program_of(experiment, share) for share in (1.0, SHARE))
    state, batch = with_b(trained(whole)), pairs(4)
    shared = np.minimum(batch.chosen_length, batch.rejected_length)
    assert (batch.chosen_length != batch.rejected_length).any()
    cut = batch._replace(chosen_length=shared, rejected_length=shared)
    actual, every, beginnings = (
        p.score(state, b).loss_inputs for p, b in ((tailed, batch), (whole, batch), (whole, cut))
    )
    assert isinstance(actual, PairLogps)
    for side in ("chosen", "rejected"):
        expected = SHARE * getattr(every, f"{side}_logps") + (1 - SHARE) * getattr(beginnings, f"{side}_logps")
        np.testing.assert_allclose(getattr(actual, f"{side}_logps"), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(actual.chosen_tokens, batch.chosen_length)


@pytest.mark.slow
def test_a_step_with_tails_starts_like_any_other(
    experiment: Callable[..., Experiment], pairs: Callable[..., PairBatch], trained: Callable[..., TrainState]
) -> None:
    program, batch = program_of(experiment, SHARE), pairs(4)
    first = trained(program)
    for asked in (batch, precomputed.with_reference_logps(program, first, batch)):
        _, metrics = program.step(trained(program), asked)
        assert float(metrics["loss"]) == pytest.approx(np.log(2), abs=1e-7)
        assert float(metrics["rewards/margins"]) == pytest.approx(0, abs=1e-6)


def test_which_losses_have_tails() -> None:
    have = {n for n, cls in members(Objective).items() if cls is not Objective.Sum and "ld_alpha" in declared(cls)}
    assert have == set(TAILED)


def test_what_is_refused() -> None:
    with pytest.raises(SpecError) as caught:
        Objective.Sum(terms=(Objective.DPO(ld_alpha=0.5),), weights=(1.0,))
    assert "terms.0.ld_alpha: is not supported in a Sum, whose terms share one forward pass; set 1.0" in str(
        caught.value
    )
    with pytest.raises(SpecError) as caught:
        Objective.DPO(ld_alpha=1.5)
    assert "ld_alpha: expected a value >= 0 and <= 1, got 1.5" in str(caught.value)


def test_runs_from_before_keep_their_ids(experiment: Callable[..., Experiment]) -> None:
    before = experiment(objective=Objective.DPO())
    assert attrs.evolve(before, objective=Objective.DPO(ld_alpha=0.5)).id != before.id
    assert attrs.evolve(before, objective=Objective.DPO(ld_alpha=1.0)).id == before.id
