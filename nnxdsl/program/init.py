"""The first value of every leaf, placed shard by shard: from a source of base weights, or drawn from the seed."""

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
from nnxdsl.models.params import flatten
from nnxdsl.program.architecture import config_problems, model_type
from nnxdsl.program.blueprint import Blueprint, build_unplaced
from nnxdsl.program.forward import Leaves
from nnxdsl.program.teacher import teacher_of

ArrayLike = np.ndarray | jax.Array | MappedArray

AT_ONCE_BYTES = 2**28
"""Of quantized layers: bytes that are on the devices unquantized at a time, or one layer if that is more."""


class Source(Protocol):
    """Where base weights come from, one leaf at a time."""

    def leaf(self, path: str) -> ArrayLike:
        """The weight of a path of the unadapted, unquantised network, with all its layers stacked."""
        ...


class AdapterSource:
    """Base weights with an adapter that was trained before.

    Args:
        base: Where base weights come from.
        adapter: The adapter's arrays by path.
        is_pissa: Whether it stands on base weights without their principal components.
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
    """The weights of a directory in the Hub's format, none of which is read before it is placed.

    Args:
        reader: Of the directory.
    """

    def __init__(self, reader: HubReader) -> None:
        self._reader = reader

    def leaf(self, path: str) -> ArrayLike:
        """The weight of one path, in the dtype of its file."""
        return self._reader.mapped(path)


class RandomSource:
    """Weights drawn from a seed; the same on every mesh.

    All are drawn at once on one device, and each is let go when it is read.
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


def open_source(blueprint: Blueprint) -> Source:
    """The source for weights that this floor knows: random ones, directories of the Hub's format, adapters of PEFT's.

    Raises:
        PlanError: every tensor that is missing or of another shape; an adapter that differs from the spec's.
        WeightsError: a file that cannot be read.
    """
    return with_adapter_start(blueprint, open_base(blueprint))


_WHOLE = (
    "{0} replaces the embedding or the head as a whole (modules_to_save), which adapters do not train; merge it first, "
    "and train a new adapter on the result: model.weights=Weights.Merged(base, adapters=(Weights.PEFT({0!r}),), "
    "coefficients=(1.0,))"
)


def with_adapter_start(blueprint: Blueprint, base: Source) -> Source:
    """A source of base weights, with the adapter of `adapter.start` if that is in PEFT's format.

    Raises:
        PlanError: It differs from the spec's adapter.
        WeightsError: a file that cannot be read.
    """
    experiment = blueprint.experiment
    adapter = experiment.adapter
    match adapter and adapter.start:
        case None:
            return base
        case PEFT(path=path, allow_non_finite=allow):
            directory = Path(path).expanduser()
            kind = model_type(blueprint.experiment)
            found = peft.read(directory, blueprint.config, blueprint.base, kind, allow_non_finite=allow)
            assert isinstance(adapter, LowRank)
            if found.whole:
                raise PlanError(
                    [Problem("adapter.start", _WHOLE.format(str(directory)))], f"Experiment '{experiment.name}'"
                )
            if problems := list(found.unlike(adapter, blueprint.trainable)):
                raise PlanError(problems, f"Experiment '{experiment.name}'")
            return AdapterSource(base, found.leaves, is_pissa=found.is_pissa)
        case start:
            raise NotRegisteredError(f"{type(start).__qualname__} is opened by nnxdsl.weights.sources.open_source")


def open_base(blueprint: Blueprint) -> Source:
    """The source of base weights alone, as `open_source`."""
    weights = blueprint.experiment.model.weights
    match weights:
        case Random():
            return RandomSource(blueprint.config, blueprint.experiment.seed)
        case HF(path=path, allow_non_finite=allow):
            reader = HubReader(locate(path), allow_non_finite=allow)
            # A name on the Hub has no config.json before it is downloaded: this is the first look at it.
            problems = config_problems(reader.config, blueprint.config, path) or reader.check(blueprint.base_template)
            if problems:
                raise PlanError(problems, f"Weights.HF({path!r})")
            return HubSource(reader)
        case _:
            raise NotRegisteredError(f"{type(weights).__qualname__} is opened by nnxdsl.weights.sources.open_source")


