"""Initial weights of base, adapter, reference and teacher, placed shard by shard: from a source, or random."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from nnxdsl.adapters import lora_math, pissa, weight_only_quant
from nnxdsl.config.adapter import LowRank
from nnxdsl.config.objectives.reference import Checkpoint
from nnxdsl.config.quantization import Quantization
from nnxdsl.config.weights import HF, PEFT, Random, Weights
from nnxdsl.errors import NotRegisteredError, PlanError, Problem
from nnxdsl.formats import peft
from nnxdsl.formats.hf import HubReader
from nnxdsl.formats.hf_download import locate
from nnxdsl.formats.mapped_arrays import MappedArray, aligned, copied, unaligned
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.layers.embedding import Score
from nnxdsl.models.params import flatten
from nnxdsl.program.architecture import config_problems, model_type
from nnxdsl.program.blueprint import Blueprint, build_unplaced
from nnxdsl.program.forward import Leaves
from nnxdsl.program.teacher import teacher_of

ArrayLike = np.ndarray | jax.Array | MappedArray

AT_ONCE_BYTES = 2**28
"""The most bytes of layers to be quantized that are on the devices unquantized at a time; one layer if that is more."""


class Source(Protocol):
    """A source of base weights, one leaf at a time."""

    def leaf(self, path: str) -> ArrayLike:
        """The weight of a path of the published network, with all its layers stacked."""
        ...


class AdapterSource:
    """Base weights with an adapter that was trained before.

    Args:
        base: Source of base weights.
        adapter: The adapter's arrays by path.
        is_pissa: Whether it was trained by PiSSA, on base weights without their principal components.
    """

    def __init__(self, base: Source, adapter: Mapping[str, ArrayLike], *, is_pissa: bool = False) -> None:
        self._base, self._adapter, self._is_pissa = base, adapter, is_pissa

    def leaf(self, path: str) -> ArrayLike:
        """The weight of a path, or an array of the adapter."""
        if path in self._adapter:
            return self._adapter[path]
        weight, a = self._base.leaf(path), self._adapter.get(path + lora_math.A) if self._is_pissa else None
        return weight if a is None else pissa.residual(np.asarray(weight), np.asarray(a))


class HubSource:
    """The weights of a directory in the Hub's format; each is read when it is placed.

    Args:
        reader: Of the directory.
    """

    def __init__(self, reader: HubReader) -> None:
        self._reader = reader

    def leaf(self, path: str) -> ArrayLike:
        """The weight of one path, in the dtype of its file."""
        return self._reader.mapped(path)


class RandomSource:
    """Random weights from a seed; the same on every mesh.

    All are drawn at once on one device, and each is released when it is read.
    """

    def __init__(self, config: DecoderConfig, seed: int) -> None:
        def initial_weights(key: jax.Array) -> Leaves:
            return flatten(Decoder(config, rngs=nnx.Rngs(params=key)))

        self._draw = jax.jit(initial_weights)
        self._seed = seed
        self._leaves: dict[str, jax.Array] = {}

    def leaf(self, path: str) -> ArrayLike:
        """The weight of one path, float32."""
        if path not in self._leaves:
            self._leaves = self._draw(jax.random.key(self._seed))
        return self._leaves.pop(path)


class ScoreSource:
    """Base weights with a head of labels, which is drawn from the seed where the base has none.

    Args:
        base: Source of base weights, which raises KeyError for arrays that it does not have.
        blueprint: The program.
    """

    def __init__(self, base: Source, blueprint: Blueprint) -> None:
        self._base, self._blueprint = base, blueprint

    def leaf(self, path: str) -> ArrayLike:
        """The weight of a path."""
        try:
            return self._base.leaf(path)
        except KeyError:
            if path != self._blueprint.head_path:
                raise
        config, seed = self._blueprint.config, self._blueprint.experiment.seed
        assert config.head.num_labels is not None
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode()))
        score = Score(config.head.num_labels, config.embed_dim, rngs=nnx.Rngs(params=key), param_dtype=jnp.float32)
        return score.kernel[...]


def with_score(blueprint: Blueprint, base: Source) -> Source:
    """Base weights, of a network with a head of labels with such a head."""
    return base if blueprint.config.head.num_labels is None else ScoreSource(base, blueprint)


def open_source(blueprint: Blueprint) -> Source:
    """Open random weights or a directory in the Hub's format, with an adapter in PEFT's format.

    Raises:
        PlanError: tensors are missing or have another shape, or an adapter differs from the spec's.
        WeightsError: a file cannot be read.
    """
    return with_adapter_start(blueprint, open_base(blueprint))


_MODULES_TO_SAVE = (
    "{0} replaces the embedding or the head as a whole (modules_to_save), which adapters do not train; merge it first, "
    "and train a new adapter on the result: model.weights=Weights.Merged(base, adapters=(Weights.PEFT({0!r}),), "
    "coefficients=(1.0,))"
)


def with_adapter_start(blueprint: Blueprint, base: Source) -> Source:
    """A source of base weights with the adapter of `adapter.start`, if that is in PEFT's format.

    Raises:
        PlanError: it differs from the spec's adapter.
        WeightsError: a file cannot be read.
    """
    experiment = blueprint.experiment
    adapter = experiment.adapter
    match adapter and adapter.start:
        case None:
            return base
        case PEFT(path=path, allow_non_finite=allow):
            directory = Path(path).expanduser()
            kind = model_type(blueprint.experiment)
            stored = peft.read(directory, blueprint.config, blueprint.base, kind, allow_non_finite=allow)
            assert isinstance(adapter, LowRank)
            if stored.whole:
                raise PlanError(
                    [Problem("adapter.start", _MODULES_TO_SAVE.format(str(directory)))],
                    f"Experiment '{experiment.name}'",
                )
            if problems := list(stored.unlike(adapter, blueprint.trainable)):
                raise PlanError(problems, f"Experiment '{experiment.name}'")
            return AdapterSource(base, stored.leaves, is_pissa=stored.is_pissa)
        case start:
            raise NotRegisteredError(f"{type(start).__qualname__} is opened by nnxdsl.weights.sources.open_source")


def open_base(blueprint: Blueprint) -> Source:
    """Open the source of base weights, without an adapter; raises as `open_source`."""
    weights = blueprint.experiment.model.weights
    match weights:
        case Random():
            return RandomSource(blueprint.config, blueprint.experiment.seed)
        case HF(path=path, allow_non_finite=allow):
            reader = HubReader(locate(path), allow_non_finite=allow)
            # A name on the Hub has no config.json to check before it is downloaded.
            problems = config_problems(reader.config, blueprint.config, path) or reader.check(blueprint.base_template)
            if problems:
                raise PlanError(problems, f"Weights.HF({path!r})")
            return with_score(blueprint, HubSource(reader))
        case _:
            raise NotRegisteredError(f"{type(weights).__qualname__} is opened by nnxdsl.weights.sources.open_source")


def init_arrays(blueprint: Blueprint, source: Source, mesh: jax.sharding.Mesh) -> tuple[Leaves, Leaves, Leaves]:
    """Initial values of all leaves, created with their shardings.

    Args:
        blueprint: The program without devices.
        source: Base weights; those of adapter, reference and teacher where it has them.
        mesh: The devices.

    Returns:
        (trainable, frozen, reference), each by path; the last is the teacher where each step computes one.
    """
    trainable, frozen, reference = init_base(blueprint, source, mesh)
    adapter = init_adapter(blueprint, source, mesh, frozen)
    if blueprint.teacher is not None and blueprint.teacher.arrays:
        reference = init_teacher(blueprint, source, mesh)
    elif blueprint.reference.arrays and blueprint.reference.has_own_weights:
        reference = init_reference(blueprint, source, mesh)
    else:
        shardings = blueprint.layout.shardings("reference", mesh)
        copied = {path: leaf for path, leaf in adapter.items() if path in blueprint.reference.arrays}
        reference |= {path: place(leaf, leaf.dtype, shardings[path]) for path, leaf in copied.items()}
    trainable = sort_like({**trainable, **adapter}, blueprint.trainable)
    return trainable, sort_like(frozen, blueprint.frozen), reference


def init_base(blueprint: Blueprint, source: Source, mesh: jax.sharding.Mesh) -> tuple[Leaves, Leaves, Leaves]:
    """Base weights, read once each, as leaves of the policy and of a reference that copies them.

    Args:
        blueprint: The program without devices.
        source: Base weights.
        mesh: The devices.

    Returns:
        (trainable, frozen, reference), each by path.
    """
    layout, quantization, copies = blueprint.layout, blueprint.experiment.quantization, blueprint.reference
    shardings = {part: layout.shardings(part, mesh) for part in ("trainable", "frozen", "reference")}
    trainable: Leaves = {}
    frozen: Leaves = {}
    reference: Leaves = {}
    for path, leaf in blueprint.base.items():
        weight = source.leaf(path)
        if path in blueprint.trainable:
            trainable[path] = place(weight, jnp.float32, shardings["trainable"][path], is_donated=True)
        elif path in blueprint.frozen:
            frozen[path] = place(weight, leaf.dtype, shardings["frozen"][path])
        else:
            assert quantization is not None
            names = (path + weight_only_quant.QVALUE, path + weight_only_quant.SCALE)
            # Sharded over the devices and quantized there, wherever it is stored, so that no device holds all of it.
            device_shardings = tuple(layout.sharding("frozen", name, mesh, fetched=True) for name in names)
            quantized = _quantize_layers(weight, leaf.dtype, device_shardings, quantization)
            stored = tuple(shardings["frozen"][name] for name in names)
            frozen |= dict(zip(names, jax.device_put(quantized, stored), strict=True))
        if path in copies.arrays and not copies.has_own_weights:
            dtype, sharding = copies.arrays[path].dtype, shardings["reference"][path]
            reference[path] = place(weight, dtype, sharding, is_donated=copies.is_synced)
    return trainable, frozen, reference


def init_adapter(blueprint: Blueprint, source: Source, mesh: jax.sharding.Mesh, frozen: Leaves) -> Leaves:
    """The adapter's arrays by path: those of `adapter.start`, or drawn from the seed.

    Args:
        blueprint: The program without devices.
        source: The arrays of an adapter that was trained before.
        mesh: The devices.
        frozen: Frozen leaves, whose norms are DoRA's magnitudes.
    """
    adapter, quantization = blueprint.experiment.adapter, blueprint.experiment.quantization
    shardings = blueprint.layout.shardings("trainable", mesh)
    key = jax.random.fold_in(jax.random.key(blueprint.experiment.seed), zlib.crc32(b"adapter"))
    arrays: Leaves = {}
    for path, leaf in blueprint.trainable.items():
        if not lora_math.is_adapter(path):
            continue
        if adapter is not None and adapter.start is not None:
            arrays[path] = place(source.leaf(path), jnp.float32, shardings[path], is_donated=True)
        elif path.endswith(lora_math.M):
            arrays[path] = _magnitude(lora_math.kernel_of(path), frozen, quantization, shardings[path])
        else:
            initial = lora_math.initial(path, leaf.shape, jax.random.fold_in(key, zlib.crc32(path.encode())))
            arrays[path] = place(initial, jnp.float32, shardings[path])
    return arrays


def _quantize_layers(
    weight: ArrayLike,
    dtype: DTypeLike,
    shardings: tuple[NamedSharding, ...],
    quantization: Quantization,
) -> tuple[jax.Array, ...]:
    """Quantized values and scales of a weight, on the devices.

    A large stack in files or host memory is quantized a few layers at a time, so that a model which does not fit the
    devices unquantized arrives quantized.
    """
    spread = shardings[0]  # a weight has the axes of its values
    is_stack = bool(weight.leading) if isinstance(weight, MappedArray) else weight.ndim > 2
    is_at_once = isinstance(weight, jax.Array) or not is_stack or spread.spec[:1] not in ((), (None,))
    layers = 1 if is_at_once else weight.shape[0]
    size = weight.size * jnp.dtype(dtype).itemsize // layers
    at_once = max((n for n in range(1, layers + 1) if layers % n == 0 and n * size <= AT_ONCE_BYTES), default=1)
    if at_once == layers:
        quantize = jax.jit(weight_only_quant.quantize, static_argnums=1, out_shardings=shardings)
        return quantize(place(weight, dtype, spread), quantization)
    abstract = jax.ShapeDtypeStruct(weight.shape, dtype)
    shapes = jax.eval_shape(functools.partial(weight_only_quant.quantize, quantization=quantization), abstract)
    quantized = tuple(
        jax.jit(functools.partial(jnp.zeros, shape.shape, shape.dtype), out_shardings=sharding)()
        for shape, sharding in zip(shapes, shardings, strict=True)
    )
    write = jax.jit(_write, static_argnums=3, donate_argnums=0, out_shardings=shardings)
    for first in range(0, layers, at_once):
        last = first + at_once
        part = weight.layers(first, last) if isinstance(weight, MappedArray) else weight[first:last]
        quantized = write(quantized, place(part, dtype, spread), first, quantization)
    return quantized


def _write(
    stack: tuple[jax.Array, ...], layers: jax.Array, first: jax.Array, quantization: Quantization
) -> tuple[jax.Array, ...]:
    """A quantized stack with `layers`, quantized, written at index `first`."""
    update = jax.lax.dynamic_update_slice_in_dim
    return tuple(
        update(*pair, first, 0) for pair in zip(stack, weight_only_quant.quantize(layers, quantization), strict=True)
    )


def _magnitude(kernel: str, frozen: Leaves, quantization: Quantization | None, sharding: NamedSharding) -> jax.Array:
    """DoRA's magnitude: the norms of a frozen weight, quantized or not."""
    if kernel in frozen:
        return jax.jit(lora_math.magnitude, out_shardings=sharding)(frozen[kernel])
    quantized = frozen[kernel + weight_only_quant.QVALUE], frozen[kernel + weight_only_quant.SCALE]
    assert quantization is not None
    norms = jax.jit(
        lambda q, s: lora_math.magnitude(weight_only_quant.dequantize(q, s, quantization)), out_shardings=sharding
    )
    return norms(*quantized)


