"""How the next token is chosen from logits: the likeliest, or a draw from those that may be drawn."""

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
    """How tokens are chosen.

    Attributes:
        max_new_tokens: Longest answer.
        temperature: 0 for the likeliest token, else logits are divided by it.
        top_k: Only so many of the likeliest tokens may be drawn; None for all.
        top_p: Of these, only the fewest likeliest whose probabilities sum to it or more (the nucleus: Holtzman et al.,
            arXiv:1904.09751); None for all.
        seed: Of the draws; the same seed and prompt give the same answer.

    Raises:
        ValueError: a value out of its range, or one that has no effect.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, got {self.max_new_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature: expected at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k: expected at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p < 1:
            raise ValueError(f"top_p: expected a value between 0 and 1, got {self.top_p}")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError("top_k and top_p have no effect with temperature 0, which takes the likeliest token")


def numbers_of(prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """Two numbers for each prompt, `[B, 2]` uint32: of its tokens, and how often they have come before.

    Draws go by them and not by a prompt's place, so that an answer does not depend on the other prompts of a batch, and
    a prompt that is given several times has as many answers.
    """
    seen: Counter[int] = Counter()
    found = np.zeros((len(prompts), 2), np.uint32)
    for row, prompt in enumerate(prompts):
        number = zlib.crc32(np.asarray(prompt, "<i4").tobytes())
        found[row] = number, seen[number]
        seen[number] += 1
    return found


def streams(key: jax.Array, numbers: jax.Array) -> jax.Array:
    """A key for each row, `[B]`, of the numbers `[B, 2]` from `numbers_of`."""
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row[0]), row[1]))(numbers)


def likeliest(logits: jax.Array, top_k: int | None, top_p: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The tokens that may be drawn.

    Args:
        logits: `[..., V]`, divided by the temperature.
        top_k: See `Sampling`; at most V.
        top_p: See `Sampling`; of the probabilities of the `top_k` tokens, which sum to 1.

    Returns:
        Logits `[..., k]`, the largest first, and -inf for those left out; and their token ids. Where logits are equal
        the smaller id comes first. The likeliest token is never left out.
    """
    top_logits, ids = jax.lax.top_k(logits, logits.shape[-1] if top_k is None else top_k)
    if top_p is not None:
        mass = jax.nn.softmax(top_logits, axis=-1)
        before = jnp.cumsum(mass, axis=-1) - mass
        # The token that crosses the bound is of the set: what comes before it has not reached it yet.
        is_in = (before < top_p).at[..., 0].set(True)
        top_logits = jnp.where(is_in, top_logits, -jnp.inf)
    return top_logits, ids


def draw(
    keys: jax.Array, logits: jax.Array, temperature: jax.Array, top_k: int | None, top_p: jax.Array | None
) -> jax.Array:
    """One token id for each row, `[B]`, from logits `[B, V]` and keys `[B]`."""
    logits = logits / temperature
    if top_k is None and top_p is None:
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    top_logits, ids = likeliest(logits, top_k, top_p)
    place = jax.vmap(jax.random.categorical)(keys, top_logits)
    return jnp.take_along_axis(ids, place[:, None], axis=1)[:, 0].astype(jnp.int32)
