"""The config of a decoder, which covers all families; no jax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, get_args

import attrs

from nnxdsl.models.config.attention import AttentionConfig
from nnxdsl.models.config.checks import require_above_zero, require_choices
from nnxdsl.models.config.feed_forward import FeedForwardConfig, MLPConfig
from nnxdsl.models.config.gqa import GQAConfig
from nnxdsl.models.config.layer import LayerSpec
from nnxdsl.models.config.layer_pattern import LayerKind, LayerPattern
from nnxdsl.models.config.mixer import MixerConfig
from nnxdsl.models.config.mla import MLAConfig
from nnxdsl.models.config.moe import DenseBesideExperts, MoEConfig
from nnxdsl.models.config.norm import NormConfig
from nnxdsl.models.config.parts import EmbeddingConfig, GlobalHeads, HeadConfig, PerLayerEmbedding
from nnxdsl.models.config.rope import DynamicNTK, LongRope, Rope

WindowKind = Literal["sliding", "chunks"]

_PARTS: dict[str, Callable[..., Any]] = {
    "attention": AttentionConfig,
    "embedding": EmbeddingConfig,
    "head": HeadConfig,
    "layers": LayerPattern,
    "mlp": MLPConfig,
    "norm": NormConfig,
}


@attrs.frozen(kw_only=True)
class DecoderConfig:
    """The architecture of a decoder; defaults are those of Gemma 3.

    Attributes:
        vocab_size: rows of the embedding.
        embed_dim: width of the residual stream.
        layers: the kinds of all layers.
        num_heads: query heads.
        num_kv_heads: key/value heads; divides `num_heads`.
        head_dim: width of one head; even. With `mla` that of the rotary part.
        window: a local layer attends to a token itself and `window - 1` tokens before; None without local layers.
        window_kind: "sliding": that; "chunks": sequences are divided into chunks of `window` tokens, and a local layer
            attends to the tokens of the same chunk alone (Llama 4).
        rope_local: rotary positions of the local layers; None for those of the global layers.
        rope_global: rotary positions of the global layers.
        max_length: the model's context length.
        norm: the norms of the residual stream.
        attention: the factor of attention scores, and norms, biases, values and the gate of attention.
        global_heads: heads of the global layers; None for those of the other layers.
        per_layer_embedding: embeddings of each layer, which a gate adds to its output; None for none.
        layer_scalar: a layer's output is multiplied by a number, which is read and never trained (Gemma 4).
        embedding: what is done to the vectors of the embedding.
        residual_multiplier: what a mixer or a feed-forward adds to the residual stream is multiplied by it (Granite).
        head: what makes logits of the last layer's output.
        linear_attention: the mixer of linear layers, such as a gated DeltaNet; None without linear layers.
        mla: multi-head latent attention in place of grouped-query attention; None for the latter.
        mlp: the MLP, and what experts have in common with it.
        feed_forward: the feed-forward of a layer in place of the MLP, such as a mixture of experts; None for the MLP.
        mtp_layers: multi-token-prediction layers, 0 or 1, global ones (DeepSeek-V3, arXiv:2412.19437, section 2.2). A
            `config.json` is always read as 0: many directories do not have these layers.
    """

    vocab_size: int
    embed_dim: int
    layers: LayerPattern
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    window_kind: WindowKind = "sliding"
    rope_local: Rope | None = Rope(theta=10_000.0)  # noqa: RUF009 - frozen
    rope_global: Rope = Rope(theta=1_000_000.0)  # noqa: RUF009 - frozen
    attention: AttentionConfig
    linear_attention: MixerConfig | None = None
    max_length: int
    norm: NormConfig = NormConfig(placement="sandwich", scale="zero_centred")  # noqa: RUF009 - frozen
    global_heads: GlobalHeads | None = None
    per_layer_embedding: PerLayerEmbedding | None = None
    layer_scalar: bool = False
    embedding: EmbeddingConfig = EmbeddingConfig(scaled=True)  # noqa: RUF009 - frozen
    residual_multiplier: float = 1.0
    head: HeadConfig = HeadConfig()  # noqa: RUF009 - frozen
    mla: MLAConfig | None = None
    mlp: MLPConfig
    feed_forward: FeedForwardConfig | None = None
    mtp_layers: int = 0

    def __attrs_post_init__(self) -> None:
        require_above_zero(self, "", "vocab_size", "embed_dim", "num_heads", "num_kv_heads", "head_dim")
        require_above_zero(self, "", "window", "max_length", "residual_multiplier")
        require_choices(self, "", {"window_kind": get_args(WindowKind)})
        heads = self.num_kv_heads, self.head_dim
        if self.mla is not None and heads != (self.num_heads, self.mla.qk_rope_head_dim):
            raise ValueError("mla: expected as many num_kv_heads as num_heads, and head_dim=qk_rope_head_dim")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; RoPE rotates its halves against each other")
        for rope in filter(None, (self.rope_local, self.rope_global)):
            rope.require_width(self.head_dim)
        if self.global_heads is not None:
            if self.mla is not None or "global" not in self.layers.pattern:
                raise ValueError("global_heads: expected global layers, and no mla")
            self.of("global")  # which must be possible
        self._check_layers(self.layers)
        if self.mtp_layers not in (0, 1):
            raise ValueError(f"mtp_layers={self.mtp_layers}: expected 0 or 1")
        if self.mtp_layers and (self.layers.num_kv_shared_layers or self.per_layer_embedding):
            raise ValueError("mtp_layers: not with layers.num_kv_shared_layers or per_layer_embedding")

    def _check_layers(self, layers: LayerPattern) -> None:
        kinds, num_shared = layers.all_patterns, layers.num_kv_shared_layers
        if (self.linear_attention is None) == ("linear" in kinds):
            raise ValueError(f"layers.pattern={kinds}: linear layers need linear_attention, and it needs them")
        if self.window is None and "local" in kinds:
            raise ValueError(f"layers.pattern={kinds} has local layers, which need a window")
        if isinstance(self.feed_forward, MLPConfig):
            raise ValueError("feed_forward: expected None where layers have the MLP alone, whose config is mlp")
        if self.feed_forward is None and (layers.dense_layers or layers.dense_pattern):
            raise ValueError("layers: dense_layers and dense_pattern need a feed_forward of the other layers")
        if layers.sublayers == "one" and (self.mtp_layers or num_shared or self.per_layer_embedding):
            raise ValueError("layers.sublayers='one': not with mtp_layers, num_kv_shared_layers or per_layer_embedding")
        if "shared_index" in kinds and (self.mla is None or not set(kinds) <= {"global", "shared_index"}):
            raise ValueError("layers.pattern: shared_index layers need mla, and global layers alone beside them")
        if num_shared and (self.mla is not None or self.feed_forward is not None):
            raise ValueError("layers.num_kv_shared_layers: expected an MLP in all layers, and no mla")
        if any(not self.layer(kind).is_attention for kind in layers.kv_shared):
            raise ValueError("layers.num_kv_shared_layers: linear layers have no keys and values to share")

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
    def dense(self) -> tuple[bool, ...]:
        """Whether each layer has the MLP, and not `feed_forward`."""
        return self.layers.dense if self.feed_forward is not None else (True,) * self.layers.num_layers

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
    def kv_cache_problem(self) -> str | None:
        """Why keys and values cannot be stored in another dtype; None if they can."""
        if any(spec.is_attention for spec in self.specs.values()):
            return None
        return "the model has no keys and values, and states of linear layers stay as they are"

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
            shares_kv: whether they are among those of `layers.kv_shared`.
        """
        if self.layers.num_kv_shared_layers:
            resolved = self.with_fields({"layers.num_kv_shared_layers": 0}).of(kind)
            sharing = {"attention.values": "shared", "mlp.dim": self.mlp.kv_shared_dim or self.mlp.dim}
            return resolved.with_fields(sharing) if shares_kv else resolved
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
        resolved = {"head_dim": heads.head_dim, "num_kv_heads": heads.num_kv_heads, "attention.values": heads.values}
        return self.with_fields({**resolved, "global_heads": None})

    def layer(self, kind: LayerKind, *, dense: bool = False) -> LayerSpec:
        """What a layer of this kind is.

        Args:
            kind: of the layer.
            dense: whether it has the MLP, whatever `feed_forward` is.
        """
        feed_forward, config = self.mlp if dense else self.feed_forward or self.mlp, self.of(kind)
        is_alone = self.layers.sublayers == "one" and kind != "none"
        placement = (self.norm.linear_placement if kind == "linear" else None) or self.norm.placement
        parts = {"feed_forward": None if is_alone else feed_forward, "norms": placement}
        attention = config.mla or GQAConfig()
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
        return {kind: self.layer(kind) for kind in dict.fromkeys(self.layers.kinds + self.mtp_layer_kinds)}
