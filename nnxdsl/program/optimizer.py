"""Optimizers and learning rates, on optax."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import singledispatch
from typing import Any

import optax

from nnxdsl.spec.errors import NotRegisteredError
from nnxdsl.spec.optimizer import SGD, AdamW, Optimizer
from nnxdsl.spec.schedule import Constant, Schedule, WarmupCosine, WarmupLinear

Curve = Callable[[Any], Any]
"""From a zero-based step (an int or a traced array) to a learning rate."""


@singledispatch
def learning_rate(schedule: Schedule, steps: int) -> Curve:
    """The learning rate as a function of the zero-based optimizer step; register a `Schedule` of your own here.

    Args:
        schedule: What was asked for.
        steps: Optimizer steps of the whole run.
    """
    name = type(schedule).__name__
    raise NotRegisteredError(
        f"no learning rate is registered for {type(schedule).__qualname__}; write\n"
        f"  from nnxdsl.program import optimizer\n"
        f"  @optimizer.learning_rate.register({name})\n"
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


def warmup_steps(ratio: float, steps: int) -> int:
    """Steps of the warm-up, rounded up as in transformers, so that a ratio above zero always warms up."""
    return math.ceil(round(ratio * steps, 6))


def _after_warmup(peak: float, warmup: int, then: Curve) -> Curve:
    """Zero at step 0, `peak` at step `warmup`, then down: the curve of transformers and optax."""
    if warmup == 0:
        return then
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), then], [warmup])


@singledispatch
def build(optimizer: Optimizer, curve: Curve, matrices: Mapping[str, bool]) -> optax.GradientTransformation:
    """The optax transformation of an optimizer; register an `Optimizer` of your own here.

    Args:
        optimizer: What was asked for.
        curve: Learning rate by step.
        matrices: For each trainable path, whether it is a matrix (and not a norm's scale or another vector), however
            many layers are stacked in it.
    """
    name = type(optimizer).__name__
    raise NotRegisteredError(
        f"no update rule is registered for {type(optimizer).__qualname__}; write\n"
        f"  from nnxdsl.program import optimizer\n"
        f"  @optimizer.build.register({name})\n"
        f"  def _(spec, curve, matrices): return optax.GradientTransformation(...)"
    )


@build.register
def _(optimizer: AdamW, curve: Curve, matrices: Mapping[str, bool]) -> optax.GradientTransformation:
    update = optax.adamw(
        curve,
        b1=optimizer.b1,
        b2=optimizer.b2,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        mask=dict(matrices),
    )
    return _clipped(optimizer, update)


@build.register
def _(optimizer: SGD, curve: Curve, matrices: Mapping[str, bool]) -> optax.GradientTransformation:
    return _clipped(optimizer, optax.sgd(curve, momentum=optimizer.momentum))


def _clipped(optimizer: Optimizer, update: optax.GradientTransformation) -> optax.GradientTransformation:
    if optimizer.max_grad_norm is None:
        return update
    return optax.chain(optax.clip_by_global_norm(optimizer.max_grad_norm), update)
