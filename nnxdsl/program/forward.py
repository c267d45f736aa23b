"""The forward pass of a model over a batch of any kind, and the outputs that losses read.

`batches/` has, for each kind of batch, its rows of tokens and its loss inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.config.experiment import Experiment
from nnxdsl.config.objectives.distillation import Distill
from nnxdsl.config.objectives.policy_gradient import PolicyGradient
from nnxdsl.config.optimizer import Muon
from nnxdsl.data.batch import Batch
from nnxdsl.losses.distillation import DistillationInputs, TeacherOutputs, divergence, feature_distance
from nnxdsl.losses.lm_head.teacher_top_k import TeacherTopK, teacher_top_k, top_k_divergence
from nnxdsl.losses.lm_head.token_stats import ShardContext, ShardCounts, TokenStats, token_stats
from nnxdsl.models.attention.indexer import INDEXER_STATS, IndexerStats
from nnxdsl.models.attention.max_logits import recording_max_logits
from nnxdsl.models.attention.positions import TokenPositions
from nnxdsl.models.attention.row_layout import RowLayout
from nnxdsl.models.decoder import Decoder, DecoderOutput, add_stats
from nnxdsl.models.logical_axes import Constraint, ShardMapCall, WeightSharding, sharding_hooks
from nnxdsl.models.moe.router import RouterStats
from nnxdsl.models.params import AbstractModel, is_stacked
from nnxdsl.models.pipeline import Stages
from nnxdsl.models.remat import Remat
from nnxdsl.program.attention_kernel import Kernels
from nnxdsl.program.batches import BatchKind, LossInputs, PairOptions, Targets, kind_of

Leaves = dict[str, jax.Array]
"""Arrays of a model by path."""


class ForwardOutput(NamedTuple):
    """One model's outputs of a micro-batch.

    Attributes:
        loss_inputs: Inputs of the objective's loss; their rows are those of `batch.weight.reshape(-1)`.
        token_stats: Statistics of every target token, without padding.
        router_stats: Router statistics of all layers over all real tokens; None where no loss reads them.
        mtp_stats: Token statistics of multi-token prediction (MTP); None where no loss reads them.
        max_logits: The largest attention scores, see `DecoderOutput`; None where no optimizer reads them.
        indexer_stats: Indexer statistics of all layers over all real tokens; None where no loss reads them.
    """

    loss_inputs: LossInputs
    token_stats: TokenStats
    router_stats: RouterStats | None
    mtp_stats: TokenStats | None = None
    max_logits: dict[str, jax.Array] | None = None
    indexer_stats: IndexerStats | None = None


class _Hidden(NamedTuple):
    """Outputs of a decoder; all but the first are None where nothing reads them.

    Attributes:
        hidden: Final hidden states `[B, T, D]`.
        router_stats: See `ForwardOutput`.
        mtp_hidden: Hidden states of multi-token prediction, `[B, T, D]`.
        max_logits: See `ForwardOutput`.
        indexer_stats: See `ForwardOutput`.
    """

    hidden: jax.Array
    router_stats: RouterStats | None
    mtp_hidden: jax.Array | None
    max_logits: dict[str, jax.Array] | None
    indexer_stats: IndexerStats | None


@attrs.frozen
class ForwardSharding:
    """The sharding of a forward pass over devices; without arguments, one CPU.

    Attributes:
        constrain: Constrains an activation's sharding by its logical axes; None on one device.
        shard_weights: Constrains a weight's sharding by its path, and fetches it where it is offloaded to host memory;
            None on one device.
        shard_map_call: Computes per device what XLA does not partition; None on one device.
        shard_counts: Over how many devices an activation's dimensions are sharded; None on one device.
        length_multiple: Rows are padded to a multiple of so many tokens, so that they divide over devices.
        stages: Pipeline stages of the stack of layers.
        row_shards: Over how many devices the rows are sharded.
        platform: "cpu", "gpu" or "tpu".
    """

    constrain: Constraint | None = None
    shard_weights: WeightSharding | None = None
    shard_map_call: ShardMapCall | None = None
    shard_counts: ShardCounts | None = None
    length_multiple: int = 1
    stages: int = 1
    row_shards: int = 1
    platform: str = "cpu"


@attrs.frozen
class ForwardOptions:
    """Outputs of a forward pass that losses and optimizer read; others are not computed.

    Attributes:
        temperature: The temperature of logits.
        ld_alpha: LD-DPO's weight of a pair's tokens beyond the length of the shorter completion.
        uses_wpo: Whether a loss reads WPO weights.
        distill: The distillation objective; None without a teacher.
        uses_router_stats: Whether a loss reads router statistics, whose backward pass would be computed even if not.
        uses_mtp: Whether a loss reads multi-token prediction (MTP).
        uses_max_logits: Whether the optimizer reads the largest attention scores.
        uses_indexer_stats: Whether a loss reads statistics of indexers.
    """

    temperature: float = 1.0
    ld_alpha: float = 1.0
    uses_wpo: bool = False
    distill: Distill | None = None
    uses_router_stats: bool = False
    uses_mtp: bool = False
    uses_max_logits: bool = False
    uses_indexer_stats: bool = False


def forward_options(experiment: Experiment) -> ForwardOptions:
    """The forward options of an experiment, from its objective and optimizer."""
    objective, optimizer = experiment.objective, experiment.optimizer
    return ForwardOptions(
        temperature=objective.temperature if isinstance(objective, PolicyGradient) else 1.0,
        ld_alpha=objective.ld_alpha,
        uses_wpo="wpo" in (term.weighting for term in objective.all_terms),
        distill=objective if isinstance(objective, Distill) else None,
        uses_router_stats=experiment.router_aux_loss_coef > 0,
        uses_mtp=experiment.mtp_loss_weight > 0,
        uses_max_logits=isinstance(optimizer, Muon) and optimizer.max_attention_logit is not None,
        uses_indexer_stats=experiment.indexer_loss_coef > 0,
    )


@attrs.frozen
class Forward:
    """A forward pass.

    Attributes:
        dtype: Of activations and products.
        remat: The rematerialization policy.
        logprob_tokens: The most tokens whose logits may exist at one time; None for the platform's default.
        kernels: Selects the attention kernel for rows of a layout.
        sharding: Its sharding over devices.
        options: Which outputs it computes.
    """

    dtype: Any
    remat: Remat
    logprob_tokens: int | None
    kernels: Kernels
    sharding: ForwardSharding = attrs.field(factory=ForwardSharding)
    options: ForwardOptions = attrs.field(factory=ForwardOptions)

    def read(self, model: Decoder, batch: Batch, teacher: TeacherOutputs | TeacherTopK | None = None) -> ForwardOutput:
        """The outputs of a model for a batch of any kind; with a teacher's outputs, the divergence from it."""
        kind, distill = kind_of(batch), self.options.distill
        states = self._hidden(model, kind, batch)
        targets = kind.targets(states.hidden, batch)
        mtp_targets = None if states.mtp_hidden is None else kind.mtp_targets(states.mtp_hidden, batch)
        mtp_stats = None if mtp_targets is None else self._stats(mtp_targets, model)
        # Log-probabilities that the loss does not read get no gradient.
        is_read = teacher is None or distill is None or distill.hard_weight > 0
        stats = self._stats(targets, model, has_gradient=is_read)
        wpo_logps = partial(self._wpo_logps, targets, model, stats) if self.options.uses_wpo else None
        loss_inputs, token_stats = kind.loss_inputs(stats, batch, PairOptions(self.options.ld_alpha, wpo_logps))
        if teacher is not None:
            features = None
            if distill is not None and distill.feature_weight and isinstance(teacher, TeacherOutputs):
                features = feature_distance(targets.hidden, teacher.hidden, targets.mask)
            loss_inputs = DistillationInputs(stats, self._divergence(targets, model, teacher), features)
        return ForwardOutput(
            loss_inputs, token_stats, states.router_stats, mtp_stats, states.max_logits, states.indexer_stats
        )

    def teacher_outputs(self, model: Decoder, batch: Batch) -> TeacherOutputs:
        """A teacher's outputs of a batch of sequences; carry no gradient."""
        kind = kind_of(batch)
        hidden, *_ = self._hidden(model, kind, batch)
        predicting, head = jax.lax.stop_gradient((kind.targets(hidden, batch).hidden, model.head()))
        return TeacherOutputs(predicting, head, model.config.logit_soft_cap)

    def teacher_top_k(self, model: Decoder, batch: Batch) -> TeacherTopK:
        """A teacher's top-k tokens at each target of a batch of sequences."""
        assert self.options.distill is not None
        kind = kind_of(batch)
        hidden, *_ = self._hidden(model, kind, batch)
        predicting, _, mask = kind.targets(hidden, batch)
        soft_cap = model.config.logit_soft_cap
        return teacher_top_k(
            predicting, model.head(), mask, self.options.distill, soft_cap, self.logprob_tokens, self.shard_context
        )

    @property
    def shard_context(self) -> ShardContext:
        """Platform and sharding of logits."""
        return ShardContext(
            self.sharding.platform, self.sharding.constrain, self.sharding.shard_counts, self.sharding.length_multiple
        )

    def model(self, template: AbstractModel, leaves: Mapping[str, jax.Array]) -> Decoder:
        """The model with these leaves; those outside the stack of layers are sharded here, the others at their use."""
        inside = {path: leaf for path, leaf in leaves.items() if is_stacked(path)}
        outside = {path: leaf for path, leaf in leaves.items() if path not in inside}
        model = template.merge({**inside, **self.with_shardings(outside)})
        assert isinstance(model, Decoder)
        return model

    def with_shardings(self, leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Weights, or their gradients, constrained to their shardings."""
        return {
            path: leaf if self.sharding.shard_weights is None else self.sharding.shard_weights(path, leaf)
            for path, leaf in leaves.items()
        }

    def _hidden(self, model: Decoder, kind: BatchKind[Any], batch: Batch) -> _Hidden:
        tokens, positions, row = kind.rows(batch)
        length = tokens.shape[1]
        if padding := -length % self.sharding.length_multiple:
            tokens = jnp.pad(tokens, ((0, 0), (0, padding)))
            positions = TokenPositions(
                *(jnp.pad(part, ((0, 0), (0, padding))) for part in positions)
            )  # segment 0: padding
        row = row.filled(tokens.shape[1])
        with sharding_hooks(self.sharding.constrain, self.sharding.shard_weights, self.sharding.shard_map_call):
            indexers = INDEXER_STATS.recording(self.options.uses_indexer_stats)
            with recording_max_logits(self.options.uses_max_logits), indexers:
                out = self._decode(model, tokens, positions, row)
            router_stats, indexer_stats, mtp_hidden = out.router_stats, out.indexer_stats, None
            if self.options.uses_mtp:
                mtp_positions, method = kind.mtp_positions(positions), self.kernels.method(row)
                with INDEXER_STATS.recording(self.options.uses_indexer_stats):
                    mtp_hidden, stats = model.mtp_hidden(
                        out.hidden, tokens, mtp_positions, dtype=self.dtype, remat=self.remat, method=method
                    )
                router_stats = add_stats(router_stats, stats.router)
                indexer_stats = add_stats(indexer_stats, stats.indexer)
                mtp_hidden = mtp_hidden[:, :length]
        router_stats = router_stats if self.options.uses_router_stats else None
        return _Hidden(out.hidden[:, :length], router_stats, mtp_hidden, out.max_logits or None, indexer_stats)

    def _decode(self, model: Decoder, tokens: jax.Array, positions: TokenPositions, row: RowLayout) -> DecoderOutput:
        """The decoder's output, computed in the order in which the attention kernel gives tokens to devices."""
        options = {"dtype": self.dtype, "remat": self.remat, "stages": self._stages(len(tokens))}
        order = self.kernels.token_order(row)
        if order is None:
            return model(tokens, positions, method=self.kernels.method(row), **options)
        take = partial(jnp.take, axis=1, unique_indices=True, mode="clip")
        places = TokenPositions(*(take(part, order) for part in positions))
        method = self.kernels.method(attrs.evolve(row, in_order=False))
        out = model(take(tokens, order), places, method=method, **options)
        return out._replace(hidden=take(out.hidden, np.argsort(order)))

    def _stages(self, rows: int) -> Stages | None:
        if self.sharding.stages == 1:
            return None
        return Stages(
            self.sharding.stages, parts_in_stages(self.sharding.stages, rows // self.sharding.row_shards), "stage"
        )

    def _wpo_logps(self, targets: Targets, model: Decoder, stats: TokenStats) -> jax.Array:
        """WPO's `log p - log(sum of p^2 over the vocabulary)` of each target, without gradient; zero where masked."""
        # log(sum of p^2) is the logsumexp of twice the logits, that is at half the temperature, minus 2 log_z.
        options = attrs.evolve(self.options, temperature=self.options.temperature / 2)
        half_temperature = attrs.evolve(self, options=options)
        log_z = half_temperature._stats(targets, model, has_gradient=False).log_z
        return jax.lax.stop_gradient(jnp.where(targets.mask, stats.logp + 2 * stats.log_z - log_z, 0.0))

    def _stats(self, targets: Targets, model: Decoder, *, has_gradient: bool = True) -> TokenStats:
        hidden, head, soft_cap = targets.hidden, model.head(), model.config.logit_soft_cap
        if not has_gradient:
            hidden, head = jax.lax.stop_gradient((hidden, head))
        if self.options.temperature != 1:  # of capped logits too: c tanh(z / c) / t is (c / t) tanh((z / t) / (c / t))
            hidden = hidden / self.options.temperature
            soft_cap = None if soft_cap is None else soft_cap / self.options.temperature
        limit = self.logprob_tokens
        return token_stats(hidden, head, targets.ids, targets.mask, limit, soft_cap, self.shard_context)

    def _divergence(self, targets: Targets, model: Decoder, teacher: TeacherOutputs | TeacherTopK) -> jax.Array:
        assert self.options.distill is not None
        compute = top_k_divergence if isinstance(teacher, TeacherTopK) else divergence
        options = self.options.distill, model.config.logit_soft_cap, self.logprob_tokens, self.shard_context
        return compute(targets.hidden, model.head(), teacher, targets.mask, *options)  # pyright: ignore[reportArgumentType]


def parts_in_stages(stages: int, rows: int) -> int:
    """The number of pipeline micro-batches of a device's rows: the largest divisor of `rows` up to four times `stages`.

    Stages are idle for little time then, and matrix products are still large.
    """
    return max(parts for parts in range(1, min(rows, 4 * stages) + 1) if rows % parts == 0)
