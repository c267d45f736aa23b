"""Preference pairs and feedback, several pairs in a row, which do not see each other."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from nnxdsl.config.data import Data
from nnxdsl.data.batch import PackedPairs
from nnxdsl.data.packing import Size
from nnxdsl.losses.base import PairLogps
from nnxdsl.losses.lm_head.token_stats import TokenStats
from nnxdsl.program.batches.base import (
    AbstractArrays,
    Lengths,
    LossInputs,
    PairOptions,
    Rows,
    Targets,
    gather_sources,
    register,
)
from nnxdsl.program.batches.packed_sequences import gather_earlier, has_earlier, packed_lengths, packed_rows
from nnxdsl.program.batches.pairs import AnyPairs


class PackedPairKind(AnyPairs[PackedPairs]):
    """Packed pairs, in blocks of rows."""

    def rows(self, batch: PackedPairs) -> Rows:
        """Rows `[G * r, T]`."""
        return packed_rows(batch, batch.branch)

    def targets(self, hidden: jax.Array, batch: PackedPairs) -> Targets:
        """The tokens of the completions of each block, `[G, C]`."""
        return Targets(gather_sources(hidden, batch.tokens, batch.source), batch.target, self.target_mask(batch))

    def last_states(self, hidden: jax.Array, batch: PackedPairs) -> jax.Array:
        """See `BatchKind.last_states`; `[G * K, 2, D]`, any state where there is no pair."""
        blocks, pairs = batch.weight.shape
        in_row = jnp.max(batch.segment, axis=-1)  # [G, r] pairs of a row; those of a block are numbered row by row
        before = jnp.cumsum(in_row, axis=-1) - in_row
        number = (batch.segment - 1 + before[..., None]).reshape(blocks, 1, 1, -1)  # [G, 1, 1, r * T]
        is_real, branch = (part.reshape(blocks, 1, 1, -1) for part in (batch.segment > 0, batch.branch))
        of_pair = is_real & (number == jnp.arange(pairs)[:, None, None]) & (branch == jnp.array([1, 2])[:, None])
        slots = jnp.arange(number.shape[-1])
        last = jnp.max(jnp.where(of_pair, slots, 0), axis=-1).reshape(blocks, -1)  # [G, 2K]
        states = gather_sources(hidden, batch.tokens, last)
        return states.reshape(blocks * pairs, 2, -1)

    def target_mask(self, batch: PackedPairs) -> jax.Array:
        """Which targets count, `[G, C]`."""
        return batch.owner < 2 * batch.weight.shape[1]

    def target_counts(self, batch: PackedPairs) -> tuple[jax.Array, jax.Array]:
        """See `AnyPairs.target_counts`; `[G, K]`."""
        counts = batch.chosen_targets, batch.rejected_targets
        chosen, rejected = (batch.chosen_length, batch.rejected_length) if batch.chosen_targets is None else counts
        return chosen.astype(jnp.float32), rejected.astype(jnp.float32)

    def mtp_targets(self, hidden: jax.Array, batch: PackedPairs) -> Targets:
        """The targets, and the states one slot earlier."""
        return Targets(gather_earlier(hidden, batch), batch.target, self.mtp_mask(batch))

    def mtp_mask(self, batch: PackedPairs) -> jax.Array:
        """The tokens of chosen or desirable completions with two tokens before them, `[G, C]`."""
        is_read = batch.weight > 0 if batch.desirable is None else (batch.weight > 0) & (batch.desirable > 0)  # [G, K]
        # Rejected completions and padding have none of these owners.
        read = jnp.take_along_axis(jnp.asarray(is_read), batch.owner, axis=1, mode="fill", fill_value=False)
        return read & has_earlier(batch)

    def loss_inputs(self, stats: TokenStats, batch: PackedPairs, options: PairOptions) -> tuple[LossInputs, TokenStats]:
        """Summed log-probabilities of all pairs `[G * K]`, and the statistics of each target `[G, C]`."""
        pairs = batch.weight.shape[1]
        # A masked sum for each completion rather than a scatter: deterministic float32 on every platform.
        counts = self.target_counts(batch)
        is_owned = batch.owner[:, None, :] == jnp.arange(2 * pairs)[:, None]  # [G, 2K, C]
        logp = jnp.where(is_owned, stats.logp[:, None, :], 0.0)
        if options.ld_alpha != 1:
            shared = jnp.tile(jnp.minimum(*counts), (1, 2))[:, :, None]  # [G, 2K, 1]
            logp = logp * jnp.where(jnp.cumsum(is_owned, axis=-1) <= shared, 1.0, options.ld_alpha)
        sums = jnp.sum(logp, axis=-1)
        logps = PairLogps(*(part.reshape(-1) for part in (sums[:, :pairs], sums[:, pairs:], *counts)))
        if options.wpo_logps is not None:
            sums = jnp.sum(jnp.where(is_owned, options.wpo_logps()[:, None, :], 0.0), axis=-1)
            means = sums[:, :pairs] / counts[0] + sums[:, pairs:] / counts[1]
            logps = logps._replace(likelihood=jnp.exp(means).reshape(-1))
        if batch.desirable is None:
            return logps, stats
        stats = stats._replace(mask=stats.mask * (batch.owner < pairs))
        return logps._replace(desirable=batch.desirable.reshape(-1)), stats

    def padded(self, batch: PackedPairs) -> tuple[int, Lengths]:
        """Rows of a batch and the tokens of each, padding included."""
        return packed_lengths(batch)

    def abstract(self, data: Data, arrays: AbstractArrays, size: Size | None = None) -> PackedPairs:
        """The largest batch of such data, without values."""
        assert size is not None
        tokens, targets = arrays.array(size.rows, size.length), arrays.array(size.targets)
        lengths = arrays.array(size.items)
        scores, margin = self.scores(data, arrays, size.items), self.margins(data, arrays, size.items)
        return PackedPairs(*[tokens] * 4, *[targets] * 3, *[lengths] * 3, *scores, margin=margin)


register(PackedPairs, PackedPairKind(), "pairs", "feedback", is_packed=True)
