"""Learning rates against their closed forms, and updates against the papers' formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_dtypes import bfloat16

from nnxdsl import Adapter, Experiment, Mesh, Optimizer, PlanError, Schedule, SpecError
from nnxdsl.config.optimizer import MAX_BF16_DECAY
from nnxdsl.optim import optimizers, schedules
from nnxdsl.optim.param_roles import Role
from nnxdsl.program.blueprint import build_blueprint

STEPS = 50


def curve(schedule: Schedule) -> list[float]:
    result = schedules.learning_rate(schedule, STEPS)
    return [float(result(step)) for step in range(STEPS + 3)]


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


@pytest.mark.parametrize(
    ("warmup", "decay", "final"), [(0.1, 0.2, 0.0), (0.0, 0.5, 0.1), (0.3, 0.0, 0.0), (0.5, 0.5, 0)]
)
def test_warm_up_stable_decay(warmup: float, decay: float, final: float) -> None:
    peak, rise, fall = 2e-3, round(warmup * STEPS), round(decay * STEPS)
    actual = curve(Schedule.WSD(peak_lr=peak, warmup_ratio=warmup, decay_ratio=decay, final_ratio=final))
    for step in range(STEPS + 3):
        left = max(0, STEPS - step) / fall if fall else 1.0
        expected = peak * step / rise if step < rise else peak * (final + (1 - final) * min(1.0, left))
        assert actual[step] == pytest.approx(expected, rel=1e-5, abs=1e-9), step


def test_inverse_square_root() -> None:
    actual = curve(Schedule.InverseSqrt(peak_lr=2e-3, warmup_steps=8))
    expected = [2e-3 * min(step / 8, math.sqrt(8 / max(step, 1))) for step in range(STEPS + 3)]
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert max(actual) == actual[8]


def leaves() -> dict[str, jax.Array]:
    draw = np.random.default_rng(0)
    shapes = {"matrix": (3, 4), "stacked": (2, 3, 4), "norm": (4,), "stacked norm": (2, 4)}
    return {path: jnp.asarray(draw.standard_normal(shape), jnp.float32) for path, shape in shapes.items()}


ROLES = {path: Role("vector" if "norm" in path else "matrix") for path in leaves()}


@pytest.mark.parametrize("clip", [None, 0.5, 100.0])
def test_adamw_by_its_paper(clip: float | None) -> None:
    spec = Optimizer.AdamW(
        schedule=Schedule.Constant(lr=0.1), b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.3, max_grad_norm=clip
    )
    update = optimizers.build(spec, schedules.learning_rate(spec.schedule, STEPS), ROLES)
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
            expected[path] = expected[path] - 0.1 * (direction + 0.3 * ROLES[path].is_decayed * expected[path])
    for path, value in expected.items():
        np.testing.assert_allclose(params[path], value, rtol=2e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_sgd(momentum: float | None) -> None:
    spec = Optimizer.SGD(schedule=Schedule.Constant(lr=0.1), momentum=momentum, max_grad_norm=None)
    update = optimizers.build(spec, schedules.learning_rate(spec.schedule, STEPS), ROLES)
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


@pytest.mark.extended
def test_norms_are_not_decayed_however_many_layers_are_stacked(experiment: Callable[..., Experiment]) -> None:
    spec = Optimizer.AdamW(schedule=Schedule.Constant(lr=0.1), weight_decay=0.5)
    for adapter in (None, Adapter.LoRA(rank=2)):
        blueprint = build_blueprint(experiment(optimizer=spec, adapter=adapter))
        params = {path: jnp.ones(leaf.shape) for path, leaf in blueprint.trainable.items()}
        zeros = {path: jnp.zeros(leaf.shape) for path, leaf in blueprint.trainable.items()}
        update = blueprint.update
        updates, _ = jax.jit(lambda zeros, params, of=update: of.update(zeros, of.init(params), params))(zeros, params)
        assert isinstance(updates, dict)
        for path, value in updates.items():
            expected = 0.0 if path.endswith("norm.scale") else -0.05
            np.testing.assert_allclose(value, expected, rtol=1e-6, err_msg=path)


def followed(spec: Optimizer, roles: dict[str, Role], params: Any, steps: int = 3) -> tuple[dict[str, Any], Any]:
    """The parameters and the state after some steps, with gradients that differ from step to step."""
    update = optimizers.build(spec, schedules.learning_rate(spec.schedule, STEPS), roles)
    state, move = update.init(params), jax.jit(update.update)
    for step in range(1, steps + 1):
        updates, state = move(gradient(params, step), state, params)
        params = {path: value + updates[path] for path, value in params.items()}
    return params, state


def gradient(params: Any, step: int) -> dict[str, jax.Array]:
    draw = np.random.default_rng(step)
    return {path: jnp.asarray(draw.standard_normal(leaf.shape), jnp.float32) for path, leaf in sorted(params.items())}


def rounded(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(bfloat16).astype(np.float64)


def test_moments_in_bfloat16_are_rounded_between_steps_alone() -> None:
    spec = Optimizer.AdamW(
        schedule=Schedule.Constant(lr=0.1), b2=0.95, mu_dtype="bfloat16", nu_dtype="bfloat16", max_grad_norm=None
    )
    actual, state = followed(spec, ROLES, leaves())
    adam = next(part for part in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "nu")) if hasattr(part, "nu"))
    assert {leaf.dtype for leaf in [*adam.mu.values(), *adam.nu.values()]} == {jnp.dtype("bfloat16")}
    for path, first in leaves().items():
        value, m, v = np.asarray(first, np.float64), np.zeros(first.shape), np.zeros(first.shape)
        for step in range(1, 4):
            g = np.asarray(gradient(leaves(), step)[path], np.float64)
            m, v = 0.9 * rounded(m) + 0.1 * g, 0.95 * rounded(v) + 0.05 * g**2
            value = value - 0.1 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)
        # A value in the middle of two of bfloat16 may fall to either side: those few are off by 2^-8 of a step.
        off = np.abs(np.asarray(actual[path]) - value)
        assert np.median(off) == pytest.approx(0, abs=1e-6)
        assert off.max() == pytest.approx(0, abs=2e-3)


def test_a_mean_that_bfloat16_cannot_follow_is_refused() -> None:
    with pytest.raises(SpecError) as caught:
        Optimizer.AdamW(schedule=Schedule.Constant(lr=0.1), nu_dtype="bfloat16")
    assert str(caught.value) == (
        "1 problem in Optimizer.AdamW\n"
        "  nu_dtype: a mean in 'bfloat16' cannot follow b2=0.999, whose changes are rounded away; use 'float32', "
        "or b2 of at most 0.992"
    )
    # What is refused is true: the mean of squares stays where it is as gradients vanish.
    assert bfloat16(np.float32(bfloat16(1.5)) * 0.999) == bfloat16(1.5)
    assert all(
        bfloat16(np.float32(x) * np.float32(MAX_BF16_DECAY)) < x for x in np.linspace(1, 2, 129).astype(bfloat16)
    )


def test_lion_by_its_paper() -> None:
    spec = Optimizer.Lion(schedule=Schedule.Constant(lr=0.1), b1=0.8, b2=0.9, weight_decay=0.3, max_grad_norm=None)
    actual, _ = followed(spec, ROLES, leaves())
    for path, first in leaves().items():
        value, m = np.asarray(first, np.float64), np.zeros(first.shape)
        for step in range(1, 4):
            g = np.asarray(gradient(leaves(), step)[path], np.float64)
            value = value - 0.1 * (np.sign(0.8 * m + 0.2 * g) + 0.3 * ROLES[path].is_decayed * value)
            m = 0.9 * m + 0.1 * g
        np.testing.assert_allclose(actual[path], value, rtol=1e-5, atol=1e-6, err_msg=path)


SHAPES: dict[str, tuple[tuple[int, ...], Role]] = {
    "wide": ((3, 7, 5), Role("matrix")),
    "experts": ((2, 3, 4, 9), Role("matrix")),
    "square": ((6, 6), Role("matrix")),
    "router": ((2, 4, 6), Role("matrix", -1, -2)),
    "table": ((11, 6), Role("table")),
    "filter": ((2, 5, 1, 3), Role("filter")),
    "norm": ((3, 6), Role("vector")),
}


def many() -> tuple[dict[str, jax.Array], dict[str, Role]]:
    draw = np.random.default_rng(3)
    params = {path: jnp.asarray(draw.standard_normal(shape), jnp.float32) for path, (shape, _) in SHAPES.items()}
    return params, {path: each for path, (_, each) in SHAPES.items()}


def unstacked(path: str, leaf: Any) -> list[Any]:
    """The weights of an array, each of its own."""
    fields = {"matrix": 2, "table": 2, "filter": 3, "vector": 1}[SHAPES[path][1].kind]
    return list(np.asarray(leaf).reshape(-1, *leaf.shape[leaf.ndim - fields :]))


@pytest.mark.extended
@pytest.mark.parametrize("scale", ["weights", "one"])
def test_adafactor_is_that_of_optax_for_each_weight_of_a_stack(scale: Any) -> None:
    params, roles = many()
    spec = Optimizer.Adafactor(
        schedule=Schedule.Constant(lr=0.1), scale=scale, min_factored=5, max_update_rms=0.7, max_grad_norm=None
    )
    actual, state = followed(spec, roles, params)
    theirs = optax.adafactor(
        0.1, min_dim_size_to_factor=5, clipping_threshold=0.7, multiply_by_parameter_scale=scale == "weights"
    )
    for path, leaf in params.items():
        values = jnp.stack(unstacked(path, leaf))
        kept = jax.vmap(theirs.init)(values)
        move = jax.jit(jax.vmap(theirs.update))
        for step in (1, 2, 3):
            updates, kept = move(jnp.stack(unstacked(path, gradient(params, step)[path])), kept, values)
            values = values + updates
        np.testing.assert_allclose(jnp.stack(unstacked(path, actual[path])), values, rtol=2e-5, atol=1e-6, err_msg=path)
    kept = state[0]
    assert {path: leaf.shape for path, leaf in kept.rows.items()} == {"wide": (3, 7), "square": (6,), "table": (11,)}
    assert {path: leaf.shape for path, leaf in kept.columns.items()} == {"wide": (3, 5), "square": (6,), "table": (6,)}
    assert set(kept.elements) == {"experts", "router", "filter", "norm"}


def orthogonal(g: np.ndarray, iterations: int) -> np.ndarray:
    """Newton-Schulz steps of the quintic with Jordan's coefficients, from g over its Frobenius norm."""
    x = g / np.linalg.norm(g)
    x = x.T if (tall := g.shape[0] > g.shape[1]) else x
    for _ in range(iterations):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


