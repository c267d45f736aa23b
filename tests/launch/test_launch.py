"""Outcomes of runs, processes that outlive their starter, and resuming a killed driver; without training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nnxdsl import Data, Experiment, Launcher, Model, Objective, Optimizer, Schedule, Weights, cli, to_json
from nnxdsl.config.core.run_id import canonical
from nnxdsl.config.weights import dependencies_of
from nnxdsl.launch.driver import Driver, Task, last_events
from nnxdsl.launch.job import Job, prepare
from nnxdsl.launch.local import LocalEngine
from nnxdsl.launch.outcome import Outcome, error_in_output, is_alive, outcome_from_status, outcome_of_job
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.storage import process_info
from nnxdsl.terminal.display import Display
from tests.waiting import HANG_SECONDS, wait_until


def experiment(name: str = "tiny", **changes: object) -> Experiment:
    fields: dict[str, object] = {
        "name": name,
        "model": Model.Gemma3("tiny"),
        "objective": Objective.SFT(loss_on="all"),
        "data": Data.Text("none.jsonl", max_length=16),
        "optimizer": Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
        "batch_size": 2,
        "steps": 2,
    }
    return Experiment(**{**fields, **changes})  # type: ignore[arg-type]


def begun(home: Path, one: Experiment, **status: object) -> Path:
    """The directory of a run with a status and, if it has one, an attempt."""
    path = home / one.id
    run = RunDirectory.create(path, identity=canonical(one), experiment_json={}, experiment_py="")
    run.append_attempt({})
    run.write_status(**status)  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize("is_running", [True, False])
def test_cancel_stops_a_run_that_no_launcher_started(
    is_running: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, me = experiment(), process_info.current()
    file = tmp_path / "experiment.json"
    file.write_text(to_json(one), encoding="utf-8")
    if is_running:
        status = {"pid": me.pid, "pid_started": me.started, "host": me.host, "heartbeat": process_info.utc()}
        path = begun(tmp_path / "runs", one, state="running", step=1, total=2, **status)

        def stop_when_told() -> None:
            run = RunDirectory(path)
            wait_until(run.stop_requested)
            run.write_status(state="stopped", step=1, exit_code=0)

        trainer = threading.Thread(target=stop_when_told, daemon=True)
        trainer.start()
    assert cli.main(["launch", str(file), "--home", str(tmp_path / "runs"), "--cancel"]) == 0
    said = capsys.readouterr().err
    if is_running:
        trainer.join(0)
        assert not trainer.is_alive()
        assert f"{one.id}  stopped" in said
    else:
        assert "nothing to stop: no such run is running" in said


@pytest.mark.parametrize(
    ("status", "state", "error"),
    [
        ({"state": "finished", "step": 2}, "finished", None),
        ({"state": "failed", "step": 1, "error": "NaN"}, "failed", "NaN"),
        ({"state": "stopped", "step": 1, "exit_code": 0}, "stopped", None),
        ({"state": "stopped", "step": 1, "exit_code": 143}, "preempted", "stopped by signal 15"),
        (
            {"state": "running", "step": 1, "pid": 1, "pid_started": 1},
            "preempted",
            "its process ended without a message",
        ),
    ],
)
def test_a_run_that_was_begun_says_itself_how_it_ended(
    tmp_path: Path, status: dict[str, object], state: str, error: str | None
) -> None:
    if "pid" in status:
        status = {**status, "host": process_info.hostname()}
    run = begun(tmp_path, experiment(), **status)
    said = outcome_from_status(run)
    assert said is not None
    assert (said.state, said.error) == (state, error)
    assert outcome_of_job(run, 0, 2, "SpecError: other") == said  # whatever the process said
    assert not is_alive(run)


@pytest.mark.parametrize(
    ("code", "printed", "state", "error"),
    [
        (2, "reading ...\nPlanError: 1 problem\n  mesh: no\n", "failed", "PlanError: 1 problem\n  mesh: no"),
        (2, "", "failed", "exit code 2"),
        (-9, "", "preempted", "ended by signal 9 before it began"),
        (137, "", "preempted", "ended by signal 9 before it began"),
        (None, "reading data ...\n", "preempted", "ended without a message before it began"),
        (None, "RunError: no\n", "failed", "RunError: no"),
        (0, "", "stopped", "an earlier run that it starts from was stopped"),
    ],
)
def test_one_that_never_began_is_judged_by_its_process(
    tmp_path: Path, code: int | None, printed: str, state: str, error: str
) -> None:
    assert outcome_of_job(tmp_path / "tiny-00000000", 0, code, printed) == Outcome(state, None, error)  # type: ignore[arg-type]
    # An attempt from before says nothing of this one.
    run = begun(tmp_path, experiment(), state="failed", step=1, error="old")
    actual = outcome_of_job(run, 1, code, printed)
    assert (actual.state, actual.error) == (state, error)


def test_only_errors_are_complaints() -> None:
    assert error_in_output("step 1\nErrors are rare\nvalue: Error-free\n") == ""
    assert error_in_output("a\nValueError: x\nnnxdsl.errors.RunError: y\n  z\n") == "nnxdsl.errors.RunError: y\n  z"


def job_of(place: Path, *argv: str) -> Job:
    directory = place / "a job's directory"
    directory.mkdir(exist_ok=True)
    return Job("tiny-00000000", directory, argv, place, {"PYTHONPATH": str(Path(__file__).parents[2])})


STARTER = """
import sys, os, signal
from pathlib import Path
from nnxdsl import Launcher
from nnxdsl.launch.job import Job
from nnxdsl.launch.local import LocalEngine


