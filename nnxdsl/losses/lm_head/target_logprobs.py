"""Statistics of targets under a softmax over the vocabulary, tile by tile; axes have the names of `tiling.py`.

The logits of a tile are reduced at once to a running maximum and sums relative to it (Milakov and Gimelshein 2018,
arXiv:1805.02867), and, where a gradient is taken and the head is frozen, to the softmax-weighted sum of the head's rows
as well: attention with the head's rows as keys and values. All sums leave the target out and add it at the end, so that
the small probability that a confident model leaves to other tokens is not lost to rounding.
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
    constrain_sums,
    gradients,
    num_tiles,
    scan,
    soft_cap_grad,
    split_vocab,
    take,
    tile_logits,
    vocab_tile,
)


class TargetStats(NamedTuple):
    """Statistics of each target, all float32 `[n, g, l, c]`.

    Attributes:
        logp: Natural log of the target's probability.
        log_z: Logsumexp of all logits.
        entropy: In nats; carries a gradient only where one is asked for.
        correct: 1 where no token is likelier than the target; carries no gradient.
    """

    logp: Array
    log_z: Array
    entropy: Array
    correct: Array


class _OnlineSoftmax(NamedTuple):
    """Running sums over the vocabulary without the target; all float32 `[s, g, l, c]`.

    Attributes:
        running_max: The largest logit, the target's among them.
        sum_exp: Sum of p = exp(logit - running_max).
        sum_shifted: Sum of p * (logit - running_max).
        target_logit: The target's logit; `LOWEST` where no tile had it yet.
        weighted_rows: Sum of p * (derivative of the soft cap) * (the head's row), `[s, g, l, c, d]`; empty (`d` = 0)
            where no gradient is taken.
    """

    running_max: Array
    sum_exp: Array
    sum_shifted: Array
    target_logit: Array
    weighted_rows: Array


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def target_stats(
    hidden: Float[Array, "n g l c d"],
    head: Float[Array, "w d"],
    targets: Int[Array, "n g l c"],
    tiling: Tiling,
    has_entropy_gradient: bool = False,
) -> TargetStats:
    """Statistics of `targets` under softmax(hidden @ head.T).

    Args:
        hidden: Hidden states.
        head: The output head, in the dtype of `hidden`.
        targets: Token ids.
        tiling: The tiles.
        has_entropy_gradient: Whether a loss reads entropies.

    Returns:
        Statistics in float32, from products accumulated in float32. If two tokens are equally the most likely, both
        count as correct. With a frozen head, the forward pass of a derivative takes two products of the head's size and
        the backward pass none, or one and one where entropies have a gradient; with a trained one it is one and two.
        Where logits are recomputed, the backward pass takes one more. Without a derivative it is one.
    """
    sums, _ = _forward(hidden, head, targets, tiling, uses_rows=False, keep=False)
    return _target_stats(_merge(sums))


class _Frozen(NamedTuple):
    """Residuals where the head has no gradient.

    Attributes:
        head: The head, `[w, d]`.
        targets: The targets, `[n, g, l, c]`.
        target_logit: Their logits, `[n, g, l, c]`.
        rest_prob: The probability of all other tokens, `[n, g, l, c]`.
        scale: The factor of `weighted_rows`, `[n, s, g, l, c]`.
        weighted_rows: See `_OnlineSoftmax`, `[n, s, g, l, c, d]`.
    """

    head: Array
    targets: Array
    target_logit: Array
    rest_prob: Array
    scale: Array
    weighted_rows: Array


class _Trained(NamedTuple):
    """Residuals where gradients of logits are computed again, tile by tile: for a trained head, and for entropies.

    Attributes:
        hidden: Hidden states, `[n, g, l, c, d]`.
        head: The head, `[w, d]`.
        targets: The targets, `[n, g, l, c]`.
        max_logit: See `_SoftmaxStats`.
        sum_exp: See `_SoftmaxStats`.
        logits: Of all tiles, `[n, tiles, s, g, l, c, v]`; None where they are recomputed.
        entropy: See `TargetStats`; None where it has no gradient.
    """

    hidden: Array
    head: Array
    targets: Array
    max_logit: Array
    sum_exp: Array
    logits: Array | None
    entropy: Array | None


class _FrozenWithEntropy(NamedTuple):
    """Residuals where entropies have a gradient and the head has none.

    Attributes:
        residuals: Those of a trained head.
    """

    residuals: _Trained


def _forward_rule(
    hidden: CustomVJPPrimal,
    head: CustomVJPPrimal,
    targets: CustomVJPPrimal,
    tiling: Tiling,
    has_entropy_gradient: bool,
) -> tuple[TargetStats, _Frozen | _Trained | _FrozenWithEntropy]:
    values = hidden.value, head.value, targets.value
    if head.perturbed or has_entropy_gradient:
        sums, logits = _forward(*values, tiling, uses_rows=False, keep=tiling.keep)
        stats = _merge(sums)
        out = _target_stats(stats)
        entropy = out.entropy if has_entropy_gradient else None
        residuals = _Trained(*values, stats.max_logit, stats.sum_exp, logits, entropy)
        return out, residuals if head.perturbed else _FrozenWithEntropy(residuals)
    sums, _ = _forward(*values, tiling, uses_rows=True, keep=False)
    stats = _merge(sums)
    # Sums are relative to the maximum of their own shard of the vocabulary.
    scale = jnp.exp(sums.running_max - stats.max_logit[:, None]) / stats.sum_exp[:, None]
    return _target_stats(stats), _Frozen(*values[1:], stats.target_logit, stats.rest_prob, scale, sums.weighted_rows)


def _backward_rule(
    tiling: Tiling,
    has_entropy_gradient: bool,
    residuals: _Frozen | _Trained | _FrozenWithEntropy,
    cotangents: TargetStats,
) -> tuple[Array | None, Array | None, None]:
    is_trained = isinstance(residuals, _Trained)
    if isinstance(residuals, _FrozenWithEntropy):
        residuals = residuals.residuals
    logp_grad, log_z_grad, entropy_grad = (
        jnp.zeros(residuals.targets.shape, jnp.float32) if isinstance(cotangent, SymbolicZero) else cotangent
        for cotangent in (cotangents.logp, cotangents.log_z, cotangents.entropy)
    )
    if isinstance(residuals, _Trained):
        return *_gradients(residuals, logp_grad, log_z_grad, entropy_grad, tiling, trained=is_trained), None
    target_grad = logp_grad * residuals.rest_prob + log_z_grad * (1 - residuals.rest_prob)
    if tiling.soft_cap is not None:
        target_grad = target_grad * soft_cap_grad(residuals.target_logit, tiling.soft_cap)
    others = ((log_z_grad - logp_grad)[:, None] * residuals.scale)[..., None] * residuals.weighted_rows
    target_rows = _rows_of(residuals.targets, split_vocab(residuals.head, tiling))  # [n, s, g, l, c, d]
    hidden_grad = jnp.sum(target_grad[:, None, ..., None] * target_rows + others, axis=1)
    return hidden_grad.astype(residuals.head.dtype), None, None


target_stats.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _forward(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, tiling: Tiling, *, uses_rows: bool, keep: bool
) -> tuple[_OnlineSoftmax, jax.Array | None]:
    """The sums of each chunk, `[n, s, g, l, c]`, and the logits of all tiles, `[n, tiles, s, g, l, c, v]`, if saved."""
    head = split_vocab(head, tiling)

    def chunk(_: None, inputs: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[_OnlineSoftmax, jax.Array | None]]:
        hidden, targets = inputs
        zeros = jnp.zeros((head.shape[0], *targets.shape), jnp.float32)
        width = hidden.shape[-1] if uses_rows else 0
        lowest = zeros + LOWEST
        sums = _OnlineSoftmax(lowest, zeros, zeros, lowest, jnp.zeros((*zeros.shape, width), jnp.float32))

        def tile(sums: _OnlineSoftmax, number: jax.Array) -> tuple[_OnlineSoftmax, jax.Array | None]:
            vocab = vocab_tile(head, tiling, number)
            logits = tile_logits(hidden, vocab, tiling)
            return _add_tile(sums, logits, vocab, targets, tiling, uses_rows=uses_rows), logits if keep else None

        return None, scan(tile, sums, jnp.arange(num_tiles(head, tiling)))

    return scan(chunk, None, (hidden, targets))[1]


def _add_tile(
    sums: _OnlineSoftmax, logits: jax.Array, vocab: VocabTile, targets: jax.Array, tiling: Tiling, *, uses_rows: bool
) -> _OnlineSoftmax:
    """The sums with one more tile `[s, g, l, c, v]`."""
    running_max = jnp.maximum(sums.running_max, jnp.max(logits, axis=-1))
    shifted = logits - running_max[..., None]
    p = jnp.where(vocab.is_target(targets), 0.0, jnp.exp(shifted))
    change = sums.running_max - running_max
    rescale = jnp.exp(change)
    weighted_rows = sums.weighted_rows
    if uses_rows:
        grad = p if tiling.soft_cap is None else p * soft_cap_grad(logits, tiling.soft_cap)
        grad = grad.astype(vocab.weight.dtype)
        rows = jnp.einsum("sglcv,svd->sglcd", grad, vocab.weight, preferred_element_type=jnp.float32)
        weighted_rows = rescale[..., None] * weighted_rows + constrain_sums(rows, tiling)
    return _OnlineSoftmax(
        running_max,
        rescale * sums.sum_exp + jnp.sum(p, axis=-1),
        rescale * (sums.sum_shifted + change * sums.sum_exp) + jnp.sum(p * shifted, axis=-1),
        jnp.maximum(sums.target_logit, vocab.target_logits(logits, targets)),
        weighted_rows,
    )


class _SoftmaxStats(NamedTuple):
    """The softmax over the whole vocabulary; all float32 `[n, g, l, c]`.

    Attributes:
        max_logit: The largest logit.
        sum_exp: Sum of exp(logit - max_logit), the target among them.
        rest_prob: The probability of all tokens but the target.
        mean_shifted: Mean of logit - max_logit.
        target_logit: The target's logit.
    """

    max_logit: Array
    sum_exp: Array
    rest_prob: Array
    mean_shifted: Array
    target_logit: Array


def _merge(sums: _OnlineSoftmax) -> _SoftmaxStats:
    """The sums of all shards of the vocabulary `[n, s, g, l, c]` as one, with the targets."""
    max_logit, target_logit = jnp.max(sums.running_max, axis=1), jnp.max(sums.target_logit, axis=1)
    change = sums.running_max - max_logit[:, None]
    rescale = jnp.exp(change)
    target, rest = jnp.exp(target_logit - max_logit), jnp.sum(rescale * sums.sum_exp, axis=1)
    total = target + rest
    shifted = jnp.sum(rescale * (sums.sum_shifted + change * sums.sum_exp), axis=1)
    shifted = shifted + target * (target_logit - max_logit)
    return _SoftmaxStats(max_logit, total, rest / total, shifted / total, target_logit)


def _target_stats(stats: _SoftmaxStats) -> TargetStats:
    log_sum_exp = jnp.log(stats.sum_exp)
    logp = stats.target_logit - stats.max_logit - log_sum_exp
    correct = (stats.target_logit >= stats.max_logit).astype(jnp.float32)
    return TargetStats(logp, stats.max_logit + log_sum_exp, log_sum_exp - stats.mean_shifted, correct)


def _gradients(
    residuals: _Trained,
    logp_grad: jax.Array,
    log_z_grad: jax.Array,
    entropy_grad: jax.Array,
    tiling: Tiling,
    *,
    trained: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Gradients of hidden states and head; None for one that is not trained."""
    arrays = residuals.max_logit, residuals.sum_exp, logp_grad, log_z_grad

    def logits_and_grads(tile: Tile) -> tuple[jax.Array, jax.Array]:
        targets = take(residuals.targets, tile.chunk)
        max_logit, sum_exp, for_logp, for_log_z = (take(x, tile.chunk)[..., None] for x in arrays)
        if residuals.logits is None:
            logits = tile_logits(tile.hidden, tile.vocab, tiling)
        else:
            logits = take(take(residuals.logits, tile.chunk), tile.number)
        for_softmax = for_log_z - for_logp
        if residuals.entropy is not None:  # of a logit it is -p (log p + entropy)
            for_entropy, entropy = (take(x, tile.chunk)[..., None] for x in (entropy_grad, residuals.entropy))
            for_softmax = for_softmax - for_entropy * (logits - max_logit - jnp.log(sum_exp) + entropy)
        softmax_grad = jnp.exp(logits - max_logit) * (for_softmax / sum_exp)
        return logits, softmax_grad + jnp.where(tile.vocab.is_target(targets), for_logp, 0.0)

    return gradients(residuals.hidden, residuals.head, logits_and_grads, tiling, trained=trained)


def _rows_of(targets: jax.Array, head: jax.Array) -> jax.Array:
    """The head's rows of targets `[n, g, l, c]` as `[n, s, g, l, c, d]`; zero in shards without the target."""
    size = head.shape[1]

    def shard(rows: jax.Array, number: jax.Array) -> jax.Array:
        index = targets - number * size
        is_inside = (index >= 0) & (index < size)
        return jnp.where(is_inside[..., None], rows[jnp.clip(index, 0, size - 1)], 0)

    return jnp.moveaxis(jax.vmap(shard)(head, jnp.arange(len(head))), 0, 1)
