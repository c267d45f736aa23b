"""The teacher of distillation: computed in every step, or precomputed as the top-k tokens of each target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import jax

from nnxdsl.config.data import Data
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.objectives.sft import SFT
from nnxdsl.config.optimizer import SGD
from nnxdsl.config.precision import Precision
from nnxdsl.config.schedule import Constant
from nnxdsl.data.batch import Batch
from nnxdsl.losses.lm_head.teacher_top_k import TeacherTopK
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.params import AbstractModel, ParamSpec
from nnxdsl.program.batches import kind_of
from nnxdsl.program.forward import Forward, Leaves
from nnxdsl.program.heads import Head
from nnxdsl.program.heads import build as build_head
from nnxdsl.program.heads.distillation import TargetLogps

_NO_TEACHER = (
    "batch has no precomputed teacher top-k: give that of `nnxdsl.program.precomputed.with_teacher_top_k(program, "
    "teacher, batch)` with the weights of its `load_teacher(program)`, or leave objective.top_k out"
)


@attrs.frozen(eq=False)
class Teacher:
    """A frozen model, computed in the same step as the policy.

    Attributes:
        config: The network's config.
        template: The network.
        head: What its forward pass is read for.
        forward: Its forward pass; None before it is on devices.
    """

    config: DecoderConfig
    template: AbstractModel
    head: Head
    forward: Forward | None = None

    is_precomputed: ClassVar[bool] = False

    @property
    def has_distributions(self) -> bool:
        """Whether its distributions are compared, and not the log-probabilities of tokens alone."""
        return not isinstance(self.head, TargetLogps)

    @property
    def base(self) -> Mapping[str, ParamSpec]:
        """Its leaves, by path."""
        return self.template.variables

    @property
    def arrays(self) -> Mapping[str, ParamSpec]:
        """Its leaves that are part of the state."""
        return self.base

    def leaves(self, frozen: Leaves, reference: Leaves) -> Leaves:
        """Its leaves among those that a state has frozen or holds for reference."""
        return reference

    def map_forward(self, change: Callable[[Forward], Forward]) -> Teacher:
        """The teacher with a changed forward pass."""
        return self if self.forward is None else attrs.evolve(self, forward=change(self.forward))

    def outputs(self, leaves: Leaves, batch: Batch) -> Any:
        """Its outputs of a micro-batch, as its head reads them; carry no gradient. None without leaves."""
        return self.compute(leaves, batch) if leaves else None

    def compute(self, leaves: Leaves, batch: Batch) -> Any:
        """Its outputs of a micro-batch, computed even if the batch has them; carry no gradient."""
        assert self.forward is not None
        batch = kind_of(batch).for_teacher(batch)
        return jax.lax.stop_gradient(self.forward.read(self.forward.model(self.template, leaves), batch).loss_inputs)


@attrs.frozen(eq=False)
class BaseTeacher(Teacher):
    """The policy without its adapter, of which it shares the frozen weights: self-distillation."""

    @property
    def arrays(self) -> Mapping[str, ParamSpec]:
        """Empty: its weights are the policy's."""
        return {}

    def leaves(self, frozen: Leaves, reference: Leaves) -> Leaves:
        """The frozen leaves of the policy's base."""
        return {path: frozen[path] for path in self.base}


@attrs.frozen(eq=False)
class PrecomputedTeacher(Teacher):
    """A teacher whose top-k tokens are precomputed before the first step, and part of each batch."""

    is_precomputed: ClassVar[bool] = True

    @property
    def arrays(self) -> Mapping[str, ParamSpec]:
        """Empty: its weights are freed before the first step."""
        return {}

    def outputs(self, leaves: Leaves, batch: Batch) -> TeacherTopK:
        """The top-k tokens of the batch.

        Raises:
            ValueError: the batch has none.
        """
        top_k = kind_of(batch).teacher_top_k(batch)
        if top_k is None:
            raise ValueError(_NO_TEACHER)
        return top_k


def build_teacher(
    experiment: Experiment, config: DecoderConfig, template: AbstractModel, frozen: Mapping[str, ParamSpec]
) -> Teacher:
    """The teacher of an experiment.

    Args:
        experiment: Its objective has a teacher.
        config: The teacher's network.
        template: The same.
        frozen: The policy's frozen leaves.
    """
    objective = experiment.objective
    is_base = objective.teacher == experiment.model and experiment.quantization is None
    if objective.teacher_top_k is not None:
        kind = PrecomputedTeacher
    elif is_base and template.variables.items() <= frozen.items():
        kind = BaseTeacher
    else:
        kind = Teacher
    return kind(config, template, build_head(objective).of_teacher())


def teacher_of(experiment: Experiment) -> Experiment | None:
    """An experiment that starts from the teacher's weights, on one device; None where there is no teacher."""
    teacher = experiment.objective.teacher
    if teacher is None:
        return None
    return Experiment(
        name=experiment.name,
        model=teacher,
        data=Data.Text("none", max_length=2),  # it is built for its weights, and no row is read
        objective=SFT(loss_on="all"),
        optimizer=SGD(schedule=Constant(lr=1.0)),
        steps=1,
        batch_size=1,
        seed=experiment.seed,
        precision=Precision(compute=experiment.precision.compute),
    )
