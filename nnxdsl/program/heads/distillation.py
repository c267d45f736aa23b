"""Heads of distillation: the student's divergence from a teacher, and the teacher's distributions or their top k."""

from __future__ import annotations

from typing import Any

import attrs
import jax
import jax.numpy as jnp

from nnxdsl.config.objectives.distillation import Distill, SampledReverseKL
from nnxdsl.config.objectives.on_policy_distillation import OnPolicyDistill
from nnxdsl.data.batch import GroupBatch, RolloutBatch
from nnxdsl.losses.distillation import (
    DistillationInputs,
    TeacherOutputs,
    divergence,
    feature_distance,
    sampled_reverse_kl,
)
from nnxdsl.losses.lm_head.teacher_top_k import TeacherTopK, teacher_top_k, top_k_divergence
from nnxdsl.losses.lm_head.token_stats import TokenStats
from nnxdsl.program.batches import PairOptions, Targets
from nnxdsl.program.heads.base import Head, HeadInputs, HeadOutput
from nnxdsl.program.heads.logprobs import build


@attrs.frozen
class Distillation(Head):
    """The divergence from a teacher's distributions; without a teacher, log-probabilities of targets.

    Attributes:
        objective: The objective.
        temperature: Of log-probabilities.
    """

    objective: Distill | OnPolicyDistill
    temperature: float = 1.0  # pyright: ignore[reportIncompatibleVariableOverride] - a field in place of a default

    def of_teacher(self) -> Head:
        """See `Head.of_teacher`."""
        return Distributions()

    def reads_logps(self) -> bool:
        """Whether the loss has a gradient through log-probabilities of targets."""
        return self.objective.hard_weight > 0

    def read(self, inputs: HeadInputs, teacher: Any = None) -> HeadOutput:
        """See `Head.read`."""
        targets = inputs.targets()
        # Log-probabilities that the loss does not read get no gradient.
        stats = inputs.token_stats(targets, self.temperature, has_gradient=teacher is None or self.reads_logps())
        output = HeadOutput(*inputs.kind.loss_inputs(stats, inputs.batch, PairOptions()))
        if teacher is None:
            return output
        features = self.features(targets, teacher) if self.objective.feature_weight else None
        distillation = DistillationInputs(stats, self.divergence(inputs, targets, stats, teacher), features)
        rows = inputs.batch.weight.size  # of a group, a row for each completion
        return output._replace(loss_inputs=jax.tree.map(lambda x: x.reshape(rows, -1), distillation))

    def features(self, targets: Targets, teacher: TeacherOutputs) -> jax.Array:
        """The distance of hidden states, `[B, N]`."""
        return feature_distance(targets.hidden, teacher.hidden, targets.mask)

    def divergence(self, inputs: HeadInputs, targets: Targets, stats: TokenStats, teacher: TeacherOutputs) -> jax.Array:
        """The divergence at each target, `[B, N]`."""
        options = self.objective, inputs.soft_cap, inputs.limit, inputs.shard_context
        return divergence(targets.hidden, inputs.model.head(), teacher, targets.mask, *options)


@attrs.frozen
class TopKDistillation(Distillation):
    """The divergence from a teacher's top k; without a teacher, log-probabilities of targets."""

    def of_teacher(self) -> Head:
        """See `Head.of_teacher`."""
        return TopK(self.objective)

    def divergence(self, inputs: HeadInputs, targets: Targets, stats: TokenStats, teacher: TeacherTopK) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride] - each head has a teacher's head of its own
        """The divergence at each target, `[B, N]`."""
        options = self.objective, inputs.soft_cap, inputs.limit, inputs.shard_context
        return top_k_divergence(targets.hidden, inputs.model.head(), teacher, targets.mask, *options)


@attrs.frozen
class SampledDistillation(Distillation):
    """The estimate of the divergence from the teacher's log-probabilities of targets."""

    def of_teacher(self) -> Head:
        """See `Head.of_teacher`."""
        return TargetLogps(self.temperature)

    def reads_logps(self) -> bool:
        """See `Distillation.reads_logps`: that is all it reads."""
        return True

    def divergence(self, inputs: HeadInputs, targets: Targets, stats: TokenStats, teacher: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride] - each head has a teacher's head of its own
        """The estimate at each target, `[B, N]`."""
        return sampled_reverse_kl(stats.logp, teacher, targets.mask)


