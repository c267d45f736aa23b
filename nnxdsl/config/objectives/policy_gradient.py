"""Objectives that learn from rewards of the policy's own completions; `losses/policy_gradient.py` computes them.

Completions are sampled and rewarded in `rollouts/`. Of a token, `l` is its log-probability under the policy,
`o` that when it was sampled, `w = exp(l - o)` their probability ratio, and `A` the advantage of its completion. Losses
are exact over the optimizer step: how a batch is cut into micro-batches changes nothing.
"""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a member replaces the family's default)

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

import attrs

from nnxdsl.config.core.base import declared, gather
from nnxdsl.config.core.validators import Limit, inner, not_negative, positive
from nnxdsl.config.objectives.adaptive_entropy import AdaptiveEntropy
from nnxdsl.config.objectives.importance_sampling import ImportanceSampling
from nnxdsl.config.objectives.online import Online
from nnxdsl.errors import Problem

KLEstimator = Literal["k1", "k2", "k3"]
Scale = Literal["group", "batch", "none"]
Baseline = Literal["mean", "leave_one_out", "none"]
MeanOver = Literal["completions", "sums", "tokens", "max_length"]

_below_one = Limit(above=0, at_most=1)

_LOSS_TYPES = {
    "grpo": "GRPO",
    "dapo": "DAPO",
    "dr_grpo": "DrGRPO",
    "cispo": "CISPO",
    "sapo": "SAPO",
    "luspo": "LUSPO",
    "vespo": "VESPO",
}
"""The classes of TRL's loss types."""


