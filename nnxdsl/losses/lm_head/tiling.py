"""The output head in vocabulary tiles: logits, and their gradients, exist for one tile at a time.

A tile is a chunk of tokens by a slice of the vocabulary. This file has the sizes of tiles, their logits, and the
backward pass from gradients of logits to those of hidden states and head; the files beside it have the statistics.

Axes of arrays, here and in the files beside this one; no sum over a sharded axis runs inside a loop:

    n  chunks of tokens                      c  tokens of a chunk
    g  shards of the batch                   l  shards of the sequence
    s  shards of the vocabulary              v  vocabulary entries of a tile
    w  the whole vocabulary                  d  embedding dimension
    k  selected tokens                       e  embedding dimension of a teacher
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
from jaxtyping import Array

from nnxdsl.models.attention.dot_product import apply_soft_cap
from nnxdsl.models.logical_axes import Constraint

LOWEST = -1e30
"""Below all logits; finite, because infinity times zero is NaN."""


@attrs.frozen
class Tiling:
    """Tile sizes and options of an output head.

    Attributes:
        vocab_shards: Over how many devices the vocabulary is sharded.
        tile_vocab: Vocabulary entries of a tile, per shard.
        keep: Whether a trained head's logits are saved for the backward pass rather than recomputed.
        soft_cap: Logits `z` are `soft_cap * tanh(z / soft_cap)`; None for none.
        constrain: Constrains an activation's sharding by its logical axes; None on one device.
        width_first: Whether gradients of a tile's weights are accumulated as `[d, v]`. CPUs transpose the first operand
            of such a product: this way it is the hidden states, not each chunk's logits. GPUs transpose nothing, and
            would lay out the gradient of the whole head so, and copy it.
    """

    vocab_shards: int
    tile_vocab: int
    keep: bool
    soft_cap: float | None
    constrain: Constraint | None
    width_first: bool


class VocabTile(NamedTuple):
    """A slice of the vocabulary.

    Attributes:
        weight: The head's rows, `[s, v, d]`.
        offset: Index of the first row in its shard of the vocabulary.
        token_ids: Of all rows, `[s, 1, 1, 1, v]`.
        is_new: Which rows no earlier tile had, `[v]`; None where all are new.
    """

    weight: Array
    offset: Array
    token_ids: Array
    is_new: Array | None

    def is_target(self, targets: jax.Array) -> jax.Array:
        """Whether a vocabulary entry is a token's target, `[s, g, l, c, v]`."""
        return targets[..., None] == self.token_ids

    def target_logits(self, logits: jax.Array, targets: jax.Array) -> jax.Array:
        """The logits of targets `[s, g, l, c]`; `LOWEST` where a target is not in this tile."""
        index = targets - self.token_ids[..., 0]
        target = jnp.take_along_axis(logits, jnp.clip(index, 0, logits.shape[-1] - 1)[..., None], axis=-1)[..., 0]
        return jnp.where((index >= 0) & (index < logits.shape[-1]), target, LOWEST)


def split_vocab(head: jax.Array, tiling: Tiling) -> jax.Array:
    """A head `[w, d]` as `[s, w / s, d]`, one shard per device group."""
    head = head.reshape(tiling.vocab_shards, -1, head.shape[1])
    axes = ("activation_vocab", None, "activation_embed")
    return head if tiling.constrain is None else tiling.constrain(head, axes)


def num_tiles(head: jax.Array, tiling: Tiling) -> int:
    """Number of tiles of a head `[s, w / s, d]`."""
    return -(-head.shape[1] // tiling.tile_vocab)


def vocab_tile(head: jax.Array, tiling: Tiling, number: jax.Array) -> VocabTile:
    """Tile `number`; where tiles do not divide the vocabulary, the last one overlaps the one before it."""
    shards, size, _ = head.shape
    width = tiling.tile_vocab
    offset = jnp.minimum(number * width, size - width)
    weight = jax.lax.dynamic_slice_in_dim(head, offset, width, axis=1)
    token_ids = (jnp.arange(shards) * size)[:, None] + offset + jnp.arange(width)
    is_new = None if size % width == 0 else offset + jnp.arange(width) >= number * width
    return VocabTile(weight, offset, token_ids[:, None, None, None], is_new)


def tile_logits(hidden: jax.Array, vocab: VocabTile, tiling: Tiling) -> jax.Array:
    """Logits `[s, g, l, c, v]` of hidden states `[g, l, c, d]`; `LOWEST` where an earlier tile had the entry."""
    # Tokens before vocabulary: `einsum` would put the vocabulary first, and CPUs then transpose every tile.
    product = jax.lax.dot_general(hidden, vocab.weight, (((3,), (2,)), ((), ())), preferred_element_type=jnp.float32)
    logits = jnp.moveaxis(product, 3, 0)  # [g, l, c, s, v] as [s, g, l, c, v]
    if tiling.constrain is not None:
        logits = tiling.constrain(logits, ("activation_vocab", "head_batch", "length", None, None))
    if tiling.soft_cap is not None:
        logits = apply_soft_cap(logits, tiling.soft_cap)
    return logits if vocab.is_new is None else jnp.where(vocab.is_new, logits, LOWEST)


def soft_cap_grad(logits: jax.Array, soft_cap: float) -> jax.Array:
    """Derivative of soft-capped logits by the uncapped ones, from the capped ones: 1 - tanh^2."""
    return 1 - jnp.square(jnp.clip(logits / soft_cap, -1.0, 1.0))


def constrain_sums(x: jax.Array, tiling: Tiling) -> jax.Array:
    """Constrains weighted sums of the head's rows, `[s, g, l, c, d]`, to the sharding of their logits."""
    axes = ("activation_vocab", "head_batch", "length", None, "activation_embed")
    return x if tiling.constrain is None else tiling.constrain(x, axes)


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """`x[index]`, for a traced index of the first axis."""
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


def scan(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any) -> tuple[Any, Any]:
    """`jax.lax.scan`, without a loop where there is one iteration."""
    if len(jax.tree.leaves(xs)[0]) > 1:
        return jax.lax.scan(body, carry, xs)
    carry, out = body(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], out)