@attrs.frozen
class ServedDistillation(SampledDistillation):
    """The same from log-probabilities in the batch; without them, log-probabilities of targets."""

    def read(self, inputs: HeadInputs, teacher: Any = None) -> HeadOutput:
        """See `Head.read`."""
        assert isinstance(inputs.batch, RolloutBatch | GroupBatch)
        logps = inputs.batch.teacher_logps
        output = super().read(inputs, None if logps is None else logps.reshape(inputs.targets().mask.shape))
        return _with_teacher_index(output, inputs.batch)


@attrs.frozen
class ServedTopKDistillation(TopKDistillation):
    """The divergence from the top k in the batch; without them, log-probabilities of targets."""

    def read(self, inputs: HeadInputs, teacher: Any = None) -> HeadOutput:
        """See `Head.read`."""
        batch, shape = inputs.batch, inputs.targets().mask.shape
        assert isinstance(batch, RolloutBatch | GroupBatch)
        if batch.teacher_top_ids is None:
            return super().read(inputs)
        top_k = TeacherTopK(*(x.reshape(*shape, -1) for x in (batch.teacher_top_ids, batch.teacher_top_logps)))
        return _with_teacher_index(super().read(inputs, top_k), batch)


def _with_teacher_index(output: HeadOutput, batch: RolloutBatch | GroupBatch) -> HeadOutput:
    """The inputs of the loss with which of several teachers each row has."""
    if batch.teacher_index is None or not isinstance(output.loss_inputs, DistillationInputs):
        return output
    # Loss inputs are differentiated, integers cannot be.
    index = batch.teacher_index.reshape(-1, 1).astype(jnp.float32)
    return output._replace(loss_inputs=output.loss_inputs._replace(teacher_index=index))


@attrs.frozen
class TargetLogps(Head):
    """A teacher's log-probability of each target, `[B, N]`; they carry no gradient.

    Attributes:
        temperature: The temperature of logits.
    """

    temperature: float = 1.0  # pyright: ignore[reportIncompatibleVariableOverride] - a field in place of a default

    def read(self, inputs: HeadInputs, teacher: Any = None) -> HeadOutput:
        """See `Head.read`."""
        return HeadOutput(inputs.token_stats(inputs.targets(), self.temperature, has_gradient=False).logp)


@attrs.frozen
class Distributions(Head):
    """A teacher's whole distributions, as hidden states and head; they carry no gradient."""

    def read(self, inputs: HeadInputs, teacher: Any = None) -> HeadOutput:
        """See `Head.read`: `TeacherOutputs`."""
        predicting, head = jax.lax.stop_gradient((inputs.targets().hidden, inputs.model.head()))
        return HeadOutput(TeacherOutputs(predicting, head, inputs.soft_cap))


@attrs.frozen
class TopK(Head):
    """A teacher's top k of each target; they carry no gradient.

    Attributes:
        objective: The objective.
    """

    objective: Distill | OnPolicyDistill

    def read(self, inputs: HeadInputs, teacher: Any = None) -> HeadOutput:
        """See `Head.read`: `TeacherTopK`."""
        predicting, _, mask = inputs.targets()
        options = self.objective, inputs.soft_cap, inputs.limit, inputs.shard_context
        return HeadOutput(teacher_top_k(predicting, inputs.model.head(), mask, *options))


@build.register
def _(objective: Distill) -> Head:
    return Distillation(objective) if objective.top_k is None else TopKDistillation(objective)


@build.register
def _(objective: OnPolicyDistill) -> Head:
    if objective.served_teachers:
        head = ServedDistillation if objective.teacher_top_k is None else ServedTopKDistillation
    else:
        head = SampledDistillation if isinstance(objective.distance, SampledReverseKL) else Distillation
    return head(objective, objective.temperature)