def init_arrays(blueprint: Blueprint, source: Source, mesh: jax.sharding.Mesh) -> tuple[Leaves, Leaves, Leaves]:
    """First values of all leaves, born with their shardings.

    Args:
        blueprint: What leaves there are.
        source: Where base weights come from.
        mesh: The devices.

    Returns:
        (trainable, frozen, reference), each by path; the last is the teacher where each step computes one.
    """
    quantization = blueprint.experiment.quantization
    layout = blueprint.layout
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
            where = tuple(shardings["frozen"][name] for name in names)
            # Sharded over the devices and quantized there, wherever it is stored, so that no device holds all of it.
            there = tuple(layout.sharding("frozen", name, mesh, fetched=True) for name in names)
            few = _quantize_layers(weight, leaf.dtype, there, quantization)
            frozen |= dict(zip(names, jax.device_put(few, where), strict=True))
        if path in blueprint.reference.arrays and not blueprint.reference.has_own_weights:
            dtype, sharding = blueprint.reference.arrays[path].dtype, shardings["reference"][path]
            reference[path] = place(weight, dtype, sharding, is_donated=blueprint.reference.is_synced)
    key = jax.random.fold_in(jax.random.key(blueprint.experiment.seed), zlib.crc32(b"adapter"))
    adapter = blueprint.experiment.adapter
    is_started = adapter is not None and adapter.start is not None
    for path, leaf in blueprint.trainable.items():
        if lora_math.is_adapter(path) and is_started:
            trainable[path] = place(source.leaf(path), jnp.float32, shardings["trainable"][path], is_donated=True)
        elif path.endswith(lora_math.M):
            trainable[path] = _magnitude(lora_math.kernel_of(path), frozen, quantization, shardings["trainable"][path])
        elif lora_math.is_adapter(path):
            own = jax.random.fold_in(key, zlib.crc32(path.encode()))
            first = lora_math.initial(path, leaf.shape, own)
            trainable[path] = place(first, jnp.float32, shardings["trainable"][path])
        if path in blueprint.reference.arrays and lora_math.is_adapter(path):
            reference[path] = place(trainable[path], leaf.dtype, shardings["reference"][path])
    if blueprint.reference.arrays and blueprint.reference.has_own_weights:
        reference = init_reference(blueprint, source, mesh)
    if blueprint.teacher is not None and blueprint.teacher.arrays:
        reference = init_teacher(blueprint, source, mesh)
    return trainable, frozen, reference


def _quantize_layers(
    weight: ArrayLike,
    dtype: DTypeLike,
    where: tuple[NamedSharding, ...],
    quantization: Quantization,
) -> tuple[jax.Array, ...]:
    """Values and scales of a weight, on the devices.

    Of a large stack in files or in the host's memory, some layers are brought to the devices and quantised at a time,
    so that a model which the devices could not hold in full comes to them in few bits.
    """
    spread = where[0]  # a weight has the axes of its values
    is_stack = bool(weight.leading) if isinstance(weight, MappedArray) else weight.ndim > 2
    is_whole = isinstance(weight, jax.Array) or not is_stack or spread.spec[:1] not in ((), (None,))
    layers = 1 if is_whole else weight.shape[0]
    size = weight.size * jnp.dtype(dtype).itemsize // layers
    at_once = max((n for n in range(1, layers + 1) if layers % n == 0 and n * size <= AT_ONCE_BYTES), default=1)
    if at_once == layers:
        quantise = jax.jit(weight_only_quant.quantize, static_argnums=1, out_shardings=where)
        return quantise(place(weight, dtype, spread), quantization)
    whole = jax.ShapeDtypeStruct(weight.shape, dtype)
    shapes = jax.eval_shape(functools.partial(weight_only_quant.quantize, quantization=quantization), whole)
    found = tuple(
        jax.jit(functools.partial(jnp.zeros, each.shape, each.dtype), out_shardings=sharding)()
        for each, sharding in zip(shapes, where, strict=True)
    )
    write = jax.jit(_write, static_argnums=3, donate_argnums=0, out_shardings=where)
    for first in range(0, layers, at_once):
        last = first + at_once
        part = weight.layers(first, last) if isinstance(weight, MappedArray) else weight[first:last]
        found = write(found, place(part, dtype, spread), first, quantization)
    return found


def _write(
    found: tuple[jax.Array, ...], layers: jax.Array, first: jax.Array, quantization: Quantization
) -> tuple[jax.Array, ...]:
    """Some layers of a stack in few bits, from `first` on."""
    update = jax.lax.dynamic_update_slice_in_dim
    return tuple(
        update(*pair, first, 0) for pair in zip(found, weight_only_quant.quantize(layers, quantization), strict=True)
    )


