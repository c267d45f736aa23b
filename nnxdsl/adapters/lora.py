"""LoRA and DoRA modules: linear layers and experts with an adapter, and their insertion into a layer group."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache, reduce
from typing import Any

import attrs
import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from nnxdsl.adapters import lora_math, qat
from nnxdsl.adapters.lora_math import A, B, M
from nnxdsl.adapters.targets import matches
from nnxdsl.adapters.weight_only_quant import (
    QuantizedWeight,
    dequantized_kernel,
    name_scale_axes,
    quantize_linears,
    without_quantization,
)
from nnxdsl.config.adapter import Adapter, DoRA, LoRA, LowRank, rank_at, scale_at
from nnxdsl.config.quantization import Quantization
from nnxdsl.errors import NotRegisteredError
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.decoder import Decoder, LayerGroup, example_inputs
from nnxdsl.models.dropout import dropped
from nnxdsl.models.layers.linear import Linear
from nnxdsl.models.moe.layer import ExpertLinear, expert_dot
from nnxdsl.models.params import AbstractModel, abstract

ROUNDING = 1e-6
"""Relative differences of a norm below this are attributed to rounding."""


def abstract_decoder(
    config: DecoderConfig,
    dtype: DTypeLike = jnp.float32,
    adapter: Adapter | None = None,
    quantization: Quantization | None = None,
) -> AbstractModel:
    """A decoder without arrays, with an adapter and quantization where given; the same object for equal arguments.

    Args:
        config: Of the decoder.
        dtype: Of its parameters.
        adapter: The adapter to add, or None.
        quantization: The quantization of weights or products, or None.
    """
    return _abstract_decoder(config, jnp.dtype(dtype), adapter, quantization)


@lru_cache(maxsize=32)  # tracing takes 0.2 s, with quantization 1 to 3 s; a plan and its run ask for the same ones
def _abstract_decoder(
    config: DecoderConfig, dtype: jnp.dtype, adapter: Adapter | None, quantization: Quantization | None
) -> AbstractModel:
    change = adapt(adapter, quantization, config)
    return abstract(lambda: Decoder(config, rngs=nnx.Rngs(0), param_dtype=dtype, adapt=change))


def adapt(
    adapter: Adapter | None, quantization: Quantization | None, config: DecoderConfig
) -> Callable[[LayerGroup], LayerGroup]:
    """The function that a `Decoder` applies to a layer group before the groups are stacked.

    Args:
        adapter: The adapter to add, or None.
        quantization: The quantization of weights or products, or None.
        config: Of the decoder, for the example inputs with which qwix traces the group.

    Returns:
        A function from a layer group to one with the adapters' Variables and quantized weights.
    """
    if adapter is not None and not isinstance(adapter, LoRA | DoRA):
        raise NotRegisteredError(
            f"{type(adapter).__qualname__}: cannot be applied to a model; use Adapter.LoRA or Adapter.DoRA"
        )

    def apply(period: LayerGroup) -> LayerGroup:
        dtype = next(p.get_value().dtype for _, p in nnx.to_flat_state(nnx.state(period)))
        modules = [(path, ".".join(map(str, path)), module) for path, module in nnx.iter_modules(period)]
        linears = [name for _, name, each in modules if isinstance(each, Linear) and matches(name, quantization)]
        if quantization is not None and not quantization.freezes:
            return qat.apply_qat(period, quantization, linears, example_inputs(config, dtype))
        for path, name, module in modules:
            module_adapter = adapter if matches(name, adapter) else None
            module_quantization = quantization if matches(name, quantization) else None
            changed: nnx.Module | None = None
            if isinstance(module, ExpertLinear) and (module_adapter or module_quantization):
                changed = AdaptedExperts(module, module_adapter, module_quantization, name)
            elif isinstance(module, Linear) and module_adapter:
                changed = AdaptedLinear(module, module_adapter, name)
            if changed is not None:
                setattr(reduce(_child, path[:-1], period), str(path[-1]), changed)
        if quantization is not None and linears:
            period = quantize_linears(period, quantization, linears, example_inputs(config, dtype))
        for path, variable in nnx.to_flat_state(nnx.state(period)):
            name_scale_axes(".".join(map(str, path)), variable)
        return period

    return apply


def _child(node: Any, part: Any) -> Any:
    return node[part] if isinstance(part, int) else getattr(node, part)


@attrs.frozen
class _LayerAdapter:
    """The settings of an adapter for one layer.

    Attributes:
        rank: Inner dimension.
        scale: Factor of the product A B.
        dropout: Dropout probability of the product's inputs, in training.
        salt: Distinguishes the dropout masks of the layers in a block.
        has_magnitude: Whether it is DoRA's.
    """

    rank: int
    scale: float
    dropout: float
    salt: int
    has_magnitude: bool

    @classmethod
    def from_adapter(cls, adapter: LowRank, path: str) -> _LayerAdapter:
        rank, scale = rank_at(adapter, path), scale_at(adapter, path)
        # Without dropout the same for all layers, so that equal ones are traced once.
        salt = zlib.crc32(path.encode()) if adapter.dropout else 0
        return cls(rank, scale, adapter.dropout, salt, isinstance(adapter, DoRA))

    def variables(self, kernel: nnx.Variable) -> dict[str, nnx.LoRAParam]:
        """The adapter's Variables for a kernel `[..., in, out]`, by the suffix of their paths.

        `init_adapter` draws their values again for each layer of a stack.
        """
        *experts, inputs, outputs = kernel.shape
        *before, into, out = kernel.get_metadata().get("axes") or (None,) * len(kernel.shape)
        shapes = {A: (*experts, inputs, self.rank), B: (*experts, self.rank, outputs)}
        axes = {A: (*before, into, "rank"), B: (*before, "rank", out)}
        variables = {
            end: nnx.LoRAParam(lora_math.initial(end, shape, jax.random.key(0)).astype(kernel.dtype), axes=axes[end])
            for end, shape in shapes.items()
        }
        if self.has_magnitude:
            variables[M] = nnx.LoRAParam(lora_math.magnitude(kernel.get_value()), axes=(*before, out))
        return variables


def _ratio(layer_adapter: _LayerAdapter, weight: jax.Array, a: jax.Array, b: jax.Array, m: jax.Array) -> jax.Array:
    """DoRA's `m / |V|`, `[..., out]` float32; `|V|` is a constant in gradients.

    The product with it is in float32 too: bfloat16 has no value between 1 and 1.0078, and magnitudes change by less.
    """
    weight, a, b = (jax.lax.stop_gradient(part) for part in (weight, a, b))
    ratio = m.astype(jnp.float32) / lora_math.norm(weight, a, b, layer_adapter.scale)
    # Compiled programs round the norm differently; this makes a new adapter equal to its base in all of them.
    rounding = jnp.where(jnp.abs(ratio - 1) < ROUNDING, 1 - ratio, 0)
    return ratio + jax.lax.stop_gradient(rounding)


class AdaptedLinear(Linear):
    """A Linear with an adapter on its kernel, which may be quantized.

    Args:
        plain: The module that it replaces.
        adapter: The adapter of the kernel.
        path: The path of the layer within its layer group.
    """

    kernel_lora_a: nnx.LoRAParam
    kernel_lora_b: nnx.LoRAParam
    kernel_lora_m: nnx.LoRAParam

    def __init__(self, plain: Linear, adapter: LowRank, path: str = "") -> None:
        self.kernel, self.bias, self.layer_adapter = plain.kernel, plain.bias, _LayerAdapter.from_adapter(adapter, path)
        for end, variable in self.layer_adapter.variables(plain.kernel).items():
            setattr(self, f"kernel{end}", variable)

    def _product(self, x: jax.Array) -> jax.Array:
        result, layer_adapter = super()._product(x), self.layer_adapter
        a, b = self.kernel_lora_a[...], self.kernel_lora_b[...]
        with without_quantization():
            low = jnp.dot(dropped(x, layer_adapter.dropout, layer_adapter.salt), a.astype(x.dtype))
            result = result + jnp.dot(low, b.astype(x.dtype)) * layer_adapter.scale
            if not layer_adapter.has_magnitude:
                return result
            ratio = _ratio(layer_adapter, dequantized_kernel(self.kernel), a, b, self.kernel_lora_m[...])
            return (result.astype(jnp.float32) * ratio).astype(x.dtype)


class AdaptedExperts(ExpertLinear):
    """An ExpertLinear whose kernel has an adapter, or is quantized, or both.

    qwix 0.1.8 supports neither on `jax.lax.ragged_dot`, and uses one B for all experts on an einsum. So this module
    replaces the layer, with arrays of the same names and, for each expert, the same mathematics as qwix's.

    Args:
        plain: The module that it replaces.
        adapter: The adapter of each expert's kernel; None for none.
        quantization: The format of the kernel; None for no quantization.
        path: The path of the layer within its layer group.
    """

    kernel_lora_a: nnx.LoRAParam
    kernel_lora_b: nnx.LoRAParam
    kernel_lora_m: nnx.LoRAParam

    def __init__(
        self, plain: ExpertLinear, adapter: LowRank | None, quantization: Quantization | None, path: str = ""
    ) -> None:
        kernel = plain.kernel
        self.bias = plain.bias
        self.layer_adapter = None if adapter is None else _LayerAdapter.from_adapter(adapter, path)
        self.kernel = kernel if quantization is None else QuantizedWeight(kernel, quantization)
        for end, variable in ({} if self.layer_adapter is None else self.layer_adapter.variables(kernel)).items():
            setattr(self, f"kernel{end}", variable)

    def product(self, x: jax.Array, expert: jax.Array) -> jax.Array:
        """`x @ (kernel + scale * A B)` of each slot's expert, in the dtype of `x`; times DoRA's ratio."""
        if isinstance(self.kernel, QuantizedWeight):
            quantized = self.kernel
            # Dequantized again in the backward pass: keeping the result would take as much memory as the weight.
            result = jax.checkpoint(lambda x: expert_dot(x, quantized.dequantize(), expert))(x)
        else:
            result = super().product(x, expert)
        layer_adapter = self.layer_adapter
        if layer_adapter is None:
            return result
        a, b = self.kernel_lora_a[...], self.kernel_lora_b[...]
        low = expert_dot(x, a, expert, axis=None)  # [B, T, k, rank]
        result = result + layer_adapter.scale * expert_dot(low, b, expert)
        if not layer_adapter.has_magnitude:
            return result
        ratio = _ratio(layer_adapter, dequantized_kernel(self.kernel), a, b, self.kernel_lora_m[...])  # [E, out]
        each = jnp.take(ratio, expert, axis=0, mode="clip")  # slots without an expert are not used
        return (result.astype(jnp.float32) * each).astype(x.dtype)