@pytest.mark.parametrize("rms", [0.2, None])
def test_muon_by_its_definition(rms: float | None) -> None:
    params, roles = many()
    spec = Optimizer.Muon(
        schedule=Schedule.Constant(lr=0.1),
        momentum=0.9,
        update_rms=rms,
        by_adamw=("square",),
        adamw_rate=0.5,
        weight_decay=0.3,
        undecayed=("table",),
        max_grad_norm=None,
    )
    actual, _ = followed(spec, roles, params)
    for path, leaf in params.items():
        kind, inputs, _ = roles[path]
        parts = []
        for index, first in enumerate(unstacked(path, leaf)):
            value, m, v = first.astype(np.float64), np.zeros(first.shape), np.zeros(first.shape)
            for step in range(1, 4):
                g = unstacked(path, gradient(params, step)[path])[index].astype(np.float64)
                decay = 0.3 * (kind != "vector" and path != "table") * value
                if kind == "matrix" and path != "square":
                    m = 0.9 * m + 0.1 * g
                    # Nesterov's mean of the step to come, each part with its own correction for the zeros at first.
                    ahead = 0.9 * m / (1 - 0.9 ** (step + 1)) + 0.1 * g / (1 - 0.9**step)
                    rows, columns = first.shape if inputs == -2 else first.shape[::-1]
                    size = math.sqrt(max(1, columns / rows)) if rms is None else rms * math.sqrt(max(rows, columns))
                    value = value - 0.1 * (size * orthogonal(ahead, 5) + decay)
                else:
                    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
                    direction = (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)
                    value = value - 0.05 * (direction + decay)
            parts.append(value)
        np.testing.assert_allclose(unstacked(path, actual[path]), parts, rtol=1e-4, atol=2e-5, err_msg=path)


