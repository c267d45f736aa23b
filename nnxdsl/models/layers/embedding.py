"""The token embedding, an untied output head, and a head of a few labels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.layers.norm import unscaled_norm
from nnxdsl.models.logical_axes import constrain


class Embedding(nnx.Module):
    """The table of token vectors, which is also a tied output head.

    Args:
        vocab_size: rows.
        features: columns.
        factor: vectors are multiplied by it.
        norm_eps: added to the mean square in an RMSNorm of the vectors, which has no scale; None for no norm.
        rngs: draws the table, normal with variance 1 / features, so that logits have variance 1.
        param_dtype: dtype of the table.
    """

    def __init__(
        self,
        vocab_size: int,
        features: int,
        *,
        factor: float,
        norm_eps: float | None = None,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
    ) -> None:
        self.factor, self.norm_eps = factor, norm_eps
        self.embedding = nnx.Param(_rows(vocab_size, features, rngs, param_dtype), axes=("vocab", "embed"))  # [V, D]

    def __call__(self, tokens: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Token ids `[B, T]` to vectors `[B, T, D]`; an id outside the table gives NaN.

        The factor is rounded to `dtype` first: the published weights were trained so (55.4256 is 55.5 in bfloat16).
        """
        # Looked up whole: were it cut along D, rows of all devices would have to be brought together afterwards.
        table = constrain(self.embedding[...], "vocab", None)
        vectors = jnp.take(table, tokens, axis=0).astype(dtype)  # [B, T, D]
        if self.norm_eps is not None:
            vectors = unscaled_norm(vectors, self.norm_eps)
        return vectors if self.factor == 1.0 else vectors * jnp.asarray(self.factor, dtype)


class Head(nnx.Module):
    """An output head with weights of its own, a row for each token as in the embedding.

    Args:
        vocab_size: rows.
        features: columns.
        rngs: draws the rows, normal with variance 1 / features, so that logits have variance 1.
        param_dtype: dtype of the weights.
    """

    def __init__(self, vocab_size: int, features: int, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> None:
        self.kernel = nnx.Param(_rows(vocab_size, features, rngs, param_dtype), axes=("vocab", "embed"))  # [V, D]


class Score(nnx.Module):
    """A linear head of a few outputs for each token, as of transformers' sequence classification.

    Args:
        num_labels: rows.
        features: columns.
        rngs: draws the rows, normal with deviation 0.02, as transformers does.
        param_dtype: dtype of the weights.
    """

    def __init__(self, num_labels: int, features: int, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> None:
        rows = 0.02 * jax.random.normal(rngs.params(), (num_labels, features), jnp.float32)
        self.kernel = nnx.Param(rows.astype(param_dtype), axes=(None, "embed"))  # [labels, D]


def _rows(count: int, features: int, rngs: nnx.Rngs, dtype: DTypeLike) -> jax.Array:
    return (jax.random.normal(rngs.params(), (count, features), jnp.float32) * features**-0.5).astype(dtype)
