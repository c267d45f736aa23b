"""Evaluation: held-out metrics and sampled completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

from nnxdsl.config.core.base import Spec, declared, gather
from nnxdsl.config.core.validators import Limit, inner, not_negative, positive
from nnxdsl.config.data import Data
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.config.experiment import Experiment


@attrs.frozen(kw_only=True)
class Evaluation(Spec):
    """Held-out metrics and sampled completions, before the first step, every so many steps, and after the last.

    Attributes:
        every_steps: Steps between evaluations; None evaluates before the first step and after the last alone.
        data: Held-out rows of the kind that the objective reads; None evaluates the rows that the experiment's
            `test_size` holds out, or prompts alone.
        prompts: Prompts for which policy and reference generate completions; a user's turn if the training rows are
            chats.
        max_new_tokens: Maximum length of a completion in tokens.
        temperature: 0 takes the most likely token; larger values sample, with the experiment's seed.
        top_k: Sample from the k most likely tokens only; None for all.
        top_p: Sample from the smallest set of most likely tokens whose probabilities sum to it or more (of those that
            `top_k` leaves, if it is given); None for all.
        num_speculative_tokens: Tokens that the model's multi-token-prediction layer (`mtp_layers`) drafts for each of
            its passes: the same completions, up to the rounding of logits, in fewer passes; 0 for none.
    """

    every_steps: int | None = attrs.field(default=None, validator=positive)
    data: Data | None = None
    prompts: tuple[str, ...] = ()
    max_new_tokens: int = attrs.field(default=64, validator=positive)
    temperature: float = attrs.field(default=0.0, validator=not_negative)
    top_k: int | None = attrs.field(default=None, validator=positive)
    top_p: float | None = attrs.field(default=None, validator=inner)
    num_speculative_tokens: int = attrs.field(default=0, validator=Limit(at_least=0))

    def problems(self) -> Iterable[Problem]:
        """Sampling settings need prompts."""
        return gather(self._check_prompts, self._check_unused)

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """There is something to evaluate, and held-out rows are of the kind that the objective reads."""
        if self.data is not None:
            yield from self.data.check(experiment, "evaluation.data")
        elif not self.prompts and experiment.test_size is None:
            yield Problem("evaluation", "has neither data nor prompts; give one of them, test_size, or evaluation=None")

    def _check_prompts(self) -> Iterable[Problem]:
        for index, prompt in enumerate(self.prompts):
            if not prompt.strip():
                yield Problem(f"prompts.{index}", "is empty")

    def _check_unused(self) -> Iterable[Problem]:
        for name in ("max_new_tokens", "temperature", "top_k", "top_p", "num_speculative_tokens"):
            if getattr(self, name) == declared(Evaluation)[name].default:
                continue
            if not self.prompts:
                yield Problem(name, "has no effect without prompts")
            elif name.startswith("top_") and self.temperature == 0:
                yield Problem(name, "has no effect with temperature=0, which takes the most likely token")
