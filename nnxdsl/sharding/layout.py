"""The sharding and memory of every array of a program; needs the sizes of a mesh, no devices."""

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

from nnxdsl.config.diloco import worker_axis
from nnxdsl.config.sharding import Mesh as MeshSpec
from nnxdsl.errors import Problem, nearest
from nnxdsl.models.logical_axes import ShardMapCall
from nnxdsl.sharding.rules import DEFAULT_RULES as DEFAULT_RULES
from nnxdsl.sharding.rules import Axes, Resolved, Rules, Tried, mesh_axes, pieces, sizes, with_user_rules
from nnxdsl.sharding.rules import resolve as resolve
from nnxdsl.terminal import html
from nnxdsl.terminal.plan_format import format_bytes, format_mesh, format_shape, format_spec

HOST = "pinned_host"
"""Memory kind of offloaded arrays."""

ACTIVATION_AXES = (
    "batch", "head_batch", "length", "activation_embed", "activation_heads", "activation_kv_heads", "activation_mlp",
    "activation_vocab",
)  # fmt: skip
"""Logical axes of activations only."""


def _dtype_name(dtype: DTypeLike) -> str:
    return jnp.dtype(dtype).name


@attrs.frozen
class Array:
    """One array before it is placed.

    Attributes:
        shape: Global shape.
        dtype: Name of its dtype.
        axes: Logical axes of its dimensions.
        owner: For an array of the optimizer, the path of its parameter; else empty.
        has_worker_axis: Whether its first dimension is that of DiLoCo workers.
    """

    shape: tuple[int, ...]
    dtype: str = attrs.field(converter=_dtype_name)
    axes: Axes
    owner: str = ""
    has_worker_axis: bool = False


