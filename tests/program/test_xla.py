"""What XLA is told of a program: it is taken, saves memory, and is left out where it is not known."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import pytest

from nnxdsl import Experiment, compile
from nnxdsl.data.batch import PairBatch
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
    experiment: Callable[..., Experiment], pairs: Callable[..., PairBatch], trained: Callable[..., TrainState]
) -> None:
    assert xla_options.options("cpu") == xla_options.OPTIONS["cpu"]
    program = compile(experiment())
    state, batch = trained(program), program.shard_batch(pairs(4))
    given = state.trainable, state.frozen, state.reference, batch
    without, told = (
        jax.jit(program.policy_loss.grads, compiler_options=options).lower(*given).compile().memory_analysis()
        for options in (None, xla_options.options("cpu"))
    )
    assert without is not None
    assert told is not None
    assert told.temp_size_in_bytes < without.temp_size_in_bytes


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
