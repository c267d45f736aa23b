"""Products of linear layers in few bits while all weights are trained: the rules by which qwix puts them there.

Weights stay as they are, so nothing of this is seen in a state or a checkpoint.
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
"""By which dtype qwix knows a format."""


def formats(quantization: Quantization) -> tuple[Any, Any, Any]:
    """What weights, activations and gradients are rounded to; None leaves them as they are."""
    match quantization:
        case QAT(weights=weights, activations=activations):
            return QTYPES[weights], None if activations is None else QTYPES[activations], None
        case Int8Training():
            return jnp.int8, jnp.int8, jnp.int8
        case FP8Training():
            return jnp.float8_e4m3fn, jnp.float8_e4m3fn, jnp.float8_e5m2
        case _:
            raise NotRegisteredError(f"{type(quantization).__qualname__} has no formats; add it to rounding.formats")


class _Provider(qwix.QtProvider):
    """Products as qwix rounds them, of `jnp.dot` as well, which qwix 0.1.8 sees only where it freezes."""

    def get_intercept_map(self) -> dict[str, Any]:
        """What is called in the place of jax's own functions."""
        return {**super().get_intercept_map(), "jax.numpy.dot": self.dot}

    def dot(self, a: jax.Array, b: jax.Array, **options: Any) -> jax.Array:
        """`[..., in] @ [in, out]`."""
        return self.dot_general(a, b, (((a.ndim - 1,), (b.ndim - 2,)), ((), ())), **options)


def apply_qat(
    period: LayerGroup, quantization: Quantization, names: Sequence[str], inputs: Sequence[Any]
) -> LayerGroup:
    """The period with its products rounded.

    Args:
        period: One period of layers, before they are stacked.
        quantization: What is rounded to what.
        names: Dotted paths of the linear layers that are meant.
        inputs: What the period is run on, so that qwix sees its products.

    Raises:
        PlanError: a layer whose product qwix does not see.
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
