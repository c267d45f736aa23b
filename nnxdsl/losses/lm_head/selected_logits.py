"""Logits of selected vocabulary entries for each token, and the logsumexp of all others, tile by tile.

The selected entries are left out of that sum where it is accumulated, rather than subtracted from the full sum: the
small rest of a confident model is not lost to rounding. The backward pass recomputes the logits. Axes have the names
of `tiling.py`.
"""

# ruff: noqa: F722 - the shapes of jaxtyping are no forward annotations

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jaxtyping import Array, Float, Int

from nnxdsl.losses.lm_head.tiling import (
    LOWEST,
    Tile,
    Tiling,
    VocabTile,
    gradients,
    num_tiles,
    scan,
    split_vocab,
    take,
    tile_logits,
    vocab_tile,
)


class SelectedLogits(NamedTuple):
    """Logits of selected tokens and the logsumexp of all others, float32.

    Attributes:
        logits: Of the selected tokens, `[n, g, l, c, k]`.
        rest_logsumexp: Logsumexp of all other logits, `[n, g, l, c]`; about `LOWEST` if there are none.
    """

    logits: Array
    rest_logsumexp: Array


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def selected_logits(
    hidden: Float[Array, "n g l c d"], head: Float[Array, "w d"], token_ids: Int[Array, "n g l c k"], tiling: Tiling
) -> SelectedLogits:
    """Logits `hidden @ head.T` of `token_ids`, and the logsumexp of all other logits.

    Args:
        hidden: Hidden states.
        head: The output head, in the dtype of `hidden`.
        token_ids: The selected tokens at each position, all different.
        tiling: The tiles.

    Returns:
        Both from products accumulated in float32. It costs one product of the head's size; a gradient costs two more,
        or three where the head is trained.
    """
    return _forward(hidden, head, token_ids, tiling)


class _Residuals(NamedTuple):
    """Residuals of the backward pass.

    Attributes:
        hidden: Hidden states, `[n, g, l, c, d]`.
        head: The head, `[w, d]`.
        token_ids: The selected tokens, `[n, g, l, c, k]`.
        rest_logsumexp: See `SelectedLogits`.
    """

    hidden: Array
    head: Array
    token_ids: Array
    rest_logsumexp: Array


class _Trained(NamedTuple):
    """`_Residuals` of a trained head: a type of its own, since residuals hold nothing static."""

    residuals: _Residuals


def _forward_rule(
    hidden: CustomVJPPrimal, head: CustomVJPPrimal, token_ids: CustomVJPPrimal, tiling: Tiling
) -> tuple[SelectedLogits, _Residuals | _Trained]:
    values = hidden.value, head.value, token_ids.value
    out = _forward(*values, tiling)
    residuals = _Residuals(*values, out.rest_logsumexp)
    return out, _Trained(residuals) if head.perturbed else residuals


def _backward_rule(
    tiling: Tiling, residuals: _Residuals | _Trained, cotangents: SelectedLogits
) -> tuple[Array, Array | None, None]:
    is_trained = isinstance(residuals, _Trained)
    values = residuals.residuals if isinstance(residuals, _Trained) else residuals
    logits_grad, rest_grad = (
        jnp.zeros(like.shape, jnp.float32) if isinstance(cotangent, SymbolicZero) else cotangent
        for cotangent, like in (
            (cotangents.logits, values.token_ids),
            (cotangents.rest_logsumexp, values.rest_logsumexp),
        )
    )
    return *_gradients(values, logits_grad, rest_grad, tiling, trained=is_trained), None


selected_logits.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def online_update(running_max: jax.Array, sum_exp: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Running maximum of logits and sum of `exp(logit - maximum)`, with one more tile."""
    new_max = jnp.maximum(running_max, jnp.max(logits, axis=-1))
    rescaled = jnp.exp(running_max - new_max) * sum_exp
    return new_max, rescaled + jnp.sum(jnp.exp(logits - new_max[..., None]), axis=-1)


def merge_logsumexp(running_max: jax.Array, sum_exp: jax.Array) -> jax.Array:
    """Logsumexp over the vocabulary, `[g, l, c]`, from the maxima and sums of its shards `[s, g, l, c]`."""
    highest = jnp.max(running_max, axis=0)
    return highest + jnp.log(jnp.sum(jnp.exp(running_max - highest) * sum_exp, axis=0))


def _forward(hidden: jax.Array, head: jax.Array, token_ids: jax.Array, tiling: Tiling) -> SelectedLogits:
    head = split_vocab(head, tiling)

    def chunk(_: None, inputs: tuple[jax.Array, jax.Array]) -> tuple[None, SelectedLogits]:
        hidden, token_ids = inputs
        zeros = jnp.zeros((head.shape[0], *hidden.shape[:-1]), jnp.float32)  # [s, g, l, c]
        lowest = jnp.full((head.shape[0], *token_ids.shape), LOWEST, jnp.float32)  # [s, g, l, c, k]

        def tile(sums: tuple[jax.Array, ...], number: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
            running_max, sum_exp, selected = sums
            vocab = vocab_tile(head, tiling, number)
            logits = tile_logits(hidden, vocab, tiling)
            index = _index_in_tile(token_ids, vocab, logits.shape[-1])
            rest = _set(logits, index, jnp.full(index.shape, LOWEST))
            return (*online_update(running_max, sum_exp, rest), jnp.maximum(selected, _get(logits, index))), None

        init = zeros + LOWEST, zeros, lowest
        (running_max, sum_exp, selected), _ = scan(tile, init, jnp.arange(num_tiles(head, tiling)))
        return None, SelectedLogits(jnp.max(selected, axis=0), merge_logsumexp(running_max, sum_exp))

    return scan(chunk, None, (hidden, token_ids))[1]


def _gradients(
    residuals: _Residuals, logits_grad: jax.Array, rest_grad: jax.Array, tiling: Tiling, *, trained: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Gradients of hidden states and, if it is trained, of the head."""
    arrays = residuals.token_ids, residuals.rest_logsumexp, logits_grad, rest_grad

    def logits_and_grads(tile: Tile) -> tuple[jax.Array, jax.Array]:
        token_ids, rest_logsumexp, selected_grad, other_grad = (take(x, tile.chunk) for x in arrays)
        logits = tile_logits(tile.hidden, tile.vocab, tiling)
        # The exponent of an unselected token is at most 0; selected tokens, which may exceed it, are set below.
        softmax = jnp.exp(jnp.minimum(logits - rest_logsumexp[..., None], 0.0))
        index = _index_in_tile(token_ids, tile.vocab, logits.shape[-1])
        return logits, _set(softmax * other_grad[..., None], index, jnp.broadcast_to(selected_grad, index.shape))

    return gradients(residuals.hidden, residuals.head, logits_and_grads, tiling, trained=trained)


def _index_in_tile(token_ids: jax.Array, vocab: VocabTile, size: int) -> jax.Array:
    """Indices of tokens `[g, l, c, k]` in a tile, `[s, g, l, c, k]`; `size`, out of range, if not in it."""
    index = token_ids - vocab.token_ids[..., :1]
    return jnp.where((index >= 0) & (index < size), index, size)


def _over_tokens(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Maps a function of one token's tile over `[s, g, l, c]`, so that tokens keep their sharding."""
    for _ in range(4):
        function = jax.vmap(function)
    return function


@_over_tokens
def _set(values: Any, index: Any, new: Any) -> jax.Array:
    return values.at[index].set(new, mode="drop")


@_over_tokens
def _get(values: Any, index: Any) -> jax.Array:
    return values.at[index].get(mode="fill", fill_value=LOWEST)
