"""Learning rates against their closed forms, and updates against the papers' formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxdsl import Adapter, Experiment, Optimizer, Schedule
from nnxdsl.program import optimizer
from nnxdsl.program.blueprint import draw

STEPS = 50


def curve(schedule: Schedule) -> list[float]:
    found = optimizer.learning_rate(schedule, STEPS)
    return [float(found(step)) for step in range(STEPS + 3)]


def test_constant() -> None:
    assert curve(Schedule.Constant(lr=0.25)) == [0.25] * (STEPS + 3)


@pytest.mark.parametrize(("warmup", "final"), [(0.1, 0.0), (0.2, 0.25), (0.0, 0.1), (1.0, 0.0), (0.01, 0.0)])
def test_warm_ups(warmup: float, final: float) -> None:
    peak, rise = 2e-3, math.ceil(round(warmup * STEPS, 6))  # a ratio above zero always warms up

    def expected(step: int, fall: Callable[[float], float]) -> float:
        if step < rise:
            return peak * step / rise
        part = min(1.0, (step - rise) / max(1, STEPS - rise))
        return peak * (final + (1 - final) * fall(part))

    fields: dict[str, Any] = {"peak_lr": peak, "warmup_ratio": warmup, "final_ratio": final}
    cosine, linear = curve(Schedule.WarmupCosine(**fields)), curve(Schedule.WarmupLinear(**fields))
    for step in range(STEPS + 3):
        assert cosine[step] == pytest.approx(
            expected(step, lambda x: (1 + math.cos(math.pi * x)) / 2), rel=1e-5, abs=1e-9
        )
        assert linear[step] == pytest.approx(expected(step, lambda x: 1 - x), rel=1e-5, abs=1e-9)
    assert max(cosine) == pytest.approx(peak, rel=1e-6)


def leaves() -> dict[str, jax.Array]:
    draw = np.random.default_rng(0)
    shapes = {"matrix": (3, 4), "stacked": (2, 3, 4), "norm": (4,), "stacked norm": (2, 4)}
    return {path: jnp.asarray(draw.standard_normal(shape), jnp.float32) for path, shape in shapes.items()}


MATRICES = {"matrix": True, "stacked": True, "norm": False, "stacked norm": False}


@pytest.mark.parametrize("clip", [None, 0.5, 100.0])
def test_adamw_by_its_paper(clip: float | None) -> None:
    spec = Optimizer.AdamW(
        schedule=Schedule.Constant(lr=0.1), b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.3, max_grad_norm=clip
    )
    update = optimizer.build(spec, optimizer.learning_rate(spec.schedule, STEPS), MATRICES)
    params, gradient = leaves(), leaves()
    state = update.init(params)
    expected = {path: np.asarray(value, np.float64) for path, value in params.items()}
    m = {path: np.zeros(value.shape) for path, value in params.items()}
    v = {path: np.zeros(value.shape) for path, value in params.items()}
    for step in range(1, 4):
        gradient = {path: value * step for path, value in leaves().items()}
        updates, state = update.update(gradient, state, params)
        params = {path: value + updates[path] for path, value in params.items()}
        norm = math.sqrt(sum(float((np.asarray(g, np.float64) ** 2).sum()) for g in gradient.values()))
        scale = 1.0 if clip is None else min(1.0, clip / norm)
        for path in expected:
            g = np.asarray(gradient[path], np.float64) * scale
            m[path] = 0.8 * m[path] + 0.2 * g
            v[path] = 0.9 * v[path] + 0.1 * g**2
            direction = (m[path] / (1 - 0.8**step)) / (np.sqrt(v[path] / (1 - 0.9**step)) + 1e-3)
            expected[path] = expected[path] - 0.1 * (direction + 0.3 * MATRICES[path] * expected[path])
    for path, value in expected.items():
        np.testing.assert_allclose(params[path], value, rtol=2e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_sgd(momentum: float | None) -> None:
    spec = Optimizer.SGD(schedule=Schedule.Constant(lr=0.1), momentum=momentum, max_grad_norm=None)
    update = optimizer.build(spec, optimizer.learning_rate(spec.schedule, STEPS), MATRICES)
    params = leaves()
    state = update.init(params)
    velocity, expected = dict.fromkeys(params, 0.0), dict(params)
    for _ in range(3):
        updates, state = update.update(leaves(), state, params)
        params = {path: value + updates[path] for path, value in params.items()}
        velocity = {path: (momentum or 0.0) * velocity[path] + leaves()[path] for path in params}
        expected = {path: expected[path] - 0.1 * velocity[path] for path in params}
    for path, value in expected.items():
        np.testing.assert_allclose(params[path], value, rtol=1e-5, atol=1e-6)


def test_norms_are_not_decayed_however_many_layers_are_stacked(experiment: Callable[..., Experiment]) -> None:
    spec = Optimizer.AdamW(schedule=Schedule.Constant(lr=0.1), weight_decay=0.5)
    for adapter in (None, Adapter.LoRA(rank=2)):
        blueprint = draw(experiment(optimizer=spec, adapter=adapter))
        params = {path: jnp.ones(leaf.shape) for path, leaf in blueprint.trainable.items()}
        zeros = {path: jnp.zeros(leaf.shape) for path, leaf in blueprint.trainable.items()}
        updates, _ = blueprint.update.update(zeros, blueprint.update.init(params), params)
        assert isinstance(updates, dict)
        for path, value in updates.items():
            expected = 0.0 if path.endswith("norm.scale") else -0.05
            np.testing.assert_allclose(value, expected, rtol=1e-6, err_msg=path)
