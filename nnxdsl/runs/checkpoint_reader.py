"""Reads checkpoints: lists the committed steps, verifies their files, and restores arrays onto devices."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import attrs
import jax
import orbax.checkpoint as ocp

from nnxdsl.errors import RunError, suggest
from nnxdsl.runs.checkpoint_format import ARRAYS, STEP, ArrayInfo, CheckpointError, first_line, list_arrays, step_name
from nnxdsl.storage import manifest
from nnxdsl.storage.manifest import DamageError
from nnxdsl.storage.plain_path import plain_path

Targets = Mapping[str, jax.ShapeDtypeStruct]


@attrs.frozen
class DamagedStep:
    """A step that was skipped, and the reason."""

    step: int
    reason: str

    def __str__(self) -> str:
        return f"checkpoint step {self.step} is damaged: {self.reason}"


@attrs.frozen
class LatestGood:
    """The newest undamaged step (None: nothing was ever saved), and the damaged ones that are newer."""

    step: int | None
    damaged: tuple[DamagedStep, ...] = ()


class CheckpointReader:
    """The checkpoints in a directory, for reading: writes, moves and deletes nothing.

    Raises:
        CheckpointError: From every method that reads the disk.
    """

    def __init__(self, directory: Path) -> None:
        """Opens an existing directory, usually `<run>/checkpoints`."""
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: there is no such directory of checkpoints")
        self.directory = directory.resolve()
        self._damaged_steps: set[int] = set()
        self._verifier = manifest.Verifier()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases what is open; a reader holds nothing open."""

    def steps(self) -> list[int]:
        """All committed steps, in order; whether their arrays are undamaged, `latest_good` and `restore` check."""
        committed: list[int] = []
        for step in self._on_disk():
            with contextlib.suppress(DamageError):
                self._manifest(step)
                committed.append(step)
        return committed

    def latest_good(self) -> LatestGood:
        """Finds the newest step whose files all match their digests; reads every byte of it.

        Raises:
            CheckpointError: Every step is damaged. Whether to start again from step 0 is for the user to decide.
        """
        damaged: list[DamagedStep] = []
        for step in reversed(self._on_disk()):
            try:
                self._verify(step, None)
            except DamageError as error:
                self._damaged_steps.add(step)
                damaged.append(DamagedStep(step, str(error)))
            else:
                return LatestGood(step, tuple(damaged))
        if damaged:
            lines = "\n".join(f"  step {one.step}: {one.reason}" for one in damaged)
            raise CheckpointError(
                f"no checkpoint in {self.directory} can be used:\n{lines}\n"
                f"restore the files, or move the directory away to start again from step 0"
            )
        return LatestGood(None)

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON values that were saved with the arrays."""
        return self._trusted(step)["meta"]

    def contents(self, step: int) -> dict[str, dict[str, ArrayInfo]]:
        """Shapes and dtypes by group and name, without reading the arrays."""
        return {
            group: {name: ArrayInfo(tuple(info["shape"]), info["dtype"]) for name, info in infos.items()}
            for group, infos in self._trusted(step)["arrays"].items()
        }

    def restore(self, step: int, targets: Mapping[str, Targets]) -> dict[str, dict[str, jax.Array]]:
        """Restores arrays of a step bit for bit, with the shardings of the targets; reads nothing else.

        Args:
            step: A committed step.
            targets: By group and name, any part of what was saved: shape, dtype and sharding (none: the first device).

        Raises:
            CheckpointError: The step is missing or damaged, or arrays differ in name, shape or dtype: names them all.
        """
        self._check_targets(step, targets)
        try:
            self._verify(step, set(targets))
        except DamageError as error:
            self._damaged_steps.add(step)
            raise self._damaged(step, error) from error
        sharded = {
            group: {name: _with_sharding(one) for name, one in arrays.items()} for group, arrays in targets.items()
        }
        items = {
            group: ocp.args.PyTreeRestore(
                item=arrays,
                restore_args=ocp.checkpoint_utils.construct_restore_args(arrays),
                partial_restore=True,
            )
            for group, arrays in sharded.items()
            if arrays
        }
        restored: Any = {}
        if items:
            try:
                with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
                    restored = checkpointer.restore(
                        self._plain() / step_name(step) / ARRAYS, args=ocp.args.Composite(**items)
                    )
            except Exception as error:
                raise CheckpointError(
                    f"checkpoint step {step} in {self.directory} could not be restored, although its files match their "
                    f"digests: {first_line(error)}; use the versions of jax and orbax that wrote it"
                ) from error
        return {group: {name: restored[group][name] for name in arrays} for group, arrays in sharded.items()}

    def _check_targets(self, step: int, targets: Mapping[str, Targets]) -> None:
        contents = self.contents(step)
        problems: list[str] = []
        for group, group_targets in targets.items():
            if group not in contents:
                problems.append(f"{group}: not in the checkpoint{suggest(group, contents)}")
                continue
            saved = contents[group]
            for name, target in group_targets.items():
                expected = ArrayInfo.from_array(target)
                if name not in saved:
                    problems.append(f"{group}.{name}: not in the checkpoint, expected {expected}")
                elif saved[name] != expected:
                    problems.append(f"{group}.{name}: saved as {saved[name]}, expected {expected}")
        if problems:
            raise CheckpointError(
                f"checkpoint step {step} in {self.directory} does not fit: {list_arrays(problems)}\n"
                f"it was saved from another model, adapter or optimizer; restore it with the experiment that wrote it"
            )

    def _path(self, step: int) -> Path:
        return self.directory / step_name(step)

    def _plain(self) -> Path:
        """The directory under a path that orbax accepts."""
        try:
            return plain_path(self.directory)
        except (OSError, RunError) as error:
            raise CheckpointError(
                f"{self.directory}: cannot be linked to a path that orbax accepts: {error}"
            ) from error

    def _on_disk(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        return sorted(
            int(path.name) for path in self.directory.iterdir() if STEP.fullmatch(path.name) and path.is_dir()
        )

    def _manifest(self, step: int) -> dict[str, Any]:
        body = manifest.read(self._path(step))
        if body.get("step") != step:
            raise DamageError(f"{manifest.NAME} is of step {body.get('step')!r}")
        if not all(isinstance(body.get(name), dict) for name in ("meta", "arrays")):
            raise DamageError(f"{manifest.NAME} has been edited: expected the objects meta and arrays")
        return body

    def _trusted(self, step: int) -> dict[str, Any]:
        """The manifest of a step; a CheckpointError where it is missing or damaged."""
        if not self._path(step).is_dir():
            steps = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{self.directory} has no checkpoint of step {step}; there are: {steps}")
        try:
            return self._manifest(step)
        except DamageError as error:
            raise self._damaged(step, error) from error

    def _damaged(self, step: int, error: DamageError) -> CheckpointError:
        others = [str(other) for other in self.steps() if other != step]
        remedy = f"use another step ({', '.join(others)})" if others else "restore the file from a copy"
        return CheckpointError(f"checkpoint step {step} in {self.directory} is damaged: {error}; {remedy}")

    def _verify(self, step: int, groups: set[str] | None) -> None:
        """Compares all files of the step (with groups: theirs and the common ones) with the manifest."""
        body = self._manifest(step)
        self._verifier.check(self._path(step), body, lambda name: groups is None or _belongs(name, groups))


def _with_sharding(target: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if target.sharding is not None:
        return target
    first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=first)


def _belongs(name: str, groups: set[str]) -> bool:
    """Whether a file (`arrays/<group>/...`, or `arrays/<common>`) is needed to read the groups."""
    parts = name.split("/")
    return len(parts) < 3 or parts[1] in groups
