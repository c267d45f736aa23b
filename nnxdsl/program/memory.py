"""Estimated memory of a step per device, part by part: arrays exactly, activations by tracing one device's share.

Residuals of the backward pass are traced without arrays, from the forward pass of one device's share (its rows, heads
and MLP columns). Temporary arrays (logits, gathered weights, one period's backward pass) are computed from shapes.
`docs/guides/plan.md` compares the sum with XLA's own figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.config.adapter import Adapter
from nnxdsl.config.data import Data
from nnxdsl.config.objectives import reward_library
from nnxdsl.config.objectives.online import Online
from nnxdsl.errors import NnxdslError, PlanError, Problem
from nnxdsl.losses.lm_head.token_stats import ShardContext, tiles
from nnxdsl.models.attention import row_layout as rows
from nnxdsl.models.attention.kernels import find_kernel
from nnxdsl.models.attention.kv_cache import empty_prefixes, init_cache, mtp_cache
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.params import AbstractModel, ParamSpec, is_stacked
from nnxdsl.models.remat import Remat
from nnxdsl.models.slots import (
    group_size,
    most_prefixes,
    most_prompts,
    most_slots,
    padded,
    padded_turn,
    power_of_two,
)
from nnxdsl.program.architecture import reward_network
from nnxdsl.program.attention_kernel import Kernels
from nnxdsl.program.batches import Lengths
from nnxdsl.program.batches.abstract import abstract_batch, lengths
from nnxdsl.program.blueprint import Blueprint
from nnxdsl.program.forward import Forward, ForwardOptions, parts_in_stages
from nnxdsl.program.heads import Head, LogProbs
from nnxdsl.sharding.layout import bits
from nnxdsl.sharding.rules import pieces


@attrs.frozen
class Part:
    """Bytes on one device for one purpose.

    Attributes:
        name: The purpose.
        bytes: On one device, or in the host's memory for one device.
        tag: "exact" or "estimated".
        formula: An explanation of the figure.
        memory: "device" or "host".
    """

    name: str
    bytes: int
    tag: str
    formula: str
    memory: str = "device"


@attrs.frozen
class GroupBytes:
    """Memory of one micro-batch's backward pass on one device.

    Attributes:
        trunk: Bytes of residuals of all layers.
        period: Further bytes that the backward pass of one period needs.
        offloaded: Bytes of residuals in host memory.
    """

    trunk: int
    period: int
    offloaded: int


BACKWARD_SHARE = {"adapters": 1.35, "weights": 1.1}
"""Peak bytes of a layer group's backward pass over the bytes of its activations, by what is trained: activations and
their gradients are live together. Measured on XLA for GPUs by `benchmarks/plan_memory.py`; where weights are trained,
more activations are freed before the peak."""


def memory(blueprint: Blueprint, trace: Trace | None = None) -> list[Part]:
    """Memory of a step of the longest rows per device, part by part.

    Args:
        blueprint: The program without devices.
        trace: Counts the bytes of residuals; None for `residual_bytes`.
    """
    layout = blueprint.layout
    array_bytes = {
        part: layout.device_bytes("host" if part in layout.offload else "device").get(part, 0) for part in _ARRAYS
    }
    parts = [
        Part(name, array_bytes[part], "exact", description, "host" if part in layout.offload else "device")
        for part, (name, description) in _ARRAYS.items()
    ]
    gradients, copies = gradient_bytes(blueprint)
    if (copied := _transposed_bytes(blueprint)) and "frozen" not in layout.offload:
        parts.append(
            Part("frozen weights, transposed", copied, "estimated", "copies of stacked layers, for all-gathers")
        )
    parts.append(Part("gradients", gradients, "estimated", "float32, accumulated over micro-batches"))
    rows = rows_of(blueprint)
    if blueprint.longest.trunk:
        residuals = activations(blueprint, rows, blueprint.remat, trace)
        peak, explanation = _temporary_peak(blueprint, residuals)
        traced = f"{_RESIDUALS[blueprint.remat]} for the backward pass, traced"
        parts.append(Part("activations", residuals.trunk, "estimated", traced))
        parts.append(Part("activations, offloaded", residuals.offloaded, "estimated", traced, "host"))
        parts.append(Part("workspace", copies + peak, "estimated", explanation))
        parts += _generation(blueprint, parts)
        parts += _reward_models(blueprint, parts)
        parts += _teacher_parts(blueprint, parts)
    return [part for part in parts if part.bytes]


def _generation(blueprint: Blueprint, parts: list[Part]) -> list[Part]:
    """Memory of generating completions beyond that of the step that follows."""
    objective = blueprint.experiment.objective
    if not isinstance(objective, Online) or objective.engine is not None:
        return []
    usage = rollout_memory(blueprint, lengths(blueprint.experiment.data))
    freed, dtype = _bytes_between_steps(parts), objective.kv_cache_dtype or blueprint.compute.name
    explanation = (
        f"KV cache ({dtype}) of {usage.rows} completions of {usage.tokens} tokens, {usage.cache / 2**20:,.1f} MiB, "
        f"workspace {usage.workspace / 2**20:,.1f} MiB and copies of weights {usage.copies / 2**20:,.1f} MiB, "
        "beyond memory that is free between steps (gradients, activations, workspace)"
    )
    return [Part("generation", max(usage.total - freed, 0), "estimated", explanation)]


def _bytes_between_steps(parts: list[Part]) -> int:
    """Bytes that a step needs and that are free while completions are sampled and rewarded."""
    return sum(part.bytes for part in parts if part.name in ("gradients", "activations", "workspace", "generation"))


def _reward_models(blueprint: Blueprint, parts: list[Part]) -> list[Part]:
    """Weights of reward models, and what they compute with beyond memory that is free between steps.

    They are on the first device of the first process, which has more to hold than the others.
    """
    usages, _ = reward_memory(blueprint)
    weights, most = sum(usage.weights for usage in usages), max((usage.workspace for usage in usages), default=0)
    explanation = f"a batch of completions, {most / 2**20:,.1f} MiB, beyond memory that is free between steps"
    return [
        Part("reward models", weights, "exact", "every array of their networks, on the first device"),
        Part("rewards", max(most - _bytes_between_steps(parts), 0), "estimated", explanation),
    ]


def _teacher_parts(blueprint: Blueprint, parts: list[Part]) -> list[Part]:
    """The bytes of a teacher's top-k in a batch, and the peak of precomputation, if any, beyond that of a step."""
    size = top_bytes(blueprint)
    if not size:
        return []
    rows = blueprint.experiment.batch_size // blueprint.num_generations
    device_rows = -(-rows // blueprint.layout.batch_shards(blueprint.experiment.rows_at_once))
    top_k = device_rows * (blueprint.longest.head if blueprint.teacher is None else blueprint.longest.trunk) * size
    teacher_bytes = blueprint.teacher_layout.device_bytes().get("teacher", 0)
    excess = teacher_bytes - top_k - sum(part.bytes for part in parts if part.memory == "device")
    explanation = f"peak during precomputation beyond that of a step, from weights of {teacher_bytes / 2**20:,.1f} MiB"
    return [
        Part("teacher top-k", top_k, "estimated", f"{size:,} bytes for each token of the batch"),
        Part("teacher", max(excess, 0), "estimated", explanation),
    ]


def top_bytes(blueprint: Blueprint) -> int:
    """Bytes of each target's top-k in a batch; 0 without one.

    A token id and a log-probability for each of its top-k tokens, and the log-probability of all others.
    """
    top_k = blueprint.experiment.objective.teacher_top_k
    return 0 if top_k is None else 8 * top_k + 4


_RESIDUALS: dict[Remat, str] = {
    "none": "residuals of each layer",
    "products": "outputs of linear layers",
    "attention": "inputs of layers and outputs of attention",
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
    rows = blueprint.rows_at_once
    return math.ceil(rows / blueprint.layout.batch_shards(rows))


def gradient_bytes(blueprint: Blueprint) -> tuple[int, int]:
    """Bytes of the float32 gradients, and of the copies of trainable weights in the compute dtype."""
    # Each of DiLoCo's workers has gradients.
    trainable = blueprint.layout.workers_per_device * blueprint.layout.device_bytes().get("trainable", 0)
    # With an online reference: the policy's weights, the reference's, and the selected ones of the current turn.
    copies = 3 if blueprint.reference.is_online else 1
    return trainable, copies * trainable * blueprint.compute.itemsize // 4


def _transposed_bytes(blueprint: Blueprint) -> int:
    """Bytes of XLA's second copy of stacked frozen weights, in the memory order of its all-gathers."""
    if blueprint.layout.gathered_from == 1:
        return 0
    frozen = blueprint.layout.arrays.get("frozen", {})
    return sum(placed.device_bytes for placed in frozen.values() if "layers" in placed.axes)


def activations(blueprint: Blueprint, rows: int, remat: Remat, trace: Trace | None = None) -> GroupBytes:
    """Memory of one micro-batch's backward pass on one device, traced on one device's share of the model.

    Args:
        blueprint: The program without devices.
        rows: Of one device.
        remat: The rematerialization policy.
        trace: See `memory`.
    """
    trace = trace or residual_bytes
    context, share = blueprint.experiment.mesh.context, share_of(blueprint)
    trunk, everything = (trace(share, rows, policy) // context for policy in (remat, "none"))
    offloaded = trace(share, rows, "inputs") // context - trunk if remat == "offload" else 0
    pattern = blueprint.config.layers
    layers = pattern.num_layers + len(blueprint.mtp_layer_kinds)
    period = everything * (pattern.period if remat in ("none", "full") else 1) // layers
    # At every tick a stage saves the residuals of its own layers, for one part of the rows.
    stages = blueprint.layout.stages
    parts = parts_in_stages(stages, rows)
    trunk, offloaded = (size * (parts + stages - 1) // (parts * stages) for size in (trunk, offloaded))
    return GroupBytes(trunk, period // parts if stages > 1 else period, max(offloaded, 0))


@attrs.frozen
class Share:
    """One device's share of a forward pass; equal for all meshes that shard the model alike.

    Attributes:
        config: The model with one device's heads, MLP columns and vocabulary.
        compute: Dtype of activations and products.
        frozen_dtype: Dtype of frozen weights; quantized ones are dequantized again for the backward pass.
        adapter: The adapter, or None.
        trainable: Paths of trained arrays.
        data: The data of its rows.
        num_generations: Completions of a row.
        attention: Name of the attention kernel of the longest rows, or of the one that is traced in its place.
        head: What the final hidden states are read for.
        uses_mtp: Whether a loss uses multi-token prediction (MTP).
        uses_indexer_stats: Whether a loss uses statistics of indexers.
    """

    config: DecoderConfig
    compute: jnp.dtype
    frozen_dtype: jnp.dtype
    adapter: Adapter | None
    trainable: frozenset[str]
    data: Data
    num_generations: int
    attention: str
    head: Head
    uses_mtp: bool
    uses_indexer_stats: bool


Trace = Callable[[Share, int, Remat], int]
"""Bytes of a share's residuals, given its number of rows and the rematerialization policy."""


def share_of(blueprint: Blueprint) -> Share:
    """One device's share of a program."""
    config, layout, experiment = blueprint.config, blueprint.layout, blueprint.experiment

    def shard_size(axis: str, size: int) -> int:
        (target,) = layout.resolve((axis,), (size,)).spec
        return size // pieces(target, layout.mesh.sizes)

    heads = shard_size("activation_heads", config.num_heads)
    linear, globals_ = config.linear_attention, config.global_heads
    device_config = attrs.evolve(
        config,
        linear_attention=None if linear is None else linear.divided(config.num_heads // heads),
        num_heads=heads,
        num_kv_heads=math.gcd(heads, shard_size("activation_kv_heads", config.num_kv_heads)),
        global_heads=globals_
        and attrs.evolve(
            globals_, num_kv_heads=math.gcd(heads, shard_size("activation_kv_heads", globals_.num_kv_heads))
        ),
        mlp=config.mlp.divided(shard_size),
        feed_forward=config.feed_forward and config.feed_forward.divided(shard_size),
        vocab_size=shard_size("activation_vocab", config.vocab_size),
    )
    longest = blueprint.longest.trunk
    kernel = blueprint.kernels.choose(rows.sequence(longest)).kernel if longest else "dense"
    trained = frozenset(blueprint.trainable)
    return Share(
        device_config,
        blueprint.compute,
        blueprint.frozen_dtype,
        experiment.adapter,
        trained,
        experiment.data,
        blueprint.num_generations,
        find_kernel(kernel).traced_as or kernel,
        # Residuals of heads over the vocabulary are logits, which are counted apart.
        LogProbs() if config.head.num_labels is None else blueprint.head,
        bool(blueprint.mtp_layer_kinds),
        experiment.indexer_loss_coef > 0,
    )


@lru_cache(maxsize=8)
def _network(config: DecoderConfig, frozen_dtype: jnp.dtype, adapter: Adapter | None) -> AbstractModel:
    return abstract_decoder(config, frozen_dtype, adapter)


@lru_cache(maxsize=256)
def residual_bytes(share: Share, rows: int, remat: Remat) -> int:
    """Bytes of a forward pass's residuals, without weights, batch and logits."""
    model = _network(share.config, share.frozen_dtype, share.adapter)
    # With one token at a time, so that no logits are saved.
    kernels = Kernels(share.config, share.attention)
    options = ForwardOptions(uses_mtp=share.uses_mtp, uses_indexer_stats=share.uses_indexer_stats)
    forward = Forward(share.compute, remat, logprob_tokens=1, kernels=kernels, options=options, head=share.head)
    batch = abstract_batch(share.data, rows, num_generations=share.num_generations)
    trained = {path for path in model.variables if path in share.trainable}
    leaves = {
        path: jax.ShapeDtypeStruct(leaf.shape, share.compute if path in trained else leaf.dtype)
        for path, leaf in model.variables.items()
    }
    sizes: list[int] = []

    def trace(leaves: dict[str, Any], batch: Any) -> None:
        frozen = {path: leaf for path, leaf in leaves.items() if path not in trained}

        def read(trainable: dict[str, Any]) -> Any:
            decoder = forward.model(model, {**frozen, **trainable})
            return forward.read(decoder, batch)

        _, backward = jax.vjp(read, {path: leaves[path] for path in trained})
        inputs = {id(leaf) for leaf in jax.tree.leaves((leaves, batch))}
        residuals = {id(x): x for x in jax.tree.leaves(backward) if id(x) not in inputs and not _is_on_host(x)}
        sizes.append(sum(math.prod(x.shape) * bits(x.dtype.name) // 8 for x in residuals.values()))

    jax.eval_shape(trace, leaves, batch)
    return sizes[0]


def _is_on_host(leaf: Any) -> bool:
    """Whether a traced array is in host memory."""
    return jax.typeof(leaf).memory_space == jax.memory.Space.Host


def _temporary_peak(blueprint: Blueprint, residuals: GroupBytes) -> tuple[int, str]:
    """Bytes of temporary arrays, with an explanation: of the head and its logits, or of one period's backward pass."""
    config, size = blueprint.config, blueprint.compute.itemsize
    shards = blueprint.layout.gathered_from
    local = share_of(blueprint).config
    table = local.vocab_size * config.embed_dim
    trained = ("embed.embedding" if config.head.num_labels else blueprint.head_path) in blueprint.trainable
    # Embedding and head, gathered; frozen ones are gathered before all loops and stay in memory.
    tables = (1 if trained or not config.has_lm_head else 2) * table * size if shards > 1 else 0
    logits, explanation = _logits(blueprint, local.head_rows, trained=trained)
    # The head's gradient, unsharded until it is reduced; on one device, in float32 with the embedding's.
    gradient = table * (4 if shards == 1 else size) + 2 * table * size // shards
    workers = blueprint.layout.workers_per_device  # each has trained weights
    head = logits + (workers * (tables + gradient) if trained else 0)
    share = BACKWARD_SHARE["weights" if blueprint.experiment.adapter is None else "adapters"]
    layers = int(residuals.period * share)
    layers += _period_weights(blueprint) * (2 * workers if trained else 1) if shards > 1 else 0
    layers += 2 * gradient_bytes(blueprint)[0] * size // 4  # the gradients, and zeros of their shapes
    constant = 0 if trained else tables
    if head >= layers:
        return constant + head, f"{explanation}, and the head's weights"
    return constant + layers, "the backward pass of one period of layers, and its weights gathered"


def _logits(blueprint: Blueprint, vocab_size: int, *, trained: bool) -> tuple[int, str]:
    """Bytes of the logits that exist at one time on one device, for its shard of the vocabulary, explained."""
    layout, limit = blueprint.layout, blueprint.experiment.memory.logprob_tokens
    objective = blueprint.experiment.objective
    rows = blueprint.rows_at_once
    length = blueprint.longest.head + -blueprint.longest.head % layout.length_shards
    devices = math.prod(layout.shard_counts(("head_batch", "length"), (rows, length)))
    tokens = rows * length // devices
    device_limit, sizes = None if limit is None else limit // devices, ShardContext(blueprint.platform).sizes
    chunks, tile, keep = tiles(tokens, vocab_size, blueprint.config.embed_dim, device_limit, sizes)
    chunk = -(-tokens // chunks)
    # In float32, and in the compute dtype as a factor of a product. With a teacher also the divergences, and where it
    # is not precomputed its logits.
    teacher = blueprint.teacher
    float32 = 4 if teacher is None or not teacher.has_distributions else 8 if teacher.is_precomputed else 12
    tile_bytes = (float32 + blueprint.compute.itemsize) * chunk * tile
    if (trained or objective.has_entropy_bonus) and keep:
        tokens *= 1 + len(blueprint.mtp_layer_kinds)  # those of MTP, too
        return tile_bytes + 4 * tokens * vocab_size, f"float32 logits of {tokens} tokens x vocab_size {vocab_size}"
    return (
        tile_bytes,
        f"logits of a tile of {chunk} tokens x {tile} vocabulary entries, in float32 and {blueprint.compute.name}",
    )


def _period_weights(blueprint: Blueprint) -> int:
    """Bytes of one period's weights, sharded over `tensor` alone, in the compute dtype."""
    config = blueprint.config

    def of(stack: str, periods: int) -> int:
        leaves: Mapping[str, ParamSpec] = {p: leaf for p, leaf in blueprint.base.items() if p.startswith(stack)}
        return sum(math.prod(leaf.shape) for leaf in leaves.values()) // max(periods, 1)

    count = max(of("layers.", config.layers.periods), of("kv_sharing.", config.layers.kv_shared_periods))
    return count * blueprint.compute.itemsize // blueprint.layout.mesh.tensor


@attrs.frozen
class RolloutMemory:
    """Memory of one device during generation.

    Attributes:
        rows: Number of completions at one time.
        tokens: Tokens of the longest prompt and completion.
        cache: Bytes of the KV cache: of the completions, of the prefixes that they share, and of the prompts that are
            computed at one time; and the experts of their tokens where these are returned.
        workspace: Bytes of the logits and their copies, or of a layer's keys and values that are converted from 8 bits.
        copies: Bytes of weights that are copied: those of stacks of layers, which are taken apart, and trained ones in
            the compute dtype where that is not float32.
    """

    rows: int
    tokens: int
    cache: int
    workspace: int
    copies: int

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return self.cache + self.workspace + self.copies


def rollout_memory(blueprint: Blueprint, longest: Lengths) -> RolloutMemory:
    """Memory of generating the completions of one step on one device; heads are taken to be unsharded."""
    objective, compute, config = blueprint.experiment.objective, blueprint.compute, blueprint.config
    size, drafts = blueprint.experiment.batch_size, objective.num_speculative_tokens
    prompts = -(-size // objective.num_generations)
    slots = min(size, most_slots(blueprint.platform))
    places = group_size(size, prompts, slots)
    prefixes = most_prefixes(slots, places, prompts * -(-objective.num_generations // places))
    at_once = min(prompts, most_prompts(blueprint.platform, slots))
    prompt = padded(max(longest.trunk - longest.head, 1))
    if objective.environment is not None:  # a later turn has all those before it as its prompt
        prompt = min(padded_turn(longest.trunk), config.max_length - longest.head)
    room = prompt - 1 + longest.head + drafts

    of_kv: dict[str, Any] = {"kv_cache_dtype": objective.kv_cache_dtype}

    def on_device(rows: int) -> int:
        return math.ceil(rows / blueprint.layout.batch_shards(rows))

    def caches() -> Any:
        shared = empty_prefixes(config, on_device(prefixes), places, on_device(slots), prompt, compute, **of_kv)
        caches = [init_cache(config, on_device(slots), room, compute, drafts, shared, **of_kv)]
        caches.append(init_cache(config, on_device(at_once), prompt, compute, drafts, **of_kv))
        if drafts:
            sizes = ((slots, room), (at_once, prompt))
            caches += [mtp_cache(config, on_device(rows), size, compute, **of_kv) for rows, size in sizes]
        return caches

    arrays = jax.tree.leaves(jax.eval_shape(caches))
    if (experts := blueprint.routed_experts) is not None:
        sizes = ((slots, longest.head), (at_once, prompt))
        arrays += [jax.ShapeDtypeStruct((on_device(rows), tokens, *experts), jnp.int16) for rows, tokens in sizes]
    cache = sum(math.prod(leaf.shape) * bits(leaf.dtype.name) // 8 for leaf in arrays)
    # The logits, and their exponentials; which tokens are kept is found from their order and the masked ones as well.
    is_limited = isinstance(objective, Online) and (objective.top_k, objective.top_p) != (None, None)
    logits = (4 if is_limited else 2) * on_device(slots) * (1 + drafts) * config.vocab_size * 4
    converted = 2 * compute.itemsize * max((leaf.size for leaf in arrays if leaf.dtype == jnp.int8), default=0)
    workspace = max(logits, converted)
    return RolloutMemory(on_device(slots), longest.trunk, cache, workspace, _weight_copies(blueprint))


def _weight_copies(blueprint: Blueprint) -> int:
    """Bytes of the policy's weights on one device that a sampler copies."""
    compute, copies = blueprint.compute, 0
    for part in ("trainable", "frozen"):
        for path, placed in blueprint.layout.arrays.get(part, {}).items():
            is_cast = part == "trainable" and compute.itemsize != 4
            size = placed.device_bytes * compute.itemsize // 4 if is_cast else placed.device_bytes
            copies += size * (int(is_cast) + int(is_stacked(path)))
    return copies


@attrs.frozen
class RewardMemory:
    """Memory of a reward model on the device that has it.

    Attributes:
        weights: Bytes of its arrays.
        workspace: Bytes of a forward pass of `batch_size` completions with their prompts.
    """

    weights: int
    workspace: int


def reward_memory(blueprint: Blueprint) -> tuple[list[RewardMemory], list[Problem]]:
    """Memory of the reward models of an experiment, and a problem for each whose network is not known here.

    Their tokenizers are taken to make as many tokens as the policy's.
    """
    objective, length = blueprint.experiment.objective, power_of_two(lengths(blueprint.experiment.data).trunk)
    models, problems = list[RewardMemory](), list[Problem]()
    for index, reward in enumerate(objective.rewards if isinstance(objective, Online) else ()):
        if isinstance(reward, reward_library.Model):
            try:
                models.append(_reward_memory(reward_network(reward.weights), reward, length))
            except NnxdslError as error:  # the files are needed where it runs
                problems.append(Problem(f"objective.rewards.{index}.weights", str(error)))
    return models, problems


def _reward_memory(config: DecoderConfig, reward: reward_library.Model, length: int) -> RewardMemory:
    dtype = jnp.dtype(reward.dtype)
    weights = sum(math.prod(leaf.shape) for leaf in _network(config, dtype, None).variables.values())
    tokens, heads = reward.batch_size * length, config.num_heads
    # Scores of a block of queries and their softmax, in float32; or the two factors of the gated MLP.
    block = reward.batch_size * min(rows.QUERIES, length)
    scores = 2 * 4 * block * heads * length + 2 * tokens * heads * config.head_dim * dtype.itemsize
    mlp = 2 * tokens * config.mlp.dim * dtype.itemsize
    hidden = 2 * tokens * config.embed_dim * dtype.itemsize
    return RewardMemory(weights * dtype.itemsize, hidden + max(scores, mlp))


MARGIN = 1.1
"""Estimates are within 10% of XLA's figures (docs/guides/memory.md): a program that exceeds memory by less is run."""

_GIB = 2**30


def require_fit(blueprint: Blueprint, usable: int | None) -> None:
    """Raise for a program that would run out of memory.

    Args:
        blueprint: The program without devices.
        usable: Bytes that it may use on each device; None if unknown.

    Raises:
        PlanError: with the bytes of each part.
    """
    if usable is None:
        return
    parts = [part for part in memory(blueprint) if part.memory == "device"]
    needed = sum(part.bytes for part in parts)
    if needed <= MARGIN * usable:
        return
    width = max(len(part.name) for part in parts)
    table = [f"    {part.name:{width}}  {part.bytes / _GIB:12,.4f} GiB  {part.tag}: {part.formula}" for part in parts]
    message = (
        f"a step takes {needed / _GIB:,.4f} GiB on each device, of which {usable / _GIB:,.4f} GiB are usable:\n"
        + "\n".join(table)
        + "\n    `plan --device NAME --count N --search` finds placements that fit; less takes microbatch_size, "
        "memory.remat=inputs\n    or full, an adapter, quantization, more devices. "
        "NNXDSL_DEVICE_GIB=N says that N GiB are usable"
    )
    raise PlanError([Problem("memory", message)], f"Experiment '{blueprint.experiment.name}'")
