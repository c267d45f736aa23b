"""Statistics of targets under a softmax over the vocabulary, tile by tile; axes are those of `tiling.py`.

The logits of a tile are reduced at once to a running maximum and sums relative to it (Milakov and Gimelshein 2018,
arXiv:1805.02867), and, where a gradient is taken and the head is frozen, to the sum of the head's rows as
well: attention with the head's rows as keys and values. All sums leave the target out and get it at the end, so that
what a sure model leaves to the other words is not lost to rounding.
"""

# ruff: noqa: F722 - the shapes of jaxtyping are no forward annotations

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jaxtyping import Array, Float, Int

from nnxdsl.losses.lm_head.tiling import (
    LOWEST,
    Tile,
    Tiling,
    VocabTile,
    at,
    cut,
    gradients,
    logits_of,
    loop,
    slope_of,
    sums_laid_out,
    tile_of,
    tiles_of,
)


class TargetStats(NamedTuple):
    """Of each token, all float32 `[n, g, l, c]`.

    Attributes:
        logp: Natural log of the target's probability.
        log_z: Natural log of the sum of the exponentials of all logits.
        entropy: In nats; carries no gradient.
        correct: 1 where no word is likelier than the target; carries no gradient.
    """

    logp: Array
    log_z: Array
    entropy: Array
    correct: Array


class _OnlineSoftmax(NamedTuple):
    """Over the words that a loop has seen, the target left out; all float32 `[s, g, l, c]`.

    Attributes:
        top: The largest logit, the target's among them.
        mass: Sum of p = exp(logit - top).
        fall: Sum of p * (logit - top).
        target: The target's logit; `LOWEST` where it is not among these words.
        mean: Sum of p * (its logit's derivative by the word's product) * (the word's row), `[s, g, l, c, d]`; empty
            (`d` = 0) where no gradient is taken.
    """

    top: Array
    mass: Array
    fall: Array
    target: Array
    mean: Array


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def target_stats(
    hidden: Float[Array, "n g l c d"], head: Float[Array, "w d"], targets: Int[Array, "n g l c"], how: Tiling
) -> TargetStats:
    """Statistics of `targets` under softmax(hidden @ head.T).

    Args:
        hidden: Hidden states.
        head: The output head, in the dtype of `hidden`.
        targets: Words.
        how: The tiles.

    Returns:
        Statistics in float32, from products accumulated in float32. If two tokens are equally the most likely, both
        count as correct. With a frozen head, the forward pass of a derivative takes two products of the head's size and
        the backward pass none; with a trained one it is one and two, or three where its logits are computed again.
        Without a derivative it is one.
    """
    found, _ = _forward(hidden, head, targets, how, mean=False, keep=False)
    return _target_stats(_combined(found))


class _Frozen(NamedTuple):
    """What the gradient of hidden states needs where the head has none.

    Attributes:
        head: The head.
        targets: The targets, `[n, g, l, c]`.
        target: Their logits, likewise.
        others: The probability of all other words, likewise.
        scale: What `mean` is to be multiplied by, `[n, s, g, l, c]`.
        mean: See `_OnlineSoftmax`, `[n, s, g, l, c, d]`.
    """

    head: Array
    targets: Array
    target: Array
    others: Array
    scale: Array
    mean: Array


class _Trained(NamedTuple):
    """What the gradients of hidden states and head need.

    Attributes:
        hidden: Hidden states, `[n, g, l, c, d]`.
        head: The head.
        targets: The targets, `[n, g, l, c]`.
        top: See `_SoftmaxStats`.
        total: Likewise.
        logits: Of all tiles, `[n, tiles, s, g, l, c, v]`; None where they are computed again.
    """

    hidden: Array
    head: Array
    targets: Array
    top: Array
    total: Array
    logits: Array | None


def _forward_rule(
    hidden: CustomVJPPrimal, head: CustomVJPPrimal, targets: CustomVJPPrimal, how: Tiling
) -> tuple[TargetStats, _Frozen | _Trained]:
    values = hidden.value, head.value, targets.value
    if head.perturbed:
        found, logits = _forward(*values, how, mean=False, keep=how.keep)
        whole = _combined(found)
        return _target_stats(whole), _Trained(*values, whole.top, whole.total, logits)
    found, _ = _forward(*values, how, mean=True, keep=False)
    whole = _combined(found)
    # Sums are relative to the top of their own piece of the vocabulary.
    scale = jnp.exp(found.top - whole.top[:, None]) / whole.total[:, None]
    return _target_stats(whole), _Frozen(*values[1:], whole.target, whole.others, scale, found.mean)


def _backward_rule(
    how: Tiling, residuals: _Frozen | _Trained, toward: TargetStats
) -> tuple[Array | None, Array | None, None]:
    for_logp, for_log_z = (
        jnp.zeros(residuals.targets.shape, jnp.float32) if isinstance(one, SymbolicZero) else one
        for one in (toward.logp, toward.log_z)
    )
    if isinstance(residuals, _Trained):
        return *_both(residuals, for_logp, for_log_z, how), None
    own = for_logp * residuals.others + for_log_z * (1 - residuals.others)
    if how.soft_cap is not None:
        own = own * slope_of(residuals.target, how.soft_cap)
    mean = ((for_log_z - for_logp)[:, None] * residuals.scale)[..., None] * residuals.mean
    parts = own[:, None, ..., None] * _rows(cut(residuals.head, how), residuals.targets) + mean  # [n, s, g, l, c, d]
    return jnp.sum(parts, axis=1).astype(residuals.head.dtype), None, None


