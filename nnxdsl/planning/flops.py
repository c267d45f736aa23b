"""Floating-point operations of a step: model FLOPs, which its mathematics needs, and those that are executed.

Model FLOPs are those of model FLOPs utilisation (MFU): no padding, each pair of tokens that attend to each other
once, nothing twice. With N weights of the layers' products, V x D of the head, S tokens that go through the layers and
C that need a log-probability, a forward pass takes F = 2 N S + 2 V D C and A for attention (Kaplan et al. 2020,
arXiv:2001.08361, section 2.1). A backward pass takes F once more for the inputs, F once more where the weights are
trained, and A twice, since attention has no weights.
"""

from __future__ import annotations

import functools
import math

import attrs

from nnxdsl.adapters import lora
from nnxdsl.config.objectives.distillation import Distill
from nnxdsl.data.batch import Batch
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.params import ParamSpec, is_mtp_param
from nnxdsl.models.remat import AGAIN
from nnxdsl.program.batches import BatchLengths, Lengths, kind_of
from nnxdsl.program.blueprint import Blueprint, Teacher

_ORDER = (
    (
        *("attention.query", "attention.key", "attention.value", "attention.query_down", "attention.key_value_down"),
        *("attention.inputs", "attention.rates"),
    ),
    ("attention.query_up", "attention.key_value_up"),
    ("attention.output",),
    ("mlp.gate", "mlp.up"),
    ("mlp.down",),
)
"""The products of a layer in the order in which they are computed; those of one line read the same inputs. No layer
has all of them."""


@attrs.frozen
class Flops:
    """FLOPs of one step over all devices.

    Attributes:
        model_flops: What its mathematics needs.
        executed: What is computed: with padding, and all that is computed again.
    """

    model_flops: float
    executed: float


@attrs.frozen
class Weights:
    """How many weights take part in the products of one token: of experts, those that it goes through.

    Attributes:
        trunk: Of the layers, adapters left out.
        head: Of the output head.
        adapter: Of the adapters.
        idle: Of the layers, whose inputs need no gradient, since nothing below them is trained.
        idle_layers: Layers whose attention lies below everything that is trained.
    """

    trunk: int
    head: int
    adapter: int
    idle: int
    idle_layers: tuple[int, ...]


@functools.lru_cache(maxsize=4)  # every step asks
def weights(blueprint: Blueprint) -> Weights:
    """The weights of a program's products."""
    config = blueprint.config
    trunk = _trunk(blueprint)
    adapter = sum(_used(blueprint, leaf) for path, leaf in blueprint.trainable.items() if lora.is_adapter(path))
    idle, idle_layers = (0, ()) if blueprint.experiment.adapter is None else _idle(blueprint)
    return Weights(trunk, config.vocab_size * config.embed_dim, adapter, idle, idle_layers)


def model_flops(blueprint: Blueprint, lengths: BatchLengths) -> float:
    """Model FLOPs of one step; the reference is not run for a batch that has its log-probabilities."""
    of, config = weights(blueprint), blueprint.config
    # What linear layers do with their memories is little beside their products, and left out.
    windows = {"local": config.window, "global": None}
    seen = {kind: lengths.attended_pairs(window) for kind, window in windows.items() if kind in config.layers}
    kinds = config.layers + blueprint.mtp_layer_kinds
    scores = [2.0 * config.num_heads * sum(config.head_widths) * seen.get(kind, 0) for kind in kinds]
    attention = sum(scores)
    # The targets of a layer that predicts further ahead are taken as many: all but the first ones of sequences.
    forward = 2 * of.trunk * lengths.tokens + 2 * of.head * lengths.targets * (1 + len(blueprint.mtp_layer_kinds))
    passes = 3 if blueprint.experiment.adapter is None else 2
    step = passes * forward + 3 * attention + 3 * 2 * of.adapter * lengths.tokens
    step -= 2 * of.idle * lengths.tokens + 2 * sum(scores[layer] for layer in of.idle_layers)
    reference = forward + attention if _runs_reference(blueprint, lengths) else 0
    teacher = blueprint.teacher
    return step + reference + (0 if teacher is None or teacher.is_precomputed else _teacher_flops(teacher, lengths))


def _teacher_flops(teacher: Teacher, lengths: BatchLengths) -> float:
    """FLOPs of a teacher's forward pass."""
    config = teacher.config
    windows = {"local": config.window, "global": None}
    seen = sum(lengths.attended_pairs(windows[kind]) for kind in config.layers if kind in windows)
    attention = 2.0 * config.num_heads * sum(config.head_widths) * seen
    head = config.vocab_size * config.embed_dim
    return 2 * _trunk(teacher) * lengths.tokens + 2 * head * lengths.targets + attention


@functools.lru_cache(maxsize=4)
def _trunk(model: Blueprint | Teacher) -> int:
    """Weights of the layers that take part in the products of one token."""
    layers = (size for layer in range(model.config.num_layers) for size in _kernels(model, layer).values())
    if isinstance(model, Teacher) or not model.mtp_layer_kinds:
        return sum(layers)
    further = (leaf for path, leaf in model.base.items() if is_mtp_param(path) and path.endswith(".kernel"))
    return sum(layers) + sum(_used(model, leaf) for leaf in further)


