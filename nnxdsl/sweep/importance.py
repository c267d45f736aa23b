"""Importance of each field of a sweep or search for a metric, by Optuna's PED-ANOVA."""

# pyright: reportMissingImports=false
# (its library is an extra)

from __future__ import annotations

import ast
import importlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nnxdsl.errors import RunError

MIN_POINTS = 4
"""Fewest points for which importance is computed."""

LOG_RATIO = 9.9
"""Positive numbers whose largest is this many times their smallest are compared by their logarithms."""


def importances(points: Sequence[tuple[Mapping[str, str], float]], *, minimize: bool) -> dict[str, float]:
    """Returns the share of each field in the differences of a metric, the largest first; they sum to 1.

    PED-ANOVA (Watanabe, Bansal and Hutter 2023, arXiv:2304.10255) measures how much the distribution of a field among
    the best tenth of the points differs from that among all. Fields that some points lack, or that have one value, are
    left out.

    Args:
        points: Fields of each point, as Python source by path, and its finite metric.
        minimize: Whether small values of the metric are good.

    Raises:
        RunError: Optuna is not installed, or there are too few points.
    """
    try:
        optuna = importlib.import_module("optuna")
    except ImportError as error:
        raise RunError("importance needs optuna: pip install 'nnxdsl[search]'") from error
    if len(points) < MIN_POINTS:
        raise RunError(f"importance needs at least {MIN_POINTS} points with a value; there are {len(points)}")
    paths = [path for path in points[0][0] if all(path in changes for changes, _ in points)]
    columns = {path: [changes[path] for changes, _ in points] for path in paths}
    axes = {path: _axis(optuna, texts) for path, texts in columns.items() if len(set(texts)) > 1}
    if not axes:
        return {}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="minimize" if minimize else "maximize")
    distributions = {path: distribution for path, (distribution, _) in axes.items()}
    for number, (_, value) in enumerate(points):
        params = {path: values[number] for path, (_, values) in axes.items()}
        study.add_trial(optuna.create_trial(params=params, distributions=distributions, value=value))
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna calls some evaluators experimental
        shares: Mapping[str, float] = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {path: float(share) for path, share in shares.items()}


def _axis(optuna: Any, texts: Sequence[str]) -> tuple[Any, list[Any]]:
    """Distribution of a field and its values: numbers, or else their texts."""
    numbers = [number_in(text) for text in texts]
    values = [number for number in numbers if number is not None]
    if len(values) < len(texts):
        return optuna.distributions.CategoricalDistribution(sorted(set(texts))), list(texts)
    low, high = min(values), max(values)
    return optuna.distributions.FloatDistribution(low, high, log=low > 0 and high > LOG_RATIO * low), values


def number_in(text: str) -> float | None:
    """Returns the finite number that a field's Python source is; None for anything else, booleans too."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value)
    return float(value) if is_number else None
