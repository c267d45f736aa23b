"""The tensors of a Hub checkpoint that make up each array of our decoder: names, shapes and layouts."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from nnxdsl.formats.mapped_arrays import MappedArray
from nnxdsl.formats.quantized import StoredTensor
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.layer_pattern import LayerKind
from nnxdsl.models.config.norm import NormPlacement
from nnxdsl.models.config.tensors import MTPTensors, TensorSource, linears, norms
from nnxdsl.models.families.family import OUTSIDE
from nnxdsl.models.families.registry import family_named, text_fields

HEAD = "lm_head.weight"
"""The output head, whose name has no prefix of the text model."""
SCORE = "score.weight"
"""The head of transformers' sequence classification, likewise."""

# Those of per-layer embeddings, of the decoder and of each layer.
_PER_LAYER = {
    "per_layer.embedding": TensorSource(("embed_tokens_per_layer.weight",)),
    **linears({"per_layer.projection": "per_layer_model_projection"}),
    **norms({"per_layer.norm": "per_layer_projection_norm"}),
}
_PER_LAYER_GATE = {
    **linears({"per_layer.gate": "per_layer_input_gate", "per_layer.output": "per_layer_projection"}),
    **norms({"per_layer.norm": "post_per_layer_input_norm"}),
}
_KV = re.compile(r"layers\.(\d{1,9})\.self_attn\.[kv]_(proj|norm)\.")
# Names of a layer's norms on the Hub, by their position around attention and MLP.
_NORMS: dict[NormPlacement, dict[str, str]] = {
    "pre": {"pre_attention_norm": "input_layernorm", "pre_mlp_norm": "post_attention_layernorm"},
    "sandwich": {
        "pre_attention_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "pre_mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    },
    "post": {"post_attention_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"},
}


def part(source: TensorSource, leaf: Any, number: int) -> np.ndarray:
    """One tensor of an array, in the layout of the file; for a tensor shared by several arrays, its slice."""
    array = np.asarray(leaf[np.unravel_index(number, source.leading)] if source.leading else leaf)
    if source.unit:
        return array[None]
    return array.swapaxes(-1, -2) if source.transposed else array


def joined(sources: Sequence[TensorSource], parts: Sequence[np.ndarray]) -> np.ndarray:
    """The tensor that holds parts of several arrays."""
    if len(parts) == 1:
        return parts[0]
    if sources[0].columns is None:
        return np.stack(parts, axis=-1).reshape(*parts[0].shape[:-1], -1)
    order = sorted(range(len(parts)), key=lambda number: sources[number].columns or ())
    return np.concatenate([parts[number] for number in order], axis=-2 if sources[0].transposed else -1)


def mapped(source: TensorSource, parts: Sequence[StoredTensor]) -> MappedArray:
    """The array that is made of `parts`, none of which is read yet."""
    (number, count), columns = source.share, source.columns
    shape = list(parts[0].shape[source.unit :])
    if source.transposed:
        shape[-2:] = shape[:-3:-1]
    if shape:
        shape[-1] = shape[-1] // count if columns is None else columns[1] - columns[0]

    def read(part: StoredTensor) -> np.ndarray:
        array = part.read()[0] if source.unit else part.read()
        array = array.swapaxes(-1, -2) if source.transposed else array
        if columns is not None:
            return array[..., columns[0] : columns[1]]
        return array[..., number::count] if count > 1 else array

    return MappedArray(
        (*source.leading, *shape),
        np.result_type(*(part.numpy for part in parts)),
        tuple(functools.partial(read, part) for part in parts),
        len(source.leading),
        all(part.is_mapped for part in parts),
    )


_AROUND_MTP = ("token_norm.scale", "state_norm.scale", "join.kernel", "norm.scale")


def has_mtp(fields: Mapping[str, Any]) -> bool:
    """Whether a directory with this `config.json` may have a multi-token-prediction (MTP) layer."""
    fields = text_fields(fields)
    family = family_named(fields.get("model_type"))
    if family is None or family.mtp is None:
        return False
    return bool(fields.get("num_nextn_predict_layers", family.mtp.is_default))


def _mtp(config: DecoderConfig, model_type: str | None) -> dict[str, TensorSource]:
    """Sources of the multi-token-prediction layer, if there is one."""
    names = _mtp_names(model_type)
    prefix, block_prefix = (before.format(config.layers.num_layers) for before in (names.prefix, names.block_prefix))
    sources: dict[str, TensorSource] = {}
    for kind in config.mtp_layer_kinds:
        for ours, source in _layer(config, kind, model_type, dense=False).items():
            sources[f"mtp.block.{ours}"] = attrs.evolve(
                source, names=tuple(block_prefix + name for name in source.names)
            )
        for ours, name in zip(_AROUND_MTP, names.around, strict=True):
            sources[f"mtp.{ours}"] = TensorSource((f"{prefix}{name}.weight",), transposed=ours == "join.kernel")
    return sources


