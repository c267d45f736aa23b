"""When checkpoints are saved, and the message about lost steps when an attempt starts again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "packages"))

from small_lab.model import Small

from nnxdsl import Checkpoint, Data, Evaluation, Experiment, Objective, Optimizer, Schedule, SpecError, Tokenizer
from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.hooks.base import Hook
from nnxdsl.trainer.run import run
from nnxdsl.trainer.trainer import Trainer

TEXTS = Data.Text(str(Path(__file__).parents[1] / "reference" / "replay" / "texts.jsonl"), max_length=16)
SMALL = Experiment(
    name="small",
    model=Small(layers=1, pattern=1, vocab_size=320, tokenizer=Tokenizer.Bytes()),
    objective=Objective.SFT(loss_on="all"),
    data=TEXTS,
    optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
    batch_size=2,
    steps=6,
)


class Killed(BaseException):
    """Ends a process as nothing of ours does."""


@attrs.define
class KillAt(Hook):
    """Ends the loop between two steps, with nothing saved."""

    step: int

    def on_step_begin(self, trainer: Trainer) -> None:
        if trainer.step == self.step:
            trainer.flush_metrics()
            raise Killed


def steps(home: Path) -> list[int]:
    with CheckpointReader(home / SMALL.id / "checkpoints") as checkpoints:
        return checkpoints.steps()


def events(home: Path) -> list[str]:
    lines = (home / SMALL.id / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["event"] for line in lines]


@pytest.mark.default_variants(1)
@pytest.mark.parametrize(
    ("every_minutes", "evaluation", "saved"),
    [
        (1e-9, None, [2, 4, 6]),  # as soon as the processes can have agreed on it
        (None, None, [6]),
        (None, Evaluation(data=TEXTS, every_steps=4, prompts=("a",), max_new_tokens=8), [4, 6]),
        (1e9, None, [6]),
    ],
)
def test_a_state_is_saved_by_time_and_before_evaluations(
    every_minutes: float | None, evaluation: Any, saved: list[int], tmp_path: Path
) -> None:
    often = Checkpoint(every_steps=100, every_minutes=every_minutes, keep=9)
    reported = attrs.evolve(SMALL, checkpoint=often, evaluation=evaluation)
    assert reported.id == SMALL.id
    run(reported, tmp_path, Display(quiet=True))
    assert steps(tmp_path) == saved


@pytest.mark.extended
@pytest.mark.parametrize(
    ("every_steps", "start", "why"),
    [(100, 0, "it ended before its first checkpoint"), (3, 3, "its last whole checkpoint is step 3")],
)
def test_what_a_kill_has_cost_is_said_and_computed_again(
    every_steps: int, start: int, why: str, tmp_path: Path
) -> None:
    reported = attrs.evolve(SMALL, checkpoint=Checkpoint(every_steps=every_steps, every_minutes=None))
    with pytest.raises(Killed):
        run(reported, tmp_path / "killed", Display(quiet=True), hooks=[KillAt(5)])
    run(reported, tmp_path / "killed", Display(quiet=True))
    lost = [event for event in events(tmp_path / "killed") if "lost" in event]
    cadence = f"(checkpoint.every_steps={every_steps}, checkpoint.every_minutes=None)"
    assert lost == [f"the {5 - start} steps from {start} of the attempt before are lost: {why} {cadence}"]
    run(reported, tmp_path / "whole", Display(quiet=True))
    assert not [event for event in events(tmp_path / "whole") if "lost" in event]
    killed, whole = (RunDirectory(tmp_path / name / SMALL.id).metrics() for name in ("killed", "whole"))
    assert [row["loss"] for row in killed] == [row["loss"] for row in whole]


def test_time_counts_unless_it_is_unset() -> None:
    assert Checkpoint().every_minutes == 10.0
    with pytest.raises(SpecError, match="every_minutes"):
        Checkpoint(every_minutes=0.0)