def _magnitude(kernel: str, frozen: Leaves, quantization: Quantization | None, sharding: NamedSharding) -> jax.Array:
    """The norms of a frozen weight as it is on the devices, in few bits or not."""
    if kernel in frozen:
        return jax.jit(lora_math.magnitude, out_shardings=sharding)(frozen[kernel])
    few = frozen[kernel + weight_only_quant.QVALUE], frozen[kernel + weight_only_quant.SCALE]
    assert quantization is not None
    norms = jax.jit(
        lambda q, s: lora_math.magnitude(weight_only_quant.dequantize(q, s, quantization)), out_shardings=sharding
    )
    return norms(*few)


class TeacherSource:
    """Base weights with those of a teacher beside them.

    Args:
        base: Where base weights come from.
        teacher: Where the teacher's come from.
    """

    def __init__(self, base: Source, teacher: Source) -> None:
        self._base, self.teacher = base, teacher

    def leaf(self, path: str) -> ArrayLike:
        """The initial weight of a path of the student."""
        return self._base.leaf(path)


class ReferenceSource:
    """Base weights with those of a reference that has its own.

    Args:
        base: Where base weights come from, and a teacher's.
        reference: Where the reference's come from.
    """

    def __init__(self, base: Source, reference: Source) -> None:
        self._base, self.reference = base, reference

    def leaf(self, path: str) -> ArrayLike:
        """The weight of a path of the policy's network."""
        return self._base.leaf(path)


def init_reference(blueprint: Blueprint, source: Source, mesh: jax.sharding.Mesh) -> Leaves:
    """The leaves of a reference that has weights of its own, born with their shardings."""
    spec = blueprint.experiment.reference
    assert isinstance(spec, Checkpoint)
    own = source.reference if isinstance(source, ReferenceSource) else open_base(with_weights(blueprint, spec.weights))
    placed = blueprint.reference.placed_in(blueprint.layout).shardings("reference", mesh)
    return {path: place(own.leaf(path), leaf.dtype, placed[path]) for path, leaf in blueprint.base.items()}


def with_weights(blueprint: Blueprint, weights: Weights) -> Blueprint:
    """The same program with other first weights."""
    experiment = blueprint.experiment
    changed = attrs.evolve(experiment, model=attrs.evolve(experiment.model, weights=weights))
    return attrs.evolve(blueprint, experiment=changed)


def init_teacher(blueprint: Blueprint, source: Source, mesh: jax.sharding.Mesh) -> Leaves:
    """The leaves of a teacher, born with their shardings."""
    experiment = teacher_of(blueprint.experiment)
    assert experiment is not None
    assert blueprint.teacher is not None
    own = (
        source.teacher
        if isinstance(source, TeacherSource)
        else open_base(build_unplaced(experiment, blueprint.platform))
    )
    placed = blueprint.teacher_layout.shardings("teacher", mesh)
    return {path: place(own.leaf(path), leaf.dtype, placed[path]) for path, leaf in blueprint.teacher.base.items()}


def place(
    weight: ArrayLike, dtype: DTypeLike, sharding: jax.sharding.Sharding, *, is_donated: bool = False
) -> jax.Array:
    """One weight on its devices, each of which is given only its own part; always a buffer of its own.

    Args:
        weight: The values; `MappedArray` are read as devices ask for their parts.
        dtype: Of the result.
        sharding: Where it is to be.
        is_donated: Whether a program will write over it. XLA on CPUs takes memory of the host as its own where it can,
            but does not write over that: such an array would lie there twice.
    """
    if isinstance(weight, jax.Array) and (sharding.is_fully_addressable or not weight.is_fully_addressable):
        return jax.jit(_copy, static_argnums=1, out_shardings=sharding)(weight, jnp.dtype(dtype))
    memory = unaligned if is_donated else aligned
    parts: dict[str, np.ndarray] = {}  # those that several devices have are read once

    def read(index: Any) -> np.ndarray:
        if isinstance(host, MappedArray):
            return host.read(index, dtype, memory)
        return copied(np.asarray(host[index]), dtype, memory)

    def part(index: Any) -> np.ndarray:  # each of several processes gives its devices their parts
        if str(index) not in parts:
            parts[str(index)] = read(index)
        return parts[str(index)]

    is_read_late = isinstance(weight, MappedArray) and (weight.is_mapped or sharding.is_fully_replicated)
    host = weight if is_read_late else np.asarray(weight)
    return jax.make_array_from_callback(host.shape, sharding, part)


def _copy(weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.copy(weight.astype(dtype))


def order(leaves: Mapping[str, jax.Array], like: Mapping[str, object]) -> Leaves:
    """`leaves` in the order of `like`, so that every state of a program flattens alike."""
    return {path: leaves[path] for path in like}
