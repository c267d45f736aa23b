"""Mixtures of experts: equal to transformers' blocks, in any layout; nothing of padding, adapters from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nnxdsl.models import params
from nnxdsl.models.config.feed_forward import MLPConfig
from nnxdsl.models.config.moe import MoEConfig
from nnxdsl.models.logical_axes import sharding_hooks
from nnxdsl.models.moe.grouped_matmul import grouped_dot
from nnxdsl.models.moe.layer import ExpertLinear, ExpertMLP
from nnxdsl.models.moe.router import RouterStats, load_balance, route, router_stats
from nnxdsl.models.remat import with_remat

REFERENCE = Path(__file__).parents[1] / "reference" / "experts"
_SIZES = {"num_experts": 8, "num_experts_per_tok": 3, "mlp_dim": 12}
_DEEPSEEK = {
    "scoring": "sigmoid",
    "routed_scaling_factor": 2.5,
    "e_score_correction_bias": True,
    "shared_expert_dim": 24,
}
CONFIGS = {
    "mixtral": MoEConfig(**_SIZES),
    "qwen3_moe": MoEConfig(**_SIZES),
    "qwen3_moe_as_scored": MoEConfig(**_SIZES, norm_topk_prob=False),
    "gpt_oss": MoEConfig(**_SIZES, scoring="softmax_of_chosen", router_bias=True, expert_bias=True, swiglu_limit=7.0),
    "deepseek_v3": MoEConfig(**_SIZES, **_DEEPSEEK, n_group=4, topk_group=2),
    "deepseek_v3_one_group": MoEConfig(**_SIZES, **_DEEPSEEK),
    "qwen3_next": MoEConfig(**_SIZES, shared_expert_dim=20, shared_expert_gate=True),
}
EMBED = 16


def ours(theirs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters, or their gradients, of transformers' block under our paths."""
    result: dict[str, np.ndarray] = {}
    shared = {"gate_proj.weight": "gate.kernel", "up_proj.weight": "up.kernel", "down_proj.weight": "down.kernel"}
    for name, value in theirs.items():
        module, _, rest = name.partition(".")
        if module in ("gate", "router"):
            result["router." + rest.replace("e_score_correction_bias", "correction")] = value
        elif module in ("shared_expert", "shared_experts"):
            result[f"shared.{shared[rest]}"] = value.T
        elif module == "shared_expert_gate":
            result["shared.weight"] = value[0]
        elif "gate_up_proj_bias" in theirs or "experts.gate_up_proj_bias" in theirs:  # GPT-OSS: [E, in, out], mixed
            leaf = "bias" if rest.endswith("bias") else "kernel"
            if rest.startswith("down"):
                result[f"down.{leaf}"] = value
            else:
                result[f"gate.{leaf}"], result[f"up.{leaf}"] = value[..., ::2], value[..., 1::2]
        elif rest == "gate_up_proj":  # [E, 2 out, in], one after the other
            result["gate.kernel"], result["up.kernel"] = np.split(value.swapaxes(1, 2), 2, axis=-1)
        else:
            result["down.kernel"] = value.swapaxes(1, 2)
    return result