def executed(blueprint: Blueprint, rows: int, filled: Lengths, *, compared: bool) -> tuple[float, float]:
    """The products of one step as the program computes them.

    Args:
        blueprint: The program.
        rows: Of the batch.
        filled: Tokens of each row, padding among them.
        compared: Whether the step runs the reference.

    Returns:
        Those of the layers, and those of the head.
    """
    of, config = weights(blueprint), blueprint.config
    (again, mixed_again), adapted = AGAIN[blueprint.remat], blueprint.experiment.adapter is not None
    tokens, targets = rows * filled.trunk, rows * filled.head * (1 + len(blueprint.mtp_layer_kinds))
    scores = 2 * config.num_heads * sum(config.head_widths) * filled.trunk * tokens
    scores *= sum(config.mixer(kind).is_attention for kind in config.layers + blueprint.mtp_layer_kinds)
    # Forward; backward to the inputs, and to the weights where they are trained; forward once more; reference.
    twice = blueprint.experiment.compares_parts  # each part forward, before the whole batch's loss is known
    passes = 1 + 1 + (not adapted) + again + compared + twice
    # The reference is the base with its adapters off.
    layers = 2 * of.trunk * tokens * passes + 2 * of.adapter * tokens * (3 + again + twice)
    layers += scores * (3 + mixed_again + compared + twice)
    # A frozen head's gradient comes with its forward pass, see `softmax.said`; a trained one computes its logits once
    # more in the backward pass, but where they are few enough to be kept.
    is_trained = blueprint.head_path in blueprint.trainable
    heads = 4 if is_trained else 2
    if blueprint.teacher is None:
        return layers, 2 * of.head * targets * (heads + compared + twice)
    objective, teacher = blueprint.experiment.objective, blueprint.teacher
    labels = heads if isinstance(objective, Distill) and objective.hard_weight else 1
    if blueprint.teacher.is_precomputed:  # the student's logits, and once more in the backward pass: see `picked.py`
        return layers, 2 * targets * of.head * (labels + 3 + is_trained)
    # The distance computes both heads' logits twice, and once more in the backward pass: see `distill.py`.
    there = teacher.config
    layers += 2 * _trunk(teacher) * tokens
    layers += (
        2
        * there.num_heads
        * sum(there.head_widths)
        * filled.trunk
        * tokens
        * (sum(there.mixer(kind).is_attention for kind in there.layers))
    )
    teacher_head = 3 * there.vocab_size * there.embed_dim
    return layers, 2 * targets * (of.head * (labels + 4 + is_trained) + teacher_head)


def work(blueprint: Blueprint, batch: Batch) -> Flops:
    """The FLOPs of one step over a batch in numpy."""
    kind = kind_of(batch)
    lengths, (rows, filled) = kind.lengths(batch), kind.padded(batch)
    padded = executed(blueprint, rows, filled, compared=_runs_reference(blueprint, lengths))
    return Flops(model_flops(blueprint, lengths), sum(padded))


def _runs_reference(blueprint: Blueprint, lengths: BatchLengths) -> bool:
    return blueprint.reference.exists and not lengths.has_reference_logps


def _kernels(blueprint: Blueprint | Teacher, layer: int) -> dict[str, int]:
    """How many weights each product of a layer has, by its name in the layer."""
    prefix, stacked = _block(blueprint.config, layer)
    return {
        path.removeprefix(prefix).removesuffix(".kernel"): _used(blueprint, leaf) // stacked
        for path, leaf in blueprint.base.items()
        if path.startswith(prefix) and path.endswith(".kernel")
    }


def _used(blueprint: Blueprint | Teacher, leaf: ParamSpec) -> int:
    """How many numbers of a leaf one token meets."""
    size, experts = math.prod(leaf.shape), blueprint.config.moe
    return (
        size
        if experts is None or "experts" not in leaf.axes
        else size * experts.num_experts_per_tok // experts.num_experts
    )


def _block(config: DecoderConfig, layer: int) -> tuple[str, int]:
    """Where a layer's leaves are, and how many layers each of them holds."""
    path, position = config.layer_path(layer)
    return f"{path}.", 1 if position is None else config.periods


def _idle(blueprint: Blueprint) -> tuple[int, tuple[int, ...]]:
    """Weights whose inputs need no gradient, up to the first with an adapter; and layers whose attention is idle."""
    idle, layers = 0, []
    for layer in range(blueprint.config.num_layers):
        prefix, kernels = _block(blueprint.config, layer)[0], _kernels(blueprint, layer)
        for names in _ORDER:
            idle += sum(kernels.get(name, 0) for name in names)
            adapted = tuple(f"{prefix}{name}." for name in names)
            if any(path.startswith(adapted) for path in blueprint.trainable):
                return idle, tuple(layers)
            if names == _ORDER[1]:
                layers.append(layer)
    return idle, tuple(layers)
