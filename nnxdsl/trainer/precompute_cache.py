"""Values that are computed once for each row of a dataset, and stored beside the runs under a key of their inputs.

The rows of a dataset are stored in files of about `FILE_BYTES`, in the order of the data. What is damaged or missing is
computed again, a file at a time, and a pass that was interrupted resumes where it stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import jax
import numpy as np
import numpy.typing as npt

from nnxdsl.data.batch import Batch
from nnxdsl.data.dataset import Dataset, Reads, Rows
from nnxdsl.runtime import distributed
from nnxdsl.storage.file_mutex import file_lock
from nnxdsl.storage.jsonl import replace, write_json
from nnxdsl.terminal.display import Display

FILE_BYTES = 64 * 2**20
"""About the size of one file: read and written as a whole."""

SAVE_SECONDS = 30.0
"""Least time between two saves of a pass: what a kill may lose."""

Arrays = dict[str, npt.NDArray[Any]]


@attrs.frozen
class PrecomputeSpec:
    """What is precomputed for the rows of a dataset. A row has any number of entries, and an entry is a few arrays.

    Attributes:
        directory: Name of the directory under the home of all runs. A run never lists it, and it may be deleted.
        values: What messages call the values, such as "reference log-probs".
        unit: What messages call a row, such as "pairs".
        key: Everything that the values depend on, in plain JSON values.
        ends: [rows + 1] number of entries before each row, and of all.
        arrays: Shape and dtype of one entry, by name.
        batch_size: Rows that are computed at once.
        compute: From a batch to device arrays, which are not waited for.
        entries: From a batch, the number of its rows that are no padding, and the result of `compute` on the host, to
            the entries of these rows, one after another.
        reads: Chooses the rows of a batch that this process needs to read; None for all.
    """

    directory: str
    values: str
    unit: str
    key: Mapping[str, Any]
    ends: npt.NDArray[np.int64]
    arrays: Mapping[str, tuple[tuple[int, ...], npt.DTypeLike]]
    batch_size: int
    compute: Callable[[Any], Any]
    entries: Callable[[Any, int, Any], Mapping[str, npt.NDArray[Any]]]
    reads: Reads | None = None

    def cache_key(self) -> str:
        """Name of the values: a digest of everything that they depend on."""
        return hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()

    def empty(self) -> Arrays:
        """The arrays of all entries before anything is computed: NaN, or zeros of integers."""
        total = int(self.ends[-1])
        return {
            name: np.full((total, *shape), np.nan if np.issubdtype(dtype, np.floating) else 0, dtype)
            for name, (shape, dtype) in self.arrays.items()
        }

    def entry_indices(self, rows: Rows) -> npt.NDArray[np.int64]:
        """[entries] where the entries of rows are among those of all rows."""
        return np.concatenate([np.arange(int(self.ends[row]), int(self.ends[row + 1])) for row in rows])


@attrs.frozen
class PrecomputeCache:
    """Loads precomputed values, or computes and stores what is missing.

    Attributes:
        home: Directory of all runs.
        display: Shows progress.
        should_stop: Called before each batch, in all processes at the same places; once it returns True, what is
            computed so far is stored and the rest is left out.
    """

    home: Path
    display: Display
    should_stop: Callable[[], bool]

    def load_or_compute(self, spec: PrecomputeSpec, dataset: Dataset, rows: Rows) -> Arrays | None:
        """The values of some rows.

        Args:
            spec: What is precomputed.
            dataset: The rows.
            rows: Those whose values are needed, ascending.

        Returns:
            The arrays of all entries of the dataset by name, NaN or 0 where nothing is computed; None where it was
            interrupted.

        Raises:
            RunError: The values cannot be written.
        """
        directory, arrays = self.home / spec.directory / spec.cache_key(), spec.empty()
        shards = list(_shards(directory, spec, arrays))
        missing = _missing(shards, rows)
        distributed.barrier()  # no process writes before all have read
        if not missing:
            return arrays
        if distributed.is_process_0():
            directory.mkdir(parents=True, exist_ok=True)
            write_json(directory / "key.json", dict(spec.key))
        with contextlib.ExitStack() as stack:
            if distributed.is_single_process():  # several processes wait for each other already
                if not stack.enter_context(file_lock(directory / "lock", lambda: self._wait(spec), self.should_stop)):
                    return None
                missing = _missing(shards, rows)  # less what another run has computed meanwhile
            return arrays if self._compute(spec, dataset, arrays, missing) else None

    def _wait(self, spec: PrecomputeSpec) -> None:
        self.display.stage(f"another run is precomputing the same {spec.values}; waiting for it")

    def _compute(
        self, spec: PrecomputeSpec, dataset: Dataset, arrays: Arrays, missing: list[tuple[_Shard, Rows]]
    ) -> bool:
        """Computes the rows that are missing, into `arrays` and the files; False if it was interrupted."""
        total = sum(len(rows) for _, rows in missing)
        if not total:
            return True
        self.display.stage(f"precomputing {spec.values}", total, unit=spec.unit)
        done = 0
        for shard, rows in missing:
            saved, pending = time.monotonic(), None
            for start in range(0, len(rows), spec.batch_size):
                if self.should_stop():
                    _store(spec, arrays, shard, pending)
                    shard.save()
                    return False
                chosen = rows[start : start + spec.batch_size]
                batch = dataset.read_batch(chosen, spec.batch_size, spec.reads)
                following = chosen, batch, spec.compute(batch)
                _store(spec, arrays, shard, pending)  # read while the next batch is computed
                pending = following
                done += len(chosen)
                self.display.step(done, total, {}, {})
                if time.monotonic() - saved >= SAVE_SECONDS:
                    shard.save()
                    saved = time.monotonic()
            _store(spec, arrays, shard, pending)
            shard.save()
        return True


@attrs.define
class _Shard:
    """One file: the rows from `begin` to `end` of a dataset.

    Attributes:
        path: The file.
        begin: The first row.
        end: The row after the last one.
        is_computed: Which of these rows are computed, `[rows]`.
        arrays: Their entries: views of the arrays of all rows, changed in place.
    """

    path: Path
    begin: int
    end: int
    is_computed: npt.NDArray[np.bool_]
    arrays: Arrays

    def load(self) -> None:
        """Reads the file; does nothing if it is missing or damaged."""
        try:
            # A zip, whose checksums are compared.
            with np.load(io.BytesIO(self.path.read_bytes()), allow_pickle=False) as file:
                rows, is_computed = file["rows"], file["is_computed"]
                stored = {name: file[name] for name in self.arrays}
        except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile):
            return
        pairs = [(self.is_computed, is_computed), *((array, stored[name]) for name, array in self.arrays.items())]
        if rows.tolist() == [self.begin, self.end] and all(
            ours.shape == theirs.shape and ours.dtype == theirs.dtype for ours, theirs in pairs
        ):
            for ours, theirs in pairs:
                ours[:] = theirs

    def save(self) -> None:
        """Writes the file, in the first process."""
        if distributed.is_process_0():
            buffer = io.BytesIO()
            arrays: dict[str, Any] = {"is_computed": self.is_computed, **self.arrays}
            np.savez(buffer, rows=np.array([self.begin, self.end]), **arrays)
            replace(self.path, buffer.getvalue())

    def missing(self, rows: Rows) -> Rows:
        """The rows of this file that are among `rows`, which ascend, and not computed."""
        own_rows = rows[(rows >= self.begin) & (rows < self.end)]
        return own_rows[~self.is_computed[own_rows - self.begin]]


def _shards(directory: Path, spec: PrecomputeSpec, arrays: Arrays) -> Iterator[_Shard]:
    """All files of a dataset. A row is in the file in whose share of all bytes it begins."""
    entry_bytes = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in spec.arrays.values())
    share = spec.ends[:-1] * entry_bytes // FILE_BYTES  # [rows]
    begins = np.flatnonzero(np.diff(share, prepend=-1))
    for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(share)], strict=True):
        span = slice(int(spec.ends[begin]), int(spec.ends[end]))
        views = {name: array[span] for name, array in arrays.items()}
        yield _Shard(directory / f"{begin:09d}.npz", begin, end, np.zeros(end - begin, bool), views)


def _missing(shards: list[_Shard], rows: Rows) -> list[tuple[_Shard, Rows]]:
    """Reads the files, and returns those that lack some of the rows, with these rows."""
    for shard in shards:
        if not shard.is_computed.all():
            shard.load()
    return [(shard, missing) for shard in shards if len(missing := shard.missing(rows))]


def _store(spec: PrecomputeSpec, arrays: Arrays, shard: _Shard, pending: tuple[Rows, Batch, Any] | None) -> None:
    """Waits for the values of a batch and puts them among those of all rows."""
    if pending is None:
        return
    rows, batch, computed = pending
    indices = spec.entry_indices(rows)
    for name, entries in spec.entries(batch, len(rows), jax.device_get(computed)).items():
        arrays[name][indices] = entries
    shard.is_computed[rows - shard.begin] = True
