"""The config of a decoder, which covers all families; no jax."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar, get_args

import attrs

from nnxdsl.models.config.attention import AttentionConfig
from nnxdsl.models.config.checks import require_choices
from nnxdsl.models.config.feed_forward import FeedForwardConfig, MLPConfig
from nnxdsl.models.config.gqa import GQAConfig
from nnxdsl.models.config.layer import LayerSpec
from nnxdsl.models.config.mixer import MixerConfig
from nnxdsl.models.config.mla import MLAConfig
from nnxdsl.models.config.moe import DenseBesideExperts, MoEConfig
from nnxdsl.models.config.norm import NormConfig
from nnxdsl.models.config.parts import (
    EmbeddingConfig,
    GlobalHeads,
    HeadConfig,
    KVSharing,
    PerLayerEmbedding,
)
from nnxdsl.models.config.rope import DynamicNTK, LongRope, Rope

EntryT = TypeVar("EntryT")
LayerKind = Literal["local", "global", "shared_index", "linear", "nope", "none"]
"""A layer's token mixer: attention within a sliding window, to all tokens before, to those that the indexer of the last
global layer has selected (IndexShare), linear attention, attention to all tokens before without rotary positions
(NoPE), or none: a layer that is a feed-forward alone."""
Sublayers = Literal["both", "one"]
WindowKind = Literal["sliding", "chunks"]
Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2"]

_CHOICES = {
    "sublayers": get_args(Sublayers),
    "window_kind": get_args(WindowKind),
    "activation": get_args(Activation),
}
_PARTS: dict[str, Callable[..., Any]] = {
    "attention": AttentionConfig,
    "embedding": EmbeddingConfig,
    "head": HeadConfig,
    "norm": NormConfig,
}


def local_then_global(layers: int) -> tuple[LayerKind, ...]:
    """A period of `layers` layers, of which only the last is global."""
    local: tuple[LayerKind, ...] = ("local",) * (layers - 1)
    return (*local, "global")


def period_of(layers: Sequence[EntryT]) -> tuple[EntryT, ...]:
    """The shortest period of these layers; its last repetition may be incomplete."""
    for length in range(1, len(layers)):
        if all(layer == layers[number % length] for number, layer in enumerate(layers)):
            return tuple(layers[:length])
    return tuple(layers)


def with_tail(layers: Sequence[EntryT]) -> tuple[tuple[EntryT, ...], tuple[EntryT, ...]]:
    """The period that these layers begin with, and the last layers, which do not go on with it.

    Of all such splits, it selects the one that compiles the fewest layers.

    Returns:
        `pattern` and `tail_pattern` of DecoderConfig.
    """
    splits = [(len(layers), len(layers), 1)]  # (layers that are compiled, length of the period, whole periods)
    for length in range(1, len(layers) // 2 + 1):
        others = (layer for layer, kind in enumerate(layers) if kind != layers[layer % length])
        repeats = next(others, len(layers)) // length
        if repeats > 1:
            splits.append((length + len(layers) - repeats * length, length, repeats))
    _, length, repeats = min(splits)
    pattern, tail = tuple(layers[:length]), tuple(layers[repeats * length :])
    return pattern, () if tail == pattern[: len(tail)] else tail


def dense_fields(kinds: Sequence[LayerKind], dense: Sequence[bool]) -> dict[str, Any]:
    """The fields of DecoderConfig for layers with experts among layers without.

    Of all splits into leading layers and a repeated period, it selects the one that compiles the fewest layers. All
    leading layers are dense ones of the first kinds of the period, but where layers share a selection of tokens: there
    a period begins with the layer that selects, and what is before the first one leads.

    Args:
        kinds: of every layer.
        dense: whether each layer has the gated MLP; at least one has experts.

    Returns:
        `dense_layers`, `lead_pattern`, `pattern` and `dense_pattern`.
    """
    layers = list(zip(kinds, dense, strict=True))
    first, shares_index = list(dense).index(False), "shared_index" in kinds
    splits: list[tuple[int, int, tuple[tuple[LayerKind, bool], ...]]] = []
    for lead in range(len(layers) if shares_index else first + 1):
        period = period_of(layers[lead:])
        may_lead = kinds[lead] != "shared_index" and not any(dense[first:lead])
        if may_lead if shares_index else _begins(period, kinds[:lead]):
            splits.append((lead + len(period) + (len(layers) - lead) % len(period), lead, period))
    _, lead, period = min(splits, key=lambda split: split[:2])
    flags = tuple(is_dense for _, is_dense in period)
    return {
        "dense_layers": min(lead, first),
        "lead_pattern": () if lead <= first and _begins(period, kinds[:lead]) else tuple(kinds[:lead]),
        "pattern": tuple(kind for kind, _ in period),
        "dense_pattern": flags if any(flags) else (),
    }


def _begins(period: Sequence[tuple[LayerKind, bool]], kinds: Sequence[LayerKind]) -> bool:
    """Whether layers are of the kinds that a period begins with."""
    return all(kind == period[layer % len(period)][0] for layer, kind in enumerate(kinds))


@attrs.frozen(kw_only=True)
class DecoderConfig:
    """The architecture of a decoder; defaults are those of Gemma 3.

    The first `dense_layers`, or those of `lead_pattern`, are the prefix. The layers after them repeat `pattern`; those
    of an incomplete last period are the suffix.

    Attributes:
        vocab_size: rows of the embedding.
        embed_dim: width of the residual stream.
        mlp_dim: width of the gated MLP.
        num_layers: all layers: prefix, whole periods, suffix, and those of `kv_sharing`.
        num_heads: query heads.
        num_kv_heads: key/value heads; divides `num_heads`.
        head_dim: width of one head; even. With `mla` that of the rotary part.
        window: a local layer attends to a token itself and `window - 1` tokens before; None without local layers.
        window_kind: "sliding": that; "chunks": sequences are divided into chunks of `window` tokens, and a local layer
            attends to the tokens of the same chunk alone (Llama 4).
        pattern: the kinds of the layers of one period.
        lead_pattern: the kinds of the prefix, where these are not the first `dense_layers` of the pattern; empty where
            they are. Of its layers the first `dense_layers` are dense.
        tail_pattern: the kinds of the last layers, where these do not go on with the pattern; empty where they do.
        sublayers: "both": a layer is a token mixer and a feed-forward, each added to the residual stream; "one": it is
            one of them: a feed-forward in layers of the kind "none", a mixer in all others (Nemotron-H,
            arXiv:2504.03624).
        rope_local: rotary positions of the local layers; None for those of the global layers.
        rope_global: rotary positions of the global layers.
        max_length: the model's context length.
        norm: the norms of the residual stream.
        attention: the factor of attention scores, and norms, biases, values and the gate of attention.
        global_heads: heads of the global layers; None for those of the other layers.
        kv_sharing: the last layers without keys and values of their own; None for none.
        per_layer_embedding: embeddings of each layer, which a gate adds to its output; None for none.
        layer_scalar: a layer's output is multiplied by a number, which is read and never trained (Gemma 4).
        activation: of MLPs and experts, and of DeltaNet's convolutions; "relu2": `relu(x)^2` (arXiv:2109.08668).
        mlp_gate: MLPs and experts have a gate, and are `down(activation(gate(x)) * up(x))`; else
            `down(activation(up(x)))` (Nemotron-H).
        mlp_bias: the linear layers of MLPs and shared experts have a bias, and those around experts with a
            `latent_dim`.
        embedding: what is done to the vectors of the embedding.
        residual_multiplier: what a mixer or a feed-forward adds to the residual stream is multiplied by it (Granite).
        head: what makes logits of the last layer's output.
        linear_attention: the mixer of linear layers, such as a gated DeltaNet; None without linear layers.
        mla: multi-head latent attention in place of grouped-query attention; None for the latter.
        feed_forward: the feed-forward of a layer, such as a mixture of experts; by default the gated MLP of `mlp_dim`.
        dense_layers: so many layers at the beginning have the gated MLP in place of `feed_forward`; they are of the
            first kinds of `lead_pattern`, or of `pattern`.
        dense_pattern: for each layer of `pattern`, whether it has the gated MLP in place of `feed_forward`; empty where
            none has.
        mtp_layers: multi-token-prediction layers, 0 or 1, global ones (DeepSeek-V3, arXiv:2412.19437, section 2.2). A
            `config.json` is always read as 0: many directories do not have these layers.
    """

    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    window_kind: WindowKind = "sliding"
    pattern: tuple[LayerKind, ...] = local_then_global(6)
    lead_pattern: tuple[LayerKind, ...] = ()
    tail_pattern: tuple[LayerKind, ...] = ()
    sublayers: Sublayers = "both"
    rope_local: Rope | None = Rope(theta=10_000.0)  # noqa: RUF009 - frozen
    rope_global: Rope = Rope(theta=1_000_000.0)  # noqa: RUF009 - frozen
    attention: AttentionConfig
    linear_attention: MixerConfig | None = None
    max_length: int
    norm: NormConfig = NormConfig(placement="sandwich", scale="zero_centred")  # noqa: RUF009 - frozen
    global_heads: GlobalHeads | None = None
    kv_sharing: KVSharing | None = None
    per_layer_embedding: PerLayerEmbedding | None = None
    layer_scalar: bool = False
    activation: Activation = "gelu_tanh"
    mlp_gate: bool = True
    mlp_bias: bool = False
    embedding: EmbeddingConfig = EmbeddingConfig(scaled=True)  # noqa: RUF009 - frozen
    residual_multiplier: float = 1.0
    head: HeadConfig = HeadConfig()  # noqa: RUF009 - frozen
    mla: MLAConfig | None = None
    feed_forward: FeedForwardConfig = MLPConfig()  # noqa: RUF009 - frozen
    dense_layers: int = 0
    dense_pattern: tuple[bool, ...] = ()
    mtp_layers: int = 0

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(DecoderConfig):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0 and field.default != 0:
                raise ValueError(f"{field.name} must be above 0, got {value}")
        require_choices(self, "", _CHOICES)
        has_mlp = isinstance(self.feed_forward, MLPConfig)
        if not 0 <= self.dense_layers <= (0 if has_mlp else self.num_layers):
            raise ValueError(
                f"dense_layers={self.dense_layers}: expected from 0 to num_layers, and experts beside them"
            )
        if self.dense_pattern and (
            has_mlp or len(self.dense_pattern) != len(self.pattern) or set(self.dense_pattern) != {True, False}
        ):
            raise ValueError(
                f"dense_pattern={self.dense_pattern}: expected True or False for each layer of pattern={self.pattern}, "
                "at least one of each, and experts beside them; or () where no layer of the pattern is dense"
            )
        if self.mla is not None and (self.num_kv_heads, self.head_dim) != (
            self.num_heads,
            self.mla.qk_rope_head_dim,
        ):
            raise ValueError("mla: expected as many num_kv_heads as num_heads, and head_dim=qk_rope_head_dim")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; RoPE rotates its halves against each other")
        for rope in filter(None, (self.rope_local, self.rope_global)):
            if rope.partial == "first" and (self.head_dim * rope.partial_rotary_factor) % 2:
                raise ValueError(
                    f"head_dim={self.head_dim}: partial_rotary_factor={rope.partial_rotary_factor} gives no even width"
                )
            if isinstance(rope.scaling, DynamicNTK) and self.head_dim * rope.partial_rotary_factor <= 2:
                raise ValueError(f"head_dim={self.head_dim}: dynamic RoPE needs a rotary width above 2")
            if isinstance(rope.scaling, LongRope):
                self._check_long_rope(rope.scaling, int(self.head_dim * rope.partial_rotary_factor) // 2)
        if self.global_heads is not None:
            if self.mla is not None or "global" not in self.pattern:
                raise ValueError("global_heads: expected global layers, and no mla")
            self.of("global")  # which must be possible
        kinds = self.lead_pattern + self.pattern + self.tail_pattern
        if not self.pattern or not set(kinds) <= set(get_args(LayerKind)):
            raise ValueError(f"pattern: expected one or more of {get_args(LayerKind)}, got {kinds!r}")
        if (self.linear_attention is None) == ("linear" in kinds):
            raise ValueError(f"pattern={kinds}: linear layers need linear_attention, and it needs them")
        if self.window is None and "local" in kinds:
            raise ValueError(f"pattern={kinds} has local layers, which need a window")
        self._check_sublayers(kinds)
        if "shared_index" in kinds:
            self._check_shared_index(kinds)
        if self.mtp_layers not in (0, 1):
            raise ValueError(f"mtp_layers={self.mtp_layers}: expected 0 or 1")
        if self.mtp_layers and (self.kv_sharing or self.per_layer_embedding):
            raise ValueError("mtp_layers: not with kv_sharing or per_layer_embedding")
        if self.kv_sharing is not None:
            self._check_sharing(self.kv_sharing)

    def _check_sublayers(self, kinds: tuple[LayerKind, ...]) -> None:
        if "none" in kinds and self.sublayers == "both":
            raise ValueError(f"pattern={kinds}: layers without a mixer need sublayers='one'")
        if self.sublayers == "one" and (self.mtp_layers or self.kv_sharing or self.per_layer_embedding):
            raise ValueError("sublayers='one': not with mtp_layers, kv_sharing or per_layer_embedding")
        if self.tail_pattern and (self.dense_pattern or self.kv_sharing):
            raise ValueError("tail_pattern: not with dense_pattern or kv_sharing")
        if self.lead_pattern and (len(self.lead_pattern) < self.dense_layers or self.kv_sharing):
            raise ValueError("lead_pattern: expected a kind for each of dense_layers, and no kv_sharing")
        first = len(self.prefix_layers)
        if first > self.num_layers:
            raise ValueError(f"lead_pattern: expected at most {self.num_layers} layers")
        if first + len(self.tail_pattern) > self.num_layers:
            raise ValueError(f"tail_pattern: expected at most {self.num_layers - first} layers")

    def _check_shared_index(self, kinds: tuple[LayerKind, ...]) -> None:
        if self.mla is None or not set(kinds) <= {"global", "shared_index"}:
            raise ValueError("pattern: shared_index layers need mla, and global layers alone beside them")
        groups = (self.prefix_layers, self.pattern, self.suffix_layers)
        if any(group[:1] == ("shared_index",) for group in groups):
            raise ValueError(
                f"pattern: expected that prefix, period and suffix begin with a global layer, whose selection "
                f"shared_index layers share; got {groups}"
            )

    def _check_long_rope(self, scaling: LongRope, frequencies: int) -> None:
        for name in ("short_factor", "long_factor"):
            if len(getattr(scaling, name)) != frequencies:
                raise ValueError(f"{name}: expected {frequencies} numbers, got {len(getattr(scaling, name))}")

    def _check_sharing(self, sharing: KVSharing) -> None:
        if sharing.num_layers >= self.num_layers:
            raise ValueError(f"kv_sharing.num_layers={sharing.num_layers}: expected less than {self.num_layers} layers")
        if self.mla is not None or not isinstance(self.feed_forward, MLPConfig):
            raise ValueError("kv_sharing: expected a gated MLP in all layers, and no mla")
        if lacking := set(self.sharing_layers) - set(self.layers[: self.own_layers]):
            raise ValueError(f"kv_sharing: no layer before the sharing ones is of the kinds {sorted(lacking)}")
        if any(not self.layer(kind).is_attention for kind in self.sharing_layers):
            raise ValueError("kv_sharing: linear layers have no keys and values to share")

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """A config from its fields; those of a part by their path, such as "norm.eps"."""
        parts: dict[str, dict[str, Any]] = {part: {} for part in ("", *_PARTS)}
        for path, value in fields.items():
            part, _, name = path.rpartition(".")
            parts[part][name] = value
        return cls(**parts.pop(""), **{part: _PARTS[part](**values) for part, values in parts.items()})

    def to_fields(self) -> dict[str, Any]:
        """All fields; those of a part by their path."""
        fields = attrs.asdict(self, recurse=False)
        parts = {part: attrs.asdict(fields.pop(part), recurse=False) for part in _PARTS}
        return fields | {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}

    def with_fields(self, fields: Mapping[str, Any]) -> Self:
        """The config with other values of these fields; those of a part by their path, such as "norm.eps"."""
        return self.from_fields({**self.to_fields(), **fields})

    @property
    def has_lm_head(self) -> bool:
        """Whether there is an output head with its own weights."""
        return not self.head.tied and self.head.num_labels is None

    @property
    def head_rows(self) -> int:
        """Outputs of the head: the vocabulary, or the labels."""
        return self.vocab_size if self.head.num_labels is None else self.head.num_labels

    @property
    def period(self) -> int:
        """Layers of one period."""
        return len(self.pattern)

    @property
    def periods(self) -> int:
        """Whole periods: the length of the scan over layers."""
        return (self.own_layers - len(self.prefix_layers) - len(self.tail_pattern)) // self.period

    @property
    def own_layers(self) -> int:
        """The number of layers with keys and values of their own, which come first."""
        return self.num_layers - (0 if self.kv_sharing is None else self.kv_sharing.num_layers)

    @property
    def prefix_layers(self) -> tuple[LayerKind, ...]:
        """The kinds of the prefix layers."""
        return self.lead_pattern or tuple(self.pattern[layer % self.period] for layer in range(self.dense_layers))

    @property
    def suffix_layers(self) -> tuple[LayerKind, ...]:
        """The kinds of the suffix layers."""
        later = self.own_layers - len(self.prefix_layers) - len(self.tail_pattern)
        return self.pattern[: later % self.period] + self.tail_pattern

    @property
    def sharing_layers(self) -> tuple[LayerKind, ...]:
        """The kinds of the layers that share keys and values; they go on with the pattern."""
        later = range(self.own_layers - self.dense_layers, self.num_layers - self.dense_layers)
        return tuple(self.pattern[layer % self.period] for layer in later)

    @property
    def sharing_pattern(self) -> tuple[LayerKind, ...]:
        """The shortest period that `sharing_layers` repeat whole; empty without such layers."""
        layers = self.sharing_layers
        lengths = (length for length in range(1, len(layers) + 1) if len(layers) % length == 0)
        return next((layers[:n] for n in lengths if layers[:n] * (len(layers) // n) == layers), ())

    @property
    def sharing_periods(self) -> int:
        """How often they repeat it: the length of the scan over these layers."""
        return len(self.sharing_layers) // max(len(self.sharing_pattern), 1)

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of every layer."""
        return self.prefix_layers + self.pattern * self.periods + self.suffix_layers + self.sharing_layers

    @property
    def dense(self) -> tuple[bool, ...]:
        """Whether each layer has the gated MLP of `mlp_dim`."""
        if isinstance(self.feed_forward, MLPConfig):
            return (True,) * self.num_layers
        flags = self.dense_pattern or (False,) * self.period
        first = len(self.prefix_layers)
        later = tuple(flags[layer % self.period] for layer in range(self.num_layers - first))
        return (True,) * self.dense_layers + (False,) * (first - self.dense_layers) + later

    @property
    def short_length(self) -> int | None:
        """Tokens of a sequence above which its rotary positions are others; None where they never are."""
        scalings = [rope.scaling for rope in (self.rope_local, self.rope_global) if rope is not None]
        by_length = [scaling for scaling in scalings if isinstance(scaling, LongRope | DynamicNTK)]
        lengths = [scaling.original_max_position_embeddings for scaling in by_length]
        return min(lengths, default=None)

    def generation_problem(self, prompt: int, new: int) -> str | None:
        """Why `new` tokens cannot be generated after a prompt of `prompt` tokens; None if they can.

        The keys of a cache are rotated by the length that a sequence has when they are computed. Under LongRoPE those
        of a long sequence stay as they are, under dynamic scaling they change with every token.
        """
        short = self.short_length
        is_dynamic = isinstance(self.rope_global.scaling, DynamicNTK)
        if short is None or prompt + new <= short or (prompt > short and not is_dynamic):
            return None
        sizes = f"{prompt:,} prompt tokens and {new:,} new ones"
        return f"{sizes} pass {short:,} tokens, above which this model has other rotary positions"

    @property
    def speculative_problem(self) -> str | None:
        """Why tokens cannot be drafted by a multi-token-prediction (MTP) layer; None if they can."""
        if not self.mtp_layers:
            return "the model has no multi-token-prediction (MTP) layer"
        if any(spec.is_recurrent for spec in self.specs.values()):
            return "states of linear layers (as gated DeltaNet) cannot drop the drafts that are not accepted"
        return None

    @property
    def moe(self) -> MoEConfig | None:
        """The mixture of experts of the feed-forward, if it has one."""
        if isinstance(self.feed_forward, DenseBesideExperts):
            return self.feed_forward.experts
        return self.feed_forward if isinstance(self.feed_forward, MoEConfig) else None

    @property
    def mtp_layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every multi-token-prediction (MTP) layer."""
        return ("global",) * self.mtp_layers

    @property
    def head_widths(self) -> tuple[int, int]:
        """Widths of a head's query and key, and of its value."""
        return (self.mla or GQAConfig()).head_widths(self)

    def of(self, kind: LayerKind, *, shares_kv: bool = False) -> DecoderConfig:
        """The config that the layers of this kind are built from: with their own heads.

        Args:
            kind: of the layers.
            shares_kv: whether they are among those of `kv_sharing`.
        """
        if self.kv_sharing is not None:
            own = attrs.evolve(self, kv_sharing=None).of(kind)
            sharing = {"attention.values": "shared", "mlp_dim": self.kv_sharing.mlp_dim}
            return own.with_fields(sharing) if shares_kv else own
        if kind == "shared_index" and self.mla is not None and self.mla.indexer is not None:
            return attrs.evolve(self, mla=attrs.evolve(self.mla, indexer=None)).of(kind)
        if kind == "nope" and self.attention.query_key_norm == "rotated":
            return self.with_fields({"attention.query_key_norm": "none"})
        temperature = self.attention.query_temperature
        if kind != "nope" and temperature is not None and temperature.layers == "nope":
            return self.with_fields({"attention.query_temperature": None}).of(kind)
        if kind != "global" or self.global_heads is None:
            return self
        heads = self.global_heads
        own = {"head_dim": heads.head_dim, "num_kv_heads": heads.num_kv_heads, "attention.values": heads.values}
        return self.with_fields({**own, "global_heads": None})

    def layer(self, kind: LayerKind, *, dense: bool = False) -> LayerSpec:
        """What a layer of this kind is.

        Args:
            kind: of the layer.
            dense: whether it has the MLP of `mlp_dim`, whatever `feed_forward` is.
        """
        feed_forward, own = MLPConfig() if dense else self.feed_forward, self.of(kind)
        is_alone = self.sublayers == "one" and kind != "none"
        placement = (self.norm.linear_placement if kind == "linear" else None) or self.norm.placement
        parts = {"feed_forward": None if is_alone else feed_forward, "norms": placement}
        attention = own.mla or GQAConfig()
        match kind:
            case "local":
                rope = self.rope_local or self.rope_global
                return LayerSpec(mixer=attention, window=self.window, rope=rope, **parts)
            case "global" | "shared_index":
                return LayerSpec(mixer=attention, rope=self.rope_global, **parts)
            case "nope":
                return LayerSpec(mixer=attention, **parts)
            case "linear":
                return LayerSpec(mixer=self.linear_attention, **parts)
            case "none":
                return LayerSpec(mixer=None, **parts)

    @property
    def specs(self) -> dict[LayerKind, LayerSpec]:
        """What the layers of each kind are that it has, those of multi-token prediction (MTP) included."""
        return {kind: self.layer(kind) for kind in dict.fromkeys(self.layers + self.mtp_layer_kinds)}

    def layer_path(self, layer: int) -> tuple[str, int | None]:
        """The path of a layer's block, and its position in the stack; None outside of the stack."""
        later, sharing = layer - len(self.prefix_layers), layer - self.own_layers
        if sharing >= 0:
            period = len(self.sharing_pattern)
            return f"kv_sharing.blocks.{sharing % period}", sharing // period
        if later < 0:
            return f"lead.blocks.{layer}", None
        if later < self.periods * self.period:
            return f"layers.blocks.{later % self.period}", later // self.period
        return f"tail.blocks.{later - self.periods * self.period}", None
