"""The lock of a run directory, which admits one writer: an flock, and a record of the process that holds it."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any, cast

import attrs

from nnxdsl.errors import RunError
from nnxdsl.storage import process_info, records
from nnxdsl.storage.failpoints import hit_failpoint
from nnxdsl.storage.jsonl import open_plain, sync_directory
from nnxdsl.storage.records import problem_in

NAME = "lock"


@attrs.frozen
class Holder:
    """The process that took a lock, and when (ISO 8601, UTC)."""

    process: process_info.Process
    since: str


class RunLock:
    """Holds `<run>/lock` while a process writes the run; a context manager.

    The kernel releases an flock when its process ends, however it ends. The flock alone decides; the record in the
    file is for messages. `recovered` is the record of a holder that died without releasing the lock, else None.

    Raises:
        RunError: Another process holds it: names the process; or the file cannot be opened.
    """

    def __init__(self, directory: Path) -> None:
        """Acquires the lock without waiting."""
        self.path = directory / NAME
        self.recovered: Holder | None = None
        is_new = not self.path.exists()
        try:
            descriptor = open_plain(self.path, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError as error:
            raise RunError(f"{self.path}: the lock cannot be opened: {error.strerror}") from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise RunError(_in_use(self.path.parent, _read(descriptor))) from error
            self.recovered = _read(descriptor)
            hit_failpoint("lock-taken")
            me = process_info.current()
            record = {"pid": me.pid, "pid_started": me.started, "host": me.host, "since": process_info.utc()}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(record).encode() + b"\n", 0)
            os.fsync(descriptor)
            hit_failpoint("lock-recorded")
            if is_new:
                sync_directory(self.path.parent)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Empties the record and releases the lock; a second call does nothing."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _read(descriptor: int) -> Holder | None:
    """The record in the file; None if there is none, or another process is writing it."""
    try:
        record = json.loads(os.pread(descriptor, 4096, 0))
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    fields = cast(dict[str, Any], record)
    if problem_in(fields, records.HOLDER, required=("pid", "host")) is not None:
        return None
    holder = process_info.Process(fields["pid"], fields.get("pid_started"), fields["host"])
    return Holder(holder, str(fields.get("since")))


def _in_use(directory: Path, holder: Holder | None) -> str:
    if holder is None:
        return f"{directory} is in use by another process; wait until it ends"
    pid = holder.process.pid
    who = f"{directory} is in use by process {pid} on {holder.process.host} since {holder.since}"
    if not holder.process.is_here():
        return f"{who}; wait until it ends, or stop it there"
    if pid == os.getpid():
        return f"{who}, which is this process; release the first lock before taking a second"
    if not holder.process.is_alive():
        return f"{who}, which has ended but left a child that holds the lock; end the child"
    return f"{who}; wait until it ends, or stop it with `kill -TERM {pid}` (it saves first)"
