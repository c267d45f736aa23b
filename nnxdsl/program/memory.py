"""What a step takes on each device, part by part: arrays exactly, activations by tracing one device's share of it.

What autodiff keeps for the backward pass is not guessed: the forward pass of one device's share (its rows, its heads,
its part of the MLP) is traced without arrays, and what its derivative holds on to is added up. What is live beside that
for a moment (logits, gathered weights, one period's backward pass) is computed from shapes; `docs/guides/plan.md`
compares the sum with XLA's own figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from nnxdsl.config.adapter import Adapter
from nnxdsl.config.data import Data
from nnxdsl.config.objectives.distillation import Distill
from nnxdsl.config.objectives.grpo import GRPO
from nnxdsl.losses.lm_head.token_stats import ShardContext, tiles
from nnxdsl.models.attention import row_layout as rows
from nnxdsl.models.attention.kv_cache import init_cache, mtp_cache
from nnxdsl.models.attention.row_layout import Kernel
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.params import AbstractModel, ParamSpec
from nnxdsl.models.remat import Remat
from nnxdsl.program.attention_kernel import Kernels
from nnxdsl.program.batches import Lengths
from nnxdsl.program.batches.abstract import abstract_batch, lengths
from nnxdsl.program.blueprint import Blueprint, template
from nnxdsl.program.forward import Forward, ForwardOptions, parts_in_stages
from nnxdsl.sharding.layout import bits
from nnxdsl.sharding.rules import pieces


@attrs.frozen
class Part:
    """Bytes on one device for one purpose.

    Attributes:
        name: The purpose.
        bytes: On one device, or in the host's memory for one device.
        tag: "exact" or "estimated".
        how: How it was computed, as text.
        memory: "device" or "host".
    """

    name: str
    bytes: int
    tag: str
    how: str
    memory: str = "device"


@attrs.frozen
class GroupBytes:
    """What the backward pass of one micro-batch needs on one device.

    Attributes:
        trunk: Bytes that are saved for the backward pass, over all layers.
        period: Bytes that the backward pass of one period needs at one time beside these.
        away: Bytes that are offloaded to host memory.
    """

    trunk: int
    period: int
    away: int


BACKWARD_SHARE = {"adapters": 1.35, "weights": 1.1}
"""Peak bytes of a layer group's backward pass over the bytes of its activations, by what is trained: activations and
their gradients are live together. Measured on XLA for GPUs by `benchmarks/plan_memory.py`; where weights are trained,
more activations are freed before the peak."""


def memory(blueprint: Blueprint, longest: Lengths, trace: Trace | None = None) -> list[Part]:
    """Per-device memory, part by part.

    Args:
        blueprint: The program without devices.
        longest: The longest rows of its data.
        trace: What finds out what a derivative holds on to; None for `held`.
    """
    layout = blueprint.layout
    array_bytes = {
        part: layout.device_bytes("host" if part in layout.offload else "device").get(part, 0) for part in _ARRAYS
    }
    parts = [
        Part(name, array_bytes[part], "exact", how, "host" if part in layout.offload else "device")
        for part, (name, how) in _ARRAYS.items()
    ]
    gradients, copies = gradient_bytes(blueprint)
    if (copied := _turned_over(blueprint)) and "frozen" not in layout.offload:
        parts.append(Part("frozen weights, again", copied, "estimated", "the layers' in the order that gathers them"))
    parts.append(Part("gradients", gradients, "estimated", "float32, added up over micro-batches"))
    rows = rows_of(blueprint)
    if longest.trunk:
        found = activations(blueprint, rows, blueprint.remat, trace)
        moment, how = _moment(blueprint, rows, longest, found)
        traced = f"{_RESIDUALS[blueprint.remat]} for the backward pass, traced"
        parts.append(Part("activations", found.trunk, "estimated", traced))
        parts.append(Part("activations, offloaded", found.away, "estimated", traced, "host"))
        parts.append(Part("workspace", copies + moment, "estimated", how))
        parts += _answers(blueprint, longest, parts)
        parts += _teacher_parts(blueprint, longest, parts)
    return [part for part in parts if part.bytes]


def _answers(blueprint: Blueprint, longest: Lengths, parts: list[Part]) -> list[Part]:
    """What it takes to draw a policy's answers, beyond what the step that learns from them takes afterwards."""
    if not isinstance(blueprint.experiment.objective, GRPO):
        return []
    usage = rollout_memory(blueprint, longest)
    gone = sum(p.bytes for p in parts if p.name in ("gradients", "activations", "workspace"))
    how = (
        f"what the cache of {usage.rows} answers, {usage.cache / 2**20:,.1f} MiB for {usage.tokens} tokens each, takes "
        "beyond gradients, activations and workspace, which are not there yet"
    )
    return [Part("answers", max(usage.cache + usage.copies - gone, 0), "estimated", how)]


