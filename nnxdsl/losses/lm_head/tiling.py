"""A head worked through in tiles: logits over a vocabulary exist for a tile at a time, and so do their gradients.

A tile is a chunk of tokens by a slice of the vocabulary. This file has the sizes of tiles, their logits, and the way
from gradients of logits to those of hidden states and of the head; other files have what is computed from logits.

Arrays have an axis for each direction in which devices cut them, and no sum runs over these within a loop: `g` for
groups of rows, `l` for pieces of rows, `s` for pieces of the vocabulary; beside these `n` counts chunks of `c` tokens,
`v` are the words of a tile, `d` is the width.
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
"""Below all logits, in place of an infinity, whose products with zero would be no numbers."""


@attrs.frozen
class Tiling:
    """How a head is worked through.

    Attributes:
        pieces: In how many pieces the vocabulary is cut over devices.
        words: Of a tile, of each piece of the vocabulary.
        keep: Whether a trained head's logits are saved for the backward pass rather than recomputed.
        soft_cap: Logits `z` are `soft_cap * tanh(z / soft_cap)`; None for none.
        constrain: Lays an activation out by its logical axes; None on one device.
        width_first: Whether gradients of a tile's rows are summed up as `[d, v]`. CPUs transpose the first operand of
            such a product: so it is the hidden states, and the sum once it is whole, not each chunk's logits. GPUs turn
            over nothing, and would lay out the gradient of the whole head so, and copy it.
    """

    pieces: int
    words: int
    keep: bool
    soft_cap: float | None
    constrain: Constraint | None
    width_first: bool


class VocabTile(NamedTuple):
    """The words of a tile.

    Attributes:
        rows: Of the head, `[s, v, d]`.
        first: The first word's number in its piece of the vocabulary.
        numbers: Of all words, counted over all pieces, as targets are, `[s, 1, 1, 1, v]`.
        fresh: Which of them no tile before has had, `[v]`; None where that is all of them.
    """

    rows: Array
    first: Array
    numbers: Array
    fresh: Array | None

    def are(self, targets: jax.Array) -> jax.Array:
        """Whether a word is a token's target, `[s, g, l, c, v]`."""
        return targets[..., None] == self.numbers

    def at(self, logits: jax.Array, targets: jax.Array) -> jax.Array:
        """The logits of targets `[s, g, l, c]`; `LOWEST` where a target is not among these words."""
        index = targets - self.numbers[..., 0]
        there = jnp.take_along_axis(logits, jnp.clip(index, 0, logits.shape[-1] - 1)[..., None], axis=-1)[..., 0]
        return jnp.where((index >= 0) & (index < logits.shape[-1]), there, LOWEST)


def cut(head: jax.Array, how: Tiling) -> jax.Array:
    """A head `[w, d]` as `[s, w / s, d]`, each piece on devices of its own."""
    head = head.reshape(how.pieces, -1, head.shape[1])
    axes = ("activation_vocab", None, "activation_embed")
    return head if how.constrain is None else how.constrain(head, axes)


def tiles_of(head: jax.Array, how: Tiling) -> int:
    """How many tiles a head that is cut has."""
    return -(-head.shape[1] // how.words)


def tile_of(head: jax.Array, how: Tiling, number: jax.Array) -> VocabTile:
    """One tile; where tiles do not divide the vocabulary, the last one begins with words that it has had before."""
    pieces, size, _ = head.shape
    first = jnp.minimum(number * how.words, size - how.words)
    rows = jax.lax.dynamic_slice_in_dim(head, first, how.words, axis=1)
    numbers = (jnp.arange(pieces) * size)[:, None] + first + jnp.arange(how.words)
    fresh = None if size % how.words == 0 else first + jnp.arange(how.words) >= number * how.words
    return VocabTile(rows, first, numbers[:, None, None, None], fresh)


def logits_of(hidden: jax.Array, words: VocabTile, how: Tiling) -> jax.Array:
    """Logits `[s, g, l, c, v]` of hidden states `[g, l, c, d]`, `LOWEST` where a word is not fresh."""
    # Tokens before words: `einsum` would put the words first, and CPUs then turn each tile over, time and again.
    product = jax.lax.dot_general(hidden, words.rows, (((3,), (2,)), ((), ())), preferred_element_type=jnp.float32)
    logits = jnp.moveaxis(product, 3, 0)  # [g, l, c, s, v] as [s, g, l, c, v]
    if how.constrain is not None:
        logits = how.constrain(logits, ("activation_vocab", "head_batch", "length", None, None))
    if how.soft_cap is not None:
        logits = apply_soft_cap(logits, how.soft_cap)
    return logits if words.fresh is None else jnp.where(words.fresh, logits, LOWEST)


def slope_of(logits: jax.Array, soft_cap: float) -> jax.Array:
    """The derivative of capped logits by what they were, from the capped ones: 1 - tanh^2."""
    return 1 - jnp.square(jnp.clip(logits / soft_cap, -1.0, 1.0))


def sums_laid_out(x: jax.Array, how: Tiling) -> jax.Array:
    """Sums of the head's rows, `[s, g, l, c, d]`, as the logits that they are weighted by."""
    axes = ("activation_vocab", "head_batch", "length", None, "activation_embed")
    return x if how.constrain is None else how.constrain(x, axes)


def at(x: jax.Array, index: jax.Array) -> jax.Array:
    """`x[index]`, for a traced index of the first axis."""
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


def loop(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any) -> tuple[Any, Any]:
    """`jax.lax.scan`, without a loop where there is one turn."""
    if len(jax.tree.leaves(xs)[0]) > 1:
        return jax.lax.scan(body, carry, xs)
    carry, out = body(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], out)


