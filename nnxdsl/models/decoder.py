"""The decoder: a scan over a repeated group of layers, between prefix and suffix layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.attention.dot_product import apply_soft_cap
from nnxdsl.models.attention.kv_cache import KV, Cache, CacheUpdate, LayerCaches
from nnxdsl.models.attention.positions import TokenPositions, positions_right_padded
from nnxdsl.models.attention.row_layout import AttentionMethod
from nnxdsl.models.attention.view import Context, context
from nnxdsl.models.block import Block
from nnxdsl.models.config.decoder import DecoderConfig, LayerKind
from nnxdsl.models.dropout import LEAD, TAIL, at_layer, layer_numbers, stamp
from nnxdsl.models.layers.embedding import Embedding, Head
from nnxdsl.models.layers.norm import norm_of
from nnxdsl.models.logical_axes import constrain, shard_weights
from nnxdsl.models.moe.router import RouterStats
from nnxdsl.models.mtp import Predictor
from nnxdsl.models.pipeline import Stages, run_stages
from nnxdsl.models.remat import Remat, with_remat


class LayerGroup(nnx.Module):
    """Consecutive layers: the body of the decoder's scan; adapters are applied to it before it is stacked.

    Args:
        config: the decoder's config.
        kinds: of its layers, in their order.
        dense: whether each layer has the gated MLP, whatever `config.feed_forward` is; empty for none.
        rngs: draws the weights.
        param_dtype: dtype of the weights.
    """

    def __init__(
        self,
        config: DecoderConfig,
        kinds: Sequence[LayerKind],
        dense: Sequence[bool] = (),
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
    ) -> None:
        self.blocks = nnx.List(
            [
                Block(config, kind=kind, dense=is_dense, rngs=rngs, param_dtype=param_dtype)
                for kind, is_dense in zip(kinds, dense or (False,) * len(kinds), strict=True)
            ]
        )

    def __call__(
        self, x: jax.Array, context: Context, past: LayerCaches | None = None, *, return_kv: bool = False
    ) -> tuple[jax.Array, LayerCaches | None, RouterStats | None]:
        """The layers' output, the update of their caches, and the sum of their router statistics.

        Args:
            x: the residual stream, `[B, T, D]`.
            context: the positions and masks of this call.
            past: the caches of these layers, or None.
            return_kv: also return this call's keys and values; of local layers those within the window.
        """
        news: dict[LayerKind, list[Any]] = {"local": [], "global": [], "linear": [], "nope": []}
        routing = None
        for block, run in zip(self.blocks, _runners(self.blocks), strict=True):
            own = news[block.kind]
            x, new, stats = run(x, context, None if past is None else past.layer(block.kind, len(own)))
            routing = add_router_stats(routing, stats)
            own.append(_newest(new, context) if block.kind == "local" else new)
        if not return_kv:
            return x, None, routing
        stacked = (jax.tree.map(lambda *parts: jnp.stack(parts), *own) if own else None for own in news.values())
        return x, LayerCaches(*stacked), routing


def _runners(blocks: Sequence[Block]) -> list[Callable[..., Any]]:
    """A callable for each layer; layers with equal graphdefs are traced and lowered once.

    qwix's layers differ in their paths, so each is called as it is.
    """
    parts = [nnx.split(block) for block in blocks]
    times = Counter(graphdef for graphdef, _ in parts)

    def run(graphdef: nnx.GraphDef, state: nnx.State, *given: Any) -> Any:
        return nnx.merge(graphdef, state)(*given)

    shared = {graphdef: jax.jit(partial(run, graphdef)) for graphdef, count in times.items() if count > 1}
    return [
        partial(shared[graphdef], state) if graphdef in shared else block
        for block, (graphdef, state) in zip(blocks, parts, strict=True)
    ]


def example_inputs(config: DecoderConfig, dtype: DTypeLike = jnp.float32) -> tuple[jax.Array, Context]:
    """The smallest inputs of a LayerGroup, with which qwix traces it."""
    positions = positions_right_padded(jnp.ones((1,), jnp.int32), 1)
    return jnp.zeros((1, 1, config.embed_dim), dtype), context(config, positions)


class DecoderOutput(NamedTuple):
    """The output of a decoder.

    Attributes:
        hidden: states after the final norm, `[B, T, D]`.
        cache_update: what a cache takes of the tokens; None without `return_kv`.
        router_stats: the sum over all layers; None without experts and under pipeline parallelism.
    """

    hidden: jax.Array
    cache_update: CacheUpdate | None
    router_stats: RouterStats | None


class Decoder(nnx.Module):
    """A decoder, from tokens to final hidden states.

    Layers before the first period are `lead.blocks`; of those after them layer i is `layers.blocks.{i % period}` at
    stack position `i // period`; the layers after the last whole period are `tail.blocks`.

    Args:
        config: the decoder's config.
        rngs: draws the weights from its `params` stream.
        param_dtype: dtype of all weights.
        adapt: applied to a LayerGroup before it is stacked; may return another class with more Variables (as qwix
            does). It is traced under `vmap`, so arrays that it draws from a fixed seed are the same for each period of
            the stack.

    Attributes:
        embed: the embedding.
        lead: a LayerGroup of the dense layers before the stack; None without any.
        layers: a LayerGroup whose Variables have a leading axis "layers" of `config.periods`; None without periods.
        tail: a LayerGroup of the remaining layers; None without any.
        norm: the final norm.
        lm_head: the output head; None where it is tied to the embedding.
        mtp: the multi-token-prediction (MTP) layer, which only `mtp_hidden` runs; None without one.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike = jnp.float32,
        adapt: Callable[[LayerGroup], LayerGroup] = lambda period: period,
    ) -> None:
        def period(kinds: Sequence[LayerKind], dense: Sequence[bool], rngs: nnx.Rngs) -> LayerGroup:
            return adapt(LayerGroup(config, kinds, dense, rngs=rngs, param_dtype=param_dtype))

        self.config = config
        vocab, embed = config.vocab_size, config.embed_dim
        factor = config.embedding_multiplier * (embed**0.5 if config.scale_embedding else 1.0)
        self.embed = Embedding(vocab, embed, factor=factor, rngs=rngs, param_dtype=param_dtype)
        flags, tail = config.dense_pattern, config.suffix_layers
        self.lead = (
            period(config.prefix_layers, (True,) * config.dense_layers, nnx.Rngs(params=rngs.params()))
            if config.prefix_layers
            else None
        )
        self.layers = (
            _stack(lambda key: period(config.pattern, flags, nnx.Rngs(params=key)), rngs.params(), config.periods)
            if config.periods
            else None
        )
        self.tail = period(tail, flags[: len(tail)], nnx.Rngs(params=rngs.params())) if tail else None
        self.norm = norm_of(config, embed, "norm", param_dtype)
        self.lm_head = None if config.tied_head else Head(vocab, embed, rngs=rngs, param_dtype=param_dtype)
        self.mtp = Predictor(config, rngs=rngs, param_dtype=param_dtype) if config.mtp_layers else None

    def __call__(
        self,
        tokens: jax.Array,
        positions: TokenPositions,
        *,
        cache: Cache | None = None,
        return_kv: bool = False,
        dtype: DTypeLike,
        remat: Remat = "none",
        stages: Stages | None = None,
        method: AttentionMethod = AttentionMethod(),  # noqa: B008 - frozen
    ) -> DecoderOutput:
        """Hidden states after the final norm.

        Args:
            tokens: `[B, T]` int32.
            positions: of the tokens, each `[B, T]`.
            cache: tokens to attend to as well. A row may begin with padding, but have none between its tokens: local
                layers count tokens.
            return_kv: also return the update of a cache.
            dtype: of the residual stream and the matrix products; norms, softmax and RoPE are float32.
            remat: rematerialization policy of each period of layers; see `models.remat`.
            stages: divides the stack of periods into pipeline stages; not with a cache.
            method: how attention is computed; its window is that of each kind of layer. With a cache it is "dense".

        Returns:
            Hidden states in `dtype`, and with `return_kv` the update of a cache.

        Raises:
            ValueError: the kernel needs the layout of the row, and `method` has none or one of another length.
        """
        length = tokens.shape[1]
        row = method.row if cache is None else None
        if method.kernel != "dense" and (row is None or row.size != length):
            raise ValueError(f"{method.kernel} attention needs the layout of {length} slots, got {row}")
        shared = context(self.config, positions, cache, method)
        stamp(positions)
        x = constrain(self.embed(tokens, dtype), "batch", "length", "activation_embed")  # [B, T, D]
        lead, layers, tail = (None, None, None) if cache is None else (cache.prefix, cache.layers, cache.suffix)
        routing = last = None
        if self.lead is not None:
            with at_layer(LEAD):
                x, lead, _ = _group_runner(self.lead, remat, return_kv)(nnx.state(self.lead), x, shared, lead)
        if self.layers is not None and stages is not None and cache is None and not return_kv:
            x = _run_in_stages(self.layers, x, shared, stages, remat)
        elif self.layers is not None:
            x, layers, routing = _run_stack(self.layers, x, shared, layers, remat, return_kv)
        if self.tail is not None:
            with at_layer(TAIL):
                x, tail, last = _group_runner(self.tail, remat, return_kv)(nnx.state(self.tail), x, shared, tail)
        x = self.norm(x)
        if self.config.logits_scaling != 1.0:
            x = x / self.config.logits_scaling  # the head is linear
        hidden = constrain(x, "batch", "length", "activation_embed")
        return DecoderOutput(
            hidden, CacheUpdate(layers, tail, positions, lead) if return_kv else None, add_router_stats(routing, last)
        )

    def mtp_hidden(
        self,
        hidden: jax.Array,
        tokens: jax.Array,
        positions: TokenPositions,
        *,
        dtype: DTypeLike,
        remat: Remat = "none",
        method: AttentionMethod = AttentionMethod(),  # noqa: B008 - frozen
    ) -> tuple[jax.Array, RouterStats | None]:
        """Hidden states `[B, T, D]` from which the output head predicts the token after the next one (MTP).

        The state of a sequence's last token is computed with token 0 as the next one, and has no meaning.

        Args:
            hidden: the output of `__call__` with the same other arguments, `[B, T, D]`.
            tokens: see `__call__`, as are the arguments below.
            positions: of the tokens.
            dtype: of the residual stream.
            remat: rematerialization policy.
            method: how attention is computed.

        Returns:
            The states after the MTP layer's final norm, and the statistics of its router.
        """
        assert self.mtp is not None
        state, graphdef = nnx.state(self.mtp), nnx.graphdef(self.mtp)

        def after(x: jax.Array) -> jax.Array:
            return jnp.pad(x[:, 1:], ((0, 0), (0, 1)))

        has_next = (after(positions.segment_ids) == positions.segment_ids) & (
            after(positions.branch_ids) == positions.branch_ids
        )
        following = self.embed(jnp.where(has_next, after(tokens), 0), dtype)  # [B, T, D]
        following = constrain(following, "batch", "length", "activation_embed")

        def run(state: nnx.State, *given: Any) -> tuple[jax.Array, RouterStats | None]:
            return nnx.merge(graphdef, state)(*given)

        return with_remat(run, remat)(state, hidden, following, context(self.config, positions, None, method))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits `[..., V]` of hidden states `[..., D]`, float32, not tiled: for few tokens."""
        head = self.head().astype(hidden.dtype)
        logits = jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32)
        cap = self.config.logit_soft_cap
        return logits if cap is None else apply_soft_cap(logits, cap)

    def head(self) -> jax.Array:
        """The output head `[V, D]`, the embedding's table if tied, in its own dtype; logits are `hidden @ head.T`."""
        return self.embed.embedding[...] if self.lm_head is None else self.lm_head.kernel[...]


