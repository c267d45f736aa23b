"""Floating-point operations of a step: model FLOPs and executed FLOPs.

Model FLOPs are those of model FLOPs utilisation (MFU): no padding, each pair of tokens that attend to each other
once, no recomputation. With N weights of the layers' products, V x D of the head, S tokens in the layers and C tokens
with a log-probability, a forward pass has F = 2 N S + 2 V D C and A for attention (Kaplan et al. 2020,
arXiv:2001.08361, section 2.1). A backward pass has F for the inputs, F for the weights if they are trained, and 2 A,
since attention has no weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import attrs

from nnxdsl.adapters import lora_math
from nnxdsl.data.batch import Batch
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.indexer import IndexerConfig
from nnxdsl.models.config.layer_pattern import LayerKind
from nnxdsl.models.params import ParamSpec, is_indexer_param, is_mtp_param
from nnxdsl.models.remat import AGAIN
from nnxdsl.program.batches import BatchLengths, Lengths, kind_of
from nnxdsl.program.blueprint import Blueprint, Teacher

_ORDER = (
    (
        *("attention.query", "attention.key", "attention.value", "attention.query_down", "attention.key_value_down"),
        *("attention.inputs", "attention.rates", "attention.output_gate"),
    ),
    ("attention.query_up", "attention.key_value_up"),
    ("attention.output",),
    ("mlp.latent_down",),
    ("mlp.gate", "mlp.up"),
    ("mlp.down",),
    ("mlp.latent_up",),
    ("per_layer.gate",),
    ("per_layer.output",),
)
"""The products of a layer in the order of computation; those of one line have the same input. No layer has all."""


@attrs.frozen
class Flops:
    """FLOPs of one step over all devices.

    Attributes:
        model_flops: Model FLOPs.
        executed: Executed FLOPs, with padding and recomputation.
    """

    model_flops: float
    executed: float


@attrs.frozen
class Weights:
    """Numbers of weights in the products of one token; of experts, those that it is routed to.

    Attributes:
        trunk: Of the layers, without adapters.
        head: Of the output head.
        adapter: Of the adapters.
        idle: Of the layers below everything that is trained, whose inputs need no gradient.
        idle_layers: Layers whose attention is below everything that is trained.
        indexer: Of the indexers of sparse attention, which are not among those of the layers.
    """

    trunk: int
    head: int
    adapter: int
    idle: int
    idle_layers: tuple[int, ...]
    indexer: int


@functools.lru_cache(maxsize=4)  # called in every step
def weights(blueprint: Blueprint) -> Weights:
    """Numbers of weights of a program's products."""
    config = blueprint.config
    trunk = _trunk(blueprint)
    adapter = sum(_used(blueprint, leaf) for path, leaf in blueprint.trainable.items() if lora_math.is_adapter(path))
    idle, idle_layers = (0, ()) if blueprint.experiment.adapter is None else _idle(blueprint)
    indexer = sum(math.prod(leaf.shape) for path, leaf in blueprint.base.items() if _is_index_product(blueprint, path))
    return Weights(trunk, config.head_rows * config.embed_dim, adapter, idle, idle_layers, indexer)


def _is_index_product(blueprint: Blueprint, path: str) -> bool:
    is_run = bool(blueprint.mtp_layer_kinds) or not is_mtp_param(path)
    return is_run and is_indexer_param(path) and not path.endswith((".scale", ".bias"))


def _trains_only_indexers(blueprint: Blueprint) -> bool:
    return all(map(is_indexer_param, blueprint.trainable))


def _indexers(blueprint: Blueprint, lengths: BatchLengths) -> tuple[float, float]:
    """FLOPs of the indexers' products in a forward pass, and of their scores; 0 where nothing reads them."""
    indexer = None if blueprint.config.mla is None else blueprint.config.mla.indexer
    if indexer is None:
        return 0.0, 0.0
    pairs = lengths.attended_pairs(None)
    selects = indexer.selects and lengths.attended_pairs(indexer.topk) < pairs
    if not selects and not blueprint.experiment.indexer_loss_coef:
        return 0.0, 0.0
    return 2.0 * weights(blueprint).indexer * lengths.tokens, 2.0 * _index_width(blueprint, indexer) * pairs


def _index_width(blueprint: Blueprint, indexer: IndexerConfig) -> int:
    """The sum over layers of the widths of all heads of an indexer."""
    return indexer.num_heads * indexer.head_dim * len(_selecting_layers(blueprint))


def _selecting_layers(blueprint: Blueprint) -> list[LayerKind]:
    """The kinds of the layers that have an indexer, where any has."""
    return [kind for kind in blueprint.config.layers.kinds + blueprint.mtp_layer_kinds if kind != "shared_index"]


