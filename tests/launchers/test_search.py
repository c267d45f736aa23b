"""Searches through Optuna: killed and resumed, pruned, and the same whether or not they were interrupted."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from nnxdsl.runs.run_dir import RunDirectory

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(1800)]  # under load each run takes its time


@pytest.fixture(autouse=True)
def optuna() -> None:
    pytest.importorskip("optuna")


EVALUATED = (
    "held_out = Evaluation(every_steps=1, data=Data.Text('texts.jsonl', max_length=32))\n"
    "experiment = evolve(experiment, {'evaluation': held_out})\n"
)


def test_a_killed_search_goes_on_and_asks_what_it_would_have_asked(lab: Any, wait_until: Callable[..., None]) -> None:
    lab.write(
        EVALUATED
        + "space = {'optimizer.schedule.lr': Range.Log(1e-4, 1e-1), 'batch_size': [2, 4], 'seed': Range.Int(0, 9)}\n"
        "sweep = Search(experiment, space, trials=8, metric='eval/loss', direction='minimize', seed=3)\n"
    )
    driver = lab.start("sweep", "--quiet")
    wait_until(lambda: len(lab.finished()) >= 3, driver)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    code, _, err = lab.run("sweep", "--quiet")
    assert (code, err) == (0, "")
    lab.assert_each_once(8)
    rows = {row["point"]: row for row in lab.results()["rows"]}
    assert sorted(rows) == list(range(8))
    assert lab.results()["best"] == min(rows.values(), key=lambda row: row["value"])["run"]
    # From the start, without a break, with the runs that are there: the same trials.
    (actual,) = (lab.home / "sweeps").iterdir()
    actual.rename(lab.place / "moved away")
    code, _, _ = lab.run("sweep", "--quiet")
    assert code == 0
    assert {row["point"]: row["changes"] for row in lab.results()["rows"]} == {
        number: row["changes"] for number, row in rows.items()
    }
    lab.assert_each_once(8)


def test_a_run_that_is_worse_than_others_is_stopped(lab: Any) -> None:
    lab.write(
        EVALUATED + "experiment = evolve(experiment, {'steps': 300})\n"
        "sweep = Search(experiment, {'optimizer.schedule.lr': [3e-1, 1e-9]}, trials=2, metric='eval/loss',\n"
        "               direction='minimize', sampler='random', seed=4, pruner=Pruner.Median(startup_trials=1))\n"
    )
    code, out, err = lab.run("sweep")
    assert code == 0, err
    states = {row["point"]: (row["state"], row["changes"]["optimizer.schedule.lr"]) for row in lab.results()["rows"]}
    assert states == {0: ("finished", "0.3"), 1: ("pruned", "1e-09")}
    pruned = next(path for path in lab.runs() if path not in lab.finished())
    status = RunDirectory(pruned).status()
    assert (status.get("state"), status.get("exit_code")) == ("stopped", 0)
    assert 0 < (status.get("step") or 0) < 300
    assert "pruned" in out
    assert lab.run("sweep", "--quiet")[0] == 0  # it stays pruned
    assert len(RunDirectory(pruned).attempts()) == 1


def test_a_trial_that_fails_does_not_end_the_search(lab: Any) -> None:
    lab.write(
        EVALUATED + "sweep = Search(experiment, {'data.path': ['missing.jsonl', 'texts.jsonl']}, trials=4,\n"
        "               metric='eval/loss', direction='minimize', sampler='random')\n"
    )
    code, _, _ = lab.run("sweep", "--quiet")
    assert code == 1
    states = {row["changes"]["data.path"]: row["state"] for row in lab.results()["rows"]}
    assert states == {'"missing.jsonl"': "failed", '"texts.jsonl"': "finished"}
    assert len(lab.results()["rows"]) == 4
    lab.assert_each_once(1)