class TeacherSource:
    """Base weights with those of a teacher.

    Args:
        base: Source of base weights.
        teacher: Source of the teacher's weights.
    """

    def __init__(self, base: Source, teacher: Source) -> None:
        self._base, self.teacher = base, teacher

    def leaf(self, path: str) -> ArrayLike:
        """The initial weight of a path of the student."""
        return self._base.leaf(path)


class ReferenceSource:
    """Base weights with those of a reference loaded from a checkpoint.

    Args:
        base: Source of base weights, and of a teacher's.
        reference: Source of the reference's weights.
    """

    def __init__(self, base: Source, reference: Source) -> None:
        self._base, self.reference = base, reference

    def leaf(self, path: str) -> ArrayLike:
        """The weight of a path of the policy's network."""
        return self._base.leaf(path)


def init_reference(blueprint: Blueprint, source: Source, mesh: jax.sharding.Mesh) -> Leaves:
    """The weights of a reference that is loaded from a checkpoint, created with their shardings."""
    spec = blueprint.experiment.reference
    assert isinstance(spec, Checkpoint)
    if isinstance(source, ReferenceSource):
        weights = source.reference
    else:
        weights = open_base(with_weights(blueprint, spec.weights))
    shardings = blueprint.reference.placed_in(blueprint.layout).shardings("reference", mesh)
    return {path: place(weights.leaf(path), leaf.dtype, shardings[path]) for path, leaf in blueprint.base.items()}


