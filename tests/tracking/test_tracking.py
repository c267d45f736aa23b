"""The tracking process, with a third party's tracker: what it writes, failures, resumes."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import attrs
import jax
import numpy as np
import pytest
from line_files import Lines
from line_files.unregistered import Elsewhere, Nowhere
from line_files.written import Written, end, read_lines
from small_lab.model import Small

from nnxdsl import (
    Data,
    Experiment,
    NnxdslError,
    Objective,
    Optimizer,
    PlanError,
    RunError,
    Schedule,
    SpecError,
    Tokenizer,
    Tracking,
    compile,
)
from nnxdsl.config.core.base import members
from nnxdsl.program.checkpoint_views import checkpoint_targets
from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.hooks.base import Hook
from nnxdsl.trainer.run import run
from nnxdsl.trainer.trainer import Trainer, TrainingError
from tests.doc_pages import blocks, texts
from tests.waiting import HANG_SECONDS, wait_until

TEXTS = Path(__file__).parents[1] / "reference" / "replay" / "texts.jsonl"
ROOT = Path(__file__).parents[2]


def places(rows: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Step and kind of each row of metrics, in the order in which a tracker has taken them."""
    return [(row["step"], "evaluation" if "eval/loss" in row else "step") for row in rows if "step" in row]


def test_rows_arrive_once_and_in_order(written: Written, tmp_path: Path) -> None:
    process = written.begin(Lines(str(tmp_path / "lines")))
    written.train(range(4), evaluate=(0, 3))
    assert end(process, "finished") == []
    opened, *rows, last = read_lines(tmp_path / "lines")
    assert (opened["run"], opened["first"], opened["name"]) == ("written-00000000", 0, "written")
    assert opened["jax"] is False
    assert places(rows) == [(0, "evaluation"), *((step, "step") for step in (0, 1, 2)), (3, "evaluation"), (3, "step")]
    assert rows[2] == {"step": 1, "loss": 0.5, "steps/s": 1}
    assert math.isnan(rows[3]["loss"])
    assert last == {"end": "finished"}


def test_a_resume_continues_where_the_tracker_is(written: Written, tmp_path: Path) -> None:
    lines = Lines(str(tmp_path / "lines"))
    process = written.begin(lines)
    written.train(range(6), evaluate=(0, 4))
    assert end(process, "stopped") == []
    again = written.begin(lines, start=3)
    written.train(range(3, 9), evaluate=(4, 8))
    assert end(again, "finished") == []
    written.directory.append_metrics({"step": 9, "loss": 0.0})
    assert end(written.begin(lines, start=10), "failed") == []

    rows = read_lines(tmp_path / "lines")
    wanted = [
        *((step, "step") for step in range(9)),
        (0, "evaluation"),
        (4, "evaluation"),
        (8, "evaluation"),
        (9, "step"),
    ]
    assert places(rows) == sorted(wanted)
    assert [row["steps/s"] for row in rows if "steps/s" in row] == [1] * 6 + [2] * 3
    assert [row["end"] for row in rows if "end" in row] == ["stopped", "finished", "failed"]
    assert [row["first"] for row in rows if "run" in row] == [0, 6, 9]
    assert len({row["id"] for row in rows if "run" in row}) == 1


def test_a_new_tracker_of_a_resume_takes_the_rows_from_the_first_on(written: Written, tmp_path: Path) -> None:
    process = written.begin()
    written.train(range(4))
    assert end(process, "stopped") == []
    process = written.begin(Lines(str(tmp_path / "lines")), start=4)
    written.train(range(4, 6))
    assert end(process, "finished") == []
    assert [row["step"] for row in read_lines(tmp_path / "lines") if "loss" in row] == list(range(6))


@pytest.mark.parametrize(("fault", "error"), [("raise", "ConnectionError: no service"), ("exit", "SystemExit: over")])
def test_a_dead_tracker_is_one_warning(fault: Any, error: str, written: Written, tmp_path: Path) -> None:
    process = written.begin(Lines(str(tmp_path / "dead"), fault=fault), Lines(str(tmp_path / "alive")))
    written.train(range(4))
    warnings: list[str] = []
    wait_until(lambda: warnings.extend(process.warnings()) or warnings)
    written.train(range(4, 8))
    assert [*warnings, *end(process, "finished")] == [
        f"tracking.0: line_files:Lines has stopped: {error}; the run goes on, and a resume tries again"
    ]
    assert [row["step"] for row in read_lines(tmp_path / "dead") if "loss" in row] == [0, 1]
    assert [row["step"] for row in read_lines(tmp_path / "alive") if "loss" in row] == list(range(8))
    assert "Traceback" in (written.directory.path / "tracking" / "output.txt").read_text()


