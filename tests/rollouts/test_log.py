"""The log of rollouts: which are written, their fields, and each once after a resume."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnxdsl
from nnxdsl import (
    Checkpoint,
    Data,
    Experiment,
    Model,
    Objective,
    Optimizer,
    Reward,
    RolloutLog,
    RunError,
    Schedule,
    SpecError,
    evolve,
    reward,
)
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.hooks.base import Hook
from nnxdsl.trainer.run import run
from nnxdsl.trainer.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "packages"))

from small_lab.model import Small

STEPS = 8


@reward("even letters")
def even_letters(completion: str) -> float:
    return sum(ord(letter) % 2 == 0 for letter in completion) / 8


@reward("tokens of a row")
def tokens_of_a_row(completion: str, number: int) -> float:
    return float(len(completion.encode()) > number)


@reward("judge")
async def judge(completions: list[str], number: list[int], log_metric: Any, log_extra: Any) -> list[float | None]:
    """As TRL's functions are: of all completions; it does not apply to every second row."""
    log_metric("judge/letters", sum(map(len, completions)))
    log_extra("letters", [len(text) for text in completions])
    return [None if each % 2 else float(len(text)) for text, each in zip(completions, number, strict=True)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rollouts")


def experiment(place: Path, name: str, log: RolloutLog) -> Experiment:
    """Two steps on the completions of each draw, and checkpoints between such steps as well."""
    rows = [json.dumps({"prompt": f"Say {number}: ", "number": number}) + "\n" for number in range(6)]
    (place / "prompts.jsonl").write_text("".join(rows))
    return Experiment(
        name=name,
        model=Small(layers=1, pattern=1, vocab_size=320),
        objective=Objective.GRPO(
            rewards=(Reward("even letters", weight=2.0), Reward("tokens of a row"), Reward("judge", weight=0.25)),
            num_generations=2,
            num_iterations=2,
            beta=0.0,
        ),
        data=Data.Prompts(str(place / "prompts.jsonl"), max_prompt_length=32, max_completion_length=8),
        optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
        batch_size=4,
        steps=STEPS,
        checkpoint=Checkpoint(every_steps=3, keep=5),
        rollouts=log,
    )


class Killed(BaseException):
    """Ends a run as a kill does: nothing is saved."""


class KillAt(Hook):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.step == self.step:
            raise Killed


def trained(made: Experiment, home: Path, *, killed_at: tuple[int, ...] = ()) -> Any:
    for step in killed_at:
        with pytest.raises(Killed):
            run(made, home, Display(quiet=True), hooks=[KillAt(step)])
    return made.run(home, quiet=True)


def lines(result: Any, name: str, *without: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (result.directory / name).read_text().splitlines()]
    timed = ("attempt", "samples/s", "tokens/s", "peak_memory_gib", "step_seconds", *without)
    return [{key: value for key, value in row.items() if key not in timed and not key.endswith("/s")} for row in rows]


@pytest.mark.slow
def test_each_rollout_is_written_once_and_changes_nothing(place: Path) -> None:
    home = place / "runs"
    log = RolloutLog(every_steps=3, prompts=1)
    whole = trained(experiment(place, "whole", log), home)
    parts = trained(experiment(place, "parts", log), home, killed_at=(5, 7))
    without = trained(experiment(place, "without", RolloutLog(every_steps=None)), home)
    assert not (without.directory / "rollouts.jsonl").exists()
    # Steps 0, 3 and 6 train on what was sampled at steps 0, 2 and 6.
    assert [(row["step"], row["group"]) for row in whole.rollouts] == [(0, 0), (2, 0), (6, 0)]
    assert [row["attempt"] for row in parts.rollouts] == [1, 1, 3]
    assert lines(parts, "rollouts.jsonl") == lines(whole, "rollouts.jsonl")
    metrics = lines(whole, "metrics.jsonl")
    assert len(metrics) == STEPS
    assert lines(parts, "metrics.jsonl") == lines(without, "metrics.jsonl") == metrics


@pytest.mark.extended
def test_a_row_has_what_the_step_trained_on(place: Path) -> None:
    made = experiment(place, "all-prompts", RolloutLog(every_steps=1, prompts=100))
    result = trained(made, place / "runs")
    assert [(row["step"], row["group"]) for row in result.rollouts] == [(s, g) for s in (0, 2, 4, 6) for g in (0, 1)]
    by_step = {row["step"]: row for row in result.metrics}
    for step in (0, 2, 4, 6):
        rows = [row for row in result.rollouts if row["step"] == step]
        every = [one for row in rows for one in row["completions"]]
        assert len(every) == made.batch_size
        for row in rows:
            number = int(row["row"].rpartition(":")[2]) - 1
            assert row["prompt"] == f"<bos>Say {number}: "
            totals = np.array([one["reward"] for one in row["completions"]])
            expected = (totals - totals.mean()) / (totals.std(ddof=1) + 1e-4)
            np.testing.assert_allclose([one["advantage"] for one in row["completions"]], expected, rtol=1e-6)
            for one in row["completions"]:
                text = one["text"]
                named = {"even letters": even_letters(text), "tokens of a row": tokens_of_a_row(text, number)}
                judged = None if number % 2 else float(len(text))
                assert one["rewards"] == {**named, "judge": judged}
                assert one["reward"] == 2 * named["even letters"] + named["tokens of a row"] + 0.25 * (judged or 0)
                assert one["extra"] == {"letters": len(text)}
        recorded = by_step[step]
        assert np.mean([one["reward"] for one in every]) == pytest.approx(recorded["reward"], rel=1e-12)
        assert np.mean([one["length"] for one in every]) == recorded["completions/mean_length"]
        assert sum(one["extra"]["letters"] for one in every) == recorded["judge/letters"]
        assert np.mean([one["truncated"] for one in every]) == pytest.approx(recorded["completions/clipped_ratio"])


@pytest.mark.extended
def test_completions_without_any_reward_are_told(place: Path) -> None:
    made = experiment(place, "unscored", RolloutLog(every_steps=1))
    made = evolve(made, {"objective": Objective.GRPO(rewards=(Reward("judge"),), num_generations=2, beta=0.0)})
    result = trained(made, place / "runs")
    lost = [row for row in result.rollouts if row["completions"][0]["reward"] is None]
    assert all(one["advantage"] == 0 for row in lost for one in row["completions"])
    events = [json.loads(line)["event"] for line in (result.directory / "events.jsonl").read_text().splitlines()]
    (reported,) = [event for event in events if "no reward applies" in event]
    first = f"step {lost[0]['step']}: no reward applies to a completion of {lost[0]['row']} and "
    assert reported.startswith(first)
    assert reported.endswith(" others; advantages are 0")
    assert (result.directory / "log.txt").read_text().count("no reward applies") == len({row["step"] for row in lost})


@pytest.mark.extended
@pytest.mark.parametrize("metric", ["loss", "samples/s"])
def test_a_metric_of_the_run_is_none_of_a_reward(metric: str, place: Path) -> None:
    @reward("misnamed")
    def misnamed(completion: str, log_metric: Any) -> float:
        log_metric(metric, 1.0)
        return 1.0

    made = experiment(place, "misnamed", RolloutLog())
    made = evolve(made, {"objective": Objective.GRPO(rewards=(Reward("misnamed"),), num_generations=2, beta=0.0)})
    with pytest.raises(RunError, match=f"^step 0: '{metric}' is a metric of the run itself; give that of log_metric"):
        run(made, place / metric.replace("/", " "), Display(quiet=True))


def test_settings_without_effect_are_refused() -> None:
    fields = {
        "name": "sft",
        "model": Model.Gemma3("tiny"),
        "objective": Objective.SFT(loss_on="all"),
        "data": Data.Text("text.jsonl"),
        "steps": 1,
    }
    with pytest.raises(SpecError, match=r"rollouts: Objective.SFT samples no completions that could be written"):
        Experiment(**fields, rollouts=RolloutLog(every_steps=1))
    with pytest.raises(SpecError, match=r"prompts: has no effect with every_steps=None"):
        RolloutLog(every_steps=None, prompts=2)
    made = Experiment(**fields)
    assert nnxdsl.to_python(made).count("rollouts") == 0
    with pytest.raises(SpecError, match=r"rollouts.every_steps: expected a value > 0, got 0"):
        evolve(made, {"rollouts.every_steps": 0})