def test_what_muon_makes_is_nearly_orthogonal() -> None:
    params, roles = many()
    spec = Optimizer.Muon(schedule=Schedule.Constant(lr=1.0), update_rms=None, max_grad_norm=None)
    actual, state = followed(spec, roles, params, steps=1)
    for path in ("wide", "experts", "router"):
        _, inputs, outputs = roles[path]
        size = math.sqrt(max(1, params[path].shape[outputs] / params[path].shape[inputs]))
        for step in unstacked(path, (params[path] - actual[path]) / size):
            values = np.linalg.svd(step, compute_uv=False)
            assert 0.6 < values.min() <= values.max() < 1.25, path
    kept = {
        jax.tree_util.keystr(keys, simple=True, separator=".") for keys, _ in jax.tree_util.tree_leaves_with_path(state)
    }
    assert not any(name.endswith(("nu.wide", "nu.experts", "nu.square", "nu.router")) for name in kept)
    assert {"nu.table", "nu.filter", "nu.norm"} <= {".".join(name.split(".")[-2:]) for name in kept}


def test_patterns_that_name_nothing_are_refused(experiment: Callable[..., Experiment]) -> None:
    spec = Optimizer.Muon(
        schedule=Schedule.Constant(lr=0.1), weight_decay=0.1, undecayed=("embed", "embde"), by_adamw=("mlp", "sinks")
    )
    with pytest.raises(PlanError) as caught:
        build_blueprint(experiment(optimizer=spec))
    assert str(caught.value) == (
        "2 problems in Experiment 'small'\n"
        "  optimizer.undecayed.1: 'embde' names no array; did you mean 'embed'?\n"
        "  optimizer.by_adamw.1: 'sinks' names no array; there are: attention, down, embed, embedding, gate, key, "
        "key_norm, mlp, norm, output, post_attention_norm, post_mlp_norm, pre_attention_norm, pre_mlp_norm, query, "
        "query_norm, up, value"
    )