def _stack(build: Callable[[jax.Array], LayerGroup], key: jax.Array, periods: int) -> LayerGroup:
    """One LayerGroup whose Variables stack those of `periods` groups, each built from a key of its own."""
    graphdefs = []

    def one(key: jax.Array) -> nnx.State:
        graphdef, state = nnx.split(build(key))
        graphdefs.append(graphdef)  # static, so it may leave the trace
        return state

    state = jax.vmap(one)(jax.random.split(key, periods))
    flat = nnx.to_flat_state(state)
    for _, variable in flat:
        axes = variable.get_metadata().get("axes") or (None,) * (variable.get_value().ndim - 1)
        variable.set_metadata(axes=("layers", *axes))
    return nnx.merge(graphdefs[-1], nnx.from_flat_state(flat))


def _run_stack(
    layers: LayerGroup, x: jax.Array, context: Context, past: LayerCaches | None, remat: Remat, return_kv: bool
) -> tuple[jax.Array, LayerCaches | None, RouterStats | None]:
    """Runs the periods as a scan over their weights, so that compile time does not grow with depth."""
    run = _group_runner(layers, remat, return_kv)

    def step(x: jax.Array, each: tuple[nnx.State, LayerCaches | None, jax.Array | None]) -> tuple[jax.Array, Any]:
        state, past, number = each
        with at_layer(number):
            x, *others = run(shard_weights(state, "layers"), x, context, past)
        return x, others

    # The cache is only read here; `append` writes the new tokens of all layers at once, in place.
    state = nnx.state(layers)
    count = len(jax.tree.leaves(state)[0])
    x, (caches, stats) = jax.lax.scan(step, x, (state, past, layer_numbers(count)))
    return x, caches, jax.tree.map(lambda sums: jnp.sum(sums, axis=0), stats)


