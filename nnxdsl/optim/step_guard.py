"""Steps that would do harm are not taken: decided on the devices, in the same compiled step, so that nothing is lost.

The host reads metrics a step late, when the next step has begun. So a step that is refused leaves weights and optimizer
as they were, to the bit, on every mesh; what a guard remembers is a part of the optimizer's state, and saved with it.
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
"""What a step replaces: it has the fields `step` and `optimizer`, and any others."""

SKIPPED, IN_A_ROW, TOTAL = "skipped", "consecutive_skipped_steps", "skipped_total"
"""Metrics of a run that may skip steps: whether this one was, how many one after the other, how many in all."""

_NOT_YET = -1.0
"""In the place of a figure that a window does not have yet; no norm is negative."""


class Guarded(NamedTuple):
    """The state of an optimizer whose steps may be skipped.

    Attributes:
        inner: The optax state.
        watch: What the guard remembers: scalars, and the figures of the last steps.
    """

    inner: Any
    watch: dict[str, jax.Array]


def inner(optimizer: Any) -> Any:
    """An optimizer's state without what a guard remembers."""
    return optimizer.inner if isinstance(optimizer, Guarded) else optimizer


def with_inner(optimizer: Any, state: Any) -> Any:
    """An optimizer's state with another one in the place of `inner`."""
    return optimizer._replace(inner=state) if isinstance(optimizer, Guarded) else state


class StopOnNonFinite:
    """Stops at the first step that is not finite: that step and all after it change nothing.

    From then on the step's number is negative, `-(number of steps done) - 1`, which no other step can make good again.
    """

    def wrapped(self, update: optax.GradientTransformation) -> optax.GradientTransformation:
        """The update rule with what the guard remembers: nothing."""
        return update

    def done(self, before: Any) -> jax.Array:
        """Optimizer steps that changed something."""
        return before.step

    def select(
        self, before: MovingT, moved: MovingT, loss: jax.Array, norm: jax.Array
    ) -> tuple[MovingT, dict[str, jax.Array]]:
        """What a step replaces, moved or not, and the guard's metrics."""
        is_good = _is_finite(loss, norm) & (before.step >= 0)
        halted = jnp.where(before.step < 0, before.step, -before.step - 1)
        return _either(is_good, moved, before)._replace(step=jnp.where(is_good, moved.step, halted)), {}


@attrs.frozen
class SkipStep:
    """Passes over steps that are not finite, or are spikes where it knows what is usual.

    Attributes:
        window: Of how many steps the usual figures are the median; 0 for no spikes.
        ratios: How many medians of each figure a step may have: of "norm", of "loss".
    """

    window: int = 0
    ratios: tuple[tuple[str, float], ...] = ()

    def wrapped(self, update: optax.GradientTransformation) -> optax.GradientTransformation:
        """The update rule with what the guard remembers."""

        def init(params: optax.Params) -> Guarded:
            counts = {name: jnp.zeros((), jnp.int32) for name in (IN_A_ROW, TOTAL)}
            figures = {name: jnp.full((self.window,), _NOT_YET, jnp.float32) for name, _ in self.ratios}
            return Guarded(update.init(params), {**counts, **figures})

        def moved(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> tuple[Any, Guarded]:
            updates, inner = update.update(updates, state.inner, params)
            return updates, Guarded(inner, state.watch)

        return optax.GradientTransformation(init, moved)  # pyright: ignore[reportArgumentType]

    def done(self, before: Any) -> jax.Array:
        """Optimizer steps that changed something."""
        return before.step - before.optimizer.watch[TOTAL]

    def select(
        self, before: MovingT, moved: MovingT, loss: jax.Array, norm: jax.Array
    ) -> tuple[MovingT, dict[str, jax.Array]]:
        """What a step replaces, moved or not, and the guard's metrics."""
        watch, found = before.optimizer.watch, {"norm": norm, "loss": loss}
        is_finite = _is_finite(loss, norm)
        is_good = is_finite
        for name, ratio in self.ratios:
            usual, is_full = jnp.median(watch[name]), watch[name][0] != _NOT_YET
            is_good = is_good & ~(is_full & (usual > 0) & (found[name] > ratio * usual))
        in_a_row = jnp.where(is_good, 0, watch[IN_A_ROW] + 1)
        total = watch[TOTAL] + jnp.where(is_good, 0, 1)
        figures = {
            name: jnp.where(is_finite, jnp.append(watch[name][1:], found[name]), watch[name]) for name, _ in self.ratios
        }
        after = _either(is_good, moved, before)
        optimizer = Guarded(after.optimizer.inner, {IN_A_ROW: in_a_row, TOTAL: total, **figures})
        metrics = {SKIPPED: jnp.where(is_good, 0, 1), IN_A_ROW: in_a_row, TOTAL: total}
        return after._replace(step=moved.step, optimizer=optimizer), metrics


@singledispatch
def build(guard: Guard) -> StopOnNonFinite | SkipStep:
    """What watches over the steps of a run."""
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


def _either(is_good: jax.Array, moved: MovingT, before: MovingT) -> MovingT:
    return jax.tree.map(lambda new, old: jnp.where(is_good, new, old), moved, before)
