"""Next-token selection from logits: greedy, or sampling with temperature, top-k and top-p."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence

import attrs
import jax
import jax.numpy as jnp
import numpy as np


@attrs.frozen
class Sampling:
    """Sampling settings.

    Attributes:
        max_new_tokens: Maximum number of new tokens.
        temperature: Logits are divided by it; 0 for greedy decoding.
        top_k: Sample from the k most likely tokens; None for all.
        top_p: After `top_k`, sample from the smallest set of most likely tokens whose probabilities sum to at least
            `top_p` (nucleus sampling: Holtzman et al., arXiv:1904.09751); None for all.
        seed: Random seed; the same seed and prompt give the same completion.
        num_speculative_tokens: Tokens that the model's multi-token-prediction (MTP) layer drafts for each pass of the
            model (speculative decoding); 0 for none. Completions are the same, up to the rounding of logits.

    Raises:
        ValueError: a value is out of range or has no effect.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    num_speculative_tokens: int = 0

    def __attrs_post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, got {self.max_new_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature: expected at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k: expected at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p < 1:
            raise ValueError(f"top_p: expected a value between 0 and 1, got {self.top_p}")
        if self.num_speculative_tokens < 0:
            raise ValueError(f"num_speculative_tokens: expected at least 0, got {self.num_speculative_tokens}")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError("top_k and top_p have no effect with temperature 0 (greedy decoding)")


def numbers_of(prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """RNG stream numbers of each prompt, `[B, 2]` uint32: a hash of its tokens, and its count among earlier rows.

    Keys are derived from these and not from the row index, so that a completion does not depend on the other prompts of
    a batch, and repeated prompts get different completions.
    """
    seen: Counter[int] = Counter()
    found = np.zeros((len(prompts), 2), np.uint32)
    for row, prompt in enumerate(prompts):
        number = zlib.crc32(np.asarray(prompt, "<i4").tobytes())
        found[row] = number, seen[number]
        seen[number] += 1
    return found


def streams(key: jax.Array, numbers: jax.Array) -> jax.Array:
    """PRNG keys of the rows, `[B]`, from the numbers `[B, 2]` of `numbers_of`."""
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row[0]), row[1]))(numbers)


def likeliest(logits: jax.Array, top_k: int | None, top_p: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Filter logits by top-k and top-p.

    Args:
        logits: `[..., V]`, divided by the temperature.
        top_k: See `Sampling`; at most V.
        top_p: See `Sampling`; applies to the probabilities renormalized over the `top_k` tokens.

    Returns:
        Logits `[..., k]` in descending order, -inf for tokens that are filtered out, and their token ids. Among equal
        logits the smaller id comes first. The most likely token is never filtered out.
    """
    top_logits, ids = jax.lax.top_k(logits, logits.shape[-1] if top_k is None else top_k)
    if top_p is not None:
        mass = jax.nn.softmax(top_logits, axis=-1)
        before = jnp.cumsum(mass, axis=-1) - mass
        # The token that crosses the threshold is included: the mass before it is still below top_p.
        is_in = (before < top_p).at[..., 0].set(True)
        top_logits = jnp.where(is_in, top_logits, -jnp.inf)
    return top_logits, ids


def draw(
    keys: jax.Array, logits: jax.Array, temperature: jax.Array, top_k: int | None, top_p: jax.Array | None
) -> jax.Array:
    """Sample one token id per row, `[B]`, from logits `[B, V]` and keys `[B]`."""
    logits = logits / temperature
    if top_k is None and top_p is None:
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    top_logits, ids = likeliest(logits, top_k, top_p)
    place = jax.vmap(jax.random.categorical)(keys, top_logits)
    return jnp.take_along_axis(ids, place[:, None], axis=1)[:, 0].astype(jnp.int32)