def test_a_tracker_that_cannot_be_opened_is_one_problem_and_one_warning(written: Written, tmp_path: Path) -> None:
    process = written.begin(Lines(str(tmp_path / "alive")), Lines(str(tmp_path / "missing" / "lines")))
    (problem,) = process.open_problems(HANG_SECONDS)
    assert problem.path == "tracking.1"
    assert problem.message.startswith("line_files:Lines cannot be opened: FileNotFoundError: [Errno 2] No such file")
    written.train(range(4))
    (warning,) = end(process, "finished")
    assert warning.startswith("tracking.1: line_files:Lines has stopped: FileNotFoundError: [Errno 2] No such file")


def test_a_process_that_ends_before_its_trackers_are_open_is_one_problem(written: Written, tmp_path: Path) -> None:
    process = written.begin(Lines(str(tmp_path / "hangs"), fault="hang at opening"))
    wait_until(lambda: read_lines(tmp_path / "hangs"))
    assert process.open_problems(0.1) == []
    os.kill(read_lines(tmp_path / "hangs")[0]["pid"], signal.SIGKILL)
    (problem,) = process.open_problems(HANG_SECONDS)
    assert str(problem).startswith("tracking: the process that writes metrics was killed by SIGKILL")
    assert end(process, "failed") == [str(problem)]


def test_a_tracker_that_hangs_holds_nobody_up_for_long(written: Written, tmp_path: Path) -> None:
    process = written.begin(Lines(str(tmp_path / "hangs"), fault="hang"), Lines(str(tmp_path / "alive")))
    written.train(range(4))
    wait_until(lambda: len(read_lines(tmp_path / "alive")) == 6)
    assert end(process, "finished", seconds=0.3) == [
        "tracking: trackers still write the last metrics after 0.3 s; they go on without the run"
    ]
    wait_until(lambda: {"end": "finished"} in read_lines(tmp_path / "alive"))
    os.kill(read_lines(tmp_path / "hangs")[0]["pid"], signal.SIGKILL)
    assert list(process.wait()) == []


def test_a_killed_process_is_one_warning_and_a_resume_continues(written: Written, tmp_path: Path) -> None:
    lines = Lines(str(tmp_path / "lines"))
    process = written.begin(lines)
    written.train(range(3))
    record = written.directory.path / "tracking"
    wait_until(lambda: any(json.loads(file.read_text())["position"] == [2, True] for file in record.glob("*.json")))
    os.kill(read_lines(tmp_path / "lines")[0]["pid"], signal.SIGKILL)
    warnings: list[str] = []
    wait_until(lambda: warnings.extend(process.warnings()) or warnings)
    written.train(range(3, 6))
    assert [*warnings, *end(process, "finished")] == [
        "tracking: the process that writes metrics was killed by SIGKILL; the metrics are in metrics.jsonl, "
        "and a resume writes them to the trackers"
    ]
    assert end(written.begin(lines, start=6), "finished") == []
    assert [row["step"] for row in read_lines(tmp_path / "lines") if "loss" in row] == list(range(6))


