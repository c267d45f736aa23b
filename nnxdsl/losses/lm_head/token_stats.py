"""Log-probabilities and statistics of target tokens from hidden states; logits exist for one tile at a time."""

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
    """Statistics of each target token; all float32 `[B, N]`, zero where the mask is off.

    Attributes:
        logp: Natural log of the probability of the target.
        log_z: Logsumexp of all logits.
        entropy: Of the distribution over the vocabulary, in nats; carries a gradient only where one is asked for.
        correct: 1 where no token is likelier than the target; carries no gradient.
        mask: 1 for real targets.
    """

    logp: Array
    log_z: Array
    entropy: Array
    correct: Array
    mask: Array


@attrs.frozen
class TileSizes:
    """The tile sizes with which a platform is fastest.

    Attributes:
        tile_bytes: The most bytes of a tile's float32 logits, and of its rows of the head in float32.
        chunk_tokens: The most tokens of a tile: the head is read from memory once per chunk.
    """

    tile_bytes: int
    chunk_tokens: int


CPU = TileSizes(2 * 2**20, 1024)
"""Both stay in the cache. Measured with tiles of 1 to 8 MiB and 256 to 1,024 tokens, at widths of 256 and 640: the
head's rows are transposed once per chunk, so chunks of 256 tokens took up to a third longer with a frozen head, and as
long with a trained one."""

ACCELERATOR = TileSizes(32 * 2**20, 2048)
"""Large enough to fill a GPU, small beside its memory (`benchmarks/head_memory.py`)."""

LOGITS_BYTES = 256 * 2**20
"""A trained head's logits are saved for the backward pass if they take at most so many bytes: a gradient then costs
three products of the head's size instead of four."""

ShardCounts = Callable[[Axes, tuple[int, ...]], tuple[int, ...]]
"""Number of shards of each dimension of an activation, from its logical axes and shape."""


@attrs.frozen
class ShardContext:
    """Platform and sharding of logits.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        constrain: Constrains an activation's sharding by its logical axes; None on one device.
        shard_counts: The number of shards of each of its dimensions; None on one device.
        length_multiple: Rows are padded to a multiple of so many tokens, so that they divide over devices.
    """

    platform: str = "cpu"
    constrain: Constraint | None = None
    shard_counts: ShardCounts | None = None
    length_multiple: int = 1

    @property
    def sizes(self) -> TileSizes:
        """Tile sizes of the platform."""
        return CPU if self.platform == "cpu" else ACCELERATOR


def token_stats(
    hidden: Float[Array, "B N D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B N"],
    mask: Bool[Array, "B N"],
    limit: int | None = None,
    soft_cap: float | None = None,
    shard_context: ShardContext | None = None,
    *,
    has_entropy_gradient: bool = False,
) -> TokenStats:
    """Statistics of `targets` under softmax(hidden @ head.T).

    Args:
        hidden: Final hidden states, at the positions that predict the targets.
        head: Output embedding.
        targets: Token ids.
        mask: Which targets count. Masked positions may hold anything.
        limit: The most tokens whose logits exist at one time, over all devices; None for the platform's default.
        soft_cap: Logits `z` are `soft_cap * tanh(z / soft_cap)` (Gemma 2, arXiv:2408.00118); None for none.
        shard_context: Platform and sharding of logits; None for one CPU.
        has_entropy_gradient: Whether a loss reads entropies.

    Returns:
        Statistics, computed in float32 from products accumulated in float32.
    """
    shard_context = shard_context or ShardContext()
    chunks = Chunks.of(mask, head.shape, limit, shard_context)
    states = chunks.split(hidden)
    if shard_context.constrain is not None:
        states = shard_context.constrain(states, (None, "head_batch", "length", None, "activation_embed"))
    tiling = chunks.tiling(soft_cap, shard_context)
    stats: TargetStats = target_stats(
        states, head.astype(hidden.dtype), chunks.split(targets), tiling, has_entropy_gradient
    )
    logp, log_z, entropy, correct = (chunks.join(x) for x in stats)
    return TokenStats(logp, log_z, entropy, correct, mask.astype(jnp.float32))


