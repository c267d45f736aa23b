"""Which tensors of a Hub checkpoint make each leaf of our decoder; knows names and shapes, no files."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs
import numpy as np

from nnxdsl.formats.mapped_arrays import MappedArray
from nnxdsl.models.config.decoder import DecoderConfig, LayerKind, Norms

HEAD = "lm_head.weight"
"""Stands beside what the text model's tensors have before their names, not behind it."""

_TOP = {"embed.embedding": "embed_tokens.weight", "norm.scale": "norm.weight"}
_ATTENTION = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
}
# Of what is compressed: queries as they are, or compressed too.
_LATENT_KEYS = {
    "attention.key_value_down": "self_attn.kv_a_proj_with_mqa",
    "attention.key_value_up": "self_attn.kv_b_proj",
    "attention.output": "self_attn.o_proj",
}
_LATENT: dict[bool, dict[str, str]] = {
    False: {"attention.query": "self_attn.q_proj", **_LATENT_KEYS},
    True: {"attention.query_down": "self_attn.q_a_proj", "attention.query_up": "self_attn.q_b_proj", **_LATENT_KEYS},
}
_LATENT_NORMS: dict[bool, dict[str, str]] = {
    False: {"attention.key_value_norm": "self_attn.kv_a_layernorm"},
    True: {
        "attention.query_norm": "self_attn.q_a_layernorm",
        "attention.key_value_norm": "self_attn.kv_a_layernorm",
    },
}
_MLP = {
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_BIASED = {
    "none": (),
    "qkv": ("attention.query", "attention.key", "attention.value"),
    "all": ("attention.query", "attention.key", "attention.value", "attention.output"),
}
_QUERY_KEY_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
# What the Hub calls the norm before the MLP where it is the only one after attention, and where it is not.
_NORMS: dict[Norms, dict[str, str]] = {
    "pre": {"pre_attention_norm": "input_layernorm", "pre_mlp_norm": "post_attention_layernorm"},
    "sandwich": {
        "pre_attention_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "pre_mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    },
    "post": {"post_attention_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"},
}


# Experts' tensors: of the layer, then of one expert.
_EXPERTS = {
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts", {"gate": "w1", "up": "w3", "down": "w2"}),
}
_OTHER_EXPERTS = ("mlp.gate", "mlp.experts", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"})


class Part(Protocol):
    """One tensor of a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As it is read."""
        ...

    @property
    def numpy(self) -> np.dtype:
        """The dtype that it is read in."""
        ...

    @property
    def is_mapped(self) -> bool:
        """Whether reading it costs nothing before it is used."""
        ...

    def read(self) -> np.ndarray:
        """Its values."""
        ...


@attrs.frozen
class Source:
    """The tensors, without prefix, that make one leaf.

    Attributes:
        names: in the order of the leaf's leading axes, the last of which changes fastest.
        leading: lengths of the leaf's axes that the tensors do not have: periods, experts.
        transposed: whether the tensor is our matrix turned over: torch keeps linear layers' weights as [out, in].
        unit: whether the tensor has an axis of length 1 before those of our leaf.
        share: (n, of): the tensor holds so many leaves, whose last axes take turns, and this is number n of them.
    """

    names: tuple[str, ...]
    leading: tuple[int, ...]
    transposed: bool
    share: tuple[int, int] = (0, 1)
    unit: bool = False

    def part_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of each tensor, for the leaf's shape."""
        part = shape[len(self.leading) :]
        if self.unit:
            return (1, *part)
        return part[::-1] if self.transposed else (*part[:-1], part[-1] * self.share[1]) if part else part

    def part(self, leaf: Any, number: int) -> np.ndarray:
        """One tensor of a leaf, or its share of one."""
        array = np.asarray(leaf[np.unravel_index(number, self.leading)] if self.leading else leaf)
        if self.unit:
            return array[None]
        return array.T if self.transposed else array

    def mapped(self, parts: Sequence[Part]) -> MappedArray:
        """The leaf of all its tensors, none of which is read."""
        number, of = self.share
        *shape, last = parts[0].shape[self.unit :]
        shape = (last, *reversed(shape)) if self.transposed else (*shape, last // of)

        def turned(part: Part) -> np.ndarray:
            array = part.read()[0] if self.unit else part.read()
            return array.T if self.transposed else array[..., number::of] if of > 1 else array

        return MappedArray(
            (*self.leading, *shape),
            np.result_type(*(part.numpy for part in parts)),
            tuple(functools.partial(turned, part) for part in parts),
            len(self.leading),
            all(part.is_mapped for part in parts),
        )


# GPT-OSS keeps the experts of a layer in one tensor, [experts, in, out] as we do, gate and up column by column.
_FUSED = {
    "mlp.router.weight": Source(("mlp.router.weight",), (), False),
    "mlp.router.bias": Source(("mlp.router.bias",), (), False),
    "mlp.gate.kernel": Source(("mlp.experts.gate_up_proj",), (), False, (0, 2)),
    "mlp.up.kernel": Source(("mlp.experts.gate_up_proj",), (), False, (1, 2)),
    "mlp.down.kernel": Source(("mlp.experts.down_proj",), (), False),
    "mlp.gate.bias": Source(("mlp.experts.gate_up_proj_bias",), (), False, (0, 2)),
    "mlp.up.bias": Source(("mlp.experts.gate_up_proj_bias",), (), False, (1, 2)),
    "mlp.down.bias": Source(("mlp.experts.down_proj_bias",), (), False),
}


_LINEAR = {
    "attention.inputs.kernel": Source(("linear_attn.in_proj_qkvz.weight",), (), True),
    "attention.rates.kernel": Source(("linear_attn.in_proj_ba.weight",), (), True),
    "attention.conv.weight": Source(("linear_attn.conv1d.weight",), (), False),
    "attention.decay_log": Source(("linear_attn.A_log",), (), False),
    "attention.decay_bias": Source(("linear_attn.dt_bias",), (), False),
    "attention.norm.scale": Source(("linear_attn.norm.weight",), (), False),
    "attention.output.kernel": Source(("linear_attn.out_proj.weight",), (), True),
}


# A layer that predicts tokens further ahead, by family: what stands around its block, in the order of our names; and
# what stands before the names of those and of the block's.
_FURTHER = {
    "deepseek_v3": (("enorm", "hnorm", "eh_proj", "shared_head.norm"), "layers.{}.", "layers.{}."),
    "qwen3_next": (("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "mtp.", "mtp.layers.0."),
}
_AROUND = ("token_norm.scale", "state_norm.scale", "join.kernel", "norm.scale")


def has_mtp(fields: Mapping[str, Any]) -> bool:
    """Whether a directory with this `config.json` may hold a layer that predicts tokens further ahead."""
    family = fields.get("model_type")
    # Qwen3-Next's says nothing of it.
    return family in _FURTHER and bool(fields.get("num_nextn_predict_layers", family == "qwen3_next"))


def _further(config: DecoderConfig, model_type: str | None) -> dict[str, Source]:
    """Of the layer that predicts tokens further ahead, if there is one."""
    names, *befores = _FURTHER.get(model_type or "", _FURTHER["deepseek_v3"])
    around, block = (before.format(config.num_layers) for before in befores)
    found: dict[str, Source] = {}
    for kind in config.mtp_layer_kinds:
        for ours, own in _layer(config, kind, model_type, dense=config.moe is None).items():
            found[f"mtp.block.{ours}"] = attrs.evolve(own, names=tuple(block + name for name in own.names))
        for ours, name in zip(_AROUND, names, strict=True):
            found[f"mtp.{ours}"] = Source((f"{around}{name}.weight",), (), ours == "join.kernel")
    return found


def is_auxiliary(name: str) -> bool:
    """Whether a tensor of `tensor_sources` stands beside the text model's, not in it."""
    return name == HEAD or name.startswith("mtp.")


def copies(config: DecoderConfig, model_type: str | None) -> dict[str, str]:
    """Tensors that a layer which predicts tokens further ahead shares with the decoder: their second names.

    Args:
        config: the decoder's numbers.
        model_type: the Hub's name of the family: in Qwen3-Next's they have no second names.

    Returns:
        The name of the decoder's own tensor, by the name of the copy; empty where there is no such layer.
    """
    if not config.mtp_layers or model_type == "qwen3_next":
        return {}
    embedding = _TOP["embed.embedding"]
    head = embedding if config.tied_head else HEAD
    prefix = f"layers.{config.num_layers}"
    return {f"{prefix}.{embedding}": embedding, f"{prefix}.shared_head.head.weight": head}


def tensor_sources(config: DecoderConfig, model_type: str | None = None) -> dict[str, Source]:
    """For each leaf of a plain decoder of `config`: the tensors that it is made of.

    Args:
        config: the decoder's numbers.
        model_type: the Hub's name of the family, for what is called differently from family to family.
    """
    found = {path: Source((name,), (), False) for path, name in _TOP.items()}
    if not config.tied_head:
        found["lm_head.kernel"] = Source((HEAD,), (), False)
    dense = config.dense
    first, pattern, periods = config.dense_layers, config.period, config.periods
    for block, kind in enumerate(config.prefix_layers):
        for ours, own in _layer(config, kind, model_type, dense=True).items():
            names = tuple(f"layers.{block}.{name}" for name in own.names)
            found[f"lead.blocks.{block}.{ours}"] = attrs.evolve(own, names=names)
    for block, kind in enumerate(config.pattern if periods else ()):
        for ours, own in _layer(config, kind, model_type, dense=dense[first + block]).items():
            layers = (first + period * pattern + block for period in range(periods))
            names = tuple(f"layers.{layer}.{name}" for layer in layers for name in own.names)
            stack = {"names": names, "leading": (periods, *own.leading)}
            found[f"layers.blocks.{block}.{ours}"] = attrs.evolve(own, **stack)
    for block, kind in enumerate(config.suffix_layers):
        layer = first + periods * pattern + block
        for ours, own in _layer(config, kind, model_type, dense=dense[layer]).items():
            names = tuple(f"layers.{layer}.{name}" for name in own.names)
            found[f"tail.blocks.{block}.{ours}"] = attrs.evolve(own, names=names)
    return found | _further(config, model_type)


def _layer(config: DecoderConfig, kind: LayerKind, model_type: str | None, *, dense: bool) -> dict[str, Source]:
    """Within a layer of this kind, with one MLP or with experts."""
    found = _mixer(config, kind) | {
        f"{ours}.scale": Source((f"{theirs}.weight",), (), False) for ours, theirs in _NORMS[config.norms].items()
    }
    if dense or config.moe is None:
        return found | {f"{ours}.kernel": Source((f"{theirs}.weight",), (), True) for ours, theirs in _MLP.items()}
    if model_type == "gpt_oss":
        return found | _FUSED
    router, experts, matrices = _EXPERTS.get(model_type or "", _OTHER_EXPERTS)
    found["mlp.router.weight"] = Source((f"{router}.weight",), (), False)
    if config.moe.e_score_correction_bias:
        found["mlp.router.correction"] = Source((f"{router}.e_score_correction_bias",), (), False)
    if config.moe.shared_expert_dim is not None:
        beside = "mlp.shared_expert" if config.moe.shared_expert_gate else "mlp.shared_experts"
        shared = {f"mlp.shared.{ours}.kernel": f"{beside}.{theirs}.weight" for ours, theirs in matrices.items()}
        found |= {ours: Source((theirs,), (), True) for ours, theirs in shared.items()}
    if config.moe.shared_expert_gate:
        found["mlp.shared.weight"] = Source(("mlp.shared_expert_gate.weight",), (), False, unit=True)
    count = config.moe.num_experts
    for ours, theirs in matrices.items():
        names = tuple(f"{experts}.{expert}.{theirs}.weight" for expert in range(count))
        found[f"mlp.{ours}.kernel"] = Source(names, (count,), True)
    return found


def _mixer(config: DecoderConfig, kind: LayerKind) -> dict[str, Source]:
    """What mixes the tokens of a layer."""
    if kind == "linear":
        return dict(_LINEAR)
    attention = _ATTENTION if config.mla is None else _LATENT[config.mla.q_lora_rank is not None]
    norms = _QUERY_KEY_NORMS if config.query_key_norm != "none" else {}
    if config.mla is not None:
        norms = _LATENT_NORMS[config.mla.q_lora_rank is not None]
    biased = _BIASED[config.attention_bias]
    return {
        **{f"{ours}.kernel": Source((f"{theirs}.weight",), (), True) for ours, theirs in attention.items()},
        **{f"{ours}.bias": Source((f"{_ATTENTION[ours]}.bias",), (), False) for ours in biased},
        **({"attention.sinks": Source(("self_attn.sinks",), (), False)} if config.sinks else {}),
        **{f"{ours}.scale": Source((f"{theirs}.weight",), (), False) for ours, theirs in norms.items()},
    }