@pytest.mark.parametrize(
    "spec",
    [
        Optimizer.Adafactor(schedule=Schedule.Constant(lr=0.1), min_factored=8),
        Optimizer.Muon(schedule=Schedule.Constant(lr=0.1)),
    ],
    ids=["adafactor", "muon"],
)
def test_state_lies_as_the_parameters_do(spec: Optimizer, experiment: Callable[..., Experiment]) -> None:
    blueprint = build_blueprint(
        experiment(optimizer=spec, mesh=Mesh(data=2, fsdp=2, tensor=2, zero1=False), batch_size=8)
    )
    weights = {placed.path: placed for placed in blueprint.layout.arrays["trainable"].values()}
    owned = 0
    for path, placed in blueprint.layout.arrays["optimizer"].items():
        owner = next((name for name in weights if path.endswith(f".{name}")), None)
        if owner is None:
            assert placed.bytes <= 12  # counts and coefficients
            continue
        owned += 1
        place = dict(zip(weights[owner].axes, weights[owner].spec, strict=True))
        assert placed.axes == tuple(axis for axis in weights[owner].axes if axis in placed.axes), path
        assert [place[axis] for axis in placed.axes] == list(placed.spec), path
        if placed.shape != weights[owner].shape:
            lost = weights[owner].axes[-1 if ".rows." in f".{path}" else -2]
            assert set(weights[owner].axes) - set(placed.axes) == {lost}
    assert owned >= len(weights)
    assert blueprint.layout.device_bytes()["optimizer"] < 1.5 * blueprint.layout.device_bytes()["trainable"]