def with_weights(blueprint: Blueprint, weights: Weights) -> Blueprint:
    """The same program with other initial weights."""
    experiment = blueprint.experiment
    changed = attrs.evolve(experiment, model=attrs.evolve(experiment.model, weights=weights))
    return attrs.evolve(blueprint, experiment=changed)


def init_teacher(blueprint: Blueprint, source: Source, mesh: jax.sharding.Mesh) -> Leaves:
    """The weights of a teacher, created with their shardings."""
    experiment = teacher_of(blueprint.experiment)
    assert experiment is not None
    assert blueprint.teacher is not None
    if isinstance(source, TeacherSource):
        weights = source.teacher
    else:
        weights = open_base(build_unplaced(experiment, blueprint.platform))
    shardings, leaves = blueprint.teacher_layout.shardings("teacher", mesh), blueprint.teacher.base
    return {path: place(weights.leaf(path), leaf.dtype, shardings[path]) for path, leaf in leaves.items()}


def place(
    weight: ArrayLike, dtype: DTypeLike, sharding: jax.sharding.Sharding, *, is_donated: bool = False
) -> jax.Array:
    """One weight on the devices, each of which gets its own shard alone; always a new buffer.

    Args:
        weight: The values; a `MappedArray` is read shard by shard.
        dtype: Of the result.
        sharding: Of the result.
        is_donated: Whether a program will donate it. XLA on CPUs uses aligned host memory without a copy, but does not
            write to it: a donated array would be in memory twice.
    """
    if isinstance(weight, jax.Array) and (sharding.is_fully_addressable or not weight.is_fully_addressable):
        return jax.jit(_copy, static_argnums=1, out_shardings=sharding)(weight, jnp.dtype(dtype))
    memory = unaligned if is_donated else aligned
    parts: dict[str, np.ndarray] = {}  # shards that several devices have are read once

    def read(index: Any) -> np.ndarray:
        if isinstance(host, MappedArray):
            return host.read(index, dtype, memory)
        return copied(np.asarray(host[index]), dtype, memory)

    def part(index: Any) -> np.ndarray:
        if str(index) not in parts:
            parts[str(index)] = read(index)
        return parts[str(index)]

    is_read_late = isinstance(weight, MappedArray) and (weight.is_mapped or sharding.is_fully_replicated)
    host = weight if is_read_late else np.asarray(weight)
    return jax.make_array_from_callback(host.shape, sharding, part)


def _copy(weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.copy(weight.astype(dtype))


def sort_like(leaves: Mapping[str, jax.Array], like: Mapping[str, object]) -> Leaves:
    """`leaves` in the order of `like`, so that all states of a program have the same tree structure."""
    return {path: leaves[path] for path in like}
