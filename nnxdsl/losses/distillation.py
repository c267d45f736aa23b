"""How far a student's distributions are from a teacher's, tile by tile: the logits of neither exist as a whole.

Both heads are worked through in the tiles of `lm_head/tiling.py`, the same slice of the vocabulary of both at a time. A
first loop finds what both softmaxes divide by, a second sums the distance, and the backward pass computes both logits
once more. Where one chunk and one tile are all, the loops are one computation and XLA shares the logits.

Arrays have the axes of `lm_head/tiling.py`: `n` chunks of `c` tokens, `g` groups of rows, `l` pieces of rows, `s`
pieces of the vocabulary, `v` token ids of a tile, `d` the width.
"""

# ruff: noqa: F722 - the shapes of jaxtyping are no forward annotations

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jaxtyping import Array, Bool, Float

from nnxdsl.config.objectives.distillation import JSD, Distance, Distill, ForwardKL, ReverseKL
from nnxdsl.errors import NotRegisteredError
from nnxdsl.losses.base import Loss, LossTerms, WeightedMean, build
from nnxdsl.losses.lm_head import tiling
from nnxdsl.losses.lm_head.selected_logits import merge_logsumexp, online_update
from nnxdsl.losses.lm_head.tiling import LOWEST, Tiling
from nnxdsl.losses.lm_head.token_stats import Chunks, ShardContext, TokenStats


class TeacherOutputs(NamedTuple):
    """The outputs of a teacher for a micro-batch.

    Attributes:
        hidden: Its final hidden states at the positions that predict the targets, `[B, N, E]`.
        head: Its output embedding, `[V, E]`.
        soft_cap: Of its logits: `z` is `c tanh(z / c)`; None for none.
    """

    hidden: Array
    head: Array
    soft_cap: float | None = None


class DistillationInputs(NamedTuple):
    """What a loss reads of a student.

    Attributes:
        stats: Of its target tokens, `[B, N]`.
        distance: From the teacher at each of them, in nats, `[B, N]`; zero where the mask is off.
        features: How far the directions of hidden states are apart, in the same way; None where nothing reads it.
    """

    stats: TokenStats
    distance: Array
    features: Array | None = None


@build.register
def _(objective: Distill) -> Loss:
    hard, square = objective.hard_weight, objective.temperature**2

    def loss(policy: DistillationInputs, reference: None, weight: jax.Array) -> LossTerms:
        counted = policy.stats.mask * weight[:, None]  # [B, N]
        count, distance = jnp.sum(counted), jnp.sum(policy.distance * counted)
        nll = -jnp.sum(policy.stats.logp * counted)
        total = (1 - hard) * square * distance
        if hard:
            total = total + hard * nll
        metrics = {"distance": WeightedMean(distance, count), "nll_loss": WeightedMean(nll, count)}
        if policy.features is not None:
            features = jnp.sum(policy.features * counted)
            total = total + objective.feature_weight * features
            metrics["feature_distance"] = WeightedMean(features, count)
        return LossTerms(WeightedMean(total, count), metrics)

    return loss


def feature_distance(
    hidden: Float[Array, "B N D"], teacher_hidden: Float[Array, "B N D"], mask: Bool[Array, "B N"]
) -> Float[Array, "B N"]:
    """`1 - cos` of two models' hidden states, float32; zero where the mask is off, whatever they are there.

    Args:
        hidden: The student's.
        teacher_hidden: The teacher's.
        mask: Which targets count.
    """
    both = (jnp.where(mask[..., None], x, 1).astype(jnp.float32) for x in (hidden, teacher_hidden))
    ours, theirs = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in both)
    return jnp.where(mask, jnp.sum(jnp.square(ours - theirs), axis=-1) / 2, 0.0)  # exact where they are nearly alike


@attrs.frozen
class HeadTilings:
    """How two heads are compared.

    Attributes:
        student: How the student's head is worked through.
        teacher: How the teacher's is.
        distance: What is summed.
    """

    student: Tiling
    teacher: Tiling
    distance: Distance


