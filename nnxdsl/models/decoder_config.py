"""A decoder as numbers and choices: all that tells one dense family from another; no jax, and no family by name."""

from __future__ import annotations

from typing import Literal, get_args

import attrs

Norms = Literal["pre", "sandwich"]
NormScale = Literal["plain", "zero_centred"]
Activation = Literal["silu", "gelu_tanh"]

_CHOICES = {"norms": get_args(Norms), "norm_scale": get_args(NormScale), "activation": get_args(Activation)}


@attrs.frozen(kw_only=True)
class RopeRamp:
    """Which of RoPE's frequencies are scaled: those that turn slowly (Llama 3, arXiv:2407.21783).

    A frequency is judged by its turns over `length` positions. With fewer than `slow` turns it is divided by
    `rope_scale`, with more than `fast` turns it stays as it is, and in between it is mixed of the two, linearly in the
    number of turns.

    Attributes:
        slow: turns below which a frequency is scaled in full (the Hub's `low_freq_factor`).
        fast: turns above which it is not scaled (the Hub's `high_freq_factor`).
        length: positions that the model was trained on before (the Hub's `original_max_position_embeddings`).
    """

    slow: float
    fast: float
    length: int

    def __attrs_post_init__(self) -> None:
        if not 0 < self.slow < self.fast:
            raise ValueError(f"rope_ramp: expected 0 < slow < fast, got slow={self.slow} and fast={self.fast}")
        if not self.length > 0:
            raise ValueError(f"rope_ramp: length must be above 0, got {self.length}")


@attrs.frozen(kw_only=True)
class DecoderConfig:
    """The numbers and choices that fix a dense decoder's mathematics; the choices' defaults are those of Gemma 3.

    Layers come in periods of `window_pattern`: all but the last of a period attend over a sliding window, the last
    over everything. Layers that fill no whole period are the tail. Where all layers are global, a period is one layer.

    Attributes:
        vocab_size: rows of the embedding.
        embed_dim: width of the residual stream.
        mlp_dim: width of the gated MLP.
        num_layers: all layers, whole periods and tail.
        num_heads: query heads.
        num_kv_heads: key/value heads; divides `num_heads`.
        head_dim: width of one head; even.
        window: a local layer sees itself and `window - 1` tokens before; None where no layer is local.
        window_pattern: layers of one period; 1 where all layers are global.
        rope_base_local: RoPE base wavelength of the local layers.
        rope_base_global: RoPE base wavelength of the global layers.
        rope_scale: RoPE frequencies of the global layers are divided by it, as if positions were.
        rope_ramp: which frequencies `rope_scale` is for; None for all of them (linear scaling).
        query_scale: attention scores are multiplied by it.
        attention_soft_cap: attention scores are bent into its range, from minus it to it, before they are masked (Gemma
            2, arXiv:2408.00118); None for scores as they are.
        norm_eps: added to the mean square in every RMSNorm.
        max_length: positions that the model was made for.
        norms: "pre": a norm before attention and one before the MLP; "sandwich": one after each as well, before the
            sum with the residual stream.
        norm_scale: "plain": the scale begins at 1 and multiplies what is rounded already (Llama);
            "zero_centred": it begins at 0, and 1 + scale multiplies before the rounding (Gemma).
        query_key_norm: an RMSNorm of each head's query and key before they are rotated.
        activation: of the MLP's gate.
        scale_embedding: token vectors are multiplied by the square root of `embed_dim`.
        tied_head: the embedding is the output head; else the head has weights of its own.
        logit_soft_cap: logits `z` are `logit_soft_cap * tanh(z / logit_soft_cap)` (Gemma 2, arXiv:2408.00118); None
            where they stay as they are.
    """

    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    window_pattern: int = 6
    rope_base_local: float = 10_000.0
    rope_base_global: float = 1_000_000.0
    rope_scale: float = 1.0
    rope_ramp: RopeRamp | None = None
    query_scale: float
    attention_soft_cap: float | None = None
    norm_eps: float = 1e-6
    max_length: int
    norms: Norms = "sandwich"
    norm_scale: NormScale = "zero_centred"
    query_key_norm: bool = True
    activation: Activation = "gelu_tanh"
    scale_embedding: bool = True
    tied_head: bool = True
    logit_soft_cap: float | None = None

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(DecoderConfig):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
                raise ValueError(f"{field.name} must be above 0, got {value}")
            if field.name in _CHOICES and value not in _CHOICES[field.name]:
                raise ValueError(f"{field.name}: expected one of {_CHOICES[field.name]}, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; RoPE turns its halves against each other")
        if self.window is None and self.window_pattern != 1:
            raise ValueError(f"window_pattern={self.window_pattern} has local layers, which need a window")

    @property
    def periods(self) -> int:
        """Whole periods: the length of the scan over layers."""
        return self.num_layers // self.window_pattern

    @property
    def tail_layers(self) -> int:
        """Layers after the last whole period; all of them local."""
        return self.num_layers % self.window_pattern

    def is_global(self, layer: int) -> bool:
        """Whether a layer, counted from 0 in the model or in its period, attends over everything."""
        return (layer + 1) % self.window_pattern == 0
