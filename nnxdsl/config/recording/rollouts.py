"""Which completions of a run that samples are written to its directory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

from nnxdsl.config.core.base import Spec, declared
from nnxdsl.config.core.validators import positive
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.config.experiment import Experiment


@attrs.frozen(kw_only=True)
class RolloutLog(Spec):
    """Which prompts and groups of completions, with rewards and advantages, are written to `rollouts.jsonl`.

    Changes nothing in what a run computes.

    Attributes:
        every_steps: The completions that steps 0, `every_steps`, `2 * every_steps`, ... train on are written; None
            writes none.
        prompts: At most so many prompts of a step, the first ones, each with all of its completions.
    """

    every_steps: int | None = attrs.field(default=10, validator=positive)
    prompts: int = attrs.field(default=4, validator=positive)

    def problems(self) -> Iterable[Problem]:
        """No number of prompts of which none are written."""
        if self.every_steps is None and self.prompts != declared(RolloutLog)["prompts"].default:
            yield Problem("prompts", "has no effect with every_steps=None, which writes none")

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """Where nothing is sampled, nothing is set."""
        if experiment.objective.batch_kind != "prompts" and self != RolloutLog():
            name = type(experiment.objective).__qualname__
            yield Problem("rollouts", f"{name} samples no completions that could be written; leave it out")