def stored(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What stands beside the parameters, the parameters, and the gradients, the last two under our paths."""
    with np.load(REFERENCE / f"{name}.npz") as file:
        everything = dict(file)
    beside = {key: everything.pop(key) for key in ("x", "c", "output", "gradient:x")}
    gradients = {key.partition(":")[2]: value for key, value in everything.items() if key.startswith("gradient:")}
    return beside, ours({key: value for key, value in everything.items() if ":" not in key}), ours(gradients)


def template_of(experts: MoEConfig, embed: int = EMBED) -> params.AbstractModel:
    return params.abstract(
        lambda: ExpertMLP(embed, experts, MLPConfig(dim=8), rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    )


def random_leaves(template: params.AbstractModel, seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {
        path: jnp.asarray(rng.normal(size=leaf.shape) * leaf.shape[-1] ** -0.5, leaf.dtype)
        for path, leaf in template.variables.items()
    }


@pytest.mark.extended
def test_limits_of_gpt_oss_are_those_of_its_settings() -> None:
    """Of two equal experts, whose weights add up to 1."""
    limits = {"swiglu_limit": 0.5, "swiglu_alpha": 1.2}
    config = MoEConfig(**{**_SIZES, "num_experts": 2, "num_experts_per_tok": 2}, scoring="softmax_of_chosen",
                       router_bias=True, expert_bias=True, **limits)  # fmt: skip
    template = template_of(config)
    values = {
        path: value if path.startswith("router") else jnp.broadcast_to(value[:1], value.shape)
        for path, value in random_leaves(template).items()
    }
    x = np.random.default_rng(1).normal(size=(1, 5, EMBED)).astype(np.float32)
    module: Any = template.merge(values)
    actual, _ = module(jnp.asarray(x), jnp.ones((1, 5), bool))

    def linear(name: str, inputs: np.ndarray) -> np.ndarray:
        return inputs @ np.asarray(values[f"{name}.kernel"][0], float) + np.asarray(values[f"{name}.bias"][0], float)

    gate, up = np.minimum(linear("gate", x), 0.5), np.clip(linear("up", x), -0.5, 0.5)
    assert (np.abs(up) == 0.5).any()
    assert (gate == 0.5).any()
    np.testing.assert_allclose(
        actual, linear("down", (up + 1) * gate / (1 + np.exp(-1.2 * gate))), rtol=1e-4, atol=1e-5
    )


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_and_their_gradients_are_those_of_transformers(name: str) -> None:
    beside, parameters, gradients = stored(name)
    template = template_of(CONFIGS[name])
    assert {path: value.shape for path, value in parameters.items()} == {
        path: leaf.shape for path, leaf in template.variables.items()
    }

    @jax.jit
    def run(values: dict[str, Any], x: Any) -> Any:
        def loss(values: dict[str, Any], x: Any) -> tuple[jax.Array, jax.Array]:
            module: Any = template.merge(values)
            out, _ = module(x, jnp.ones(x.shape[:2], bool))
            return jnp.sum(out * beside["c"]), out

        (_, out), actual = jax.value_and_grad(loss, (0, 1), has_aux=True)(values, x)
        return out, actual

    out, (to_values, to_x) = run(parameters, beside["x"])
    # Figures reach 10 and more; 1e-5 of the largest is some units in the last place of its sums.
    np.testing.assert_allclose(out, beside["output"], rtol=1e-5, atol=1e-5 * np.abs(beside["output"]).max())
    np.testing.assert_allclose(to_x, beside["gradient:x"], rtol=1e-5, atol=1e-5 * np.abs(beside["gradient:x"]).max())
    for path, wanted in gradients.items():
        np.testing.assert_allclose(
            to_values[path], wanted, rtol=1e-5, atol=1e-5 * max(np.abs(wanted).max(), 1), err_msg=path
        )
    for path in to_values.keys() - gradients.keys():  # transformers keeps the correction as a buffer
        assert path == "router.correction"
        assert not to_values[path].any()


def test_the_figures_reach_what_they_are_for() -> None:
    """Gates beyond both limits, experts that the correction or the groups exclude, experts without a token."""
    beside, values, _ = stored("gpt_oss")
    gate = np.einsum("btd,edf->btef", beside["x"], values["gate.kernel"]) + values["gate.bias"]
    assert gate.max() > 7
    up = np.einsum("btd,edf->btef", beside["x"], values["up.kernel"]) + values["up.bias"]
    assert up.max() > 7
    assert up.min() < -7

    beside, values, _ = stored("deepseek_v3")
    logits = jnp.einsum("btd,ed->bte", beside["x"], values["router.weight"])
    config = CONFIGS["deepseek_v3"]

    def chosen(experts: MoEConfig, correction: Any) -> np.ndarray:
        return np.sort(route(logits, experts, correction).expert, axis=-1)

    real = chosen(config, values["router.correction"])
    assert (real != chosen(config, None)).any()
    assert (real != chosen(attrs.evolve(config, n_group=1, topk_group=1), values["router.correction"])).any()


@pytest.mark.parametrize("masked", [True, False])
def test_the_load_balancing_loss_is_that_of_transformers(masked: bool) -> None:
    with np.load(REFERENCE / "balance.npz") as file:
        figures = dict(file)
    mask = figures["mask"].astype(bool) if masked else np.ones(figures["mask"].shape, bool)
    layers = [router_stats(route(logits, CONFIGS["mixtral"]), mask) for logits in figures["logits"]]
    value, count = load_balance(jax.tree.map(lambda *parts: sum(parts), *layers))
    assert count == 2 * mask.sum()
    np.testing.assert_allclose(value / count, figures["masked" if masked else "unmasked"], rtol=1e-6)


def test_the_loss_of_no_tokens_is_nothing_and_so_is_its_gradient() -> None:
    nobody = jnp.zeros((1, 3), bool)

    def loss(logits: jax.Array) -> jax.Array:
        return load_balance(router_stats(route(logits, CONFIGS["mixtral"]), nobody))[0]

    value, gradient = jax.value_and_grad(loss)(jnp.ones((1, 3, 8)))
    assert value == 0
    assert not gradient.any()


def test_padding_goes_nowhere() -> None:
    template = template_of(attrs.evolve(CONFIGS["qwen3_next"], expert_bias=True, router_bias=True))
    values, rng = random_leaves(template), np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(2, 7, EMBED)), jnp.float32)
    real = jnp.arange(7)[None] < jnp.array([[7], [4]])

    @jax.jit
    def run(values: dict[str, jax.Array], x: jax.Array, real: jax.Array) -> tuple[Any, Any]:
        def loss(values: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
            module: Any = template.merge(values)
            out, stats = module(x, real)
            return jnp.sum(jnp.sin(jnp.where(real[..., None], out, 0))) + load_balance(stats)[0], (out, stats)

        return jax.grad(loss, has_aux=True)(values)

    # Another content of the padding, as large as it gets, changes no bit of what is real.
    gradient, (out, stats) = run(values, x, real)
    other_gradient, (other, other_stats) = run(values, jnp.where(real[..., None], x, 1e4), real)
    np.testing.assert_array_equal(out[real], other[real])
    jax.tree.map(np.testing.assert_array_equal, (stats, gradient), (other_stats, other_gradient))
    assert stats.tokens == 11
    assert stats.chosen.sum() == 3 * 11
    np.testing.assert_allclose(stats.probability.sum(), 11, rtol=1e-6)
    # The row alone, without padding, is the same.
    alone = jax.jit(lambda values, x: template.merge(values)(x, jnp.ones((1, 4), bool))[0])(values, x[1:, :4])
    np.testing.assert_allclose(out[1:, :4], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 40, 130])  # 130 x 3 slots: some experts have more than one block of rows
def test_grouped_products_are_those_of_ragged_dot(tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    slots = tokens * 3
    group = np.sort(rng.choice([0, 1, 1, 1, 3, 4], slots)).astype(np.int32)  # 2 has no rows, 4 is no group
    x, kernel, change = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((slots, 6), (4, 6, 5), (slots, 5))
    )
    sizes = jnp.asarray(np.bincount(group, minlength=5)[:4], jnp.int32)

    def blocks(x: jax.Array, kernel: jax.Array) -> jax.Array:
        product = grouped_dot(x.reshape(1, tokens, 3, 6), kernel, jnp.asarray(group).reshape(1, tokens, 3))
        return jnp.sum(product.reshape(slots, 5) * change)

    def ragged(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.ragged_dot(x, kernel, sizes) * change)

    actual, wanted = (jax.jit(jax.value_and_grad(f, (0, 1)))(x, kernel) for f in (blocks, ragged))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4), actual, wanted)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_other_platforms_are_given_ragged_products(platform: str) -> None:
    """Lowered, not run: there is no such device here. Also of many side by side, of which ragged_dot has no rule."""
    template = template_of(CONFIGS["gpt_oss"])

    def loss(values: dict[str, Any], x: jax.Array) -> jax.Array:
        module: Any = template.merge(values)
        return jnp.sum(module(x, jnp.ones(x.shape[:2], bool))[0])

    shapes = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in template.variables.items()}
    x = jax.ShapeDtypeStruct((2, 4, EMBED), jnp.float32)
    stacked = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), (shapes, x))
    for function, inputs in ((loss, (shapes, x)), (jax.vmap(loss), stacked)):
        gradient = jax.jit(lambda *values, f=function: jax.grad(lambda *a: jnp.sum(f(*a)))(*values))
        text = gradient.trace(*inputs).lower(lowering_platforms=(platform,)).as_text()
        assert (
            text.count("chlo.ragged_dot") + text.count("mhlo.ragged_dot") >= 8
        )  # of each product, one of three may go
        assert "stablehlo.while" not in text


def stacked_layers(layers: int) -> tuple[Any, dict[str, jax.Array], jax.Array]:
    """One layer with a residual stream as a function, the weights of several, and the first one's input."""
    template = template_of(CONFIGS["mixtral"])
    weights = jax.tree.map(lambda *parts: jnp.stack(parts), *(random_leaves(template, seed) for seed in range(layers)))
    real = jnp.arange(5)[None] < jnp.array([[5], [3]])

    def one(values: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, RouterStats]:
        module: Any = template.merge(values)
        out, stats = module(x, real)
        return x + out, stats

    return one, weights, jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, EMBED)), jnp.float32)