def _run_in_stages(layers: LayerGroup, x: jax.Array, context: Context, stages: Stages, remat: Remat) -> jax.Array:
    state, run = nnx.state(layers), _group_runner(layers, remat, return_kv=False)

    def stack(state: nnx.State, x: jax.Array, context: Context) -> jax.Array:
        def step(x: jax.Array, state: nnx.State) -> tuple[jax.Array, None]:
            return run(shard_weights(state, "layers"), x, context, None)[0], None

        return jax.lax.scan(step, x, state)[0]

    return run_stages(stack, state, x, context, stages)


def _group_runner(
    period: LayerGroup, remat: Remat, return_kv: bool
) -> Callable[..., tuple[jax.Array, LayerCaches | None, RouterStats | None]]:
    graphdef = nnx.graphdef(period)

    def run(state: nnx.State, x: jax.Array, context: Context, past: LayerCaches | None) -> Any:
        return nnx.merge(graphdef, state)(x, context, past, return_kv=return_kv)

    # A scan's body is not merged with its own recomputation, so the barrier against that is not needed; the tail is
    # outside the scan, where the barrier costs little.
    return with_remat(run, remat)


def add_router_stats(one: RouterStats | None, other: RouterStats | None) -> RouterStats | None:
    """The sum of the statistics of several routers; None without any."""
    if one is None or other is None:
        return one if other is None else other
    return jax.tree.map(jnp.add, one, other)


def _newest(new: KV, context: Context) -> KV:
    """Keys and values of the tokens within the window of local layers."""
    assert context.local_view is not None  # there is a local layer
    window = context.local_view.method.window
    assert window is not None  # it is local
    return jax.tree.map(lambda part: part[:, :, -window:], new)
