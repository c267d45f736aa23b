"""The weight of an entropy bonus that follows the policy's entropy, as part of the compiled step.

Its state is part of the optimizer's, and saved with it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from nnxdsl.config.objectives.adaptive_entropy import AdaptiveEntropy
from nnxdsl.optim import step_guard


class EntropyControl(NamedTuple):
    """The state of an optimizer beside an adaptive entropy bonus.

    Attributes:
        inner: The optax state.
        coef: float32 scalar, the weight of the bonus.
        entropy: float32 scalar, the mean entropy of the last step in nats; infinite before the first.
    """

    inner: Any
    coef: jax.Array
    entropy: jax.Array


def wrap(update: optax.GradientTransformation, initial_coef: float) -> optax.GradientTransformation:
    """An update rule with the state of the bonus, which it passes on."""

    def init(params: optax.Params) -> EntropyControl:
        return EntropyControl(update.init(params), jnp.float32(initial_coef), jnp.float32(jnp.inf))

    def updated(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> tuple[Any, EntropyControl]:
        updates, inner = update.update(updates, state.inner, params)
        return updates, state._replace(inner=inner)

    return optax.GradientTransformation(init, updated)  # pyright: ignore[reportArgumentType]


def coef(settings: AdaptiveEntropy, optimizer: Any) -> jax.Array:
    """The weight of the bonus in the next step; 0 where the last entropy was above the target."""
    state: EntropyControl = step_guard.inner(optimizer)
    return jnp.where(state.entropy <= settings.target, state.coef, 0.0)


def after_step(settings: AdaptiveEntropy, optimizer: Any, entropy: jax.Array) -> Any:
    """The optimizer's state after a step with tokens of that mean entropy."""
    state: EntropyControl = step_guard.inner(optimizer)
    change = jnp.where(entropy <= settings.target, settings.delta, -settings.delta)
    changed = jnp.clip(state.coef + change, settings.min_coef, settings.max_coef)
    return step_guard.with_inner(optimizer, state._replace(coef=changed, entropy=entropy))
