"""Multi-process runs in real processes: results equal to one process, stops, failures, resumes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runtime.distributed import LOST_SECONDS, REPORT_SECONDS, DistributedArgs, ProcessError, distributed_args
from tests.waiting import HANG_SECONDS

MESH = ("mesh.data=2", "mesh.fsdp=2")
"""Four devices: in one process, or two in each of two."""

SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environment", "is_one_of_many"),
    [
        ({}, False),
        ({**SLURM, "SLURM_NTASKS": "2"}, True),
        ({**SLURM, "SLURM_NTASKS": "1"}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, False),  # inside of an allocation, but not started by srun
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, False),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),  # any pod
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, True),
        ({"JAX_PLATFORMS": "tpu", "TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"JAX_PLATFORMS": "tpu", "TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"JAX_PLATFORMS": "cpu", "TPU_WORKER_HOSTNAMES": "a,b"}, False),
    ],
)
def test_engines_are_known_by_what_they_set(environment: dict[str, str], is_one_of_many: bool) -> None:
    assert distributed_args(DistributedArgs(), environment) == (DistributedArgs() if is_one_of_many else None)


def test_flags_come_before_the_environment() -> None:
    reported = {"JAX_COORDINATOR_ADDRESS": "a:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
    assert distributed_args(DistributedArgs(), {**reported, **SLURM, "SLURM_NTASKS": "8"}) == DistributedArgs(
        "a:1234", 4, 3
    )
    assert distributed_args(DistributedArgs("b:1", 2, 0), reported) == DistributedArgs("b:1", 2, 0)
    assert distributed_args(DistributedArgs("b:1", 1, 0), reported) is None


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            DistributedArgs("a:1"),
            "--processes, --process: missing; --coordinator, --processes and --process go together",
        ),
        (DistributedArgs("a", 2, 0), "--coordinator: expected host:port, got 'a'"),
        (DistributedArgs("a:1", 0, 0), "--processes: expected a value > 0, got 0"),
        (DistributedArgs("a:1", 2, 2), "--process: expected 0 to 1, got 2"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: DistributedArgs, message: str) -> None:
    with pytest.raises(ProcessError, match=f"^{re.escape(message)}$"):
        distributed_args(asked, {})


def start(lab: Any, *argv: str, processes: int, devices: int = 4) -> list[subprocess.Popen[str]]:
    """A run in several processes, which have so many devices together."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={devices // processes}"
    environment = {**lab.environment, "XLA_FLAGS": flags}
    return [
        subprocess.Popen(
            [sys.executable, *argv, *distributed_flags(processes, number, port)],
            cwd=lab.place,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(processes)
    ]


def distributed_flags(processes: int, number: int, port: int) -> list[str]:
    fields = ["--coordinator", f"localhost:{port}", "--processes", str(processes), "--process", str(number)]
    return fields if processes > 1 else []


def ended(children: list[subprocess.Popen[str]], seconds: float = 800) -> list[tuple[int, str]]:
    """Exit code and output of each."""
    try:
        said = [child.communicate(timeout=seconds)[0] for child in children]
        return [(child.returncode, out) for child, out in zip(children, said, strict=True)]
    finally:
        for child in children:
            child.kill()


def finished_run(lab: Any, name: str) -> RunDirectory:
    (path,) = (lab.place / "runs").glob(f"{name}-*")
    return RunDirectory(path)


def assert_close(one: RunDirectory, two: RunDirectory) -> None:
    """Equal but for the order in which devices add up: float32 rounding, which training carries on."""
    for mine, other in ((one.metrics(), two.metrics()), (one.evaluations(), two.evaluations())):
        assert [row["step"] for row in mine] == [row["step"] for row in other]
        for left, right in zip(mine, other, strict=True):
            assert left.keys() == right.keys()
            for name in ("loss", "grad_norm", "num_tokens", "eval/loss"):
                if name in left:
                    np.testing.assert_allclose(left[name], right[name], rtol=2e-3, err_msg=f"{left['step']} {name}")
    first, other = one.metrics()[0], two.metrics()[0]
    np.testing.assert_allclose(first["loss"], other["loss"], rtol=1e-6)
    np.testing.assert_allclose(first["grad_norm"], other["grad_norm"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_processes_say_what_one_says(lab: Any, finished: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = type(lab)(tmp_path_factory.mktemp("one") / "lab", lab.environment)
    shutil.copytree(lab.place, other.place)
    for place in (lab, other):  # the first stage, whose run both start from
        shutil.copytree(finished.run("sft"), place.place / "runs" / finished.run("sft").name)
    one = ended(start(other, "dpo.py", "run", *MESH, processes=1))
    two = ended(start(lab, "dpo.py", "run", *MESH, processes=2))
    assert [code for code, _ in one + two] == [0, 0, 0], two
    assert "finished at step 40" in two[0][1]
    assert [line for line in two[1][1].splitlines() if not line.startswith("[Gloo]")] == [], "the first alone talks"
    here, existing = finished_run(lab, "dpo"), finished_run(other, "dpo")
    assert_close(here, existing)
    assert here.status()["state"] == "finished"
    assert len(here.attempts()) == 1, "written by one"
    assert len(here.samples()) == len(existing.samples())
    assert (here.path / "log.1.txt").is_file()
    code, out = ended(start(lab, "dpo.py", "run", *MESH, processes=2))[0]
    assert code == 0
    assert "already finished" in out


ROWS_READ = """
import json

import jax

from dpo import experiment as dpo
from nnxdsl import Memory, Weights, evolve
from nnxdsl.data.ragged import Ragged

experiment = evolve(
    dpo,
    {"model.weights": Weights.Random(), "memory": Memory(reference="online"), "evaluation": None, "steps": 10},
)
read, original = set(), Ragged.__getitem__


def recorded(self, row):
    read.add(int(row))
    return original(self, row)


Ragged.__getitem__ = recorded

if __name__ == "__main__":
    try:
        experiment.main()
    finally:
        with open(f"read.{jax.process_index()}.{jax.process_count()}.json", "w") as file:
            json.dump(sorted(read), file)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_process_reads_its_rows_and_no_others(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = type(lab)(tmp_path_factory.mktemp("one") / "lab", lab.environment)
    shutil.copytree(lab.place, other.place)
    for place in (lab, other):
        (place.place / "rows_read.py").write_text(ROWS_READ, encoding="utf-8")
    two = ended(start(lab, "rows_read.py", "run", *MESH, processes=2))
    assert [code for code, _ in two] == [0, 0], two
    one = ended(start(other, "rows_read.py", "run", *MESH, processes=1))
    assert [code for code, _ in one] == [0], one
    first, second = (set(json.loads((lab.place / f"read.{n}.2.json").read_text())) for n in range(2))
    assert len(first) == len(second) == 20, "10 steps of 4 rows are one epoch of 40"
    assert first | second == set(json.loads((other.place / "read.0.1.json").read_text())) == set(range(40))
    here, existing = finished_run(lab, "dpo"), finished_run(other, "dpo")
    assert len(here.metrics()) == 10
    assert_close(here, existing)
    assert [row["num_tokens"] for row in here.metrics()] == [row["num_tokens"] for row in existing.metrics()]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("which", [0, 1])
def test_a_signal_to_one_stops_all_at_one_step(lab: Any, wait_until: Callable[..., None], which: int) -> None:
    children = start(lab, "sft.py", "run", *MESH, processes=2)
    wait_until(lambda: rows_written(lab) > 3, children[0])
    children[which].send_signal(signal.SIGTERM)
    assert [code for code, _ in ended(children)] == [128 + signal.SIGTERM] * 2
    run = finished_run(lab, "sft")
    status = run.status()
    assert status["state"] == "stopped"
    assert status["checkpoint"] == status["step"] == len(run.metrics())
    # Another number of processes goes on with it, to the end.
    ((code, out),) = ended(start(lab, "sft.py", "run", *MESH, processes=1))
    assert code == 0, out
    assert f"at step {status['step']}" in out
    assert [row["step"] for row in run.metrics()] == list(range(60))
    assert run.status()["state"] == "finished"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("which", [0, 1])
def test_killing_one_ends_the_others(lab: Any, wait_until: Callable[..., None], which: int) -> None:
    began = time.monotonic()
    children = start(lab, "sft.py", "run", *MESH, processes=2)
    wait_until(lambda: rows_written(lab) > 12, children[0])
    killed = time.monotonic()
    children[which].send_signal(signal.SIGKILL)
    results = ended(children)
    assert time.monotonic() - killed < LOST_SECONDS + 2 * REPORT_SECONDS + (killed - began)
    code, out = results[1 - which]
    assert code not in (0, 2)
    assert out.strip(), "it says why"
    if which == 1:
        status = finished_run(lab, "sft").status()
        assert status["state"] == "failed"
        assert status["error"]
    # Started again, in two processes, it goes on from what was saved last.
    again = ended(start(lab, "sft.py", "run", *MESH, processes=2))
    assert [code for code, _ in again] == [0, 0], again
    run = finished_run(lab, "sft")
    assert [row["step"] for row in run.metrics()] == list(range(60))
    assert run.attempts()[-1]["start"] >= 9


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_one_that_hangs_ends_the_others(lab: Any, wait_until: Callable[..., None]) -> None:
    children = start(lab, "sft.py", "run", *MESH, processes=2)
    try:
        wait_until(lambda: rows_written(lab) > 12, children[0])
        children[1].send_signal(signal.SIGSTOP)
        out, _ = children[0].communicate(timeout=HANG_SECONDS)
        assert children[0].returncode not in (0, 2), out
        status = finished_run(lab, "sft").status()
        assert status["state"] == "failed"
        assert "process 1 (pid " in status["error"]
        assert "has not been heard of for 30 s" in status["error"]
    finally:
        for child in children:
            child.kill()
            child.communicate()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_slow_process_is_waited_for(lab: Any, wait_until: Callable[..., None]) -> None:
    children = start(lab, "sft.py", "run", *MESH, processes=2)
    wait_until(lambda: rows_written(lab) > 3, children[0])
    children[1].send_signal(signal.SIGSTOP)
    time.sleep(8)
    children[1].send_signal(signal.SIGCONT)
    assert [code for code, _ in ended(children)] == [0, 0]
    assert [row["step"] for row in finished_run(lab, "sft").metrics()] == list(range(60))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_what_one_refuses_all_refuse(lab: Any) -> None:
    children = start(lab, "sft.py", "run", "mesh.data=2", processes=2)  # two of four devices
    results = ended(children)
    assert [code for code, _ in results] == [2, 2]
    assert "mesh: a mesh of 2 devices has none of 1 of the 2 processes; use all 4 devices" in results[0][1]
    assert not (Path(lab.place) / "runs").exists() or not list((Path(lab.place) / "runs").glob("sft-*"))


def rows_written(lab: Any) -> int:
    result = list((lab.place / "runs").glob("sft-*/metrics.jsonl"))
    return result[0].read_bytes().count(b'"loss"') if result else 0
