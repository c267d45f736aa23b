"""Preference pairs and feedback, a pair a row: `[prompt | chosen | rejected]`.

In attention both completions see the prompt and themselves, and not each other. Both start at the position after the
prompt's end. KTO's feedback has a mismatched completion as `rejected`, which token metrics leave out.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.config.data import Data
from nnxdsl.data.batch import PairBatch
from nnxdsl.data.packing import Size
from nnxdsl.losses.base import PairLogps, WeightedMean, row_mean
from nnxdsl.losses.lm_head.token_stats import TokenStats
from nnxdsl.models.attention import row_layout
from nnxdsl.models.attention.positions import TokenPositions
from nnxdsl.program.batches.base import (
    AbstractArrays,
    BatchKind,
    BatchLengths,
    BatchT,
    Lengths,
    LossInputs,
    PairOptions,
    Rows,
    Targets,
    real_lengths,
    register,
    weighted_stats,
)


class AnyPairs(BatchKind[BatchT]):
    """Padded and packed pairs.

    Targets of multi-token prediction (MTP) are chosen or desirable completions: the MTP loss raises likelihoods, as
    the SFT terms of RPO, ORPO and CPO do. Besides, the MTP state of the prompt's last token depends on the completion's
    first token, and would differ between the branches of a pair.
    """

    def mtp_positions(self, positions: TokenPositions) -> TokenPositions:
        """The positions of `[prompt | chosen]` as one sequence; rejected completions are padding."""
        is_read = positions.branch_ids < 2
        position, segment = (jnp.where(is_read, part, 0) for part in (positions.positions, positions.segment_ids))
        return TokenPositions(position, segment, jnp.zeros_like(segment))

    def reference_logps(self, batch: BatchT) -> PairLogps | None:
        """The reference's log-probabilities in the batch; None without."""
        if batch.reference_chosen is None:
            return None
        counts = self.target_counts(batch)
        return PairLogps(*(part.reshape(-1) for part in (batch.reference_chosen, batch.reference_rejected, *counts)))

    def logp_metrics(self, inputs: PairLogps, weight: jax.Array) -> dict[str, WeightedMean]:
        """Mean summed log-probabilities of chosen and rejected completions, under TRL's names."""
        logps = {"logps/chosen": inputs.chosen_logps, "logps/rejected": inputs.rejected_logps}
        return {name: row_mean(value, weight) for name, value in logps.items()}

    def target_counts(self, batch: BatchT) -> tuple[jax.Array, jax.Array]:
        """Targets of chosen and of rejected completions, float32 of the shape of `batch.weight`."""
        raise NotImplementedError

    def with_reference_logps(self, batch: BatchT, reference: PairLogps) -> BatchT:
        """The batch with the reference's log-probabilities, as `reference_logps` gives them."""
        chosen, rejected = (
            part.reshape(batch.weight.shape) for part in (reference.chosen_logps, reference.rejected_logps)
        )
        return batch._replace(reference_chosen=chosen, reference_rejected=rejected)

    def without_cached(self, batch: BatchT) -> BatchT:
        """The batch without the reference's log-probabilities."""
        return batch._replace(reference_chosen=None, reference_rejected=None)

    def lengths(self, batch: BatchT) -> BatchLengths:
        """Numbers of tokens of a batch in numpy."""
        fields = batch.prompt_length, batch.chosen_length, batch.rejected_length
        prompt, *branches = (real_lengths(field, batch.weight) for field in fields)
        is_real = np.asarray(batch.weight) > 0
        targets = int(sum(np.sum(np.asarray(counts)[is_real]) for counts in self.target_counts(batch)))
        return BatchLengths(prompt, tuple(branches), targets, batch.reference_chosen is not None)

    def scores(self, data: Data, arrays: AbstractArrays, *shape: int) -> tuple[Any, ...]:
        """The abstract weights, reference log-probabilities and labels of pairs, the last three fields of a batch."""
        weight = arrays.array(*shape, dtype=jnp.float32)
        cached = weight if arrays.has_ref_logps else None
        return weight, cached, cached, weight if data.batch_kind == "feedback" else None

    def margins(self, data: Data, arrays: AbstractArrays, *shape: int) -> Any:
        """The abstract margins of pairs; None where the data have none."""
        return arrays.array(*shape, dtype=jnp.float32) if data.has_margins else None