class Tile(NamedTuple):
    """A tile in the backward pass.

    Attributes:
        chunk: Index of its chunk of tokens.
        number: Index of its slice of the vocabulary.
        hidden: Hidden states of its tokens, `[g, l, c, d]`.
        vocab: Its slice of the vocabulary.
    """

    chunk: jax.Array
    number: jax.Array
    hidden: jax.Array
    vocab: VocabTile


def gradients(
    hidden: jax.Array,
    head: jax.Array,
    logits_and_grads: Callable[[Tile], tuple[jax.Array, jax.Array]],
    tiling: Tiling,
    *,
    trained: bool = True,
) -> tuple[jax.Array, jax.Array | None]:
    """Gradients of hidden states and head from those of logits, tile by tile.

    Tiles are the outer loop and chunks of tokens the inner one, so that a tile's gradient is complete before the next
    tile begins: it is accumulated in float32 and summed over devices once.

    Args:
        hidden: Hidden states, `[n, g, l, c, d]`.
        head: The head, `[w, d]`.
        logits_and_grads: A tile's logits and the loss's gradient by them, both float32 `[s, g, l, c, v]`.
        tiling: The tiles.
        trained: Whether the head has a gradient.

    Returns:
        Both in the dtype of hidden states and head; None for a head that is not trained.
    """
    shards = split_vocab(head, tiling)

    def tile(sums: tuple[jax.Array, jax.Array], number: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        hidden_grad, head_grad = sums
        vocab = vocab_tile(shards, tiling, number)

        def chunk(sums: tuple[jax.Array, jax.Array], index: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            hidden_grad, weight_grad = sums
            states = take(hidden, index)
            logits, grad = logits_and_grads(Tile(index, number, states, vocab))
            if tiling.soft_cap is not None:
                grad = grad * soft_cap_grad(logits, tiling.soft_cap)
            if vocab.is_new is not None:
                grad = jnp.where(vocab.is_new, grad, 0.0)
            grad = grad.astype(hidden.dtype)
            product = jnp.einsum("sglcv,svd->sglcd", grad, vocab.weight, preferred_element_type=jnp.float32)
            hidden_grad = hidden_grad.at[index].add(constrain_sums(product, tiling))
            if trained and tiling.width_first:
                over = ((2,), (3,)), ((0, 1), (1, 2))  # `einsum` would put the vocabulary first
                weight_grad += jax.lax.dot_general(states, grad, over, preferred_element_type=jnp.float32)
            elif trained:
                weight_grad += jnp.einsum("sglcv,glcd->glsvd", grad, states, preferred_element_type=jnp.float32)
            return (hidden_grad, weight_grad), None

        shape = vocab.weight.shape[-1:] + vocab.weight.shape[:-1] if tiling.width_first else vocab.weight.shape
        weight_grad = jnp.zeros(
            (*hidden.shape[1:3], *shape) if trained else (), jnp.float32
        )  # [g, l, d, s, v] or [g, l, s, v, d]
        (hidden_grad, weight_grad), _ = scan(chunk, (hidden_grad, weight_grad), jnp.arange(len(hidden)))
        if trained:
            weight_grad = jnp.moveaxis(weight_grad, 2, 4) if tiling.width_first else weight_grad
            head_grad = _add_tile(head_grad, weight_grad, vocab, tiling)
        return (hidden_grad, head_grad), None

    count, *rest = hidden.shape
    zeros = jnp.zeros((count, shards.shape[0], *rest), jnp.float32)
    init = zeros, jnp.zeros_like(shards) if trained else jnp.zeros(())
    (hidden_grad, head_grad), _ = scan(tile, init, jnp.arange(num_tiles(shards, tiling)))
    hidden_grad = jnp.sum(hidden_grad, axis=1).astype(hidden.dtype)
    return hidden_grad, head_grad.reshape(head.shape) if trained else None


def _add_tile(head_grad: jax.Array, weight_grad: jax.Array, vocab: VocabTile, tiling: Tiling) -> jax.Array:
    """The head's gradient `[s, w / s, d]` plus that of one tile, `[g, l, s, v, d]`.

    Rows that an earlier tile had get a gradient of zero here.
    """
    weight_grad = jnp.sum(weight_grad, axis=(0, 1)).astype(head_grad.dtype)
    current = jax.lax.dynamic_slice_in_dim(head_grad, vocab.offset, tiling.tile_vocab, axis=1)
    return jax.lax.dynamic_update_slice_in_dim(head_grad, current + weight_grad, vocab.offset, 1)
