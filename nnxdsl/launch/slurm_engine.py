"""Runs as jobs of Slurm; the one file that imports submitit.

Every task of a job runs the same command, and `jax.distributed` finds the others by Slurm's variables. A job near its
time limit is signalled to save, and requeues itself without the driver.
"""

# pyright: reportMissingImports=false
# (its library is an extra)

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import submitit
from submitit.core.utils import FailedJobError
from submitit.helpers import DelayedSubmission

from nnxdsl.config.launcher import Slurm
from nnxdsl.errors import RunError
from nnxdsl.launch import process
from nnxdsl.launch.engines import UNBOUNDED
from nnxdsl.launch.job import Job
from nnxdsl.launch.local import signal_recorded
from nnxdsl.storage import process_info

RECORD = "submission.json"
SAVE_SECONDS = 120
"""Seconds before its time limit at which a job is signalled to save."""

GONE = ("PREEMPTED",)
"""States of Slurm after which a job is not requeued, though submitit waits for it."""


@attrs.define
class Command:
    """The callable of each task of a job; submitit pickles it, and calls `checkpoint` near the time limit.

    Attributes:
        argv: The command's arguments after Python.
        cwd: The working directory.
        variables: Variables added to the environment.
        directory: The directory of its output and its exit code.
        requeues_left: How often it may still be requeued.
        is_local: Whether signals must be forwarded to the child: Slurm sends them to all processes of a task.
    """

    argv: list[str]
    cwd: str
    variables: dict[str, str]
    directory: str
    requeues_left: int
    is_local: bool
    _child: Any = attrs.field(default=None, init=False)
    _is_signalled: bool = attrs.field(default=False, init=False)

    def __call__(self) -> int:
        """Runs the command and returns its exit code."""
        rank = submitit.JobEnvironment().global_rank
        directory = Path(self.directory)
        if rank == 0:
            process.end_file(directory).unlink(missing_ok=True)
        signal.signal(signal.SIGTERM, self._on_term)
        self._child = process.start(
            self.argv,
            process.output_file(directory, rank),
            cwd=self.cwd,
            environment={**os.environ, **self.variables},
            preexec_fn=_ignore_time_limit_signal,  # the signal near the time limit is for this process
        )
        code = self._child.wait()
        if rank == 0:
            process.write_end(directory, code)
        return code

    def checkpoint(self) -> DelayedSubmission | None:
        """Makes the run save, and returns the submission to requeue; None if no requeues are left."""
        if self._child is None:
            return DelayedSubmission(attrs.evolve(self)) if self.requeues_left > 0 else None
        if not self._is_signalled:
            self._terminate()
        code = self._wait_without_reaping()
        with contextlib.suppress(Exception):
            process.write_end(Path(self.directory), code)
        if self.requeues_left <= 0 or code in (0, 1, 2):  # it ended by itself
            return None
        return DelayedSubmission(attrs.evolve(self, requeues_left=self.requeues_left - 1))

    def _wait_without_reaping(self) -> int:
        """Waits for the child without reaping it: this is called during another wait, which has Popen's lock."""
        try:
            status = os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # reaped already
            return 0 if self._child.returncode is None else int(self._child.returncode)
        assert status is not None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status

    def _on_term(self, number: int, frame: object) -> None:
        if self.is_local:
            self._terminate()
        self._is_signalled = True

    def _terminate(self) -> None:
        self._is_signalled = True
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(signal.SIGTERM)


def _ignore_time_limit_signal() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


