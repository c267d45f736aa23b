"""Adafactor's direction, for arrays in which many weights may be stacked; optax's takes a stack for one weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from nnxdsl.optim.param_roles import Role

LEAST, LEAST_WEIGHT = 1e-30, 1e-3
"""The paper's epsilons: added to squared gradients; the least root mean square that a weight counts with."""


DROPPED = {"rows": -1, "columns": -2}
"""The axis of a weight that an array of the state lacks, by field."""


class FactoredState(NamedTuple):
    """What is kept between steps; each path stands in `rows` and `columns`, or in `elements`.

    Attributes:
        steps: int32 scalar, steps done.
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
    """Gradients over the root of their mean squares, of each weight `[in, out]` by rows and columns.

    Shazeer & Stern 2018, arXiv:1804.04235, algorithms 4 and 5, with the rising decay of section 7.2.

    Args:
        roles: What each path is; tables and matrices are factored, the rest is not.
        decay_exponent: The decay at step t, from 1, is `1 - t ** -decay_exponent`.
        max_update_rms: Updates of one weight with a larger root mean square are scaled down to it; None: they are not.
        by_weights: Whether updates are scaled by the root mean square of their weight.
        min_factored: Length of the shorter axis from which on weights are factored.
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

        square = {path: jnp.square(gradient) + LEAST for path, gradient in updates.items()}
        rows = {path: mean(old, jnp.mean(square[path], axis=-1)) for path, old in state.rows.items()}
        columns = {path: mean(old, jnp.mean(square[path], axis=-2)) for path, old in state.columns.items()}
        elements = {path: mean(old, square[path]) for path, old in state.elements.items()}

        def direction(path: str, gradient: jax.Array) -> jax.Array:
            if path in rows:
                row = rows[path] / jnp.mean(rows[path], axis=-1, keepdims=True)
                scaled = gradient * jax.lax.rsqrt(row)[..., None] * jax.lax.rsqrt(columns[path])[..., None, :]
            else:
                scaled = gradient * jax.lax.rsqrt(elements[path])
            own = _own_axes(roles[path], gradient)
            if max_update_rms is not None:
                scaled = scaled / jnp.maximum(1.0, _rms(scaled, own) / max_update_rms)
            if by_weights:
                scaled = scaled * jnp.maximum(_rms(params[path], own), LEAST_WEIGHT)
            return scaled

        found = {path: direction(path, gradient) for path, gradient in updates.items()}
        return found, FactoredState(steps, rows, columns, elements)

    return optax.GradientTransformation(init, update)


def _own_axes(role: Role, leaf: jax.Array) -> tuple[int, ...]:
    """The axes of one weight, counted from the end: those before them number the weights of a stack."""
    own = {"matrix": 2, "table": 2, "vector": 1, "filter": min(3, leaf.ndim)}[role.kind]
    return tuple(range(-min(own, leaf.ndim), 0))


def _rms(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True))
