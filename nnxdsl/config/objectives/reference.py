"""The reference model that a policy is compared with."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a member replaces the family's default)

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import attrs

from nnxdsl.config.core.base import Spec, gather
from nnxdsl.config.core.validators import Limit, positive
from nnxdsl.config.objectives.divergence import ReverseKL
from nnxdsl.config.weights import PEFT, Random, Weights
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.config.experiment import Experiment
    from nnxdsl.config.objectives import reference as members


@attrs.frozen(kw_only=True)
class Reference(Spec):
    """The reference model that a policy is compared with."""

    Initial: ClassVar[type[members.Initial]]
    Checkpoint: ClassVar[type[members.Checkpoint]]
    Synced: ClassVar[type[members.Synced]]
    Uniform: ClassVar[type[members.Uniform]]

    weights: ClassVar[Weights | None] = None
    """Its weights, where they are not the policy's."""
    is_model: ClassVar[bool] = True
    """Whether it is a model, with log-probabilities of its own."""
    is_constant: ClassVar[bool] = True
    """Whether it stays the same while the policy is trained."""

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """The objective compares the policy with it."""
        if not experiment.objective.needs_reference:
            kind, name = type(self).__qualname__, type(experiment.objective).__qualname__
            yield Problem("reference", f"{kind} has no effect: {name} has no reference")


@attrs.frozen(kw_only=True)
class Initial(Reference):
    """The policy before its first step: the base of a new adapter, or the adapter that training continues."""

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """It is the default, which objectives without a reference leave unused."""
        return ()


@attrs.frozen(kw_only=True)
class Checkpoint(Reference):
    """Other weights of the same network, without the policy's adapter, and not quantized.

    They are read again whenever a run starts or resumes; a run is refused if they have changed.

    Attributes:
        weights: Where they come from: a directory of the Hub's format, a checkpoint, or another experiment.
    """

    weights: Weights = attrs.field(kw_only=False)

    def problems(self) -> Iterable[Problem]:
        """Its weights are a trained model's."""
        if isinstance(self.weights, Random | PEFT):
            message = "gives no trained model; use Weights.HF, Weights.Checkpoint or Weights.From"
            yield Problem("weights", f"{type(self.weights).__qualname__} {message}")

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """Its weights are those of the policy's network."""
        return gather(
            lambda: super(Checkpoint, self).check(experiment),
            lambda: attrs.evolve(experiment.model, weights=self.weights).check_earlier("reference"),
        )


@attrs.frozen(kw_only=True)
class Synced(Reference):
    """A copy of what is trained that follows the policy (TR-DPO, Gorbatovski et al. 2024, arXiv:2404.09656).

    After every so many optimizer steps it becomes `ref_model_mixup_alpha * policy + (1 - ref_model_mixup_alpha) *
    reference`, leaf by leaf, in float32. Of an adapter its own leaves are mixed, not the weights that they make: both
        are the same where `ref_model_mixup_alpha` is 1.

    Attributes:
        every_steps: Optimizer steps from one update to the next (the paper's tau).
        ref_model_mixup_alpha: The policy's share (the paper's alpha); 1 is its hard update.
    """

    is_constant: ClassVar[bool] = False

    every_steps: int = attrs.field(default=512, validator=positive)
    ref_model_mixup_alpha: float = attrs.field(default=0.6, validator=Limit(above=0, at_most=1))

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """There is one policy to follow, at every step."""
        yield from super().check(experiment)
        if experiment.objective.needs_reference and experiment.outer is not None:
            message = "follows the policy at every step, and outer weights change once in many; use Reference.Initial()"
            yield Problem("reference", f"{type(self).__qualname__} {message}")


@attrs.frozen(kw_only=True)
class Uniform(Reference):
    """No reference model: log-ratios are the policy's own log-probabilities.

    This is what TRL has called `reference_free`. Losses of a difference of log-ratios can do without a model; others
    would read how likely all answers together are.
    """

    is_model: ClassVar[bool] = False

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """The loss reads differences of log-ratios alone."""
        yield from super().check(experiment)
        objective = experiment.objective
        kind, name = type(self).__qualname__, type(objective).__qualname__
        if not objective.needs_reference:
            return
        divergences = [term.divergence for term in objective.all_terms]
        other = next((type(each).__qualname__ for each in divergences if not isinstance(each, ReverseKL | None)), None)
        if not objective.of_difference:
            message = (
                f"{name} reads more than differences of log-ratios, which are all that {kind} gives; use another one"
            )
            yield Problem("reference", message)
        elif other is not None:
            message = f"{other} makes scores of log-ratios, and {kind} gives none; use Divergence.ReverseKL()"
            yield Problem("reference", message)
