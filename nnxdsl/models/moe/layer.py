"""The mixture-of-experts MLP: tokens are sorted by expert, multiplied and combined; no token is ever dropped."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Self

import attrs
import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.feed_forward import Activation, MLPConfig
from nnxdsl.models.config.moe import MoEConfig
from nnxdsl.models.layers.linear import Linear
from nnxdsl.models.layers.mlp import MLP, activate
from nnxdsl.models.logical_axes import constrain, shard_map_call
from nnxdsl.models.moe.grouped_matmul import SLOTS, grouped_dot
from nnxdsl.models.moe.router import Router, RouterStats, router_stats
from nnxdsl.models.remat import from_inputs, named


class ExpertLinear(nnx.Module):
    """`x @ kernel[expert of x] + bias[expert of x]`.

    Adapters and quantized weights replace it by a subclass with another `product`.

    Args:
        count: number of experts.
        in_features: length of the last axis of the input.
        out_features: length of the last axis of the output.
        axes: logical names of a kernel's (in, out) axes, which follow the axis "experts".
        bias: whether each expert has a bias.
        rngs: draws the kernel, normal with variance 1 / in_features, from its `params` stream.
        param_dtype: dtype of kernel and bias.
    """

    def __init__(
        self,
        count: int,
        in_features: int,
        out_features: int,
        *,
        axes: tuple[str, str],
        bias: bool,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
    ) -> None:
        values = jax.random.normal(rngs.params(), (count, in_features, out_features), jnp.float32) * in_features**-0.5
        self.kernel = nnx.Param(values.astype(param_dtype), axes=("experts", *axes))  # [E, in, out]
        zeros = jnp.zeros((count, out_features), param_dtype)
        self.bias = nnx.Param(zeros, axes=("experts", axes[1])) if bias else None  # [E, out]

    def __call__(self, x: jax.Array, expert: jax.Array) -> jax.Array:
        """Slots `[B, T, k, in]` to `[B, T, k, out]`, in the dtype of `x`; `expert` as in `Slots`."""
        result = self.product(x, expert)
        if self.bias is not None:
            # Masked slots have an index past the last expert: they take the last bias, and their result is not read.
            result = result + jnp.take(self.bias[...], expert, axis=0, mode="clip").astype(x.dtype)
        return named(result, "product")

    def product(self, x: jax.Array, expert: jax.Array) -> jax.Array:
        """The product without the bias."""
        return expert_dot(x, self.kernel[...], expert)


def expert_dot(x: jax.Array, kernel: jax.Array, expert: jax.Array, axis: str | None = "activation_mlp") -> jax.Array:
    """Slots `[B, T, k, in]` times the matrix of their expert, of `[E, in, out]`, in the dtype of `x`.

    Over the mesh axis "tensor" every product is split by its outputs, the down projection too: split by its inputs it
    would need an all-reduce.
    """
    return grouped_dot(x, kernel.astype(x.dtype), expert, axis)


class SharedExpert(MLP):
    """The MLP that every token goes through; in some models its output has a gate.

    Args:
        embed_dim: width of a token.
        config: see `MLP`.
        gated: whether the output is multiplied by `sigmoid(x @ weight)`.
        rngs: draws the weights.
        param_dtype: dtype of the weights.
    """

    def __init__(
        self, embed_dim: int, config: MLPConfig, *, gated: bool, rngs: nnx.Rngs, param_dtype: DTypeLike
    ) -> None:
        super().__init__(embed_dim, config, rngs=rngs, param_dtype=param_dtype)
        first = jax.random.normal(rngs.params(), (embed_dim,), jnp.float32) * embed_dim**-0.5 if gated else None
        self.weight = None if first is None else nnx.Param(first.astype(param_dtype), axes=("embed",))  # [D]

    def project(self, x: jax.Array) -> jax.Array:
        """`[B, T, D]` to `[B, T, D]`."""
        result = super().project(x)
        if self.weight is None:
            return result
        gate = jax.nn.sigmoid(jnp.einsum("btd,d->bt", x, self.weight[...].astype(x.dtype)))
        return gate[..., None] * result


class ExpertMLP(nnx.Module):
    """A mixture of experts: a token goes through the experts that its router chooses.

    Args:
        embed_dim: width of a token.
        experts: number and widths of the experts, and how they are chosen.
        mlp: activation, gate and biases of the experts.
        rngs: draws the weights.
        param_dtype: dtype of the weights.
        norm_eps: of the router's norm, if it has one.
    """

    def __init__(
        self,
        embed_dim: int,
        experts: MoEConfig,
        mlp: MLPConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
        norm_eps: float = 1e-6,
    ) -> None:
        def linear(in_features: int, out_features: int, axes: tuple[str, str]) -> ExpertLinear:
            options = {"axes": axes, "bias": experts.expert_bias, "rngs": rngs, "param_dtype": param_dtype}
            return ExpertLinear(experts.num_experts, in_features, out_features, **options)

        self.activation: Activation = mlp.activation
        self.router = Router(embed_dim, experts, rngs=rngs, param_dtype=param_dtype, norm_eps=norm_eps)
        width = experts.latent_dim or embed_dim
        self.gate = linear(width, experts.mlp_dim, ("embed", "mlp")) if mlp.gate else None
        self.up = linear(width, experts.mlp_dim, ("embed", "mlp"))
        self.down = linear(experts.mlp_dim, width, ("mlp", "embed"))
        latent: dict[str, Any] = {"rngs": rngs, "param_dtype": param_dtype, "bias": mlp.bias}
        is_latent = experts.latent_dim is not None
        self.latent_down = Linear(embed_dim, width, axes=("embed", "mlp"), **latent) if is_latent else None
        self.latent_up = Linear(width, embed_dim, axes=("mlp", "embed"), **latent) if is_latent else None
        self.shared = (
            None
            if experts.shared_expert_dim is None
            else SharedExpert(
                embed_dim,
                attrs.evolve(mlp, dim=experts.shared_expert_dim),
                gated=experts.shared_expert_gate,
                rngs=rngs,
                param_dtype=param_dtype,
            )
        )

    @classmethod
    def build(cls, config: DecoderConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> Self:
        """The experts of this decoder."""
        assert config.moe is not None  # which named this class
        return cls(
            config.embed_dim,
            config.moe,
            config.mlp,
            rngs=rngs,
            param_dtype=param_dtype,
            norm_eps=config.norm.eps,
        )

    def __call__(
        self, x: jax.Array, real: jax.Array, routed_by: jax.Array | None = None
    ) -> tuple[jax.Array, RouterStats]:
        """Tokens through their experts.

        Args:
            x: `[B, T, D]`.
            real: `[B, T]` bool, False for padding, which only the shared expert computes and no statistic counts.
            routed_by: `[B, T, D]`, what the router reads; None for `x`.

        Returns:
            (`[B, T, D]` in the dtype of `x`, the router's statistics of real tokens).
        """
        routed = self.router(x if routed_by is None else routed_by)
        slots = sort_by_expert(jnp.where(real[..., None], routed.expert, self.router.experts.num_experts))
        tokens = dispatch(x if self.latent_down is None else self.latent_down(x), slots)  # [B, T, k, D]
        weight = routed.weight * real[..., None]
        if self.router.experts.scales_input:
            tokens = tokens * sorted_slots(weight, slots)[..., None].astype(tokens.dtype)
            weight = jnp.broadcast_to(real[..., None], weight.shape).astype(weight.dtype)
        gate = None if self.gate is None else self.gate(tokens, slots.expert)
        up = self.up(tokens, slots.expert)
        limit, alpha = self.router.experts.swiglu_limit, self.router.experts.swiglu_alpha
        if limit is None or gate is None:
            hidden = activate(self.activation, up, gate)
        else:
            hidden = from_inputs(partial(clamped_swiglu, limit, alpha))(gate, up)
        result = combine(self.down(hidden, slots.expert), weight, slots)
        result = result if self.latent_up is None else self.latent_up(result)
        result = constrain(result, "batch", "length", "activation_embed")
        if self.shared is not None:
            result = result + self.shared.project(x)
        return result, router_stats(routed, real)


def clamped_swiglu(limit: float, alpha: float, gate: jax.Array, up: jax.Array) -> jax.Array:
    """The hidden layer of GPT-OSS's experts, which bounds gate and up; `alpha` is the slope of the sigmoid."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


class Slots(NamedTuple):
    """The slots of tokens, k for each, sorted by expert.

    Each device sorts its own slots, and numbers them from 0. All shapes are those of unsorted slots, so that they are
    sharded in the same way.

    Attributes:
        order: `[B, T, k]` int32, the unsorted index of the slot at each sorted position.
        place: `[B, T, k]` int32, the sorted position of each slot.
        expert: `[B, T, k]` int32, the expert at each sorted position; ascending.
    """

    order: jax.Array
    place: jax.Array
    expert: jax.Array


def sort_by_expert(expert: jax.Array) -> Slots:
    """Sorts slots by their experts `[B, T, k]`."""

    def sort(expert: jax.Array) -> jax.Array:
        return jnp.argsort(expert.reshape(-1), stable=True).astype(jnp.int32).reshape(expert.shape)

    def invert(order: jax.Array) -> jax.Array:
        flat, places = order.reshape(-1), jnp.arange(order.size, dtype=jnp.int32)
        return jnp.zeros_like(flat).at[flat].set(places, unique_indices=True).reshape(order.shape)

    def pick(expert: jax.Array, order: jax.Array) -> jax.Array:
        return expert.reshape(-1)[order.reshape(-1)].reshape(expert.shape)

    order = shard_map_call(sort, (expert,), (SLOTS,), SLOTS)
    place = shard_map_call(invert, (order,), (SLOTS,), SLOTS)
    return Slots(order, place, shard_map_call(pick, (expert, order), (SLOTS, SLOTS), SLOTS))


def dispatch(x: jax.Array, slots: Slots) -> jax.Array:
    """Copies tokens `[B, T, D]` to the sorted positions of their slots, `[B, T, k, D]`."""

    def take(x: jax.Array, order: jax.Array, place: jax.Array) -> jax.Array:
        return gather_tokens(x.reshape(-1, x.shape[-1]), order, place).reshape(*order.shape, -1)

    return shard_map_call(take, (x, slots.order, slots.place), (SLOTS, SLOTS, SLOTS), (*SLOTS, None))


def sorted_slots(values: jax.Array, slots: Slots) -> jax.Array:
    """Numbers of slots `[B, T, k]` in the sorted order."""

    def take(values: jax.Array, order: jax.Array) -> jax.Array:
        return jnp.take(values.reshape(-1), order.reshape(-1), unique_indices=True).reshape(order.shape)

    return shard_map_call(take, (values, slots.order), (SLOTS, SLOTS), SLOTS)


def combine(parts: jax.Array, weight: jax.Array, slots: Slots) -> jax.Array:
    """The weighted sum of each token's slots.

    Args:
        parts: `[B, T, k, D]`, sorted by expert.
        weight: `[B, T, k]` float32, in the order of tokens.
        slots: the sorted order.

    Returns:
        `[B, T, D]` in the dtype of `parts`; summed in float32.
    """

    def add(parts: jax.Array, weight: jax.Array, order: jax.Array, place: jax.Array) -> jax.Array:
        flat = gather_slots(parts.reshape(-1, parts.shape[-1]), place, order).reshape(parts.shape)
        return jnp.sum(flat * weight[..., None], axis=-2).astype(parts.dtype)

    mixed = (*SLOTS[:2], "activation_mlp")
    axes = ((*SLOTS, "activation_mlp"), SLOTS, SLOTS, SLOTS)
    return shard_map_call(add, (parts, weight, slots.order, slots.place), axes, mixed)


# The gradients of both are gathers by the inverse permutation; XLA would make serial scatter-adds of them.


@jax.custom_vjp
def gather_tokens(x: jax.Array, order: jax.Array, place: jax.Array) -> jax.Array:
    """Rows `[N, D]` of tokens to rows `[N * k, D]` of slots sorted by expert."""
    return x[order.reshape(-1) // order.shape[-1]]


def _gather_tokens_forward(x: jax.Array, order: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gather_tokens(x, order, place), place


def _gather_tokens_backward(place: jax.Array, change: jax.Array) -> tuple[jax.Array, None, None]:
    of_slots = change[place.reshape(-1)].reshape(-1, place.shape[-1], change.shape[-1])  # [N, k, D]
    return jnp.sum(of_slots, axis=1, dtype=jnp.float32).astype(change.dtype), None, None


gather_tokens.defvjp(_gather_tokens_forward, _gather_tokens_backward)


@jax.custom_vjp
def gather_slots(rows: jax.Array, place: jax.Array, order: jax.Array) -> jax.Array:
    """Rows `[N * k, D]` sorted by expert to rows in the order of tokens."""
    return rows[place.reshape(-1)]


def _gather_slots_forward(rows: jax.Array, place: jax.Array, order: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gather_slots(rows, place, order), order


def _gather_slots_backward(order: jax.Array, change: jax.Array) -> tuple[jax.Array, None, None]:
    return change[order.reshape(-1)], None, None


gather_slots.defvjp(_gather_slots_forward, _gather_slots_backward)
