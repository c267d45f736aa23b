"""Runs and their rows as pandas DataFrames; pandas is optional."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from nnxdsl.errors import RunError
from nnxdsl.runs import run_list
from nnxdsl.storage.jsonl import Row


def frame(rows: Sequence[Row], alternative: str) -> Any:
    """Rows as a pandas DataFrame.

    Args:
        rows: The rows; the columns are their keys.
        alternative: What returns the rows without pandas, for the message.

    Raises:
        RunError: pandas is not installed.
    """
    try:
        pandas = importlib.import_module("pandas")
    except ImportError as error:
        raise RunError(f"a frame needs pandas: pip install 'nnxdsl[notebook]'; or read {alternative}") from error
    return pandas.DataFrame(rows)


def list_runs(home: str | Path = "runs", *, metrics: bool = False) -> Any:
    """All runs of a directory as a pandas DataFrame, newest first: id, state, step, total, created, problem, path.

    Args:
        home: Directory of all runs.
        metrics: Whether to add the last metrics of each run, of training and of evaluation, as columns.

    Raises:
        RunError: pandas is not installed, or `home` is no directory.
    """
    runs = run_list.list_runs(Path(home))
    names = [field.name for field in attrs.fields(run_list.RunSummary)]
    rows = [attrs.asdict(run) | (run_list.last_metrics(run.path) if metrics else {}) for run in runs]
    result = frame(rows, "nnxdsl.runs.run_list.list_runs(home)")
    return result.reindex(columns=[*names, *(name for name in result.columns if name not in names)])