@pytest.mark.extended
def test_layers_in_a_scan_with_rematerialisation() -> None:
    one, weights, x = stacked_layers(2)

    def ended(out: jax.Array, stats: RouterStats) -> jax.Array:
        return jnp.sum(jnp.sin(out)) + load_balance(stats)[0]

    def unrolled(weights: dict[str, jax.Array]) -> jax.Array:
        first, second = (jax.tree.map(lambda leaf, index=layer: leaf[index], weights) for layer in range(2))
        out, stats = one(first, x)
        out, more = one(second, out)
        return ended(out, jax.tree.map(jnp.add, stats, more))

    def scanned(weights: dict[str, jax.Array]) -> jax.Array:
        run = with_remat(one, "products")
        out, stats = jax.lax.scan(lambda out, values: run(values, out), x, weights)
        return ended(out, jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), stats))

    actual, wanted = (jax.jit(jax.value_and_grad(f))(weights) for f in (scanned, unrolled))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), actual, wanted)


@pytest.mark.extended
def test_layers_side_by_side() -> None:
    """As the stages of a pipeline run: each layer with its own weights."""
    one, weights, x = stacked_layers(2)

    def gradient(values: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        return jax.grad(lambda values: jnp.sum(jnp.sin(one(values, x)[0])))(values)

    many, alone = jax.jit(jax.vmap(gradient, (0, None)))(weights, x), jax.jit(gradient)
    for layer in range(2):
        wanted = alone(jax.tree.map(lambda leaf, index=layer: leaf[index], weights), x)
        for path, ours in wanted.items():
            np.testing.assert_allclose(many[path][layer], ours, rtol=2e-5, atol=2e-5, err_msg=path)


def test_narrow_inputs_stay_narrow_and_the_router_does_not() -> None:
    template = template_of(CONFIGS["qwen3_next"])
    module: Any = template.merge(random_leaves(template))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, EMBED)), jnp.bfloat16)
    run = jax.jit(lambda x: module(x, jnp.ones((1, 6), bool)))
    out, stats = run(x)
    assert out.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(stats)} == {jnp.dtype("float32")}
    wide, same = run(x.astype(jnp.float32))
    np.testing.assert_array_equal(stats.chosen, same.chosen)
    np.testing.assert_allclose(out.astype(jnp.float32), wide, atol=0.03)


