"""The model that a policy is compared with, where its objective compares, and what goes with what."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import attrs

from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.validators import Limit, positive
from nnxdsl.config.objectives.divergence import ReverseKL
from nnxdsl.config.weights import PEFT, Random, Weights
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.config.experiment import Experiment
    from nnxdsl.config.objectives import reference as members
    from nnxdsl.config.objectives.base import Objective


@attrs.frozen(kw_only=True)
class Reference(Spec):
    """The model that a policy is compared with."""

    Initial: ClassVar[type[members.Initial]]
    Checkpoint: ClassVar[type[members.Checkpoint]]
    Synced: ClassVar[type[members.Synced]]
    Uniform: ClassVar[type[members.Uniform]]


@attrs.frozen(kw_only=True)
class Initial(Reference):
    """The policy as it was before any step: the base of a new adapter, or what another adapter went on from."""


@attrs.frozen(kw_only=True)
class Checkpoint(Reference):
    """Other weights of the same network, without the policy's adapter, and not in few bits.

    They are read anew whenever a run begins or goes on, and a run that finds others than before is refused.

    Attributes:
        weights: Where they come from: a directory of the Hub's format, a checkpoint, or another experiment.
    """

    weights: Weights = attrs.field(kw_only=False)

    def problems(self) -> Iterable[Problem]:
        """Weights must be somebody's."""
        if isinstance(self.weights, Random | PEFT):
            message = "gives no trained model; use Weights.HF, Weights.Checkpoint or Weights.From"
            yield Problem("weights", f"{type(self.weights).__qualname__} {message}")


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

    every_steps: int = attrs.field(default=512, validator=positive)
    ref_model_mixup_alpha: float = attrs.field(default=0.6, validator=Limit(above=0, at_most=1))


@attrs.frozen(kw_only=True)
class Uniform(Reference):
    """No model: all answers count as equally likely, so that log-ratios are the policy's own log-probabilities.

    This is what TRL has called `reference_free`. Losses of a difference of log-ratios can do without a model; others
    would read how likely all answers together are.
    """


def _scored(objective: Objective) -> str | None:
    """The name of a divergence that is more than a log-ratio, of an objective or of a term of it."""
    found = (getattr(term, "divergence", None) for term in objective.all_terms)
    return next((type(each).__qualname__ for each in found if not isinstance(each, ReverseKL | None)), None)


def reference_problems(experiment: Experiment) -> Iterable[Problem]:
    """What is wrong between an experiment's reference and its other parts."""
    reference, objective = experiment.reference, experiment.objective
    kind, name = type(reference).__qualname__, type(objective).__qualname__
    asked = experiment.memory.reference
    if not isinstance(reference, Initial) and not objective.needs_reference:
        yield Problem("reference", f"{kind} has no effect: {name} has no reference")
    elif isinstance(reference, Uniform) and not objective.of_difference:
        message = f"{name} reads more than a difference of log-ratios, which is all that {kind} gives; use another one"
        yield Problem("reference", message)
    elif isinstance(reference, Uniform) and (scored := _scored(objective)):
        message = f"{scored} makes scores of log-ratios, and {kind} gives none; use Divergence.ReverseKL()"
        yield Problem("reference", message)
    if asked == "auto":
        return
    if not objective.needs_reference:
        yield Problem("memory.reference", f"{asked!r} has no effect: {name} has no reference")
    elif isinstance(reference, Uniform):
        yield Problem("memory.reference", f"{asked!r} has no effect: {kind} is no model")
    elif asked == "cached" and isinstance(reference, Synced):
        yield Problem("memory.reference", f"what {kind} says changes, so it cannot be kept; use 'online'")
    elif asked == "cached" and objective.batch_kind not in ("pairs", "feedback"):
        message = f"log-probabilities of pairs can be kept, {name} reads {objective.batch_kind}; use 'online'"
        yield Problem("memory.reference", message)
