"""Optimizers as optax transformations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import singledispatch
from typing import Any

import jax.numpy as jnp
import optax
from optax import contrib

from nnxdsl.config.optimizer import SGD, Adafactor, AdamW, Lion, Muon, Optimizer
from nnxdsl.errors import NotRegisteredError, Problem
from nnxdsl.optim import adafactor
from nnxdsl.optim.param_filters import matches, unmatched_patterns
from nnxdsl.optim.param_roles import Role
from nnxdsl.optim.schedules import Curve

PATTERNS = ("undecayed", "by_adamw")
"""Fields of optimizers that are patterns for paths of arrays."""


@singledispatch
def build(optimizer: Optimizer, curve: Curve, roles: Mapping[str, Role]) -> optax.GradientTransformation:
    """The optax transformation of an optimizer, from its learning rate and the role of each trainable path.

    Register an `Optimizer` of your own here.
    """
    name = type(optimizer).__name__
    raise NotRegisteredError(
        f"no update rule is registered for {type(optimizer).__qualname__}; write\n"
        f"  from nnxdsl.optim import optimizers\n"
        f"  @optimizers.build.register({name})\n"
        f"  def _(spec, curve, roles): return optax.GradientTransformation(...)"
    )


def problems(optimizer: Optimizer, roles: Mapping[str, Role]) -> list[Problem]:
    """Patterns of an optimizer that match none of the arrays that it updates."""
    return [
        problem
        for field in PATTERNS
        for problem in unmatched_patterns(f"optimizer.{field}", getattr(optimizer, field, ()), roles)
    ]


@build.register
def _(optimizer: AdamW, curve: Curve, roles: Mapping[str, Role]) -> optax.GradientTransformation:
    direction = optax.scale_by_adam(b1=optimizer.b1, b2=optimizer.b2, eps=optimizer.eps)
    direction = _with_state_dtypes(direction, mu=optimizer.mu_dtype, nu=optimizer.nu_dtype)
    return _clipped(optimizer, _decayed(optimizer, direction, curve, roles))


@build.register
def _(optimizer: SGD, curve: Curve, roles: Mapping[str, Role]) -> optax.GradientTransformation:
    return _clipped(optimizer, optax.sgd(curve, momentum=optimizer.momentum))


@build.register
def _(optimizer: Lion, curve: Curve, roles: Mapping[str, Role]) -> optax.GradientTransformation:
    direction = _with_state_dtypes(optax.scale_by_lion(b1=optimizer.b1, b2=optimizer.b2), mu=optimizer.mu_dtype)
    return _clipped(optimizer, _decayed(optimizer, direction, curve, roles))


@build.register
def _(optimizer: Adafactor, curve: Curve, roles: Mapping[str, Role]) -> optax.GradientTransformation:
    direction = adafactor.scale_by_factored_rms(
        roles,
        decay_exponent=optimizer.decay_exponent,
        max_update_rms=optimizer.max_update_rms,
        by_weights=optimizer.scale == "weights",
        min_factored=optimizer.min_factored,
    )
    return _clipped(optimizer, _decayed(optimizer, direction, curve, roles))


@build.register
def _(optimizer: Muon, curve: Curve, roles: Mapping[str, Role]) -> optax.GradientTransformation:
    def is_orthogonal(path: str) -> bool:
        return roles[path].kind == "matrix" and not matches(optimizer.by_adamw, path)

    def axes(updates: Any) -> dict[str, Any]:
        """The dimension numbers of each matrix; the arrays that AdamW updates stay masked."""
        return {
            path: leaf if isinstance(leaf, optax.MaskedNode) else contrib.MuonDimensionNumbers(*roles[path][1:])
            for path, leaf in updates.items()
        }

    orthogonal = contrib.scale_by_muon(
        ns_steps=optimizer.iterations, beta=optimizer.momentum, weight_dimension_numbers=axes
    )
    scaled = optax.stateless(lambda updates, _: _scaled(updates, roles, optimizer.update_rms))
    muon = optax.chain(_with_state_dtypes(orthogonal, mu=optimizer.mu_dtype), scaled)
    adam = optax.scale_by_adam(b1=optimizer.b1, b2=optimizer.b2, eps=optimizer.eps)
    adam = _with_state_dtypes(adam, mu=optimizer.mu_dtype)
    update = optax.partition(
        {
            "muon": _decayed(optimizer, muon, curve, roles),
            "adamw": _decayed(optimizer, adam, lambda step: optimizer.adamw_rate * curve(step), roles),
        },
        {path: "muon" if is_orthogonal(path) else "adamw" for path in roles},
    )
    return _clipped(optimizer, update)


def _scaled(updates: Any, roles: Mapping[str, Role], rms: float | None) -> dict[str, Any]:
    """Updates from orthogonal matrices, whose elements have a root mean square of `max(inputs, outputs) ** -0.5`."""

    def scale(path: str, update: Any) -> Any:
        if isinstance(update, optax.MaskedNode):
            return update
        inputs, outputs = update.shape[roles[path].inputs], update.shape[roles[path].outputs]
        if rms is None:
            return math.sqrt(max(1.0, outputs / inputs)) * update
        return rms * math.sqrt(max(inputs, outputs)) * update

    return {path: scale(path, update) for path, update in updates.items()}


def _decayed(
    optimizer: AdamW | Lion | Adafactor | Muon,
    direction: optax.GradientTransformation,
    curve: Curve,
    roles: Mapping[str, Role],
) -> optax.GradientTransformation:
    """A direction with decoupled weight decay, both scaled by the learning rate."""
    mask = {path: role.is_decayed and not matches(optimizer.undecayed, path) for path, role in roles.items()}
    return optax.chain(
        direction, optax.add_decayed_weights(optimizer.weight_decay, mask), optax.scale_by_learning_rate(curve)
    )


def _with_state_dtypes(direction: optax.GradientTransformation, **dtypes: str) -> optax.GradientTransformation:
    """The same with fields of its state in other dtypes between steps; it computes in float32."""
    if all(dtype == "float32" for dtype in dtypes.values()):
        return direction

    def cast_to(state: Any, dtypes: Mapping[str, str]) -> Any:
        casts = {name: optax.tree.cast(getattr(state, name), jnp.dtype(dtype)) for name, dtype in dtypes.items()}
        return state._replace(**casts)

    def init(params: optax.Params) -> optax.OptState:
        return cast_to(direction.init(params), dtypes)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        updates, state = direction.update(updates, cast_to(state, dict.fromkeys(dtypes, "float32")), params)
        return updates, cast_to(state, dtypes)

    return optax.GradientTransformation(init, update)


def _clipped(optimizer: Optimizer, update: optax.GradientTransformation) -> optax.GradientTransformation:
    if optimizer.max_grad_norm is None:
        return update
    return optax.chain(optax.clip_by_global_norm(optimizer.max_grad_norm), update)
