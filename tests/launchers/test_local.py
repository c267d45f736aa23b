"""Sweeps on this machine: killed and resumed, with points that crash, cancelled, and run elsewhere at the same time."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

from nnxdsl.runs.run_dir import RunDirectory

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(1800)]  # under load each run takes its time

LONG = "experiment = evolve(experiment, {'steps': 100_000})\n"


def test_a_killed_sweep_goes_on_and_runs_each_point_once(lab: Any, wait_until: Callable[..., None]) -> None:
    lab.write("sweep = Sweep(experiment, product({'seed': range(20)}))\nlauncher = Launcher.Local(parallel=2)\n")
    driver = lab.start("sweep", "--quiet")
    wait_until(lambda: len(lab.finished()) >= 5, driver)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert 5 <= len(lab.finished()) <= 8
    code, out, err = lab.run("sweep", "--quiet", "--json")
    assert (code, err) == (0, "")
    assert len(json.loads(out)["rows"]) == 20
    lab.assert_each_once(20)
    events = lab.events()
    assert sum(row["event"] == "started" for row in events) == 20
    assert {row["run"] for row in events if row["event"] == "finished"} <= {path.name for path in lab.runs()}
    # Once more: nothing is started, and the table is the same.
    assert lab.run("sweep", "--quiet", "--json") == (0, out, "")
    assert len(lab.events()) == len(events)


def test_a_crash_ends_one_point_and_failed_ones_are_retried_on_request(lab: Any) -> None:
    lab.write(
        "crashing, refused = {'optimizer.schedule.lr': 1e30, 'steps': 3}, {'data.path': 'missing.jsonl'}\n"
        "sweep = Sweep(experiment, [{'seed': 1}, crashing, refused, {'seed': 2}])\n"
    )
    code, out, err = lab.run("sweep", "--parallel", "2")
    assert code == 1, err
    states = {row["point"]: (row["state"], row["error"]) for row in lab.results()["rows"]}
    assert states[0] == states[3] == ("finished", None)
    assert states[1][0] == states[2][0] == "failed"
    assert "missing.jsonl" in states[2][1]
    assert re.search(r"loss is (nan|inf)|grad_norm (nan|inf)", states[1][1])
    assert out.count(" failed: ") == 2
    (lab.place / "missing.jsonl").write_bytes((lab.place / "texts.jsonl").read_bytes())
    started = sum(row["event"] == "started" for row in lab.events())
    code, _, err = lab.run("sweep")
    assert code == 1
    assert "failed before" in err
    assert sum(row["event"] == "started" for row in lab.events()) == started
    code, _, _ = lab.run("sweep", "--retry-failed", "--quiet")
    assert code == 1
    states = {row["point"]: row["state"] for row in lab.results()["rows"]}
    assert states == {0: "finished", 1: "failed", 2: "finished", 3: "finished"}


def test_cancel_stops_all_with_everything_saved(lab: Any, wait_until: Callable[..., None]) -> None:
    lab.write(LONG + "sweep = Sweep(experiment, product({'seed': [1, 2, 3]}))\n")
    driver = lab.start("sweep", "--parallel", "2", "--quiet")
    wait_until(lambda: sum((path / "metrics.jsonl").exists() for path in lab.runs()) == 2, driver)
    assert lab.run("sweep", "--cancel", "--quiet")[0] == 0  # the driver is asked
    assert driver.wait(300) == 0
    assert [RunDirectory(path).status().get("state") for path in lab.runs()] == ["stopped", "stopped"]
    for path in lab.runs():
        assert RunDirectory(path).status().get("checkpoint") == RunDirectory(path).status().get("step")
    driver = lab.start("sweep", "--parallel", "2", "--quiet")
    wait_until(lambda: sum(RunDirectory(path).liveness() == "running" for path in lab.runs()) == 2, driver)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert lab.run("sweep", "--cancel", "--quiet")[0] == 0  # there is no driver: they are stopped all the same
    assert [RunDirectory(path).status().get("state") for path in lab.runs()] == ["stopped", "stopped"]


def test_a_run_is_launched_watched_killed_and_started_again(lab: Any, wait_until: Callable[..., None]) -> None:
    lab.write("experiment = evolve(experiment, {'steps': 400})\n")
    driver = lab.start("launch", "--launcher", "Launcher.Local(retries=1)", "--json")
    wait_until(lambda: lab.runs() and RunDirectory(lab.runs()[0]).status().get("checkpoint"), driver)
    lab.kill(lab.runs()[0])
    out, err = driver.communicate(timeout=600)
    assert driver.returncode == 0, err
    assert "its process ended without a message; restarting" in err
    assert json.loads(out)["state"] == "finished"
    run = RunDirectory(lab.runs()[0])
    assert len(run.attempts()) == 2
    assert [row["step"] for row in run.metrics()] == list(range(400))
    assert run.log.exists()


def test_a_point_at_work_elsewhere_is_waited_for(lab: Any, wait_until: Callable[..., None]) -> None:
    lab.write("experiment = evolve(experiment, {'steps': 300})\nsweep = Sweep(experiment, product({'seed': [0]}))\n")
    other = lab.start("run", "--quiet")
    wait_until(lambda: lab.runs() and RunDirectory(lab.runs()[0]).liveness() == "running", other)
    code, _, err = lab.run("sweep")
    assert code == 0
    assert "is already running; waiting" in err
    assert other.wait(300) == 0
    lab.assert_each_once(1, steps=300)


def test_points_share_the_run_that_they_start_from(lab: Any) -> None:
    lab.write(
        "second = evolve(experiment, {'model.weights': Weights.From(experiment)})\n"
        "sweep = Sweep(second, product({'seed': [1, 2]}))\n"
    )
    code, _, err = lab.run("sweep", "--parallel", "2")
    assert code == 0, err
    lab.assert_each_once(3)


def test_points_that_begin_together_ask_the_reference_once(lab: Any) -> None:
    rows = [{"prompt": f"Say {n}: ", "chosen": "good" + "x" * (n % 3), "rejected": "bad"} for n in range(400)]
    (lab.place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lab.write(
        "dpo = {'objective': Objective.DPO(), 'data': Data.Preferences('pairs.jsonl', max_prompt_length=16,\n"
        "       max_completion_length=8), 'batch_size': 4, 'steps': 100}\n"
        "sweep = Sweep(evolve(experiment, dpo), product({'objective.beta': [0.1, 0.2]}))\n"
    )
    code, _, err = lab.run("sweep", "--parallel", "2")
    assert code == 0, err
    lab.assert_each_once(2, steps=100)
    said = [path.read_text() for path in lab.home.glob(".launch/*/output.txt")]
    assert sum("precomputing reference log-probs: 400 pairs" in text for text in said) == 1
    assert len(list(lab.home.glob(".reference/*/*.npz"))) == 1
