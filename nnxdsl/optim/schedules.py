"""Learning-rate schedules as functions of the step, with the values of transformers and optax."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import singledispatch
from typing import Any

import jax.numpy as jnp
import optax

from nnxdsl.config.experiment import Experiment
from nnxdsl.config.schedule import WSD, Constant, InverseSqrt, Schedule, WarmupCosine, WarmupLinear
from nnxdsl.errors import NotRegisteredError, PlanError, Problem

Curve = Callable[[Any], Any]
"""From a zero-based step (an int or a traced array) to a learning rate."""


def curve(experiment: Experiment, steps: int | None) -> Curve:
    """The learning rate of an experiment in a run of `steps`.

    Where they are None it raises a PlanError when a step is traced: all but training works without.
    """
    if steps is not None:
        return learning_rate(experiment.optimizer.schedule, steps)

    def refuse(step: Any) -> Any:
        raise PlanError([uncounted(experiment)], f"Experiment '{experiment.name}'")

    return refuse


def uncounted(experiment: Experiment) -> Problem:
    """The problem of training for epochs whose rows have not been counted."""
    message = (
        f"steps of {experiment.epochs:g} epochs are unknown before rows are counted; give nnxdsl.compile(steps=...)"
    )
    return Problem("epochs", message)


@singledispatch
def learning_rate(schedule: Schedule, steps: int) -> Curve:
    """The learning rate by zero-based optimizer step in a run of `steps`; register a `Schedule` of your own here."""
    name = type(schedule).__name__
    raise NotRegisteredError(
        f"no learning rate is registered for {type(schedule).__qualname__}; write\n"
        f"  from nnxdsl.optim import schedules\n"
        f"  @schedules.learning_rate.register({name})\n"
        f"  def _(schedule, steps): return lambda step: ..."
    )


@learning_rate.register
def _(schedule: Constant, steps: int) -> Curve:
    return optax.constant_schedule(schedule.lr)


@learning_rate.register
def _(schedule: WarmupCosine, steps: int) -> Curve:
    warmup = warmup_steps(schedule.warmup_ratio, steps)
    down = optax.cosine_decay_schedule(schedule.peak_lr, max(steps - warmup, 1), alpha=schedule.final_ratio)
    return _after_warmup(schedule.peak_lr, warmup, down)


@learning_rate.register
def _(schedule: WarmupLinear, steps: int) -> Curve:
    warmup = warmup_steps(schedule.warmup_ratio, steps)
    final = schedule.peak_lr * schedule.final_ratio
    return _after_warmup(
        schedule.peak_lr, warmup, optax.linear_schedule(schedule.peak_lr, final, max(steps - warmup, 1))
    )


@learning_rate.register
def _(schedule: WSD, steps: int) -> Curve:
    warmup, peak = warmup_steps(schedule.warmup_ratio, steps), schedule.peak_lr
    decay = min(warmup_steps(schedule.decay_ratio, steps), steps - warmup)
    if decay == 0:
        return _after_warmup(peak, warmup, optax.constant_schedule(peak))
    # Steps of `down` begin where the warm-up ends.
    down = optax.linear_schedule(peak, peak * schedule.final_ratio, decay, transition_begin=steps - warmup - decay)
    return _after_warmup(peak, warmup, down)


@learning_rate.register
def _(schedule: InverseSqrt, steps: int) -> Curve:
    warmup = schedule.warmup_steps

    def down(after: Any) -> Any:
        return schedule.peak_lr * jnp.sqrt(
            warmup / (jnp.maximum(after, 0) + warmup)
        )  # evaluated during the warm-up, too

    return _after_warmup(schedule.peak_lr, warmup, down)


def warmup_steps(ratio: float, steps: int) -> int:
    """Steps of a share of the run, rounded up as in transformers, so that a ratio above zero gives at least one."""
    return math.ceil(round(ratio * steps, 6))


def _after_warmup(peak: float, warmup: int, then: Curve) -> Curve:
    """Linear warm-up from zero at step 0 to `peak` at step `warmup`, followed by `then`."""
    if warmup == 0:
        return then
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), then], [warmup])