@attrs.frozen(kw_only=True)
class PolicyGradient(Online):
    """A loss of the rewards of completions.

    Attributes:
        num_iterations: Optimizer steps that learn from the same completions, one after another.
        max_num_gen_batches: Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): a group whose completions all have
            the same reward teaches nothing, and the next prompts take its place, until the batch is full of groups with
            a spread or so many batches were sampled; the name is verl's. Groups that are missing then leave the batch
            smaller. 1: every group that is sampled is in the batch.
        mask_truncated_completions: Whether completions that reached the maximal length before their end are left out
            of the loss. They count in the advantages of their group.
        importance_sampling: Corrects the loss for what the sampler computes otherwise than the trainer; None for no
            correction. The KL term is not corrected.
        off_policy_mask_threshold: Leaves out completions with a negative advantage whose tokens have become less likely
            than they were for the sampler, by more than so many nats in the mean (DeepSeek-V3.2, arXiv:2512.02556,
            equation 9). The KL term has them. None for all completions.
        router_replay: Sends each token to the same experts in training as in sampling, in the policy and in the
            reference: rollout routing replay (R3, arXiv:2510.11370). Weights of experts are computed anew, so that
            routers learn. It needs a model with experts, and sampling on the devices that train.
        entropy_coef: Weight of the mean entropy of tokens, by which the loss is lower: a bonus for exploring. The mean
            is over the tokens of the step in every algorithm, as in TRL.
        adaptive_entropy: Changes that weight after each step, from `entropy_coef` on, by the entropy of the step; None
            for a constant weight.
        top_entropy_quantile: The share of tokens, those of highest entropy when they were sampled, that the policy term
            and the entropy bonus have (Wang et al. 2025, arXiv:2506.01939, with 0.2); 1 for all. The KL term has all.
        beta: Weight of the KL divergence from the reference; 0 for no reference.
    """

    is_base: ClassVar[bool] = True
    fields_added_later: ClassVar[frozenset[str]] = Online.fields_added_later | {
        "importance_sampling",
        "off_policy_mask_threshold",
        "router_replay",
        "entropy_coef",
        "adaptive_entropy",
        "top_entropy_quantile",
    }
    mean_over: ClassVar[MeanOver] = "completions"
    """What the loss is a mean over: completions, of the means over their tokens; all tokens of the step; or the most
    tokens that all completions could have had."""
    baseline: ClassVar[Baseline] = "mean"
    """What is subtracted from a reward: the mean of its group, that of the others in its group, or nothing."""
    scale_rewards: ClassVar[Scale] = "none"
    """What differences from the baseline are divided by."""
    whitens_tokens: ClassVar[bool] = False
    """Whether advantages have mean 0 and standard deviation 1 over the tokens of the batch."""
    off_policy_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that act only where the policy is no longer the one that sampled."""

    num_iterations: int = attrs.field(default=1, validator=positive)
    max_num_gen_batches: int = attrs.field(default=1, validator=positive)
    mask_truncated_completions: bool = False
    importance_sampling: ImportanceSampling | None = None
    off_policy_mask_threshold: float | None = attrs.field(default=None, validator=positive)
    router_replay: bool = False
    entropy_coef: float = attrs.field(default=0.0, validator=not_negative)
    adaptive_entropy: AdaptiveEntropy | None = None
    top_entropy_quantile: float = attrs.field(default=1.0, validator=_below_one)
    beta: float = attrs.field(default=0.0, validator=not_negative)

    # Other members know it by their class; here it goes by `beta`.
    @property
    def needs_reference(self) -> bool:
        """Whether it compares the policy with a reference."""
        return self.beta > 0

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether the loss is lower by the entropy of tokens."""
        return self.entropy_coef > 0 or self.adaptive_entropy is not None

    @classmethod
    def field_hint(cls, name: str, value: object) -> str:
        """Names the class of a `loss_type` of TRL."""
        if name != "loss_type":
            return ""
        member = _LOSS_TYPES.get(str(value))
        return f"; write Objective.{member}(...)" if member else "; each algorithm is a class, such as Objective.DAPO"

    def problems(self) -> Iterable[Problem]:
        """There is a reward, none is there twice, and what is set takes effect."""
        return gather(
            super().problems,
            self._check_rewards,
            self._check_dynamic_sampling,
            self._check_off_policy,
            self._check_kl,
            self._check_entropy,
            self._check_staleness,
            self._check_router_replay,
        )

    def _check_rewards(self) -> Iterable[Problem]:
        if not self.rewards:
            yield Problem("rewards", "is empty; there is nothing to learn from")

    def _check_dynamic_sampling(self) -> Iterable[Problem]:
        if self.max_num_gen_batches > 1 and self.baseline == "none":
            message = "groups of one reward teach something with baseline='none'; leave it out, or set baseline='mean'"
            yield Problem("max_num_gen_batches", message)

    def _check_off_policy(self) -> Iterable[Problem]:
        for name in self.off_policy_fields:
            if self.num_iterations == 1 and getattr(self, name) != declared(type(self))[name].default:
                message = "has no effect with num_iterations=1, where every probability is that of sampling"
                yield Problem(name, message)

    def _check_kl(self) -> Iterable[Problem]:
        return ()

    def _check_entropy(self) -> Iterable[Problem]:
        adaptive = self.adaptive_entropy
        if adaptive is not None and not adaptive.min_coef <= self.entropy_coef <= adaptive.max_coef:
            bounds = f"adaptive_entropy's bounds, {adaptive.min_coef:g} to {adaptive.max_coef:g}"
            yield Problem("entropy_coef", f"is {self.entropy_coef:g}, outside {bounds}")

    def _check_router_replay(self) -> Iterable[Problem]:
        if self.router_replay and self.engine is not None:
            message = "needs the experts of sampled tokens, which an engine does not return; set False"
            yield Problem("router_replay", message)

    def _check_staleness(self) -> Iterable[Problem]:
        if self.engine is not None and self.engine.max_staleness and self.importance_sampling is None:
            message = "completions of earlier weights bias the loss; set importance_sampling=ImportanceSampling()"
            yield Problem("engine.max_staleness", message)


