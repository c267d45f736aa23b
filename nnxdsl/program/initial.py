"""The first value of every leaf, placed shard by shard: from a source of base weights, or drawn from the seed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from nnxdsl.models.config import DecoderConfig
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.hub import HubReader
from nnxdsl.models.hub_download import locate
from nnxdsl.models.tree import flatten
from nnxdsl.program import adapters
from nnxdsl.program.architecture import config_problems
from nnxdsl.program.blueprint import Blueprint
from nnxdsl.program.step import Leaves
from nnxdsl.spec.errors import NotRegisteredError, PlanError
from nnxdsl.spec.weights import HF, Random

ArrayLike = np.ndarray | jax.Array


class Source(Protocol):
    """Where base weights come from, one leaf at a time."""

    def leaf(self, path: str) -> ArrayLike:
        """The weight of a path of the unadapted, unquantised network, with all its layers stacked."""
        ...


class RandomSource:
    """Weights drawn from a seed; the same on every mesh.

    All are drawn at once on one device, and each is let go when it is read.
    """

    def __init__(self, config: DecoderConfig, seed: int) -> None:
        self._draw = jax.jit(lambda key: flatten(Decoder(config, rngs=nnx.Rngs(params=key))))
        self._seed = seed
        self._leaves: dict[str, jax.Array] = {}

    def leaf(self, path: str) -> ArrayLike:
        """The weight of one path, float32."""
        if path not in self._leaves:
            self._leaves = self._draw(jax.random.key(self._seed))
        return self._leaves.pop(path)


def open_source(blueprint: Blueprint) -> Source:
    """The source for weights that this floor knows: random ones, and directories of the Hub's format.

    Raises:
        PlanError: every tensor that is missing or of another shape.
        WeightsError: a file that cannot be read.
    """
    weights = blueprint.experiment.model.weights
    match weights:
        case Random():
            return RandomSource(blueprint.config, blueprint.experiment.seed)
        case HF(path=path):
            reader = HubReader(locate(path))
            # A name on the Hub has no config.json before it is downloaded: this is the first look at it.
            problems = config_problems(reader.config, blueprint.config, path) or reader.check(blueprint.base_template)
            if problems:
                raise PlanError(problems, f"Weights.HF({path!r})")
            return reader
        case _:
            raise NotRegisteredError(f"{type(weights).__qualname__} is opened by nnxdsl.run.origin.open_source")


def fill(blueprint: Blueprint, source: Source, mesh: jax.sharding.Mesh) -> tuple[Leaves, Leaves, Leaves]:
    """First values of all leaves, born with their shardings.

    Args:
        blueprint: What leaves there are.
        source: Where base weights come from.
        mesh: The devices.

    Returns:
        (trainable, frozen, reference), each by path.
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
            trainable[path] = place(weight, jnp.float32, shardings["trainable"][path])
        elif path in blueprint.frozen:
            frozen[path] = place(weight, leaf.dtype, shardings["frozen"][path])
        else:
            assert quantization is not None
            names = (path + adapters.QVALUE, path + adapters.SCALE)
            where = tuple(shardings["frozen"][name] for name in names)
            quantise = jax.jit(adapters.quantise, static_argnums=1, out_shardings=where)
            # Spread over the devices before it is quantised there, so that none ever holds the whole of it.
            spread = place(weight, leaf.dtype, layout.sharding("frozen", names[0], mesh, fetched=True))
            frozen |= dict(zip(names, quantise(spread, quantization), strict=True))
        if path in blueprint.copied:
            reference[path] = place(weight, blueprint.copied[path].dtype, shardings["reference"][path])
    key = jax.random.fold_in(jax.random.key(blueprint.experiment.seed), zlib.crc32(b"adapter"))
    for path, leaf in blueprint.trainable.items():
        if adapters.is_adapter(path):
            own = jax.random.fold_in(key, zlib.crc32(path.encode()))
            trainable[path] = jax.device_put(adapters.initial(path, leaf.shape, own), shardings["trainable"][path])
    return trainable, frozen, reference


def place(weight: ArrayLike, dtype: DTypeLike, sharding: NamedSharding) -> jax.Array:
    """One weight on its devices, each of which is given only its own part; always a buffer of its own."""
    if isinstance(weight, jax.Array):
        return jax.jit(_copy, static_argnums=1, out_shardings=sharding)(weight, jnp.dtype(dtype))
    host = weight
    return jax.make_array_from_callback(
        host.shape, sharding, lambda index: np.asarray(host[index]).astype(jnp.dtype(dtype), copy=True)
    )


def _copy(weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.copy(weight.astype(dtype))


def order(leaves: Mapping[str, jax.Array], like: Mapping[str, object]) -> Leaves:
    """`leaves` in the order of `like`, so that every state of a program flattens alike."""
    return {path: leaves[path] for path in like}
