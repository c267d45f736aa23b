"""Steps that would do harm change nothing, to the bit, and are counted; what is usual goes by a window's median."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_lab.model import Small

from nnxdsl import Data, Experiment, Guard, Objective, Optimizer, Order, Schedule, Tokenizer, compile
from nnxdsl.optim import step_guard
from nnxdsl.program.checkpoint_views import checkpoint_arrays, checkpoint_targets, with_restored
from nnxdsl.program.compile import Program, TrainState
from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.run import run
from nnxdsl.trainer.trainer import TrainingError

ADAMW = Optimizer.AdamW(schedule=Schedule.WSD(peak_lr=1e-2, warmup_ratio=0.5))
REPLAY = Path(__file__).parents[1] / "reference" / "replay"


@pytest.fixture(scope="module")
def program(experiment: Callable[..., Experiment]) -> Callable[[Guard], Program]:
    """Compiles a small program with a guard, once for each."""

    @functools.cache
    def make(guard: Guard) -> Program:
        model = Small(layers=1, pattern=1)
        return compile(experiment(guard=guard, model=model, objective=Objective.SFT(loss_on="all"), optimizer=ADAMW))

    return make


def copied(state: TrainState) -> TrainState:
    """A state that a step may not take for its own."""
    return jax.tree.map(jnp.copy, state)


def same(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def poisoned(batch: Any) -> Any:
    """The batch with a token that is in no vocabulary, whose vector is NaN."""
    tokens = batch.tokens.copy()
    tokens[0, 0] = 10_000
    return batch._replace(tokens=tokens)


def test_a_step_that_is_not_finite_is_the_last_that_changes_anything(
    program: Callable[[Guard], Program], sequences: Callable[..., Any]
) -> None:
    halting = program(Guard.Stop())
    batch = sequences(4, length=16)
    good, metrics = halting.step(halting.init(), batch)
    assert math.isfinite(metrics["loss"])
    kept = copied(good)
    bad, metrics = halting.step(good, poisoned(batch))
    assert math.isnan(metrics["loss"])
    after, metrics = halting.step(bad, batch)  # in which the host learns of it
    assert math.isfinite(metrics["loss"])
    assert same((after.trainable, after.optimizer), (kept.trainable, kept.optimizer))
    assert int(after.step) == -2


@pytest.mark.extended
def test_a_skipped_step_is_no_step(program: Callable[[Guard], Program], sequences: Callable[..., Any]) -> None:
    skipping, plain = program(Guard.Skip()), program(Guard.Stop())
    first, second = (sequences(4, length=16, seed=seed) for seed in (0, 1))
    state, rates, reported = skipping.init(), [], []
    for batch in (first, poisoned(first), poisoned(second), second):
        before = copied(state)
        state, metrics = skipping.step(state, batch)
        is_same = same((state.trainable, state.optimizer.inner), (before.trainable, before.optimizer.inner))
        assert is_same == bool(metrics[step_guard.SKIPPED])
        rates.append(float(metrics["learning_rate"]))
        reported.append(
            tuple(int(metrics[name]) for name in (step_guard.SKIPPED, step_guard.IN_A_ROW, step_guard.TOTAL))
        )
        # What was counted is saved with the state, and goes on from there.
        saved = {
            part: {path: jnp.copy(x) for path, x in group.items()}
            for part, group in checkpoint_arrays(skipping, state).items()
        }
        state = with_restored(skipping, state, int(state.step), saved)
    assert reported == [(0, 0, 0), (1, 1, 1), (1, 2, 2), (0, 0, 2)]
    assert int(state.step) == 4
    expected, unguarded, plain_rates = skipping.init(), plain.init(), []
    for batch in (first, second):
        expected, _ = skipping.step(expected, batch)
        unguarded, metrics = plain.step(unguarded, batch)
        plain_rates.append(float(metrics["learning_rate"]))
    assert same((state.trainable, state.optimizer.inner), (expected.trainable, expected.optimizer.inner))
    for path, value in unguarded.trainable.items():  # of another program, in which XLA may round otherwise
        np.testing.assert_allclose(state.trainable[path], value, rtol=0, atol=1e-6)
    assert rates == [plain_rates[0], plain_rates[1], plain_rates[1], plain_rates[1]]


class Watched(NamedTuple):
    """A state of one number."""

    step: Any
    optimizer: Any
    weight: Any


@pytest.mark.parametrize("loss_ratio", [None, 3.0])
def test_spikes_are_told_by_the_median_of_a_window(loss_ratio: float | None) -> None:
    guard = step_guard.build(Guard.SkipSpikes(window=3, max_norm_ratio=4.0, max_loss_ratio=loss_ratio))
    update = guard.wrap(step_guard.optax.identity())
    norms = [1.0, 50.0, 1.2, 4.7, 4.9, math.nan, 30.0, 30.0, 30.0, 30.0, 1.0, math.inf, 2.0]
    losses = [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 7.0, 2.0, -1.0]
    before = Watched(jnp.int32(0), update.init(jnp.zeros(())), jnp.zeros(()))
    settle, window, taken, expected = jax.jit(guard.select), [], [], []
    for step, (norm, loss) in enumerate(zip(norms, losses, strict=True)):
        moved = before._replace(step=before.step + 1, weight=before.weight + 1)
        after, reported = settle(before, moved, jnp.float32(loss), jnp.float32(norm))
        taken.append(float(after.weight - before.weight) == 1)
        assert int(reported[step_guard.SKIPPED]) == (not taken[-1])
        assert int(after.step) == step + 1
        is_usual = math.isfinite(norm)
        if len(window) >= 3:
            last = np.array(window[-3:])
            is_usual &= norm <= 4 * np.median(last[:, 0])
            is_usual &= loss_ratio is None or loss <= loss_ratio * np.median(last[:, 1])
        expected.append(bool(is_usual))
        if math.isfinite(norm):
            window.append((norm, loss))
        before = after
    assert taken == expected
    assert taken[:10] == [True, True, True, True, True, False, False, False, True, True]  # what stays becomes usual
    assert taken[10] == (loss_ratio is None)
    assert int(before.optimizer.watch[step_guard.TOTAL]) == expected.count(False)


def diverging(guard: Guard) -> Experiment:
    return Experiment(
        name="diverging",
        model=Small(layers=1, pattern=1, vocab_size=320, tokenizer=Tokenizer.Bytes()),
        data=Data.Text(str(REPLAY / "texts.jsonl"), max_length=32, order=Order.AsInFile()),
        objective=Objective.SFT(loss_on="all"),
        optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=1e36), max_grad_norm=None),
        batch_size=4,
        steps=8,
        guard=guard,
    )


@pytest.mark.extended
def test_a_run_that_diverges_ends_with_the_weights_that_it_had(tmp_path: Path) -> None:
    experiment = diverging(Guard.Stop())
    with pytest.raises(TrainingError) as caught:
        run(experiment, tmp_path, Display(quiet=True))
    rows = [json.loads(line) for line in (tmp_path / experiment.id / "metrics.jsonl").read_text().splitlines()]
    bad = rows[-1]["step"]
    assert [math.isfinite(row["loss"] + row["grad_norm"]) for row in rows] == [True] * bad + [False]
    text = str(caught.value)
    assert text.startswith(f"step {bad}: loss is ")
    assert "; its rows begin with texts.jsonl:" in text.replace(str(REPLAY) + "/", "")
    assert f"; the state before it is saved as step {bad}; " in text
    with CheckpointReader(tmp_path / experiment.id / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [bad]
        program = compile(experiment)
        arrays = checkpoints.restore(bad, checkpoint_targets(program))
        assert all(np.isfinite(leaf).all() for leaf in arrays["trainable"].values())
        assert checkpoints.meta(bad)["tokens"] == rows[bad - 1]["num_tokens"]


@pytest.mark.slow
def test_a_run_ends_when_it_skips_more_steps_than_it_may(tmp_path: Path) -> None:
    experiment = diverging(Guard.Skip(max_in_a_row=2))
    with pytest.raises(TrainingError) as caught:
        run(experiment, tmp_path, Display(quiet=True))
    events = (tmp_path / experiment.id / "events.jsonl").read_text()
    assert "skipped, 1 in a row, 1 in all" in events
    assert "3 steps were skipped by step" in str(caught.value)
    assert "more than guard.max_in_a_row; there is no checkpoint yet" in str(caught.value)
