"""Guards against non-finite and spiking steps, decided on the devices as part of the compiled step.

The host reads metrics when the next step has begun, which is too late to undo one. A step that a guard rejects leaves
weights and optimizer bit for bit as they were; the guard's own state is part of the optimizer's, and saved with it.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any, NamedTuple, TypeVar

import attrs
import jax
import jax.numpy as jnp
import optax

from nnxdsl.config.step_guard import Guard, Skip, SkipSpikes, Stop
from nnxdsl.errors import NotRegisteredError

MovingT = TypeVar("MovingT", bound=Any)
"""The donated state of a step: it has the fields `step` and `optimizer`, among others."""

SKIPPED, IN_A_ROW, TOTAL = "skipped", "consecutive_skipped_steps", "skipped_total"
"""Metrics of a run that may skip steps: whether this one was skipped, consecutive skips, all skips."""

_NOT_YET = -1.0
"""Fills the window before it has values; no norm is negative."""


class Guarded(NamedTuple):
    """The state of an optimizer whose steps may be skipped.

    Attributes:
        inner: The optax state.
        watch: The guard's state: counters, and the norms and losses of the last steps.
    """

    inner: Any
    watch: dict[str, jax.Array]


def inner(optimizer: Any) -> Any:
    """An optimizer's state without that of a guard."""
    return optimizer.inner if isinstance(optimizer, Guarded) else optimizer


def with_inner(optimizer: Any, state: Any) -> Any:
    """An optimizer's state with another `inner`."""
    return optimizer._replace(inner=state) if isinstance(optimizer, Guarded) else state


class StopOnNonFinite:
    """Stops at the first non-finite step: that step and all later ones change nothing.

    From then on the step's number is negative, `-(number of steps done) - 1`, and stays so.
    """

    def wrap(self, update: optax.GradientTransformation) -> optax.GradientTransformation:
        """The update rule; this guard has no state."""
        return update

    def applied_steps(self, state: Any) -> jax.Array:
        """Number of optimizer steps that were applied."""
        return state.step

    def select(
        self, before: MovingT, moved: MovingT, loss: jax.Array, norm: jax.Array
    ) -> tuple[MovingT, dict[str, jax.Array]]:
        """The state after the step, updated or unchanged, and the guard's metrics."""
        is_good = _is_finite(loss, norm) & (before.step >= 0)
        halted = jnp.where(before.step < 0, before.step, -before.step - 1)
        return _select(is_good, moved, before)._replace(step=jnp.where(is_good, moved.step, halted)), {}


@attrs.frozen
class SkipStep:
    """Skips steps that are non-finite, or whose norm or loss is a multiple of the median over a window.

    Attributes:
        window: Number of steps of the median; 0 to skip non-finite steps only.
        ratios: Largest multiple of the median, for "norm" and "loss".
    """

    window: int = 0
    ratios: tuple[tuple[str, float], ...] = ()

    def wrap(self, update: optax.GradientTransformation) -> optax.GradientTransformation:
        """The update rule with the guard's state."""

        def init(params: optax.Params) -> Guarded:
            counts = {name: jnp.zeros((), jnp.int32) for name in (IN_A_ROW, TOTAL)}
            figures = {name: jnp.full((self.window,), _NOT_YET, jnp.float32) for name, _ in self.ratios}
            return Guarded(update.init(params), {**counts, **figures})

        def moved(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> tuple[Any, Guarded]:
            updates, inner = update.update(updates, state.inner, params)
            return updates, Guarded(inner, state.watch)

        return optax.GradientTransformation(init, moved)  # pyright: ignore[reportArgumentType]

    def applied_steps(self, state: Any) -> jax.Array:
        """Number of optimizer steps that were applied."""
        return state.step - state.optimizer.watch[TOTAL]

    def select(
        self, before: MovingT, moved: MovingT, loss: jax.Array, norm: jax.Array
    ) -> tuple[MovingT, dict[str, jax.Array]]:
        """The state after the step, updated or unchanged, and the guard's metrics."""
        watch, values = before.optimizer.watch, {"norm": norm, "loss": loss}
        is_finite = _is_finite(loss, norm)
        is_good = is_finite
        for name, ratio in self.ratios:
            median, is_full = jnp.median(watch[name]), watch[name][0] != _NOT_YET
            is_good = is_good & ~(is_full & (median > 0) & (values[name] > ratio * median))
        in_a_row = jnp.where(is_good, 0, watch[IN_A_ROW] + 1)
        total = watch[TOTAL] + jnp.where(is_good, 0, 1)
        figures = {
            name: jnp.where(is_finite, jnp.append(watch[name][1:], values[name]), watch[name])
            for name, _ in self.ratios
        }
        after = _select(is_good, moved, before)
        optimizer = Guarded(after.optimizer.inner, {IN_A_ROW: in_a_row, TOTAL: total, **figures})
        metrics = {SKIPPED: jnp.where(is_good, 0, 1), IN_A_ROW: in_a_row, TOTAL: total}
        return after._replace(step=moved.step, optimizer=optimizer), metrics


@singledispatch
def build(guard: Guard) -> StopOnNonFinite | SkipStep:
    """The guard of a run's steps; register a `Guard` of your own here."""
    raise NotRegisteredError(
        f"no guard is registered for {type(guard).__qualname__}; register one with nnxdsl.optim.step_guard.build"
    )


@build.register
def _(guard: Stop) -> StopOnNonFinite:
    return StopOnNonFinite()


@build.register
def _(guard: Skip) -> SkipStep:
    return SkipStep()


@build.register
def _(guard: SkipSpikes) -> SkipStep:
    ratios = (("norm", guard.max_norm_ratio),)
    if guard.max_loss_ratio is not None:
        ratios += (("loss", guard.max_loss_ratio),)
    return SkipStep(guard.window, ratios)


def _is_finite(loss: jax.Array, norm: jax.Array) -> jax.Array:
    return jnp.isfinite(loss) & jnp.isfinite(norm)


def _select(is_good: jax.Array, moved: MovingT, before: MovingT) -> MovingT:
    return jax.tree.map(lambda new, old: jnp.where(is_good, new, old), moved, before)