class Tile(NamedTuple):
    """Tile sizes where gradients are taken.

    Attributes:
        chunk: The number of its tokens among all chunks.
        number: That of its words among all tiles of a piece of the vocabulary.
        hidden: Hidden states of its tokens, `[g, l, c, d]`.
        words: Its words.
    """

    chunk: jax.Array
    number: jax.Array
    hidden: jax.Array
    words: VocabTile


def gradients(
    hidden: jax.Array,
    head: jax.Array,
    toward: Callable[[Tile], tuple[jax.Array, jax.Array]],
    how: Tiling,
    *,
    trained: bool = True,
) -> tuple[jax.Array, jax.Array | None]:
    """Gradients of hidden states and head from those of logits, a tile of the vocabulary after the other.

    Tiles are outside and chunks of tokens inside, so that a tile's rows have all of their gradient when they are left:
    it is float32 that long, and added up over devices once.

    Args:
        hidden: Hidden states, `[n, g, l, c, d]`.
        head: The head, `[w, d]`.
        toward: A tile's logits, and the loss's gradient by these, both float32 `[s, g, l, c, v]`.
        how: The tiles.
        trained: Whether the head has a gradient.

    Returns:
        Both in the dtype of what they belong to; None for a head that is not trained.
    """
    pieces = cut(head, how)

    def tile(sums: tuple[jax.Array, jax.Array], number: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        toward_hidden, toward_head = sums
        words = tile_of(pieces, how, number)

        def chunk(sums: tuple[jax.Array, jax.Array], index: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            toward_hidden, toward_rows = sums
            here = at(hidden, index)
            logits, slope = toward(Tile(index, number, here, words))
            if how.soft_cap is not None:
                slope = slope * slope_of(logits, how.soft_cap)
            if words.fresh is not None:
                slope = jnp.where(words.fresh, slope, 0.0)
            slope = slope.astype(hidden.dtype)
            more = jnp.einsum("sglcv,svd->sglcd", slope, words.rows, preferred_element_type=jnp.float32)
            toward_hidden = toward_hidden.at[index].add(sums_laid_out(more, how))
            if trained and how.width_first:
                over = ((2,), (3,)), ((0, 1), (1, 2))  # `einsum` would put the words first
                toward_rows += jax.lax.dot_general(here, slope, over, preferred_element_type=jnp.float32)
            elif trained:
                toward_rows += jnp.einsum("sglcv,glcd->glsvd", slope, here, preferred_element_type=jnp.float32)
            return (toward_hidden, toward_rows), None

        shape = words.rows.shape[-1:] + words.rows.shape[:-1] if how.width_first else words.rows.shape
        rows = jnp.zeros((*hidden.shape[1:3], *shape) if trained else (), jnp.float32)  # [g, l, d, s, v] or as rows
        (toward_hidden, rows), _ = loop(chunk, (toward_hidden, rows), jnp.arange(len(hidden)))
        if trained:
            rows = jnp.moveaxis(rows, 2, 4) if how.width_first else rows
            toward_head = _with_rows(toward_head, rows, words, how)
        return (toward_hidden, toward_head), None

    count, *rest = hidden.shape
    nothing = jnp.zeros((count, pieces.shape[0], *rest), jnp.float32)
    begin = nothing, jnp.zeros_like(pieces) if trained else jnp.zeros(())
    (toward_hidden, toward_head), _ = loop(tile, begin, jnp.arange(tiles_of(pieces, how)))
    toward_hidden = jnp.sum(toward_hidden, axis=1).astype(hidden.dtype)
    return toward_hidden, toward_head.reshape(head.shape) if trained else None


def _with_rows(toward_head: jax.Array, rows: jax.Array, words: VocabTile, how: Tiling) -> jax.Array:
    """The head's gradient, in pieces, with what one tile's words add to it, `[g, l, s, v, d]`, in its own dtype.

    Words of the tile before, which the last one may begin with, have their gradient, and get no more.
    """
    rows = jnp.sum(rows, axis=(0, 1)).astype(toward_head.dtype)
    before = jax.lax.dynamic_slice_in_dim(toward_head, words.first, how.words, axis=1)
    return jax.lax.dynamic_update_slice_in_dim(toward_head, before + rows, words.first, 1)