@attrs.frozen(kw_only=True)
class KLInLoss(PolicyGradient):
    """A policy gradient whose loss has `beta` times an estimate of the KL divergence from the reference.

    Attributes:
        kl_estimator: The estimate, from the log-ratio `x` of policy to reference: "k1" `x`, "k2" `x^2 / 2`, "k3"
            `exp(-x) - 1 + x` (Schulman 2020, http://joschu.net/blog/kl-approx.html). In a loss, k1 has a gradient of
            zero in expectation.
        use_bias_correction_kl: Multiplies k3 by the probability ratio `w`: its gradient is then that of the KL
            divergence (DeepSeek-V3.2, arXiv:2512.02556, section 3.1). TRL's default; ours is the plain k3.
    """

    is_base: ClassVar[bool] = True

    kl_estimator: KLEstimator = "k3"
    use_bias_correction_kl: bool = False

    def _check_kl(self) -> Iterable[Problem]:
        fields = declared(type(self))
        for name in ("kl_estimator", "use_bias_correction_kl"):
            if self.beta == 0 and getattr(self, name) != fields[name].default:
                yield Problem(name, "has no effect with beta=0, which takes no reference")
        if self.use_bias_correction_kl and self.kl_estimator != "k3":
            yield Problem("use_bias_correction_kl", f"corrects k3, not {self.kl_estimator}; set kl_estimator='k3'")


@attrs.frozen(kw_only=True)
class GRPO(KLInLoss):
    """Group relative policy optimization (Shao et al. 2024, arXiv:2402.03300, equation 3, with outcome rewards).

    A token's loss is `-min(w A, clip(w, 1 - epsilon, 1 + epsilon_high) A)`, and the loss is a mean over completions of
    the means over their tokens. `A` is the reward minus the mean of its group, over the group's standard deviation.

    Attributes:
        epsilon: By how much a ratio below 1 counts.
        epsilon_high: By how much a ratio above 1 counts; None for `epsilon`.
        delta: Upper bound of a ratio where it is not clipped, that is of negative advantages: dual clipping (Ye et
            al. 2020, arXiv:1912.09729). None for no bound.
        scale_rewards: What advantages are divided by: the standard deviation of the "group", that of the whole
            "batch", or nothing ("none").
    """

    off_policy_fields: ClassVar[tuple[str, ...]] = ("epsilon", "epsilon_high", "delta")

    epsilon: float = attrs.field(default=0.2, validator=_below_one)
    epsilon_high: float | None = attrs.field(default=None, validator=positive)
    delta: float | None = attrs.field(default=None, validator=Limit(above=1))
    beta: float = attrs.field(default=0.04, validator=not_negative)
    scale_rewards: Scale = "group"


@attrs.frozen(kw_only=True)
class DAPO(KLInLoss):
    """DAPO's loss (Yu et al. 2025, arXiv:2503.14476, equation 8): GRPO's with a mean over all tokens of the step.

    Attributes:
        epsilon: As of GRPO.
        epsilon_high: As of GRPO; larger than `epsilon`, so that unlikely tokens can become likely ("clip-higher").
        delta: As of GRPO.
        scale_rewards: As of GRPO.
    """

    mean_over: ClassVar[MeanOver] = "tokens"
    off_policy_fields: ClassVar[tuple[str, ...]] = ("epsilon", "epsilon_high", "delta")

    epsilon: float = attrs.field(default=0.2, validator=_below_one)
    epsilon_high: float | None = attrs.field(default=0.28, validator=positive)
    delta: float | None = attrs.field(default=None, validator=Limit(above=1))
    scale_rewards: Scale = "group"


@attrs.frozen(kw_only=True)
class DrGRPO(KLInLoss):
    """Dr. GRPO (Liu et al. 2025, arXiv:2503.20783): GRPO's loss without its biases of length and of difficulty.

    The loss is a sum over tokens divided by the number of completions times `max_completion_length`, and advantages
    are not divided by a standard deviation.

    Attributes:
        epsilon: As of GRPO.
        epsilon_high: As of GRPO.
        delta: As of GRPO.
    """

    mean_over: ClassVar[MeanOver] = "max_length"
    off_policy_fields: ClassVar[tuple[str, ...]] = ("epsilon", "epsilon_high", "delta")

    epsilon: float = attrs.field(default=0.2, validator=_below_one)
    epsilon_high: float | None = attrs.field(default=None, validator=positive)
    delta: float | None = attrs.field(default=None, validator=Limit(above=1))


