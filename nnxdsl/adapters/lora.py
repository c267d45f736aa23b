"""Adapters and few-bit weights put on a model from outside: with `rounding` the one place that imports qwix."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import qwix
from flax import nnx

from nnxdsl.adapters import lora_math, qat
from nnxdsl.adapters.lora_math import A, B, M, disable_adapter, is_adapter, merge, needs_initial_copy
from nnxdsl.config.adapter import Adapter, DoRA, LoRA, LowRank, named, rank_at, scale_at
from nnxdsl.config.quantization import FP8, NF4, Int4, Int8, Quantization
from nnxdsl.errors import NotRegisteredError, Problem, suggest
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.decoder import LayerGroup, example_inputs
from nnxdsl.models.dropout import dropped
from nnxdsl.models.layers.linear import Linear
from nnxdsl.models.moe.layer import ExpertLinear, expert_dot
from nnxdsl.models.params import AbstractModel, ParamSpec, path_in_group
from nnxdsl.sharding.layout import starred

__all__ = [
    "A",
    "B",
    "M",
    "disable_adapter",
    "is_adapter",
    "merge",
    "needs_initial_copy",
]  # of low_rank, for those who know adapters alone

ROUNDING = 1e-6
"""Differences of a norm, as a part of it, that are taken for rounding."""
QVALUE, SCALE = ".array.qvalue", ".array.scale"

_own: ContextVar[bool] = ContextVar("own", default=False)
"""Whether a product is an adapter's own, which is not for qwix."""


def qtype(quantization: Quantization) -> Any:
    """The name or dtype by which qwix knows a quantization."""
    match quantization:
        case NF4():
            return "nf4"
        case Int8():
            return jnp.int8
        case Int4():
            return jnp.int4
        case FP8():
            return jnp.float8_e4m3fn
        case _:
            raise NotRegisteredError(f"{type(quantization).__qualname__} has no qwix type; add it to adapters.qtype")


def adapt(
    adapter: Adapter | None, quantization: Quantization | None, config: DecoderConfig
) -> Callable[[LayerGroup], LayerGroup]:
    """The function that a `Decoder` applies to one period before it stacks it.

    Args:
        adapter: What to add, or None.
        quantization: What to quantise, or None.
        config: Of the decoder, for the example inputs that qwix runs the period on.

    Returns:
        A function from a period to one with the adapters' Variables, and with quantised weights.
    """
    if adapter is not None and not isinstance(adapter, LoRA | DoRA):
        raise NotRegisteredError(
            f"{type(adapter).__qualname__}: nothing knows how to put it on a model; use Adapter.LoRA or Adapter.DoRA"
        )

    def apply(period: LayerGroup) -> LayerGroup:
        dtype = next(p.get_value().dtype for _, p in nnx.to_flat_state(nnx.state(period)))
        modules = [(path, ".".join(map(str, path)), module) for path, module in nnx.iter_modules(period)]
        if quantization is not None and not quantization.freezes:
            meant = [name for _, name, each in modules if isinstance(each, Linear) and _targeted(name, quantization)]
            return qat.apply_qat(period, quantization, meant, example_inputs(config, dtype))
        for path, name, module in modules:
            own = adapter if _targeted(name, adapter) else None
            few = quantization if _targeted(name, quantization) else None
            changed: nnx.Module | None = None
            if isinstance(module, ExpertLinear) and (own or few):
                changed = AdaptedExperts(module, own, few, name)
            elif isinstance(module, Linear) and own:
                changed = AdaptedLinear(module, own, name)
            if changed is not None:
                setattr(reduce(_inside, path[:-1], period), str(path[-1]), changed)
        rules = [
            qwix.QuantizationRule(
                module_path=re.escape(name.replace(".", "/")),
                weight_qtype=qtype(quantization),
                tile_size=quantization.block_size,
            )
            for _, name, module in modules
            if isinstance(module, Linear) and quantization is not None and _targeted(name, quantization)
        ]
        if rules:
            # The example has the weights' dtype: a cast between weight and product would hide the weight from qwix.
            quantised = qwix.quantize_model(period, _QuantizedProvider(rules), *example_inputs(config, dtype))
            assert isinstance(quantised, LayerGroup)
            period = quantised
        for path, variable in nnx.to_flat_state(nnx.state(period)):
            _name_axes(".".join(map(str, path)), variable)
        return period

    return apply


def _inside(node: Any, part: Any) -> Any:
    return node[part] if isinstance(part, int) else getattr(node, part)