class PairKind(AnyPairs[PairBatch]):
    """Padded pairs."""

    def rows(self, batch: PairBatch) -> Rows:
        """Rows `[B, P + 2R]`."""
        tokens = jnp.concatenate([batch.prompt, batch.chosen, batch.rejected], axis=1)
        return Rows(tokens, pair_positions(batch), row_layout.pair(batch.prompt.shape[1], batch.chosen.shape[1]))

    def targets(self, hidden: jax.Array, batch: PairBatch) -> Targets:
        """The tokens of both completions, `[B, 2R]`."""
        prompt, response = batch.prompt.shape[1], batch.chosen.shape[1]
        # A token is predicted from the slot before it, and the first of both completions from the prompt's last slot.
        from_prompt = hidden[:, prompt - 1 : prompt]  # [B, 1, D]
        for_chosen = hidden[:, prompt : prompt + response - 1]
        for_rejected = hidden[:, prompt + response : prompt + 2 * response - 1]
        predicting = jnp.concatenate([from_prompt, for_chosen, from_prompt, for_rejected], axis=1)  # [B, 2R, D]
        return Targets(predicting, jnp.concatenate([batch.chosen, batch.rejected], axis=1), self.target_mask(batch))

    def last_states(self, hidden: jax.Array, batch: PairBatch) -> jax.Array:
        """See `BatchKind.last_states`."""
        prompt, response = batch.prompt.shape[1], batch.chosen.shape[1]
        last = (prompt + batch.chosen_length - 1, prompt + response + batch.rejected_length - 1)
        return jnp.take_along_axis(hidden, jnp.stack(last, axis=1)[..., None], axis=1)

    def target_mask(self, batch: PairBatch) -> jax.Array:
        """Which targets count, `[B, 2R]`."""
        if batch.chosen_mask is not None:
            return jnp.concatenate([batch.chosen_mask, batch.rejected_mask], axis=1)
        slots = jnp.arange(batch.chosen.shape[1])[None, :]
        return jnp.concatenate(
            [slots < batch.chosen_length[:, None], slots < batch.rejected_length[:, None]], axis=1
        )  # [B, 2R]

    def target_counts(self, batch: PairBatch) -> tuple[jax.Array, jax.Array]:
        """See `AnyPairs.target_counts`."""
        if batch.chosen_mask is None:
            return batch.chosen_length.astype(jnp.float32), batch.rejected_length.astype(jnp.float32)
        chosen, rejected = (mask.sum(axis=1) for mask in (batch.chosen_mask, batch.rejected_mask))
        return chosen.astype(jnp.float32), rejected.astype(jnp.float32)

    def mtp_targets(self, hidden: jax.Array, batch: PairBatch) -> Targets:
        """The tokens of chosen completions `[B, R]`, from the states one slot before."""
        prompt, response = batch.prompt.shape[1], batch.chosen.shape[1]
        # For a completion's first token that of the prompt's last but one; a prompt of one slot has none.
        first = hidden[:, max(prompt - 2, 0) : max(prompt - 1, 1)]
        earlier = jnp.concatenate([first, hidden[:, prompt - 1 : prompt + response - 2]], axis=1)  # [B, R, D]
        return Targets(earlier, jnp.asarray(batch.chosen), self.mtp_mask(batch))

    def mtp_mask(self, batch: PairBatch) -> jax.Array:
        """The tokens of chosen or desirable completions with two tokens before them, `[B, R]`."""
        slots = jnp.arange(batch.chosen.shape[1])[None, :]
        is_read = batch.weight > 0 if batch.desirable is None else (batch.weight > 0) & (batch.desirable > 0)
        has_earlier = (slots > 0) | (batch.prompt_length[:, None] > 1)
        is_target = self.target_mask(batch)[:, : batch.chosen.shape[1]]
        return is_target & has_earlier & is_read[:, None]

    def loss_inputs(self, stats: TokenStats, batch: PairBatch, options: PairOptions) -> tuple[LossInputs, TokenStats]:
        """Summed log-probabilities of both completions `[B]`, and the statistics of their tokens `[B, 2R]`."""
        response = batch.chosen.shape[1]
        logp, counts = stats.logp, self.target_counts(batch)
        if options.ld_alpha != 1:
            mask, shared = self.target_mask(batch), jnp.minimum(*counts)[:, None]
            order = [jnp.cumsum(half, axis=1) for half in (mask[:, :response], mask[:, response:])]
            logp = logp * jnp.where(jnp.concatenate(order, axis=1) <= shared, 1.0, options.ld_alpha)
        chosen, rejected = jnp.sum(logp[:, :response], axis=1), jnp.sum(logp[:, response:], axis=1)
        token_stats = stats
        if batch.desirable is not None:  # a mismatched completion is left out of the metrics
            token_stats = stats._replace(mask=stats.mask.at[:, response:].set(0.0))
        logps = PairLogps(chosen, rejected, *counts, batch.desirable)
        if options.wpo_logps is not None:
            wpo = options.wpo_logps()
            means = jnp.sum(wpo[:, :response], axis=1) / counts[0] + jnp.sum(wpo[:, response:], axis=1) / counts[1]
            logps = logps._replace(likelihood=jnp.exp(means))
        return logps, weighted_stats(token_stats, batch.weight)

    def padded(self, batch: PairBatch) -> tuple[int, Lengths]:
        """Rows of a batch and the tokens of each, padding included."""
        response = batch.chosen.shape[1]
        return len(batch.weight), Lengths(batch.prompt.shape[1] + 2 * response, 2 * response)

    def abstract(self, data: Data, arrays: AbstractArrays, size: Size | None = None) -> PairBatch:
        """The largest batch of such data, without values."""
        prompt, response = data.max_lengths()
        tokens = arrays.array(prompt), arrays.array(response), arrays.array(response)
        lengths = arrays.array(), arrays.array(), arrays.array()
        return PairBatch(*tokens, *lengths, *self.scores(data, arrays), margin=self.margins(data, arrays))


def pair_positions(batch: PairBatch) -> TokenPositions:
    """Positions of the tokens of `[prompt | chosen | rejected]`; prompts are left-padded, completions right-padded."""
    prompt, response = batch.prompt.shape[1], batch.chosen.shape[1]
    start = batch.prompt_length[:, None]  # [B, 1]
    in_prompt = jnp.arange(prompt)[None, :] - (prompt - start)  # [B, P], negative in the padding
    after = jnp.arange(response)[None, :]  # [1, R]
    real = jnp.concatenate(
        [in_prompt >= 0, after < batch.chosen_length[:, None], after < batch.rejected_length[:, None]], axis=1
    )
    position = jnp.concatenate([in_prompt, start + after, start + after], axis=1)
    branch = np.repeat(np.arange(3), [prompt, response, response])  # [P + 2R]
    return TokenPositions(
        jnp.where(real, position, 0).astype(jnp.int32),
        real.astype(jnp.int32),
        jnp.broadcast_to(branch, (len(batch.prompt), branch.size)).astype(jnp.int32),
    )


register(PairBatch, PairKind(), "pairs", "feedback")
