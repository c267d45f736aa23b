"""The lightning indexer of DeepSeek sparse attention (DSA): which tokens are attended to, and what it learns from.

DeepSeek-V3.2 (arXiv:2512.02556, section 2.1). The index score of query t and key s is

    I(t, s) = sum over heads j of w(t, j) relu(q(t, j) . k(s)),

and t attends to the `topk` tokens of the largest scores among those that the attention mask allows. The indexer loss is
the mean over tokens of KL(p(t) || softmax(I(t))), where p is the distribution of the layer's own attention, the mean
over its heads: over the selected tokens, or in the dense warm-up over all that the mask allows. Inputs of the indexer
and p carry no gradient, and the selection has none, so the loss trains the indexer alone, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.models.attention.blockwise import blocks_of
from nnxdsl.models.attention.dot_product import MASK_VALUE
from nnxdsl.models.attention.mask import attention_mask
from nnxdsl.models.attention.positions import TokenPositions
from nnxdsl.models.attention.row_layout import Block, Range
from nnxdsl.models.attention.view import View
from nnxdsl.models.config.mla import MLAConfig
from nnxdsl.models.layers.norm import LayerNorm
from nnxdsl.models.layers.rope import apply_rotary, halves_of_pairs
from nnxdsl.models.logical_axes import constrain
from nnxdsl.models.recording import Recorder

KEY_NORM_EPS = 1e-6


class IndexerStats(NamedTuple):
    """Sums over real tokens; those of several layers, devices and rows are added up.

    Attributes:
        divergence: float32, the KL divergences of the indexer from attention, in nats.
        tokens: float32, the number of tokens; over L layers with an indexer each token counts L times.
    """

    divergence: jax.Array
    tokens: jax.Array


INDEXER_STATS: Recorder[IndexerStats] = Recorder("indexer_stats")
SELECTIONS: Recorder[View] = Recorder("selections")
"""The view of a layer with an indexer, in which it attends to what it has selected; later layers may share it."""


class Index(NamedTuple):
    """The indexer's queries, keys and weights of a call's tokens.

    Attributes:
        query: `[B, T, heads, D]`.
        weight: `[B, T, heads]` float32, with all constant factors.
        key: `[B, 1, T, D]`, as a cache stores it.
    """

    query: jax.Array
    weight: jax.Array
    key: jax.Array


class Indexer(nnx.Module):
    """Scores pairs of tokens.

    Its weights have other names than `kernel`, so adapters and quantization leave them as they are: rounding would
    select other tokens.

    Args:
        embed_dim: width of the residual stream.
        config: of the latent attention; it has an indexer.
        rngs: draws the weights, normal with variance 1 / inputs.
        param_dtype: dtype of the weights.
    """

    def __init__(self, embed_dim: int, config: MLAConfig, *, rngs: nnx.Rngs, param_dtype: DTypeLike) -> None:
        assert config.indexer is not None  # so is this module built
        assert config.q_lora_rank is not None

        def weight(width: int, out: int, axis: str) -> nnx.Param:
            values = jax.random.normal(rngs.params(), (width, out), jnp.float32) * width**-0.5
            # Every device scores its tokens with all heads, whose scores are added up: the columns are not sharded.
            return nnx.Param(values.astype(param_dtype), axes=(axis, None))

        indexer = config.indexer
        self.config = indexer
        self.query = weight(config.q_lora_rank, indexer.num_heads * indexer.head_dim, "latent")
        self.key = weight(embed_dim, indexer.head_dim, "embed")
        self.key_norm = LayerNorm(indexer.head_dim, axis="norm", eps=KEY_NORM_EPS, param_dtype=param_dtype)
        self.weights = weight(embed_dim, indexer.num_heads, "embed")

    def __call__(self, x: jax.Array, compressed: jax.Array, view: View) -> Index:
        """Queries, keys and weights of tokens; no gradient goes to the inputs.

        Args:
            x: the normed residual stream, `[B, T, D]` or its rows `[B T, D]`.
            compressed: the compressed queries of latent attention after their norm, with the same leading axes.
            view: of this call; its `rope` has as many columns as that of latent attention.
        """
        x, compressed = jax.lax.stop_gradient((x, compressed))
        split = (*view.positions.positions.shape, -1)
        query = jnp.dot(compressed, self.query[...].astype(x.dtype)).reshape(*split[:2], -1, self.config.head_dim)
        query = constrain(query, "batch", "length", None, None)
        key = self.key_norm(jnp.dot(x, self.key[...].astype(x.dtype))).reshape(split)[:, :, None]  # [B, T, 1, D]
        # By default TPUs and GPUs round float32 products, which changes the choice between nearly equal scores.
        wide = (x.astype(jnp.float32), self.weights[...].astype(jnp.float32))
        weight = jnp.dot(*wide, precision="highest").reshape(split)
        weight = weight * (self.config.num_heads * self.config.head_dim) ** -0.5
        key = jnp.swapaxes(self._rotate(key, view), 1, 2)  # [B, 1, T, D]
        return Index(self._rotate(query, view), constrain(weight, "batch", "length", None), key)

    def _rotate(self, x: jax.Array, view: View) -> jax.Array:
        width = 2 * view.rope[0].shape[-1]
        if self.config.rope_interleave:
            x = jnp.concatenate([halves_of_pairs(x[..., :width]), x[..., width:]], axis=-1)
        return apply_rotary(x, view.rope)


def select_tokens(
    index: Index, view: View, topk: int, *, selects: bool, cached: jax.Array | None = None
) -> tuple[View, list[jax.Array]]:
    """The view in which each token attends to those that the indexer selects, and the index scores.

    Args:
        index: of this call's tokens.
        view: of this call.
        topk: how many tokens each attends to, at most.
        selects: whether attention is to these alone.
        cached: keys of the tokens in the cache `[B, 1, S, D]`; None without a cache.

    Returns:
        (the view, for each block of queries the scores `[B, t, s]` float32 of all its keys). No scores are computed
        where nothing reads them: where all tokens are selected, and no loss is recorded.
    """
    slots = index.key.shape[2] + (0 if cached is None else cached.shape[2])
    selects = selects and slots > topk
    if not selects and (cached is not None or not INDEXER_STATS.is_on):
        return view, []
    blocks = _blocks(view, index.query.shape[1])
    scores = [_scores(index, block, cached) for block in blocks]
    if not selects:
        return view, scores
    masks, detached = _masks(view, blocks), jax.lax.stop_gradient(scores)
    seen = tuple(largest(row_scores, mask, topk) for row_scores, mask in zip(detached, masks, strict=True))
    if view.mask is not None:
        return view._replace(mask=seen[0]), scores
    return view._replace(selected=seen), scores


def largest(scores: jax.Array, allowed: jax.Array, count: int) -> jax.Array:
    """The largest scores of each query, among equal ones the first.

    Args:
        scores: `[B, t, s]`.
        allowed: `[B, t, s]` bool, the keys to choose among; all of them where these are not more than `count`.
        count: how many.

    Returns:
        `[B, t, s]` bool. It is computed from the smallest score that is chosen, elementwise: a scatter of indices would
        not be sharded.
    """
    if scores.shape[-1] <= count:
        return allowed
    scores = jnp.where(allowed, scores, -jnp.inf)
    last = jax.lax.top_k(scores, count)[0][..., -1:]  # -inf where fewer are allowed
    greater, equal = scores > last, (scores == last) & allowed
    room = count - jnp.sum(greater, axis=-1, keepdims=True)
    return greater | (equal & (jnp.cumsum(equal, axis=-1) <= room))


def record_indexer_loss(
    query: jax.Array, key: jax.Array, view: View, scores: Sequence[jax.Array], scale: float
) -> None:
    """Records the divergence of the index scores from the layer's attention, if it is read.

    Attention's scores are computed a second time, forward only, whatever kernel computes attention.

    Args:
        query: of attention, `[B, T, N, H]`.
        key: `[B, T, N, H]`.
        view: in which attention is computed: after the selection.
        scores: the index scores of each block, see `select_tokens`.
        scale: factor of attention's scores.
    """
    INDEXER_STATS.record(lambda: indexer_stats(query, key, view, scores, scale))


def indexer_stats(
    query: jax.Array, key: jax.Array, view: View, scores: Sequence[jax.Array], scale: float
) -> IndexerStats:
    """The divergence of the indexer from attention; arguments as of `record_indexer_loss`."""
    query, key = jax.lax.stop_gradient((query, key))
    blocks = _blocks(view, query.shape[1])
    seen = _masks(view, blocks) if view.selected is None else view.selected
    is_real = view.positions.segment_ids > 0
    total = jnp.zeros((), jnp.float32)
    # Of each block only the inputs are saved for the backward pass: its scores are those of all heads.
    divergence = jax.checkpoint(_divergence, static_argnums=(4,))
    for block, block_scores, mask in zip(blocks, scores, seen, strict=True):
        queries, keys = _of(query, (block.queries,), 1), _of(key, block.keys, 1)
        each = divergence(queries, keys, block_scores, mask, scale)  # [B, t]
        total = total + jnp.sum(jnp.where(_of(is_real, (block.queries,), 1), each, 0.0))
    return IndexerStats(total, jnp.sum(is_real, dtype=jnp.float32))


def _divergence(query: jax.Array, key: jax.Array, scores: jax.Array, seen: jax.Array, scale: float) -> jax.Array:
    """KL(p || softmax(scores)) of each query `[B, t]`, over the keys that it sees; p is the mean over the heads."""
    attention = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32) * scale
    heads = jax.nn.softmax(jnp.where(seen[:, None], attention, MASK_VALUE), axis=-1)
    target = jnp.where(seen, jnp.mean(heads, axis=1), 0.0)  # [B, t, s]
    log_target = jnp.log(jnp.where(target > 0, target, 1.0))
    index_logps = jax.nn.log_softmax(jnp.where(seen, scores, MASK_VALUE), axis=-1)
    return jnp.sum(jnp.where(target > 0, target * (log_target - index_logps), 0.0), axis=-1)


def _scores(index: Index, block: Block, cached: jax.Array | None) -> jax.Array:
    """Index scores `[B, t, s]` of a block; those of the single heads are computed again in the backward pass."""
    query, weight = (_of(part, (block.queries,), 1) for part in (index.query, index.weight))
    keys = [_of(index.key[:, 0], block.keys, 1)]
    if cached is not None:
        keys.insert(0, cached[:, 0])
    parts = [jax.checkpoint(_weighted)(query, weight, key) for key in keys]
    return constrain(jnp.concatenate(parts, axis=-1) if cached is not None else parts[0], "batch", "length", None)


def _weighted(query: jax.Array, weight: jax.Array, key: jax.Array) -> jax.Array:
    heads = jnp.einsum("bthd,bsd->bths", query, key.astype(query.dtype), preferred_element_type=jnp.float32)
    return jnp.einsum("bth,bths->bts", weight, jax.nn.relu(heads), precision="highest")


def _blocks(view: View, length: int) -> tuple[Block, ...]:
    """The blocks of this call's queries, with their keys among its tokens: one for dense attention."""
    if view.mask is not None:
        return (Block((0, length), ((0, length),)),)
    assert view.method.row is not None  # the decoder refuses other kernels without a layout of the row
    return blocks_of(view.method.row, view.method.window, view.method.queries)


def _masks(view: View, blocks: Sequence[Block]) -> tuple[jax.Array, ...]:
    """The attention mask of each block, `[B, t, s]` bool; with a cache its slots are the first keys."""
    if view.mask is not None:
        return (view.mask,)

    def of(ranges: tuple[Range, ...]) -> TokenPositions:
        return TokenPositions(*(_of(part, ranges, 1) for part in view.positions))

    return tuple(attention_mask(of((block.queries,)), of(block.keys), view.method.window) for block in blocks)


def _of(x: jax.Array, ranges: tuple[Range, ...], axis: int) -> jax.Array:
    """Concatenates ranges of the slots of `x`."""
    if ranges == ((0, x.shape[axis]),):
        return x
    parts = [jax.lax.slice_in_dim(x, start, stop, axis=axis) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)