def model_flops(blueprint: Blueprint, lengths: BatchLengths, teacher_lengths: BatchLengths | None = None) -> float:
    """Model FLOPs of one step; the reference does not run for a batch with its log-probabilities.

    Args:
        blueprint: The program.
        lengths: Of the batch.
        teacher_lengths: Of what the teacher reads; None for the same.
    """
    counts, mtp_kinds = weights(blueprint), blueprint.mtp_layer_kinds
    scores = _attention(blueprint.config, blueprint.config.layers.kinds + mtp_kinds, lengths)
    attention = sum(scores)
    targets = lengths.targets + len(mtp_kinds) * lengths.mtp_targets
    forward = 2 * counts.trunk * lengths.tokens + 2 * counts.head * targets
    passes = 3 if blueprint.experiment.adapter is None else 2
    if _trains_only_indexers(blueprint):
        step = forward + attention
    else:
        step = passes * forward + 3 * attention + 3 * 2 * counts.adapter * lengths.tokens
        step -= 2 * counts.idle * lengths.tokens + 2 * sum(scores[layer] for layer in counts.idle_layers)
    products, index_scores = _indexers(blueprint, lengths)
    # Backward to the indexers' weights, and to their queries and keys.
    step += 2 * products + 3 * index_scores if blueprint.experiment.indexer_loss_coef else products + index_scores
    reference = forward + attention + products + index_scores if _runs_reference(blueprint, lengths) else 0
    teacher = blueprint.teacher
    if teacher is None or teacher.is_precomputed:
        return step + reference
    return step + reference + _teacher_flops(teacher, teacher_lengths or lengths)


def _teacher_flops(teacher: Teacher, lengths: BatchLengths) -> float:
    """FLOPs of a teacher's forward pass."""
    config = teacher.config
    head = config.vocab_size * config.embed_dim
    products = 2 * _trunk(teacher) * lengths.tokens + 2 * head * lengths.targets
    return products + sum(_attention(config, config.layers.kinds, lengths))


def _attention(config: DecoderConfig, kinds: Sequence[LayerKind], lengths: BatchLengths) -> list[float]:
    """FLOPs of attention scores and values by layer; those of recurrent states are negligible beside the products."""
    indexer = None if config.mla is None else config.mla.indexer
    # A token attends to as many of those before it as in a window of the indexer's choice.
    selected = indexer.topk if indexer is not None and indexer.selects else None
    is_chunked = config.window_kind == "chunks"
    pairs = {
        kind: lengths.attended_pairs(layer.window or selected, is_chunked=is_chunked) if layer.is_attention else 0
        for kind, layer in config.specs.items()
    }
    widths = {kind: sum(config.of(kind).head_widths) for kind in config.specs}
    return [2.0 * config.num_heads * widths[kind] * pairs[kind] for kind in kinds]


def _widths(config: DecoderConfig, kinds: Sequence[LayerKind]) -> int:
    """The sum over layers with attention of the widths of a head's query and value."""
    widths = {kind: sum(config.of(kind).head_widths) * layer.is_attention for kind, layer in config.specs.items()}
    return sum(widths[kind] for kind in kinds)


@functools.lru_cache(maxsize=4)
def _trunk(model: Blueprint | Teacher) -> int:
    """Number of the layers' weights in the products of one token."""
    layers = (size for layer in range(model.config.layers.num_layers) for size in _kernels(model, layer).values())
    projection = model.base.get("per_layer.projection.kernel")  # which no layer has
    count = sum(layers) + (0 if projection is None else math.prod(projection.shape))
    if isinstance(model, Teacher) or not model.mtp_layer_kinds:
        return count
    mtp = (leaf for path, leaf in model.base.items() if is_mtp_param(path) and path.endswith(".kernel"))
    return count + sum(_used(model, leaf) for leaf in mtp)


def executed(
    blueprint: Blueprint, rows: int, padded: Lengths, *, runs_reference: bool, teacher_length: int | None = None
) -> tuple[float, float]:
    """FLOPs of one step as the program computes them: of the layers, and of the head.

    Args:
        blueprint: The program.
        rows: Rows of the batch.
        padded: Tokens and targets of each row, padding included.
        runs_reference: Whether the step runs the reference.
        teacher_length: Tokens of each row that the teacher reads; None for those of `padded`.
    """
    counts, config = weights(blueprint), blueprint.config
    (again, mixed_again), adapted = AGAIN[blueprint.remat], blueprint.experiment.adapter is not None
    tokens, targets = rows * padded.trunk, rows * padded.head * (1 + len(blueprint.mtp_layer_kinds))
    widths = _widths(config, config.layers.kinds + blueprint.mtp_layer_kinds)
    scores = 2 * config.num_heads * widths * padded.trunk * tokens
    # Forward; backward to the inputs, and to the weights if they are trained; recomputation; reference.
    twice = blueprint.experiment.compares_parts  # GradCache: each part has a forward pass of its own before the loss
    passes = 1 + 1 + (not adapted) + again + runs_reference + twice
    if _trains_only_indexers(blueprint):
        layers = 2 * counts.trunk * tokens * (1 + again) + scores * (1 + mixed_again)
    else:
        # The reference is the base with its adapters off.
        layers = 2 * counts.trunk * tokens * passes + 2 * counts.adapter * tokens * (3 + again + twice)
        layers += scores * (3 + mixed_again + runs_reference + twice)
    layers += _executed_indexers(blueprint, padded.trunk, tokens, again + runs_reference + twice)
    # A frozen head's gradient is computed in its forward pass (`target_logprobs.py`); a trained one computes its logits
    # once more in the backward pass, unless they are few enough to be kept.
    is_trained = blueprint.head_path in blueprint.trainable
    heads = 4 if is_trained else 2
    if blueprint.teacher is None:
        return layers, 2 * counts.head * targets * (heads + runs_reference + twice)
    objective, teacher = blueprint.experiment.objective, blueprint.teacher
    labels = heads if objective.hard_weight else 1
    if blueprint.teacher.is_precomputed:  # the student's logits, computed again in the backward pass
        return layers, 2 * targets * counts.head * (labels + 3 + is_trained)
    teacher_config = teacher.config
    length = teacher_length or padded.trunk
    layers += 2 * _trunk(teacher) * rows * length
    layers += (
        2 * teacher_config.num_heads * _widths(teacher_config, teacher_config.layers.kinds) * length * rows * length
    )
    teacher_head = teacher_config.vocab_size * teacher_config.embed_dim
    if not teacher.has_distributions:
        return layers, 2 * targets * (counts.head * heads + teacher_head)
    # The divergence computes both heads' logits twice, and once more in the backward pass (`losses/distillation.py`).
    teacher_head *= 3
    return layers, 2 * targets * (counts.head * (labels + 4 + is_trained) + teacher_head)


