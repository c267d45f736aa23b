"""The family of objectives; `nnxdsl/losses` computes their losses."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import attrs

from nnxdsl.config.core.base import Spec
from nnxdsl.config.precision import KVCacheDtype

if TYPE_CHECKING:
    from nnxdsl.config.model import Model
    from nnxdsl.config.objectives import distillation, kto, on_policy_distillation, reward_model, sft
    from nnxdsl.config.objectives import policy_gradient as gradients
    from nnxdsl.config.objectives import preference as pairs
    from nnxdsl.config.objectives.adaptive_entropy import AdaptiveEntropy
    from nnxdsl.config.objectives.divergence import Divergence
    from nnxdsl.config.objectives.environment import Environment
    from nnxdsl.config.objectives.teacher_server import TeacherServer


@attrs.frozen(kw_only=True)
class Objective(Spec):
    """The loss of a run; members have the hyperparameters of their formula."""

    SFT: ClassVar[type[sft.SFT]]
    DPO: ClassVar[type[pairs.DPO]]
    RobustDPO: ClassVar[type[pairs.RobustDPO]]
    IPO: ClassVar[type[pairs.IPO]]
    Hinge: ClassVar[type[pairs.Hinge]]
    LengthNormalizedDPO: ClassVar[type[pairs.LengthNormalizedDPO]]
    EXO: ClassVar[type[pairs.EXO]]
    DiscoPOP: ClassVar[type[pairs.DiscoPOP]]
    NCA: ClassVar[type[pairs.NCA]]
    BCO: ClassVar[type[pairs.BCO]]
    SPPO: ClassVar[type[pairs.SPPO]]
    APOZero: ClassVar[type[pairs.APOZero]]
    APODown: ClassVar[type[pairs.APODown]]
    AOT: ClassVar[type[pairs.AOT]]
    AOTUnpaired: ClassVar[type[pairs.AOTUnpaired]]
    ORPO: ClassVar[type[pairs.ORPO]]
    SimPO: ClassVar[type[pairs.SimPO]]
    CPO: ClassVar[type[pairs.CPO]]
    ChosenSFT: ClassVar[type[pairs.ChosenSFT]]
    Sum: ClassVar[type[pairs.Sum]]
    Distill: ClassVar[type[distillation.Distill]]
    OnPolicyDistill: ClassVar[type[on_policy_distillation.OnPolicyDistill]]
    GRPO: ClassVar[type[gradients.GRPO]]
    DAPO: ClassVar[type[gradients.DAPO]]
    DrGRPO: ClassVar[type[gradients.DrGRPO]]
    GSPO: ClassVar[type[gradients.GSPO]]
    CISPO: ClassVar[type[gradients.CISPO]]
    SAPO: ClassVar[type[gradients.SAPO]]
    GMPO: ClassVar[type[gradients.GMPO]]
    LUSPO: ClassVar[type[gradients.LUSPO]]
    VESPO: ClassVar[type[gradients.VESPO]]
    DPPO: ClassVar[type[gradients.DPPO]]
    RLOO: ClassVar[type[gradients.RLOO]]
    ReinforcePlusPlus: ClassVar[type[gradients.ReinforcePlusPlus]]
    KTO: ClassVar[type[kto.KTO]]
    Reward: ClassVar[type[reward_model.Reward]]

    batch_kind: ClassVar[str] = ""
    """The kind of batch that it reads: "pairs", "feedback", "sequences" or "prompts"."""
    needs_reference: ClassVar[bool] = False
    """Whether it compares the policy with a frozen reference model."""
    reads_logps: ClassVar[bool] = True
    """Whether its loss is one of log-probabilities of tokens; not that of a reward model."""
    of_difference: ClassVar[bool] = False
    """Where it has one: whether the loss of a pair is one of a difference of log-ratios, or of scores of them."""
    is_token_sum: ClassVar[bool] = False
    """Where it reads sequences: whether it sums over target tokens, whichever sequence they belong to."""
    compares_across_batch: ClassVar[bool] = False
    """Whether the loss of a row depends on the other rows: micro-batches then have two forward passes (GradCache)."""

    z_loss: ClassVar[float] = 0.0
    """Strength of the loss that keeps logits from drifting."""
    mtp_loss_weight: ClassVar[float] = 0.0
    """Strength of multi-token prediction."""
    num_generations: ClassVar[int] = 1
    """Completions that are sampled of each row; 1 where rows hold what is trained on."""
    num_speculative_tokens: ClassVar[int] = 0
    """Tokens that a multi-token-prediction layer drafts where completions are sampled."""
    kv_cache_dtype: ClassVar[KVCacheDtype | None] = None
    """Dtype of keys and values where completions are sampled; None for that of activations."""
    router_replay: ClassVar[bool] = False
    """Whether tokens go to the same experts in training as in sampling."""
    reads_margins: ClassVar[bool] = False
    """Whether pairs may have a margin between the rewards of their completions."""
    reads_teacher_prompts: ClassVar[bool] = False
    """Whether rows may have prompts of their own for a teacher."""
    environment: ClassVar[Environment | None] = None
    """What answers sampled completions, so that there are several turns."""
    num_iterations: ClassVar[int] = 1
    """Optimizer steps on the same rows, one after another."""
    use_kl_in_reward: ClassVar[bool] = False
    """Whether the rewards of sampled completions, and not the loss, have the KL divergence from the reference."""
    has_entropy_bonus: ClassVar[bool] = False
    """Whether the loss is lower by the mean entropy of sampled tokens."""
    entropy_coef: ClassVar[float] = 0.0
    """Weight of that bonus, with `adaptive_entropy` at the first step."""
    adaptive_entropy: ClassVar[AdaptiveEntropy | None] = None
    """What the weight of that bonus follows."""
    top_entropy_quantile: ClassVar[float] = 1.0
    """The share of sampled tokens, those of highest entropy, that the policy term has."""
    loss_on: ClassVar[str] = "assistant"
    """Where it reads sequences: which tokens are targets."""
    teacher: ClassVar[Model | None] = None
    """The model that is distilled."""
    served_teachers: ClassVar[Mapping[str, TeacherServer]] = MappingProxyType({})
    """Servers that give the log-probabilities of such models, in place of weights, by name; "" for a single one."""
    teacher_top_k: ClassVar[int | None] = None
    """Number of the teacher's most likely tokens that batches have for each target; None for none."""
    hard_weight: ClassVar[float] = 0.0
    """Weight of target tokens as labels, beside the teacher's distributions."""
    feature_weight: ClassVar[float] = 0.0
    """Weight of the distance of the teacher's hidden states."""

    divergence: ClassVar[Divergence | None] = None
    """How the distance from the reference is measured."""
    ld_alpha: ClassVar[float] = 1.0
    """Weight of tokens beyond the length of a pair's shorter completion."""
    weighting: ClassVar[str] = "equal"
    """How pairs are weighted."""

    @property
    def has_kl_in_reward(self) -> bool:
        """Whether sampled completions are scored by the reference before they are trained on."""
        return self.use_kl_in_reward and self.needs_reference

    @property
    def all_terms(self) -> tuple[Objective, ...]:
        """The terms of a sum; itself alone, if it is none."""
        return (self,)