def distance(
    hidden: Float[Array, "B N D"],
    head: Float[Array, "V D"],
    teacher: TeacherOutputs,
    mask: Bool[Array, "B N"],
    objective: Distill,
    soft_cap: float | None = None,
    limit: int | None = None,
    where: ShardContext | None = None,
) -> Float[Array, "B N"]:
    """Distance of softmax(hidden @ head.T / T) from the teacher's softmax over the same words, in nats.

    Args:
        hidden: The student's final hidden states, at the positions that predict the targets.
        head: Its output embedding.
        teacher: The teacher's, which gets no gradient.
        mask: Which targets count. Masked positions may hold anything.
        objective: Distance and temperature.
        soft_cap: Of the student's logits, before the temperature; None for none.
        limit: The most tokens whose logits exist at one time, over all devices; None for as many as are quick.
        where: On what; None for one CPU.

    Returns:
        Float32, zero where the mask is off, from products accumulated in float32.
    """
    where = where or ShardContext()
    # Tiles are sized for both heads: as if for one whose rows are as long as the longer ones.
    chunks = Chunks.of(mask, (len(head), max(head.shape[1], teacher.head.shape[1])), limit, where)
    # Of capped logits too: c tanh(z / c) / t is (c / t) tanh((z / t) / (c / t)).
    caps = [None if cap is None else cap / objective.temperature for cap in (soft_cap, teacher.soft_cap)]
    how = HeadTilings(chunks.tiling(caps[0], where), chunks.tiling(caps[1], where), objective.distance)
    states = []
    for x in (hidden, teacher.hidden):
        states.append(chunks.split(x / objective.temperature))
        if where.constrain is not None:
            states[-1] = where.constrain(states[-1], (None, "head_batch", "length", None, "activation_embed"))
    found: Any = _divergence(
        states[0], head.astype(hidden.dtype), states[1], teacher.head.astype(teacher.hidden.dtype), how
    )
    return chunks.join(found)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _divergence(
    hidden: Float[Array, "n g l c d"],
    head: Float[Array, "w d"],
    teacher_hidden: Float[Array, "n g l c e"],
    other: Float[Array, "w e"],
    how: HeadTilings,
) -> Float[Array, "n g l c"]:
    return _forward(hidden, head, teacher_hidden, other, how)[0]


class _Residuals(NamedTuple):
    """What gradients need.

    Attributes:
        hidden: The student's states, `[n, g, l, c, d]`.
        head: Its head, `[w, d]`.
        teacher_hidden: The teacher's states, `[n, g, l, c, e]`.
        other: Its head, `[w, e]`.
        log_z: What both softmaxes divide by, as natural logs, `[n, g, l, c]` each.
        center: See `_center`, `[n, g, l, c]`.
    """

    hidden: Array
    head: Array
    teacher_hidden: Array
    other: Array
    log_z: tuple[Array, Array]
    center: Array


class _Trained(NamedTuple):
    """As `_Residuals`, where the head is trained too: a type of its own, since residuals hold nothing static."""

    residuals: _Residuals


def _forward_rule(
    hidden: CustomVJPPrimal,
    head: CustomVJPPrimal,
    teacher_hidden: CustomVJPPrimal,
    other: CustomVJPPrimal,
    how: HeadTilings,
) -> tuple[Array, _Residuals | _Trained]:
    values = hidden.value, head.value, teacher_hidden.value, other.value
    found, center, log_z = _forward(*values, how)
    residuals = _Residuals(*values, log_z, center)
    return found, _Trained(residuals) if head.perturbed else residuals


def _backward_rule(how: HeadTilings, residuals: _Residuals | _Trained, toward: Array) -> tuple[Array | None, ...]:
    is_trained = isinstance(residuals, _Trained)
    values = residuals.residuals if isinstance(residuals, _Trained) else residuals
    if isinstance(toward, SymbolicZero):
        toward = jnp.zeros(values.center.shape, jnp.float32)
    return *_gradients(values, toward, how, trained=is_trained), None, None