target_stats.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _forward(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, how: Tiling, *, mean: bool, keep: bool
) -> tuple[_OnlineSoftmax, jax.Array | None]:
    """The sums of each chunk, `[n, s, g, l, c]`, and the logits of all tiles, `[n, tiles, s, g, l, c, v]`, if saved."""
    head = cut(head, how)

    def chunk(_: None, given: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[_OnlineSoftmax, jax.Array | None]]:
        hidden, targets = given
        nothing = jnp.zeros((head.shape[0], *targets.shape), jnp.float32)
        width = hidden.shape[-1] if mean else 0
        lowest = nothing + LOWEST
        sums = _OnlineSoftmax(lowest, nothing, nothing, lowest, jnp.zeros((*nothing.shape, width), jnp.float32))

        def tile(sums: _OnlineSoftmax, number: jax.Array) -> tuple[_OnlineSoftmax, jax.Array | None]:
            words = tile_of(head, how, number)
            logits = logits_of(hidden, words, how)
            return _more(sums, logits, words, targets, how, mean=mean), logits if keep else None

        return None, loop(tile, sums, jnp.arange(tiles_of(head, how)))

    return loop(chunk, None, (hidden, targets))[1]


def _more(
    sums: _OnlineSoftmax, logits: jax.Array, words: VocabTile, targets: jax.Array, how: Tiling, *, mean: bool
) -> _OnlineSoftmax:
    """The sums with one more tile `[s, g, l, c, v]`."""
    top = jnp.maximum(sums.top, jnp.max(logits, axis=-1))
    fall = logits - top[..., None]
    p = jnp.where(words.are(targets), 0.0, jnp.exp(fall))
    down = sums.top - top  # how far the sums until now fall
    before = jnp.exp(down)
    total = sums.mean
    if mean:
        slope = p if how.soft_cap is None else p * slope_of(logits, how.soft_cap)
        weight = slope.astype(words.rows.dtype)
        more = jnp.einsum("sglcv,svd->sglcd", weight, words.rows, preferred_element_type=jnp.float32)
        total = before[..., None] * total + sums_laid_out(more, how)
    return _OnlineSoftmax(
        top,
        before * sums.mass + jnp.sum(p, axis=-1),
        before * (sums.fall + down * sums.mass) + jnp.sum(p * fall, axis=-1),
        jnp.maximum(sums.target, words.at(logits, targets)),
        total,
    )


class _SoftmaxStats(NamedTuple):
    """Of all pieces of the vocabulary together; all float32 `[n, g, l, c]`.

    Attributes:
        top: The largest logit.
        total: Sum of exp(logit - top), the target among them.
        others: The probability of all words but the target.
        fall: Mean of logit - top.
        target: The target's logit.
    """

    top: Array
    total: Array
    others: Array
    fall: Array
    target: Array


def _combined(found: _OnlineSoftmax) -> _SoftmaxStats:
    """The sums of all pieces of the vocabulary `[n, s, g, l, c]`, with the targets."""
    top, target = jnp.max(found.top, axis=1), jnp.max(found.target, axis=1)
    down = found.top - top[:, None]
    share = jnp.exp(down)
    own, rest = jnp.exp(target - top), jnp.sum(share * found.mass, axis=1)
    total = own + rest
    fall = jnp.sum(share * (found.fall + down * found.mass), axis=1) + own * (target - top)
    return _SoftmaxStats(top, total, rest / total, fall / total, target)


def _target_stats(whole: _SoftmaxStats) -> TargetStats:
    log_total = jnp.log(whole.total)
    logp = whole.target - whole.top - log_total
    correct = (whole.target >= whole.top).astype(jnp.float32)
    return TargetStats(logp, whole.top + log_total, log_total - whole.fall, correct)


def _both(
    residuals: _Trained, for_logp: jax.Array, for_log_z: jax.Array, how: Tiling
) -> tuple[jax.Array, jax.Array | None]:
    """Gradients of hidden states and head."""

    def toward(tile: Tile) -> tuple[jax.Array, jax.Array]:
        index, words = tile.chunk, tile.words
        targets = at(residuals.targets, index)
        top, total, a, b = (at(x, index)[..., None] for x in (residuals.top, residuals.total, for_logp, for_log_z))
        logits = (
            logits_of(tile.hidden, words, how)
            if residuals.logits is None
            else at(at(residuals.logits, index), tile.number)
        )
        return logits, jnp.exp(logits - top) * ((b - a) / total) + jnp.where(words.are(targets), a, 0.0)

    return gradients(residuals.hidden, residuals.head, toward, how)


def _rows(head: jax.Array, targets: jax.Array) -> jax.Array:
    """The head's rows of targets `[n, g, l, c]` as `[n, s, g, l, c, d]`; zero in pieces that have them not."""
    size = head.shape[1]

    def piece(rows: jax.Array, number: jax.Array) -> jax.Array:
        index = targets - number * size
        there = (index >= 0) & (index < size)
        return jnp.where(there[..., None], rows[jnp.clip(index, 0, size - 1)], 0)

    return jnp.moveaxis(jax.vmap(piece)(head, jnp.arange(len(head))), 0, 1)
