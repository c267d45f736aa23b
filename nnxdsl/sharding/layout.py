"""Where every array of a program lives, and in how many pieces, on a mesh that need not be there."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from nnxdsl.config.diloco import over
from nnxdsl.config.sharding import Mesh as MeshSpec
from nnxdsl.errors import Problem, nearest
from nnxdsl.models.logical_axes import ShardMapCall
from nnxdsl.sharding.rules import DEFAULT_RULES as DEFAULT_RULES
from nnxdsl.sharding.rules import Axes, Resolved, Rules, Tried, mesh_axes, pieces, sizes, with_user_rules
from nnxdsl.sharding.rules import resolve as resolve

HOST = "pinned_host"
"""The memory that offloaded arrays lie in."""

ACTIVATION_AXES = (
    "batch", "head_batch", "length", "activation_embed", "activation_heads", "activation_kv_heads", "activation_mlp",
    "activation_vocab",
)  # fmt: skip
"""Logical axes that only activations have."""


@attrs.frozen
class Array:
    """One array that has no place yet.

    Attributes:
        shape: Global shape.
        dtype: Its dtype.
        axes: Logical names of its dimensions.
        owner: The path of the parameter that an array of the optimizer belongs to, else empty.
        of_workers: Whether its first dimension counts workers that train apart.
    """

    shape: tuple[int, ...]
    dtype: DTypeLike
    axes: Axes
    owner: str = ""
    of_workers: bool = False


@attrs.frozen
class Placed:
    """One array and where it lives.

    Attributes:
        path: Dotted path.
        part: What it is for: "frozen", "trainable", "reference", "optimizer".
        shape: Global shape.
        dtype: Its dtype's name.
        axes: Logical names of its dimensions.
        rules: The rules that it was resolved by.
        resolved: Where its dimensions lie.
        shards: In how many pieces each dimension is cut.
        replicas: How many devices hold the same piece.
        memory: "device", or "host" where it is offloaded.
        of_workers: Whether its first dimension counts workers that train apart.
    """

    path: str
    part: str
    shape: tuple[int, ...]
    dtype: str
    axes: Axes
    rules: Rules
    resolved: Resolved
    shards: tuple[int, ...]
    replicas: int
    memory: str
    of_workers: bool = False

    @property
    def spec(self) -> PartitionSpec:
        """Its partition spec."""
        return self.resolved.spec

    @property
    def device_shape(self) -> tuple[int, ...]:
        """Shape of the piece on one device."""
        return tuple(-(-size // shards) for size, shards in zip(self.shape, self.shards, strict=True))

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return -(-math.prod(self.shape) * bits(self.dtype) // 8)

    @property
    def device_bytes(self) -> int:
        """Bytes of the piece of one device; four-bit values count as half a byte."""
        return -(-math.prod(self.device_shape) * bits(self.dtype) // 8)

    @property
    def used_axes(self) -> frozenset[str]:
        """The mesh axes that it is cut over."""
        return frozenset(axis for target in self.spec for axis in mesh_axes(target))

    @property
    def line(self) -> str:
        """`part path shape dtype spec bytes/device`."""
        host = "" if self.memory == "device" else f" {self.memory}"
        return f"{self.part} {self.path} {dims(self.shape)} {self.dtype} {tuple(self.spec)} {self.device_bytes}{host}"


class Layout:
    """Every array of a program and where it lives on a mesh.

    Args:
        mesh: The mesh that was asked for, with the user's rules.
        parts: The arrays of each part, by path.
        offload: The parts that stay in the host's memory.
        workers: How many workers train apart.
    """

    def __init__(
        self,
        mesh: MeshSpec,
        parts: Mapping[str, Mapping[str, Array]],
        offload: Sequence[str] = (),
        workers: int = 1,
    ) -> None:
        self.mesh = mesh
        self.workers = workers
        self.rules = with_user_rules(mesh.rules)
        self.offload = tuple(offload)
        self._parts = parts
        self.arrays: dict[str, dict[str, Placed]] = {
            part: {path: self._place(part, path, array) for path, array in arrays.items()}
            for part, arrays in parts.items()
            if arrays
        }

    def on(self, mesh: MeshSpec) -> Layout:
        """The same arrays on another mesh."""
        return Layout(mesh, self._parts, self.offload, self.workers)

    def with_part(self, part: str, arrays: Mapping[str, Array]) -> Layout:
        """The same with the arrays of one more part."""
        return Layout(self.mesh, {**self._parts, part: arrays}, self.offload, self.workers)

    @property
    def of_worker(self) -> Layout:
        """The same within one worker, whose devices are a part of the mesh where workers are cut over an axis of it."""
        axis = over(self.workers, self.mesh)
        mesh = self.mesh if axis is None else attrs.evolve(self.mesh, **{axis: 1}, slices=1)
        return Layout(mesh, {part: arrays for part, arrays in self._parts.items() if part != "optimizer"}, self.offload)

    @property
    def workers_here(self) -> int:
        """How many workers a device has a part of."""
        axis = over(self.workers, self.mesh)
        return self.workers if axis is None else self.workers // self.mesh.sizes[axis]

    def resolve(self, axes: Axes, shape: Sequence[int] | None = None, path: str = "") -> Resolved:
        """Where the dimensions of an array, or of an activation, lie on this mesh."""
        return resolve(axes, self._rules_of(path), self.mesh.sizes, shape=shape)

    def _rules_of(self, path: str) -> Rules:
        own = [rule for pattern, rules in self.mesh.array_rules if fnmatch.fnmatchcase(path, pattern) for rule in rules]
        return (*own, *self.rules) if own else self.rules

    def _place(self, part: str, path: str, array: Array) -> Placed:
        # The optimizer's state of a parameter lies as the parameter does, so it follows the rules of its path.
        rules, dtype = self._rules_of(array.owner or path), jnp.dtype(array.dtype).name
        shape = array.shape if self.mesh.indivisible == "replicate" else None
        resolved = resolve(array.axes, rules, self.mesh.sizes, shape=shape)
        if array.of_workers and (axis := over(self.workers, self.mesh)):
            within = resolve(array.axes, rules, self.mesh.sizes | {axis: 1}, shape=shape)
            tried = Tried(0, "workers", None, axis, "taken", "each worker has devices of its own")
            spec, raw = (PartitionSpec(axis, *tuple(found)[1:]) for found in (within.spec, within.raw))
            resolved = Resolved(spec, raw, (*within.trace, tried))
        if part == "optimizer" and self.mesh.zero1:
            resolved = self._over_data(array, resolved)
        shards = tuple(self._shards(target) for target in resolved.spec)
        replicas = self.mesh.device_count // math.prod(shards)
        memory = "host" if part in self.offload else "device"
        placed = (array.shape, dtype, array.axes, rules, resolved, shards, replicas, memory, array.of_workers)
        return Placed(path, part, *placed)

    def _over_data(self, array: Array, resolved: Resolved) -> Resolved:
        """ZeRO stage 1: the largest dimension that `data` divides is cut over it, where nothing is yet."""
        data = self.mesh.data
        if data == 1 or any("data" in mesh_axes(target) for target in resolved.raw):
            return resolved
        left = [size // self._shards(target) for size, target in zip(array.shape, resolved.spec, strict=True)]
        whole = [
            size % (self._shards(target) * data) == 0 for size, target in zip(array.shape, resolved.spec, strict=True)
        ]
        found = [dimension for dimension in range(len(left)) if whole[dimension]]
        if not found:
            return resolved
        best = max(found, key=lambda dimension: left[dimension])
        spec = list(resolved.spec)
        # Within the piece that the device's parameter is, so that updates move between copies alone.
        cut = (*mesh_axes(spec[best]), "data")
        spec[best] = cut if len(cut) > 1 else "data"
        why = "ZeRO stage 1: the optimizer's copies over data are cut"
        tried = Tried(best, str(array.axes[best]), None, spec[best], "taken", why)
        return Resolved(PartitionSpec(*spec), resolved.raw, (*resolved.trace, tried))

    def problems(self) -> list[Problem]:
        """Every dimension that does not divide over its mesh axes, and every rule that names what there is not.

        The blocks of a period are named once, with a star for their number.
        """
        found: list[Problem] = []
        # The optimizer's arrays lie as their parameters do, so they have no problems of their own.
        for placed in self.parameters():
            for dimension, (size, shards) in enumerate(zip(placed.shape, placed.shards, strict=True)):
                if size % shards:
                    cut = sizes(placed.spec[dimension], self.mesh.sizes)
                    message = f"axis {dimension} has {size} rows, not divisible by {cut}"
                    found.append(Problem(starred(placed.path), message))
        found += self._rule_problems()
        return list(dict.fromkeys(found))

    def _rule_problems(self) -> Iterator[Problem]:
        present = {axis for placed in self for axis in placed.axes if isinstance(axis, str)}
        names = present | {logical for logical, _ in DEFAULT_RULES}
        for index, (logical, _) in enumerate(self.mesh.rules):
            if logical not in names:
                yield Problem(f"mesh.rules.{index}", f"no array has an axis '{logical}'{nearest(logical, names)}")
        paths = [starred(placed.path) for placed in self.parameters()]
        for index, (pattern, rules) in enumerate(self.mesh.array_rules):
            matched = [placed for placed in self.parameters() if fnmatch.fnmatchcase(placed.path, pattern)]
            if not matched:
                yield Problem(
                    f"mesh.array_rules.{index}", f"no array has a path like '{pattern}'{nearest(pattern, paths)}"
                )
            own = {axis for placed in matched for axis in placed.axes if isinstance(axis, str)}
            for number, (logical, _) in enumerate(rules):
                if matched and logical not in own:
                    message = f"no array with a path like '{pattern}' has an axis '{logical}'{nearest(logical, own)}"
                    yield Problem(f"mesh.array_rules.{index}.1.{number}", message)

    def batch_problems(self, rows: int, path: str = "microbatch_size") -> list[Problem]:
        """Rows of a micro-batch, which `path` sets, that cannot be split as the rules ask."""
        if self.workers > 1:
            own, rest = divmod(rows, self.workers)
            if rest:
                return [Problem(path, f"{rows} rows at a time cannot be split over {self.workers} workers")]
            return [
                attrs.evolve(p, message=f"of each worker {p.message}") for p in self.of_worker.batch_problems(own, path)
            ]
        (target,) = self.resolve(("batch",)).spec
        if self.mesh.indivisible == "replicate" or rows % self._shards(target) == 0:
            return []
        split = sizes(target, self.mesh.sizes)
        return [Problem(path, f"{rows} rows at a time cannot be split over {split}")]

    def sharding(
        self, part: str, path: str, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, *, fetched: bool = False
    ) -> NamedSharding:
        """The sharding of one array on real or abstract devices; `fetched`: where it is when it is used."""
        placed = self.arrays[part][path]
        if placed.memory == "host" and not fetched:
            return NamedSharding(mesh, placed.spec, memory_kind=HOST)
        return NamedSharding(mesh, placed.spec)

    def shardings(
        self, part: str, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, *, fetched: bool = False
    ) -> dict[str, NamedSharding]:
        """The shardings of all arrays of a part, by path."""
        return {path: self.sharding(part, path, mesh, fetched=fetched) for path in self.arrays.get(part, {})}

    def batch_spec(self, rows: int | None = None) -> PartitionSpec:
        """How the first dimension of every batch array is cut."""
        shape = None if rows is None or self.mesh.indivisible == "error" else (rows,)
        return self.resolve(("batch",), shape).spec

    def batch_shards(self, rows: int | None = None) -> int:
        """In how many parts the rows of a batch are cut."""
        (target,) = self.batch_spec(rows)
        return self._shards(target)

    @property
    def gathered_from(self) -> int:
        """From how many devices each weight is gathered where it is used; those of `tensor` keep their own part."""
        return self.mesh.fsdp * self.mesh.context * self.mesh.expert

    @property
    def length_shards(self) -> int:
        """In how many parts the tokens of a row are cut."""
        return self._shards(self.resolve(("batch", "length")).spec[1])

    @property
    def stages(self) -> int:
        """In how many stages the stack of layers works: as many as it is cut into along the axis of that name."""
        stacked = {placed.shards[0] for placed in self.parameters() if placed.axes[:1] == ("layers",)}
        (target,) = self.resolve(("layers",)).spec
        return self.mesh.stage if target == "stage" and stacked == {self.mesh.stage} else 1

    def cuts(self, axes: Axes, shape: Sequence[int]) -> tuple[int, ...]:
        """In how many pieces each dimension of an activation is cut; what does not divide stays whole."""
        return tuple(self._shards(target) for target in self.resolve(axes, shape).spec)

    def constrain(self, mesh: jax.sharding.Mesh) -> Callable[[jax.Array, Axes], jax.Array]:
        """The function that lays an activation out by its logical axes; what does not divide stays whole."""

        def constrained(x: jax.Array, axes: Axes) -> jax.Array:
            spec = self.resolve(axes, x.shape).spec
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

        return constrained

    def arrive(
        self, mesh: jax.sharding.Mesh, of: Sequence[str] = ("trainable", "frozen")
    ) -> Callable[[str, jax.Array], jax.Array]:
        """The function that lays a parameter out, given its path, and with it its gradient.

        It takes the whole array or a slice of a stacked one, and fetches it from the host's memory if it lies there.

        Args:
            mesh: The devices.
            of: The parts of the model whose parameters they are.
        """
        parts = [self.arrays[part] for part in of if part in self.arrays]

        def arrived(path: str, weight: jax.Array) -> jax.Array:
            placed = next(arrays[path] for arrays in parts if path in arrays)
            spec = PartitionSpec(*placed.spec[len(placed.shape) - weight.ndim :])
            if placed.memory == "host":
                weight = jax.device_put(weight, jax.memory.Space.Device)
            return jax.lax.with_sharding_constraint(weight, NamedSharding(mesh, spec))

        return arrived

    def shard_map_call(self, mesh: jax.sharding.Mesh) -> ShardMapCall:
        """The function that computes something on each device's part of activations, cut by their logical axes."""

        def computed(
            function: Callable[..., jax.Array], arrays: tuple[jax.Array, ...], axes: tuple[Axes, ...], out: Axes
        ) -> jax.Array:
            specs = tuple(self.resolve(names, x.shape).spec for names, x in zip(axes, arrays, strict=True))
            shape = jax.eval_shape(function, *arrays).shape
            # Kernels do not say over which axes of the mesh what they give varies.
            cut = jax.shard_map(
                function, mesh=mesh, in_specs=specs, out_specs=self.resolve(out, shape).spec, check_vma=False
            )
            return cut(*arrays)

        return computed

    def device_bytes(self, memory: str = "device") -> dict[str, int]:
        """Bytes on one device, or in the host's memory for one device, by part."""
        return {
            part: sum(p.device_bytes for p in placed.values() if p.memory == memory)
            for part, placed in self.arrays.items()
        }

    def parameters(self) -> Iterator[Placed]:
        """Every array but the optimizer's."""
        return (placed for placed in self if placed.part != "optimizer")

    def dump(self) -> str:
        """One line an array: `part path shape dtype spec bytes/device`; the text of goldens and of layout diffs."""
        return "".join(f"{placed.line}\n" for placed in self)

    def __iter__(self) -> Iterator[Placed]:
        return (placed for part in self.arrays.values() for placed in part.values())

    def _shards(self, target: object) -> int:
        return pieces(target, self.mesh.sizes)


def bits(dtype: str) -> int:
    """Bits of one element."""
    return 4 if dtype in ("int4", "uint4") else jnp.dtype(dtype).itemsize * 8


def dims(shape: Sequence[int]) -> str:
    """A shape as `2x16x32`, or `scalar`."""
    return "x".join(map(str, shape)) or "scalar"


def starred(path: str) -> str:
    """A path with a star for the number of its block: the blocks of a period are alike."""
    return re.sub(r"\bblocks\.\d+\.", "blocks.*.", path)
