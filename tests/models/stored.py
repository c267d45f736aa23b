"""Stored checkpoints as decoders, and how far a changed one is from transformers' figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.formats import hf
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.decoder import Decoder

FAMILIES = Path(__file__).parent.parent / "reference" / "families"
Leaves = dict[str, jax.Array]


def read(name: str) -> tuple[DecoderConfig, Leaves]:
    """The config and the arrays of a stored checkpoint, whose file has all of them and no others."""
    reader = hf.HubReader(FAMILIES / name)
    template = abstract_decoder(reader.config)
    assert reader.check(template) == []
    return reader.config, {path: jnp.asarray(reader.leaf(path)) for path in template.variables}


def compared(name: str, config: DecoderConfig) -> Callable[[Leaves], float]:
    """How far logits are from those of transformers for a checkpoint, relative to the largest.

    Args:
        name: of the checkpoint.
        config: a decoder, the checkpoint's or another; of the given arrays those are used that it has.
    """
    expected = np.load(FAMILIES / name / "expected.npz")
    tokens, wanted = jnp.asarray(expected["tokens"][:1]), expected["logits"][:1]
    template = abstract_decoder(config)

    @jax.jit
    def logits(leaves: Leaves) -> jax.Array:
        decoder = template.merge(leaves)
        assert isinstance(decoder, Decoder)
        positions = positions_right_padded(jnp.asarray(expected["lengths"][:1]), tokens.shape[1])
        return decoder.logits(decoder(tokens, positions, dtype=jnp.float32).hidden)

    def difference(leaves: Leaves) -> float:
        got = logits({path: leaves[path] for path in template.variables})
        return float(np.abs(got - wanted).max() / np.abs(wanted).max())

    return difference
