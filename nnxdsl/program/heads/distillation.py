"""Heads of distillation: the student's divergence from a teacher, and the teacher's distributions or their top k."""

from __future__ import annotations

from typing import Any

import attrs
import jax

from nnxdsl.config.objectives.distillation import Distill
from nnxdsl.losses.distillation import DistillationInputs, TeacherOutputs, divergence, feature_distance
from nnxdsl.losses.lm_head.teacher_top_k import TeacherTopK, teacher_top_k, top_k_divergence
from nnxdsl.program.batches import PairOptions, Targets
from nnxdsl.program.heads.base import Head, HeadInputs, HeadOutput
from nnxdsl.program.heads.logprobs import build


@attrs.frozen
class Distillation(Head):
    """The divergence from a teacher's distributions; without a teacher, log-probabilities of targets.

    Attributes:
        objective: The objective.
    """

    objective: Distill

    def read(self, inputs: HeadInputs, teacher: Any = None) -> HeadOutput:
        """See `Head.read`."""
        targets = inputs.targets()
        # Log-probabilities that the loss does not read get no gradient.
        is_read = teacher is None or self.objective.hard_weight > 0
        stats = inputs.token_stats(targets, has_gradient=is_read)
        output = HeadOutput(*inputs.kind.loss_inputs(stats, inputs.batch, PairOptions()))
        if teacher is None:
            return output
        features = self.features(targets, teacher) if self.objective.feature_weight else None
        return output._replace(
            loss_inputs=DistillationInputs(stats, self.divergence(inputs, targets, teacher), features)
        )

    def features(self, targets: Targets, teacher: TeacherOutputs) -> jax.Array:
        """The distance of hidden states, `[B, N]`."""
        return feature_distance(targets.hidden, teacher.hidden, targets.mask)

    def divergence(self, inputs: HeadInputs, targets: Targets, teacher: TeacherOutputs) -> jax.Array:
        """The divergence at each target, `[B, N]`."""
        options = self.objective, inputs.soft_cap, inputs.limit, inputs.shard_context
        return divergence(targets.hidden, inputs.model.head(), teacher, targets.mask, *options)


@attrs.frozen
class TopKDistillation(Distillation):
    """The divergence from a teacher's top k; without a teacher, log-probabilities of targets."""

    def divergence(self, inputs: HeadInputs, targets: Targets, teacher: TeacherTopK) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride] - the objective decides which of the two a teacher gives
        """The divergence at each target, `[B, N]`."""
        options = self.objective, inputs.soft_cap, inputs.limit, inputs.shard_context
        return top_k_divergence(targets.hidden, inputs.model.head(), teacher, targets.mask, *options)


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

    objective: Distill

    def read(self, inputs: HeadInputs, teacher: Any = None) -> HeadOutput:
        """See `Head.read`: `TeacherTopK`."""
        predicting, _, mask = inputs.targets()
        options = self.objective, inputs.soft_cap, inputs.limit, inputs.shard_context
        return HeadOutput(teacher_top_k(predicting, inputs.model.head(), mask, *options))


@build.register
def _(objective: Distill) -> Head:
    return Distillation(objective) if objective.top_k is None else TopKDistillation(objective)