@attrs.frozen(kw_only=True)
class GSPO(KLInLoss):
    """Group sequence policy optimization (Zheng et al. 2025, arXiv:2507.18071, equation 5).

    GRPO's loss with one ratio for each completion: `w = exp(mean over its tokens of l - o)`.

    Attributes:
        epsilon: As of GRPO; the paper's value, far below TRL's default of 0.2, since ratios are of means.
        epsilon_high: As of GRPO.
        scale_rewards: As of GRPO.
    """

    off_policy_fields: ClassVar[tuple[str, ...]] = ("epsilon", "epsilon_high")

    epsilon: float = attrs.field(default=3e-4, validator=_below_one)
    epsilon_high: float | None = attrs.field(default=4e-4, validator=positive)
    scale_rewards: Scale = "group"


@attrs.frozen(kw_only=True)
class CISPO(KLInLoss):
    """CISPO (MiniMax-M1, arXiv:2506.13585, equation 4): a bounded ratio weighs the log-likelihood, no token is dropped.

    A token's loss is `-min(w, max_ratio) A l`, with no gradient through the weight; the loss is a mean over all tokens.

    Attributes:
        max_ratio: Upper bound of a ratio, an absolute number (ScaleRL, arXiv:2510.13786). In TRL it is
            `epsilon_high`, whose default of 0.2 would bound every ratio by 0.2.
        scale_rewards: As of GRPO.
    """

    mean_over: ClassVar[MeanOver] = "tokens"
    off_policy_fields: ClassVar[tuple[str, ...]] = ("max_ratio",)

    max_ratio: float = attrs.field(default=5.0, validator=Limit(at_least=1))
    scale_rewards: Scale = "group"


@attrs.frozen(kw_only=True)
class SAPO(KLInLoss):
    """Soft adaptive policy optimization (Gao et al. 2025, arXiv:2511.20347): a sigmoid in place of the clip.

    A token's loss is `-(4 / t) sigmoid(t (w - 1)) A`; the loss is a mean over completions of means over their tokens.

    Attributes:
        temperature_positive: `t` of tokens with positive advantages.
        temperature_negative: `t` of other tokens: larger, so that their gradients decay faster away from `w = 1`.
        scale_rewards: As of GRPO.
    """

    off_policy_fields: ClassVar[tuple[str, ...]] = ("temperature_positive", "temperature_negative")

    temperature_positive: float = attrs.field(default=1.0, validator=positive)
    temperature_negative: float = attrs.field(default=1.05, validator=positive)
    scale_rewards: Scale = "group"


@attrs.frozen(kw_only=True)
class GMPO(KLInLoss):
    """Geometric-mean policy optimization (Zhao et al. 2025, arXiv:2507.20673, equation 4).

    A completion's loss is `-exp(mean over its tokens of x) A`: `x = l - o`, bounded by `epsilon` in the direction of
    the advantage.

    Attributes:
        epsilon: Bound of a token's log-ratio.
        scale_rewards: As of GRPO.
    """

    off_policy_fields: ClassVar[tuple[str, ...]] = ("epsilon",)

    epsilon: float = attrs.field(default=0.4, validator=positive)
    scale_rewards: Scale = "group"


@attrs.frozen(kw_only=True)
class LUSPO(KLInLoss):
    """Length-unbiased sequence policy optimization (arXiv:2602.05261): GSPO's loss, each completion times its length.

    The loss is a mean over completions of sums over their tokens, so that a token of a long completion counts as much
    as one of a short.

    Attributes:
        epsilon: As of GSPO.
        epsilon_high: As of GSPO.
        scale_rewards: As of GRPO.
    """

    mean_over: ClassVar[MeanOver] = "sums"
    off_policy_fields: ClassVar[tuple[str, ...]] = ("epsilon", "epsilon_high")

    epsilon: float = attrs.field(default=3e-4, validator=_below_one)
    epsilon_high: float | None = attrs.field(default=4e-4, validator=positive)
    scale_rewards: Scale = "group"


