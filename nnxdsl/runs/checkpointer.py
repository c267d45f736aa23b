"""Checkpoints that are whole or not there: orbax writes arrays, a digest manifest commits them; knows no training."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import re
import shutil
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import jax
import orbax.checkpoint as ocp

from nnxdsl.errors import RunError, suggest
from nnxdsl.runtime.distributed import is_first
from nnxdsl.runtime.event_loops import use_patient_loops
from nnxdsl.runtime.limits import descriptor_shortage
from nnxdsl.storage import disk_space, manifest
from nnxdsl.storage.failpoints import reached
from nnxdsl.storage.jsonl import sync_directory
from nnxdsl.storage.manifest import DamageError

Arrays = Mapping[str, jax.Array]
Targets = Mapping[str, jax.ShapeDtypeStruct]

ARRAYS = "arrays"  # orbax's own directory inside a step
WRITING, TRASH = ".writing", ".trash"
# Tried: each of them comes back bit for bit (tests/run/test_checkpoint.py); uint2 and uint4 do not go in at all.
_SIZES = {"int": (2, 4, 8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64), "complex": (64, 128)}
SAVED_DTYPES = frozenset(
    [f"{kind}{bits}" for kind, sizes in _SIZES.items() for bits in sizes]
    + ["bool", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn"]
)

_STEP = re.compile(r"\d{8,}")
_GROUP = re.compile(r"[a-z][a-z0-9_]*")
_SHOWN = 5  # problems spelt out in one message
_BARRIER_MS = 600_000
_barriers: defaultdict[Path, Iterator[int]] = defaultdict(itertools.count)  # a barrier's name is used once


class CheckpointError(RunError):
    """A checkpoint that cannot be written, read, or fitted: the step, the file or parameter, and the cure."""


@attrs.frozen
class ArrayInfo:
    """What a saved array is: `dtype` by name ("bfloat16", "key<fry>")."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@attrs.frozen
class Damage:
    """A step that was passed over, and why."""

    step: int
    reason: str

    def __str__(self) -> str:
        return f"checkpoint step {self.step} is damaged: {self.reason}"


@attrs.frozen
class Good:
    """The newest step whose every byte is as it was written (None: nothing was ever saved), and those passed over."""

    step: int | None
    damaged: tuple[Damage, ...] = ()


@attrs.define
class _Saving:
    """A save on its way to the disk."""

    step: int
    body: dict[str, Any]
    protect: frozenset[int]
    checkpointer: ocp.AsyncCheckpointer
    thread: threading.Thread | None = None
    error: BaseException | None = None
    done: bool = False


