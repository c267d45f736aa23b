"""Mixtures: the rows of each source are loaded as they would be alone, and joined."""

from __future__ import annotations

from typing import Any

import numpy as np

from nnxdsl.config.data import Mixture
from nnxdsl.data.dataset import Dataset, MixtureSource
from nnxdsl.data.loaders.build import load
from nnxdsl.data.loaders.token_cache import TokenCache
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.errors import DataError


@load.register(Mixture)
def load_mixture(
    data: Mixture,
    tokenizer: TokenizerBase,
    *,
    max_position: int | None = None,
    loss_on: str = "assistant",
    vocabulary: int | None = None,
    cache: TokenCache | None = None,
) -> Dataset:
    """The rows of all sources, one source after another, with the share of each; see `load`."""
    limits: dict[str, Any] = {
        "max_position": max_position,
        "loss_on": loss_on,
        "vocabulary": vocabulary,
        "cache": cache,
    }
    datasets = [load(part, tokenizer, **limits) for part in data.parts]
    kinds = {type(dataset).__qualname__ for dataset in datasets}
    if len(kinds) > 1:
        raise DataError(f"data.sources: expected datasets of one class, got {' and '.join(sorted(kinds))}")
    joined = datasets[0].joined(datasets)
    shares = _shares(data, datasets)
    joined.mixture = [
        MixtureSource(name, share, len(dataset), part.order)
        for name, share, dataset, part in zip(data.names, shares, datasets, data.parts, strict=True)
    ]
    return joined


def _shares(data: Mixture, datasets: list[Dataset]) -> list[float]:
    """The share of each source in the rows."""
    weights = np.array(data.weights)
    if data.unit == "tokens":
        weights /= [dataset.packing_lengths()[0].mean() for dataset in datasets]
    elif data.unit == "epochs":
        weights *= [len(dataset) for dataset in datasets]
    return (weights / weights.sum()).tolist()
