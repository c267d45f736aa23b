"""What XLA is told of a program: it is taken, saves memory, and is left out where it is not known."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import pytest

from nnxdsl import Experiment, Model, Objective, compile
from nnxdsl.data.batch import PairBatch, SequenceBatch
from nnxdsl.program import xla_options
from nnxdsl.program.compile import TrainState


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Nothing is known of options before and after."""
    xla_options.options.cache_clear()
    yield
    xla_options.options.cache_clear()


@pytest.mark.extended
def test_a_step_takes_less_memory_with_them_than_without(
    experiment: Callable[..., Experiment], sequences: Callable[..., SequenceBatch]
) -> None:
    """Of a model of some size: for one of a few kilobytes the other order takes less."""
    assert xla_options.options("cpu") == xla_options.OPTIONS["cpu"]
    program = compile(experiment(model=Model.Gemma3("tiny"), objective=Objective.SFT(loss_on="all")))
    state, batch = program.abstract(), program.shard_batch(sequences(4, length=48))
    inputs = state.trainable, state.frozen, state.reference, batch
    without, reported = (
        jax.jit(program.policy_loss.grads, compiler_options=options).lower(*inputs).compile().memory_analysis()
        for options in (None, xla_options.options("cpu"))
    )
    assert without is not None
    assert reported is not None
    assert reported.temp_size_in_bytes < without.temp_size_in_bytes


@pytest.mark.extended
@pytest.mark.usefixtures("forgotten")
def test_one_that_xla_does_not_know_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
    experiment: Callable[..., Experiment],
    pairs: Callable[..., PairBatch],
    trained: Callable[..., TrainState],
) -> None:
    monkeypatch.setitem(xla_options.OPTIONS, "cpu", {"xla_cpu_no_such_option": "1"})
    assert xla_options.options("cpu") is None
    program = compile(experiment())
    program.step(trained(program), pairs(4))


def test_other_platforms_are_told_nothing() -> None:
    assert xla_options.options("gpu") is None