def _name_axes(path: str, variable: nnx.Variable) -> None:
    """Give a scale's Variable its own logical axes: qwix copies those of the weight."""
    axes = variable.get_metadata().get("axes")
    if path.endswith(SCALE) and axes is not None:
        *experts, _, outputs = axes
        variable.set_metadata(axes=(*experts, "blocks", outputs))


class _QuantizedProvider(qwix.PtqProvider):
    """qwix's products with few-bit weights; it takes every other weight of such a layer for one that is to become such.

    So it must not see the products of adapters.
    """

    def dot_general(self, *args: Any, **kwargs: Any) -> jax.Array:
        """A product of two arrays."""
        return jax.lax.dot_general(*args, **kwargs) if _own.get() else super().dot_general(*args, **kwargs)

    def einsum(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Any other sum of products."""
        return jnp.einsum(*args, **kwargs) if _own.get() else super().einsum(*args, **kwargs)


@contextmanager
def _own_products() -> Iterator[None]:
    token = _own.set(True)
    try:
        yield
    finally:
        _own.reset(token)


@attrs.frozen
class _Share:
    """What of an adapter is on one layer.

    Attributes:
        rank: Inner dimension.
        scale: Of the product A B.
        dropout: Probability with which an input of the product is left out, where dropout is in force.
        salt: Tells the layer from the others of its block.
        has_magnitude: Whether it is DoRA's.
    """

    rank: int
    scale: float
    dropout: float
    salt: int
    has_magnitude: bool

    @classmethod
    def of(cls, adapter: LowRank, path: str) -> _Share:
        rank, scale = rank_at(adapter, path), scale_at(adapter, path)
        # Layers that leave nothing out are alike, and are traced once.
        salt = zlib.crc32(path.encode()) if adapter.dropout else 0
        return cls(rank, scale, adapter.dropout, salt, isinstance(adapter, DoRA))

    def variables(self, kernel: nnx.Variable) -> dict[str, nnx.LoRAParam]:
        """The adapter's Variables beside a kernel `[..., in, out]`, by what their paths end with.

        Their values are drawn anew for each layer of a stack, see `initial.fill`.
        """
        *experts, inputs, outputs = kernel.shape
        *before, into, out = kernel.get_metadata().get("axes") or (None,) * len(kernel.shape)
        shapes = {A: (*experts, inputs, self.rank), B: (*experts, self.rank, outputs)}
        axes = {A: (*before, into, "rank"), B: (*before, "rank", out)}
        found = {
            end: nnx.LoRAParam(lora_math.initial(end, shape, jax.random.key(0)).astype(kernel.dtype), axes=axes[end])
            for end, shape in shapes.items()
        }
        if self.has_magnitude:
            found[M] = nnx.LoRAParam(lora_math.magnitude(kernel.get_value()), axes=(*before, out))
        return found


def _ratio(share: _Share, weight: jax.Array, a: jax.Array, b: jax.Array, m: jax.Array) -> jax.Array:
    """DoRA's `m / |V|`, `[..., out]` float32; `|V|` is a constant in gradients.

    What it is multiplied with is float32 too: bfloat16 has nothing between 1 and 1.0078, and magnitudes move by less.
    """
    weight, a, b = (jax.lax.stop_gradient(part) for part in (weight, a, b))
    ratio = m.astype(jnp.float32) / lora_math.norm(weight, a, b, share.scale)
    # Programs round the norm in different ways. An adapter that is new is its base in all of them.
    rounding = jnp.where(jnp.abs(ratio - 1) < ROUNDING, 1 - ratio, 0)
    return ratio + jax.lax.stop_gradient(rounding)


def _weight(kernel: Any) -> jax.Array:
    """The weight that a kernel, few bits of qwix's or not, stands for."""
    if isinstance(kernel, nnx.Variable):
        return kernel[...]
    return _restored(jax.tree.map(lambda part: part[...], kernel.array, is_leaf=_is_variable))


class AdaptedLinear(Linear):
    """A Linear with an adapter beside its kernel, which may be in few bits.

    Args:
        plain: the module whose place it takes.
        adapter: what stands beside its kernel.
        path: of the layer within its period.
    """

    kernel_lora_a: nnx.LoRAParam
    kernel_lora_b: nnx.LoRAParam
    kernel_lora_m: nnx.LoRAParam

    def __init__(self, plain: Linear, adapter: LowRank, path: str = "") -> None:
        self.kernel, self.bias, self.share = plain.kernel, plain.bias, _Share.of(adapter, path)
        for end, variable in self.share.variables(plain.kernel).items():
            setattr(self, f"kernel{end}", variable)

    def _product(self, x: jax.Array) -> jax.Array:
        result, share = super()._product(x), self.share
        a, b = self.kernel_lora_a[...], self.kernel_lora_b[...]
        with _own_products():
            low = jnp.dot(dropped(x, share.dropout, share.salt), a.astype(x.dtype))
            result = result + jnp.dot(low, b.astype(x.dtype)) * share.scale
            if not share.has_magnitude:
                return result
            ratio = _ratio(share, _weight(self.kernel), a, b, self.kernel_lora_m[...])
            return (result.astype(jnp.float32) * ratio).astype(x.dtype)


class QuantizedWeight(nnx.Module):
    """A weight `[..., in, out]` as `quantize` makes it, where qwix would have put its own: same leaves, same paths."""

    def __init__(self, weight: nnx.Variable, quantization: Quantization) -> None:
        axes = weight.get_metadata().get("axes")
        array = _quantized(weight.get_value(), quantization)
        self.array = jax.tree.map(lambda part: nnx.Param(part, axes=axes), array)

    def restored(self) -> jax.Array:
        """The weight that the few bits stand for."""
        return _restored(jax.tree.map(lambda part: part[...], self.array, is_leaf=_is_variable))


class AdaptedExperts(ExpertLinear):
    """An ExpertLinear whose kernel has an adapter beside it, or few bits, or both.

    qwix 0.1.8 puts neither on `jax.lax.ragged_dot`, and one B for all experts on an einsum. So this one takes the
    place of the module, with leaves of the same names and, for each expert, the same mathematics as qwix's.

    Args:
        plain: the module whose place it takes.
        adapter: what stands beside each expert's kernel; None for nothing.
        quantization: what the kernel is kept in; None as it is.
        path: of the layer within its period.
    """

    kernel_lora_a: nnx.LoRAParam
    kernel_lora_b: nnx.LoRAParam
    kernel_lora_m: nnx.LoRAParam

    def __init__(
        self, plain: ExpertLinear, adapter: LowRank | None, quantization: Quantization | None, path: str = ""
    ) -> None:
        kernel = plain.kernel
        self.bias, self.share = plain.bias, None if adapter is None else _Share.of(adapter, path)
        self.kernel = kernel if quantization is None else QuantizedWeight(kernel, quantization)
        for end, variable in ({} if self.share is None else self.share.variables(kernel)).items():
            setattr(self, f"kernel{end}", variable)

    def product(self, x: jax.Array, expert: jax.Array) -> jax.Array:
        """`x @ (kernel + scale * A B)` of each slot's expert, in the dtype of `x`; times DoRA's ratio."""
        if isinstance(self.kernel, QuantizedWeight):
            few = self.kernel
            # Unpacked again for the backward pass: what is unpacked is as large as the weight was before.
            result = jax.checkpoint(lambda x: expert_dot(x, few.restored(), expert))(x)
        else:
            result = super().product(x, expert)
        share = self.share
        if share is None:
            return result
        a, b = self.kernel_lora_a[...], self.kernel_lora_b[...]
        low = expert_dot(x, a, expert, axis=None)  # [B, T, k, rank]
        result = result + share.scale * expert_dot(low, b, expert)
        if not share.has_magnitude:
            return result
        weight = self.kernel.restored() if isinstance(self.kernel, QuantizedWeight) else self.kernel[...]
        ratio = _ratio(share, weight, a, b, self.kernel_lora_m[...])  # [E, out]
        each = jnp.take(ratio, expert, axis=0, mode="clip")  # nobody reads the slot of an expert that is none
        return (result.astype(jnp.float32) * each).astype(x.dtype)


def _is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)


