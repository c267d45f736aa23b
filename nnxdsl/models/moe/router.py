"""The router of a mixture of experts: the experts of each token, their weights, and load-balancing statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.config.moe import MoEConfig
from nnxdsl.models.layers.norm import unscaled_norm
from nnxdsl.models.logical_axes import constrain
from nnxdsl.models.recording import Recorder

ROUTED_EXPERTS: Recorder[jax.Array] = Recorder("routed_experts")
"""The experts of each token, `[B, T, k]` int16."""

_REPLAYED: ContextVar[jax.Array | None] = ContextVar("replayed_experts", default=None)


@contextmanager
def replaying(experts: jax.Array | None) -> Iterator[None]:
    """Within the context, the router of the layer that is traced sends tokens to `experts` `[B, T, k]`.

    A token whose experts are below 0 goes to those that the router selects. None: all tokens do.
    """
    token = _REPLAYED.set(experts)
    try:
        yield
    finally:
        _REPLAYED.reset(token)


class Routing(NamedTuple):
    """The routing of tokens.

    Attributes:
        expert: `[B, T, k]` int32, the experts of each token, all different.
        weight: `[B, T, k]` float32, factors of their outputs.
        probability: `[B, T, E]` float32, the probabilities of all experts, which the load-balancing loss evens out.
    """

    expert: jax.Array
    weight: jax.Array
    probability: jax.Array


class RouterStats(NamedTuple):
    """Sums over real tokens; those of several layers, devices and rows are added up.

    Attributes:
        chosen: `[E]` float32, the number of tokens that go to each expert.
        probability: `[E]` float32, the sum of each expert's probabilities.
        tokens: float32, the number of tokens; over L layers each token counts L times.
    """

    chosen: jax.Array
    probability: jax.Array
    tokens: jax.Array


class Router(nnx.Module):
    """Scores all experts and selects some, in float32.

    Its weight has another name than `kernel`, so adapters and quantization leave it as it is: rounding would send
    tokens to other experts.

    Args:
        features: width of a token.
        experts: scoring and selection.
        rngs: draws the weight, normal with variance 1 / features, so that logits have variance 1.
        param_dtype: dtype of weight and bias; the correction is always float32.
        norm_eps: of the norm before it, if there is one.
    """

    def __init__(
        self, features: int, experts: MoEConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike, norm_eps: float = 1e-6
    ) -> None:
        self.experts = experts
        self.norm_eps = norm_eps
        count = experts.num_experts
        values = jax.random.normal(rngs.params(), (count, features), jnp.float32) * features**-0.5
        # Every device scores all experts for its tokens, so this axis is not sharded.
        self.weight = nnx.Param(values.astype(param_dtype), axes=(None, "embed"))  # [E, D]
        self.bias = nnx.Param(jnp.zeros((count,), param_dtype), axes=(None,)) if experts.router_bias else None
        self.correction = (
            nnx.Param(jnp.zeros((count,), jnp.float32), axes=(None,)) if experts.e_score_correction_bias else None
        )
        self.scale = nnx.Param(jnp.ones((features,), param_dtype), axes=("embed",)) if experts.router_norm else None
        ones = jnp.ones((count,), param_dtype)
        self.expert_scale = nnx.Param(ones, axes=(None,)) if experts.per_expert_scale else None

    def __call__(self, x: jax.Array) -> Routing:
        """Tokens `[B, T, D]` to their experts."""
        if self.scale is not None:
            x = unscaled_norm(x, self.norm_eps)
            x = x * self.scale[...].astype(x.dtype) * x.shape[-1] ** -0.5
        weight = self.weight[...].astype(jnp.float32)
        # By default TPUs and GPUs round float32 products, which changes the choice between nearly equal experts.
        logits = jnp.einsum("btd,ed->bte", x.astype(jnp.float32), weight, precision="highest")
        if self.bias is not None:
            logits = logits + self.bias[...].astype(jnp.float32)
        # No gradient: only the selection reads the correction, which is updated from counts.
        correction = None if self.correction is None else jax.lax.stop_gradient(self.correction[...])
        routed = route(constrain(logits, "batch", "length", None), self.experts, correction, _REPLAYED.get())
        ROUTED_EXPERTS.record(lambda: routed.expert.astype(jnp.int16))
        if self.expert_scale is None:
            return routed
        scale = jnp.take(self.expert_scale[...].astype(jnp.float32), routed.expert, axis=0)  # [B, T, k]
        return routed._replace(weight=routed.weight * scale)


def route(
    logits: jax.Array, experts: MoEConfig, correction: jax.Array | None = None, replayed: jax.Array | None = None
) -> Routing:
    """Experts and weights from a router's logits.

    Args:
        logits: `[B, T, E]` float32.
        experts: scoring and selection.
        correction: `[E]`, added to the scores for the selection.
        replayed: `[B, T, k]`, the experts in place of those selected, see `replaying`; their weights are computed from
            the logits.

    Returns:
        The routing. The probabilities of "sigmoid" are the scores divided by their sum (arXiv:2412.19437, eq. 19).
    """
    if experts.scoring == "softmax_of_chosen":
        chosen, expert = jax.lax.top_k(logits, experts.num_experts_per_tok)  # [B, T, k]
        if replayed is not None:
            expert = jnp.where(replayed >= 0, replayed, expert)
            chosen = jnp.take_along_axis(logits, expert, axis=-1)
        return Routing(expert, jax.nn.softmax(chosen) * experts.routed_scaling_factor, jax.nn.softmax(logits))
    if experts.scoring == "softmax":
        scores = probability = jax.nn.softmax(logits)
        wanted = _in_best_groups(jax.lax.stop_gradient(scores), experts)
    else:
        scores = jax.nn.sigmoid(logits)
        probability = scores / jnp.sum(scores, axis=-1, keepdims=True)
        wanted = jax.lax.stop_gradient(scores if correction is None else scores + correction)
        wanted = _in_best_groups(wanted, experts)
    expert = jax.lax.top_k(wanted, experts.num_experts_per_tok)[1]
    if replayed is not None:
        expert = jnp.where(replayed >= 0, replayed, expert)
    weight = jnp.take_along_axis(scores, expert, axis=-1)
    if experts.norm_topk_prob:
        weight = weight / (jnp.sum(weight, axis=-1, keepdims=True) + 1e-20)
    return Routing(expert, weight * experts.routed_scaling_factor, probability)


def _in_best_groups(scores: jax.Array, experts: MoEConfig) -> jax.Array:
    """Scores `[B, T, E]`, minus infinity where an expert's group is not among the best."""
    if experts.n_group == experts.topk_group:
        return scores
    groups = scores.reshape(*scores.shape[:-1], experts.n_group, experts.experts_per_group)
    best = jax.lax.top_k(groups, 2 if experts.group_score == "best_two" else 1)[0]
    chosen = jax.lax.top_k(jnp.sum(best, axis=-1), experts.topk_group)[1]  # [B, T, topk_group]
    inside = jnp.any(chosen[..., None] == jnp.arange(experts.n_group), axis=-2)  # [B, T, groups]
    return jnp.where(inside[..., None], groups, -jnp.inf).reshape(scores.shape)


