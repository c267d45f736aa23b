"""The commands themselves, killed and resumed over every engine, with runs that only write what a run writes."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest

from nnxdsl.runs.run_dir import RunDirectory

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(900)]
TWENTY = "sweep = Sweep(experiment, product({'seed': range(20)}), metric='eval/loss')\n"


@pytest.fixture
def lab(lab: Any) -> Any:
    return lab.without_training()


@pytest.fixture(params=["local", "slurm", "ray"])
def launcher(request: pytest.FixtureRequest) -> str:
    if request.param == "local":
        return "launcher = Launcher.Local(parallel=2)\n"
    if request.param == "slurm":
        pytest.importorskip("submitit")
        return "launcher = Launcher.Slurm(cluster='local', parallel=2)\n"
    return f"launcher = Launcher.Ray(address='{request.getfixturevalue('cluster')}', parallel=2)\n"


def test_a_killed_sweep_of_twenty_runs_each_point_once(
    lab: Any, launcher: str, wait_until: Callable[..., None]
) -> None:
    lab.write(TWENTY + launcher)
    for count in (4, 9):  # killed twice
        driver = lab.start("sweep", "--quiet")
        wait_until(lambda count=count: len(lab.finished()) >= count, driver)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        driver.communicate()
    assert len(lab.finished()) < 20
    code, out, err = lab.run("sweep", "--quiet", "--json")
    assert code == 0, err
    lab.assert_each_once(20)
    reported = json.loads(out)
    assert len(reported["rows"]) == 20
    assert all(row["state"] == "finished" for row in reported["rows"])
    assert lab.run("sweep", "--quiet", "--json")[1] == out
    lab.assert_each_once(20)


def test_killed_runs_go_on_and_each_step_is_taken_once(lab: Any, wait_until: Callable[..., None]) -> None:
    lab.write("experiment = evolve(experiment, {'steps': 40})\nlauncher = Launcher.Local(retries=2)\n")
    driver = lab.start("launch")
    for count in (1, 2):
        wait_until(lambda count=count: lab.runs() and len(RunDirectory(lab.runs()[0]).attempts()) == count, driver)
        wait_until(lambda: RunDirectory(lab.runs()[0]).liveness() == "running", driver)
        lab.kill(lab.runs()[0])
    _, err = driver.communicate(timeout=600)
    assert driver.returncode == 0, err
    assert err.count("restarting") == 2
    assert len(RunDirectory(lab.runs()[0]).attempts()) == 3


def test_attempts_are_bounded(lab: Any, wait_until: Callable[..., None]) -> None:
    lab.write("experiment = evolve(experiment, {'steps': 4000})\nlauncher = Launcher.Local(retries=0)\n")
    driver = lab.start("launch")
    wait_until(lambda: lab.runs() and RunDirectory(lab.runs()[0]).liveness() == "running", driver)
    lab.kill(lab.runs()[0])
    _, err = driver.communicate(timeout=600)
    assert driver.returncode == 1
    assert "no attempts left after 1" in err
    assert len(RunDirectory(lab.runs()[0]).attempts()) == 1


def test_failures_and_cancelling(lab: Any, wait_until: Callable[..., None]) -> None:
    lab.write("sweep = Sweep(experiment, product({'optimizer.schedule.lr': [1e-3, 1e30, 1e-2]}))\n")
    code, out, _ = lab.run("sweep", "--quiet")
    assert code == 1
    assert "failed: RunError: loss is nan" in out
    assert sorted(row["state"] for row in lab.results()["rows"]) == ["failed", "finished", "finished"]
    lab.write("sweep = Sweep(evolve(experiment, {'steps': 4000}), product({'seed': range(3)}))\n")
    driver = lab.start("sweep", "--parallel", "2")
    wait_until(lambda: sum(RunDirectory(path).liveness() == "running" for path in lab.runs()) == 2, driver)
    assert lab.run("sweep", "--cancel", "--quiet")[0] == 0
    driver.communicate(timeout=600)
    assert driver.returncode == 0
    assert sum(RunDirectory(path).liveness() == "stopped" for path in lab.runs()) == 2


@pytest.mark.parametrize("parallel", ["1", "3"])
def test_a_killed_search_goes_on(lab: Any, parallel: str, wait_until: Callable[..., None]) -> None:
    pytest.importorskip("optuna")
    lab.write(
        "held_out = Evaluation(every_steps=1, data=experiment.data)\n"
        "experiment = evolve(experiment, {'evaluation': held_out})\n"
        "space = {'optimizer.schedule.lr': Range.Log(1e-4, 1e-1), 'batch_size': [2, 4], 'seed': Range.Int(0, 99)}\n"
        "sweep = Search(experiment, space, trials=14, metric='eval/loss', direction='minimize', seed=3)\n"
    )
    driver = lab.start("sweep", "--quiet", "--parallel", parallel)
    wait_until(lambda: len(lab.finished()) >= 4, driver)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    driver.communicate()
    code, _, err = lab.run("sweep", "--quiet", "--parallel", parallel)
    assert code == 0, err
    lab.assert_each_once(14)
    rows = {row["point"]: row for row in lab.results()["rows"]}
    assert sorted(rows) == list(range(14))
    assert lab.results()["best"] == min(rows.values(), key=lambda row: row["value"])["run"]
    if parallel == "1":  # from the start, without a break, with the runs that are there: the same trials
        (actual,) = (lab.home / "sweeps").iterdir()
        actual.rename(lab.place / "moved away")
        assert lab.run("sweep", "--quiet")[0] == 0
        assert {row["point"]: row["changes"] for row in lab.results()["rows"]} == {
            number: row["changes"] for number, row in rows.items()
        }
        lab.assert_each_once(14)


def test_what_is_worse_is_pruned(lab: Any) -> None:
    pytest.importorskip("optuna")
    lab.write(
        "held_out = Evaluation(every_steps=1, data=experiment.data)\n"
        "experiment = evolve(experiment, {'evaluation': held_out, 'steps': 30})\n"
        "sweep = Search(experiment, {'optimizer.schedule.lr': [1e-2, 1e-9]}, trials=2, metric='eval/loss',\n"
        "               direction='minimize', sampler='random', seed=4, pruner=Pruner.Median(startup_trials=1))\n"
    )
    code, out, err = lab.run("sweep", "--quiet")
    assert code == 0, err
    states = {row["point"]: row["state"] for row in lab.results()["rows"]}
    assert states == {0: "finished", 1: "pruned"}
    assert "pruned" in out
    (pruned,) = (path for path in lab.runs() if path not in lab.finished())
    assert 0 < (RunDirectory(pruned).status().get("step") or 0) < 30
    assert lab.run("sweep", "--quiet")[0] == 0  # it stays so
    assert len(RunDirectory(pruned).attempts()) == 1
