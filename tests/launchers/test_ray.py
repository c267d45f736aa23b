"""Sweeps over a real cluster of Ray on this machine, and runs of several processes in it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest

from nnxdsl.runs.run_dir import RunDirectory

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(1800)]  # under load each run takes its time


def test_a_killed_sweep_goes_on_and_runs_each_point_once(
    lab: Any, cluster: str, wait_until: Callable[..., None]
) -> None:
    lab.write(
        f"sweep = Sweep(experiment, product({{'seed': range(20)}}))\nlauncher = Launcher.Ray(address='{cluster}')\n"
    )
    driver = lab.start("sweep", "--quiet")
    wait_until(lambda: len(lab.finished()) >= 5, driver)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    code, out, err = lab.run("sweep", "--quiet", "--json")
    assert code == 0, err
    assert len(json.loads(out)["rows"]) == 20
    lab.assert_each_once(20)


def test_a_run_is_cancelled_and_one_that_was_killed_started_again(
    lab: Any, cluster: str, wait_until: Callable[..., None]
) -> None:
    lab.write(f"launcher = Launcher.Ray(address='{cluster}', retries=1)\n")
    driver = lab.start("launch", "steps=600")
    wait_until(lambda: lab.runs() and RunDirectory(lab.runs()[0]).status().get("checkpoint"), driver)
    lab.kill(lab.runs()[0])
    _, err = driver.communicate(timeout=600)
    assert driver.returncode == 0, err
    assert "restarting" in err
    assert len(RunDirectory(lab.runs()[0]).attempts()) == 2
    code, _, err = lab.run("launch", "steps=100000", "--detach")
    assert code == 0, err
    wait_until(lambda: len(lab.runs()) == 2 and any((path / "metrics.jsonl").exists() for path in lab.runs()))
    assert lab.run("launch", "steps=100000", "--cancel", "--quiet")[0] == 0
    assert sorted(RunDirectory(path).status().get("state") or "" for path in lab.runs()) == ["finished", "stopped"]


def test_two_processes_are_one_run(lab: Any, cluster: str) -> None:
    lab.write(f"launcher = Launcher.Ray(address='{cluster}', processes=2, retries=0)\n")
    code, _, err = lab.run("launch", "mesh.data=2")
    said = "".join(path.read_text() for path in lab.home.glob(".launch/*/output*.txt"))
    assert code == 0, err + said
    lab.assert_each_once(1)