@attrs.frozen(kw_only=True)
class VESPO(KLInLoss):
    """Variational sequence-level soft policy optimization (arXiv:2602.10693): a smooth weight in place of the clip.

    A token's loss is `-w^k exp(lambda (1 - w)) A l` with the ratio `w` of the whole completion, from 1e-8 to e^20, and
    no gradient through the weight, which is 1 where `w` is 1. The loss is a mean over all tokens. Corrections of
    `importance_sampling` are factors of `w`. Defaults are TRL's.

    Attributes:
        k_positive: `k` of completions with an advantage of 0 or more: the larger, the less count those that have
            become unlikely.
        lambda_positive: `lambda` of these: the larger, the less count those that have become likely.
        k_negative: `k` of the others.
        lambda_negative: `lambda` of the others.
        scale_rewards: As of GRPO.
    """

    mean_over: ClassVar[MeanOver] = "tokens"
    off_policy_fields: ClassVar[tuple[str, ...]] = ("k_positive", "lambda_positive", "k_negative", "lambda_negative")

    k_positive: float = attrs.field(default=2.0, validator=positive)
    lambda_positive: float = attrs.field(default=3.0, validator=positive)
    k_negative: float = attrs.field(default=3.0, validator=positive)
    lambda_negative: float = attrs.field(default=2.0, validator=positive)
    scale_rewards: Scale = "group"


@attrs.frozen(kw_only=True)
class DPPO(KLInLoss):
    """Divergence proximal policy optimization (arXiv:2602.04879), by total variation.

    A token's loss is `-w A`, and zero once its probability has moved by more than `max_divergence` in the direction of
    its advantage: unlike a clipped ratio, this leaves unlikely tokens free to move. The loss is a mean over all tokens.

    Attributes:
        max_divergence: Bound of the difference of probabilities.
        max_ratio: Upper bound of a ratio, against overflow; no gradient flows beyond.
        scale_rewards: As of GRPO.
    """

    mean_over: ClassVar[MeanOver] = "tokens"
    off_policy_fields: ClassVar[tuple[str, ...]] = ("max_divergence", "max_ratio")

    max_divergence: float = attrs.field(default=0.2, validator=inner)
    max_ratio: float = attrs.field(default=20.0, validator=Limit(at_least=1))
    scale_rewards: Scale = "group"


@attrs.frozen(kw_only=True)
class RLOO(PolicyGradient):
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740), as TRL computes it.

    A completion's reward loses `beta` times its log-ratio to the reference, summed over its tokens; its advantage is
    that minus the mean of the others in its group. The loss is GRPO's with the ratio of whole completions.

    Attributes:
        beta: Weight of the KL divergence in the reward.
        epsilon: By how much a ratio below 1 counts.
        epsilon_high: By how much a ratio above 1 counts; None for `epsilon`.
    """

    baseline: ClassVar[Baseline] = "leave_one_out"
    use_kl_in_reward: ClassVar[bool] = True
    off_policy_fields: ClassVar[tuple[str, ...]] = ("epsilon", "epsilon_high")

    num_generations: int = attrs.field(default=2, validator=Limit(at_least=2))
    beta: float = attrs.field(default=0.05, validator=not_negative)
    epsilon: float = attrs.field(default=0.2, validator=_below_one)
    epsilon_high: float | None = attrs.field(default=None, validator=positive)


@attrs.frozen(kw_only=True)
class ReinforcePlusPlus(PolicyGradient):
    """REINFORCE++ (Hu 2025, arXiv:2501.03262): GRPO's clip, advantages of tokens, whitened over the batch.

    A token's return is its completion's reward minus `beta` times the log-ratios to the reference of itself and of all
    tokens after it. Advantages are returns minus their mean over all tokens of the batch, over their standard
    deviation. The loss is a mean over all tokens.

    Attributes:
        beta: Weight of the KL divergence in the reward.
        baseline: Subtracted from rewards before they are whitened: "none", or the "mean" of the group
            (REINFORCE++-baseline).
        epsilon: By how much a ratio below 1 counts.
        epsilon_high: By how much a ratio above 1 counts; None for `epsilon`.
    """

    mean_over: ClassVar[MeanOver] = "tokens"
    whitens_tokens: ClassVar[bool] = True
    use_kl_in_reward: ClassVar[bool] = True
    off_policy_fields: ClassVar[tuple[str, ...]] = ("epsilon", "epsilon_high")

    beta: float = attrs.field(default=0.01, validator=not_negative)
    baseline: Literal["mean", "none"] = "none"
    epsilon: float = attrs.field(default=0.2, validator=_below_one)
    epsilon_high: float | None = attrs.field(default=None, validator=positive)
