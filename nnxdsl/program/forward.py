"""From a batch to the log-probabilities that a loss reads: a pair's prompt is computed once, its completions after it.

A pair is laid out as one row `[prompt | chosen | rejected]`. Everything position-wise runs on that row; in attention
both completions see the prompt and themselves, and not each other. Both start at the position after the prompt's end.
In packed batches several such pairs, or sequences, stand in one row, and do not see each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.config.objectives.distillation import Distill
from nnxdsl.data.batch import Batch, PackedPairs, PackedSequences, PairBatch, RolloutBatch, SequenceBatch
from nnxdsl.losses.base import PairLogps
from nnxdsl.losses.distillation import DistillationInputs, TeacherOutputs, distance, feature_distance
from nnxdsl.losses.grpo import RolloutOutputs
from nnxdsl.losses.lm_head.teacher_top_k import TeacherTopK, teacher_top_k, top_distance
from nnxdsl.losses.lm_head.token_stats import Cuts, ShardContext, TokenStats, token_stats
from nnxdsl.models.attention import row_layout as rows
from nnxdsl.models.attention.positions import TokenPositions, positions_right_padded
from nnxdsl.models.attention.row_layout import RowLayout
from nnxdsl.models.decoder import Decoder, add_router_stats
from nnxdsl.models.logical_axes import Constraint, ShardMapCall, WeightSharding, sharding_hooks
from nnxdsl.models.moe.router import RouterStats
from nnxdsl.models.params import AbstractModel
from nnxdsl.models.pipeline import Stages
from nnxdsl.models.remat import Remat
from nnxdsl.program.attention_kernel import Kernels

Leaves = dict[str, jax.Array]
"""Arrays of a model by path."""

LossInputs = PairLogps | TokenStats | RolloutOutputs | DistillationInputs
"""What a loss reads of one model: of pairs, of the tokens of sequences, of a policy's completions, or of a student."""


class ForwardOutput(NamedTuple):
    """What one model says of a micro-batch.

    Attributes:
        scored: What the loss reads: of pairs, of the tokens of sequences, or of a policy's answers. Goes with
            `batch.weight.reshape(-1)`.
        stats: Of every target token, filling left out.
        routing: What the routers of all layers say of all real tokens; None where no loss reads it.
        further: As `stats`, of targets that are predicted one token earlier; None where no loss reads it. Goes with
            `batch.weight` as what is scored does.
    """

    scored: LossInputs
    stats: TokenStats
    routing: RouterStats | None
    further: TokenStats | None = None


