"""Distillation loss: the divergence of a student's token distributions from a teacher's, in vocabulary tiles.

Both heads are computed in the tiles of `lm_head/tiling.py`, the same slice of the vocabulary of both at a time. A first
loop computes both logsumexps, a second one sums the divergence, and the backward pass recomputes both logits. With one
chunk and one tile, the loops are one computation and XLA shares the logits. Axes have the names of `lm_head/tiling.py`.
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
from nnxdsl.config.objectives.on_policy_distillation import OnPolicyDistill
from nnxdsl.errors import NotRegisteredError
from nnxdsl.losses.base import Loss, LossTerms, WeightedMean, build
from nnxdsl.losses.lm_head.selected_logits import merge_logsumexp, online_update
from nnxdsl.losses.lm_head.tiling import (
    LOWEST,
    Tile,
    Tiling,
    gradients,
    num_tiles,
    scan,
    split_vocab,
    take,
    tile_logits,
    vocab_tile,
)
from nnxdsl.losses.lm_head.token_stats import Chunks, ShardContext, TokenStats


class TeacherOutputs(NamedTuple):
    """A teacher's hidden states and head for a micro-batch.

    Attributes:
        hidden: Its final hidden states at the positions that predict the targets, `[B, N, E]`.
        head: Its output embedding, `[V, E]`.
        soft_cap: Its logits `z` are `soft_cap * tanh(z / soft_cap)`; None for none.
    """

    hidden: Array
    head: Array
    soft_cap: float | None = None


class DistillationInputs(NamedTuple):
    """Inputs of the distillation loss.

    Attributes:
        stats: Statistics of the student's target tokens, `[B, N]`.
        divergence: From the teacher at each of them, in nats, `[B, N]`; zero where the mask is off.
        feature_distance: `1 - cos` of both models' hidden states, `[B, N]`; None where no loss reads it.
        teacher_index: Which of several teachers each row has, `[B, 1]`; None with one teacher.
    """

    stats: TokenStats
    divergence: Array
    feature_distance: Array | None = None
    teacher_index: Array | None = None


@build.register
def _(objective: Distill) -> Loss:
    hard, scale = objective.hard_weight, objective.temperature**2

    def loss(policy: DistillationInputs, reference: None, weight: jax.Array) -> LossTerms:
        counted = policy.stats.mask * weight[:, None]  # [B, N]
        count, divergence = jnp.sum(counted), jnp.sum(policy.divergence * counted)
        nll = -jnp.sum(policy.stats.logp * counted)
        total = (1 - hard) * scale * divergence
        if hard:
            total = total + hard * nll
        metrics = {"distill_loss": WeightedMean(divergence, count), "nll_loss": WeightedMean(nll, count)}
        if policy.feature_distance is not None:
            features = jnp.sum(policy.feature_distance * counted)
            total = total + objective.feature_weight * features
            metrics["feature_distance"] = WeightedMean(features, count)
        return LossTerms(WeightedMean(total, count), metrics)

    return loss


@build.register
def _(objective: OnPolicyDistill) -> Loss:
    def loss(policy: DistillationInputs, reference: None, weight: jax.Array) -> LossTerms:
        counted = policy.stats.mask * weight[:, None]  # [B, N]
        count, metrics = jnp.sum(counted), dict[str, WeightedMean]()
        for index, name in enumerate(objective.served_teachers if policy.teacher_index is not None else ()):
            scored = counted * (policy.teacher_index == index)
            total = jnp.sum(scored)
            metrics[f"teacher_jsd/{name}"] = WeightedMean(jnp.sum(policy.divergence * scored), total)
            metrics[f"teacher_token_frac/{name}"] = WeightedMean(total, count)
        # It is the policy of this temperature that is trained, so that there is no factor of its square.
        return LossTerms(WeightedMean(jnp.sum(policy.divergence * counted), count), metrics)

    return loss


def sampled_reverse_kl(
    logp: Float[Array, "B N"], teacher_logp: Float[Array, "B N"], mask: Bool[Array, "B N"]
) -> Float[Array, "B N"]:
    """`log q - log p` of sampled tokens, whose gradient is that times the gradient of `log q`; see `SampledReverseKL`.

    Args:
        logp: Log-probabilities of the tokens under the student, `q`, which sampled them.
        teacher_logp: Those under the teacher, `p`.
        mask: Which tokens count; zero where it is off.
    """
    estimate, constant = jax.lax.stop_gradient((logp - teacher_logp, logp))
    return jnp.where(mask, estimate * (1 + logp - constant), 0.0)


def feature_distance(
    hidden: Float[Array, "B N D"], teacher_hidden: Float[Array, "B N D"], mask: Bool[Array, "B N"]
) -> Float[Array, "B N"]:
    """`1 - cos` of two models' hidden states, float32; zero where the mask is off.

    Args:
        hidden: The student's.
        teacher_hidden: The teacher's.
        mask: Which targets count.
    """
    states = (jnp.where(mask[..., None], x, 1).astype(jnp.float32) for x in (hidden, teacher_hidden))
    student, teacher = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in states)
    # Half the squared distance of unit vectors: exact where they are nearly alike.
    return jnp.where(mask, jnp.sum(jnp.square(student - teacher), axis=-1) / 2, 0.0)


@attrs.frozen
class HeadTilings:
    """The tilings of both heads, and the divergence between them.

    Attributes:
        student: Tiling of the student's head.
        teacher: Tiling of the teacher's head.
        divergence: The divergence.
    """

    student: Tiling
    teacher: Tiling
    divergence: Distance


def divergence(
    hidden: Float[Array, "B N D"],
    head: Float[Array, "V D"],
    teacher: TeacherOutputs,
    mask: Bool[Array, "B N"],
    objective: Distill | OnPolicyDistill,
    soft_cap: float | None = None,
    limit: int | None = None,
    shard_context: ShardContext | None = None,
) -> Float[Array, "B N"]:
    """Divergence of softmax(hidden @ head.T / T) from the teacher's distribution at each target, in nats.

    Args:
        hidden: The student's final hidden states, at the positions that predict the targets.
        head: Its output embedding.
        teacher: The teacher's, which gets no gradient.
        mask: Which targets count. Masked positions may hold anything.
        objective: Divergence and temperature.
        soft_cap: Of the student's logits, before the temperature; None for none.
        limit: The most tokens whose logits exist at one time, over all devices; None for the platform's default.
        shard_context: Platform and sharding of logits; None for one CPU.

    Returns:
        Float32, zero where the mask is off, from products accumulated in float32.
    """
    shard_context = shard_context or ShardContext()
    # Tile sizes must suit both heads: those of the wider one.
    chunks = Chunks.of(mask, (len(head), max(head.shape[1], teacher.head.shape[1])), limit, shard_context)
    # Of capped logits too: c tanh(z / c) / t is (c / t) tanh((z / t) / (c / t)).
    caps = [None if cap is None else cap / objective.temperature for cap in (soft_cap, teacher.soft_cap)]
    tilings = HeadTilings(
        chunks.tiling(caps[0], shard_context), chunks.tiling(caps[1], shard_context), objective.distance
    )
    states = []
    for x in (hidden, teacher.hidden):
        states.append(chunks.split(x / objective.temperature))
        if shard_context.constrain is not None:
            states[-1] = shard_context.constrain(states[-1], (None, "head_batch", "length", None, "activation_embed"))
    heads = head.astype(hidden.dtype), teacher.head.astype(teacher.hidden.dtype)
    per_token: Any = _divergence(states[0], heads[0], states[1], heads[1], tilings)
    return chunks.join(per_token)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _divergence(
    hidden: Float[Array, "n g l c d"],
    head: Float[Array, "w d"],
    teacher_hidden: Float[Array, "n g l c e"],
    teacher_head: Float[Array, "w e"],
    tilings: HeadTilings,
) -> Float[Array, "n g l c"]:
    return _forward(hidden, head, teacher_hidden, teacher_head, tilings)[0]


class _Residuals(NamedTuple):
    """Residuals of the backward pass.

    Attributes:
        hidden: The student's hidden states, `[n, g, l, c, d]`.
        head: Its head, `[w, d]`.
        teacher_hidden: The teacher's hidden states, `[n, g, l, c, e]`.
        teacher_head: Its head, `[w, e]`.
        log_z: Logsumexps of the student's and the teacher's logits, `[n, g, l, c]` each.
        mean_grad: See `_mean_grad`, `[n, g, l, c]`.
    """

    hidden: Array
    head: Array
    teacher_hidden: Array
    teacher_head: Array
    log_z: tuple[Array, Array]
    mean_grad: Array


class _Trained(NamedTuple):
    """`_Residuals` of a trained head: a type of its own, since residuals hold nothing static."""

    residuals: _Residuals


def _forward_rule(
    hidden: CustomVJPPrimal,
    head: CustomVJPPrimal,
    teacher_hidden: CustomVJPPrimal,
    teacher_head: CustomVJPPrimal,
    tilings: HeadTilings,
) -> tuple[Array, _Residuals | _Trained]:
    values = hidden.value, head.value, teacher_hidden.value, teacher_head.value
    per_token, mean_grad, log_z = _forward(*values, tilings)
    residuals = _Residuals(*values, log_z, mean_grad)
    return per_token, _Trained(residuals) if head.perturbed else residuals


def _backward_rule(
    tilings: HeadTilings, residuals: _Residuals | _Trained, cotangent: Array
) -> tuple[Array | None, ...]:
    is_trained = isinstance(residuals, _Trained)
    values = residuals.residuals if isinstance(residuals, _Trained) else residuals
    if isinstance(cotangent, SymbolicZero):
        cotangent = jnp.zeros(values.mean_grad.shape, jnp.float32)
    return *_gradients(values, cotangent, tilings, trained=is_trained), None, None


_divergence.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


def _forward(
    hidden: jax.Array, head: jax.Array, teacher_hidden: jax.Array, teacher_head: jax.Array, tilings: HeadTilings
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array]]:
    """The divergence, `_mean_grad` and both logsumexps; all `[n, g, l, c]`."""
    heads = split_vocab(head, tilings.student), split_vocab(teacher_head, tilings.teacher)
    numbers = jnp.arange(num_tiles(heads[0], tilings.student))

    def chunk(_: None, states: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, ...]]:
        zeros = jnp.zeros((heads[0].shape[0], *states[0].shape[:-1]), jnp.float32)  # [s, g, l, c]

        def logsumexps(sums: tuple[jax.Array, ...], number: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
            student, teacher = _logits(states, heads, tilings, number)
            return (*online_update(sums[0], sums[1], student), *online_update(sums[2], sums[3], teacher)), None

        lowest = zeros + LOWEST
        sums, _ = scan(logsumexps, (lowest, zeros, lowest, zeros), numbers)
        log_z = merge_logsumexp(sums[0], sums[1]), merge_logsumexp(sums[2], sums[3])

        def add(sums: tuple[jax.Array, jax.Array], number: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            student, teacher = _logits(states, heads, tilings, number)
            q, p = student - log_z[0][..., None], teacher - log_z[1][..., None]
            return (
                sums[0] + jnp.sum(token_divergence(tilings.divergence, p, q), axis=-1),
                sums[1] + jnp.sum(_mean_grad(tilings.divergence, p, q), axis=-1),
            ), None

        (value, mean_grad), _ = scan(add, (zeros, zeros), numbers)
        return None, (jnp.sum(value, axis=0), jnp.sum(mean_grad, axis=0), *log_z)

    value, mean_grad, *log_z = scan(chunk, None, (hidden, teacher_hidden))[1]
    return value, mean_grad, (log_z[0], log_z[1])


def _gradients(
    residuals: _Residuals, cotangent: jax.Array, tilings: HeadTilings, *, trained: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Gradients of the student's hidden states and, if it is trained, of its head."""
    heads = split_vocab(residuals.head, tilings.student), split_vocab(residuals.teacher_head, tilings.teacher)

    arrays = *residuals.log_z, residuals.mean_grad, cotangent

    def logits_and_grads(tile: Tile) -> tuple[jax.Array, jax.Array]:
        student_z, teacher_z, mean_grad, factor = (take(x, tile.chunk)[..., None] for x in arrays)  # [g, l, c, 1]
        states = tile.hidden, take(residuals.teacher_hidden, tile.chunk)
        student, teacher = _logits(states, heads, tilings, tile.number)
        return student, _logit_grad(tilings.divergence, teacher - teacher_z, student - student_z, mean_grad) * factor

    return gradients(residuals.hidden, residuals.head, logits_and_grads, tilings.student, trained=trained)


