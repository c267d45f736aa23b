"""Metrics of rewards and lengths, by hand, where some rewards do not apply."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import attrs
import numpy as np
import pytest

from nnxdsl import (
    Data,
    DataError,
    Experiment,
    Objective,
    Optimizer,
    Reward,
    RunError,
    Schedule,
    compile,
    evolve,
    reward,
)
from nnxdsl.data import BytesTokenizer, Prompts, load
from nnxdsl.rollouts.episode import Episode
from nnxdsl.rollouts.log import group_rows, unscored
from nnxdsl.rollouts.metrics import episode_metrics, group_metrics
from nnxdsl.rollouts.rollout import Rollout
from nnxdsl.rollouts.rollouts import Rollouts
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.run import run

sys.path.insert(0, str(Path(__file__).parents[1] / "packages"))

from small_lab.model import Small

NONE = float("nan")
END = BytesTokenizer().eos_id


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Rollouts:
    path = tmp_path_factory.mktemp("rows") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say {n}: ", "answer": str(n)}) + "\n" for n in range(4)))
    data = Data.Prompts(str(path), max_prompt_length=32, max_completion_length=8)
    prompts = load(data, BytesTokenizer())
    assert isinstance(prompts, Prompts)
    made = Experiment(
        name="grpo",
        model=Small(layers=1, pattern=1, vocab_size=320),
        objective=Objective.GRPO(
            rewards=(Reward("exact_answer", weight=2.0), Reward("contains_answer")), num_generations=3, beta=0.0
        ),
        data=data,
        optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
        batch_size=6,
        steps=2,
    )
    return Rollouts.of(compile(made), prompts, BytesTokenizer())


@pytest.mark.parametrize("column", ["completion", "completions"])
def test_a_column_with_the_name_of_the_answer_is_refused_before_a_run(
    rollouts: Rollouts, tmp_path: Path, column: str
) -> None:
    @reward("all at once")
    def all_at_once(completions: list[str], **columns: list[object]) -> list[float]:
        return [0.0 for _ in completions]

    rows = [{"prompt": f"Say {number}: ", "answer": "1", column: "noise"} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = Reward("all at once") if column == "completions" else Reward("exact_answer")
    made = evolve(
        rollouts.program.experiment, {"data.path": str(tmp_path / "rows.jsonl"), "objective.rewards": (chosen,)}
    )
    with pytest.raises(DataError, match=rf"rows.jsonl:1: the column '{column}' has the name of a parameter"):
        run(made, tmp_path / "runs", Display(quiet=True))
    assert not list(tmp_path.glob("runs/*/checkpoints"))


VALUES = [[1.0, 1.0], [NONE, 4.0], [2.0, NONE], [1.0, 1.0], [NONE, NONE], [1.0, 1.0]]
"""Of two groups: totals 3, 4 and 4; and 3, none and 3."""
ANSWERS = [[5, END], [5, 6, 7, 8], [END], [5, 5, END], [5, 5, 5, 5], [5, END]]


ROWS = [2, 2, 2, 3, 3, 3]


def episodes(values: list[list[float]], answers: list[list[int]]) -> list[Episode]:
    return [
        Episode(
            row=row,
            ids=ids,
            is_sampled=[True] * len(ids),
            logps=np.zeros(len(ids)),
            is_truncated=ids[-1] != END,
            text="a",
            turns=(),
            rewards=tuple(rewards),
            extra={"seen": index},
        )
        for index, (row, rewards, ids) in enumerate(zip(ROWS, values, answers, strict=False))
    ]


def test_metrics_by_hand(rollouts: Rollouts) -> None:
    inputs = episodes(VALUES, ANSWERS)
    actual = episode_metrics(inputs, rollouts.rewards, {"mine": [1.0, 2.0, 6.0]})
    actual |= group_metrics(inputs, rollouts.rewards, 3)
    assert actual == pytest.approx(
        {
            "reward": 17 / 5,
            "reward_std": np.std([3, 4, 4, 3, 3], ddof=1),
            "rewards/exact_answer/mean": 5 / 4,
            "rewards/exact_answer/std": np.std([1, 2, 1, 1], ddof=1),
            "rewards/contains_answer/mean": 7 / 4,
            "rewards/contains_answer/std": np.std([1, 4, 1, 1], ddof=1),
            "frac_reward_zero_std": 0.5,
            "completions/mean_length": 16 / 6,
            "completions/min_length": 1,
            "completions/max_length": 4,
            "completions/mean_terminated_length": 8 / 4,
            "completions/min_terminated_length": 1,
            "completions/max_terminated_length": 3,
            "completions/clipped_ratio": 2 / 6,
            "mine": 3.0,
        }
    )


def test_a_mean_over_nothing_is_left_out(rollouts: Rollouts) -> None:
    inputs = episodes([[NONE, NONE]] * 3, [[5, 5]] * 3)
    actual = episode_metrics(inputs, rollouts.rewards, {}) | group_metrics(inputs, rollouts.rewards, 3)
    assert [name for name in actual if "reward" in name] == ["frac_reward_zero_std"]
    assert actual["frac_reward_zero_std"] == 1
    assert not [name for name in actual if "terminated" in name]
    assert actual["completions/clipped_ratio"] == 1
    silent, calling = ([attrs.evolve(one, calls=calls, failures=1) for one in inputs] for calls in (0, 2))
    assert "tools/failure_frequency" not in episode_metrics(silent, rollouts.rewards, {})
    assert episode_metrics(silent, rollouts.rewards, {})["tools/call_frequency"] == 0
    assert episode_metrics(calling, rollouts.rewards, {})["tools/failure_frequency"] == 1 / 2
    one = episode_metrics(episodes([[1.0, NONE]], [[END]]), rollouts.rewards, {})
    assert (one["reward"], one["reward_std"], one["rewards/exact_answer/std"]) == (2.0, 0.0, 0.0)
    assert "rewards/contains_answer/mean" not in one


def test_completions_without_a_reward_are_named(rollouts: Rollouts) -> None:
    batch = rollouts.prompts.rollout_batch(ROWS, ANSWERS)
    rollout = Rollout(0, ROWS, batch, {}, episodes(VALUES, ANSWERS))
    assert [row.rpartition(":")[2] for row in unscored(rollouts, rollout)] == ["4"]
    first, second = group_rows(rollouts, rollout, 2)
    assert [one["reward"] for one in (*first["completions"], *second["completions"])] == [3, 4, 4, 3, None, 3]
    assert second["completions"][1]["rewards"] == {"exact_answer": None, "contains_answer": None}
    assert first["completions"][2]["extra"] == {"seen": 2}
    json.dumps([first, second], allow_nan=False)
    assert all(isinstance(one["advantage"], float) for one in first["completions"])


def test_completions_of_distillation_have_no_advantage(rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = Rollout(0, ROWS, rollouts.prompts.rollout_batch(ROWS, ANSWERS), {}, episodes(VALUES, ANSWERS))
    distill = Objective.OnPolicyDistill(teacher=rollouts.program.experiment.model, num_generations=3)
    monkeypatch.setattr(type(rollouts), "objective", distill)
    (row,) = group_rows(rollouts, rollout, 1)
    assert [one["advantage"] for one in row["completions"]] == [None] * 3


@pytest.mark.parametrize("name", ["reward", "step", "completions/mean_length"])
def test_a_metric_of_the_run_is_no_name_for_another(rollouts: Rollouts, name: str) -> None:
    with pytest.raises(RunError, match=f"log_metric: '{name}' is a metric of the run itself; give yours another name"):
        episode_metrics(episodes(VALUES, ANSWERS), rollouts.rewards, {name: [1.0]})