def problems(
    adapter: Adapter | None, quantization: Quantization | None, base: Mapping[str, ParamSpec]
) -> list[Problem]:
    """Targets and patterns that match no linear layer, dropout of experts, weights that blocks do not divide."""
    linears = {
        _in_period(path).removesuffix(".kernel"): leaf for path, leaf in base.items() if path.endswith(".kernel")
    }
    names = {part for path in linears for part in path.split(".")[2:]}
    found: list[Problem] = []
    for where, spec in (("adapter", adapter), ("quantization", quantization)):
        for index, target in enumerate(spec.targets if spec is not None else ()):
            if not any(named(target, path) for path in linears):
                message = f"'{target}' matches no linear layer{suggest(target, names)}"
                found.append(Problem(f"{where}.targets.{index}", message))
    if isinstance(adapter, LoRA | DoRA):
        found += _pattern_problems(adapter, linears)
    if quantization is not None:
        meant = {path: leaf for path, leaf in linears.items() if _targeted(path, quantization)}
        if not quantization.freezes:
            found += [
                Problem("quantization.targets", f"{path} is of experts, whose products are not rounded; name others")
                for path in dict.fromkeys(starred(path) for path, leaf in meant.items() if "experts" in leaf.axes)
            ]
        block = quantization.block_size or 1
        sizes = {starred(path): leaf.shape[-2] for path, leaf in meant.items()}
        found += [
            Problem("quantization.block_size", f"{size} inputs of {path} are not divisible by blocks of {block}")
            for path, size in sizes.items()
            if size % block
        ]
    return found


