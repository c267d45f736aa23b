"""Floating-point operations of a step: the fewest that its mathematics takes, and those that the program does.

The fewest are what model FLOPs utilisation (MFU) is about: real tokens alone, each pair of tokens that see each other
once, nothing twice. With N weights of the layers' products, V x D of the head, S tokens that go through the layers and
C that need a log-probability, a forward pass takes F = 2 N S + 2 V D C and A for attention (Kaplan et al. 2020,
arXiv:2001.08361, section 2.1). A backward pass takes F once more for the inputs, F once more where the weights are
trained, and A twice, since attention has no weights.
"""

from __future__ import annotations

import functools
import math

import attrs
import numpy as np
import numpy.typing as npt

from nnxdsl.adapters import lora
from nnxdsl.config.objectives.distillation import Distill
from nnxdsl.data.batch import Batch, PackedPairs, PackedSequences, PairBatch, RolloutBatch
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.params import ParamSpec, is_mtp_param
from nnxdsl.models.remat import AGAIN
from nnxdsl.program.batch_shapes import Lengths
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
        fewest: What its mathematics takes.
        executed: What is computed: with padding, and all that is computed again.
    """

    fewest: float
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


@attrs.frozen
class Content:
    """What a batch holds, its rows of weight 0 left out.

    Attributes:
        shared: [B] tokens of a row that all its branches see: the prompt of a pair.
        branches: [B] each, tokens of a row's branches, which do not see each other: both completions of a pair.
        targets: Tokens of all rows that need a log-probability.
        is_compared: Whether it bears what the reference says of it.
    """

    shared: npt.NDArray[np.int64]
    branches: tuple[npt.NDArray[np.int64], ...]
    targets: int
    is_compared: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of all rows that go through the layers."""
        return int(sum(np.sum(lengths) for lengths in (self.shared, *self.branches)))

    def seen(self, window: int | None) -> int:
        """Pairs (token, token that it sees) of all rows, in a layer with this window."""
        whole = sum(np.sum(visible(self.shared + branch, window)) for branch in self.branches)
        return int(whole - (len(self.branches) - 1) * np.sum(visible(self.shared, window)))


def content(batch: Batch) -> Content:
    """What a batch in numpy holds."""
    real = np.asarray(batch.weight) > 0

    def lengths(of: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        return of[real].astype(np.int64)

    if isinstance(batch, PairBatch | PackedPairs):
        branches = lengths(batch.chosen_length), lengths(batch.rejected_length)
        targets = int(sum(np.sum(branch) for branch in branches))
        return Content(lengths(batch.prompt_length), branches, targets, batch.reference_chosen is not None)
    if isinstance(batch, PackedSequences):
        segments = batch.segment.reshape(-1, batch.segment.shape[-1])
        counts = np.concatenate([np.bincount(segment)[1:] for segment in segments]).astype(np.int64)
        return Content(np.zeros_like(counts), (counts,), int(np.sum(batch.loss_mask)))
    whole = lengths(batch.length)
    return Content(np.zeros_like(whole), (whole,), int(np.sum(batch.loss_mask[real])))


def fewest(blueprint: Blueprint, held: Content) -> float:
    """The least that one step over a batch takes; a batch that bears what the reference says asks no reference."""
    of, config = weights(blueprint), blueprint.config
    # What linear layers do with their memories is little beside their products, and left out.
    windows = {"local": config.window, "global": None}
    seen = {kind: held.seen(window) for kind, window in windows.items() if kind in config.layers}
    kinds = config.layers + blueprint.mtp_layer_kinds
    scores = [2.0 * config.num_heads * sum(config.head_widths) * seen.get(kind, 0) for kind in kinds]
    attention = sum(scores)
    # The targets of a layer that predicts further ahead are taken as many: all but the first ones of sequences.
    forward = 2 * of.trunk * held.tokens + 2 * of.head * held.targets * (1 + len(blueprint.mtp_layer_kinds))
    passes = 3 if blueprint.experiment.adapter is None else 2
    step = passes * forward + 3 * attention + 3 * 2 * of.adapter * held.tokens
    step -= 2 * of.idle * held.tokens + 2 * sum(scores[layer] for layer in of.idle_layers)
    asked = forward + attention if _is_asked(blueprint, held) else 0
    teacher = blueprint.teacher
    return step + asked + (0 if teacher is None or teacher.is_precomputed else _taught(teacher, held))


def _taught(teacher: Teacher, held: Content) -> float:
    """What a teacher's forward pass takes."""
    config = teacher.config
    windows = {"local": config.window, "global": None}
    seen = sum(held.seen(windows[kind]) for kind in config.layers if kind in windows)
    attention = 2.0 * config.num_heads * sum(config.head_widths) * seen
    head = config.vocab_size * config.embed_dim
    return 2 * _trunk(teacher) * held.tokens + 2 * head * held.targets + attention


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
        compared: Whether the step asks the reference.

    Returns:
        Those of the layers, and those of the head.
    """
    of, config = weights(blueprint), blueprint.config
    (again, mixed_again), adapted = AGAIN[blueprint.remat], blueprint.experiment.adapter is not None
    tokens, targets = rows * filled.trunk, rows * filled.head * (1 + len(blueprint.mtp_layer_kinds))
    scores = 2 * config.num_heads * sum(config.head_widths) * filled.trunk * tokens
    scores *= sum(kind != "linear" for kind in config.layers + blueprint.mtp_layer_kinds)
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
    asked, teacher = blueprint.experiment.objective, blueprint.teacher
    labels = heads if isinstance(asked, Distill) and asked.hard_weight else 1
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
        * (sum(kind != "linear" for kind in there.layers))
    )
    taught = 3 * there.vocab_size * there.embed_dim
    return layers, 2 * targets * (of.head * (labels + 4 + is_trained) + taught)


def work(blueprint: Blueprint, batch: Batch) -> Flops:
    """The FLOPs of one step over a batch in numpy."""
    held, rows = content(batch), len(batch.weight)
    if isinstance(batch, PackedPairs | PackedSequences):
        rows, per_block = math.prod(batch.tokens.shape[:2]), batch.tokens.shape[1]
        filled = Lengths(batch.tokens.shape[2], batch.target.shape[1] // per_block)
    elif isinstance(batch, PairBatch):
        response = batch.chosen.shape[1]
        filled = Lengths(batch.prompt.shape[1] + 2 * response, 2 * response)
    elif isinstance(batch, RolloutBatch):
        filled = Lengths(batch.tokens.shape[1], batch.answer.shape[1])
    else:
        filled = Lengths(batch.tokens.shape[1], batch.tokens.shape[1] - 1)
    padded = executed(blueprint, rows, filled, compared=_is_asked(blueprint, held))
    return Flops(fewest(blueprint, held), sum(padded))


def visible(tokens: npt.NDArray[np.int64], window: int | None) -> npt.NDArray[np.int64]:
    """Pairs (token, token that it sees) of sequences of so many tokens: itself and those before it, in the window."""
    inside = tokens if window is None else np.minimum(tokens, window)
    return inside * (inside + 1) // 2 + (tokens - inside) * inside


def _is_asked(blueprint: Blueprint, held: Content) -> bool:
    return blueprint.reference.exists and not held.is_compared


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