def _mtp_names(model_type: str | None) -> MTPTensors:
    family = family_named(model_type)
    return family.mtp if family is not None and family.mtp is not None else MTPTensors()


def outside_layers(model_type: str | None) -> Mapping[str, str]:
    """The names of the embedding and of the final norm, by path."""
    family = family_named(model_type)
    return OUTSIDE if family is None else family.outside


def is_auxiliary(name: str) -> bool:
    """Whether the name of a tensor in `tensor_sources` has no prefix of the text model."""
    return name in (HEAD, SCORE) or name.startswith("mtp.")


def copies(config: DecoderConfig, model_type: str | None) -> dict[str, str]:
    """Tensors that the multi-token-prediction layer shares with the decoder and that are stored twice.

    Args:
        config: The decoder's architecture.
        model_type: The Hub's name of the family: Qwen3-Next stores them once.

    Returns:
        The name of the decoder's own tensor, by the name of the copy; empty without such a layer.
    """
    if not config.mtp_layers or not _mtp_names(model_type).has_copies:
        return {}
    embedding = outside_layers(model_type)["embed.embedding"]
    head = embedding if config.head.tied else HEAD
    prefix = f"layers.{config.layers.num_layers}"
    return {f"{prefix}.{embedding}": embedding, f"{prefix}.shared_head.head.weight": head}


def tensor_sources(config: DecoderConfig, model_type: str | None = None) -> dict[str, TensorSource]:
    """The tensors that make up each array of the base model, by path.

    Args:
        config: The decoder's architecture.
        model_type: The Hub's name of the family, for names that differ between families.
    """
    sources = {path: TensorSource((name,)) for path, name in outside_layers(model_type).items()}
    if config.has_lm_head:
        sources["lm_head.kernel"] = TensorSource((HEAD,))
    if config.head.num_labels is not None:
        sources["score.kernel"] = TensorSource((SCORE,))
    if config.per_layer_embedding is not None:
        sources |= _PER_LAYER
    kinds, dense, blocks = config.layers.kinds, config.dense, defaultdict[tuple[str, bool], list[int]](list)
    for layer in range(config.layers.num_layers):
        path, position = config.layers.path(layer)
        blocks[path, position is not None].append(layer)
    for (path, is_stacked), (layer, *others) in blocks.items():
        shares_kv = path.startswith("kv_sharing.")
        for ours, source in _layer(config, kinds[layer], model_type, dense=dense[layer], shares_kv=shares_kv).items():
            names = tuple(f"layers.{number}.{name}" for number in (layer, *others) for name in source.names)
            leading = (1 + len(others), *source.leading) if is_stacked else source.leading
            sources[f"{path}.{ours}"] = attrs.evolve(source, names=names, leading=leading)
    return sources | _mtp(config, model_type)


def is_unread(config: DecoderConfig, name: str) -> bool:
    """Whether a tensor without prefix is of keys or values of a layer that has none of its own; files may have them."""
    layer = _KV.match(name)
    return layer is not None and config.layers.own_layers <= int(layer[1]) < config.layers.num_layers


def _layer(
    config: DecoderConfig, kind: LayerKind, model_type: str | None, *, dense: bool, shares_kv: bool = False
) -> dict[str, TensorSource]:
    """Sources of the arrays of a layer of this kind; a dense one has the gated MLP."""
    layer = config.layer(kind, dense=dense)
    mixer, feed_forward, sources = layer.mixer, layer.feed_forward, norms(_NORMS[layer.norms])
    for path in list(sources):
        if (mixer if "attention" in path else feed_forward) is None:
            del sources[path]
    if mixer is not None:
        sources |= mixer.tensors(config.of(kind, shares_kv=shares_kv))
    if feed_forward is not None:
        if feed_forward.norms_input:
            sources.pop("pre_mlp_norm.scale", None)
        sources |= feed_forward.tensors(config)
    if config.per_layer_embedding is not None:
        sources |= _PER_LAYER_GATE
    if config.layer_scalar:
        sources["scalar"] = TensorSource(("layer_scalar",))
    family = family_named(model_type)
    return sources if family is None else family.layer_tensors(config, sources)
