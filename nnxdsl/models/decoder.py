"""The decoder: a scan over a repeated group of layers, between prefix and suffix layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.attention.context import Context, context
from nnxdsl.models.attention.dot_product import apply_soft_cap
from nnxdsl.models.attention.indexer import SELECTIONS, IndexerStats
from nnxdsl.models.attention.kernels import find_kernel
from nnxdsl.models.attention.kv_cache import (
    KV,
    Cache,
    CacheUpdate,
    ReturnKV,
    SharedKV,
    empty_kv,
    newest,
    shared_past,
    to_cache_dtype,
)
from nnxdsl.models.attention.positions import TokenPositions, positions_right_padded
from nnxdsl.models.attention.row_layout import AttentionMethod
from nnxdsl.models.block import Block, LayerStats
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.layer_pattern import LayerKind
from nnxdsl.models.dropout import LEAD, TAIL, at_layer, layer_numbers, stamp
from nnxdsl.models.layers.embedding import Embedding, Head, Score
from nnxdsl.models.layers.norm import norm_of
from nnxdsl.models.layers.per_layer import LayerEmbedding
from nnxdsl.models.logical_axes import constrain, shard_weights
from nnxdsl.models.moe.router import RouterStats, join_experts
from nnxdsl.models.mtp import Predictor
from nnxdsl.models.pipeline import Stages, run_stages
from nnxdsl.models.remat import Remat, with_remat

StatsT = TypeVar("StatsT", RouterStats, IndexerStats)


class LayerGroup(nnx.Module):
    """Consecutive layers: the body of the decoder's scan; adapters are applied to it before it is stacked.

    Args:
        config: the decoder's config.
        kinds: of its layers, in their order.
        dense: whether each layer has the gated MLP, whatever `config.feed_forward` is; empty for none.
        shares_kv: whether its layers are those of `config.layers.kv_shared`.
        rngs: draws the weights.
        param_dtype: dtype of the weights.
    """

    def __init__(
        self,
        config: DecoderConfig,
        kinds: Sequence[LayerKind],
        dense: Sequence[bool] = (),
        *,
        shares_kv: bool = False,
        rngs: nnx.Rngs,
        param_dtype: DTypeLike,
    ) -> None:
        self.shares_kv = shares_kv
        self.shares_index = "shared_index" in kinds
        self.gives_kv: tuple[LayerKind, ...] = () if shares_kv else tuple(dict.fromkeys(config.layers.kv_shared))
        self.blocks = nnx.List(
            [
                Block(config, kind=kind, dense=is_dense, shares_kv=shares_kv, rngs=rngs, param_dtype=param_dtype)
                for kind, is_dense in zip(kinds, dense or (False,) * len(kinds), strict=True)
            ]
        )

    def __call__(
        self, x: jax.Array, context: Context, past: Sequence[Any] | None = None, *, return_kv: ReturnKV = False
    ) -> GroupOutput:
        """The layers' output and what else they give.

        Args:
            x: the residual stream, `[B, T, D]`.
            context: the positions and masks of this call.
            past: the caches of these layers, or None.
            return_kv: see `ReturnKV`; of layers with a window those within it.
        """
        news: list[Any] = []
        routing, indexing, embeddings, last, max_logits = None, None, context.per_layer, {}, []
        replayed, routed = context.routed_experts, list[tuple[int, jax.Array | None]]()
        # What one layer or one kind of layers reads is no input of the others.
        shared = (context.shared_kv or {}) if self.shares_kv else {}
        context = context._replace(per_layer=None, shared_kv=None, routed_experts=None)
        selected = context.views  # those of a layer that shares its tokens have the selection of the last that selects
        for number, (block, run) in enumerate(zip(self.blocks, _runners(self.blocks), strict=True)):
            cached = None if past is None else past[number]
            vectors, experts = (None if part is None else part[:, :, number] for part in (embeddings, replayed))
            seen = context._replace(views=selected) if block.kind == "shared_index" else context
            with SELECTIONS.recording(self.shares_index):
                x, new, stats = run(x, seen, shared.get(block.kind, cached), vectors, experts)
            if stats.selection is not None:
                selected = context.views | {"shared_index": stats.selection}
            routing, indexing = add_stats(routing, stats.router), add_stats(indexing, stats.indexer)
            max_logits.append(stats.max_logits)
            routed.append((1, None if stats.routed_experts is None else stats.routed_experts[None]))
            if block.kind in self.gives_kv:
                last[block.kind] = new
            window = context.views[block.kind].method.window
            news.append(to_cache_dtype(newest(new, window), return_kv) if return_kv else new)
        caches = tuple(news) if return_kv and not self.shares_kv else None
        return GroupOutput(x, caches, routing, last, tuple(max_logits), indexing, join_experts(routed))


class GroupOutput(NamedTuple):
    """The output of a group of layers.

    Attributes:
        x: the residual stream, `[B, T, D]`.
        caches: the update of the cache of each layer; None unless asked for.
        router_stats: the sum over the layers; None without experts.
        last_kv: the keys and values of the last layer of each kind that later layers share; empty where none do.
        max_logits: of each block, the largest attention score of each query head, `[N]`, in a stack `[periods, N]`;
            None where these are not recorded.
        indexer_stats: the sum over the layers; None without indexers, and where these are not recorded.
        routed_experts: of the tokens, `[layers, B, T, k]` int16, -1 in layers without experts; None where no layer has
            any, and where they are not recorded.
    """

    x: jax.Array
    caches: tuple[Any, ...] | None
    router_stats: RouterStats | None
    last_kv: dict[LayerKind, KV]
    max_logits: tuple[jax.Array | None, ...]
    indexer_stats: IndexerStats | None = None
    routed_experts: jax.Array | None = None


def _runners(blocks: Sequence[Block]) -> list[Callable[..., Any]]:
    """A callable for each layer; layers with equal graphdefs are traced and lowered once.

    qwix's layers differ in their paths, so each is called as it is.
    """
    parts = [nnx.split(block) for block in blocks]
    times = Counter(graphdef for graphdef, _ in parts)

    def run(graphdef: nnx.GraphDef, state: nnx.State, *inputs: Any) -> Any:
        return nnx.merge(graphdef, state)(*inputs)

    shared = {graphdef: jax.jit(partial(run, graphdef)) for graphdef, count in times.items() if count > 1}
    return [
        partial(shared[graphdef], state) if graphdef in shared else block
        for block, (graphdef, state) in zip(blocks, parts, strict=True)
    ]


def example_inputs(config: DecoderConfig, dtype: DTypeLike = jnp.float32) -> tuple[jax.Array, Context]:
    """The smallest inputs of a LayerGroup, with which qwix traces it."""
    positions = positions_right_padded(jnp.ones((1,), jnp.int32), 1)
    view = context(config, positions)
    if config.per_layer_embedding is not None:
        vectors = jnp.zeros((1, 1, config.layers.num_layers, config.per_layer_embedding.dim), dtype)
        view = view._replace(per_layer=vectors)
    if config.layers.num_kv_shared_layers:
        kinds = dict.fromkeys(config.layers.kv_shared)
        shared = {kind: SharedKV(None, empty_kv(config.of(kind), 1, 1, dtype)) for kind in kinds}
        view = view._replace(shared_kv=shared)
    return jnp.zeros((1, 1, config.embed_dim), dtype), view


class DecoderOutput(NamedTuple):
    """The output of a decoder.

    Attributes:
        hidden: states after the final norm, `[B, T, D]`.
        cache_update: what a cache takes of the tokens; None without `return_kv`.
        router_stats: the sum over all layers; None without experts and under pipeline parallelism.
        max_logits: the largest attention score of each query head, `[N]`, of stacked blocks `[periods, N]`, by the path
            of the block; empty outside of `recording_max_logits`.
        indexer_stats: the sum over all layers; None without indexers, outside of `INDEXER_STATS.recording`, and under
            pipeline parallelism.
        routed_experts: of all layers and tokens, `[B, T, layers, k]` int16, -1 in layers without experts; None outside
            of `ROUTED_EXPERTS.recording`.
    """

    hidden: jax.Array
    cache_update: CacheUpdate | None
    router_stats: RouterStats | None
    max_logits: dict[str, jax.Array]
    indexer_stats: IndexerStats | None = None
    routed_experts: jax.Array | None = None


class Decoder(nnx.Module):
    """A decoder, from tokens to final hidden states.

    Layers before the first period are `lead.blocks`; of those after them layer i is `layers.blocks.{i % period}` at
    stack position `i // period`; the layers after the last whole period are `tail.blocks`. Those of
    `config.layers.kv_shared`, which come last, are `kv_sharing.blocks` in the same way, of `kv_shared_pattern`.

    Args:
        config: the decoder's config.
        rngs: draws the weights from its `params` stream.
        param_dtype: dtype of all weights.
        adapt: applied to a LayerGroup before it is stacked; may return another class with more Variables (as qwix
            does). It is traced under `vmap`, so arrays that it draws from a fixed seed are the same for each period of
            the stack.

    Attributes:
        embed: the embedding.
        lead: a LayerGroup of the layers before the stack; None without any.
        layers: a LayerGroup whose Variables have a leading axis "layers" of `periods`; None without periods.
        tail: a LayerGroup of the remaining layers; None without any.
        kv_sharing: a LayerGroup as `layers`, of `kv_shared_periods`; None without such layers.
        per_layer: the embeddings of each layer; None without `config.per_layer_embedding`.
        norm: the final norm.
        lm_head: the output head; None where it is tied to the embedding, or `score` is in its place.
        score: the head of a network with `config.num_labels`; else None.
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
        def period(
            kinds: Sequence[LayerKind], dense: Sequence[bool], rngs: nnx.Rngs, *, shares_kv: bool = False
        ) -> LayerGroup:
            return adapt(LayerGroup(config, kinds, dense, shares_kv=shares_kv, rngs=rngs, param_dtype=param_dtype))

        self.config = config
        vocab, embed = config.vocab_size, config.embed_dim
        factor, norm_eps = config.embedding.factor(embed), config.norm.eps if config.embedding.norm else None
        self.embed = Embedding(vocab, embed, factor=factor, norm_eps=norm_eps, rngs=rngs, param_dtype=param_dtype)
        layers = config.layers
        flags, tail, first = layers.dense_pattern, layers.suffix, len(layers.prefix)
        self.lead = period(layers.prefix, layers.dense[:first], nnx.Rngs(params=rngs.params())) if first else None
        self.layers = (
            _stack(lambda key: period(layers.pattern, flags, nnx.Rngs(params=key)), rngs.params(), layers.periods)
            if layers.periods
            else None
        )
        self.tail = period(tail, flags[: len(tail)], nnx.Rngs(params=rngs.params())) if tail else None
        self.kv_sharing = (
            _stack(
                lambda key: period(layers.kv_shared_pattern, (), nnx.Rngs(params=key), shares_kv=True),
                rngs.params(),
                layers.kv_shared_periods,
            )
            if layers.num_kv_shared_layers
            else None
        )
        self.per_layer = (
            LayerEmbedding(config, rngs=rngs, param_dtype=param_dtype) if config.per_layer_embedding else None
        )
        self.norm = norm_of(config, embed, "norm", param_dtype, kind=config.norm.final_scale)
        self.lm_head = Head(vocab, embed, rngs=rngs, param_dtype=param_dtype) if config.has_lm_head else None
        labels = config.head.num_labels
        self.score = None if labels is None else Score(labels, embed, rngs=rngs, param_dtype=param_dtype)
        self.mtp = Predictor(config, rngs=rngs, param_dtype=param_dtype) if config.mtp_layers else None

    def __call__(
        self,
        tokens: jax.Array,
        positions: TokenPositions,
        *,
        cache: Cache | None = None,
        return_kv: ReturnKV = False,
        dtype: DTypeLike,
        remat: Remat = "none",
        stages: Stages | None = None,
        method: AttentionMethod = AttentionMethod(),  # noqa: B008 - frozen
        routed_experts: jax.Array | None = None,
    ) -> DecoderOutput:
        """Hidden states after the final norm.

        Args:
            tokens: `[B, T]` int32.
            positions: of the tokens, each `[B, T]`.
            cache: tokens to attend to as well. A row may begin with padding, but have none between its tokens: local
                layers count tokens.
            return_kv: also return the update of a cache, see `ReturnKV`.
            dtype: of the residual stream and the matrix products; norms, softmax and RoPE are float32.
            remat: rematerialization policy of each period of layers; see `models.remat`.
            stages: divides the stack of periods into pipeline stages; not with a cache.
            method: how attention is computed; its window is that of each kind of layer. With a cache it is "dense".
            routed_experts: experts that routers replay, as in `DecoderOutput`; below 0 for those that they select.

        Returns:
            Hidden states in `dtype`, and with `return_kv` the update of a cache.

        Raises:
            ValueError: the kernel needs the layout of the row, and `method` has none or one of another length.
        """
        length = tokens.shape[1]
        row = method.row if cache is None else None
        if not find_kernel(method.kernel).uses_mask and (row is None or row.size != length):
            raise ValueError(f"{method.kernel} attention needs the layout of {length} slots, got {row}")
        shared = context(self.config, positions, cache, method)
        stamp(positions)
        x = constrain(self.embed(tokens, dtype), "batch", "length", "activation_embed")  # [B, T, D]
        vectors = None if self.per_layer is None else self.per_layer(tokens, x)  # [B, T, L, P]

        def of_layers(first: int, count: int) -> Context:
            parts = (vectors, routed_experts)
            sliced = (p if p is None else jax.lax.slice_in_dim(p, first, first + count, axis=2) for p in parts)
            return shared._replace(**dict(zip(("per_layer", "routed_experts"), sliced, strict=True)))

        config, layers, lead = self.config, self.config.layers, len(self.config.layers.prefix)
        past = None if cache is None else cache.pasts()

        def own_past(first: int, count: int) -> tuple[Any, ...] | None:
            return None if past is None else past[first : first + count]

        updates: list[Any] = []
        first = routing = last = indexing = None
        last_kv: dict[LayerKind, KV] = {}
        max_logits: dict[str, jax.Array] = {}
        experts = list[tuple[int, jax.Array | None]]()  # of groups of layers

        def note(group: str, logit_maxima: tuple[jax.Array | None, ...]) -> None:
            named = ((f"{group}.blocks.{number}", part) for number, part in enumerate(logit_maxima))
            max_logits.update((path, part) for path, part in named if part is not None)

        if self.lead is not None:
            with at_layer(LEAD):
                run = _group_runner(self.lead, remat, return_kv)
                per_layer, cached = of_layers(0, lead), own_past(0, lead)
                x, new, first, _, maxima, indexing, routed = run(nnx.state(self.lead), x, per_layer, cached)
                updates += new or ()
                experts.append((lead, routed))
                note("lead", maxima)
        if self.layers is not None and stages is not None and cache is None and not return_kv:
            x = _run_in_stages(self.layers, x, shared, stages, remat)
        elif self.layers is not None:
            scanned = lead, layers.periods * layers.period
            per_layer = of_layers(*scanned)
            rows, length = tokens.shape
            for kind in self.layers.gives_kv:
                if kind in layers.pattern:
                    last_kv[kind] = empty_kv(config.of(kind), rows, length, dtype)
            out = _run_stack(self.layers, x, per_layer, own_past(*scanned), remat, return_kv, last_kv)
            x, new, routing, last_kv, maxima, more, routed = out
            updates += new or ()
            experts.append((scanned[1], routed))
            indexing = add_stats(indexing, more)
            note("layers", maxima)
        if self.tail is not None:
            with at_layer(TAIL):
                suffix = layers.own_layers - len(layers.suffix), len(layers.suffix)
                run = _group_runner(self.tail, remat, return_kv)
                x, new, last, tail_kv, maxima, more, routed = run(
                    nnx.state(self.tail), x, of_layers(*suffix), own_past(*suffix)
                )
                updates += new or ()
                experts.append((suffix[1], routed))
                indexing = add_stats(indexing, more)
                note("tail", maxima)
                last_kv |= tail_kv
        if self.kv_sharing is not None:
            shares = {} if cache is None else shared_past(config, cache)
            per_layer = of_layers(layers.own_layers, len(layers.kv_shared))._replace(
                shared_kv={kind: SharedKV(shares.get(kind), new) for kind, new in last_kv.items()}
            )
            no_caches = None if cache is None else (None,) * len(layers.kv_shared)
            options = remat, False, {}, "kv_sharing", layers.periods
            x, *_, routed = _run_stack(self.kv_sharing, x, per_layer, no_caches, *options)
            experts.append((len(layers.kv_shared), routed))
        x = self.norm(x)
        if self.config.head.logits_scaling != 1.0 and self.score is None:
            x = x / self.config.head.logits_scaling  # the head is linear
        hidden = constrain(x, "batch", "length", "activation_embed")
        update = CacheUpdate(tuple(updates), positions) if return_kv else None
        routed = join_experts(experts)
        routed = None if routed is None else jnp.transpose(routed, (1, 2, 0, 3))
        return DecoderOutput(hidden, update, add_stats(first, add_stats(routing, last)), max_logits, indexing, routed)

    def mtp_hidden(
        self,
        hidden: jax.Array,
        tokens: jax.Array,
        positions: TokenPositions,
        *,
        dtype: DTypeLike,
        remat: Remat = "none",
        method: AttentionMethod = AttentionMethod(),  # noqa: B008 - frozen
    ) -> tuple[jax.Array, LayerStats]:
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
            The states after the MTP layer's final norm, and the layer's statistics.
        """

        def after(x: jax.Array) -> jax.Array:
            return jnp.pad(x[:, 1:], ((0, 0), (0, 1)))

        has_next = (after(positions.segment_ids) == positions.segment_ids) & (
            after(positions.branch_ids) == positions.branch_ids
        )
        options = {"dtype": dtype, "remat": remat, "method": method}
        states, stats, _ = self.mtp_states(hidden, jnp.where(has_next, after(tokens), 0), positions, **options)
        return states, stats

    def mtp_states(
        self,
        hidden: jax.Array,
        following: jax.Array,
        positions: TokenPositions,
        *,
        cache: Cache | None = None,
        return_kv: ReturnKV = False,
        dtype: DTypeLike,
        remat: Remat = "none",
        method: AttentionMethod = AttentionMethod(),  # noqa: B008 - frozen
    ) -> tuple[jax.Array, LayerStats, CacheUpdate | None]:
        """As `mtp_hidden`, of tokens that are followed by any others, with a cache of this layer.

        Args:
            hidden: states `[B, T, D]` after the decoder's final norm; to predict still further, those of this method.
            following: the token that follows each one, `[B, T]` int32.
            positions: of the tokens, `[B, T]`.
            cache: tokens to attend to as well, see `mtp_cache`.
            return_kv: also return the update of a cache, see `ReturnKV`.
            dtype: of the residual stream.
            remat: rematerialization policy.
            method: how attention is computed; with a cache it is "dense".

        Returns:
            The states after the layer's final norm `[B, T, D]`, the layer's statistics, and the update of a cache.
        """
        assert self.mtp is not None
        state, graphdef = nnx.state(self.mtp), nnx.graphdef(self.mtp)
        vectors = constrain(self.embed(following, dtype), "batch", "length", "activation_embed")  # [B, T, D]
        past = None if cache is None else cache.layers[0]

        def run(state: nnx.State, *inputs: Any) -> tuple[jax.Array, LayerStats, Any]:
            states, stats, new = nnx.merge(graphdef, state)(*inputs)
            return states, stats, to_cache_dtype(new, return_kv) if return_kv else None

        shared = context(self.config, positions, cache, method)
        states, stats, new = with_remat(run, remat)(state, hidden, vectors, shared, past)
        return states, stats, None if new is None else CacheUpdate((new,), positions)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits `[..., V]` of hidden states `[..., D]`, float32, not tiled: for few tokens."""
        head, rows = self.head().astype(hidden.dtype), hidden.reshape(-1, hidden.shape[-1])
        # The large matrix first: XLA:CPU takes three times as long where the right one is transposed. The barrier keeps
        # it from turning the product around.
        logits = jax.lax.optimization_barrier(jnp.einsum("vd,md->vm", head, rows, preferred_element_type=jnp.float32))
        logits = logits.T.reshape(*hidden.shape[:-1], -1)
        cap = self.config.head.soft_cap if self.score is None else None
        return logits if cap is None else apply_soft_cap(logits, cap)

    def head(self) -> jax.Array:
        """The output head `[V, D]`, the embedding's table if tied, in its own dtype; logits are `hidden @ head.T`.

        With `config.num_labels` it is the rows of `score`, one for each label.
        """
        if self.score is not None:
            return self.score.kernel[...]
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
    layers: LayerGroup,
    x: jax.Array,
    context: Context,
    past: Sequence[Any] | None,
    remat: Remat,
    return_kv: ReturnKV,
    last_kv: dict[LayerKind, KV],
    path: str = "layers",
    first: int = 0,
) -> GroupOutput:
    """Runs the periods as a scan over their weights, so that compile time does not grow with depth.

    With a cache, or with weights that `unstacked` has taken apart, the periods are not scanned: each reads its own
    arrays in place, where a scan would copy them out of their stacks at every token.

    Args:
        layers: the stack.
        x: the residual stream, `[B, T, D]`.
        context: the positions and masks of this call, and the layers' vectors of the tokens.
        past: the cache of each layer, or None.
        remat: rematerialization policy.
        return_kv: also return the update of the caches.
        last_kv: zeros of the shapes of the `last_kv` of each period.
        path: of the stack in the decoder.
        first: the number of its first period, for dropout.
    """
    run = _group_runner(layers, remat, return_kv)
    state = nnx.state(layers)
    count, is_unstacked = _periods(state)
    by_layer = {"per_layer": context.per_layer, "routed_experts": context.routed_experts}  # [B, T, layers, P]
    by_layer = jax.tree.map(lambda p: jnp.moveaxis(p.reshape(*p.shape[:2], count, -1, p.shape[-1]), 2, 0), by_layer)

    def step(carry: tuple[jax.Array, dict[LayerKind, KV]], each: Any) -> tuple[Any, Any]:
        state, past, number, inputs = each
        with at_layer(number):
            x, caches, routing, last_kv, max_logits, indexing, routed = run(
                shard_weights(state, path), carry[0], context._replace(**inputs), past
            )
        return (x, last_kv), (caches, (routing, indexing), (max_logits, routed))

    # They are carried from one period to the next: only those of the last one are read.
    axes = "batch", "activation_kv_heads", "length", None
    zeros: dict[LayerKind, KV] = jax.tree.map(lambda part: constrain(part, *axes), last_kv)
    numbers, carry = layer_numbers(count, first), (x, zeros)
    if past is None and not is_unstacked:
        carry, (stacked, stats, per_period) = jax.lax.scan(step, carry, (state, None, numbers, by_layer))
        caches = [jax.tree.map(lambda part, row=index: part[row], stacked) for index in range(count)]
    else:
        size, outputs = len(layers.blocks), []
        for index in range(count):
            layer_inputs = None if past is None else past[index * size : (index + 1) * size]
            state_at, number, inputs = (
                jax.tree.map(lambda part, row=index: part[row], parts, is_leaf=lambda part: type(part) is tuple)
                for parts in (state, numbers, by_layer)
            )
            carry, out = step(carry, (state_at, layer_inputs, number, inputs))
            outputs.append(out)
        caches, stats, per_period = zip(*outputs, strict=True)
        stats, per_period = (jax.tree.map(lambda *parts: jnp.stack(parts), *parts) for parts in (stats, per_period))
    (x, last_kv), (routing, indexing) = carry, jax.tree.map(lambda sums: jnp.sum(sums, axis=0), stats)
    update = tuple(new for period in caches for new in period) if return_kv and not layers.shares_kv else None
    max_logits, routed = per_period
    routed = None if routed is None else routed.reshape(-1, *routed.shape[2:])
    return GroupOutput(x, update, routing, last_kv, max_logits, indexing, routed)


