"""Per-layer embeddings: vectors of each token for each layer, and the gate through which a layer adds its own.

They are those of Gemma 3n and of Gemma 4 E2B and E4B. Most of such a model's weights are in this table, of which a step
reads a few rows; a device holds some of its columns, looks those up for all tokens and exchanges the vectors found.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.feed_forward import Activation
from nnxdsl.models.layers.linear import Linear, rows_of
from nnxdsl.models.layers.mlp import activate
from nnxdsl.models.layers.norm import norm_of
from nnxdsl.models.logical_axes import constrain


class LayerEmbedding(nnx.Module):
    """Vectors for each layer: from a table by token, and from the token's embedding by a projection.

    Args:
        config: the decoder's config, with `per_layer_embedding`.
        rngs: draws the weights; the table is normal with variance 1 / its width.
        param_dtype: dtype of the weights.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> None:
        assert config.per_layer_embedding is not None  # or there is no such module
        self.dim, self.embed_dim = config.per_layer_embedding.dim, config.embed_dim
        columns = config.layers.num_layers * self.dim
        shape = (config.per_layer_embedding.vocab_size, columns)
        values = jax.random.normal(rngs.params(), shape, jnp.float32) * self.dim**-0.5
        axes = ("per_layer_vocab", "per_layer_embed")
        self.embedding = nnx.Param(values.astype(param_dtype), axes=axes)  # [V, L * P]
        self.projection = Linear(
            config.embed_dim, columns, axes=("embed", "per_layer_embed"), rngs=rngs, param_dtype=param_dtype
        )
        self.norm = norm_of(config, self.dim, "norm", param_dtype)

    def __call__(self, tokens: jax.Array, embedded: jax.Array) -> jax.Array:
        """The vectors of a call.

        Args:
            tokens: `[B, T]`; an id outside the table gives NaN.
            embedded: their embeddings `[B, T, D]`.

        Returns:
            `[B, T, L, P]` in the dtype of `embedded`.
        """
        split = (*tokens.shape, -1, self.dim)
        embeddings = jnp.take(self.embedding[...], constrain(tokens, None, None), axis=0)  # [B, T, L * P]
        # In two steps, of which XLA makes collectives of parts; in one it would gather all on each device.
        for columns in ("per_layer_embed", "activation_per_layer"):
            embeddings = constrain(embeddings, None, None, columns)
        embeddings = constrain(embeddings, "batch", "length", None)
        embeddings = embeddings.astype(embedded.dtype).reshape(split) * jnp.asarray(self.dim**0.5, embedded.dtype)
        projected = self.projection(embedded) * jnp.asarray(self.embed_dim**-0.5, embedded.dtype)
        both = self.norm(projected.reshape(split)) + embeddings
        return constrain(both * jnp.asarray(2**-0.5, embedded.dtype), "batch", "length", None, None)


class LayerEmbeddingGate(nnx.Module):
    """What a layer adds to its output: `norm(output(activation(gate(x)) * own))`.

    Args:
        config: the decoder's config, with `per_layer_embedding`.
        rngs: draws the weights.
        param_dtype: dtype of the weights.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> None:
        assert config.per_layer_embedding is not None  # or there is no such module
        embed, dim = config.embed_dim, config.per_layer_embedding.dim
        self.activation: Activation = config.mlp.activation
        self.gate = Linear(embed, dim, axes=("embed", "per_layer"), rngs=rngs, param_dtype=param_dtype)
        self.output = Linear(dim, embed, axes=("per_layer", "embed"), rngs=rngs, param_dtype=param_dtype)
        self.norm = norm_of(config, embed, "norm", param_dtype)

    def __call__(self, x: jax.Array, embedding: jax.Array) -> jax.Array:
        """`[B, T, D]` and the layer's vectors `[B, T, P]` to `[B, T, D]`."""
        hidden = activate(self.activation, rows_of(embedding), self.gate(rows_of(x)))
        return self.norm(self.output(hidden).reshape(x.shape))