class Sleeping(Job):
    def command(self, *_):
        return [sys.executable, "-c", "import time; time.sleep(60)"]

place = Path(sys.argv[1])
job = Sleeping("tiny-00000000", place, (), place)
assert LocalEngine(Launcher.Local()).start(job)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_outlives_its_killed_starter_and_is_not_started_twice(tmp_path: Path) -> None:
    job = job_of(tmp_path, "runs", "--home", str(tmp_path / "none"))
    started = subprocess.run([sys.executable, "-c", STARTER, str(job.directory)], check=False, timeout=HANG_SECONDS)
    assert started.returncode == -signal.SIGKILL
    engine = LocalEngine(Launcher.Local())
    assert engine.is_active(job)
    assert engine.start(job) is False
    record = job.read("process.json")
    try:
        assert process_info.is_alive(record["pid"], record["pid_started"])
        assert engine.location(job) == f"process {record['pid']}"
        engine.terminate(job)
        wait_until(lambda: not engine.is_active(job))
    finally:
        if process_info.is_alive(record["pid"], record["pid_started"]):
            os.kill(record["pid"], signal.SIGKILL)
    assert engine.exit_code(job) is None  # nobody saw it
    assert engine.start(job)  # free again, and this one says how it ended
    assert engine.exit_code(job) == 0
    assert not engine.is_active(job)
    assert job.output_tail() == f"no runs in {tmp_path / 'none'}\n"


def test_each_run_at_work_has_gpus_of_its_own() -> None:
    engine = LocalEngine(Launcher.Local(parallel=2, gpus=2))
    assert engine._devices(0) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert engine._devices(1) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    engine._slots = {"a": 1}
    assert engine._free_slot() == 0
    engine._slots = {"a": 0, "b": 1}
    assert engine._free_slot() == 2
    assert LocalEngine(Launcher.Local())._devices(3) == {}


def test_what_a_run_starts_from_is_found_wherever_it_stands() -> None:
    first, second = experiment("first"), experiment("second", seed=1)
    model = Model.Gemma3("tiny", weights=Weights.From(first))
    assert dependencies_of(first) == []
    assert dependencies_of(experiment(model=model)) == [first]
    third = experiment("third", model=Model.Gemma3("tiny", weights=Weights.From(experiment(model=model))))
    assert dependencies_of(third) == [experiment(model=model)]
    merged = Weights.Merged(Weights.From(first), adapters=(Weights.From(second),), coefficients=(1.0,))
    assert dependencies_of(experiment(model=Model.Gemma3("tiny", weights=merged))) == [first, second]


