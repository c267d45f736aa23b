"""Configuration of a mixture-of-experts feed-forward; no jax, and no family by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Self, get_args

import attrs

from nnxdsl.models.config.feed_forward import FeedForwardConfig
from nnxdsl.models.config.tensors import TensorSource, biases, joined, linears, norms

if TYPE_CHECKING:
    from nnxdsl.models.config.decoder import DecoderConfig

Scoring = Literal["softmax", "softmax_of_chosen", "sigmoid"]
GroupScore = Literal["best_two", "best"]

_CHOICES = {"scoring": get_args(Scoring), "group_score": get_args(GroupScore)}


@attrs.frozen(kw_only=True)
class MoEConfig(FeedForwardConfig):
    """A mixture of experts (Shazeer et al., arXiv:1701.06538); fields have transformers' names where it has them.

    Every token goes through the `num_experts_per_tok` experts that its router scores highest; no token is dropped.
    The defaults are those of Mixtral (arXiv:2401.04088).

    Attributes:
        num_experts: experts of a layer.
        num_experts_per_tok: experts that each token goes through.
        mlp_dim: width of one expert.
        shared_expert_dim: width of the shared expert that every token goes through; the sum of the widths where a
            family has several, which is the same; None for none.
        shared_expert_gate: the shared expert's output is multiplied by a sigmoid of the token (Qwen3-Next).
        scoring: scores of experts from the router's logits. "softmax": over all experts, and the scores of the selected
            are the weights; "softmax_of_chosen": the highest logits are chosen, and their softmax is the weights
            (GPT-OSS; equal to "softmax" with `norm_topk_prob`); "sigmoid": of each expert alone (DeepSeek-V3,
            arXiv:2412.19437).
        norm_topk_prob: the selected experts' weights are divided by their sum.
        routed_scaling_factor: final factor of the weights.
        n_group: number of groups of experts. With "sigmoid" or "softmax".
        topk_group: number of groups among whose experts a token selects.
        group_score: "best_two": a group's score is the sum of its two best (DeepSeek-V3); "best": its best one
            (DeepSeek-V2, arXiv:2405.04434).
        e_score_correction_bias: a bias is added to each expert's score for the selection, not for the weight
            (arXiv:2408.15664). With "sigmoid".
        router_bias: the router's logits have a bias.
        expert_bias: the three products of an expert have biases.
        router_norm: the router's input goes through an RMSNorm without scale, and is multiplied by a learned scale and
            by the root of 1 / its width (Gemma 4).
        scales_input: an expert's input is multiplied by its weight, and not its output (Llama 4).
        per_expert_scale: an expert's weight is multiplied by a learned number of its own (Gemma 4).
        swiglu_limit: the bound of gate and up in GPT-OSS's activation of experts, see `models.moe.layer`; None for the
            decoder's activation.
        swiglu_alpha: the slope of the sigmoid in that activation.
        latent_dim: width of a projection of the tokens, between which and its inverse the experts stand; None where
            they stand between the tokens themselves, as router and shared expert do (LatentMoE of Nemotron 3 Super).
    """

    module: ClassVar[str] = "nnxdsl.models.moe.layer:ExpertMLP"

    num_experts: int
    num_experts_per_tok: int
    mlp_dim: int
    shared_expert_dim: int | None = None
    shared_expert_gate: bool = False
    scoring: Scoring = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    group_score: GroupScore = "best_two"
    e_score_correction_bias: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    router_norm: bool = False
    scales_input: bool = False
    per_expert_scale: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    latent_dim: int | None = None

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(MoEConfig):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
                raise ValueError(f"moe.{field.name} must be above 0, got {value}")
            if field.name in _CHOICES and value not in _CHOICES[field.name]:
                raise ValueError(f"moe.{field.name}: expected one of {_CHOICES[field.name]}, got {value!r}")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"moe.num_experts_per_tok={self.num_experts_per_tok} exceeds num_experts={self.num_experts}"
            )
        if self.shared_expert_gate and self.shared_expert_dim is None:
            raise ValueError("moe.shared_expert_gate: there is no shared expert; set shared_expert_dim")
        if self.scoring == "softmax_of_chosen" and not self.norm_topk_prob:
            raise ValueError("moe.norm_topk_prob=False: a softmax of the chosen sums to 1; use scoring='softmax'")
        if self.scoring != "sigmoid" and self.e_score_correction_bias:
            raise ValueError(f"moe: e_score_correction_bias needs scoring='sigmoid', got {self.scoring!r}")
        if self.scoring == "softmax_of_chosen" and self.n_group > 1:
            raise ValueError(f"moe: n_group needs scoring='sigmoid' or 'softmax', got {self.scoring!r}")
        if self.num_experts % self.n_group or self.topk_group > self.n_group:
            raise ValueError(
                f"moe: cannot choose topk_group={self.topk_group} of n_group={self.n_group} groups of "
                f"{self.num_experts} experts"
            )
        if self.n_group > 1 and self.group_score == "best_two" and self.experts_per_group < 2:
            raise ValueError(f"moe.n_group={self.n_group}: a group needs two of {self.num_experts} experts")
        if self.num_experts_per_tok > (available := self.topk_group * self.experts_per_group):
            raise ValueError(
                f"moe.num_experts_per_tok={self.num_experts_per_tok} exceeds the {available} experts of "
                f"topk_group={self.topk_group}"
            )

    @property
    def experts_per_group(self) -> int:
        """Experts of one group."""
        return self.num_experts // self.n_group

    def tensors(self, decoder: DecoderConfig) -> dict[str, TensorSource]:
        """Sources of the arrays of one layer, under the names that most families use."""
        return moe_tensors(self, decoder)

    def divided(self, cut: Callable[[str, int], int]) -> Self:
        """The config of one device's share of each expert."""
        return attrs.evolve(self, mlp_dim=cut("activation_mlp", self.mlp_dim))

    def active_params(self, size: int, axes: Sequence[str | None]) -> int:
        """The number of weights that a token activates: its share of the experts."""
        return size * self.num_experts_per_tok // self.num_experts if "experts" in axes else size


