"""Writes checkpoints atomically: orbax writes the arrays, a manifest with digests commits them."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import jax
import orbax.checkpoint as ocp

from nnxdsl.runs.checkpoint_format import (
    ARRAYS,
    TRASH,
    WRITING,
    ArrayInfo,
    CheckpointError,
    check_savable,
    first_line,
    step_name,
)
from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.runs.completeness import check_complete
from nnxdsl.runtime.distributed import is_process_0
from nnxdsl.runtime.event_loops import use_patient_loops
from nnxdsl.runtime.limits import descriptor_shortage
from nnxdsl.storage import disk_space, manifest
from nnxdsl.storage.failpoints import hit_failpoint
from nnxdsl.storage.jsonl import sync_directory
from nnxdsl.storage.manifest import DamageError

Arrays = Mapping[str, jax.Array]

_BARRIER_MS = 600_000
_barriers: defaultdict[Path, Iterator[int]] = defaultdict(itertools.count)  # the name of a barrier is used once


@attrs.define
class _Saving:
    """A save in progress."""

    step: int
    body: dict[str, Any]
    protect: frozenset[int]
    checkpointer: ocp.AsyncCheckpointer
    thread: threading.Thread | None = None
    error: BaseException | None = None
    done: bool = False


class Checkpoints(CheckpointReader):
    """The checkpoints of one run, in `<directory>/<step>/`, for reading and writing.

    A step holds orbax's files and a manifest with the size and sha256 of each of them, and the manifest's own digest.
    It is written under `.writing/`, checked to hold every array, synced to disk, and last of all renamed to its name;
    the rename is the commit. A step is deleted by a rename into `.trash/` first. So however the process is killed,
    every listed step is complete.
    With several processes (one shared directory) all call each method; process 0 does the work on the files.

    Raises:
        CheckpointError: From every method that accesses the disk.
    """

    def __init__(self, directory: Path, *, keep: int | None = None) -> None:
        """Opens a directory for writing, creates it if missing, and deletes leftovers of a killed writer.

        Args:
            directory: Usually `<run>/checkpoints`.
            keep: How many of the newest steps to keep; None keeps all.
        """
        if keep is not None and keep < 1:
            raise ValueError(f"keep: expected at least 1, got {keep}")
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{directory}: cannot be created: {error.strerror}") from error
        super().__init__(directory)
        self.keep = keep
        self._saving: _Saving | None = None
        self._committed: int | None = None
        self._plain()  # refuses a path that cannot be used before anything is computed
        if is_process_0():
            for name in (WRITING, TRASH):
                shutil.rmtree(self.directory / name, ignore_errors=True)

    def save(
        self, step: int, groups: Mapping[str, Arrays], meta: Mapping[str, Any], *, protect: Iterable[int] = ()
    ) -> bool:
        """Starts to save a step; the arrays may be donated or changed as soon as this returns.

        The step is committed once `wait` (or `poll`) returns it. Waits for the previous save first.

        Args:
            step: Number of steps done; the name of the checkpoint.
            groups: Arrays by group ("trainable", "optimizer", ...) and name; a group can be restored on its own.
            meta: Other state of the step, as JSON.
            protect: Older steps that must not be deleted.

        Returns:
            False if the step is committed already and undamaged: then nothing is done.

        Raises:
            CheckpointError: This or the last save failed, or an array has a dtype or shape that cannot be saved.
        """
        self.wait()
        contents = {
            group: {name: ArrayInfo.from_array(array) for name, array in arrays.items()}
            for group, arrays in groups.items()
        }
        check_savable(step, contents)
        if self._is_good(step):
            return False
        self.require_free_space(step, groups)
        body = {
            "step": step,
            "meta": json.loads(json.dumps(dict(meta))),
            "arrays": {
                group: {name: {"shape": list(info.shape), "dtype": info.dtype} for name, info in infos.items()}
                for group, infos in contents.items()
            },
        }
        temporary = self.directory / WRITING / step_name(step)
        use_patient_loops()
        checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        saving = _Saving(step, body, frozenset(protect), checkpointer)
        try:
            if is_process_0():
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
                hit_failpoint("save-begun")
            _barrier(self.directory)
            items = {group: ocp.args.PyTreeSave(dict(arrays)) for group, arrays in groups.items() if arrays}
            if items:
                checkpointer.save(self._plain() / WRITING / step_name(step) / ARRAYS, args=ocp.args.Composite(**items))
            hit_failpoint("save-started")
        except Exception as error:
            self._discard(saving)
            raise self._failed(step, error) from error
        # In a thread, so that the step is committed as soon as orbax is done and not at the next call.
        saving.thread = threading.Thread(target=self._finish, args=(saving,), name=f"checkpoint-{step}")
        self._saving = saving
        saving.thread.start()
        return True

    def require_free_space(
        self, step: int, groups: Mapping[str, Mapping[str, jax.Array | jax.ShapeDtypeStruct]]
    ) -> None:
        """Refuses a save for which the disk has too little free space, before anything is written or computed.

        Counts the arrays uncompressed; orbax compresses them, so that they may take less.

        Raises:
            CheckpointError: With the bytes that are needed and free.
        """
        needed = sum(_bytes(array) for arrays in groups.values() for array in arrays.values())
        if why := descriptor_shortage():
            raise self._failed(step, why)
        if is_process_0() and (why := disk_space.shortage(self.directory, needed)):
            raise self._failed(step, why)

    def wait(self) -> int | None:
        """Waits for a save in progress; returns the newest step that this object has committed.

        Raises:
            CheckpointError: The save failed; the last committed step is unchanged.
        """
        if self._saving is not None and self._saving.thread is not None:
            self._saving.thread.join()
        return self.poll()

    def poll(self) -> int | None:
        """Like `wait`, without waiting: cheap enough to call at each step and notice early that a save has failed."""
        saving = self._saving
        if saving is not None and saving.done:
            self._saving = None
            if saving.error is not None:
                raise self._failed(saving.step, saving.error) from saving.error
            self._committed = saving.step
        return self._committed

    def close(self) -> None:
        """Waits for a save in progress; call it (or leave a `with`) before the process ends."""
        self.wait()

    def _is_good(self, step: int) -> bool:
        try:
            self._verify(step, None)
        except DamageError:
            return False
        return True

    def _finish(self, saving: _Saving) -> None:
        try:
            saving.checkpointer.wait_until_finished()
            hit_failpoint("save-written")
            if is_process_0():
                self._commit(saving)
        except BaseException as error:  # raised by the next `wait` or `poll`
            saving.error = error
        finally:
            self._discard(saving)
            hit_failpoint("save-cleared")
            try:
                _barrier(self.directory)
                if saving.error is None and not (self._path(saving.step) / manifest.NAME).exists():
                    raise OSError("process 0 could not commit it")
            except Exception as error:
                saving.error = saving.error or error
            saving.done = True

    def _commit(self, saving: _Saving) -> None:
        place, target = self.directory / WRITING / step_name(saving.step), self._path(saving.step)
        check_complete(self._plain() / WRITING / step_name(saving.step) / ARRAYS, saving.body["arrays"])
        manifest.write(place, saving.body)
        hit_failpoint("commit-unnamed")
        if target.exists():  # only a damaged step can be here
            self._remove(target)
            hit_failpoint("commit-replaced")
        os.rename(place, target)
        hit_failpoint("commit-renamed")
        sync_directory(self.directory)
        hit_failpoint("commit-durable")
        self._damaged_steps.discard(saving.step)
        self._retire(saving.protect)

    def _retire(self, protect: frozenset[int]) -> None:
        """Deletes steps beyond `keep`, of which damaged ones do not count."""
        if self.keep is None:
            return
        steps = self.steps()
        good = [step for step in steps if step not in self._damaged_steps]
        retained = {*good[-self.keep :], *protect}
        for step in steps:
            if step not in retained and step < good[-1]:
                self._remove(self._path(step))

    def _remove(self, place: Path) -> None:
        """Deletes a step after renaming it, so that a kill leaves no incomplete step under its name."""
        trash = self.directory / TRASH
        trash.mkdir(exist_ok=True)
        taken = sum(1 for _ in trash.iterdir())
        hit_failpoint("trash-unnamed")
        os.rename(place, trash / f"{place.name}-{os.getpid()}-{taken}")
        hit_failpoint("trash-renamed")
        sync_directory(self.directory)
        hit_failpoint("trash-durable")
        shutil.rmtree(trash, ignore_errors=True)
        hit_failpoint("trash-swept")

    def _discard(self, saving: _Saving) -> None:
        with contextlib.suppress(Exception):  # its error, if any, has been recorded already
            saving.checkpointer.close()
        if is_process_0():
            shutil.rmtree(self.directory / WRITING, ignore_errors=True)

    def _failed(self, step: int, error: BaseException | str) -> CheckpointError:
        try:
            steps = self.steps()
            last = f"checkpoint step {steps[-1]} is unchanged" if steps else "there is no earlier checkpoint"
        except OSError:  # the cause of the failed save may prevent reading as well
            last = "earlier checkpoints are unchanged"
        why = error if isinstance(error, str) else first_line(error)
        return CheckpointError(
            f"checkpoint step {step} could not be saved in {self.directory}: {why}; {last}; "
            f"free some space or name another directory, and run again"
        )


def _bytes(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _barrier(directory: Path) -> None:
    """Waits for all processes through the coordinator, not the devices, so that a training step may run meanwhile."""
    if jax.process_count() > 1:
        key = f"nnxdsl-{directory}-{next(_barriers[directory])}"
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=_BARRIER_MS)


class _DropOrbaxRecords(logging.Filter):
    """Drops orbax's own log records of errors: the caller gets them as one CheckpointError, without 600 lines."""

    def filter(self, record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}checkpoint{os.sep}" not in record.pathname


logging.getLogger("absl").addFilter(_DropOrbaxRecords())
