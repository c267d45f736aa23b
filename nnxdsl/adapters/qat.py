"""Quantization-aware and low-precision training with qwix: products of linear layers are quantized, weights are not.

The weights keep their dtype, so that states and checkpoints are the same as without it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import qwix

from nnxdsl.config.quantization import QAT, FP8Training, Int8Training, Quantization
from nnxdsl.errors import NotRegisteredError, PlanError, Problem
from nnxdsl.models.decoder import LayerGroup

QTYPES: dict[str, Any] = {"int4": jnp.int4, "int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
"""The dtype of a format in qwix."""


def formats(quantization: Quantization) -> tuple[Any, Any, Any]:
    """The dtypes of weights, activations and gradients in products; None for no quantization."""
    match quantization:
        case QAT(weights=weights, activations=activations):
            return QTYPES[weights], None if activations is None else QTYPES[activations], None
        case Int8Training():
            return jnp.int8, jnp.int8, jnp.int8
        case FP8Training():
            return jnp.float8_e4m3fn, jnp.float8_e4m3fn, jnp.float8_e5m2
        case _:
            raise NotRegisteredError(f"{type(quantization).__qualname__} has no formats; add it to qat.formats")


class _Provider(qwix.QtProvider):
    """qwix's quantized products, also for `jnp.dot`, which qwix 0.1.8 intercepts only with frozen weights."""

    def get_intercept_map(self) -> dict[str, Any]:
        """The replacements of jax's own functions."""
        return {**super().get_intercept_map(), "jax.numpy.dot": self.dot}

    def dot(self, a: jax.Array, b: jax.Array, **options: Any) -> jax.Array:
        """`[..., in] @ [in, out]`."""
        return self.dot_general(a, b, (((a.ndim - 1,), (b.ndim - 2,)), ((), ())), **options)


def apply_qat(
    period: LayerGroup, quantization: Quantization, names: Sequence[str], inputs: Sequence[Any]
) -> LayerGroup:
    """Quantizes the products of linear layers.

    Args:
        period: One layer group, before the groups are stacked.
        quantization: The formats.
        names: Dotted paths of the linear layers.
        inputs: Example inputs with which qwix traces the group.

    Raises:
        PlanError: qwix does not recognize the product of a layer.
    """
    weights, activations, gradients = formats(quantization)
    rules = [
        qwix.QtRule(
            module_path=re.escape(name.replace(".", "/")),
            weight_qtype=weights,
            act_qtype=activations,
            bwd_qtype=gradients,
            tile_size=quantization.block_size,
        )
        for name in names
    ]
    provider = _Provider(rules)
    changed = qwix.quantize_model(period, provider, *inputs)
    assert isinstance(changed, LayerGroup)
    idle = {rule.module_path for rule in provider.get_unused_rules()}
    unseen = [name for name, rule in zip(names, rules, strict=True) if rule.module_path in idle]
    if unseen:
        raise PlanError([Problem("quantization.targets", f"{name} was targeted but is unchanged") for name in unseen])
    return changed
