"""Runs as processes of this machine that outlive the process that started them.

A job's lock is taken before its process begins and inherited by it until it ends. So anybody can see whether a job is
running, two cannot start it at once, and nothing is lost when the starter is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
from pathlib import Path

from nnxdsl.config.launcher import Local
from nnxdsl.errors import RunError
from nnxdsl.launch import process
from nnxdsl.launch.job import Job
from nnxdsl.storage import process_info

LOCK = "process.lock"
RECORD = "process.json"


class LocalEngine:
    """Processes on this machine."""

    poll_seconds = 0.3

    def __init__(self, launcher: Local) -> None:
        """Starts nothing."""
        self.parallel, self.retries = launcher.parallel, launcher.retries
        self._gpus = launcher.gpus
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._slots: dict[str, int] = {}

    def start(self, job: Job) -> bool:
        """Starts a job; False if it is running already."""
        descriptor = _try_lock(job.directory / LOCK)
        if descriptor is None:
            self._slots[job.run] = int(job.read(RECORD).get("slot") or 0)
            return False
        try:
            slot = self._free_slot()
            try:
                child = process.start(
                    job.command()[1:],
                    job.output,
                    cwd=job.cwd,
                    environment={**job.environment(), **self._devices(slot)},
                    start_new_session=True,  # neither Ctrl-C nor the end of a terminal reaches it
                    pass_fds=(descriptor,),
                )
            except OSError as error:
                raise RunError(f"{job.run} cannot be started: {error}") from error
        finally:
            os.close(descriptor)  # the child has inherited it
        self._children[job.run], self._slots[job.run] = child, slot
        who = process_info.Process(child.pid, process_info.started(child.pid), process_info.hostname())
        job.write(RECORD, {"pid": who.pid, "pid_started": who.started, "host": who.host, "slot": slot})
        return True

    def is_active(self, job: Job) -> bool:
        """Whether a process holds the job's lock."""
        if child := self._children.get(job.run):
            child.poll()  # leaves no zombie
        if not job.directory.is_dir():
            return False
        descriptor = _try_lock(job.directory / LOCK)
        if descriptor is None:
            return True
        os.close(descriptor)
        self._slots.pop(job.run, None)
        return False

    def exit_code(self, job: Job) -> int | None:
        """The exit code of the process, where it was started by this engine."""
        child = self._children.get(job.run)
        return None if child is None else child.wait()

    def location(self, job: Job) -> str:
        """Its process."""
        return f"process {job.read(RECORD).get('pid', '?')}"

    def terminate(self, job: Job) -> None:
        """Sends SIGTERM to its process."""
        signal_recorded(job, RECORD, signal.SIGTERM)

    def close(self) -> None:
        """Does nothing: there are no connections."""

    def _free_slot(self) -> int:
        taken = set(self._slots.values())
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)

    def _devices(self, slot: int) -> dict[str, str]:
        if self._gpus is None:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(str(slot * self._gpus + index) for index in range(self._gpus))}


def signal_recorded(job: Job, name: str, number: int) -> None:
    """Sends a signal to the process that a file of the job records, if it still runs on this machine."""
    record = job.read(name)
    pid, started, host = record.get("pid"), record.get("pid_started"), record.get("host")
    if not isinstance(pid, int) or not isinstance(host, str):
        return
    if process_info.Process(pid, started, host).is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock; None if a living process has it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunError(f"{path}: the lock cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
