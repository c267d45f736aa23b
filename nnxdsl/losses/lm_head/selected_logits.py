"""Logits of selected vocabulary entries for each token, and the logsumexp of all others, tile by tile.

The selected entries are left out of that sum where it is accumulated, rather than subtracted from the full sum: the
small rest of a confident model is not lost to rounding. The backward pass recomputes the logits. Axes are those of
`tiling.py`, and `k` for a token's selected entries.
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

from nnxdsl.losses.lm_head import tiling
from nnxdsl.losses.lm_head.tiling import LOWEST, Tiling


class SelectedLogits(NamedTuple):
    """Of each token, float32.

    Attributes:
        logits: Of its words, `[n, g, l, c, k]`.
        rest: Log of the sum of the exponentials of all other logits, `[n, g, l, c]`; about `LOWEST` if there are none.
    """

    logits: Array
    rest: Array


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def selected_logits(
    hidden: Float[Array, "n g l c d"], head: Float[Array, "w d"], words: Int[Array, "n g l c k"], how: Tiling
) -> SelectedLogits:
    """The logits `hidden @ head.T` of some words of each token, and of all others together.

    Args:
        hidden: Hidden states.
        head: The output head, in the dtype of `hidden`.
        words: Of each token, no one twice.
        how: The tiles.

    Returns:
        Both from products accumulated in float32. One product of the head's size; two more, or three where the head is
        trained, for a gradient.
    """
    return _forward(hidden, head, words, how)


class _Residuals(NamedTuple):
    """What gradients need.

    Attributes:
        hidden: The states, `[n, g, l, c, d]`.
        head: The head, `[w, d]`.
        words: The words, `[n, g, l, c, k]`.
        rest: See `SelectedLogits`.
    """

    hidden: Array
    head: Array
    words: Array
    rest: Array


class _Trained(NamedTuple):
    """As `_Residuals`, where the head is trained too: a type of its own, since residuals hold nothing static."""

    residuals: _Residuals


def _forward_rule(
    hidden: CustomVJPPrimal, head: CustomVJPPrimal, words: CustomVJPPrimal, how: Tiling
) -> tuple[SelectedLogits, _Residuals | _Trained]:
    values = hidden.value, head.value, words.value
    found = _forward(*values, how)
    residuals = _Residuals(*values, found.rest)
    return found, _Trained(residuals) if head.perturbed else residuals


def _backward_rule(
    how: Tiling, residuals: _Residuals | _Trained, toward: SelectedLogits
) -> tuple[Array, Array | None, None]:
    is_trained = isinstance(residuals, _Trained)
    values = residuals.residuals if isinstance(residuals, _Trained) else residuals
    for_logits, for_rest = (
        jnp.zeros(like.shape, jnp.float32) if isinstance(one, SymbolicZero) else one
        for one, like in ((toward.logits, values.words), (toward.rest, values.rest))
    )
    return *_gradients(values, for_logits, for_rest, how, trained=is_trained), None


selected_logits.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def online_update(top: jax.Array, mass: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest logit until now, and the sum of exponentials relative to it, with one more tile."""
    now = jnp.maximum(top, jnp.max(logits, axis=-1))
    return now, jnp.exp(top - now) * mass + jnp.sum(jnp.exp(logits - now[..., None]), axis=-1)


def merge_logsumexp(top: jax.Array, mass: jax.Array) -> jax.Array:
    """The log of a sum of exponentials, `[g, l, c]`, from the sums of all pieces of the vocabulary."""
    highest = jnp.max(top, axis=0)
    return highest + jnp.log(jnp.sum(jnp.exp(top - highest) * mass, axis=0))


def _forward(hidden: jax.Array, head: jax.Array, words: jax.Array, how: Tiling) -> SelectedLogits:
    head = tiling.cut(head, how)

    def chunk(_: None, given: tuple[jax.Array, jax.Array]) -> tuple[None, SelectedLogits]:
        hidden, words = given
        nothing = jnp.zeros((head.shape[0], *hidden.shape[:-1]), jnp.float32)  # [s, g, l, c]
        lowest = jnp.full((head.shape[0], *words.shape), LOWEST, jnp.float32)  # [s, g, l, c, k]

        def tile(sums: tuple[jax.Array, ...], number: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
            top, mass, found = sums
            rows = tiling.tile_of(head, how, number)
            logits = tiling.logits_of(hidden, rows, how)
            places = _places(words, rows, logits.shape[-1])
            others = _put(logits, places, jnp.full(places.shape, LOWEST))
            return (*online_update(top, mass, others), jnp.maximum(found, _taken(logits, places))), None

        (top, mass, found), _ = tiling.loop(
            tile, (nothing + LOWEST, nothing, lowest), jnp.arange(tiling.tiles_of(head, how))
        )
        return None, SelectedLogits(jnp.max(found, axis=0), merge_logsumexp(top, mass))

    return tiling.loop(chunk, None, (hidden, words))[1]


def _gradients(
    residuals: _Residuals, for_logits: jax.Array, for_rest: jax.Array, how: Tiling, *, trained: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Gradients of the states and, if it is trained, of the head."""

    def toward(tile: tiling.Tile) -> tuple[jax.Array, jax.Array]:
        picks, a, rest, b = (tiling.at(x, tile.chunk) for x in (residuals.words, for_logits, residuals.rest, for_rest))
        logits = tiling.logits_of(tile.hidden, tile.words, how)
        # No other word weighs more than all of them; and those that are picked, which might, get their own below.
        slope = jnp.exp(jnp.minimum(logits - rest[..., None], 0.0)) * b[..., None]  # [s, g, l, c, v]
        places = _places(picks, tile.words, logits.shape[-1])
        return logits, _put(slope, places, jnp.broadcast_to(a, places.shape))

    return tiling.gradients(residuals.hidden, residuals.head, toward, how, trained=trained)


def _places(words: jax.Array, rows: tiling.VocabTile, size: int) -> jax.Array:
    """Indices of tokens `[g, l, c, k]` in a tile, `[s, g, l, c, k]`; `size`, out of range, if not in it."""
    index = words - rows.numbers[..., :1]
    return jnp.where((index >= 0) & (index < size), index, size)


def _over_tokens(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A function of one token's tile as one of all tokens `[s, g, l, c]`: devices keep the tokens that they have."""
    for _ in range(4):
        function = jax.vmap(function)
    return function


@_over_tokens
def _put(values: Any, places: Any, new: Any) -> jax.Array:
    return values.at[places].set(new, mode="drop")


@_over_tokens
def _taken(values: Any, places: Any) -> jax.Array:
    return values.at[places].get(mode="fill", fill_value=LOWEST)
