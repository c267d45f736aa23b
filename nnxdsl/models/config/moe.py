"""The experts of a decoder's MLPs as numbers and choices: all that tells one mixture from another; no jax."""

from __future__ import annotations

from typing import Literal, get_args

import attrs

Scoring = Literal["softmax", "softmax_of_chosen", "sigmoid"]
ExpertActivation = Literal["silu", "clamped_swiglu"]

_CHOICES = {"scoring": get_args(Scoring), "activation": get_args(ExpertActivation)}


@attrs.frozen(kw_only=True)
class Experts:
    """A mixture of experts (Shazeer et al., arXiv:1701.06538): which MLPs a token goes through, and with what weights.

    Every token goes through the `per_token` experts that its router scores highest; none is ever dropped. The defaults
    are those of Mixtral (arXiv:2401.04088).

    Attributes:
        count: experts of a layer.
        per_token: how many of them a token goes through.
        mlp_dim: width of one expert.
        shared_dim: width of the shared expert that every token goes through; that of all of them together where there
            are several, which is the same; None for none.
        shared_gate: the shared expert's output is multiplied by a sigmoid of the token (Qwen3-Next).
        scoring: what the router's logits become. "softmax": of all experts, of which those of the chosen are weights;
            "softmax_of_chosen": the highest logits are chosen, and their softmax is the weights (GPT-OSS, and the same
            as a normalised "softmax"); "sigmoid": each expert is scored alone (DeepSeek-V3, arXiv:2412.19437).
        normalised: weights of the chosen are divided by their sum (the Hub's `norm_topk_prob`).
        scale: weights are multiplied by it at last (the Hub's `routed_scaling_factor`).
        groups: experts stand in so many groups of equal size; a group counts what its best two count. With "sigmoid".
        groups_per_token: a token chooses among the experts of so many groups.
        correction: a number for each expert is added to its score where experts are chosen, not where they are weighed
            (arXiv:2408.15664). With "sigmoid".
        router_bias: the router's logits have a bias.
        expert_bias: the three products of an expert have a bias each.
        activation: "silu": `silu(gate) * up`; "clamped_swiglu": that of GPT-OSS, see `models.experts`.
    """

    count: int
    per_token: int
    mlp_dim: int
    shared_dim: int | None = None
    shared_gate: bool = False
    scoring: Scoring = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    correction: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    activation: ExpertActivation = "silu"

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(Experts):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
                raise ValueError(f"experts.{field.name} must be above 0, got {value}")
            if field.name in _CHOICES and value not in _CHOICES[field.name]:
                raise ValueError(f"experts.{field.name}: expected one of {_CHOICES[field.name]}, got {value!r}")
        if self.per_token > self.count:
            raise ValueError(f"experts.per_token={self.per_token} is more than there are: {self.count}")
        if self.shared_gate and self.shared_dim is None:
            raise ValueError("experts.shared_gate: there is no shared expert; give shared_dim")
        if self.scoring == "softmax_of_chosen" and not self.normalised:
            raise ValueError("experts.normalised=False: a softmax of the chosen sums to 1; use scoring='softmax'")
        if self.scoring != "sigmoid" and (self.correction or self.groups > 1):
            raise ValueError(f"experts: correction and groups go with scoring='sigmoid', got {self.scoring!r}")
        if self.count % self.groups or self.groups_per_token > self.groups:
            raise ValueError(
                f"experts: {self.groups_per_token} of {self.groups} groups cannot be chosen among {self.count} experts"
            )
        if self.groups > 1 and self.in_group < 2:
            raise ValueError(f"experts.groups={self.groups}: a group needs two of {self.count} experts")
        if self.per_token > (available := self.groups_per_token * self.in_group):
            raise ValueError(
                f"experts.per_token={self.per_token} is more than are in {self.groups_per_token} groups: {available}"
            )

    @property
    def in_group(self) -> int:
        """Experts of one group."""
        return self.count // self.groups