def _executed_indexers(blueprint: Blueprint, length: int, tokens: int, again: float) -> float:
    """FLOPs of the indexers and their loss, for rows of `length` slots; `again`: forward passes beside the first."""
    indexer = None if blueprint.config.mla is None else blueprint.config.mla.indexer
    is_trained = blueprint.experiment.indexer_loss_coef > 0
    if indexer is None or not (is_trained or (indexer.selects and length > indexer.topk)):
        return 0.0
    pairs, products = length * tokens, 2.0 * weights(blueprint).indexer * tokens
    index_scores = 2.0 * _index_width(blueprint, indexer) * pairs
    if not is_trained:
        return (products + index_scores) * (1 + again)
    # The scores of its heads, and those of attention that it learns from, are computed again in the backward pass.
    config, kinds = blueprint.config, _selecting_layers(blueprint)
    target = 2.0 * config.num_heads * sum(config.of(kind).head_widths[0] for kind in kinds) * pairs
    return products * (2 + again) + index_scores * (4 + again) + target * (2 + again)


def work(blueprint: Blueprint, batch: Batch) -> Flops:
    """The FLOPs of one step over a batch of numpy arrays."""
    kind = kind_of(batch)
    lengths, (rows, padded), teacher_batch = kind.lengths(batch), kind.padded(batch), kind.for_teacher(batch)
    teacher_length, runs_reference = kind.padded(teacher_batch)[1].trunk, _runs_reference(blueprint, lengths)
    computed = executed(blueprint, rows, padded, runs_reference=runs_reference, teacher_length=teacher_length)
    return Flops(model_flops(blueprint, lengths, kind.lengths(teacher_batch)), sum(computed))


def _runs_reference(blueprint: Blueprint, lengths: BatchLengths) -> bool:
    return blueprint.reference.exists and not lengths.has_reference_logps


def _kernels(blueprint: Blueprint | Teacher, layer: int) -> dict[str, int]:
    """Number of weights of each product of a layer, by its name in the layer."""
    prefix, stacked = _block(blueprint.config, layer)
    return {
        path.removeprefix(prefix).removesuffix(".kernel"): _used(blueprint, leaf) // stacked
        for path, leaf in blueprint.base.items()
        if path.startswith(prefix) and path.endswith(".kernel")
    }


def _used(blueprint: Blueprint | Teacher, leaf: ParamSpec) -> int:
    """Number of weights of a leaf in the products of one token."""
    config = blueprint.config
    return (config.feed_forward or config.mlp).active_params(math.prod(leaf.shape), leaf.axes)


def _block(config: DecoderConfig, layer: int) -> tuple[str, int]:
    """The path prefix of a layer's leaves, and the number of layers that each leaf stacks."""
    path, position = config.layers.path(layer)
    if position is None:
        return f"{path}.", 1
    return f"{path}.", config.layers.periods if layer < config.layers.own_layers else config.layers.kv_shared_periods


def _idle(blueprint: Blueprint) -> tuple[int, tuple[int, ...]]:
    """Number of weights below the first adapter, whose inputs need no gradient; and layers with idle attention."""
    idle, layers = 0, []
    for layer in range(blueprint.config.layers.num_layers):
        prefix, kernels = _block(blueprint.config, layer)[0], _kernels(blueprint, layer)
        for names in _ORDER:
            idle += sum(kernels.get(name, 0) for name in names)
            adapted = tuple(f"{prefix}{name}." for name in names)
            if any(path.startswith(adapted) for path in blueprint.trainable):
                return idle, tuple(layers)
            if names == _ORDER[1]:
                layers.append(layer)
    return idle, tuple(layers)
