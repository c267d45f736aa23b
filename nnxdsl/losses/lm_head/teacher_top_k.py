"""A teacher's top-k tokens, and the divergence of a student from them.

Both models have a distribution over `k + 1` classes: the teacher's `k` most likely tokens, and all other tokens as one.
The divergence is that of `distillation.py` over these classes. Axes have the names of `tiling.py`.
"""

# ruff: noqa: F722 - the shapes of jaxtyping are no forward annotations

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from nnxdsl.config.objectives.distillation import Distill
from nnxdsl.config.objectives.on_policy_distillation import OnPolicyDistill
from nnxdsl.losses.distillation import token_divergence
from nnxdsl.losses.lm_head.selected_logits import SelectedLogits, selected_logits
from nnxdsl.losses.lm_head.tiling import LOWEST, Tiling, num_tiles, scan, split_vocab, tile_logits, vocab_tile
from nnxdsl.losses.lm_head.token_stats import Chunks, ShardContext


class TeacherTopK(NamedTuple):
    """A teacher's top-k distribution for each target.

    Attributes:
        token_ids: Its `k` most likely tokens, the most likely first, `[B, N, k]` int32.
        logp: Log-probabilities of these under softmax(logits / T) over the whole vocabulary, and last that of all other
            tokens together, `[B, N, k + 1]` float32; about -1e30 where there are no others.
    """

    token_ids: Array
    logp: Array


def teacher_top_k(
    hidden: Float[Array, "B N D"],
    head: Float[Array, "V D"],
    mask: Bool[Array, "B N"],
    objective: Distill | OnPolicyDistill,
    soft_cap: float | None = None,
    limit: int | None = None,
    shard_context: ShardContext | None = None,
) -> TeacherTopK:
    """The most likely tokens of softmax(hidden @ head.T / T); carries no gradient.

    Args:
        hidden: The teacher's final hidden states, at the positions that predict the targets.
        head: Its output embedding.
        mask: Which targets count; the others have no distribution.
        objective: Its `teacher_top_k` and temperature.
        soft_cap: Of its logits, before the temperature; None for none.
        limit: The most tokens whose logits exist at one time, over all devices; None for the platform's default.
        shard_context: Platform and sharding of logits; None for one CPU.
    """
    assert objective.teacher_top_k is not None
    shard_context = shard_context or ShardContext()
    hidden, head = jax.lax.stop_gradient((hidden, head.astype(hidden.dtype)))
    chunks = Chunks.of(mask, head.shape, limit, shard_context)
    states, tiling = _states(hidden, chunks, objective, soft_cap, shard_context)
    token_ids = _top_k(states, head, objective.teacher_top_k, tiling)
    logp = _class_logps(selected_logits(states, head, token_ids, tiling))
    join = jax.vmap(chunks.join, in_axes=-1, out_axes=-1)
    return TeacherTopK(join(token_ids).astype(jnp.int32), join(logp))


def top_k_divergence(
    hidden: Float[Array, "B N D"],
    head: Float[Array, "V D"],
    top: TeacherTopK,
    mask: Bool[Array, "B N"],
    objective: Distill | OnPolicyDistill,
    soft_cap: float | None = None,
    limit: int | None = None,
    shard_context: ShardContext | None = None,
) -> Float[Array, "B N"]:
    """Divergence of softmax(hidden @ head.T / T) from a teacher's over its top-k tokens and all others as one, in nats.

    Args:
        hidden: The student's final hidden states, at the positions that predict the targets.
        head: Its output embedding.
        top: The teacher's top k, at the same temperature.
        mask: Which targets count. Masked positions may hold anything.
        objective: Divergence and temperature.
        soft_cap: Of the student's logits, before the temperature; None for none.
        limit: The most tokens whose logits exist at one time, over all devices; None for the platform's default.
        shard_context: Platform and sharding of logits; None for one CPU.

    Returns:
        Float32, zero where the mask is off, from products accumulated in float32.
    """
    shard_context = shard_context or ShardContext()
    chunks = Chunks.of(mask, head.shape, limit, shard_context)
    states, tiling = _states(hidden, chunks, objective, soft_cap, shard_context)
    token_ids, p = (_constrain(chunks.split(x), shard_context) for x in top)
    q = _class_logps(selected_logits(states, head.astype(hidden.dtype), token_ids, tiling))
    return chunks.join(jnp.sum(token_divergence(objective.distance, p, q), axis=-1))


def _states(
    hidden: jax.Array,
    chunks: Chunks,
    objective: Distill | OnPolicyDistill,
    soft_cap: float | None,
    shard_context: ShardContext,
) -> tuple[jax.Array, Tiling]:
    """States `[n, g, l, c, d]` whose products with the head's rows are logits / T; and the tiles."""
    # Of capped logits too: c tanh(z / c) / t is (c / t) tanh((z / t) / (c / t)).
    cap = None if soft_cap is None else soft_cap / objective.temperature
    return _constrain(chunks.split(hidden / objective.temperature), shard_context), chunks.tiling(cap, shard_context)


def _constrain(x: jax.Array, shard_context: ShardContext) -> jax.Array:
    axes = (None, "head_batch", "length", None, "activation_embed")
    return x if shard_context.constrain is None else shard_context.constrain(x, axes)


def _class_logps(selected: SelectedLogits) -> jax.Array:
    """Log-probabilities of the selected tokens and of all others together, `[n, g, l, c, k + 1]`."""
    return jax.nn.log_softmax(jnp.concatenate([selected.logits, selected.rest_logsumexp[..., None]], axis=-1), axis=-1)


def _top_k(hidden: jax.Array, head: jax.Array, count: int, tiling: Tiling) -> jax.Array:
    """Token ids of the largest logits, `[n, g, l, c, k]`, the largest first; of equal ones the smaller id first."""
    head = split_vocab(head, tiling)

    def largest(values: jax.Array, token_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, index = jax.lax.top_k(values, count)
        return values, jnp.take_along_axis(token_ids, index, axis=-1)

    def chunk(_: None, hidden: jax.Array) -> tuple[None, jax.Array]:
        shape = (head.shape[0], *hidden.shape[:-1], count)

        def tile(best: tuple[jax.Array, jax.Array], number: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            vocab = vocab_tile(head, tiling, number)
            logits = tile_logits(hidden, vocab, tiling)
            values, index = jax.lax.top_k(logits, min(count, logits.shape[-1]))
            candidates = zip(best, (values, index + vocab.token_ids[..., :1]), strict=True)
            return largest(*(jnp.concatenate(pair, axis=-1) for pair in candidates)), None

        init = jnp.full(shape, LOWEST, jnp.float32), jnp.zeros(shape, jnp.int32)
        best, _ = scan(tile, init, jnp.arange(num_tiles(head, tiling)))
        # Merge the shards of the vocabulary: [s, g, l, c, k] as [g, l, c, s * k].
        values, token_ids = (jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1) for x in best)
        return None, largest(values, token_ids)[1]

    return scan(chunk, None, hidden)[1]
