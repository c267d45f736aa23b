"""Adafactor for arrays that stack the weights of several layers or experts; optax's treats a stack as one weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from nnxdsl.optim.param_roles import Role

EPSILON_GRADIENT, EPSILON_WEIGHT = 1e-30, 1e-3
"""The paper's epsilons: added to squared gradients; the smallest root mean square by which weights scale updates."""

DROPPED = {"rows": -1, "columns": -2}
"""The axis of a weight that an array of the state lacks, by field of `FactoredState`."""


class FactoredState(NamedTuple):
    """Optimizer state; each path is in `rows` and `columns`, or in `elements`.

    Attributes:
        steps: int32 scalar, number of steps.
        rows: Mean of squared gradients over the outputs, `[..., in]`.
        columns: Mean of squared gradients over the inputs, `[..., out]`.
        elements: Mean of squared gradients of arrays that are not factored.
    """

    steps: jax.Array
    rows: dict[str, jax.Array]
    columns: dict[str, jax.Array]
    elements: dict[str, jax.Array]


def scale_by_factored_rms(
    roles: Mapping[str, Role],
    *,
    decay_exponent: float,
    max_update_rms: float | None,
    by_weights: bool,
    min_factored: int,
) -> optax.GradientTransformation:
    """Gradients divided by the root of their mean squares, which are factored into rows and columns of `[in, out]`.

    Shazeer & Stern 2018, arXiv:1804.04235, algorithms 4 and 5, with the rising decay of section 7.2.

    Args:
        roles: By path; tables and matrices are factored, others are not.
        decay_exponent: The decay at step t, from 1, is `1 - t ** -decay_exponent`.
        max_update_rms: Root mean square to which larger updates of a weight are scaled down; None for no limit.
        by_weights: Whether to scale updates by the root mean square of their weight.
        min_factored: Smallest length of the shorter axis for which weights are factored.
    """

    def is_factored(path: str, leaf: Any) -> bool:
        return roles[path].kind in ("matrix", "table") and min(leaf.shape[-2:]) >= min_factored

    def init(params: Any) -> FactoredState:
        factored = {path: leaf for path, leaf in params.items() if is_factored(path, leaf)}
        return FactoredState(
            jnp.zeros((), jnp.int32),
            {path: jnp.zeros(leaf.shape[:-1], jnp.float32) for path, leaf in factored.items()},
            {path: jnp.zeros((*leaf.shape[:-2], leaf.shape[-1]), jnp.float32) for path, leaf in factored.items()},
            {path: jnp.zeros(leaf.shape, jnp.float32) for path, leaf in params.items() if path not in factored},
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[dict[str, jax.Array], FactoredState]:
        steps = state.steps + 1
        decay = 1.0 - steps.astype(jnp.float32) ** -decay_exponent

        def mean(old: jax.Array, new: jax.Array) -> jax.Array:
            return decay * old + (1.0 - decay) * new

        square = {path: jnp.square(gradient) + EPSILON_GRADIENT for path, gradient in updates.items()}
        rows = {path: mean(old, jnp.mean(square[path], axis=-1)) for path, old in state.rows.items()}
        columns = {path: mean(old, jnp.mean(square[path], axis=-2)) for path, old in state.columns.items()}
        elements = {path: mean(old, square[path]) for path, old in state.elements.items()}

        def direction(path: str, gradient: jax.Array) -> jax.Array:
            if path in rows:
                row = rows[path] / jnp.mean(rows[path], axis=-1, keepdims=True)
                scaled = gradient * jax.lax.rsqrt(row)[..., None] * jax.lax.rsqrt(columns[path])[..., None, :]
            else:
                scaled = gradient * jax.lax.rsqrt(elements[path])
            axes = _weight_axes(roles[path], gradient)
            if max_update_rms is not None:
                scaled = scaled / jnp.maximum(1.0, _rms(scaled, axes) / max_update_rms)
            if by_weights:
                scaled = scaled * jnp.maximum(_rms(params[path], axes), EPSILON_WEIGHT)
            return scaled

        directions = {path: direction(path, gradient) for path, gradient in updates.items()}
        return directions, FactoredState(steps, rows, columns, elements)

    return optax.GradientTransformation(init, update)


def _weight_axes(role: Role, leaf: jax.Array) -> tuple[int, ...]:
    """The axes of one weight, counted from the end; those before them stack weights."""
    count = {"matrix": 2, "table": 2, "vector": 1, "filter": min(3, leaf.ndim)}[role.kind]
    return tuple(range(-min(count, leaf.ndim), 0))


def _rms(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))
