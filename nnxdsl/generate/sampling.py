"""Next-token selection from logits: greedy, or sampling with temperature, top-k, top-p and min-p."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

BLOCK = 128
"""Tokens of a block of the vocabulary in a draw."""


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
        min_p: Leave out tokens whose probability is below `min_p` times that of the most likely one (arXiv:2407.01082);
            None for none.
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
    min_p: float | None = None

    def __attrs_post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, got {self.max_new_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature: expected at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k: expected at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p < 1:
            raise ValueError(f"top_p: expected a value between 0 and 1, got {self.top_p}")
        if self.min_p is not None and not 0 < self.min_p < 1:
            raise ValueError(f"min_p: expected a value between 0 and 1, got {self.min_p}")
        if self.num_speculative_tokens < 0:
            raise ValueError(f"num_speculative_tokens: expected at least 0, got {self.num_speculative_tokens}")
        if self.temperature == 0 and (self.top_k, self.top_p, self.min_p) != (None, None, None):
            raise ValueError("top_k, top_p and min_p have no effect with temperature 0 (greedy decoding)")


def numbers_of(prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """RNG stream numbers of each prompt, `[B, 2]` uint32: a hash of its tokens, and its count among earlier rows.

    Keys are derived from these and not from the row index, so that a completion does not depend on the other prompts of
    a batch, and repeated prompts get different completions.
    """
    seen: Counter[int] = Counter()
    numbers = np.zeros((len(prompts), 2), np.uint32)
    for row, prompt in enumerate(prompts):
        number = zlib.crc32(np.asarray(prompt, "<i4").tobytes())
        numbers[row] = number, seen[number]
        seen[number] += 1
    return numbers


def streams(key: jax.Array, numbers: jax.Array) -> jax.Array:
    """PRNG keys of the rows, `[B]`, from the numbers `[B, 2]` of `numbers_of`."""
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row[0]), row[1]))(numbers)


def filter_logits(
    logits: jax.Array, top_k: int | None, top_p: jax.Array | None, min_p: jax.Array | None = None
) -> jax.Array:
    """Logits `[..., V]` with -inf for tokens that top-k, top-p and min-p leave out; nothing is sorted.

    Tokens that are as likely as the last one that is kept are kept too. The most likely token is never left out.

    Args:
        logits: `[..., V]`, divided by the temperature.
        top_k: See `Sampling`; at most V.
        top_p: See `Sampling`; applies to the probabilities renormalized over the `top_k` tokens.
        min_p: See `Sampling`.
    """
    largest = jnp.max(logits, axis=-1, keepdims=True)
    filtered = logits
    if top_k is not None:
        filtered = _heaviest(filtered, jnp.ones_like(logits), jnp.asarray(top_k, logits.dtype))
    if top_p is not None:
        mass = jnp.exp(filtered - largest)
        filtered = _heaviest(filtered, mass, top_p * jnp.sum(mass, axis=-1, keepdims=True))
    if min_p is not None:
        filtered = jnp.where(logits >= largest + jnp.log(min_p), filtered, -jnp.inf)
    return filtered


def _heaviest(logits: jax.Array, weights: jax.Array, needed: jax.Array) -> jax.Array:
    """The largest logits `[..., V]` whose weights sum to at least `needed`, -inf for the others.

    The smallest of them is found by bisection over the 32 bits of a float, in their order: a sort of the vocabulary
    takes many times as long.
    """
    order = _ordered(logits)

    def is_enough(bound: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(order >= bound, weights, 0.0), axis=-1, keepdims=True) >= needed

    def next_bit(number: int | jax.Array, bound: jax.Array) -> jax.Array:
        higher = bound | (jnp.uint32(1) << (31 - jnp.asarray(number, jnp.uint32)))
        return jnp.where(is_enough(higher), higher, bound)

    least = jnp.zeros((*logits.shape[:-1], 1), jnp.uint32)
    bound = jax.lax.fori_loop(0, 32, next_bit, least)
    bound = jnp.minimum(bound, jnp.max(order, axis=-1, keepdims=True))
    return jnp.where(order >= bound, logits, -jnp.inf)


def _ordered(values: jax.Array) -> jax.Array:
    """Unsigned integers in the order of float32 values."""
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.uint32)
    top = jnp.uint32(1 << 31)
    return jnp.where(bits >= top, ~bits, bits | top)


class Draws(NamedTuple):
    """Chosen tokens, each of any leading axes.

    Attributes:
        ids: Token ids, int32.
        logps: Their log-probabilities at the sampling temperature (at 1 if greedy), among all tokens, float32.
        log_mass: Log of the probability mass of the tokens that top-k, top-p and min-p leave, float32; 0 without them.
            `logps - log_mass` is the log-probability with which the token was drawn.
    """

    ids: jax.Array
    logps: jax.Array
    log_mass: jax.Array


class Selection(NamedTuple):
    """Traced settings of a draw; see `Sampling`."""

    key: ArrayLike
    temperature: ArrayLike
    top_p: ArrayLike | None = None
    min_p: ArrayLike | None = None

    @classmethod
    def of(cls, sampling: Sampling) -> Selection:
        """Those of `sampling`, as host arrays, which are not committed to a device."""
        top_p, min_p = (None if one is None else np.float32(one) for one in (sampling.top_p, sampling.min_p))
        key = np.asarray(jax.random.key_data(jax.random.key(sampling.seed)))
        return cls(key, np.float32(sampling.temperature), top_p, min_p)


def greedy(logits: jax.Array) -> Draws:
    """The most likely tokens of logits `[..., V]`."""
    ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logps = _take_at(logits, ids) - jax.nn.logsumexp(logits, axis=-1)
    return Draws(ids, logps, jnp.zeros_like(logps))


def draw(
    keys: jax.Array,
    logits: jax.Array,
    temperature: jax.Array,
    top_k: int | None,
    top_p: jax.Array | None,
    min_p: jax.Array | None = None,
) -> Draws:
    """Sample one token per row, `[B]`, from logits `[B, V]` and keys `[B]`."""
    logits = logits / temperature
    if top_k is None and top_p is None and min_p is None:
        ids, total = _categorical(keys, logits)
        return Draws(ids, _take_at(logits, ids) - total, jnp.zeros_like(total))
    ids, mass = _categorical(keys, filter_logits(logits, top_k, top_p, min_p))
    total = jax.nn.logsumexp(logits, axis=-1)
    return Draws(ids, _take_at(logits, ids) - total, jnp.minimum(mass - total, 0.0))  # not above 0 by rounding


def _categorical(keys: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Token ids drawn from the softmax of logits `[B, V]`, and their logsumexp `[B]`.

    A block of tokens is drawn by its probability, and a token of the block by its own, each with the Gumbel-max trick:
    of random numbers there are as many as blocks and tokens of a block, where one for each token takes longer than the
    logits.
    """
    size = -(-logits.shape[-1] // BLOCK) * BLOCK
    blocks = jnp.pad(logits, ((0, 0), (0, size - logits.shape[-1])), constant_values=-jnp.inf)
    blocks = blocks.reshape(len(logits), -1, BLOCK)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    sums = jnp.sum(jnp.exp(blocks - largest[..., None]), axis=-1)  # [B, V / BLOCK]
    first, second = jnp.unstack(jax.vmap(jax.random.split)(keys), axis=1)
    block = jax.vmap(jax.random.categorical)(first, jnp.log(sums))
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    ids = block * BLOCK + jax.vmap(jax.random.categorical)(second, inside)
    return ids.astype(jnp.int32), jnp.log(jnp.sum(sums, axis=-1)) + largest[:, 0]


def select(
    selection: Selection,
    top_k: int | None,
    numbers: jax.Array,
    logits: jax.Array,
    positions: jax.Array,
    *,
    is_greedy: bool,
) -> Draws:
    """Chosen tokens of rows, which depend on the key, the row's numbers and the position alone.

    Args:
        selection: Settings.
        top_k: See `Sampling`.
        numbers: `[B, 2]`, from `numbers_of`.
        logits: `[B, T, V]`.
        positions: `[B, T]`, positions of the tokens in their completions.
        is_greedy: Whether to take the argmax instead of sampling.
    """
    if is_greedy:
        return greedy(logits)
    keys = streams(jax.random.wrap_key_data(jnp.asarray(selection.key)), numbers)
    keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))(keys, positions)  # [B, T]
    top_p, min_p = (None if one is None else jnp.asarray(one) for one in (selection.top_p, selection.min_p))
    temperature = jnp.asarray(selection.temperature)
    return jax.vmap(lambda keys, logits: draw(keys, logits, temperature, top_k, top_p, min_p))(keys, logits)


def _take_at(values: jax.Array, index: jax.Array) -> jax.Array:
    """`values[..., index]` of `[..., V]` and `[...]`."""
    return jnp.take_along_axis(values, index[..., None], axis=-1)[..., 0]
