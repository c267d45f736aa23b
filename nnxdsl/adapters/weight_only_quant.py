"""Weight-only quantization with qwix: frozen weights in 4 or 8 bits with a scale for each block of inputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from flax import nnx

from nnxdsl.config.quantization import Quantization
from nnxdsl.errors import NotRegisteredError
from nnxdsl.models.decoder import LayerGroup

QVALUE, SCALE = ".array.qvalue", ".array.scale"
"""Suffixes of the paths of a quantized weight: values and scales."""

_skips_quantization: ContextVar[bool] = ContextVar("skips_quantization", default=False)


def qtype(quantization: Quantization) -> Any:
    """The name or dtype of a quantization in qwix.

    Raises:
        NotRegisteredError: The class has no `weight_dtype`.
    """
    name = quantization.weight_dtype
    if not name:
        raise NotRegisteredError(f"{type(quantization).__qualname__} has no weight_dtype, the name of a dtype of qwix")
    return name if name == "nf4" else getattr(jnp, name)


def quantize(weight: jax.Array, quantization: Quantization) -> tuple[jax.Array, jax.Array]:
    """Values and scales of a weight `[..., in, out]`: a scale for each block of inputs and each output."""
    array = _quantized(weight, quantization)
    return array.qvalue, array.scale


def dequantize(values: jax.Array, scales: jax.Array, quantization: Quantization) -> jax.Array:
    """The weight `[..., in, out]` from the values and scales of `quantize`."""
    return _dequantized(qwix.QArray(values, scales, qtype=qtype(quantization)))


def rounded(weight: jax.Array, quantization: Quantization) -> jax.Array:
    """A weight `[..., in, out]` after quantization and dequantization."""
    return _dequantized(_quantized(weight, quantization))


def _quantized(weight: jax.Array, quantization: Quantization) -> Any:
    blocks = {} if quantization.block_size is None else {0: quantization.block_size}

    def quantize_matrix(matrix: jax.Array) -> Any:
        return qwix.quantize(matrix, qtype(quantization), channelwise_axes=(1,), tiled_axes=blocks)

    for _ in range(weight.ndim - 2):
        quantize_matrix = jax.vmap(quantize_matrix)
    return quantize_matrix(weight)


def _dequantized(array: Any) -> jax.Array:
    dequantize_array = qwix.dequantize
    for _ in range(array.ndim - 2):
        dequantize_array = jax.vmap(dequantize_array)
    return dequantize_array(array)


class QuantizedWeight(nnx.Module):
    """A quantized weight `[..., in, out]` with the same arrays and paths as qwix's own."""

    def __init__(self, weight: nnx.Variable, quantization: Quantization) -> None:
        axes = weight.get_metadata().get("axes")
        array = _quantized(weight.get_value(), quantization)
        self.array = jax.tree.map(lambda part: nnx.Param(part, axes=axes), array)

    def dequantize(self) -> jax.Array:
        """The weight `[..., in, out]`."""
        return dequantized_kernel(self)


def dequantized_kernel(kernel: Any) -> jax.Array:
    """The weight `[..., in, out]` of a kernel: a Variable, or one that is quantized by qwix or `QuantizedWeight`."""
    if isinstance(kernel, nnx.Variable):
        return kernel[...]
    return _dequantized(
        jax.tree.map(lambda part: part[...], kernel.array, is_leaf=lambda node: isinstance(node, nnx.Variable))
    )


def quantize_linears(
    period: LayerGroup, quantization: Quantization, names: Sequence[str], inputs: Sequence[Any]
) -> LayerGroup:
    """Quantizes the weights of linear layers.

    Args:
        period: One layer group, before the groups are stacked.
        quantization: The format.
        names: Dotted paths of the linear layers.
        inputs: Example inputs with which qwix traces the group, in the dtype of the weights: a cast between a weight
            and its product would hide the weight from qwix.
    """
    rules = [
        qwix.QuantizationRule(
            module_path=re.escape(name.replace(".", "/")),
            weight_qtype=qtype(quantization),
            tile_size=quantization.block_size,
        )
        for name in names
    ]
    quantized = qwix.quantize_model(period, _QuantizedProvider(rules), *inputs)
    assert isinstance(quantized, LayerGroup)
    return quantized


def name_scale_axes(path: str, variable: nnx.Variable) -> None:
    """Gives a scale's Variable its own logical axes: qwix copies those of the weight."""
    axes = variable.get_metadata().get("axes")
    if path.endswith(SCALE) and axes is not None:
        *experts, _, outputs = axes
        variable.set_metadata(axes=(*experts, "blocks", outputs))


class _QuantizedProvider(qwix.PtqProvider):
    """qwix's products with quantized weights, except those of adapters, whose weights it would quantize as well."""

    def dot_general(self, *args: Any, **kwargs: Any) -> jax.Array:
        """`jax.lax.dot_general`."""
        skips = _skips_quantization.get()
        return jax.lax.dot_general(*args, **kwargs) if skips else super().dot_general(*args, **kwargs)

    def einsum(self, *args: Any, **kwargs: Any) -> jax.Array:
        """`jax.numpy.einsum`."""
        return jnp.einsum(*args, **kwargs) if _skips_quantization.get() else super().einsum(*args, **kwargs)


@contextmanager
def without_quantization() -> Iterator[None]:
    """Hides the products of the block from qwix."""
    token = _skips_quantization.set(True)
    try:
        yield
    finally:
        _skips_quantization.reset(token)