class Engine:
    """An engine whose jobs end at once, refused or killed as a test says."""

    poll_seconds, parallel, retries = 0.0, 2, 2

    def __init__(self, codes: dict[str, list[int]]) -> None:
        self.codes = codes
        self.started: list[str] = []

    def start(self, job: Job) -> bool:
        self.started.append(job.run)
        return True

    def is_active(self, job: Job) -> bool:
        return False

    def exit_code(self, job: Job) -> int | None:
        return self.codes[job.run].pop(0)

    def location(self, job: Job) -> str:
        return "nowhere"

    def terminate(self, job: Job) -> None:
        raise AssertionError

    def close(self) -> None:
        return None


class Listed:
    def __init__(self, *experiments: Experiment) -> None:
        self.left = [Task(one, index) for index, one in enumerate(experiments)]
        self.total = len(self.left)
        self.said: list[tuple[int | None, str]] = []

    def next(self) -> Task | None:
        return self.left.pop(0) if self.left else None

    def should_stop(self, task: Task) -> bool:
        return False

    def on_end(self, task: Task, result: object) -> None:
        self.said.append((task.index, result.state))  # type: ignore[attr-defined]


def test_a_driver_bounds_attempts_and_never_retries_a_refusal(tmp_path: Path) -> None:
    killed, refused, done = experiment("killed"), experiment("refused"), experiment("done")
    begun(tmp_path, done, state="finished", step=2)
    directory = tmp_path / "sweeps"
    directory.mkdir()
    engine = Engine({killed.id: [-9] * 9, refused.id: [2] * 9})
    source = Listed(done, refused, killed)
    driver = Driver(engine, tmp_path, directory, Display(quiet=True))
    driver.drive(source)
    assert sorted(source.said) == [(0, "finished"), (1, "failed"), (2, "preempted")]
    assert engine.started.count(killed.id) == 3
    assert engine.started.count(refused.id) == 1
    assert done.id not in engine.started
    assert (driver.results[killed.id].error or "").endswith("no attempts left after 3")
    events = {row["run"]: row["event"] for row in last_events(directory)}
    assert events == {killed.id: "preempted", refused.id: "failed"}
    # Started again, it tells of what failed, and starts it on request alone.
    again = Driver(engine, tmp_path, directory, Display(quiet=True))
    again.drive(Listed(refused))
    assert engine.started.count(refused.id) == 1
    assert again.results[refused.id].state == "failed"
    Driver(engine, tmp_path, directory, Display(quiet=True), retry_failed=True).drive(Listed(refused))
    assert engine.started.count(refused.id) == 2


def test_points_wait_for_the_one_run_that_they_start_from(tmp_path: Path) -> None:
    first = experiment("first")
    model = Model.Gemma3("tiny", weights=Weights.From(first))
    engine = Engine({first.id: [2]})
    source = Listed(*(experiment(model=model, seed=seed) for seed in range(5)))
    driver = Driver(engine, tmp_path, tmp_path, Display(quiet=True))
    driver.drive(source)
    assert engine.started == [first.id]
    assert source.said == [(index, "failed") for index in range(5)]
    assert all(
        f"{first.id}, which it starts from" in (result.error or "")
        for run, result in driver.results.items()
        if run != first.id
    )


def test_a_run_elsewhere_is_waited_for(tmp_path: Path) -> None:
    one = experiment()
    here = {"pid": os.getpid(), "pid_started": None, "host": process_info.hostname()}
    path = begun(tmp_path, one, state="running", step=1, **here)
    engine, source = Engine({}), Listed(one)

    class Finishing(Display):
        def say(self, text: str) -> None:
            if "is already running; waiting" in text:
                RunDirectory(path).write_status(state="finished", step=2)

    Driver(engine, tmp_path, tmp_path, Finishing(quiet=True)).drive(source)
    assert source.said == [(0, "finished")]
    assert engine.started == []


def test_a_job_is_the_command_that_a_person_types(tmp_path: Path) -> None:
    job = prepare(experiment(), tmp_path, {"A": "b"})
    assert job.command("python") == [
        "python", "-m", "nnxdsl", "run", str(job.directory / "experiment.json"), "--home", str(tmp_path),
    ]  # fmt: skip
    assert job.environment()["A"] == "b"
    assert job.directory == tmp_path / ".launch" / experiment().id
