"""Log-probabilities of given tokens from hidden states, without the logits of a batch: tokens and words go in tiles."""

# ruff: noqa: F722 - the shapes of jaxtyping are no forward annotations

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import attrs
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from nnxdsl.losses.lm_head.target_logprobs import TargetStats, target_stats
from nnxdsl.losses.lm_head.tiling import Tiling
from nnxdsl.models.logical_axes import Axes, Constraint


class TokenStats(NamedTuple):
    """What a loss may know of each target token; all float32 `[B, N]`, zero where the mask is off.

    Attributes:
        logp: Natural log of the probability of the target.
        log_z: Natural log of what the softmax divides by, the sum of the exponentials of all logits.
        entropy: Of the whole distribution, in nats; carries no gradient.
        correct: 1 where no token is likelier than the target; carries no gradient.
        mask: 1 for real targets.
    """

    logp: Array
    log_z: Array
    entropy: Array
    correct: Array
    mask: Array


@attrs.frozen
class Sizes:
    """How large the pieces are in which a platform works best.

    Attributes:
        tile_bytes: The most that the float32 logits of a tile may take, and that its rows of the head may in float32.
        chunk_tokens: The most tokens of a tile: the head is read from memory once for so many.
    """

    tile_bytes: int
    chunk_tokens: int


CPU = Sizes(2 * 2**20, 1024)
"""Both stay in the cache between the passes over them. Of tiles of 1 to 8 MiB and 256 to 1,024 tokens, at widths of 256
and 640, those of 2 MiB and 1,024 tokens were among the quickest: the head's rows are turned over for the product, once
for so many tokens. Those of 256 took up to a third longer where the head is frozen, and as long where it is trained."""

ACCELERATOR = Sizes(32 * 2**20, 2048)
"""Products that fill a GPU, and little beside its memory (`benchmarks/head_memory.py`)."""

LOGITS_BYTES = 256 * 2**20
"""A trained head's logits are saved for the backward pass if they take no more bytes: one product of four is saved."""

Cuts = Callable[[Axes, tuple[int, ...]], tuple[int, ...]]
"""In how many pieces each dimension of an activation is cut, from its logical axes and shape."""


@attrs.frozen
class ShardContext:
    """On what statistics are computed.

    Attributes:
        platform: "cpu", or one whose tiles are larger.
        constrain: Lays an activation out over the devices by its logical axes; None on one device.
        cuts: In how many pieces that cuts one; None on one device.
        length_multiple: Rows are filled to a multiple of so many tokens, so that they can be cut into as many parts.
    """

    platform: str = "cpu"
    constrain: Constraint | None = None
    cuts: Cuts | None = None
    length_multiple: int = 1

    @property
    def sizes(self) -> Sizes:
        """How large the pieces are."""
        return CPU if self.platform == "cpu" else ACCELERATOR


def token_stats(
    hidden: Float[Array, "B N D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B N"],
    mask: Bool[Array, "B N"],
    limit: int | None = None,
    soft_cap: float | None = None,
    where: ShardContext | None = None,
) -> TokenStats:
    """Statistics of `targets` under softmax(hidden @ head.T).

    Args:
        hidden: Final hidden states, at the positions that predict the targets.
        head: Output embedding.
        targets: Token ids.
        mask: Which targets count. Masked positions may hold anything.
        limit: The most tokens whose logits exist at one time, over all devices; None for as many as are quick.
        soft_cap: Logits `z` are `soft_cap * tanh(z / soft_cap)` (Gemma 2, arXiv:2408.00118); None for none.
        where: On what; None for one CPU.

    Returns:
        Statistics, computed in float32 from products accumulated in float32.
    """
    where = where or ShardContext()
    chunks = Chunks.of(mask, head.shape, limit, where)
    states = chunks.split(hidden)
    if where.constrain is not None:
        states = where.constrain(states, (None, "head_batch", "length", None, "activation_embed"))
    found: TargetStats = target_stats(
        states, head.astype(hidden.dtype), chunks.split(targets), chunks.tiling(soft_cap, where)
    )
    logp, log_z, entropy, correct = (chunks.join(x) for x in found)
    return TokenStats(logp, log_z, entropy, correct, mask.astype(jnp.float32))


