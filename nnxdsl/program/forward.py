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
from nnxdsl.config.optimizer import Muon
from nnxdsl.data.batch import Batch
from nnxdsl.losses.lm_head.token_stats import ShardContext, ShardCounts, TokenStats
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
from nnxdsl.program.batches import BatchKind, LossInputs, kind_of
from nnxdsl.program.heads import Head, HeadInputs, LogProbs

Leaves = dict[str, jax.Array]
"""Arrays of a model by path."""


class ForwardOutput(NamedTuple):
    """One model's outputs of a micro-batch.

    Attributes:
        loss_inputs: Inputs of the objective's loss; their rows are those of `batch.weight.reshape(-1)`.
        token_stats: `TokenStats` of every target token, without padding; None for a head that reads no tokens.
        router_stats: Router statistics of all layers over all real tokens; None where no loss reads them.
        mtp_stats: Token statistics of multi-token prediction (MTP); None where no loss reads them.
        max_logits: The largest attention scores, see `DecoderOutput`; None where no optimizer reads them.
        indexer_stats: Indexer statistics of all layers over all real tokens; None where no loss reads them.
    """

    loss_inputs: LossInputs
    token_stats: Any
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
    """Statistics of a forward pass that auxiliary losses and optimizer read; others are not computed.

    Attributes:
        uses_router_stats: Whether a loss reads router statistics, whose backward pass would be computed even if not.
        uses_mtp: Whether a loss reads multi-token prediction (MTP).
        uses_max_logits: Whether the optimizer reads the largest attention scores.
        uses_indexer_stats: Whether a loss reads statistics of indexers.
    """

    uses_router_stats: bool = False
    uses_mtp: bool = False
    uses_max_logits: bool = False
    uses_indexer_stats: bool = False


def forward_options(experiment: Experiment) -> ForwardOptions:
    """The forward options of an experiment, from its auxiliary losses and its optimizer."""
    optimizer = experiment.optimizer
    return ForwardOptions(
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
        options: Which statistics it computes.
        head: What the final hidden states are read for.
    """

    dtype: Any
    remat: Remat
    logprob_tokens: int | None
    kernels: Kernels
    sharding: ForwardSharding = attrs.field(factory=ForwardSharding)
    options: ForwardOptions = attrs.field(factory=ForwardOptions)
    head: Head = attrs.field(factory=LogProbs)

    def read(self, model: Decoder, batch: Batch, teacher: Any = None) -> ForwardOutput:
        """The outputs of a model for a batch of any kind; `teacher` are a teacher's for the same batch."""
        kind = kind_of(batch)
        states = self._hidden(model, kind, batch)
        inputs = HeadInputs(model, batch, states.hidden, self.logprob_tokens, self.shard_context)
        mtp_targets = None if states.mtp_hidden is None else kind.mtp_targets(states.mtp_hidden, batch)
        mtp_stats = None if mtp_targets is None else inputs.token_stats(mtp_targets, self.head.temperature)
        loss_inputs, token_stats = self.head.read(inputs, teacher)
        return ForwardOutput(
            loss_inputs, token_stats, states.router_stats, mtp_stats, states.max_logits, states.indexer_stats
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
        tokens, positions, row, experts = kind.rows(batch)
        length = tokens.shape[1]
        if padding := -length % self.sharding.length_multiple:
            tokens = jnp.pad(tokens, ((0, 0), (0, padding)))
            positions = TokenPositions(
                *(jnp.pad(part, ((0, 0), (0, padding))) for part in positions)
            )  # segment 0: padding
            experts = None if experts is None else jnp.pad(experts, ((0, 0), (0, padding), (0, 0), (0, 0)))
        row = row.filled(tokens.shape[1])
        with sharding_hooks(self.sharding.constrain, self.sharding.shard_weights, self.sharding.shard_map_call):
            indexers = INDEXER_STATS.recording(self.options.uses_indexer_stats)
            with recording_max_logits(self.options.uses_max_logits), indexers:
                out = self._decode(model, tokens, positions, row, experts)
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

    def _decode(
        self,
        model: Decoder,
        tokens: jax.Array,
        positions: TokenPositions,
        row: RowLayout,
        experts: jax.Array | None,
    ) -> DecoderOutput:
        """The decoder's output, computed in the order in which the attention kernel gives tokens to devices."""
        options = {"dtype": self.dtype, "remat": self.remat, "stages": self._stages(len(tokens))}
        order = self.kernels.token_order(row)
        if order is None:
            return model(tokens, positions, method=self.kernels.method(row), routed_experts=experts, **options)
        take = partial(jnp.take, axis=1, unique_indices=True, mode="clip")
        places = TokenPositions(*(take(part, order) for part in positions))
        method = self.kernels.method(attrs.evolve(row, in_order=False))
        experts = None if experts is None else take(experts, order)
        out = model(take(tokens, order), places, method=method, routed_experts=experts, **options)
        return out._replace(hidden=take(out.hidden, np.argsort(order)))

    def _stages(self, rows: int) -> Stages | None:
        if self.sharding.stages == 1:
            return None
        return Stages(
            self.sharding.stages, parts_in_stages(self.sharding.stages, rows // self.sharding.row_shards), "stage"
        )


def parts_in_stages(stages: int, rows: int) -> int:
    """The number of pipeline micro-batches of a device's rows: the largest divisor of `rows` up to four times `stages`.

    Stages are idle for little time then, and matrix products are still large.
    """
    return max(parts for parts in range(1, min(rows, 4 * stages) + 1) if rows % parts == 0)
