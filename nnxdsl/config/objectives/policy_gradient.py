"""Objectives that learn from the rewards of the policy's own completions; `losses/policy_gradient.py` computes them.

Completions are sampled and rewarded by `trainer/rollouts.py`.
"""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a member replaces the family's default)

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal

import attrs

from nnxdsl.config.batching import Padded
from nnxdsl.config.core.base import declared, gather
from nnxdsl.config.core.validators import Limit, inner, not_negative, positive
from nnxdsl.config.objectives.base import Objective
from nnxdsl.config.objectives.reward import Reward
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.config.experiment import Experiment


@attrs.frozen(kw_only=True)
class GRPO(Objective):
    """Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300, equation 3, with outcome rewards).

    The policy answers each prompt `num_generations` times; an answer's advantage `A` is its reward less the mean of its
    group, over the group's standard deviation. Each token of it costs `-min(r A, clip(r, 1 - l, 1 + h) A) + beta k`,
    where `r` is its probability over that when it was drawn, `l` and `h` are `epsilon` and `epsilon_high`, and `k`
    estimates the KL divergence from the reference. `loss_type` sets what these are a mean over.

    With `loss_type="dapo"`, `epsilon_high=0.28` and `beta=0` it is DAPO (Yu et al. 2025, arXiv:2503.14476) without its
    choice of groups; with `loss_type="dr_grpo"`, `scale_rewards="none"` and `beta=0` it is Dr. GRPO (Liu et al. 2025,
    arXiv:2503.20783).

    Attributes:
        rewards: What answers are worth: the weighted sum of these.
        num_generations: Answers to each prompt. `batch_size` counts answers, so this divides it.
        temperature: Of the draws. It is the policy that divides its logits by it which is trained, as in TRL.
        top_k: Sample from the k most likely tokens only; None for all.
        top_p: Sample from the smallest set of most likely tokens whose probabilities sum to it or more (of those that
            `top_k` leaves, if it is given); None for all.
        num_speculative_tokens: Tokens that the model's multi-token-prediction layer (`mtp_layers`) drafts for each of
            its passes: the same answers, up to the rounding of logits. The layer is not trained. 0 for none.
        num_iterations: Optimizer steps that learn from the same answers, one after another.
        epsilon: How far below 1 a probability ratio counts.
        epsilon_high: How far above 1 a probability ratio counts; None for as far as below.
        beta: Weight of the KL estimate; 0 for no reference.
        kl_estimator: The estimate, from the log-ratio `x` of policy to reference: "k1" `x`, "k2" `x^2 / 2`, "k3"
            `exp(-x) - 1 + x`, which is the paper's (Schulman 2020, http://joschu.net/blog/kl-approx.html).
        scale_rewards: What advantages are divided by: the standard deviation of the "group", that of the whole
            "batch", or nothing ("none").
        loss_type: What the loss is a mean over, by TRL's names: "grpo", sequences, each the mean of its own tokens;
            "dapo", all tokens of the batch; "dr_grpo", the sum over tokens divided by the longest possible length of
            all completions together.
    """

    batch_kind: ClassVar[str] = "prompts"
    fields_added_later: ClassVar[frozenset[str]] = frozenset({"num_speculative_tokens"})

    rewards: tuple[Reward, ...]
    num_generations: int = attrs.field(default=8, validator=Limit(at_least=2))
    temperature: float = attrs.field(default=1.0, validator=positive)
    top_k: int | None = attrs.field(default=None, validator=positive)
    top_p: float | None = attrs.field(default=None, validator=inner)
    num_speculative_tokens: int = attrs.field(default=0, validator=Limit(at_least=0))
    num_iterations: int = attrs.field(default=1, validator=positive)
    epsilon: float = attrs.field(default=0.2, validator=Limit(above=0, at_most=1))
    epsilon_high: float | None = attrs.field(default=None, validator=positive)
    beta: float = attrs.field(default=0.04, validator=not_negative)
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    scale_rewards: Literal["group", "batch", "none"] = "group"
    loss_type: Literal["grpo", "dapo", "dr_grpo"] = "grpo"

    # Other members know it by their class; here it goes by `beta`.
    @property
    def needs_reference(self) -> bool:
        """Whether it compares the policy with a reference."""
        return self.beta > 0

    def problems(self) -> Iterable[Problem]:
        """There is a reward, none is there twice, and what is set acts."""
        return gather(self._check_rewards, self._check_clip, self._check_kl)

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """Groups fill batches, and their completions are sampled: in no file, and by the weights that are trained."""
        return gather(
            lambda: self._check_groups(experiment),
            lambda: self._check_batching(experiment),
            lambda: self._check_workers(experiment),
        )

    def _check_groups(self, experiment: Experiment) -> Iterable[Problem]:
        if experiment.batch_size % self.num_generations:
            message = f"{self.num_generations} answers to a prompt do not divide batch_size={experiment.batch_size}"
            yield Problem("objective.num_generations", message)

    def _check_batching(self, experiment: Experiment) -> Iterable[Problem]:
        if not isinstance(experiment.batching, Padded):
            kind = type(experiment.batching).__qualname__
            yield Problem("batching", f"{kind} arranges rows of a file, and answers are in none; leave it out")

    def _check_workers(self, experiment: Experiment) -> Iterable[Problem]:
        if experiment.outer is not None:
            name = type(self).__qualname__
            message = f"completions are sampled with the outer weights, and {name} trains workers with others; set None"
            yield Problem("outer", message)

    def _check_rewards(self) -> Iterable[Problem]:
        if not self.rewards:
            yield Problem("rewards", "is empty; there is nothing to learn from")
        names = [reward.name for reward in self.rewards]
        for index, name in enumerate(names):
            if name in names[:index]:
                other = "" if isinstance(self.rewards[index], Reward.Function) else ", or one of the two another name"
                yield Problem(f"rewards.{index}.name", f"'{name}' is named twice; give it one weight{other}")

    def _check_clip(self) -> Iterable[Problem]:
        for name in ("epsilon", "epsilon_high"):
            if self.num_iterations == 1 and getattr(self, name) != declared(GRPO)[name].default:
                message = "has no effect with num_iterations=1, where every probability is what it was when drawn"
                yield Problem(name, message)

    def _check_kl(self) -> Iterable[Problem]:
        if self.beta == 0 and self.kl_estimator != declared(GRPO)["kl_estimator"].default:
            yield Problem("kl_estimator", "has no effect with beta=0, which takes no reference")