KILLED = """
import os, signal, sys
from pathlib import Path
from line_files import Lines
from line_files.written import Written
from tests.waiting import wait_until
from nnxdsl.runs.run_dir import RunDirectory

written = Written(RunDirectory(Path(sys.argv[1])))
process = written.begin(Lines(sys.argv[2]))
wait_until(Path(sys.argv[2]).exists)
written.train(range(5))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_has_its_rows_written(written: Written, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-c", KILLED, str(written.directory.path), str(tmp_path / "lines")]
    assert subprocess.run(argv, env=environment, check=False).returncode == -signal.SIGKILL
    again = written.begin(Lines(str(tmp_path / "lines")), start=2)  # waits for the process of the first attempt
    written.train(range(2, 7))
    assert end(again, "finished") == []
    rows = read_lines(tmp_path / "lines")
    assert [row["step"] for row in rows if "loss" in row] == list(range(7))
    assert [row["end"] for row in rows if "end" in row] == ["killed", "finished"]


def test_a_late_process_of_an_earlier_attempt_writes_nothing(written: Written, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    for start in (0, 3):
        process = written.begin(Lines(str(lines)), start=start)
        written.train(range(start, 6))
        assert end(process, "finished") == []
    before = lines.read_text()
    argv = [sys.executable, "-m", "nnxdsl.tracking.process", str(written.directory.path), "1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NNXDSL_ALLOW": "line_files"}
    subprocess.run(argv, env=environment, stdin=subprocess.DEVNULL, check=True)
    assert lines.read_text() == before


def test_a_package_that_is_not_installed_says_what_to_install(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.lower().startswith(("tensorboard", "wandb", "trackio", "mlflow")):
            (packages / entry.name).symlink_to(entry)
    code = (
        "from nnxdsl import Tracking as T; from nnxdsl.tracking import problems\n"
        "for p in problems((T.TensorBoard('a'), T.WandB('a'), T.Trackio('a'), T.MLflow('sqlite:///a'))): print(p)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), str(ROOT)])}
    argv = [sys.executable, "-S", "-c", code]
    printed = subprocess.run(argv, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == [
        f"tracking.{index}: Tracking.{name} needs {name.lower()}, which is not installed: "
        f"pip install 'nnxdsl[{name.lower()}]'"
        for index, name in enumerate(("TensorBoard", "WandB", "Trackio", "MLflow"))
    ]


def test_the_tracker_of_the_documentation(written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "docs/guides/tracking.md"
    (block,) = (block for block in blocks(page) if block.title)
    (tmp_path / str(block.title)).write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    ours = importlib.import_module(str(block.title).removesuffix(".py"))
    process = written.begin(ours.CSV(path="metrics.csv"))
    written.train(range(2))
    assert end(process, "stopped") == []
    process = written.begin(ours.CSV(path="metrics.csv"), start=1)
    written.train(range(1, 3), evaluate=())
    assert end(process, "finished") == []
    rows = (tmp_path / "metrics.csv").read_text().split()
    assert rows[:3] == ["0,eval/loss,0.0", "0,loss,1.0", "0,steps/s,1"]
    assert rows[3:] == ["1,loss,0.5", "1,steps/s,1", "2,loss,nan", "2,steps/s,2"]

    space: dict[str, Any] = {}
    exec(texts(page, "python")[0], space)
    assert {type(each) for each in space["tracking"]} == set(members(Tracking).values())


SMALL = Experiment(
    name="small",
    model=Small(layers=1, pattern=1, vocab_size=320, tokenizer=Tokenizer.Bytes()),
    data=Data.Text(str(TEXTS), max_length=32),
    objective=Objective.SFT(loss_on="all"),
    optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
    batch_size=4,
    steps=6,
)


@attrs.define
class KillTracking(Hook):
    """Kills the tracking process before step 3, and waits until it is gone."""

    lines: Path

    def on_step_begin(self, trainer: Trainer) -> None:
        if trainer.step == 3:
            wait_until(lambda: read_lines(self.lines))
            pid = read_lines(self.lines)[0]["pid"]
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT))


def result(experiment: Experiment, home: Path) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and final weights of a run."""
    directory = home / experiment.id
    with CheckpointReader(directory / "checkpoints") as checkpoints:
        arrays = checkpoints.restore(experiment.steps, checkpoint_targets(compile(experiment)))
    losses = [row["loss"] for row in RunDirectory(directory).metrics()]
    return losses, {path: np.asarray(jax.device_get(leaf)) for path, leaf in arrays["trainable"].items()}


