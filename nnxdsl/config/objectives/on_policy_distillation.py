"""On-policy distillation: a teacher corrects what the student itself writes; `losses/distillation.py` computes it."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a member replaces the family's default)
# ruff: noqa: RUF009 - specs cannot change, so a default may be shared

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

from nnxdsl.config.core.base import gather
from nnxdsl.config.core.validators import Limit
from nnxdsl.config.model import Model
from nnxdsl.config.objectives.distillation import (
    Distance,
    ReverseKL,
    SampledReverseKL,
    check_teacher,
    check_weights,
)
from nnxdsl.config.objectives.online import Online
from nnxdsl.config.objectives.reward import Reward
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.config.experiment import Experiment


@attrs.frozen(kw_only=True)
class OnPolicyDistill(Online):
    """On-policy distillation (GKD, Agarwal et al. 2023, arXiv:2306.13649, with all completions the student's own).

    The policy answers prompts, and at each token that it has sampled its distribution over the vocabulary is fitted to
    the teacher's: `D(softmax(t / T), softmax(s / T))` with the logits `s` of the policy, `t` of the teacher and the
    `temperature` T, as a mean over all sampled tokens of the step. No gradient flows through the sampling. Against
    `Objective.Distill` on a file, the student learns where it itself gets to. As TRL's `DistillationTrainer`, whose
    `beta` 0, 0.5 and 1 are `Distance.ForwardKL()`, `Distance.JSD(beta=0.5)` and `Distance.ReverseKL()`.

    Attributes:
        teacher: A frozen model with the same vocabulary, of any size and family; it reads each batch in the same step.
        distance: How distributions are compared.
        rewards: They are logged, of training and held-out completions, and not learned from.
        num_generations: Completions of each prompt. `batch_size` counts completions, so this divides it.
        temperature: Of sampling, and what logits of both models are divided by before they are compared.
    """

    teacher: Model
    distance: Distance = ReverseKL()
    rewards: tuple[Reward, ...] = ()
    num_generations: int = attrs.field(default=1, validator=Limit(at_least=1))

    def problems(self) -> Iterable[Problem]:
        """A teacher's weights are those of a model, and samples are unbiased where they are the estimate."""
        return gather(super().problems, lambda: check_weights(self.teacher), self._check_sampling)

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """The teacher is a model that other experiments may give, and predicts one token at a time."""
        checks = super().check
        return gather(lambda: checks(experiment), lambda: check_teacher(self.teacher))

    def _check_sampling(self) -> Iterable[Problem]:
        if isinstance(self.distance, SampledReverseKL):
            for name in ("top_k", "top_p"):
                if getattr(self, name) is not None:
                    message = "tokens that are never sampled bias SampledReverseKL; leave it out, or use ReverseKL"
                    yield Problem(name, message)