def test_every_weight_and_activation_names_its_axes() -> None:
    names = {path: leaf.axes for path, leaf in template_of(CONFIGS["gpt_oss"]).variables.items()}
    inner, outer = ("experts", "embed", "mlp"), ("experts", "mlp", "embed")
    assert names == {
        "router.weight": (None, "embed"),
        "router.bias": (None,),
        **{f"{name}.kernel": inner for name in ("gate", "up")},
        **{f"{name}.bias": ("experts", "mlp") for name in ("gate", "up")},
        "down.kernel": outer,
        "down.bias": ("experts", "embed"),
    }
    seen: list[tuple[tuple[int, ...], tuple[str | None, ...]]] = []

    def recorder(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        seen.append((x.shape, axes))
        return x

    template = template_of(CONFIGS["qwen3_next"])
    shapes = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in template.variables.items()}

    def forward(values: dict[str, jax.Array]) -> Any:
        module: Any = template.merge(values)
        return module(jnp.zeros((1, 2, EMBED)), jnp.ones((1, 2), bool))

    with sharding_hooks(recorder):
        jax.eval_shape(forward, shapes)
    assert ((1, 2, 8), ("batch", "length", None)) in seen
    assert ((1, 2, EMBED), ("batch", "length", "activation_embed")) in seen


