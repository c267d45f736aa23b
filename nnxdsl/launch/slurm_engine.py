"""Runs as jobs of Slurm; the one file that knows submitit.

Every task of a job runs the same command, and `jax.distributed` finds the others by Slurm's variables. A job that comes
near its time limit is told to save, and queued again by itself, with nobody there to see it.
"""

# pyright: reportMissingImports=false
# (its library is an extra)

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
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
from nnxdsl.launch.engines import UNBOUNDED
from nnxdsl.launch.job import Job
from nnxdsl.launch.local import signal_recorded
from nnxdsl.storage import process_info
from nnxdsl.storage.jsonl import write_json

RECORD = "submission.json"
SAVE_SECONDS = 120
"""How long before its time limit a job is told to save."""

GONE = ("PREEMPTED",)
"""States of Slurm after which a job does not come back by itself, though submitit waits for it."""


@attrs.define
class Command:
    """What each task of a job does. submitit hands it over, and asks it for what to do when time is short.

    Attributes:
        words: The command's words after Python.
        cwd: Where it is typed.
        variables: What is added to the environment.
        directory: Where what it prints goes, and how it ended.
        left: How often it may still be queued again.
        is_local: Whether signals that come here must be handed on: Slurm sends them to all processes of a task.
    """

    words: list[str]
    cwd: str
    variables: dict[str, str]
    directory: str
    left: int
    is_local: bool
    _child: Any = attrs.field(default=None, init=False)
    _is_told: bool = attrs.field(default=False, init=False)

    def __call__(self) -> int:
        """Runs the command and returns its exit code."""
        rank = submitit.JobEnvironment().global_rank
        suffix = "" if rank == 0 else f".{rank}"
        place = Path(self.directory)
        if rank == 0:
            (place / "ended.json").unlink(missing_ok=True)
        signal.signal(signal.SIGTERM, self._on_term)
        with (place / f"output{suffix}.txt").open("ab") as output:
            self._child = subprocess.Popen(
                [sys.executable, *self.words],
                cwd=self.cwd,
                env={**os.environ, **self.variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=_ignore_notice,  # the notice that time is short is for the process here
            )
        code = self._child.wait()
        if rank == 0:
            write_json(place / "ended.json", {"exit_code": code, "time": process_info.utc()})
        return code

    def checkpoint(self) -> DelayedSubmission | None:
        """Has the run save, and says what is to be queued again; None where it has had its turns."""
        if self._child is None:
            return DelayedSubmission(attrs.evolve(self)) if self.left > 0 else None
        if not self._is_told:
            self._tell()
        code = self._ended()
        with contextlib.suppress(Exception):
            write_json(Path(self.directory) / "ended.json", {"exit_code": code, "time": process_info.utc()})
        if self.left <= 0 or code in (0, 1, 2):  # it came to its own end
            return None
        return DelayedSubmission(attrs.evolve(self, left=self.left - 1))

    def _ended(self) -> int:
        """Waits for the child, and leaves it unreaped: this is called amid another wait, which holds Popen's lock."""
        try:
            found = os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # reaped already
            return 0 if self._child.returncode is None else int(self._child.returncode)
        assert found is not None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def _on_term(self, number: int, frame: object) -> None:
        if self.is_local:
            self._tell()
        self._is_told = True

    def _tell(self) -> None:
        self._is_told = True
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                self._child.send_signal(signal.SIGTERM)


def _ignore_notice() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


@contextlib.contextmanager
def _apart(file: Path) -> Iterator[None]:
    """Processes started meanwhile write to a file: the controller would hold this one's terminal or pipe open."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in (1, 2)]
    other = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        for number in (1, 2):
            os.dup2(other, number)
        yield
    finally:
        for number, before in zip((1, 2), kept, strict=True):
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
        """Submits a job; False if it is in the queue or at work."""
        if self.is_at_work(job):
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
            with _apart(job.directory / "controller.txt") if self._is_local else contextlib.nullcontext():
                submitted = executor.submit(command)
        except (RuntimeError, ValueError, OSError, FailedJobError) as error:
            raise RunError(f"{job.run} cannot be submitted: {error}") from error
        self._jobs[job.run] = submitted
        record: dict[str, Any] = {"job": submitted.job_id, "cluster": self._launcher.cluster}
        record["time"] = process_info.utc()
        if self._is_local:
            pid = int(submitted.job_id)
            record |= {"pid": pid, "pid_started": process_info.started(pid), "host": process_info.hostname()}
        job.note(RECORD, record)
        return True

    def is_at_work(self, job: Job) -> bool:
        """Whether it is in the queue or at work."""
        noted = job.noted(RECORD)
        number = noted.get("job")
        if not isinstance(number, str) or noted.get("cluster") != self._launcher.cluster:
            return False
        if self._is_local:
            if job.run in self._jobs:
                self._jobs[job.run].done()  # no zombie is to be left
            pid, started = noted.get("pid"), noted.get("pid_started")
            return isinstance(pid, int) and process_info.Process(pid, started, str(noted.get("host"))).is_alive()
        submitted = self._submitted(job, number)
        return not submitted.done() and submitted.state not in GONE

    def exit_code(self, job: Job) -> int | None:
        """Of its first task, where that lived to write it."""
        code = job.noted("ended.json").get("exit_code")
        return code if isinstance(code, int) else None

    def where(self, job: Job) -> str:
        """The number of its job."""
        what = "submitit's local job" if self._is_local else "Slurm job"
        return f"{what} {job.noted(RECORD).get('job', '?')}"

    def terminate(self, job: Job) -> None:
        """Takes it out of the queue, or asks it to save and end."""
        if self._is_local:
            signal_recorded(job, RECORD, signal.SIGTERM)
            return
        number = job.noted(RECORD).get("job")
        if isinstance(number, str):
            self._submitted(job, number).cancel(check=False)

    def close(self) -> None:
        """Nothing is held."""

    def _submitted(self, job: Job, number: str) -> Any:
        if job.run not in self._jobs:
            count = self._launcher.nodes * self._launcher.tasks_per_node
            self._jobs[job.run] = submitit.SlurmJob(job.directory / "submitit", number, tasks=list(range(count)))
        return self._jobs[job.run]

    def _parameters(self, job: Job) -> dict[str, Any]:
        asked = self._launcher
        common: dict[str, Any] = {
            "name": job.run,
            "timeout_min": asked.minutes,
            "nodes": asked.nodes,
            "tasks_per_node": asked.tasks_per_node,
            "gpus_per_node": asked.gpus_per_node,
            "cpus_per_task": asked.cpus_per_task,
            "stderr_to_stdout": True,
        }
        own: dict[str, Any] = {"setup": list(asked.setup) or None}
        if not self._is_local:
            own |= {
                "partition": asked.partition,
                "account": asked.account,
                "qos": asked.qos,
                "mem": asked.memory,
                "signal_delay_s": SAVE_SECONDS,
                "additional_parameters": dict(asked.options) or None,
                "max_num_timeout": asked.retries,
            }
        own = {f"{asked.cluster}_{name}": value for name, value in own.items()}
        return {name: value for name, value in {**common, **own}.items() if value is not None}