@attrs.frozen(kw_only=True)
class Placed(Array):
    """One array with its sharding.

    Attributes:
        path: Dotted path.
        part: "frozen", "trainable", "reference", "optimizer" or "teacher".
        rules: The rules by which it was resolved.
        resolved: Its partition.
        shards: Number of shards of each dimension.
        replicas: Number of devices that hold the same shard.
        memory: "device", or "host" if offloaded.
    """

    path: str
    part: str
    rules: Rules
    resolved: Resolved
    shards: tuple[int, ...]
    replicas: int
    memory: str

    @property
    def spec(self) -> PartitionSpec:
        """The partition spec."""
        return self.resolved.spec

    @property
    def device_shape(self) -> tuple[int, ...]:
        """Shape of the shard on one device."""
        return tuple(-(-size // shards) for size, shards in zip(self.shape, self.shards, strict=True))

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return -(-math.prod(self.shape) * bits(self.dtype) // 8)

    @property
    def device_bytes(self) -> int:
        """Bytes of the shard on one device; four-bit values count as half a byte."""
        return -(-math.prod(self.device_shape) * bits(self.dtype) // 8)

    @property
    def used_axes(self) -> frozenset[str]:
        """The mesh axes that it is sharded over."""
        return frozenset(axis for target in self.spec for axis in mesh_axes(target))

    @property
    def line(self) -> str:
        """`part path shape dtype spec bytes/device`."""
        host = "" if self.memory == "device" else f" {self.memory}"
        shape = format_shape(self.shape)
        return f"{self.part} {self.path} {shape} {self.dtype} {tuple(self.spec)} {self.device_bytes}{host}"


class Layout:
    """Every array of a program with its sharding on a mesh.

    Args:
        mesh: The mesh, with the user's rules.
        parts: The arrays of each part, by path.
        offload: Parts in host memory.
        workers: Number of DiLoCo workers.
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

    def __repr__(self) -> str:
        arrays = list(self)
        size = format_bytes(sum(placed.device_bytes for placed in arrays))
        return f"Layout({len(arrays)} arrays on {format_mesh(self.mesh.sizes)}, {size} per device)"

    def _repr_html_(self) -> str:
        """A table of the arrays; those of all blocks with the same layout share a row."""
        groups: dict[tuple[str, ...], list[Placed]] = {}
        for placed in self:
            spec, part = format_spec(list(placed.spec)), placed.part
            part = part if placed.memory == "device" else f"{part} ({placed.memory})"
            row = (part, starred(placed.path), format_shape(placed.shape), placed.dtype, spec)
            groups.setdefault((*row, format_shape(placed.device_shape)), []).append(placed)
        rows = [
            [*row, len(group), f"x{group[0].replicas}", format_bytes(sum(placed.device_bytes for placed in group))]
            for row, group in groups.items()
        ]
        head = ["part", "path", "shape", "dtype", "partition", "per device", "arrays", "copies", "size"]
        return html.table(head, rows, title=repr(self))

    def on(self, mesh: MeshSpec) -> Layout:
        """The same arrays on another mesh."""
        return Layout(mesh, self._parts, self.offload, self.workers)

    def with_part(self, part: str, arrays: Mapping[str, Array]) -> Layout:
        """The same with one more part."""
        return Layout(self.mesh, {**self._parts, part: arrays}, self.offload, self.workers)

    @property
    def within_worker(self) -> Layout:
        """The layout within one DiLoCo worker, which has a part of the mesh if workers are sharded over an axis."""
        axis = worker_axis(self.workers, self.mesh)
        mesh = self.mesh if axis is None else attrs.evolve(self.mesh, **{axis: 1}, slices=1)
        return Layout(mesh, {part: arrays for part, arrays in self._parts.items() if part != "optimizer"}, self.offload)

    @property
    def workers_per_device(self) -> int:
        """Number of workers of which a device holds a part."""
        axis = worker_axis(self.workers, self.mesh)
        return self.workers if axis is None else self.workers // self.mesh.sizes[axis]

    def resolve(self, axes: Axes, shape: Sequence[int] | None = None, path: str = "") -> Resolved:
        """The partition of an array or an activation on this mesh."""
        return resolve(axes, self._rules_of(path), self.mesh.sizes, shape=shape)

    def _rules_of(self, path: str) -> Rules:
        path_rules = [
            rule for pattern, rules in self.mesh.array_rules if fnmatch.fnmatchcase(path, pattern) for rule in rules
        ]
        return (*path_rules, *self.rules) if path_rules else self.rules

    def _place(self, part: str, path: str, array: Array) -> Placed:
        # Optimizer state follows the rules of its parameter, so that both have the same sharding.
        rules = self._rules_of(array.owner or path)
        shape = array.shape if self.mesh.indivisible == "replicate" else None
        resolved = resolve(array.axes, rules, self.mesh.sizes, shape=shape)
        if array.has_worker_axis and (axis := worker_axis(self.workers, self.mesh)):
            within = resolve(array.axes, rules, self.mesh.sizes | {axis: 1}, shape=shape)
            tried = Tried(0, "workers", None, axis, "taken", "each worker has its own devices")
            spec, raw = (PartitionSpec(axis, *tuple(one)[1:]) for one in (within.spec, within.raw))
            resolved = Resolved(spec, raw, (*within.trace, tried))
        if part == "optimizer" and self.mesh.zero1:
            resolved = self._over_data(array, resolved)
        shards = tuple(self._shards(target) for target in resolved.spec)
        return Placed(
            **attrs.asdict(array, recurse=False),
            path=path,
            part=part,
            rules=rules,
            resolved=resolved,
            shards=shards,
            replicas=self.mesh.device_count // math.prod(shards),
            memory="host" if part in self.offload else "device",
        )

    def _over_data(self, array: Array, resolved: Resolved) -> Resolved:
        """ZeRO stage 1: shards the largest dimension that `data` divides over it, unless `data` is in use."""
        data = self.mesh.data
        if data == 1 or any("data" in mesh_axes(target) for target in resolved.raw):
            return resolved
        spec = list(resolved.spec)
        shards = [self._shards(target) for target in spec]
        local = [size // count for size, count in zip(array.shape, shards, strict=True)]
        divisible = [d for d, size in enumerate(array.shape) if size % (shards[d] * data) == 0]
        if not divisible:
            return resolved
        best = max(divisible, key=lambda dimension: local[dimension])
        # `data` is last: it splits the parameter's own shard, so that updates move between replicas only.
        axes = (*mesh_axes(spec[best]), "data")
        spec[best] = axes if len(axes) > 1 else "data"
        why = "ZeRO stage 1: optimizer state is sharded over data"
        tried = Tried(best, str(array.axes[best]), None, spec[best], "taken", why)
        return Resolved(PartitionSpec(*spec), resolved.raw, (*resolved.trace, tried))

    def problems(self) -> list[Problem]:
        """Dimensions that their mesh axes do not divide, and rules for axes or paths that do not exist.

        The blocks of a period are named once, with a star for their number.
        """
        problems: list[Problem] = []
        # Arrays of the optimizer have the sharding of their parameters, hence no problems of their own.
        for placed in self.parameters():
            for dimension, (size, shards) in enumerate(zip(placed.shape, placed.shards, strict=True)):
                if size % shards:
                    cut = sizes(placed.spec[dimension], self.mesh.sizes)
                    message = f"axis {dimension} has {size} rows, not divisible by {cut}"
                    problems.append(Problem(starred(placed.path), message))
        problems += self._rule_problems()
        return list(dict.fromkeys(problems))

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
            axes = {axis for placed in matched for axis in placed.axes if isinstance(axis, str)}
            for number, (logical, _) in enumerate(rules):
                if matched and logical not in axes:
                    message = f"no array with a path like '{pattern}' has an axis '{logical}'{nearest(logical, axes)}"
                    yield Problem(f"mesh.array_rules.{index}.1.{number}", message)

    def batch_problems(self, rows: int, path: str = "microbatch_size") -> list[Problem]:
        """The problem of micro-batches whose rows the mesh does not divide; `path` is the field that sets them."""
        if self.workers > 1:
            per_worker, rest = divmod(rows, self.workers)
            if rest:
                return [Problem(path, f"{rows} rows at a time cannot be split over {self.workers} workers")]
            return [
                attrs.evolve(p, message=f"of each worker {p.message}")
                for p in self.within_worker.batch_problems(per_worker, path)
            ]
        (target,) = self.resolve(("batch",)).spec
        if self.mesh.indivisible == "replicate" or rows % self._shards(target) == 0:
            return []
        split = sizes(target, self.mesh.sizes)
        return [Problem(path, f"{rows} rows at a time cannot be split over {split}")]

    def sharding(
        self, part: str, path: str, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, *, fetched: bool = False
    ) -> NamedSharding:
        """The sharding of one array; `fetched`: on the device even if it is offloaded."""
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
        """The partition of the first dimension of batch arrays."""
        shape = None if rows is None or self.mesh.indivisible == "error" else (rows,)
        return self.resolve(("batch",), shape).spec

    def batch_shards(self, rows: int | None = None) -> int:
        """Number of shards of the rows of a batch."""
        (target,) = self.batch_spec(rows)
        return self._shards(target)

    @property
    def gathered_from(self) -> int:
        """Number of devices from which a weight is gathered before its use; shards over `tensor` are not gathered."""
        return self.mesh.fsdp * self.mesh.context * self.mesh.expert

    @property
    def length_shards(self) -> int:
        """Number of shards of the tokens of a row."""
        return self._shards(self.resolve(("batch", "length")).spec[1])

    @property
    def stages(self) -> int:
        """Number of pipeline stages: `mesh.stage` if all stacks of layers are sharded over it, else 1."""
        stacked = {placed.shards[0] for placed in self.parameters() if placed.axes[:1] == ("layers",)}
        (target,) = self.resolve(("layers",)).spec
        return self.mesh.stage if target == "stage" and stacked == {self.mesh.stage} else 1

    def shard_counts(self, axes: Axes, shape: Sequence[int]) -> tuple[int, ...]:
        """Number of shards of each dimension of an activation; an indivisible one is not sharded."""
        return tuple(self._shards(target) for target in self.resolve(axes, shape).spec)

    def constrain(self, mesh: jax.sharding.Mesh) -> Callable[[jax.Array, Axes], jax.Array]:
        """The function that constrains an activation to the sharding of its logical axes; see `shard_counts`."""

        def constrained(x: jax.Array, axes: Axes) -> jax.Array:
            spec = self.resolve(axes, x.shape).spec
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

        return constrained

    def shard_weights(
        self, mesh: jax.sharding.Mesh, parts: Sequence[str] = ("trainable", "frozen")
    ) -> Callable[[str, jax.Array], jax.Array]:
        """The function from a parameter's path and value to the value with its sharding, which its gradient gets, too.

        It takes a whole array of `parts` or a slice of a stacked one, and fetches it from host memory if offloaded.
        """
        arrays_of = [self.arrays[part] for part in parts if part in self.arrays]

        def sharded(path: str, weight: jax.Array) -> jax.Array:
            placed = next(arrays[path] for arrays in arrays_of if path in arrays)
            spec = PartitionSpec(*placed.spec[len(placed.shape) - weight.ndim :])
            if placed.memory == "host":
                weight = jax.device_put(weight, jax.memory.Space.Device)
            return jax.lax.with_sharding_constraint(weight, NamedSharding(mesh, spec))

        return sharded

    def shard_map_call(self, mesh: jax.sharding.Mesh) -> ShardMapCall:
        """`jax.shard_map` of a function over activations by their logical axes."""

        def computed(
            function: Callable[..., jax.Array], arrays: tuple[jax.Array, ...], axes: tuple[Axes, ...], out: Axes
        ) -> jax.Array:
            specs = tuple(self.resolve(names, x.shape).spec for names, x in zip(axes, arrays, strict=True))
            shape = jax.eval_shape(function, *arrays).shape
            # check_vma: kernels do not declare over which mesh axes their outputs vary.
            sharded = jax.shard_map(
                function, mesh=mesh, in_specs=specs, out_specs=self.resolve(out, shape).spec, check_vma=False
            )
            return sharded(*arrays)

        return computed

    def device_bytes(self, memory: str = "device") -> dict[str, int]:
        """Bytes per device by part, in device or in host memory."""
        return {
            part: sum(p.device_bytes for p in placed.values() if p.memory == memory)
            for part, placed in self.arrays.items()
        }

    def parameters(self) -> Iterator[Placed]:
        """Every array but those of the optimizer."""
        return (placed for placed in self if placed.part != "optimizer")

    def dump(self) -> str:
        """One line per array: `part path shape dtype spec bytes/device`."""
        return "".join(f"{placed.line}\n" for placed in self)

    def __iter__(self) -> Iterator[Placed]:
        return (placed for part in self.arrays.values() for placed in part.values())

    def _shards(self, target: object) -> int:
        return pieces(target, self.mesh.sizes)


def bits(dtype: str) -> int:
    """Bits per element."""
    return 4 if dtype in ("int4", "uint4") else jnp.dtype(dtype).itemsize * 8


def starred(path: str) -> str:
    """A path with a star for the number of its block."""
    return re.sub(r"\bblocks\.\d+\.", "blocks.*.", path)


def abstract_arrays(layout: Layout, mesh: jax.sharding.Mesh, part: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of a part's arrays, by path; empty without the part."""
    return {
        path: jax.ShapeDtypeStruct(p.shape, jnp.dtype(p.dtype), sharding=layout.sharding(part, path, mesh))
        for path, p in layout.arrays.get(part, {}).items()
    }
