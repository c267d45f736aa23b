"""Gemma 3 in any depth and width, its LoRA DPO, and pairs drawn at random: what benchmarks of no real weights take."""

from __future__ import annotations

import attrs
import numpy as np

from nnxdsl import Adapter, Data, Experiment, Model, Objective, Optimizer, Schedule
from nnxdsl.data.batch import PairBatch
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.families.gemma3 import GEMMA3
from nnxdsl.program import blueprint


@attrs.frozen(kw_only=True)
class Shaped(Model):
    """Gemma 3 270M with other numbers: four query heads, one of keys and values, every sixth layer global.

    Attributes:
        layers: How many.
        embed_dim: Width.
        mlp_dim: Width of the MLP.
        head_dim: Width of a head.
        vocab_size: Rows of the embedding.
    """

    layers: int = 26
    embed_dim: int = 16
    mlp_dim: int = 32
    head_dim: int = 8
    vocab_size: int = 256


@blueprint.architecture.register(Shaped)
def _(model: Shaped) -> DecoderConfig:
    return GEMMA3["270m"].with_fields(
        {
            "layers.num_layers": model.layers,
            "embed_dim": model.embed_dim,
            "mlp.dim": model.mlp_dim,
            "head_dim": model.head_dim,
            "attention.query_scale": model.head_dim**-0.5,
            "vocab_size": model.vocab_size,
        }
    )


def experiment(model: Model, *, rows: int = 1, prompt: int = 8, response: int = 8, rank: int | None = 4) -> Experiment:
    """DPO of `model`, with LoRA of a rank, or of all weights if it is None; the reference's words are known."""
    return Experiment(
        name="shaped",
        model=model,
        adapter=None if rank is None else Adapter.LoRA(rank=rank),
        objective=Objective.DPO(),
        data=Data.Preferences("none.jsonl", max_prompt_length=prompt, max_completion_length=response),
        optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-4)),
        batch_size=rows,
        steps=1_000,
    )


def pairs(asked: Experiment) -> PairBatch:
    """A batch without padding, with log-probabilities of a reference."""
    assert isinstance(asked.data, Data.Preferences)
    sizes = (asked.data.max_prompt_length, asked.data.max_completion_length, asked.data.max_completion_length)
    draw, rows = np.random.default_rng(0), asked.batch_size
    ids = [draw.integers(1, 256, (rows, size)).astype(np.int32) for size in sizes]
    lengths = [np.full(rows, size, np.int32) for size in sizes]
    return PairBatch(*ids, *lengths, np.ones(rows, np.float32), *np.full((2, rows), -2.0, np.float32))