@contextlib.contextmanager
def _output_to(file: Path) -> Iterator[None]:
    """Has child processes write to a file: the controller would keep this one's terminal or pipe open."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(number) for number in (1, 2)]
    other = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        for number in (1, 2):
            os.dup2(other, number)
        yield
    finally:
        for number, before in zip((1, 2), saved, strict=True):
            os.dup2(before, number)
            os.close(before)
        os.close(other)


class SlurmEngine:
    """Jobs of Slurm, or of submitit's own controller on this machine."""

    def __init__(self, launcher: Slurm) -> None:
        """Submits nothing.

        Raises:
            RunError: there is no Slurm on this machine.
        """
        if launcher.cluster == "slurm" and shutil.which("sbatch") is None:
            raise RunError("Launcher.Slurm: there is no sbatch here; launch from a machine that submits to the cluster")
        self._launcher = launcher
        self._is_local = launcher.cluster == "local"
        self.parallel, self.retries = launcher.parallel or UNBOUNDED, launcher.retries
        self.poll_seconds = 0.3 if self._is_local else 5.0
        self._jobs: dict[str, Any] = {}

    def start(self, job: Job) -> bool:
        """Submits a job; False if it is queued or running."""
        if self.is_active(job):
            return False
        try:
            executor = submitit.AutoExecutor(folder=job.directory / "submitit", cluster=self._launcher.cluster)
            executor.update_parameters(**self._parameters(job))
            command = Command(
                job.command()[1:],
                str(job.cwd),
                dict(job.variables),
                str(job.directory),
                self.retries,
                self._is_local,
            )
            with _output_to(job.directory / "controller.txt") if self._is_local else contextlib.nullcontext():
                submitted = executor.submit(command)
        except (RuntimeError, ValueError, OSError, FailedJobError) as error:
            raise RunError(f"{job.run} cannot be submitted: {error}") from error
        self._jobs[job.run] = submitted
        record: dict[str, Any] = {"job": submitted.job_id, "cluster": self._launcher.cluster}
        record["time"] = process_info.utc()
        if self._is_local:
            pid = int(submitted.job_id)
            record |= {"pid": pid, "pid_started": process_info.started(pid), "host": process_info.hostname()}
        job.write(RECORD, record)
        return True

    def is_active(self, job: Job) -> bool:
        """Whether it is queued or running."""
        record = job.read(RECORD)
        number = record.get("job")
        if not isinstance(number, str) or record.get("cluster") != self._launcher.cluster:
            return False
        if self._is_local:
            if job.run in self._jobs:
                self._jobs[job.run].done()  # leaves no zombie
            pid, started = record.get("pid"), record.get("pid_started")
            return isinstance(pid, int) and process_info.Process(pid, started, str(record.get("host"))).is_alive()
        submitted = self._submitted(job, number)
        return not submitted.done() and submitted.state not in GONE

    def exit_code(self, job: Job) -> int | None:
        """The exit code that its first task has written."""
        return process.recorded_exit_code(job)

    def location(self, job: Job) -> str:
        """The number of its job."""
        what = "submitit's local job" if self._is_local else "Slurm job"
        return f"{what} {job.read(RECORD).get('job', '?')}"

    def terminate(self, job: Job) -> None:
        """Removes it from the queue, or makes it save and end."""
        if self._is_local:
            signal_recorded(job, RECORD, signal.SIGTERM)
            return
        number = job.read(RECORD).get("job")
        if isinstance(number, str):
            self._submitted(job, number).cancel(check=False)

    def close(self) -> None:
        """Does nothing: there are no connections."""

    def _submitted(self, job: Job, number: str) -> Any:
        if job.run not in self._jobs:
            count = self._launcher.nodes * self._launcher.tasks_per_node
            self._jobs[job.run] = submitit.SlurmJob(job.directory / "submitit", number, tasks=list(range(count)))
        return self._jobs[job.run]

    def _parameters(self, job: Job) -> dict[str, Any]:
        launcher = self._launcher
        common: dict[str, Any] = {
            "name": job.run,
            "timeout_min": launcher.minutes,
            "nodes": launcher.nodes,
            "tasks_per_node": launcher.tasks_per_node,
            "gpus_per_node": launcher.gpus_per_node,
            "cpus_per_task": launcher.cpus_per_task,
            "stderr_to_stdout": True,
        }
        specific: dict[str, Any] = {"setup": list(launcher.setup) or None}
        if not self._is_local:
            specific |= {
                "partition": launcher.partition,
                "account": launcher.account,
                "qos": launcher.qos,
                "mem": launcher.memory,
                "signal_delay_s": SAVE_SECONDS,
                "additional_parameters": dict(launcher.options) or None,
                "max_num_timeout": launcher.retries,
            }
        specific = {f"{launcher.cluster}_{name}": value for name, value in specific.items()}
        return {name: value for name, value in {**common, **specific}.items() if value is not None}
