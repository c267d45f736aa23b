"""What a teacher says of each target: asked once, kept beside the runs under a name of all that it depends on.

Rows of a data set stand in files of about `FILE_BYTES`, in the order of the data: what is damaged or missing is asked
again, a file at a time, and a pass that was cut short goes on where it was.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import jax
import numpy as np
import numpy.typing as npt

from nnxdsl.config.objectives.distillation import Distill
from nnxdsl.data.batch import SequenceBatch
from nnxdsl.data.sequences import Sequences
from nnxdsl.losses.lm_head.teacher_top_k import TeacherTopK
from nnxdsl.program.compile import Program
from nnxdsl.program.memory import top_bytes
from nnxdsl.program.step import Leaves
from nnxdsl.runtime import distributed
from nnxdsl.storage.file_mutex import turn
from nnxdsl.storage.jsonl import replace, write_json
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.reference_cache import SAVE_SECONDS, Rows, computed_by

DIRECTORY = ".teacher"
"""Under the home of all runs, passed over where runs are listed. It may be deleted: what is missing is asked again."""

FILE_BYTES = 64 * 2**20
"""What the rows of one file take, about: read and written at one time."""


@attrs.define
class _File:
    """The rows from `begin` to `end` of a data set, and what is known of their targets.

    Attributes:
        path: Where they are kept.
        begin: The first row.
        end: The row after the last one.
        known: Which of them are known, `[rows]`.
        words: Part of `TargetStats.words`, changed in place.
        logp: Part of `TargetStats.logp`, likewise.
    """

    path: Path
    begin: int
    end: int
    known: npt.NDArray[np.bool_]
    words: npt.NDArray[np.int32]
    logp: npt.NDArray[np.float32]

    def load(self) -> None:
        """Reads what is kept; nothing is known where there is no such file, or it is damaged."""
        try:
            # A zip, whose checksums are compared.
            with np.load(io.BytesIO(self.path.read_bytes()), allow_pickle=False) as held:
                rows, known, words, logp = (held[name] for name in ("rows", "known", "words", "logp"))
        except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile):
            return
        own = ((self.known, known), (self.words, words), (self.logp, logp))
        if rows.tolist() == [self.begin, self.end] and all(
            mine.shape == other.shape and mine.dtype == other.dtype for mine, other in own
        ):
            for mine, other in own:
                mine[:] = other

    def save(self) -> None:
        """Writes what is known, in one process."""
        if distributed.is_first():
            buffer = io.BytesIO()
            rows = np.array([self.begin, self.end])
            np.savez(buffer, rows=rows, known=self.known, words=self.words, logp=self.logp)
            replace(self.path, buffer.getvalue())

    def missing(self, rows: Rows) -> Rows:
        """Those of `rows`, which ascend, that are in this file and not known."""
        own = rows[(rows >= self.begin) & (rows < self.end)]
        return own[~self.known[own - self.begin]]


@attrs.frozen
class TeacherCache:
    """The likeliest words that a program's teacher gives to sequences.

    Attributes:
        program: The program.
        teacher: The teacher's weights.
        weights: Their digest.
        home: Directory of all runs.
    """

    program: Program
    teacher: Leaves
    weights: str
    home: Path

    def of(self, dataset: Sequences, rows: Rows, display: Display, is_to_end: Callable[[], bool]) -> Sequences | None:
        """The same sequences with what the teacher says of some rows: found beside the runs, or asked and kept there.

        Args:
            dataset: The sequences.
            rows: Those that must be known, ascending.
            display: Shows how far it is.
            is_to_end: Asked before each batch; once it says so, what is known is kept and the result is None.

        Raises:
            RunError: what was found out cannot be written.
        """
        depends = self._depends(dataset)
        name = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()
        directory, asked = self.home / DIRECTORY / name, self.program.experiment.objective
        assert isinstance(asked, Distill)
        assert asked.top_k is not None
        ends = dataset.target_ends
        words = np.zeros((int(ends[-1]), asked.top_k), np.int32)
        logp = np.full((len(words), asked.top_k + 1), np.nan, np.float32)
        files = list(self._files(directory, ends, words, logp))

        def missing() -> list[tuple[_File, Rows]]:
            for file in files:
                if not file.known.all():
                    file.load()
            return [(file, lacking) for file in files if len(lacking := file.missing(rows))]

        lacking = missing()
        distributed.together()  # none writes before all have read
        if not lacking:
            return dataset.taught(words, logp)
        if distributed.is_first():
            directory.mkdir(parents=True, exist_ok=True)
            write_json(directory / "depends.json", depends)
        if not distributed.is_single_process():  # they wait for each other already
            return self._asked(dataset, lacking, words, logp, display, is_to_end)

        def wait() -> None:
            display.stage("another run asks the teacher the same; waiting for it")

        with turn(directory / "lock", wait, is_to_end) as is_ours:
            # With what another run has found out by now.
            return self._asked(dataset, missing(), words, logp, display, is_to_end) if is_ours else None

    def _asked(
        self,
        dataset: Sequences,
        lacking: list[tuple[_File, Rows]],
        words: npt.NDArray[np.int32],
        logp: npt.NDArray[np.float32],
        display: Display,
        is_to_end: Callable[[], bool],
    ) -> Sequences | None:
        """Asks of the rows that are missing and adds them to what is known, and to the files."""
        size = self.program.blueprint.forward_batch_size
        total = sum(math.ceil(len(rows) / size) for _, rows in lacking)
        display.stage(f"asking the teacher of {sum(len(rows) for _, rows in lacking):,} rows", total, unit="batches")

        def note(file: _File, before: tuple[Rows, SequenceBatch, TeacherTopK] | None) -> None:
            if before is None:
                return
            asked, batch, said = before[0], before[1], jax.device_get(before[2])
            mask = batch.loss_mask[: len(asked), 1:]  # by what predicts them, [rows, T - 1]
            places = dataset.target_places(asked)
            words[places], logp[places] = said.words[: len(asked)][mask], said.logp[: len(asked)][mask]
            file.known[asked - file.begin] = True

        done = 0
        for file, rows in lacking:
            saved, before = time.monotonic(), None
            for start in range(0, len(rows), size):
                if is_to_end():
                    note(file, before)
                    file.save()
                    return None
                asked = rows[start : start + size]
                batch = dataset.batch(asked, size)
                following = asked, batch, self.program.teacher_top_k(self.teacher, batch)
                note(file, before)  # read while the next one is computed
                before = following
                done += 1
                display.step(done, total, {}, {})
                if time.monotonic() - saved >= SAVE_SECONDS:
                    file.save()
                    saved = time.monotonic()
            note(file, before)
            file.save()
        return dataset.taught(words, logp)

    def _files(
        self,
        directory: Path,
        ends: npt.NDArray[np.int64],
        words: npt.NDArray[np.int32],
        logp: npt.NDArray[np.float32],
    ) -> Iterator[_File]:
        """All files of a data set: a row is in the one in whose share of all bytes it begins."""
        share = ends[:-1] * top_bytes(self.program.blueprint) // FILE_BYTES  # [rows]
        begins = np.flatnonzero(np.diff(share, prepend=-1))
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(share)], strict=True):
            here = slice(int(ends[begin]), int(ends[end]))
            known = np.zeros(end - begin, bool)
            yield _File(directory / f"{begin:09d}.npz", begin, end, known, words[here], logp[here])

    def _depends(self, dataset: Sequences) -> dict[str, Any]:
        """All that the words depend on, in plain values."""
        blueprint, asked = self.program.blueprint, self.program.experiment.objective
        assert isinstance(asked, Distill)
        assert blueprint.teacher is not None
        return {
            "weights": self.weights,
            "network": attrs.asdict(blueprint.teacher.config),
            "ids": dataset.ids_digest(),
            "top_k": asked.top_k,
            "temperature": asked.temperature,
            "compute": blueprint.compute.name,
            "frozen": blueprint.kept.name,
            "attention": attrs.asdict(blueprint.teacher_kernels),
            **computed_by(self.program),
        }
