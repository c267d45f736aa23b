"""What every engine promises, with a process that sleeps in place of a run: one start, a new driver, ends, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nnxdsl import Launcher
from nnxdsl.launch.engines import open_engine
from nnxdsl.launch.job import Job

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]

SLEEPING = """
import os, signal, sys, time
from pathlib import Path

def leave(*_):
    print("saving", flush=True)
    sys.exit(143)

signal.signal(signal.SIGTERM, leave)
count = Path("count")
number = int(count.read_text()) if count.exists() else 0
count.write_text(str(number + 1))
print("begin", os.getpid(), os.getppid(), *sys.argv[2:], flush=True)
if number >= int(sys.argv[1]):
    sys.exit(7)
time.sleep(120)
"""


class Sleeping(Job):
    """A job whose command sleeps; from its so manieth start on, which is its only word, it ends with code 7."""

    def command(self, python: str = sys.executable, *more: str) -> list[str]:
        return [python, "-S", "-c", SLEEPING, *self.argv, *more]


STARTER = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from test_engines import job_in
from nnxdsl.launch.engines import open_engine
from nnxdsl.config.core.codegen import parse_value
from pathlib import Path
engine = open_engine(parse_value(sys.argv[2]))
job = job_in(Path(sys.argv[3]), "9")
assert engine.start(job)
assert not engine.start(job)
os.kill(os.getpid(), signal.SIGKILL)
"""


def job_in(place: Path, *argv: str) -> Job:
    directory = place / "it's $(touch hacked) ü"
    directory.mkdir(exist_ok=True)
    return Sleeping(f"tiny-{os.path.basename(place)[-8:]:0>8}", directory, argv, directory, {"A": "b"})


@pytest.fixture(params=["local", "slurm", "ray"])
def launcher(request: pytest.FixtureRequest) -> str:
    if request.param == "local":
        return "Launcher.Local()"
    if request.param == "slurm":
        pytest.importorskip("submitit")
        return "Launcher.Slurm(cluster='local', retries=1)"
    return f"Launcher.Ray(address='{request.getfixturevalue('cluster')}')"


@pytest.fixture
def engine(launcher: str) -> Iterator[Any]:
    result = open_engine(eval(launcher, {"Launcher": Launcher}))
    yield result
    result.close()


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(f"{time.time_ns() % 10**8:08d}-", numbered=False)


def begun(job: Job) -> list[list[str]]:
    return [line.split()[1:] for line in job.output_tail().splitlines() if line.startswith("begin")]


def test_what_a_killed_starter_left_goes_on_and_is_found(
    launcher: str, engine: Any, place: Path, wait_until: Callable[..., None]
) -> None:
    argv = [sys.executable, "-c", STARTER, str(Path(__file__).parent), launcher, str(place)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    job = job_in(place, "9")
    wait_until(lambda: begun(job))
    assert engine.is_active(job)
    assert engine.start(job) is False
    engine.terminate(job)
    wait_until(lambda: not engine.is_active(job))
    assert len(begun(job)) == 1
    assert job.output_tail().endswith("saving\n")
    assert engine.location(job)


def test_how_a_job_ended_is_known(engine: Any, place: Path, wait_until: Callable[..., None]) -> None:
    job = job_in(place, "0")
    assert not engine.is_active(job)
    for count in (1, 2):
        assert engine.start(job)
        wait_until(lambda: not engine.is_active(job))
        assert engine.exit_code(job) == 7
        assert len(begun(job)) == count


def test_a_killed_process_ends_the_job(engine: Any, place: Path, wait_until: Callable[..., None]) -> None:
    job = job_in(place, "9")
    assert engine.start(job)
    wait_until(lambda: begun(job))
    os.kill(int(begun(job)[0][0]), signal.SIGKILL)
    wait_until(lambda: not engine.is_active(job))
    assert engine.exit_code(job) == -signal.SIGKILL


def test_a_job_of_slurm_comes_back_by_itself_when_time_is_short(place: Path, wait_until: Callable[..., None]) -> None:
    pytest.importorskip("submitit")
    engine, job = open_engine(Launcher.Slurm(cluster="local", retries=1)), job_in(place, "1")
    assert engine.start(job)
    wait_until(lambda: begun(job))
    number = engine.location(job)
    os.kill(int(begun(job)[0][1]), signal.SIGUSR2)  # its parent: submitit's process
    wait_until(lambda: not engine.is_active(job))
    assert len(begun(job)) == 2
    assert engine.location(job) == number
    assert engine.exit_code(job) == 7


def test_a_job_of_slurm_that_has_had_its_turns_does_not(place: Path, wait_until: Callable[..., None]) -> None:
    pytest.importorskip("submitit")
    engine, job = open_engine(Launcher.Slurm(cluster="local", retries=0)), job_in(place, "9")
    assert engine.start(job)
    wait_until(lambda: begun(job))
    os.kill(int(begun(job)[0][1]), signal.SIGUSR2)
    wait_until(lambda: not engine.is_active(job))
    assert len(begun(job)) == 1
    assert engine.exit_code(job) == 143


def test_processes_of_one_run_are_told_where_the_first_is(
    cluster: str, place: Path, wait_until: Callable[..., None]
) -> None:
    engine = open_engine(Launcher.Ray(address=cluster, processes=2))
    job, second = job_in(place, "9"), place / "it's $(touch hacked) ü" / "output.1.txt"
    try:
        assert engine.start(job)
        wait_until(lambda: begun(job) and second.exists() and "begin" in second.read_text())
        engine.terminate(job)
        wait_until(lambda: not engine.is_active(job))
        assert engine.exit_code(job) == 143
    finally:
        engine.close()
    other = second.read_text().splitlines()[0].split()[3:]
    first = begun(job)[0][2:]
    assert first == ["--coordinator", first[1], "--processes", "2", "--process", "0"]
    assert other == [*first[:-1], "1"]
    assert int(first[1].rpartition(":")[2]) > 0