def _logits(
    states: tuple[jax.Array, jax.Array], heads: tuple[jax.Array, jax.Array], tilings: HeadTilings, number: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A tile of the student's logits and of the teacher's, `[s, g, l, c, v]`."""
    student, teacher = (
        tile_logits(hidden, vocab_tile(head, tiling, number), tiling)
        for hidden, head, tiling in zip(states, heads, (tilings.student, tilings.teacher), strict=True)
    )
    return student, teacher


def _log_mixture(beta: float, p: jax.Array, q: jax.Array) -> jax.Array:
    return jnp.logaddexp(math.log(beta) + p, math.log1p(-beta) + q)


def token_divergence(divergence: Distance, p: jax.Array, q: jax.Array) -> jax.Array:
    """Each token's term of the divergence, from its log-probabilities under teacher `p` and student `q`."""
    match divergence:
        case ForwardKL():
            return jnp.exp(p) * (p - q)
        case ReverseKL():
            return jnp.exp(q) * (q - p)
        case JSD(beta=beta):
            m = _log_mixture(beta, p, q)
            return beta * jnp.exp(p) * (p - m) + (1 - beta) * jnp.exp(q) * (q - m)
        case _:
            raise NotRegisteredError(
                f"Distill.distance: no divergence is implemented for {type(divergence).__qualname__}"
            )


def _mean_grad(divergence: Distance, p: jax.Array, q: jax.Array) -> jax.Array:
    """Each token's term of the mean, under the student, of the divergence's derivative by its probability."""
    match divergence:
        case ForwardKL():
            return jnp.zeros_like(q)
        case JSD(beta=beta):
            return jnp.exp(q) * (q - _log_mixture(beta, p, q))
        case _:
            return jnp.exp(q) * (q - p)


def _logit_grad(divergence: Distance, p: jax.Array, q: jax.Array, mean_grad: jax.Array) -> jax.Array:
    """The derivative of the divergence by each of the student's logits."""
    match divergence:
        case ForwardKL():
            return jnp.exp(q) - jnp.exp(p)
        case JSD(beta=beta):
            return (1 - beta) * jnp.exp(q) * (q - _log_mixture(beta, p, q) - mean_grad)
        case _:
            return jnp.exp(q) * (q - p - mean_grad)
