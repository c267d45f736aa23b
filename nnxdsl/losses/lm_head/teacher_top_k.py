"""A teacher's top-k tokens: how they are found, what a batch has of them, and a student's distance from them.

Each of the `k` words is a class, and all others together are one more, so that both models have a distribution over
`k + 1` classes: what any other word has counts in the last. A distance is that of `distillation.py` over these classes.
"""

# ruff: noqa: F722 - the shapes of jaxtyping are no forward annotations

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from nnxdsl.config.objectives.distillation import Distill
from nnxdsl.losses.distillation import summand
from nnxdsl.losses.lm_head import tiling
from nnxdsl.losses.lm_head.selected_logits import SelectedLogits, selected_logits
from nnxdsl.losses.lm_head.tiling import LOWEST, Tiling
from nnxdsl.losses.lm_head.token_stats import Chunks, ShardContext


class TeacherTopK(NamedTuple):
    """A teacher's top-k distribution for each target.

    Attributes:
        words: Its `k` most likely token ids, the most likely first, `[B, N, k]` int32.
        logp: Natural logs of their probabilities under softmax(logits / T) over all words, and last that of all others
            together, `[B, N, k + 1]` float32; where there are no others about -1e30.
    """

    words: Array
    logp: Array


def teacher_top_k(
    hidden: Float[Array, "B N D"],
    head: Float[Array, "V D"],
    mask: Bool[Array, "B N"],
    objective: Distill,
    soft_cap: float | None = None,
    limit: int | None = None,
    where: ShardContext | None = None,
) -> TeacherTopK:
    """The most likely tokens of softmax(hidden @ head.T / T); carries no gradient.

    Args:
        hidden: The teacher's final hidden states, at the positions that predict the targets.
        head: Its output embedding.
        mask: Which targets count; the others have no distribution.
        objective: How many words, and the temperature.
        soft_cap: Of its logits, before the temperature; None for none.
        limit: The most tokens whose logits exist at one time, over all devices; None for as many as are quick.
        where: On what; None for one CPU.
    """
    assert objective.top_k is not None
    where = where or ShardContext()
    hidden, head = jax.lax.stop_gradient((hidden, head.astype(hidden.dtype)))
    chunks = Chunks.of(mask, head.shape, limit, where)
    states, how = _states(hidden, chunks, objective, soft_cap, where)
    words = _largest(states, head, objective.top_k, how)
    logp = _classes(selected_logits(states, head, words, how))
    each = jax.vmap(chunks.join, in_axes=-1, out_axes=-1)
    return TeacherTopK(each(words).astype(jnp.int32), each(logp))


def top_distance(
    hidden: Float[Array, "B N D"],
    head: Float[Array, "V D"],
    top: TeacherTopK,
    mask: Bool[Array, "B N"],
    objective: Distill,
    soft_cap: float | None = None,
    limit: int | None = None,
    where: ShardContext | None = None,
) -> Float[Array, "B N"]:
    """Distance of softmax(hidden @ head.T / T) from a teacher's, over its top k tokens and all others as one, in nats.

    Args:
        hidden: The student's final hidden states, at the positions that predict the targets.
        head: Its output embedding.
        top: The teacher's top k, at the same temperature.
        mask: Which targets count. Masked positions may hold anything.
        objective: Distance and temperature.
        soft_cap: Of the student's logits, before the temperature; None for none.
        limit: The most tokens whose logits exist at one time, over all devices; None for as many as are quick.
        where: On what; None for one CPU.

    Returns:
        Float32, zero where the mask is off, from products accumulated in float32.
    """
    where = where or ShardContext()
    chunks = Chunks.of(mask, head.shape, limit, where)
    states, how = _states(hidden, chunks, objective, soft_cap, where)
    words, p = _laid_out(chunks.split(top.words), where), _laid_out(chunks.split(top.logp), where)
    q = _classes(selected_logits(states, head.astype(hidden.dtype), words, how))
    return chunks.join(jnp.sum(summand(objective.distance, p, q), axis=-1))


def _states(
    hidden: jax.Array, chunks: Chunks, objective: Distill, soft_cap: float | None, where: ShardContext
) -> tuple[jax.Array, Tiling]:
    """States `[n, g, l, c, d]` whose products with the head's rows are logits over the temperature; and the tiles."""
    # Of capped logits too: c tanh(z / c) / t is (c / t) tanh((z / t) / (c / t)).
    cap = None if soft_cap is None else soft_cap / objective.temperature
    return _laid_out(chunks.split(hidden / objective.temperature), where), chunks.tiling(cap, where)


def _laid_out(x: jax.Array, where: ShardContext) -> jax.Array:
    axes = (None, "head_batch", "length", None, "activation_embed")
    return x if where.constrain is None else where.constrain(x, axes)


def _classes(found: SelectedLogits) -> jax.Array:
    """Log-probabilities of the picked words and of all others together, `[n, g, l, c, k + 1]`."""
    return jax.nn.log_softmax(jnp.concatenate([found.logits, found.rest[..., None]], axis=-1), axis=-1)


def _largest(hidden: jax.Array, head: jax.Array, count: int, how: Tiling) -> jax.Array:
    """The words of the largest logits of each token, `[n, g, l, c, k]`, the largest first; of equals the first."""
    head = tiling.cut(head, how)

    def largest(values: jax.Array, words: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, index = jax.lax.top_k(values, count)
        return values, jnp.take_along_axis(words, index, axis=-1)

    def chunk(_: None, hidden: jax.Array) -> tuple[None, jax.Array]:
        shape = (head.shape[0], *hidden.shape[:-1], count)

        def tile(held: tuple[jax.Array, jax.Array], number: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            rows = tiling.tile_of(head, how, number)
            logits = tiling.logits_of(hidden, rows, how)
            values, index = jax.lax.top_k(logits, min(count, logits.shape[-1]))
            words = index + rows.numbers[..., :1]
            return largest(*(jnp.concatenate(both, axis=-1) for both in zip(held, (values, words), strict=True))), None

        begin = jnp.full(shape, LOWEST, jnp.float32), jnp.zeros(shape, jnp.int32)
        held, _ = tiling.loop(tile, begin, jnp.arange(tiling.tiles_of(head, how)))
        # Of all pieces of the vocabulary: [s, g, l, c, k] as [g, l, c, s * k].
        values, words = (jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1) for x in held)
        return None, largest(values, words)[1]

    return tiling.loop(chunk, None, hidden)[1]
