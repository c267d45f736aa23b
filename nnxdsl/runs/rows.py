"""The JSON-lines files of a run: metrics, samples, rollouts, events and attempts; appended, read, and repaired."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from nnxdsl.runs.repair import Key, missing_steps, repair
from nnxdsl.storage import process_info, records
from nnxdsl.storage.failpoints import hit_failpoint
from nnxdsl.storage.jsonl import JsonLines, Row
from nnxdsl.storage.records import problem_in

_EVALUATION = "evaluation"  # the kind of those rows of metrics.jsonl


class RunRows:
    """`metrics.jsonl`, `samples.jsonl`, `rollouts.jsonl`, `events.jsonl` and `attempts.jsonl` in a run directory."""

    def __init__(self, path: Path) -> None:
        """Names the files in the directory `path`; opens none."""
        self._metrics = _checked_lines(path / "metrics.jsonl", records.METRICS, "step")
        self._events = _checked_lines(path / "events.jsonl", records.EVENT)
        self._samples = _checked_lines(path / "samples.jsonl", records.SAMPLE, "step")
        self._rollouts = _checked_lines(path / "rollouts.jsonl", records.ROLLOUT, *records.ROLLOUT)
        self._attempts = _checked_lines(path / "attempts.jsonl", records.ATTEMPT)
        self._all_lines = (self._metrics, self._samples, self._rollouts, self._events, self._attempts)

    def append_attempt(self, record: Row) -> int:
        """Appends one start of the run, synced to disk, and returns its number, from 1."""
        number = len(self._attempts.read()) + 1
        self._attempts.append({"attempt": number, **record}, durable=True)
        hit_failpoint("attempt-appended")
        return number

    def append_metrics(self, row: Row) -> None:
        """Appends the metrics of one training step; `row` has a "step"."""
        self._metrics.append(_with_step(row))
        hit_failpoint("metrics-appended")

    def append_evaluation(self, row: Row) -> None:
        """Appends the metrics of one evaluation to `metrics.jsonl`, as a row with "kind": "evaluation"."""
        self._metrics.append({"kind": _EVALUATION, **_with_step(row)})
        hit_failpoint("evaluation-appended")

    def append_sample(self, row: Row) -> None:
        """Appends one prompt with its completions; `row` has a "step"."""
        self._samples.append(_with_step(row))
        hit_failpoint("sample-appended")

    def append_rollout(self, row: Row) -> None:
        """Appends one prompt of a step with its group of completions; `row` has the fields of `records.ROLLOUT`."""
        self._rollouts.append(_with_step(row))

    def append_event(self, row: Row) -> None:
        """Appends an event with the time, synced to disk."""
        self._events.append({"time": process_info.utc(), **row}, durable=True)
        hit_failpoint("event-appended")

    def attempts(self) -> list[Row]:
        """All starts of the run."""
        return self._attempts.read()

    def working_directory(self) -> Path | None:
        """The working directory of the newest attempt, for relative paths in the experiment; None if it is gone.

        Raises:
            RunError: `attempts.jsonl` is damaged.
        """
        attempts = self.attempts()
        cwd = attempts[-1].get("cwd") if attempts else None
        if cwd is None:
            return None
        try:
            return Path(cwd) if Path(cwd).is_dir() and os.access(cwd, os.X_OK) else None
        except (OSError, ValueError):  # an invalid name: too long, or with a NUL
            return None

    def metrics(self) -> list[Row]:
        """The metrics of all training steps."""
        return [row for row in self._metrics.rows() if row.get("kind") != _EVALUATION]

    def last_metrics(self, count: int) -> list[Row]:
        """The last `count` rows of metrics, evaluations included; a long file is read from its end."""
        return self._metrics.last(count)

    def evaluations(self) -> list[Row]:
        """The metrics of all evaluations."""
        marker = f'"{_EVALUATION}"'.encode()  # rows without it, most of the file, are not parsed
        return [row for row in self._metrics.rows(marker) if row.get("kind") == _EVALUATION]

    def samples(self) -> list[Row]:
        """All prompts with their completions."""
        return self._samples.read()

    def rollouts(self) -> list[Row]:
        """All prompts whose sampled completions were written, with these; see `records.ROLLOUT`."""
        return self._rollouts.read()

    def events(self) -> list[Row]:
        """All events."""
        return self._events.read()

    def require_readable(self) -> None:
        """Checks all these files before anything is changed.

        Raises:
            RunError: One of them is no regular file, or an attempt cannot be read.
        """
        for lines in self._all_lines:
            lines.require_plain()
        self.attempts()

    def repair_rows(self, start: int, prompts: Sequence[str] = ()) -> list[str]:
        """Leaves exactly one row per step before `start` in metrics, evaluations, samples and rollouts.

        Events and attempts stay: they happened.

        Args:
            start: The step at which the run is resumed.
            prompts: Those of its evaluations; one that is listed twice, now or earlier, may have two samples.

        Returns:
            A message for each problem; rows of later steps are none, since they are written again.

        Raises:
            RunError: A file cannot be read or written.
        """
        attempts = self.attempts()
        prompt_counts = Counter(prompts)
        for attempt in attempts:
            prompt_counts |= _prompts_of(attempt)
        starts = [row.get("start", 0) for row in attempts]
        metrics = repair(self._metrics, _key_of_metrics, start, starts)
        samples = repair(self._samples, lambda row: _key_of_sample(row, prompt_counts), start, starts)
        rollouts = repair(self._rollouts, lambda row: Key(row["step"], row["group"]), start, starts)
        gaps = missing_steps((step for step, is_training in metrics.rows if is_training), start)
        problems = [*metrics.problems, *samples.problems, *rollouts.problems]
        return [*problems, f"metrics.jsonl: there are no metrics of {gaps}"] if gaps else problems

    def sync(self) -> None:
        """Syncs all rows to disk; call it before the checkpoint of the same step is committed."""
        for lines in self._all_lines:
            lines.sync()

    def close(self) -> None:
        """Closes the files."""
        for lines in self._all_lines:
            lines.close()


def _checked_lines(path: Path, kinds: Mapping[str, records.Kind], *required: str) -> JsonLines:
    return JsonLines(path, lambda row: problem_in(row, kinds, required=required))


def _with_step(row: Row) -> Row:
    if not isinstance(row.get("step"), int):
        raise TypeError(f"the row needs an int 'step', got {row.get('step')!r}")
    return row


def _key_of_metrics(row: Row) -> Key:
    """An evaluation comes before the training step of the same number."""
    is_training = row.get("kind") != _EVALUATION
    return Key(row["step"], int(is_training))


def _key_of_sample(row: Row, prompt_counts: Mapping[str, int]) -> Key:
    prompt = row.get("prompt", "")
    return Key(row["step"], 0, prompt, max(1, prompt_counts[prompt]))


def _prompts_of(attempt: Row) -> Counter[str]:
    """How often each prompt is listed in an attempt's experiment, whose JSON may have been edited."""
    evaluation: Any = attempt.get("experiment", {}).get("evaluation")
    prompts: Any = cast("dict[str, Any]", evaluation).get("prompts") if isinstance(evaluation, dict) else None
    listed = cast("list[Any]", prompts) if isinstance(prompts, list) else []
    return Counter(prompt for prompt in listed if isinstance(prompt, str))
