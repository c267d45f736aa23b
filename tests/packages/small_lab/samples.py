"""Batches of unequal lengths, and weights that look trained: for fixtures, and for scripts in their own processes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.data.batch import PairBatch, RolloutBatch, SequenceBatch
from nnxdsl.program import init
from nnxdsl.program.compile import Program, TrainState

VOCAB = 48


def pairs(rows: int, *, seed: int = 0, prompt: int = 8, response: int = 8, fill: int = 0) -> PairBatch:
    """Pairs; the ids of `fill` rows at the end have weight 0."""
    draw = np.random.default_rng(seed)
    lengths = {
        name: draw.integers(1, size + 1, rows).astype(np.int32)
        for name, size in (("prompt", prompt), ("chosen", response), ("rejected", response))
    }
    ids = {
        name: draw.integers(1, VOCAB, (rows, size)).astype(np.int32)
        for name, size in (("prompt", prompt), ("chosen", response), ("rejected", response))
    }
    slots = {name: np.arange(array.shape[1]) for name, array in ids.items()}
    return PairBatch(
        prompt=np.where(slots["prompt"] >= prompt - lengths["prompt"][:, None], ids["prompt"], 0),
        chosen=np.where(slots["chosen"] < lengths["chosen"][:, None], ids["chosen"], 0),
        rejected=np.where(slots["rejected"] < lengths["rejected"][:, None], ids["rejected"], 0),
        prompt_length=lengths["prompt"],
        chosen_length=lengths["chosen"],
        rejected_length=lengths["rejected"],
        weight=np.array([1.0] * (rows - fill) + [0.0] * fill, np.float32),
    )


def sequences(rows: int, *, seed: int = 0, length: int = 16, fill: int = 0) -> SequenceBatch:
    """Sequences with about half of their tokens as targets; `fill` rows at the end have weight 0."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(2, length + 1, rows).astype(np.int32)
    real = np.arange(length) < lengths[:, None]
    mask = real & (draw.random((rows, length)) < 0.5)
    mask[:, 1] = True
    mask[:, 0] = False
    return SequenceBatch(
        tokens=np.where(real, draw.integers(1, VOCAB, (rows, length)), 0).astype(np.int32),
        length=lengths,
        loss_mask=mask,
        weight=np.array([1.0] * (rows - fill) + [0.0] * fill, np.float32),
    )


def answers() -> RolloutBatch:
    """Eight prompts with answers of unequal lengths."""
    draw = np.random.default_rng(2)
    prompt, said = draw.integers(1, 9, 8), draw.integers(1, 9, 8)
    tokens, answer = np.zeros((8, 16), np.int32), np.zeros((8, 8), np.int32)
    for row in range(8):
        ids = draw.integers(1, VOCAB, prompt[row] + said[row])
        tokens[row, : len(ids)], answer[row, : said[row]] = ids, ids[prompt[row] :]
    mask = np.arange(8) < said[:, None]
    old = (draw.normal(-3, 0.5, (8, 8)) * mask).astype(np.float32)
    one = np.ones(8, np.float32)
    gain = draw.normal(size=8).astype(np.float32)
    length = (prompt + said).astype(np.int32)
    return RolloutBatch(tokens, length, answer, said.astype(np.int32), mask, one, gain[:, None] * mask, 8 * one, old)


class Trained:
    """A source of weights with values that a trained model might have."""

    def __init__(self, program: Program, seed: int, *, teacher: bool = False) -> None:
        of: Any = program.blueprint.teacher if teacher else program.blueprint
        self.base, self.seed = of.base, seed

    def leaf(self, path: str) -> np.ndarray:
        shape = self.base[path].shape
        draw = np.random.default_rng([self.seed, *path.encode()])
        spread = 0.3 if path.endswith("norm.scale") else 1.5 * shape[-1 if "embed" in path else -2] ** -0.5
        return (draw.standard_normal(shape) * spread).astype(np.float32)


def trained(program: Program, seed: int = 0) -> TrainState:
    """A first state whose base has sharp logits and norms away from zero, as a trained model has."""
    source = Trained(program, seed)
    if program.blueprint.teacher is None:
        return program.init(source)
    return program.init(init.TeacherSource(source, Trained(program, seed + 1, teacher=True)))


def with_b(state: TrainState) -> TrainState:
    """The state with adapters that are no longer the identity."""
    draw = np.random.default_rng(5)
    leaves = {
        path: jax.device_put(jnp.asarray(draw.standard_normal(leaf.shape) * 0.2, leaf.dtype), leaf.sharding)
        if path.endswith("_lora_b")
        else leaf
        for path, leaf in state.trainable.items()
    }
    return state._replace(trainable=leaves)