def _teacher_parts(blueprint: Blueprint, longest: Lengths, parts: list[Part]) -> list[Part]:
    """The bytes of a precomputed teacher in a batch, and what precomputation takes beyond the step, if it does."""
    size = top_bytes(blueprint)
    if not size:
        return []
    rows = blueprint.experiment.batch_size
    here = -(-rows // blueprint.layout.batch_shards(blueprint.experiment.rows_at_once)) * longest.trunk * size
    teacher_bytes = blueprint.teacher_layout.device_bytes().get("teacher", 0)
    before = teacher_bytes - here - sum(part.bytes for part in parts if part.memory == "device")
    how = f"its weights, {teacher_bytes / 2**20:,.1f} MiB, before the first step: what they take beyond a step"
    return [
        Part("teacher's words", here, "estimated", f"{size:,} bytes for each token of the batch"),
        Part("teacher", max(before, 0), "estimated", how),
    ]


def top_bytes(blueprint: Blueprint) -> int:
    """Bytes of each target's precomputed top k; 0 without a precomputed teacher.

    An id and a log-probability for each of its top-k tokens, and the log-probability of all others.
    """
    objective = blueprint.experiment.objective
    return 8 * objective.top_k + 4 if isinstance(objective, Distill) and objective.top_k is not None else 0


_RESIDUALS: dict[Remat, str] = {
    "none": "what each layer keeps",
    "products": "outputs of linear layers",
    "attention": "inputs of layers and what attention mixed",
    "inputs": "inputs of layers",
    "offload": "inputs of layers",
    "full": "inputs of each period",
}

_ARRAYS = {
    "frozen": ("frozen weights", "every array of the layout"),
    "trainable": ("trainable weights", "float32"),
    "reference": ("reference copy", "none where an adapter shares its base"),
    "teacher": ("teacher", "every array of its network"),
    "optimizer": ("optimizer", "every array of its state"),
}


def rows_of(blueprint: Blueprint) -> int:
    """Rows of a micro-batch on one device."""
    rows = blueprint.experiment.rows_at_once
    return math.ceil(rows / blueprint.layout.batch_shards(rows))


def gradient_bytes(blueprint: Blueprint) -> tuple[int, int]:
    """Bytes of the gradients in float32, and of the copies of trainable weights in the dtype that is computed in."""
    # Workers that train apart have gradients of their own.
    trainable = blueprint.layout.workers_per_device * blueprint.layout.device_bytes().get("trainable", 0)
    # With a reference: the cast weights, the reference's in their place, and the one of both whose turn it is.
    copies = 3 if blueprint.reference.is_online else 1
    return trainable, copies * trainable * blueprint.compute.itemsize // 4


def _turned_over(blueprint: Blueprint) -> int:
    """Bytes of the stacked frozen weights that XLA keeps a second time, in the order in which it gathers them."""
    if blueprint.layout.gathered_from == 1:
        return 0
    frozen = blueprint.layout.arrays.get("frozen", {})
    return sum(placed.device_bytes for placed in frozen.values() if "layers" in placed.axes)


def activations(blueprint: Blueprint, rows: int, remat: Remat, trace: Trace | None = None) -> GroupBytes:
    """What the backward pass of one micro-batch needs on one device, traced on one device's share of the model.

    Args:
        blueprint: The program without devices.
        rows: Of one device.
        remat: The rematerialization policy.
        trace: See `memory`.
    """
    trace = trace or residual_bytes
    context, share = blueprint.experiment.mesh.context, share_of(blueprint)
    trunk, everything = (trace(share, rows, policy) // context for policy in (remat, "none"))
    away = trace(share, rows, "inputs") // context - trunk if remat == "offload" else 0
    layers, pattern = blueprint.config.num_layers + len(blueprint.mtp_layer_kinds), blueprint.config.period
    period = everything * (pattern if remat in ("none", "full") else 1) // layers
    # A stage keeps what its own layers keep, at every tick, of one part of the rows.
    stages = blueprint.layout.stages
    parts = parts_in_stages(stages, rows)
    trunk, away = (size * (parts + stages - 1) // (parts * stages) for size in (trunk, away))
    return GroupBytes(trunk, period // parts if stages > 1 else period, max(away, 0))


@attrs.frozen
class Share:
    """What one device computes of a forward pass: equal for all meshes that cut the network alike.

    Attributes:
        config: The network of which it computes all heads, MLP columns and words.
        compute: Dtype of activations and products.
        frozen_dtype: Dtype of frozen weights. Quantized ones are dequantized again for the backward pass.
        adapter: What is trained beside them, or None.
        trainable: Paths of what is trained.
        data: What its rows are of.
        attention: What computes attention over the longest rows.
        further: Whether tokens further ahead are predicted.
        indexed: Whether a loss reads statistics of indexers.
    """

    config: DecoderConfig
    compute: jnp.dtype
    frozen_dtype: jnp.dtype
    adapter: Adapter | None
    trainable: frozenset[str]
    data: Data
    attention: Kernel
    further: bool
    indexed: bool


Trace = Callable[[Share, int, Remat], int]
"""Bytes that the derivative of a share holds on to: of so many rows, with this rematerialisation."""


def share_of(blueprint: Blueprint) -> Share:
    """One device's share of a program."""
    config, layout, experiment = blueprint.config, blueprint.layout, blueprint.experiment

    def cut(axis: str, size: int) -> int:
        (target,) = layout.resolve((axis,), (size,)).spec
        return size // pieces(target, layout.mesh.sizes)

    heads = cut("activation_heads", config.num_heads)
    linear, globals_ = config.linear_attention, config.global_heads
    own = attrs.evolve(
        config,
        linear_attention=None if linear is None else linear.divided(config.num_heads // heads),
        num_heads=heads,
        num_kv_heads=math.gcd(heads, cut("activation_kv_heads", config.num_kv_heads)),
        global_heads=globals_
        and attrs.evolve(globals_, num_kv_heads=math.gcd(heads, cut("activation_kv_heads", globals_.num_kv_heads))),
        mlp_dim=cut("activation_mlp", config.mlp_dim),
        kv_sharing=config.kv_sharing
        and attrs.evolve(config.kv_sharing, mlp_dim=cut("activation_mlp", config.kv_sharing.mlp_dim)),
        feed_forward=config.feed_forward.divided(cut),
        vocab_size=cut("activation_vocab", config.vocab_size),
    )
    longest = lengths(experiment.data).trunk
    kernel = blueprint.kernels.choose(rows.sequence(longest)).kernel if longest else "dense"
    if kernel in ("cudnn", "splash"):  # which cannot be traced everywhere, and keep much the same
        kernel = "chunked"
    trained = frozenset(blueprint.trainable)
    return Share(
        own,
        blueprint.compute,
        blueprint.frozen_dtype,
        experiment.adapter,
        trained,
        experiment.data,
        kernel,
        bool(blueprint.mtp_layer_kinds),
        experiment.indexer_loss_coef > 0,
    )


@lru_cache(maxsize=8)
def _network(config: DecoderConfig, frozen_dtype: jnp.dtype, adapter: Adapter | None) -> AbstractModel:
    return template(config, frozen_dtype, adapter)


@lru_cache(maxsize=256)
def residual_bytes(share: Share, rows: int, remat: Remat) -> int:
    """Bytes that the derivative of a forward pass holds on to, beside the weights, the batch and all logits."""
    model = _network(share.config, share.frozen_dtype, share.adapter)
    # With one token at a time, so that no logits are saved.
    kernels = Kernels(share.attention)
    options = ForwardOptions(uses_mtp=share.further, uses_indexer_stats=share.indexed)
    forward = Forward(share.compute, remat, logprob_tokens=1, kernels=kernels, options=options)
    batch = abstract_batch(share.data, rows)
    trained = {path for path in model.variables if path in share.trainable}
    leaves = {
        path: jax.ShapeDtypeStruct(leaf.shape, share.compute if path in trained else leaf.dtype)
        for path, leaf in model.variables.items()
    }
    found: list[int] = []

    def trace(leaves: dict[str, Any], batch: Any) -> None:
        frozen = {path: leaf for path, leaf in leaves.items() if path not in trained}

        def read(trainable: dict[str, Any]) -> Any:
            decoder = forward.model(model, {**frozen, **trainable})
            return forward.read(decoder, batch)

        _, back = jax.vjp(read, {path: leaves[path] for path in trained})
        given = {id(leaf) for leaf in jax.tree.leaves((leaves, batch))}
        held = {id(leaf): leaf for leaf in jax.tree.leaves(back) if id(leaf) not in given and not _is_away(leaf)}
        found.append(sum(math.prod(leaf.shape) * bits(leaf.dtype.name) // 8 for leaf in held.values()))

    jax.eval_shape(trace, leaves, batch)
    return found[0]


def _is_away(leaf: Any) -> bool:
    """Whether an array that is traced lies in the host's memory."""
    return jax.typeof(leaf).memory_space == jax.memory.Space.Host


def _moment(blueprint: Blueprint, rows: int, longest: Lengths, residuals: GroupBytes) -> tuple[int, str]:
    """The larger of two moments: the head with its logits, or the backward pass of one period."""
    config = blueprint.config
    wide, size = 4, blueprint.compute.itemsize
    spread = blueprint.layout.gathered_from
    words = share_of(blueprint).config.vocab_size
    table = words * config.embed_dim
    trained = blueprint.head_path in blueprint.trainable
    # The tables of input and output, gathered. Frozen, they are gathered before all loops and stay.
    tables = (1 if trained or config.tied_head else 2) * table * size if spread > 1 else 0
    logits, how = _logits(blueprint, longest, words, trained=trained)
    # The head's gradient, whole until it is added up over devices; on one device, in float32 with the embedding's.
    gradient = table * (wide if spread == 1 else size) + 2 * table * size // spread
    workers = blueprint.layout.workers_per_device  # each with trained weights of its own
    head = logits + (workers * (tables + gradient) if trained else 0)
    share = BACKWARD_SHARE["weights" if blueprint.experiment.adapter is None else "adapters"]
    layers = int(residuals.period * share)
    layers += _period_weights(blueprint) * (2 * workers if trained else 1) if spread > 1 else 0
    layers += 2 * gradient_bytes(blueprint)[0] * size // 4  # the gradients, and the zeros beside
    stays = 0 if trained else tables
    if head >= layers:
        return stays + head, f"{how}, and the head's weights"
    return stays + layers, "the backward pass of one period of layers, and its weights gathered"


def _logits(blueprint: Blueprint, longest: Lengths, words: int, *, trained: bool) -> tuple[int, str]:
    """Bytes of the logits that exist at one time on one device, for its part of the vocabulary, and a description."""
    layout, limit = blueprint.layout, blueprint.experiment.memory.logprob_tokens
    rows = blueprint.experiment.rows_at_once
    length = longest.head + -longest.head % layout.length_shards
    devices = math.prod(layout.shard_counts(("head_batch", "length"), (rows, length)))
    tokens = rows * length // devices
    share = None if limit is None else limit // devices
    chunks, tile, keep = tiles(tokens, words, blueprint.config.embed_dim, share, ShardContext(blueprint.platform).sizes)
    chunk = -(-tokens // chunks)
    # In float32, and once more in the dtype that is multiplied, as weights of the head's rows or as gradients.
    # A teacher's logits and the distances, besides the student's own logits; with top-k tokens, only the latter.
    teacher = blueprint.teacher
    wide = 4 if teacher is None else 8 if teacher.is_precomputed else 12
    moment = (wide + blueprint.compute.itemsize) * chunk * tile
    if trained and keep:
        tokens *= 1 + len(blueprint.mtp_layer_kinds)  # each token's, and those of the one after it
        return moment + 4 * tokens * words, f"logits of {tokens} tokens x {words} words in float32"
    return moment, f"a tile of {chunk} tokens x {tile} words of logits, in float32 and as it is multiplied"


def _period_weights(blueprint: Blueprint) -> int:
    """Bytes of one period's weights, cut over `tensor` alone, in the dtype that is computed in."""
    config = blueprint.config

    def of(stack: str, periods: int) -> int:
        leaves: Mapping[str, ParamSpec] = {p: leaf for p, leaf in blueprint.base.items() if p.startswith(stack)}
        return sum(math.prod(leaf.shape) for leaf in leaves.values()) // max(periods, 1)

    count = max(of("layers.", config.periods), of("kv_sharing.", config.sharing_periods))
    return count * blueprint.compute.itemsize // blueprint.layout.mesh.tensor


@attrs.frozen
class RolloutMemory:
    """What is on one device while answers are drawn.

    Attributes:
        rows: Answers.
        tokens: Of the longest prompt with the longest answer.
        cache: Bytes of the keys and values of all of them.
        copies: Bytes of trained weights in the dtype that is computed in, where that is not float32.
    """

    rows: int
    tokens: int
    cache: int
    copies: int


def rollout_memory(blueprint: Blueprint, longest: Lengths) -> RolloutMemory:
    """What the answers of one step take on one device; heads are taken to be whole on each."""
    size, compute = blueprint.experiment.batch_size, blueprint.compute
    rows = math.ceil(size / blueprint.layout.batch_shards(size))
    config, drafts = blueprint.config, blueprint.experiment.objective.num_speculative_tokens

    def caches() -> Any:
        if not drafts:
            return init_cache(config, rows, longest.trunk, compute)
        slots = longest.trunk + drafts
        return init_cache(config, rows, slots, compute, drafts), mtp_cache(config, rows, slots, compute)

    held = jax.tree.leaves(jax.eval_shape(caches))
    cache = sum(math.prod(leaf.shape) * bits(leaf.dtype.name) // 8 for leaf in held)
    trainable = blueprint.layout.device_bytes().get("trainable", 0)
    return RolloutMemory(rows, longest.trunk, cache, 0 if compute.itemsize == 4 else trainable * compute.itemsize // 4)