@attrs.frozen(eq=False)
class Chunks:
    """The tokens of a batch in chunks, each of tokens that a device already has.

    Attributes:
        mask: Which tokens count, `[B, N]`.
        padding: Tokens by which each row is padded.
        batch_shards: Shards of the batch.
        length_shards: Shards of the sequence.
        vocab_shards: Shards of the vocabulary.
        tokens: Tokens of one device.
        count: Number of chunks.
        tile_vocab: Vocabulary entries of a tile, per shard.
        keep: Whether a trained head's logits are saved for the backward pass.
    """

    mask: jax.Array
    padding: int
    batch_shards: int
    length_shards: int
    vocab_shards: int
    tokens: int
    count: int
    tile_vocab: int
    keep: bool

    @classmethod
    def of(cls, mask: jax.Array, head: tuple[int, ...], limit: int | None, shard_context: ShardContext) -> Chunks:
        """The chunks of a batch.

        Args:
            mask: Which tokens count, `[B, N]`.
            head: The head's shape, `[V, D]`.
            limit: The most tokens whose logits exist at one time, over all devices; None for the platform's default.
            shard_context: Platform and sharding of logits.
        """
        rows, length = mask.shape
        padding = -length % shard_context.length_multiple
        axes, shape = ("head_batch", "length", "activation_vocab"), (rows, length + padding, head[0])
        counts = shard_context.shard_counts
        batch, seq, vocab = (1, 1, 1) if counts is None else counts(axes, shape)
        tokens = rows * (length + padding) // (batch * seq)
        device_limit = None if limit is None else limit // (batch * seq)
        count, tile_vocab, keep = tiles(tokens, head[0] // vocab, head[1], device_limit, shard_context.sizes)
        return cls(mask, padding, batch, seq, vocab, tokens, count, tile_vocab, keep)

    def tiling(self, soft_cap: float | None, shard_context: ShardContext) -> Tiling:
        """The tiling of a head for these chunks."""
        width_first = shard_context.platform == "cpu"
        return Tiling(self.vocab_shards, self.tile_vocab, self.keep, soft_cap, shard_context.constrain, width_first)

    def split(self, x: jax.Array) -> jax.Array:
        """`[B, N, ...]` as `[n, g, l, c, ...]`; zero where the mask is off."""
        rest, chunk = x.shape[2:], -(-self.tokens // self.count)
        x = jnp.where(self.mask.reshape(*self.mask.shape, *(1,) * len(rest)), x, 0)
        x = jnp.pad(x, ((0, 0), (0, self.padding), *((0, 0),) * len(rest)))
        x = jnp.moveaxis(x.reshape(self.batch_shards, len(x) // self.batch_shards, self.length_shards, -1, *rest), 2, 1)
        x = x.reshape(self.batch_shards, self.length_shards, self.tokens, *rest)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, self.count * chunk - self.tokens), *((0, 0),) * len(rest)))
        return jnp.moveaxis(x.reshape(self.batch_shards, self.length_shards, self.count, chunk, *rest), 2, 0)

    def join(self, x: jax.Array) -> jax.Array:
        """`[n, g, l, c]` as `[B, N]`; zero where the mask is off."""
        rows, length = self.mask.shape
        x = jnp.moveaxis(x, 0, 2).reshape(self.batch_shards, self.length_shards, -1)[:, :, : self.tokens]
        x = jnp.moveaxis(x.reshape(self.batch_shards, self.length_shards, rows // self.batch_shards, -1), 1, 2)
        return jnp.where(self.mask, x.reshape(rows, length + self.padding)[:, :length], 0.0)


def tiles(tokens: int, vocab_size: int, width: int, limit: int | None, sizes: TileSizes) -> tuple[int, int, bool]:
    """The number of chunks, the vocabulary entries of a tile, and whether a trained head's logits are saved.

    Args:
        tokens: Tokens of one device.
        vocab_size: Vocabulary entries of one device.
        width: Embedding dimension.
        limit: The most tokens whose logits may exist at one time; None for no limit.
        sizes: Tile sizes of the platform.
    """
    most = sizes.chunk_tokens if limit is None else max(min(sizes.chunk_tokens, limit), 1)
    chunks = -(-tokens // most)
    wanted = sizes.tile_bytes // (4 * max(-(-tokens // chunks), width))
    least = -(-vocab_size // max(wanted, 1))
    # A number of tiles that divides the vocabulary, unless tiles would then be less than half as large.
    count = next((count for count in range(least, 2 * least) if vocab_size % count == 0), least)
    keep = 4 * tokens * vocab_size <= LOGITS_BYTES and (limit is None or tokens <= limit)
    return chunks, -(-vocab_size // count), keep