@attrs.frozen
class Forward:
    """How a forward pass is computed.

    Attributes:
        dtype: Of activations and products.
        remat: What is kept for the backward pass.
        logprob_tokens: The most tokens whose logits may exist at one time; None for as many as are quick.
        constrain: Lays an activation out over the devices by its logical axes; None on one device.
        arrive: Lays a weight out, by its path, and fetches it from the host's memory if it lies there; None as above.
        length_multiple: Rows are filled to a multiple of so many tokens, so that they can be cut into as many parts.
        stages: In how many stages the stack of layers is cut.
        row_shards: Over how many devices the rows are cut.
        cuts: In how many pieces an activation's dimensions are cut; None on one device.
        platform: "cpu", "gpu" or "tpu".
        kernels: What chooses attention's kernel for rows of a layout.
        apart: Computes what cannot be cut on each device's part of activations; None on one device.
        routed: Whether a loss reads what routers say; what nothing reads would be computed backward all the same.
        temperature: What logits are divided by before they are log-probabilities.
        ld_alpha: What a token of a pair counts beyond the length of the shorter completion.
        weighted: Whether a loss reads how likely the policy finds completions.
        distill: How the distance from a teacher is measured; None where there is none.
        further: Whether a loss reads what is predicted one token earlier.
    """

    dtype: Any
    remat: Remat
    logprob_tokens: int | None
    constrain: Constraint | None = None
    arrive: WeightSharding | None = None
    length_multiple: int = 1
    stages: int = 1
    row_shards: int = 1
    cuts: Cuts | None = None
    platform: str = "cpu"
    kernels: Kernels = attrs.field(factory=Kernels)
    apart: ShardMapCall | None = None
    routed: bool = False
    temperature: float = 1.0
    ld_alpha: float = 1.0
    weighted: bool = False
    distill: Distill | None = None
    further: bool = False

    def read(self, model: Decoder, batch: Batch, taught: TeacherOutputs | TeacherTopK | None = None) -> ForwardOutput:
        """What a model says of a batch of any kind; with what a teacher says of it, how far the two are apart."""
        hidden, routing, beyond = self._hidden(model, *_laid_out(batch))
        further = None
        if isinstance(batch, PackedPairs):
            scored, stats = self._packed_pairs(model, hidden, batch)
        elif isinstance(batch, PairBatch):
            scored, stats = self._pairs(model, hidden, batch)
            stats = stats._replace(mask=stats.mask * batch.weight[:, None])
        else:
            predicting, targets, mask = _predicting(hidden, batch)
            if beyond is not None and not isinstance(batch, RolloutBatch):
                further = self._stats(_earlier(beyond, batch), model, targets, mtp_mask(batch))
            learnt = taught is None or self.distill is None or self.distill.hard_weight > 0
            # What nothing is learnt from is not computed backward.
            said = self._stats(predicting, model, targets, mask, learnt=learnt)
            stats = said._replace(mask=said.mask * batch.weight[:, None])
            scored = said
            if isinstance(batch, RolloutBatch):
                scored = RolloutOutputs(said, batch.advantage, batch.limit, batch.old)
            elif taught is not None:
                features = None
                if self.distill is not None and self.distill.feature_weight and isinstance(taught, TeacherOutputs):
                    features = feature_distance(predicting, taught.hidden, mask)
                scored = DistillationInputs(said, self._distance(predicting, model, taught, mask), features)
        return ForwardOutput(scored, stats, routing, further)

    def teach(self, model: Decoder, batch: Batch) -> TeacherOutputs:
        """What a teacher says of a batch of sequences; carries no gradient."""
        assert isinstance(batch, SequenceBatch | PackedSequences)
        hidden, _, _ = self._hidden(model, *_laid_out(batch))
        predicting, _, _ = _predicting(hidden, batch)
        predicting, head = jax.lax.stop_gradient((predicting, model.head()))
        return TeacherOutputs(predicting, head, model.config.logit_soft_cap)

    def top(self, model: Decoder, batch: Batch) -> TeacherTopK:
        """The words that a teacher finds likeliest in place of each target of a batch of sequences."""
        assert isinstance(batch, SequenceBatch | PackedSequences)
        assert self.distill is not None
        hidden, _, _ = self._hidden(model, *_laid_out(batch))
        predicting, _, mask = _predicting(hidden, batch)
        where = ShardContext(self.platform, self.constrain, self.cuts, self.length_multiple)
        soft_cap = model.config.logit_soft_cap
        return teacher_top_k(predicting, model.head(), mask, self.distill, soft_cap, self.logprob_tokens, where)

    def _pairs(self, model: Decoder, hidden: jax.Array, batch: PairBatch) -> tuple[PairLogps, TokenStats]:
        """Summed log-probabilities of both completions, and the statistics of each of their tokens `[B, 2R]`."""
        prompt, response = batch.prompt.shape[1], batch.chosen.shape[1]
        # A token is predicted from the slot before it, and the first of both completions from the prompt's last slot.
        from_prompt = hidden[:, prompt - 1 : prompt]  # [B, 1, D]
        for_chosen = hidden[:, prompt : prompt + response - 1]
        for_rejected = hidden[:, prompt + response : prompt + 2 * response - 1]
        predicting = jnp.concatenate([from_prompt, for_chosen, from_prompt, for_rejected], axis=1)  # [B, 2R, D]
        targets = jnp.concatenate([batch.chosen, batch.rejected], axis=1)
        real = jnp.arange(response)[None, :]
        mask = jnp.concatenate(
            [real < batch.chosen_length[:, None], real < batch.rejected_length[:, None]], axis=1
        )  # [B, 2R]
        stats = self._stats(predicting, model, targets, mask)
        logp = stats.logp
        if self.ld_alpha != 1:
            shared = jnp.minimum(batch.chosen_length, batch.rejected_length)[:, None]
            logp = logp * jnp.tile(jnp.where(real < shared, 1.0, self.ld_alpha), (1, 2))
        chosen, rejected = jnp.sum(logp[:, :response], axis=1), jnp.sum(logp[:, response:], axis=1)
        lengths = (batch.chosen_length.astype(jnp.float32), batch.rejected_length.astype(jnp.float32))
        if batch.desirable is not None:  # of a mismatched completion nothing is told
            stats = stats._replace(mask=stats.mask.at[:, response:].set(0.0))
        said = PairLogps(chosen, rejected, *lengths, batch.desirable)
        if not self.weighted:
            return said, stats
        own = self._aligned(predicting, model, stats, targets, mask)
        means = jnp.sum(own[:, :response], axis=1) / lengths[0] + jnp.sum(own[:, response:], axis=1) / lengths[1]
        return said._replace(likelihood=jnp.exp(means)), stats

    def _packed_pairs(self, model: Decoder, hidden: jax.Array, batch: PackedPairs) -> tuple[PairLogps, TokenStats]:
        """As `_pairs`, of all pairs `[G * K]`; the statistics of each target `[G, C]`."""
        pairs = batch.weight.shape[1]
        predicting = _of_sources(hidden, batch)
        stats = self._stats(predicting, model, batch.target, batch.owner < 2 * pairs)
        # A sum over all targets for each completion, and no scatter: float32 on every platform, always in one order.
        own = batch.owner[:, None, :] == jnp.arange(2 * pairs)[:, None]  # [G, 2K, C]
        logp = jnp.where(own, stats.logp[:, None, :], 0.0)
        if self.ld_alpha != 1:
            shared = jnp.tile(jnp.minimum(batch.chosen_length, batch.rejected_length), (1, 2))[:, :, None]  # [G, 2K, 1]
            logp = logp * jnp.where(jnp.cumsum(own, axis=-1) <= shared, 1.0, self.ld_alpha)
        sums = jnp.sum(logp, axis=-1)
        scored = sums[:, :pairs], sums[:, pairs:]
        lengths = (batch.chosen_length.astype(jnp.float32), batch.rejected_length.astype(jnp.float32))
        said = PairLogps(*(part.reshape(-1) for part in (*scored, *lengths)))
        if self.weighted:
            slots = hidden.reshape(len(batch.tokens), -1, hidden.shape[-1])  # [G, r * T, D]
            predicting = jnp.take_along_axis(slots, batch.source[:, :, None], axis=1)  # [G, C, D]
            likely = self._aligned(predicting, model, stats, batch.target, batch.owner < 2 * pairs)
            sums = jnp.sum(jnp.where(own, likely[:, None, :], 0.0), axis=-1)
            means = sums[:, :pairs] / lengths[0] + sums[:, pairs:] / lengths[1]
            said = said._replace(likelihood=jnp.exp(means).reshape(-1))
        if batch.desirable is None:
            return said, stats
        stats = stats._replace(mask=stats.mask * (batch.owner < pairs))
        return said._replace(desirable=batch.desirable.reshape(-1)), stats

    def model(self, template: AbstractModel, leaves: Mapping[str, jax.Array]) -> Decoder:
        """The model of these leaves, those outside the stack of layers laid out: the others are when they are used."""
        inside = {path: leaf for path, leaf in leaves.items() if path.startswith("layers.")}
        outside = {path: leaf for path, leaf in leaves.items() if path not in inside}
        model = template.merge({**inside, **self.laid_out(outside)})
        assert isinstance(model, Decoder)
        return model

    def laid_out(self, leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Weights, or their gradients, where the layout wants them."""
        return {path: leaf if self.arrive is None else self.arrive(path, leaf) for path, leaf in leaves.items()}

    def _hidden(
        self, model: Decoder, tokens: jax.Array, places: TokenPositions, row: RowLayout
    ) -> tuple[jax.Array, RouterStats | None, jax.Array | None]:
        """Final hidden states `[B, T, D]` of tokens `[B, T]`, in rows that are laid out so, and what routers say.

        The last are the states that predict the token after the next one, where a loss reads them.
        """
        length = tokens.shape[1]
        if fill := -length % self.length_multiple:
            tokens = jnp.pad(tokens, ((0, 0), (0, fill)))
            places = TokenPositions(*(jnp.pad(part, ((0, 0), (0, fill))) for part in places))  # segment 0 is padding
        method = self.kernels.method(row.filled(tokens.shape[1]))
        with sharding_hooks(self.constrain, self.arrive, self.apart):
            stages = self._stages(len(tokens))
            out = model(tokens, places, dtype=self.dtype, remat=self.remat, stages=stages, method=method)
            routing, beyond = out.router_stats, None
            if self.further:
                given = {"dtype": self.dtype, "remat": self.remat, "method": method}
                beyond, more = model.mtp_hidden(out.hidden, tokens, places, **given)
                routing, beyond = add_router_stats(routing, more), beyond[:, :length]
        return out.hidden[:, :length], routing if self.routed else None, beyond

    def _stages(self, rows: int) -> Stages | None:
        if self.stages == 1:
            return None
        return Stages(self.stages, parts_in_stages(self.stages, rows // self.row_shards), "stage")

    def _aligned(
        self, hidden: jax.Array, model: Decoder, stats: TokenStats, targets: jax.Array, mask: jax.Array
    ) -> jax.Array:
        """Of each target `log p - log(sum of p^2 over all words)`, without a gradient; zero where the mask is off."""
        # The sum of squares is the sum of exponentials of twice the logits, over the square of that of the logits.
        sharper = attrs.evolve(self, temperature=self.temperature / 2)
        log_z = sharper._stats(hidden, model, targets, mask, learnt=False).log_z
        return jax.lax.stop_gradient(jnp.where(mask, stats.logp + 2 * stats.log_z - log_z, 0.0))

    def _stats(
        self, hidden: jax.Array, model: Decoder, targets: jax.Array, mask: jax.Array, *, learnt: bool = True
    ) -> TokenStats:
        where = ShardContext(self.platform, self.constrain, self.cuts, self.length_multiple)
        head, soft_cap = model.head(), model.config.logit_soft_cap
        if not learnt:
            hidden, head = jax.lax.stop_gradient((hidden, head))
        if self.temperature != 1:  # of capped logits too: c tanh(z / c) / t is (c / t) tanh((z / t) / (c / t))
            hidden = hidden / self.temperature
            soft_cap = None if soft_cap is None else soft_cap / self.temperature
        return token_stats(hidden, head, targets, mask, self.logprob_tokens, soft_cap, where)

    def _distance(
        self, hidden: jax.Array, model: Decoder, taught: TeacherOutputs | TeacherTopK, mask: jax.Array
    ) -> jax.Array:
        assert self.distill is not None
        where = ShardContext(self.platform, self.constrain, self.cuts, self.length_multiple)
        soft_cap = model.config.logit_soft_cap
        if isinstance(taught, TeacherTopK):
            head, limit = model.head(), self.logprob_tokens
            return top_distance(hidden, head, taught, mask, self.distill, soft_cap, limit, where)
        return distance(hidden, model.head(), taught, mask, self.distill, soft_cap, self.logprob_tokens, where)


def _of_sources(hidden: jax.Array, batch: PackedPairs | PackedSequences) -> jax.Array:
    """The states `[G, C, D]` that predict the targets of each block."""
    hidden = hidden.reshape(len(batch.tokens), -1, hidden.shape[-1])  # [G, r * T, D]
    return jnp.take_along_axis(hidden, batch.source[:, :, None], axis=1)


def _predicting(
    hidden: jax.Array, batch: SequenceBatch | PackedSequences | RolloutBatch
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The states that predict the targets of sequences of any kind, the targets, and which of them count."""
    if isinstance(batch, PackedSequences):
        return _of_sources(hidden, batch), batch.target, batch.loss_mask
    if isinstance(batch, RolloutBatch):  # the first token of an answer is predicted from the prompt's last
        prompt = batch.length - jnp.sum(batch.loss_mask, axis=1)  # [B]
        source = prompt[:, None] - 1 + jnp.arange(batch.answer.shape[1])
        source = jnp.minimum(source, hidden.shape[1] - 1)  # of the filling
        return jnp.take_along_axis(hidden, source[:, :, None], axis=1), batch.answer, batch.loss_mask
    return hidden[:, :-1], batch.tokens[:, 1:], batch.loss_mask[:, 1:]


def _earlier(hidden: jax.Array, batch: SequenceBatch | PackedSequences) -> jax.Array:
    """The states one slot before those of `_predicting`; of a row's first target any."""
    if isinstance(batch, PackedSequences):
        return _of_sources(hidden, batch._replace(source=jnp.maximum(batch.source - 1, 0)))
    return jnp.concatenate([hidden[:, :1], hidden[:, :-2]], axis=1)


def mtp_mask(batch: SequenceBatch | PackedSequences) -> jax.Array:
    """Which targets count where they are predicted one token earlier: the token before that is of the same sequence.

    Args:
        batch: Sequences.

    Returns:
        A mask in the form of `target_mask`.
    """
    if not isinstance(batch, PackedSequences):
        return jnp.asarray(batch.loss_mask[:, 1:]).at[:, :1].set(False)
    length, slots = batch.tokens.shape[-1], batch.segment.reshape(len(batch.tokens), -1)  # [G, r * T]
    before = jnp.maximum(batch.source - 1, 0)
    same = jnp.take_along_axis(slots, before, axis=1) == jnp.take_along_axis(slots, batch.source, axis=1)
    return batch.loss_mask & same & (batch.source % length > 0)


def target_mask(batch: SequenceBatch | PackedSequences) -> jax.Array:
    """Which targets of sequences count, `[B, T - 1]`, or `[G, C]` of packed ones."""
    return jnp.asarray(batch.loss_mask if isinstance(batch, PackedSequences) else batch.loss_mask[:, 1:])


def parts_in_stages(stages: int, rows: int) -> int:
    """In how many parts a device's rows follow each other through the stages.

    As many as there are rows for, up to four times the stages: little time is lost then, and products are still large.
    """
    return max(parts for parts in range(1, min(rows, 4 * stages) + 1) if rows % parts == 0)


def _laid_out(batch: Batch) -> tuple[jax.Array, TokenPositions, RowLayout]:
    """The tokens of a batch as rows `[B, T]`, where they stand, and what is known of every row."""
    if isinstance(batch, PairBatch):
        tokens = jnp.concatenate([batch.prompt, batch.chosen, batch.rejected], axis=1)  # [B, P + 2R]
        return tokens, pair_places(batch), rows.pair(batch.prompt.shape[1], batch.chosen.shape[1])
    if isinstance(batch, SequenceBatch | RolloutBatch):
        length = batch.tokens.shape[1]
        return jnp.asarray(batch.tokens), positions_right_padded(batch.length, length), rows.sequence(length)
    branch = batch.branch if isinstance(batch, PackedPairs) else jnp.zeros_like(batch.segment)
    length = batch.tokens.shape[-1]
    tokens, *places = (x.reshape(-1, length) for x in (batch.tokens, batch.position, batch.segment, branch))
    return tokens, TokenPositions(*places), rows.packed(length)


def pair_places(batch: PairBatch) -> TokenPositions:
    """Where the tokens of `[prompt | chosen | rejected]` stand: prompts end at their last slot, completions do not."""
    prompt, response = batch.prompt.shape[1], batch.chosen.shape[1]
    start = batch.prompt_length[:, None]  # [B, 1]
    in_prompt = jnp.arange(prompt)[None, :] - (prompt - start)  # [B, P], negative in the padding
    after = jnp.arange(response)[None, :]  # [1, R]
    rows = batch.prompt.shape[0]
    real = jnp.concatenate(
        [in_prompt >= 0, after < batch.chosen_length[:, None], after < batch.rejected_length[:, None]], axis=1
    )
    position = jnp.concatenate([in_prompt, start + after, start + after], axis=1)
    branch = np.repeat(np.arange(3), [prompt, response, response])  # [P + 2R]
    return TokenPositions(
        jnp.where(real, position, 0).astype(jnp.int32),
        real.astype(jnp.int32),
        jnp.broadcast_to(branch, (rows, branch.size)).astype(jnp.int32),
    )


def cached_reference_logps(batch: Batch) -> PairLogps | None:
    """What a batch carries of the reference; None if nothing."""
    if not isinstance(batch, PairBatch | PackedPairs) or batch.reference_chosen is None:
        return None
    lengths = (batch.chosen_length.astype(jnp.float32), batch.rejected_length.astype(jnp.float32))
    return PairLogps(*(part.reshape(-1) for part in (batch.reference_chosen, batch.reference_rejected, *lengths)))


def with_reference_logps(batch: Batch, scored: LossInputs) -> PairBatch | PackedPairs:
    """The batch with what the reference says of it, as `cached_reference_logps` finds it again.

    Raises:
        ValueError: the batch has no pairs.
    """
    if not isinstance(batch, PairBatch | PackedPairs) or not isinstance(scored, PairLogps):
        raise ValueError("what a reference says can be kept of pairs alone")
    chosen, rejected = (part.reshape(batch.weight.shape) for part in (scored.chosen, scored.rejected))
    return batch._replace(reference_chosen=chosen, reference_rejected=rejected)


def without_cached(batch: Batch) -> Batch:
    """The batch without what it carries of a reference or a teacher, so that one compiled program serves both."""
    if isinstance(batch, SequenceBatch | PackedSequences):
        return batch._replace(teacher_words=None, teacher_logp=None)
    if not isinstance(batch, PairBatch | PackedPairs):
        return batch
    return batch._replace(reference_chosen=None, reference_rejected=None)
