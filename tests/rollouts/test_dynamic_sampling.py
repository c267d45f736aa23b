"""Dynamic sampling: which groups a batch has, what it counts, and the same batches after a resume."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnxdsl import Data, Experiment, Objective, Optimizer, Reward, Schedule, SpecError, compile, reward
from nnxdsl.config.objectives.reward import functions
from nnxdsl.data import BytesTokenizer, Prompts, load
from nnxdsl.program.compile import Program
from nnxdsl.rollouts.dynamic_sampling import has_spread, select
from nnxdsl.rollouts.rollouts import Rollouts

sys.path.insert(0, str(Path(__file__).parents[1] / "packages"))

from small_lab.model import Small

NONE = float("nan")
ROWS = 12


def test_groups_with_a_spread_come_first() -> None:
    totals = np.array([1.0, 1.0, 0.0, 1.0, NONE, 3.0, 2.0, 2.5, NONE, NONE])
    assert has_spread(totals, 2).tolist() == [False, True, False, True, False]
    actual = select(totals, 2, 3)
    assert actual.indices.tolist() == [2, 3, 6, 7, 0, 1]
    assert actual.counts.tolist() == [True, True, True, True, False, False]
    assert select(totals, 2, 1).indices.tolist() == [2, 3]


@reward("spread of some prompts")
def spread_of_some(completion: str, level: int) -> float:
    """Of rows of level 0 the same for all completions; of the others not."""
    return 0.5 if level == 0 else sum(map(ord, completion)) % 97 / 97


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    path = tmp_path_factory.mktemp("rows") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say {n}: ", "level": n % 3 % 2}) + "\n" for n in range(ROWS)))
    result = load(Data.Prompts(str(path), max_completion_length=8), BytesTokenizer())
    assert isinstance(result, Prompts)
    return result


@pytest.fixture(scope="module")
def program(prompts: Prompts) -> Program:
    objective = Objective.DAPO(
        rewards=(Reward("spread of some prompts"),), num_generations=2, num_iterations=2, max_num_gen_batches=6
    )
    return compile(
        Experiment(
            name="dynamic",
            model=Small(layers=1, pattern=1, vocab_size=320),
            objective=objective,
            data=Data.Prompts(prompts.report.source, max_prompt_length=32, max_completion_length=8),
            optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
            batch_size=6,
            steps=8,
        )
    )


def levels(prompts: Prompts, rollout: Any) -> list[int]:
    return [prompts.columns[one.row]["level"] for one in rollout.episodes]


def test_a_batch_has_groups_with_a_spread(program: Program, prompts: Prompts) -> None:
    state, made = program.init(), Rollouts.of(program, prompts, BytesTokenizer())
    sampled = []
    for step in (0, 2, 4):
        rollout = made.rollout_at(step, state)
        assert levels(prompts, rollout) == [1] * 6
        assert rollout.batch.weight.tolist() == [1] * 6
        assert rollout.metrics["sampling/num_groups"] == 3
        assert made.row_ids(step) == [prompts.row_ids[row] for row in dict.fromkeys(rollout.rows)]
        sampled.append(rollout.metrics["sampling/num_gen_batches"])
        state, _ = program.step(state, made.train_batch(rollout.batch))
    # A third of the prompts has a spread; each step goes on in the order where the one before it stopped.
    assert min(sampled) > 1
    assert made.state(6)["extra_batches"] == sum(sampled) - len(sampled)


@pytest.mark.extended
def test_a_resumed_run_samples_the_same(program: Program, prompts: Prompts) -> None:
    state, whole = program.init(), Rollouts.of(program, prompts, BytesTokenizer())
    whole.rollout_at(0, state)
    between, after = (json.loads(json.dumps(whole.state(step))) for step in (1, 2))
    expected = [whole.rollout_at(step, state) for step in (0, 2)]
    for stored, step, other in ((between, 1, expected[0]), (after, 2, expected[1])):
        resumed = Rollouts.of(program, prompts, BytesTokenizer())
        assert resumed.check(stored) == step
        actual = resumed.rollout_at(step, state)
        assert (actual.rows, actual.metrics) == (other.rows, other.metrics)
        assert all(np.array_equal(one, two) for one, two in zip(actual.batch, other.batch, strict=True))
        assert resumed.row_ids(step) == [prompts.row_ids[row] for row in dict.fromkeys(other.rows)]
    assert resumed.rollout_at(2, state).rows == expected[1].rows


@pytest.mark.parametrize("count", [0, 1])
def test_missing_groups_leave_the_batch_smaller(
    program: Program, prompts: Prompts, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def only(completion: str, level: int) -> float:
        """A spread in the first group alone, or in none."""
        seen.append(completion)
        return float(len(seen)) if len(seen) <= 2 * count else 0.5

    monkeypatch.setitem(functions, "spread of some prompts", only)
    state, made = program.init(), Rollouts.of(program, prompts, BytesTokenizer())
    rollout = made.rollout_at(0, state)
    assert len(seen) == 6 * 6  # as many batches as it may
    assert rollout.metrics["sampling/num_groups"] == count
    assert rollout.metrics["frac_reward_zero_std"] == pytest.approx(1 - count / 18)
    assert rollout.batch.weight.tolist() == [1] * 2 * count + [0] * (6 - 2 * count)
    batch = rollout.batch
    _, metrics = program.step(state, made.train_batch(batch))
    mask = batch.loss_mask * batch.weight[:, None]
    expected = -(batch.advantages * mask).sum() / max(mask.sum(), 1)
    assert float(metrics["loss"]) == pytest.approx(expected, abs=1e-6)
    assert (float(metrics["grad_norm"]) > 0) == (count > 0)


def test_what_learns_from_equal_rewards_has_none_of_it() -> None:
    with pytest.raises(SpecError, match=r"max_num_gen_batches: .* leave it out, or set baseline='mean'"):
        Objective.ReinforcePlusPlus(rewards=(Reward("x"),), max_num_gen_batches=2)
    Objective.ReinforcePlusPlus(rewards=(Reward("x"),), max_num_gen_batches=2, baseline="mean")