class Checkpoints:
    """The checkpoints of one run, in `<directory>/<step>/`.

    A step holds orbax's files and a manifest with the size and sha256 of each of them, and the manifest's own digest.
    It is written under `.writing/`, brought to the disk, and renamed into place as the last act; that rename is the
    commit. A step is removed by a rename into `.trash/`. So whatever kills the process, a step is whole or not listed.
    With several processes (one shared directory) all call each method; the first one does the work on the files.

    Raises:
        CheckpointError: From every method that touches the disk.
    """

    def __init__(self, directory: Path, *, keep: int | None = None, read_only: bool = False) -> None:
        """Opens a directory for writing, made if missing; what a killed writer left half done is swept.

        Args:
            directory: Usually `<run>/checkpoints`.
            keep: How many of the newest steps stay; None keeps all.
            read_only: Change nothing on disk; see `open`.
        """
        if keep is not None and keep < 1:
            raise ValueError(f"keep: expected at least 1, got {keep}")
        self.directory = directory.resolve()
        self.keep = keep
        self.read_only = read_only
        self._saving: _Saving | None = None
        self._committed: int | None = None
        self._damaged_steps: set[int] = set()
        self._verifier = manifest.Verifier()
        if not read_only:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(f"{self.directory}: cannot be made: {error.strerror}") from error
            if is_first():
                for name in (WRITING, TRASH):
                    shutil.rmtree(self.directory / name, ignore_errors=True)

    @classmethod
    def open(cls, directory: Path) -> Checkpoints:
        """Opens another run's checkpoints for reading; nothing there is written, moved or swept."""
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: there is no such directory of checkpoints")
        return cls(directory, read_only=True)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # writing

    def save(
        self, step: int, groups: Mapping[str, Arrays], meta: Mapping[str, Any], *, protect: Iterable[int] = ()
    ) -> bool:
        """Starts to save a step; the arrays may be donated or changed as soon as this returns.

        It is saved when `wait` (or `poll`) says so, not before. A save that is still on its way is waited for.

        Args:
            step: Steps done; the name of the checkpoint.
            groups: Arrays by group ("trainable", "optimizer", ...) and name; a group can be restored alone.
            meta: Whatever else belongs to the step, as JSON.
            protect: Older steps that retention must leave.

        Returns:
            False if the step is committed already and undamaged: then nothing is done.

        Raises:
            CheckpointError: This or the last save failed, or an array is of a kind that cannot be saved.
        """
        if self.read_only:
            raise CheckpointError(f"{self.directory} was opened for reading; open it with Checkpoints(...) to save")
        self.wait()
        contents = {group: {name: _info(array) for name, array in arrays.items()} for group, arrays in groups.items()}
        _check_savable(step, contents)
        if self._is_good(step):
            return False
        self.require_room(step, groups)
        body = {
            "step": step,
            "meta": json.loads(json.dumps(dict(meta))),
            "arrays": {
                group: {name: {"shape": list(info.shape), "dtype": info.dtype} for name, info in infos.items()}
                for group, infos in contents.items()
            },
        }
        place = self.directory / WRITING / _name(step)
        use_patient_loops()
        checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        saving = _Saving(step, body, frozenset(protect), checkpointer)
        try:
            if is_first():
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir(parents=True)
                reached("save-begun")
            _barrier(self.directory)
            items = {group: ocp.args.PyTreeSave(dict(arrays)) for group, arrays in groups.items() if arrays}
            if items:
                checkpointer.save(place / ARRAYS, args=ocp.args.Composite(**items))
            reached("save-started")
        except Exception as error:
            self._discard(saving)
            raise self._failed(step, error) from error
        # A thread of our own, so that the step is committed as soon as it can be, not at the next call of ours.
        saving.thread = threading.Thread(target=self._finish, args=(saving,), name=f"checkpoint-{step}")
        self._saving = saving
        saving.thread.start()
        return True

    def require_room(self, step: int, groups: Mapping[str, Mapping[str, jax.Array | jax.ShapeDtypeStruct]]) -> None:
        """Refuses a save that the disk has no room for, before anything is written, or computed.

        Arrays are counted as they are; orbax compresses them, so that they may take less.

        Raises:
            CheckpointError: How much it takes, and how much is free.
        """
        needed = sum(_bytes(array) for arrays in groups.values() for array in arrays.values())
        if why := descriptor_shortage():
            raise self._failed(step, why)
        if is_first() and (why := disk_space.shortage(self.directory, needed)):
            raise self._failed(step, why)

    def wait(self) -> int | None:
        """Waits for the save on its way, if any; returns the newest step that this object has committed.

        Raises:
            CheckpointError: The save failed; the last committed step is as good as before.
        """
        if self._saving is not None and self._saving.thread is not None:
            self._saving.thread.join()
        return self.poll()

    def poll(self) -> int | None:
        """Like `wait`, without waiting: cheap enough for each step, to learn soon that a save is done or failed."""
        saving = self._saving
        if saving is not None and saving.done:
            self._saving = None
            if saving.error is not None:
                raise self._failed(saving.step, saving.error) from saving.error
            self._committed = saving.step
        return self._committed

    def close(self) -> None:
        """Waits for the save on its way; call it (or leave a `with`) before the process ends."""
        self.wait()

    def _finish(self, saving: _Saving) -> None:
        try:
            saving.checkpointer.wait_until_finished()
            reached("save-written")
            if is_first():
                self._commit(saving)
        except BaseException as error:  # carried to whoever calls wait or poll
            saving.error = error
        finally:
            self._discard(saving)
            reached("save-cleared")
            try:
                _barrier(self.directory)
                if saving.error is None and not (self._place(saving.step) / manifest.NAME).exists():
                    raise OSError("the first process could not commit it")
            except Exception as error:
                saving.error = saving.error or error
            saving.done = True

    def _commit(self, saving: _Saving) -> None:
        place, target = self.directory / WRITING / _name(saving.step), self._place(saving.step)
        manifest.write(place, saving.body)
        reached("commit-unnamed")
        if target.exists():  # only a damaged one can be here
            self._remove(target)
            reached("commit-replaced")
        os.rename(place, target)
        reached("commit-renamed")
        sync_directory(self.directory)
        reached("commit-durable")
        self._damaged_steps.discard(saving.step)
        self._retire(saving.protect)

    def _retire(self, protect: frozenset[int]) -> None:
        """Removes what is beyond `keep`; a step known to be damaged does not count as kept."""
        if self.keep is None:
            return
        steps = self.steps()
        good = [step for step in steps if step not in self._damaged_steps]
        retained = {*good[-self.keep :], *protect}
        for step in steps:
            if step not in retained and step < good[-1]:
                self._remove(self._place(step))

    def _remove(self, place: Path) -> None:
        """By a rename first, so that a kill leaves no half of it under its name."""
        trash = self.directory / TRASH
        trash.mkdir(exist_ok=True)
        taken = sum(1 for _ in trash.iterdir())
        reached("trash-unnamed")
        os.rename(place, trash / f"{place.name}-{os.getpid()}-{taken}")
        reached("trash-renamed")
        sync_directory(self.directory)
        reached("trash-durable")
        shutil.rmtree(trash, ignore_errors=True)
        reached("trash-swept")

    def _discard(self, saving: _Saving) -> None:
        with contextlib.suppress(Exception):  # its error, if any, has been taken already
            saving.checkpointer.close()
        if is_first():
            shutil.rmtree(self.directory / WRITING, ignore_errors=True)

    def _failed(self, step: int, error: BaseException | str) -> CheckpointError:
        try:
            steps = self.steps()
            last = f"step {steps[-1]} is still there" if steps else "there is no earlier one"
        except OSError:  # what keeps it from saving may keep it from looking
            last = "what was saved before is still there"
        why = error if isinstance(error, str) else _first_line(error)
        return CheckpointError(
            f"checkpoint step {step} could not be saved in {self.directory}: {why}; {last}; "
            f"make room or name another directory, and run again"
        )

    # reading

    def steps(self) -> list[int]:
        """All committed steps, in order; whether their arrays are undamaged, `latest_good` and `restore` check."""
        found: list[int] = []
        for step in self._on_disk():
            with contextlib.suppress(DamageError):
                self._manifest(step)
                found.append(step)
        return found

    def latest_good(self) -> Good:
        """The newest step that is as it was written, all bytes read and compared.

        Raises:
            CheckpointError: There are steps and all are damaged: to begin again from nothing is for people to decide.
        """
        damaged: list[Damage] = []
        for step in reversed(self._on_disk()):
            try:
                self._verify(step, None)
            except DamageError as error:
                self._damaged_steps.add(step)
                damaged.append(Damage(step, str(error)))
            else:
                return Good(step, tuple(damaged))
        if damaged:
            lines = "\n".join(f"  step {one.step}: {one.reason}" for one in damaged)
            raise CheckpointError(
                f"no checkpoint in {self.directory} can be used:\n{lines}\n"
                f"put the files back, or move the directory away to begin again from step 0"
            )
        return Good(None)

    def meta(self, step: int) -> dict[str, Any]:
        """What was saved beside the arrays."""
        return self._trusted(step)["meta"]

    def contents(self, step: int) -> dict[str, dict[str, ArrayInfo]]:
        """What each group holds, without reading the arrays."""
        return {
            group: {name: ArrayInfo(tuple(info["shape"]), info["dtype"]) for name, info in infos.items()}
            for group, infos in self._trusted(step)["arrays"].items()
        }

    def restore(self, step: int, targets: Mapping[str, Targets]) -> dict[str, dict[str, jax.Array]]:
        """The arrays of a step, bit for bit, placed as the targets say; only what is asked for is read.

        Args:
            step: A committed step.
            targets: By group and name, any part of what was saved: shape, dtype and sharding (none: the first device).

        Raises:
            CheckpointError: The step is missing or damaged, or arrays differ in name, shape or dtype: all are named.
        """
        self._check_targets(step, targets)
        try:
            self._verify(step, set(targets))
        except DamageError as error:
            self._damaged_steps.add(step)
            raise self._damaged(step, error) from error
        placed = {group: {name: _placed(one) for name, one in wanted.items()} for group, wanted in targets.items()}
        items = {
            group: ocp.args.PyTreeRestore(
                item=wanted,
                restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
                partial_restore=True,
            )
            for group, wanted in placed.items()
            if wanted
        }
        found: Any = {}
        if items:
            try:
                with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
                    found = checkpointer.restore(self._place(step) / ARRAYS, args=ocp.args.Composite(**items))
            except Exception as error:
                raise CheckpointError(
                    f"checkpoint step {step} in {self.directory} could not be restored, although its files are as they "
                    f"were written: {_first_line(error)}; use the versions of jax and orbax that wrote it"
                ) from error
        return {group: {name: found[group][name] for name in wanted} for group, wanted in placed.items()}

    def _check_targets(self, step: int, targets: Mapping[str, Targets]) -> None:
        contents = self.contents(step)
        problems: list[str] = []
        for group, wanted in targets.items():
            if group not in contents:
                problems.append(f"{group}: not in the checkpoint{suggest(group, contents)}")
                continue
            saved = contents[group]
            for name, target in wanted.items():
                expected = _info(target)
                if name not in saved:
                    problems.append(f"{group}.{name}: not in the checkpoint, expected {expected}")
                elif saved[name] != expected:
                    problems.append(f"{group}.{name}: saved as {saved[name]}, expected {expected}")
        if problems:
            raise CheckpointError(
                f"checkpoint step {step} in {self.directory} does not fit: {_count(problems)}\n{_list(problems)}\n"
                f"it was saved from another model, adapter or optimizer; restore it with the experiment that wrote it"
            )

    def _place(self, step: int) -> Path:
        return self.directory / _name(step)

    def _on_disk(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        return sorted(
            int(path.name) for path in self.directory.iterdir() if _STEP.fullmatch(path.name) and path.is_dir()
        )

    def _is_good(self, step: int) -> bool:
        try:
            self._verify(step, None)
        except DamageError:
            return False
        return True

    def _manifest(self, step: int) -> dict[str, Any]:
        body = manifest.read(self._place(step))
        if body.get("step") != step:
            raise DamageError(f"{manifest.NAME} is of step {body.get('step')!r}")
        if not all(isinstance(body.get(name), dict) for name in ("meta", "arrays")):
            raise DamageError(f"{manifest.NAME} has been edited: expected the objects meta and arrays")
        return body

    def _trusted(self, step: int) -> dict[str, Any]:
        if not self._place(step).is_dir():
            steps = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{self.directory} has no checkpoint of step {step}; there are: {steps}")
        try:
            return self._manifest(step)
        except DamageError as error:
            raise self._damaged(step, error) from error

    def _damaged(self, step: int, error: DamageError) -> CheckpointError:
        others = [str(other) for other in self.steps() if other != step]
        cure = f"use another step ({', '.join(others)})" if others else "put the file back from a copy"
        return CheckpointError(f"checkpoint step {step} in {self.directory} is damaged: {error}; {cure}")

    def _verify(self, step: int, groups: set[str] | None) -> None:
        """Compares all files of the step (of some groups: theirs and the common ones) with the manifest."""
        body = self._manifest(step)
        self._verifier.check(self._place(step), body, lambda name: groups is None or _belongs(name, groups))


def find(path: Path) -> tuple[Path, int | None]:
    """The directory of checkpoints that `path` means, and the step if it names one.

    Args:
        path: A run directory, its `checkpoints`, or one step in there.

    Raises:
        CheckpointError: It is none of them.
    """
    if _STEP.fullmatch(path.name) and (path / manifest.NAME).is_file():
        return path.parent, int(path.name)
    if (path / "checkpoints").is_dir():
        return path / "checkpoints", None
    if path.is_dir() and any(_STEP.fullmatch(entry.name) for entry in path.iterdir()):
        return path, None
    raise CheckpointError(
        f"{path} holds no checkpoints; expected a run directory, its 'checkpoints', or one step in there"
    )


def _name(step: int) -> str:
    if step < 0:
        raise ValueError(f"step: expected at least 0, got {step}")
    return f"{step:08d}"


def _info(array: jax.Array | jax.ShapeDtypeStruct) -> ArrayInfo:
    return ArrayInfo(tuple(array.shape), str(array.dtype))


def _bytes(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _placed(target: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if target.sharding is not None:
        return target
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=here)


def _check_savable(step: int, contents: Mapping[str, Mapping[str, ArrayInfo]]) -> None:
    for group in contents:
        if not _GROUP.fullmatch(group):
            raise ValueError(f"group '{group}': expected a-z, 0-9 and '_', a letter first")
    problems = [
        f"{group}.{name}: {info}"
        for group, infos in contents.items()
        for name, info in infos.items()
        if 0 in info.shape or (info.dtype not in SAVED_DTYPES and not info.dtype.startswith("key<"))
    ]
    if problems:
        raise CheckpointError(
            f"checkpoint step {step} cannot be saved: orbax cannot store {_count(problems)}\n{_list(problems)}\n"
            f"arrays need at least one element, and a dtype other than uint2 and uint4 and the rarer float8: "
            f"convert them, or leave them out and make them again"
        )


def _count(problems: list[str]) -> str:
    return f"{len(problems)} array{'s' if len(problems) != 1 else ''}"


def _list(problems: list[str]) -> str:
    more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return "\n".join(f"  {line}" for line in [*problems[:_SHOWN], *more])


def _belongs(name: str, groups: set[str]) -> bool:
    """Whether a file (`arrays/<group>/...`, or `arrays/<common>`) is needed to read the groups."""
    parts = name.split("/")
    return len(parts) < 3 or parts[1] in groups


def _first_line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    if len(text) > 300:  # tensorstore puts what was done first and the reason last
        text = f"{text[:100]} ... {text[-150:]}"
    return f"{type(error).__name__}: {text}"


def _barrier(directory: Path) -> None:
    """Waits for all processes through the coordinator, not the devices: it may run beside a training step."""
    if jax.process_count() > 1:
        key = f"nnxdsl-{directory}-{next(_barriers[directory])}"
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=_BARRIER_MS)


class _Quiet(logging.Filter):
    """Drops orbax's own records of errors: they come to the caller as one CheckpointError, without 600 lines."""

    def filter(self, record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}checkpoint{os.sep}" not in record.pathname


logging.getLogger("absl").addFilter(_Quiet())
