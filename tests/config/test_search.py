"""Searches, ranges and launchers report all of their problems at construction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from nnxdsl import Data, Evaluation, Launcher, Objective, Pruner, Range, Search, SpecError, Sweep, product

RATE = "optimizer.schedule.peak_lr"


def refused(make: Callable[[], object]) -> str:
    with pytest.raises(SpecError) as caught:
        make()
    return str(caught.value)


@pytest.fixture
def base(design: Any) -> Any:
    held_out = Data.Preferences("held_out.jsonl")
    return design(evaluation=Evaluation(every_steps=200, data=held_out))


def test_a_search_says_all_that_is_wrong(base: Any, design: Any) -> None:
    space = {
        "objective.bta": Range.Float(0.1, 0.5),
        "adapter.rank": Range.Float(4, 8),
        RATE: (),
        "steps": [10, "20"],
        "seed": 3,
    }
    assert refused(lambda: Search(base, space, trials=0, metric="eval/loss", direction="down")) == (
        "8 problems in Search from 'dpo-gemma3-1b'\n"
        "  trials: expected a whole number >= 1, got 0\n"
        "  direction: expected 'minimize' or 'maximize', got 'down'\n"
        "  space.objective.bta: DPO has no field 'bta'; did you mean 'beta'?\n"
        "  space.adapter.rank: expected int, got 4.0\n"
        "  space.adapter.rank: expected int, got 8.0\n"
        f"  space.{RATE}: has no values\n"
        "  space.steps: expected int, got '20'\n"
        "  space.seed: expected a Range or a list of values, got 3"
    )
    asked: dict[str, Any] = {"trials": 3, "metric": "eval/loss", "direction": "minimize"}
    alone = {RATE: Range.Log(1e-6, 1e-4)}
    assert refused(lambda: Search(design(), alone, **asked)) == (
        "1 problem in Search from 'dpo-gemma3-1b'\n"
        "  metric: 'eval/loss' needs an evaluation with data, and the experiment has none"
    )
    late = attrs.evolve(base, evaluation=attrs.evolve(base.evaluation, every_steps=2000))
    assert refused(lambda: Search(late, alone, **asked, pruner=Pruner.Median())) == (
        "1 problem in Search from 'dpo-gemma3-1b'\n"
        "  pruner: has no effect: there is no evaluation before the end of 2000 steps"
    )
    assert refused(lambda: Search(base, alone, **{**asked, "metric": "loss"}, pruner=Pruner.Median())) == (
        "1 problem in Search from 'dpo-gemma3-1b'\n"
        "  pruner: needs an evaluation metric (eval/...), but the metric is 'loss'"
    )


def test_a_search_is_another_one_if_it_would_try_others(base: Any) -> None:
    asked: dict[str, Any] = {"trials": 3, "metric": "eval/loss", "direction": "minimize"}
    space = {RATE: Range.Log(1e-6, 1e-4), "objective": [Objective.DPO(beta=0.1), Objective.IPO(tau=0.1)]}
    search = Search(base, space, **asked)
    assert search.digest == Search(base, space, **{**asked, "trials": 9}).digest
    assert search.digest == Search(attrs.evolve(base, name="other", notes="!"), space, **asked).digest
    others = [
        Search(base, {**space, RATE: Range.Float(1e-6, 1e-4)}, **asked),
        Search(base, {**space, "objective": [Objective.DPO(beta=0.1)]}, **asked),
        Search(base, space, **asked, seed=1),
        Search(base, space, **asked, sampler="random"),
        Search(base, space, **asked, pruner=Pruner.Halving(first_step=200)),
        Search(base, space, **{**asked, "direction": "maximize"}),
        Search(attrs.evolve(base, steps=base.steps + 1), space, **asked),
    ]
    assert len({search.digest, *(other.digest for other in others)}) == 1 + len(others)


def test_a_sweep_is_another_one_if_its_points_are(base: Any) -> None:
    sweep = Sweep(base, product({"seed": [0, 1]}))
    assert sweep.digest == Sweep(base, product({"seed": [0, 1]}), metric="eval/loss", direction="minimize").digest
    assert sweep.digest != Sweep(base, product({"seed": [1, 0]})).digest
    assert refused(lambda: Sweep(base, product({"seed": [0]}), direction="down")) == (
        "2 problems in Sweep of 'dpo-gemma3-1b'\n"
        "  direction: expected 'minimize' or 'maximize', got 'down'\n"
        "  direction: has no effect without a metric"
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Range.Float(2.0, 1), "Range.Float\n  high: expected more than low=2, got 1"),
        (lambda: Range.Float(-1e308, 1e308), "Range.Float\n  high: is too far from low"),
        (lambda: Range.Log(0, 1), "Range.Log\n  low: expected a value > 0, got 0.0"),
        (lambda: Range.Int(1, 10, step=4), "Range.Int\n  step: steps of 4 from 1 do not lead to 10"),
        (lambda: Launcher.Local(parallel=0), "Launcher.Local\n  parallel: expected a value > 0, got 0"),
        (
            lambda: Launcher.Slurm(memory="64 GB"),
            "Launcher.Slurm\n  memory: expected a size such as '64GB' or '512MB', got '64 GB'",
        ),
        (
            lambda: Launcher.Slurm(cluster="local", nodes=2),
            "Launcher.Slurm\n  nodes: must be 1 with cluster='local', where one process is one run",
        ),
        (
            lambda: Launcher.Slurm(cluster="local", partition="gpu"),
            "Launcher.Slurm\n  partition: has no effect with cluster='local'",
        ),
        (
            lambda: Launcher.Slurm(options=(("gres=gpu:1\n", "x"),)),
            "Launcher.Slurm\n  options.0.0: expected the name of an option of sbatch, got 'gres=gpu:1\\n'",
        ),
    ],
)
def test_what_cannot_be(make: Callable[[], object], said: str) -> None:
    assert refused(make) == f"1 problem in {said}"