@attrs.frozen(eq=False)
class Chunks:
    """How the tokens of a batch are split into chunks of what each device has already.

    Attributes:
        mask: Which tokens count, `[B, N]`.
        fill: Tokens that each row is filled by.
        groups: In how many pieces devices cut the rows.
        parts: In how many they cut the tokens of a row.
        pieces: In how many they cut the vocabulary.
        tokens: Of one device.
        count: Chunks.
        words: Of a tile, of each piece of the vocabulary.
        keep: Whether a trained head's logits are saved for the backward pass.
    """

    mask: jax.Array
    fill: int
    groups: int
    parts: int
    pieces: int
    tokens: int
    count: int
    words: int
    keep: bool

    @classmethod
    def of(cls, mask: jax.Array, head: tuple[int, ...], limit: int | None, where: ShardContext) -> Chunks:
        """Those of a batch.

        Args:
            mask: Which tokens count, `[B, N]`.
            head: The head's shape, `[V, D]`.
            limit: The most tokens whose logits exist at one time, over all devices; None for as many as are quick.
            where: On what.
        """
        rows, length = mask.shape
        fill = -length % where.length_multiple
        axes, shape = ("head_batch", "length", "activation_vocab"), (rows, length + fill, head[0])
        groups, parts, pieces = (1, 1, 1) if where.cuts is None else where.cuts(axes, shape)
        tokens = rows * (length + fill) // (groups * parts)
        share = None if limit is None else limit // (groups * parts)
        count, words, keep = tiles(tokens, head[0] // pieces, head[1], share, where.sizes)
        return cls(mask, fill, groups, parts, pieces, tokens, count, words, keep)

    def tiling(self, soft_cap: float | None, where: ShardContext) -> Tiling:
        """How a head is worked through."""
        return Tiling(self.pieces, self.words, self.keep, soft_cap, where.constrain, where.platform == "cpu")

    def split(self, x: jax.Array) -> jax.Array:
        """`[B, N, ...]` as `[n, g, l, c, ...]`; zero where the mask is off."""
        rest, chunk = x.shape[2:], -(-self.tokens // self.count)
        x = jnp.where(self.mask.reshape(*self.mask.shape, *(1,) * len(rest)), x, 0)
        x = jnp.pad(x, ((0, 0), (0, self.fill), *((0, 0),) * len(rest)))
        x = jnp.moveaxis(x.reshape(self.groups, len(x) // self.groups, self.parts, -1, *rest), 2, 1)
        x = x.reshape(self.groups, self.parts, self.tokens, *rest)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, self.count * chunk - self.tokens), *((0, 0),) * len(rest)))
        return jnp.moveaxis(x.reshape(self.groups, self.parts, self.count, chunk, *rest), 2, 0)

    def join(self, x: jax.Array) -> jax.Array:
        """`[n, g, l, c]` as `[B, N]`; zero where the mask is off."""
        rows, length = self.mask.shape
        x = jnp.moveaxis(x, 0, 2).reshape(self.groups, self.parts, -1)[:, :, : self.tokens]
        x = jnp.moveaxis(x.reshape(self.groups, self.parts, rows // self.groups, -1), 1, 2)
        return jnp.where(self.mask, x.reshape(rows, length + self.fill)[:, :length], 0.0)


def tiles(tokens: int, words: int, width: int, limit: int | None, sizes: Sizes) -> tuple[int, int, bool]:
    """How one device works through its logits.

    Args:
        tokens: Of one device.
        words: Of one device.
        width: Of the head's rows.
        limit: The most tokens whose logits may exist at one time; None for no such limit.
        sizes: What the platform works best in.

    Returns:
        Chunks of tokens, the vocabulary rows of a tile, and whether a trained head's logits are saved.
    """
    most = sizes.chunk_tokens if limit is None else max(min(sizes.chunk_tokens, limit), 1)
    chunks = -(-tokens // most)
    wanted = sizes.tile_bytes // (4 * max(-(-tokens // chunks), width))
    least = -(-words // max(wanted, 1))
    # So many tiles that they divide the vocabulary, if that makes them no smaller than half.
    count = next((count for count in range(least, 2 * least) if words % count == 0), least)
    keep = 4 * tokens * words <= LOGITS_BYTES and (limit is None or tokens <= limit)
    return chunks, -(-words // count), keep