@attrs.frozen(kw_only=True)
class DenseBesideExperts(FeedForwardConfig):
    """The gated MLP of the decoder beside experts; each has a norm before it and one after it, and both are added.

    The experts' router reads the residual stream, and there is no other norm before them (Gemma 4 26B-A4B).

    Attributes:
        experts: the experts, which have no shared one.
    """

    module: ClassVar[str] = "nnxdsl.models.moe.dense_beside:DenseBesideExpertMLP"
    norms_input: ClassVar[bool] = True

    experts: MoEConfig

    def __attrs_post_init__(self) -> None:
        if self.experts.shared_expert_dim is not None:
            raise ValueError("moe.shared_expert_dim: the MLP beside the experts takes its place")

    def tensors(self, decoder: DecoderConfig) -> dict[str, TensorSource]:
        """Sources of the arrays of one layer, under the names of Gemma 4."""
        layer_norms = {
            "mlp.dense_norm": "pre_feedforward_layernorm",
            "mlp.dense_after": "post_feedforward_layernorm_1",
            "mlp.expert_norm": "pre_feedforward_layernorm_2",
            "mlp.expert_after": "post_feedforward_layernorm_2",
        }
        dense = {path.replace("mlp.", "mlp.dense.", 1): one for path, one in decoder.mlp.tensors(decoder).items()}
        routed = moe_tensors(self.experts, decoder, router="router")
        routed["mlp.router.weight"] = TensorSource(("router.proj.weight",))
        width = self.experts.mlp_dim
        routed |= joined("experts.gate_up_proj", {"mlp.gate.kernel": width, "mlp.up.kernel": width})
        routed["mlp.down.kernel"] = TensorSource(("experts.down_proj",), transposed=True)
        return (
            norms(layer_norms)
            | dense
            | {f"mlp.experts.{path.removeprefix('mlp.')}": one for path, one in routed.items()}
        )

    def divided(self, cut: Callable[[str, int], int]) -> Self:
        """The config of one device's share of each expert."""
        return attrs.evolve(self, experts=self.experts.divided(cut))

    def active_params(self, size: int, axes: Sequence[str | None]) -> int:
        """The number of weights that a token activates: its share of the experts."""
        return self.experts.active_params(size, axes)


def moe_tensors(
    config: MoEConfig,
    decoder: DecoderConfig,
    *,
    router: str = "mlp.gate",
    experts: str = "mlp.experts",
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, TensorSource]:
    """Sources of a layer's router and experts, one tensor for each matrix of each expert.

    Args:
        config: the experts.
        decoder: the config of their layer.
        router: the file's name of the router.
        experts: the file's prefix of the experts' numbers.
        matrices: the file's names of an expert's gate, up and down.
    """
    names = dict(zip(("gate", "up", "down"), matrices, strict=True))
    if not decoder.mlp.gate:
        del names["gate"]
    sources = {"mlp.router.weight": TensorSource((f"{router}.weight",))}
    if config.e_score_correction_bias:
        sources["mlp.router.correction"] = TensorSource((f"{router}.e_score_correction_bias",))
    if config.router_norm:
        sources["mlp.router.scale"] = TensorSource((f"{router}.scale",))
    if config.per_expert_scale:
        sources["mlp.router.expert_scale"] = TensorSource((f"{router}.per_expert_scale",))
    plain: dict[str, str] = {}  # linear layers that are no experts
    if config.shared_expert_dim is not None:
        shared = "mlp.shared_expert" if config.shared_expert_gate else "mlp.shared_experts"
        plain |= {f"mlp.shared.{ours}": f"{shared}.{theirs}" for ours, theirs in names.items()}
    if config.shared_expert_gate:
        sources["mlp.shared.weight"] = TensorSource(("mlp.shared_expert_gate.weight",), unit=True)
    if config.latent_dim is not None:
        plain |= {"mlp.latent_down": "mlp.fc1_latent_proj", "mlp.latent_up": "mlp.fc2_latent_proj"}
    sources |= linears(plain) | (biases(plain) if decoder.mlp.bias else {})
    count = config.num_experts
    for ours, theirs in names.items():
        each = tuple(f"{experts}.{expert}.{theirs}.weight" for expert in range(count))
        sources[f"mlp.{ours}.kernel"] = TensorSource(each, (count,), transposed=True)
    return sources