def router_stats(routed: Routing, real: jax.Array) -> RouterStats:
    """The sums of one layer.

    Args:
        routed: of tokens `[B, T]`.
        real: `[B, T]` bool, False for padding, which is not counted.
    """
    count = routed.probability.shape[-1]
    counted = real.astype(jnp.float32)
    is_chosen = jnp.any(routed.expert[..., None] == jnp.arange(count), axis=-2)  # [B, T, E]
    return RouterStats(
        jnp.einsum("bte,bt->e", is_chosen.astype(jnp.float32), counted, precision="highest"),
        jnp.einsum("bte,bt->e", routed.probability, counted, precision="highest"),
        jnp.sum(counted),
    )


def load_balance(stats: RouterStats) -> tuple[jax.Array, jax.Array]:
    """The load-balancing loss (Fedus et al., arXiv:2101.03961, eq. 4) as a sum over tokens, and their number.

    The loss is `E * sum over e of (share of tokens routed to e) * (mean probability of e)`, which has its minimum
    `num_experts_per_tok` where the load is even. As in transformers, tokens of all layers count together: add the
    layers' sums first. It is not linear in rows: over micro-batches it is the mean of their losses by tokens.

    Args:
        stats: sums over the tokens of a micro-batch.

    Returns:
        (loss times tokens, tokens); 0 and 0 without tokens.
    """
    some = jnp.maximum(stats.tokens, 1.0)
    even = jnp.sum(stats.chosen / some * stats.probability) * stats.chosen.shape[-1]
    return even, stats.tokens


def join_experts(parts: Sequence[tuple[int, jax.Array | None]]) -> jax.Array | None:
    """The experts `[layers, B, T, k]` of groups of layers, with their numbers of layers, in one array."""
    some = next((part for _, part in parts if part is not None), None)
    if some is None:
        return None
    shape = some.shape[1:]
    return jnp.concatenate([jnp.full((n, *shape), -1, some.dtype) if part is None else part for n, part in parts])
