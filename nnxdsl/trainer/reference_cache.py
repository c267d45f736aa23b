"""What the reference says of each pair: asked once, kept beside the runs under a name of all that it depends on."""

from __future__ import annotations

import hashlib
import io
import json
import math
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import jax
import numpy as np
import numpy.typing as npt

from nnxdsl.config.core.serialization import to_dict
from nnxdsl.data.batch import Batch
from nnxdsl.data.pairs import Pairs
from nnxdsl.data.sampler import BatchSampler
from nnxdsl.program.compile import Program, TrainState
from nnxdsl.program.step import Leaves
from nnxdsl.runs.code_digest import code_digest, code_versions
from nnxdsl.runtime import distributed
from nnxdsl.storage.file_mutex import turn
from nnxdsl.storage.jsonl import replace, write_json
from nnxdsl.terminal.display import Display

DIRECTORY = ".reference"
"""Under the home of all runs, passed over where runs are listed. It may be deleted: what is missing is asked again."""

SAVE_SECONDS = 30.0
"""Least time between two saves of a pass: what a kill may lose."""

Logps = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]


def rows_of(batches: BatchSampler, steps: int) -> Rows:
    """The rows that so many steps learn from, each once, in the order of the file."""
    if steps * batches.batch_size >= len(batches.dataset):
        return np.arange(len(batches.dataset))
    return np.unique(np.concatenate([batches.indices(step) for step in range(steps)]))


@attrs.frozen
class ReferenceCache:
    """The log-probabilities that a program's first policy, which is its reference, gives to pairs.

    Attributes:
        program: The program.
        weights: Digest of the first weights.
        home: Directory of all runs.
        apart: The weights of a reference that has its own; None where it is the first policy.
    """

    program: Program
    weights: str
    home: Path
    apart: Leaves | None = None

    def of(
        self, first: TrainState, dataset: Pairs, rows: Rows, display: Display, is_to_end: Callable[[], bool]
    ) -> Logps | None:
        """What the reference says of some rows: found beside the runs, or asked now and kept there.

        Args:
            first: The state before any step.
            dataset: The pairs.
            rows: Those that must be known.
            display: Shows how far it is.
            is_to_end: Asked before each batch; once it says so, what is known is kept and the result is None.

        Returns:
            `[rows of the dataset, 2]` float32, NaN where nothing is known.

        Raises:
            RunError: what was found out cannot be written.
        """
        depends = self._depends(dataset)
        file = self.home / DIRECTORY / f"{hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()}.npz"
        known = _load(file, len(dataset))
        distributed.together()  # none writes before all have read
        missing = rows[np.isnan(known[rows]).any(axis=1)]
        if not len(missing):
            return known
        if distributed.is_first():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file.with_suffix(".json"), depends)
        if not distributed.is_single_process():  # they wait for each other already
            return self._ask(first, dataset, missing, known, file, display, is_to_end)

        def wait() -> None:
            display.stage("another run asks the reference the same; waiting for it")

        with turn(file.with_suffix(".lock"), wait, is_to_end) as is_ours:
            if not is_ours:
                return None
            known = _load(file, len(dataset))  # with what another run has found out by now
            missing = rows[np.isnan(known[rows]).any(axis=1)]
            return self._ask(first, dataset, missing, known, file, display, is_to_end) if len(missing) else known

    def _ask(
        self,
        first: TrainState,
        dataset: Pairs,
        missing: Rows,
        known: Logps,
        file: Path,
        display: Display,
        is_to_end: Callable[[], bool],
    ) -> Logps | None:
        """Asks of the rows that are missing and adds them to what is known, and to the file."""
        size = self.program.blueprint.forward_batch_size
        total = math.ceil(len(missing) / size)
        display.stage(f"asking the reference of {len(missing):,} pairs", total, unit="batches")
        saved, before = time.monotonic(), None
        for number, start in enumerate(range(0, len(missing), size)):
            if is_to_end():
                break
            asked = missing[start : start + size]
            scored = self._said(first, dataset.batch(asked, size))
            _note(known, before)  # read while the next one is computed
            before = asked, scored
            display.step(number + 1, total, {}, {})
            if time.monotonic() - saved >= SAVE_SECONDS:
                _save(file, known)
                saved = time.monotonic()
        _note(known, before)
        _save(file, known)
        return None if np.isnan(known[missing]).any() and is_to_end() else known

    def _said(self, first: TrainState, batch: Batch) -> Any:
        if self.apart is not None:
            return self.program.reference_outputs(self.apart, batch)
        return self.program.score(first, batch).scored

    def _depends(self, dataset: Pairs) -> dict[str, Any]:
        """All that the log-probabilities depend on, in plain values."""
        program, blueprint = self.program, self.program.blueprint
        quantization = program.experiment.quantization
        return {
            "weights": self.weights,
            "network": attrs.asdict(blueprint.config),
            "quantization": None if quantization is None else to_dict(quantization),
            "ids": dataset.ids_digest(),
            "ld_alpha": program.train_step.forward.ld_alpha,
            "compute": blueprint.compute.name,
            "frozen": blueprint.kept.name,
            "attention": attrs.asdict(blueprint.kernels),
            **computed_by(program),
        }


def computed_by(program: Program) -> dict[str, Any]:
    """What computes a program, in plain values: another one may round otherwise."""
    device = program.mesh.devices.flat[0]
    return {
        "device": f"{device.platform}:{device.device_kind}",
        "code": code_digest(),
        "versions": code_versions(),
    }


def _load(file: Path, rows: int) -> Logps:
    """What is known; nothing where there is no such file, or it is damaged."""
    try:
        with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as held:  # a zip, whose checksums are compared
            found = held["logps"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        found = None
    if found is None or found.shape != (rows, 2) or found.dtype != np.float32:
        return np.full((rows, 2), np.nan, np.float32)
    return found


def _save(file: Path, known: Logps) -> None:
    if not distributed.is_first():
        return
    buffer = io.BytesIO()
    np.savez(buffer, logps=known)
    replace(file, buffer.getvalue())


def _note(known: Logps, asked: tuple[Rows, Any] | None) -> None:
    if asked is None:
        return
    rows, scored = asked
    values = jax.device_get((scored.chosen, scored.rejected))
    for side, column in enumerate(values):
        known[rows, side] = column[: len(rows)]
