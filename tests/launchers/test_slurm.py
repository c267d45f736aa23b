"""Jobs under submitit's own controller: the code path of Slurm, but for `sbatch`."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nnxdsl.runs.run_dir import RunDirectory

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(1800)]  # under load each run takes its time

LAUNCHER = "launcher = Launcher.Slurm(cluster='local', retries=1)\n"


@pytest.fixture(autouse=True)
def submitit() -> None:
    pytest.importorskip("submitit")


def test_a_sweep(lab: Any) -> None:
    lab.write(LAUNCHER + "sweep = Sweep(experiment, product({'seed': [1, 2, 3]}))\n")
    code, _, err = lab.run("sweep", "--parallel", "2")
    assert code == 0, err
    lab.assert_each_once(3)


def test_cancel(lab: Any, wait_until: Callable[..., None]) -> None:
    lab.write(LAUNCHER)
    code, _, err = lab.run("launch", "steps=100000", "--detach")
    assert code == 0
    assert "submitit's local job" in err
    wait_until(lambda: lab.runs() and (lab.runs()[0] / "metrics.jsonl").exists())
    assert lab.run("launch", "steps=100000", "--cancel")[0] == 0
    status = RunDirectory(lab.runs()[0]).status()
    assert (status.get("state"), status.get("exit_code")) == ("stopped", 0)


def test_a_killed_run_is_submitted_again(lab: Any, wait_until: Callable[..., None]) -> None:
    lab.write(LAUNCHER)
    driver = lab.start("launch", "steps=600")
    wait_until(lambda: lab.runs() and RunDirectory(lab.runs()[0]).status().get("checkpoint"), driver)
    first = job_of(lab)
    lab.kill(lab.runs()[0])
    _, err = driver.communicate(timeout=600)
    assert driver.returncode == 0, err
    assert job_of(lab) != first
    assert len(RunDirectory(lab.runs()[0]).attempts()) == 2


def test_a_job_that_is_told_that_time_is_short_saves_and_comes_back_by_itself(
    lab: Any, wait_until: Callable[..., None]
) -> None:
    lab.write(LAUNCHER)
    code, _, _ = lab.run("launch", "steps=600", "--detach")  # nobody is there to see it
    assert code == 0
    wait_until(lambda: lab.runs() and (lab.runs()[0] / "metrics.jsonl").exists())
    run = RunDirectory(lab.runs()[0])
    job, pid = job_of(lab), run.status().get("pid")
    assert pid is not None
    stat = Path(f"/proc/{pid}/stat").read_text()
    os.kill(int(stat[stat.rindex(")") + 2 :].split()[1]), signal.SIGUSR2)  # its parent: submitit's process
    wait_until(lambda: run.status().get("state") == "finished")
    first, second = run.attempts()
    assert second["start"] > 0
    assert job_of(lab) == job
    assert [row["step"] for row in run.metrics()] == list(range(600))
    assert "stopped at step" in run.log.read_text()
    del first


def job_of(lab: Any) -> str:
    (result,) = lab.home.glob(".launch/*/submission.json")
    return json.loads(result.read_text())["job"]
