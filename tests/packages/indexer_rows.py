"""The rows and the stored models of tests/reference/make_indexer.py as batches and specs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nnxdsl import Batching, Data, Model, Weights
from nnxdsl.data import BatchSampler, Sequences
from nnxdsl.data.batch import Batch, SequenceBatch
from nnxdsl.data.dataset import TokenizedRows
from nnxdsl.data.loaders.report import Report
from nnxdsl.data.ragged import RaggedBuilder
from nnxdsl.program.compile import Program

REFERENCE = Path(__file__).parents[1] / "reference"


def model_of(name: str, **fields: Any) -> Model:
    """A stored checkpoint."""
    path = str(REFERENCE / "families" / name)
    return Model.HF(path, weights=Weights.HF(path), **fields)


def expected_figures(name: str) -> dict[str, np.ndarray]:
    """Its figures."""
    return dict(np.load(REFERENCE / "indexer" / f"{name}.npz"))


def batch_of(program: Program, name: str) -> Batch:
    """The rows as the experiment lays them out; every token after the first of a row is a target."""
    figures, experiment = expected_figures(name), program.experiment
    tokens, lengths = figures["tokens"], figures["lengths"]
    if not isinstance(experiment.batching, Batching.Packed):
        mask = (np.arange(tokens.shape[1])[None] < lengths[:, None]) & (np.arange(tokens.shape[1])[None] > 0)
        noise = np.random.default_rng(0).integers(0, 96, tokens.shape)  # what stands in padding must not matter
        real = np.arange(tokens.shape[1])[None] < lengths[:, None]
        return SequenceBatch(np.where(real, tokens, noise).astype(np.int32), lengths, mask, np.ones(8, np.float32))
    ids, targets = RaggedBuilder(), RaggedBuilder()
    for row, length in zip(tokens, lengths, strict=True):
        ids.add(row[:length].tolist())
        targets.add([0] + [1] * (int(length) - 1))
    count = len(lengths)
    report = Report(source="rows", rows=count, accepted=count, cut={}, dropped={}, odd={}, first={}, lengths={})
    parts = {"tokens": ids.build(), "target": targets.build()}
    rows = TokenizedRows(parts, [f"rows:{row}" for row in range(count)], report, "digest", is_chat=False)
    order = Data.Text("none.jsonl").order
    batching, blocks = experiment.batching, program.blueprint.blocks
    return BatchSampler(
        Sequences(rows), batch_size=count, seed=0, order=order, batching=batching, blocks=blocks
    ).batch_at(0)