def test_first_weights_have_variance_one_over_inputs() -> None:
    linear = ExpertLinear(4, 64, 128, axes=("embed", "mlp"), bias=True, rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    assert float(jnp.std(linear.kernel[...])) == pytest.approx(1 / 8, rel=0.02)
    assert linear.bias is not None
    assert not linear.bias[...].any()
    assert len({float(kernel[0, 0]) for kernel in linear.kernel[...]}) == 4


WRONG: dict[str, dict[str, Any]] = {
    "moe.num_experts must be above 0, got 0": {"num_experts": 0},
    "moe.num_experts_per_tok=9 exceeds num_experts=8": {"num_experts_per_tok": 9},
    "moe.scoring: expected one of ('softmax', 'softmax_of_chosen', 'sigmoid'), got 'tanh'": {"scoring": "tanh"},
    "moe.shared_expert_gate: there is no shared expert; set shared_expert_dim": {"shared_expert_gate": True},
    "moe.norm_topk_prob=False: a softmax of the chosen sums to 1; use scoring='softmax'": {
        "scoring": "softmax_of_chosen",
        "norm_topk_prob": False,
    },
    "moe: e_score_correction_bias needs scoring='sigmoid', got 'softmax'": {"e_score_correction_bias": True},
    "moe: cannot choose topk_group=1 of n_group=3 groups of 8 experts": {"scoring": "sigmoid", "n_group": 3},
    "moe.n_group=8: a group needs two of 8 experts": {"scoring": "sigmoid", "n_group": 8},
    "moe.num_experts_per_tok=3 exceeds the 2 experts of topk_group=1": {"scoring": "sigmoid", "n_group": 4},
}


@pytest.mark.parametrize("message", WRONG)
def test_numbers_that_do_not_fit(message: str) -> None:
    with pytest.raises(ValueError, match=r"^moe") as caught:
        MoEConfig(**{**_SIZES, **WRONG[message]})
    assert str(caught.value) == message


def test_a_group_is_scored_by_its_best_expert_or_by_its_best_two() -> None:
    logits = jnp.asarray([[[2.0, -5.0, 1.5, 1.5]]])  # the best expert is in the first group, the best two in the second
    sizes = {"num_experts": 4, "num_experts_per_tok": 1, "mlp_dim": 8, "n_group": 2, "topk_group": 1}
    best, best_two = (
        route(logits, MoEConfig(**sizes, group_score=score, norm_topk_prob=False, routed_scaling_factor=16.0))
        for score in ("best", "best_two")
    )
    assert (int(best.expert[0, 0, 0]), int(best_two.expert[0, 0, 0])) == (0, 2)
    np.testing.assert_allclose(best.weight[0, 0, 0], 16.0 * jax.nn.softmax(logits)[0, 0, 0], rtol=1e-6)
    with pytest.raises(ValueError, match="moe: n_group needs scoring='sigmoid' or 'softmax', got 'softmax_of_chosen'"):
        MoEConfig(**sizes, scoring="softmax_of_chosen")
