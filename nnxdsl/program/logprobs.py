"""Log-probabilities of given tokens from hidden states, in chunks, so that the logits of a whole batch never exist."""

# ruff: noqa: F722 - the shapes of jaxtyping are no forward annotations

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from nnxdsl.models.activations import constrain


class TokenStats(NamedTuple):
    """What a loss may know of each target token; all float32 `[B, N]`, zero where the mask is off.

    Attributes:
        logp: Natural log of the probability of the target.
        entropy: Of the whole distribution, in nats; carries no gradient.
        correct: 1 where the target is the likeliest token; carries no gradient.
        mask: 1 for real targets.
    """

    logp: Array
    entropy: Array
    correct: Array
    mask: Array


def token_stats(
    hidden: Float[Array, "B N D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B N"],
    mask: Bool[Array, "B N"],
    chunk_tokens: int,
) -> TokenStats:
    """Statistics of `targets` under softmax(hidden @ head.T).

    Args:
        hidden: Final hidden states, at the positions that predict the targets.
        head: Output embedding.
        targets: Token ids.
        mask: Which targets count. Masked positions may hold anything.
        chunk_tokens: About how many tokens' logits (float32 `[tokens, V]`) exist at one time, in the forward pass and,
            as they are computed again there, in the backward pass.

    Returns:
        Statistics, computed in float32 from products accumulated in float32.
    """
    batch, length = targets.shape
    chunk = min(length, max(1, chunk_tokens // batch))
    chunks = -(-length // chunk)
    pad = chunks * chunk - length

    def split(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(batch, chunks, chunk, *x.shape[2:]), 1, 0)  # [chunks, B, c, ...]

    @jax.checkpoint
    def one(head: jax.Array, hidden: jax.Array, targets: jax.Array) -> tuple[jax.Array, ...]:
        hidden = constrain(hidden, "head_batch", "length", "activation_embed")
        logits = jnp.einsum("bcd,vd->bcv", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)
        logits = constrain(logits, "head_batch", "length", "activation_vocab")
        log_z = jax.nn.logsumexp(logits, axis=-1)  # [B, c]
        logp = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0] - log_z
        still = jax.lax.stop_gradient(logits)
        # From log-probabilities and not from logits: a sure model's are near zero, where nothing is lost to rounding.
        log_p = still - jax.lax.stop_gradient(log_z)[..., None]
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        return logp, entropy, (jnp.argmax(still, axis=-1) == targets).astype(jnp.float32)

    def body(head: jax.Array, xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return head, one(head, *xs)

    _, stats = jax.lax.scan(body, head, (split(hidden), split(targets)))
    logp, entropy, correct = (
        jnp.where(mask, jnp.moveaxis(x, 0, 1).reshape(batch, chunks * chunk)[:, :length], 0.0) for x in stats
    )
    return TokenStats(logp, entropy, correct, mask.astype(jnp.float32))
