"""A directory with an awkward name, a tiny experiment in it, and the commands that launch it, as processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import JsonLines

ROOT = Path(__file__).parents[2]
AWKWARD = 'it\'s a "place" $(touch hacked); ü'

FILE = """
from nnxdsl import *

experiment = Experiment(
    name="tiny",
    model=Model.Gemma3("tiny"),
    objective=Objective.SFT(loss_on="all"),
    data=Data.Text("texts.jsonl", max_length=32),
    optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=1e-2)),
    batch_size=2,
    steps=2,
    checkpoint=Checkpoint(every_steps=50),
)
"""


@attrs.frozen
class Lab:
    """A directory and what is run in it."""

    place: Path
    environment: dict[str, str]
    command: tuple[str, ...] = ("-m", "nnxdsl")
    children: list[subprocess.Popen[str]] = attrs.Factory(list)

    def without_training(self) -> Lab:
        """The same, where what is started only writes what a run writes."""
        return attrs.evolve(self, command=(str(Path(__file__).parent / "drive_fake_runs.py"),))

    @property
    def home(self) -> Path:
        """Where the runs are."""
        return self.place / "all runs"

    def write(self, code: str) -> None:
        """The file of the experiment, and more code after it."""
        (self.place / "my sweep.py").write_text(FILE + code, encoding="utf-8")

    def start(self, verb: str, *argv: str) -> subprocess.Popen[str]:
        """`nnxdsl VERB FILE WORDS`."""
        child = subprocess.Popen(
            [sys.executable, *self.command, verb, "my sweep.py", "--home", "all runs", *argv],
            cwd=self.place,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.children.append(child)
        return child

    def run(self, verb: str, *argv: str, seconds: float = 900) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of the same."""
        child = self.start(verb, *argv)
        out, err = child.communicate(timeout=seconds)
        return child.returncode, out, err

    def runs(self) -> list[Path]:
        """The directories of all runs."""
        return sorted(path for path in self.home.glob("tiny-*") if (path / "run.json").exists())

    def finished(self) -> list[Path]:
        """Those of finished ones."""
        return [path for path in self.runs() if RunDirectory(path).status().get("state") == "finished"]

    def events(self, kind: str = "sweeps") -> list[dict[str, Any]]:
        """All that the driver wrote down."""
        (result,) = (self.home / kind).glob("*/trials.jsonl")
        return JsonLines(result).read()

    def results(self) -> dict[str, Any]:
        """What the sweep came to."""
        (result,) = (self.home / "sweeps").glob("*/results.json")
        return json.loads(result.read_text())

    def kill(self, run: Path) -> None:
        """Ends the process that writes a run, as if its machine had gone."""
        writer = RunDirectory(run).status()
        pid = writer.get("pid")
        assert pid is not None
        assert process_info.is_alive(pid, writer.get("pid_started"))
        os.kill(pid, signal.SIGKILL)

    def assert_each_once(self, count: int, steps: int = 2) -> None:
        """Every run was begun once, took each step once, and has finished."""
        assert len(self.runs()) == len(self.finished()) == count
        for path in self.runs():
            run = RunDirectory(path)
            assert len(run.attempts()) == 1
            assert [row["step"] for row in run.metrics()] == list(range(steps))


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    place = tmp_path / AWKWARD
    place.mkdir()
    rows = [{"text": f"hello {number} " * 3} for number in range(8)]
    (place / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = Lab(place, {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "JAX_PLATFORMS": "cpu"})
    made.write("")
    yield made
    for child in made.children:
        child.kill()
        child.communicate()
    for path in made.runs():  # nothing is to outlive a test that failed
        status = RunDirectory(path).status()
        pid = status.get("pid")
        is_here = status.get("host") == process_info.hostname()
        if pid and is_here and process_info.is_alive(pid, status.get("pid_started")):
            os.kill(pid, signal.SIGKILL)
    assert not list(place.glob("**/hacked"))


@pytest.fixture
def wait_until() -> Callable[..., None]:
    def wait(is_so: Callable[[], object], child: subprocess.Popen[str] | None = None, seconds: float = 600) -> None:
        """Waits until something is so, as long as the process lives."""
        end = time.monotonic() + seconds
        while not is_so():
            if child is not None and child.poll() is not None:
                raise AssertionError(f"ended with {child.returncode}: {child.communicate()[1][-3000:]}")
            assert time.monotonic() < end
            time.sleep(0.02)

    return wait


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """A real cluster of Ray on this machine, with room for two; its address."""
    pytest.importorskip("ray")
    with socket.socket() as result:
        result.bind(("127.0.0.1", 0))
        port = result.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as place:  # its sockets need a short path
        argv = ["--head", f"--port={port}", "--num-cpus=2", "--include-dashboard=false", f"--temp-dir={place}"]
        argv += ["--node-ip-address=127.0.0.1", "--object-store-memory=100000000", "--disable-usage-stats", "--block"]
        with open(Path(place) / "said.txt", "w") as said:
            child = subprocess.Popen(
                [str(Path(sys.executable).parent / "ray"), "start", *argv],
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "JAX_PLATFORMS": "cpu",
                    "RAY_raylet_start_wait_time_s": "240",  # under load it takes its time
                },
                stdout=said,
                stderr=subprocess.STDOUT,
            )
        try:
            end = time.monotonic() + 300
            while "Ray runtime started" not in (Path(place) / "said.txt").read_text():
                assert child.poll() is None, (Path(place) / "said.txt").read_text()
                assert time.monotonic() < end
                time.sleep(0.1)
            yield f"127.0.0.1:{port}"
        finally:
            child.terminate()
            child.wait(30)