def _periods(state: nnx.State) -> tuple[int, bool]:
    """The number of periods of a stack, and whether its arrays are tuples with one for each period."""
    first = next(iter(nnx.to_flat_state(state)))[1].get_value()
    return len(first), isinstance(first, tuple)


def _run_in_stages(layers: LayerGroup, x: jax.Array, context: Context, stages: Stages, remat: Remat) -> jax.Array:
    state, run = nnx.state(layers), _group_runner(layers, remat, return_kv=False)

    def stack(state: nnx.State, x: jax.Array, context: Context) -> jax.Array:
        def step(x: jax.Array, state: nnx.State) -> tuple[jax.Array, None]:
            return run(shard_weights(state, "layers"), x, context, None).x, None

        return jax.lax.scan(step, x, state)[0]

    return run_stages(stack, state, x, context, stages)


def _group_runner(period: LayerGroup, remat: Remat, return_kv: ReturnKV) -> Callable[..., GroupOutput]:
    graphdef = nnx.graphdef(period)

    def run(state: nnx.State, x: jax.Array, context: Context, past: Sequence[Any] | None) -> Any:
        return nnx.merge(graphdef, state)(x, context, past, return_kv=return_kv)

    # A scan's body is not merged with its own recomputation, so the barrier against that is not needed; the tail is
    # outside the scan, where the barrier costs little.
    return with_remat(run, remat)


def add_stats(one: StatsT | None, other: StatsT | None) -> StatsT | None:
    """The sum of the statistics of several routers or indexers; None without any."""
    if one is None or other is None:
        return one if other is None else other
    return jax.tree.map(jnp.add, one, other)