_divergence.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _forward(
    hidden: jax.Array, head: jax.Array, teacher_hidden: jax.Array, other: jax.Array, how: HeadTilings
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
    """The distances, their centers, and what both softmaxes divide by; all `[n, g, l, c]`."""
    heads = tiling.cut(head, how.student), tiling.cut(other, how.teacher)
    numbers = jnp.arange(tiling.tiles_of(heads[0], how.student))

    def chunk(_: None, given: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, ...]]:
        nothing = jnp.zeros((heads[0].shape[0], *given[0].shape[:-1]), jnp.float32)  # [s, g, l, c]

        def divide(sums: tuple[jax.Array, ...], number: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
            both = _logits(given, heads, how, number)
            return (*online_update(sums[0], sums[1], both[0]), *online_update(sums[2], sums[3], both[1])), None

        lowest = nothing + LOWEST
        sums, _ = tiling.loop(divide, (lowest, nothing, lowest, nothing), numbers)
        log_z = merge_logsumexp(sums[0], sums[1]), merge_logsumexp(sums[2], sums[3])

        def add(sums: tuple[jax.Array, jax.Array], number: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            s, t = _logits(given, heads, how, number)
            q, p = s - log_z[0][..., None], t - log_z[1][..., None]
            return (
                sums[0] + jnp.sum(summand(how.distance, p, q), axis=-1),
                sums[1] + jnp.sum(_center(how.distance, p, q), axis=-1),
            ), None

        (value, center), _ = tiling.loop(add, (nothing, nothing), numbers)
        return None, (jnp.sum(value, axis=0), jnp.sum(center, axis=0), *log_z)

    value, center, *log_z = tiling.loop(chunk, None, (hidden, teacher_hidden))[1]
    return value, center, (log_z[0], log_z[1])


def _gradients(
    residuals: _Residuals, toward: jax.Array, how: HeadTilings, *, trained: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Gradients of the student's states and, if it is trained, of its head."""
    heads = tiling.cut(residuals.head, how.student), tiling.cut(residuals.other, how.teacher)

    def slopes(tile: tiling.Tile) -> tuple[jax.Array, jax.Array]:
        zs, zt, center, by = (
            tiling.at(x, tile.chunk)[..., None] for x in (*residuals.log_z, residuals.center, toward)
        )  # [g, l, c, 1]
        s, t = _logits((tile.hidden, tiling.at(residuals.teacher_hidden, tile.chunk)), heads, how, tile.number)
        return s, _slope(how.distance, t - zt, s - zs, center) * by

    return tiling.gradients(residuals.hidden, residuals.head, slopes, how.student, trained=trained)


def _logits(
    states: tuple[jax.Array, jax.Array], heads: tuple[jax.Array, jax.Array], how: HeadTilings, number: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A tile of the student's logits and of the teacher's, `[s, g, l, c, v]`."""
    found = [
        tiling.logits_of(hidden, tiling.tile_of(head, each, number), each)
        for hidden, head, each in zip(states, heads, (how.student, how.teacher), strict=True)
    ]
    return found[0], found[1]


def _mixed(beta: float, p: jax.Array, q: jax.Array) -> jax.Array:
    return jnp.logaddexp(math.log(beta) + p, math.log1p(-beta) + q)


def summand(divergence: Distance, p: jax.Array, q: jax.Array) -> jax.Array:
    """What each word adds to the distance, from log-probabilities under teacher and student."""
    match divergence:
        case ForwardKL():
            return jnp.exp(p) * (p - q)
        case ReverseKL():
            return jnp.exp(q) * (q - p)
        case JSD(beta=beta):
            m = _mixed(beta, p, q)
            return beta * jnp.exp(p) * (p - m) + (1 - beta) * jnp.exp(q) * (q - m)
        case _:
            raise NotRegisteredError(
                f"{type(divergence).__qualname__} is not computed in nnxdsl/losses/distillation.py"
            )


def _center(divergence: Distance, p: jax.Array, q: jax.Array) -> jax.Array:
    """What each word adds to the mean, under the student, of the derivative of the distance by its probability."""
    match divergence:
        case ForwardKL():
            return jnp.zeros_like(q)
        case JSD(beta=beta):
            return jnp.exp(q) * (q - _mixed(beta, p, q))
        case _:
            return jnp.exp(q) * (q - p)


def _slope(divergence: Distance, p: jax.Array, q: jax.Array, center: jax.Array) -> jax.Array:
    """The derivative of the distance by each of the student's logits."""
    match divergence:
        case ForwardKL():
            return jnp.exp(q) - jnp.exp(p)
        case JSD(beta=beta):
            return (1 - beta) * jnp.exp(q) * (q - _mixed(beta, p, q) - center)
        case _:
            return jnp.exp(q) * (q - p - center)