@pytest.mark.extended
def test_a_run_does_not_depend_on_its_trackers(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    tracked = attrs.evolve(SMALL, tracking=(Lines(str(lines)),))
    assert tracked.id == SMALL.id
    quiet = Display(quiet=True)
    run(SMALL, tmp_path / "alone", quiet)
    outcome = run(tracked, tmp_path / "killed", quiet, hooks=[KillTracking(lines)])
    assert outcome.state == "finished"
    losses, weights = result(SMALL, tmp_path / "alone")
    killed_losses, killed_weights = result(tracked, tmp_path / "killed")
    assert killed_losses == losses
    assert {path: array.tobytes() for path, array in killed_weights.items()} == {
        path: array.tobytes() for path, array in weights.items()
    }
    events = [row["event"] for row in RunDirectory(outcome.directory).events()]
    assert sum(event.startswith("warning: tracking") for event in events) == 1
    assert (
        "warning: tracking: the process that writes metrics was killed by SIGKILL"
        in (outcome.directory / "log.txt").read_text()
    )


@attrs.define
class Fail(Hook):
    """Ends the run with an error before step 3."""

    def on_step_begin(self, trainer: Trainer) -> None:
        if trainer.step == 3:
            raise RunError("over")


@attrs.define
class StopBeforeStep3(Hook):
    """Stops the run before step 3."""

    def on_step_begin(self, trainer: Trainer) -> None:
        if trainer.step == 3:
            trainer.stop()


@pytest.mark.extended
def test_a_new_run_without_its_tracker_ends_before_step_0_and_a_resume_goes_on(tmp_path: Path) -> None:
    tracked = attrs.evolve(SMALL, tracking=(Lines(str(tmp_path / "missing" / "lines")),))
    home, quiet = tmp_path / "runs", Display(quiet=True)
    with pytest.raises(TrainingError, match=r"tracking\.0: line_files:Lines cannot be opened: FileNotFoundError"):
        run(tracked, home, quiet)
    directory = RunDirectory(home / SMALL.id)
    assert list(directory.metrics()) == []
    assert run(SMALL, home, quiet, hooks=[StopBeforeStep3()]).step == 3
    assert run(tracked, home, quiet).state == "finished"
    assert [row["step"] for row in directory.metrics()] == list(range(SMALL.steps))
    warnings = [row["event"] for row in directory.events() if "tracking.0" in row["event"]]
    assert [text.partition(" No such file")[0] for text in warnings] == [
        "warning: tracking.0: line_files:Lines has stopped: FileNotFoundError: [Errno 2]"
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the process is not waited for
def test_a_failed_run_is_a_failed_run_of_its_trackers(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    with pytest.raises(TrainingError, match="over"):
        run(attrs.evolve(SMALL, tracking=(Lines(str(lines)),)), tmp_path, Display(quiet=True), hooks=[Fail()])
    wait_until(lambda: {"end": "failed"} in read_lines(lines))
    assert [row["step"] for row in read_lines(lines) if "loss" in row] == [0, 1]


@pytest.mark.parametrize(
    ("tracking", "message"),
    [
        (Elsewhere("a"), "Elsewhere needs no_such_package, which is not installed: pip install no_such_package"),
        (Nowhere(), "no tracker is registered for Nowhere; write\n  from nnxdsl.tracking import Tracker, open_tracker"),
    ],
)
def test_a_run_is_refused_before_anything_is_written(tracking: Tracking, message: str, tmp_path: Path) -> None:
    with pytest.raises(NnxdslError) as caught:
        run(attrs.evolve(SMALL, tracking=(tracking,)), tmp_path / "home", Display(quiet=True))
    assert message in str(caught.value)
    assert not (tmp_path / "home").exists()


TRACKER = """
from mine_beside import Mine
from nnxdsl import *

experiment = Experiment(
    name="own", model=Model.Gemma3("tiny"), objective=Objective.SFT(loss_on="all"), batch_size=2, steps=2,
    data=Data.Text("none.jsonl", max_length=16), optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
    tracking=(Mine(),),
)
"""
BESIDE = """
import attrs
from nnxdsl import Tracking
from nnxdsl.tracking import Tracker, open_tracker

@attrs.frozen(kw_only=True)
class Mine(Tracking): ...

@open_tracker.register(Mine)
class MyTracker(Tracker): ...
"""


def test_child_processes_import_what_stands_beside_the_users_file(tmp_path: Path) -> None:
    """Read by `nnxdsl VERB FILE`, which Python does not know the directory of."""
    (tmp_path / "own.py").write_text(TRACKER, encoding="utf-8")
    (tmp_path / "mine_beside.py").write_text(BESIDE, encoding="utf-8")
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from nnxdsl import tracking\n"
        "from nnxdsl.cli.load import load\n"
        "from nnxdsl.planning.aot_process import _environment\n"
        "from nnxdsl.sharding.hardware import device\n"
        "experiment = load(sys.argv[1], Path('runs'))\n"
        "print(list(tracking.import_problems(experiment.tracking)), _environment(device('h200'), 1)['PYTHONPATH'])\n"
    )
    command = [sys.executable, "-P", "-c", code, str(tmp_path / "own.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[] ")
    assert str(tmp_path.resolve()) in done.stdout.split()[1].split(os.pathsep)


def test_a_tracker_that_the_process_cannot_import_is_refused_before_step_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("nowhere_on_disk")  # as a class that was defined in a notebook
    monkeypatch.setitem(sys.modules, "nowhere_on_disk", module)
    exec(BESIDE.replace("class Mine(Tracking): ...", "class Mine(Tracking):\n    __module__ = __name__"), vars(module))
    with pytest.raises(PlanError) as caught:
        run(attrs.evolve(SMALL, tracking=(module.Mine(),)), tmp_path / "home", Display(quiet=True))
    (problem,) = caught.value.problems
    assert problem.path == "tracking.0"
    assert "cannot be imported by the process that writes to trackers" in problem.message
    assert "nowhere_on_disk" in problem.message
    assert not (tmp_path / "home").exists()


def test_the_same_tracker_twice_is_refused() -> None:
    with pytest.raises(SpecError, match=r"tracking\.1: is the same as tracking\.0"):
        attrs.evolve(SMALL, tracking=(Lines("a"), Lines("a")))