def _pattern_problems(adapter: LowRank, linears: Mapping[str, ParamSpec]) -> Iterator[Problem]:
    """Patterns that change no layer, and dropout where it cannot be."""
    targeted = {path: leaf for path, leaf in linears.items() if _targeted(path, adapter)}
    parts = {part for path in targeted for part in path.split(".")[2:]}
    for field in ("ranks", "alphas"):
        left = set(targeted)
        for index, (target, _) in enumerate(getattr(adapter, field)):
            meant = {path for path in targeted if named(target, path)}
            if not meant:
                message = f"'{target}' matches no layer that the adapter is on{suggest(target, parts)}"
                yield Problem(f"adapter.{field}.{index}.0", message)
            elif not meant & left:
                message = f"'{target}' has no effect: the first that names a layer counts, and others name all of its"
                yield Problem(f"adapter.{field}.{index}.0", message)
            left -= meant
    experts = next((path for path, leaf in targeted.items() if "experts" in leaf.axes), None)
    if adapter.dropout and experts is not None:
        message = (
            f"{starred(experts)} is of experts, which see the tokens in an order of their own, so nothing is left out "
            "there; target other layers, or set 0.0"
        )
        yield Problem("adapter.dropout", message)


def missed(
    adapter: Adapter | None, quantization: Quantization | None, template: AbstractModel, base: Mapping[str, ParamSpec]
) -> list[Problem]:
    """Targeted layers that were left as they were: qwix passes over what it does not recognise without a word."""
    found: list[Problem] = []
    frozen_format = quantization if quantization is not None and quantization.freezes else None
    for where, spec, ending in (("adapter", adapter, A), ("quantization", frozen_format, QVALUE)):
        found += [
            Problem(f"{where}.targets", f"{path} was targeted but is unchanged")
            for path in base
            if path.endswith(".kernel")
            and _targeted(_in_period(path), spec)
            and path + ending not in template.variables
        ]
    return found


def _targeted(path: str, spec: Adapter | Quantization | None) -> bool:
    return spec is not None and any(named(target, path) for target in spec.targets)


def is_targeted(path: str, spec: Adapter | Quantization | None) -> bool:
    """Whether the targets of an adapter or a quantization name the layer that an array belongs to."""
    return _targeted(_in_period(path).rpartition(".")[0], spec)


def _in_period(path: str) -> str:
    """The path of a layer's leaf within its period, which is what targets are matched with."""
    return path_in_group(path)


def quantize(weight: jax.Array, quantization: Quantization) -> tuple[jax.Array, jax.Array]:
    """Values and scales of a weight `[..., in, out]`: a scale for each block of inputs and each output."""
    array = _quantized(weight, quantization)
    return array.qvalue, array.scale


def dequantize(values: jax.Array, scales: jax.Array, quantization: Quantization) -> jax.Array:
    """The weight `[..., in, out]` that values and scales of `quantize` stand for."""
    return _restored(qwix.QArray(values, scales, qtype=qtype(quantization)))


def rounded(weight: jax.Array, quantization: Quantization) -> jax.Array:
    """The weight `[..., in, out]` that its few bits stand for."""
    return _restored(_quantized(weight, quantization))


def _restored(array: Any) -> jax.Array:
    restore = qwix.dequantize
    for _ in range(array.ndim - 2):
        restore = jax.vmap(restore)
    return restore(array)


def _quantized(weight: jax.Array, quantization: Quantization) -> Any:
    blocks = {} if quantization.block_size is None else {0: quantization.block_size}

    def one(matrix: jax.Array) -> Any:
        return qwix.quantize(matrix, qtype(quantization), channelwise_axes=(1,), tiled_axes=blocks)

    for _ in range(weight.ndim - 2):
        one = jax.vmap(one)
    return one(weight)
