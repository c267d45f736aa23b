"""LoRA's variants and DoRA: where they begin, what they merge to, what they leave out, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_lab.model import Small

from nnxdsl import Adapter, Batching, Experiment, Memory, Mesh, PlanError, Quantization, SpecError, Weights, compile
from nnxdsl.adapters import lora_math
from nnxdsl.adapters.lora import AdaptedLinear
from nnxdsl.data.batch import PairBatch
from nnxdsl.models.attention.positions import TokenPositions, positions_right_padded
from nnxdsl.models.dropout import at_layer, dropped, dropping, stamp
from nnxdsl.models.layers.linear import Linear
from nnxdsl.models.params import AbstractModel, path_in_group
from nnxdsl.program import precomputed
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.program.compile import Program, TrainState

PATTERNS: dict[str, Any] = {"rank": 2, "alpha": 6.0, "ranks": (("mlp.down", 3),), "alphas": (("attention", 2.0),)}


def moved(program: Program, state: TrainState) -> TrainState:
    """A state whose adapters are far from where they begin."""
    draw = np.random.default_rng(5)
    leaves = {
        path: jax.device_put(
            leaf * jnp.asarray(draw.uniform(0.5, 2.0, leaf.shape), leaf.dtype)
            if path.endswith(lora_math.M)
            else jnp.asarray(draw.standard_normal(leaf.shape) * 0.2, leaf.dtype),
            leaf.sharding,
        )
        for path, leaf in state.trainable.items()
    }
    return state._replace(trainable=leaves)


def logits(program: Program, template: Any, leaves: dict[str, jax.Array]) -> np.ndarray:
    tokens = np.random.default_rng(0).integers(0, 48, (2, 9))

    @jax.jit
    def run(leaves: dict[str, jax.Array]) -> jax.Array:
        model = template.merge(leaves)
        return model(tokens, positions_right_padded(jnp.array([9, 6]), 9), dtype=jnp.float32).hidden @ model.head().T

    return np.asarray(run(leaves))


@pytest.mark.default_variants(1)
@pytest.mark.parametrize(
    "adapter",
    [
        pytest.param(Adapter.LoRA(**PATTERNS, scaling="sqrt_rank"), id="rslora"),
        pytest.param(Adapter.DoRA(**PATTERNS, targets=("attention", "mlp.down")), id="dora"),
    ],
)
def test_the_merged_weights_are_the_adapted_model(
    adapter: Any, experiment: Callable[..., Experiment], trained: Callable[..., TrainState]
) -> None:
    program = compile(experiment(adapter=adapter, model=Small(layers=3)))
    fresh = trained(program)
    base = logits(program, program.blueprint.base_template, fresh.frozen)
    start = logits(program, program.blueprint.policy, fresh.frozen | fresh.trainable)
    np.testing.assert_allclose(start, base, rtol=0, atol=5e-6)
    state = moved(program, fresh)
    merged = {
        path: lora_math.merged(adapter, path, leaf, state.trainable.__getitem__)
        if path + lora_math.A in state.trainable
        else leaf
        for path, leaf in state.frozen.items()
    }
    actual = logits(program, program.blueprint.policy, state.frozen | state.trainable)
    assert np.abs(actual - base).max() > 0.5
    np.testing.assert_allclose(logits(program, program.blueprint.base_template, merged), actual, rtol=1e-5, atol=5e-5)


def test_patterns_give_ranks_and_scales(experiment: Callable[..., Experiment]) -> None:
    for cls in (Adapter.LoRA, Adapter.DoRA):
        blueprint = build_blueprint(experiment(adapter=cls(**PATTERNS), model=Small(layers=3)))
        ranks = {
            path_in_group(path): leaf.shape[-1]
            for path, leaf in blueprint.trainable.items()
            if path.endswith("_lora_a")
        }
        assert {rank for path, rank in ranks.items() if "mlp.down" in path} == {3}
        assert {rank for path, rank in ranks.items() if "mlp.down" not in path} == {2}
        sizes = {path: leaf for path, leaf in blueprint.trainable.items() if path.endswith("_lora_m")}
        assert len(sizes) == (len(ranks) * 0 if cls is Adapter.LoRA else len(blueprint.trainable) // 3)
        for path, leaf in sizes.items():
            kernel = blueprint.base[lora_math.kernel_of(path)]
            assert (leaf.shape, leaf.axes) == (
                (*kernel.shape[:-2], kernel.shape[-1]),
                (*kernel.axes[:-2], kernel.axes[-1]),
            )
            assert issubclass(leaf.kind, nnx.LoRAParam)
            assert leaf.dtype == jnp.float32


def test_scales() -> None:
    lora = Adapter.LoRA(rank=4, alpha=8.0, ranks=(("mlp.down", 16), ("mlp", 2)), alphas=(("blocks.0.mlp", 1.0),))
    stable = attrs.evolve(lora, scaling="sqrt_rank")
    for path, rank, alpha in (
        ("blocks.0.attention.query", 4, 8.0),
        ("blocks.0.mlp.down", 16, 1.0),
        ("blocks.1.mlp.up", 2, 8.0),
    ):
        assert lora_math.scale_at(lora, path) == alpha / rank
        assert lora_math.scale_at(stable, path) == alpha / rank**0.5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_one_layer_of_dora_is_its_formula_in_value_and_gradient(dtype: Any) -> None:
    """Of numpy's float64; the norm is a constant in gradients, as in section 4.3 of the paper."""
    rng = np.random.default_rng(0)
    w, a, b = (rng.standard_normal(shape).astype(np.float32).astype(dtype) for shape in ((6, 5), (6, 2), (2, 5)))
    m, x, g = (rng.standard_normal(shape).astype(np.float32) for shape in ((5,), (3, 6), (3, 5)))
    m = np.abs(m)
    x = x.astype(dtype)
    linear = Linear(6, 5, axes=("embed", "mlp"), rngs=nnx.Rngs(0), param_dtype=dtype)
    linear.kernel = nnx.Param(jnp.asarray(w))
    graphdef, state = nnx.split(AdaptedLinear(linear, Adapter.DoRA(rank=2, alpha=3.0)))
    template = AbstractModel(graphdef, nnx.to_flat_state(state))

    @jax.jit
    def run(x: Any, a: Any, b: Any, m: Any) -> jax.Array:
        leaves = {"kernel": jnp.asarray(w), "kernel_lora_a": a, "kernel_lora_b": b, "kernel_lora_m": m}
        module: Any = template.merge(leaves)
        return module(x)

    y, back = jax.vjp(run, *map(jnp.asarray, (x, a, b, m)))
    assert y.dtype == dtype
    w64, a64, b64, x64, m64, g64 = (np.asarray(part, np.float64) for part in (w, a, b, x, m, g))
    v = w64 + 1.5 * a64 @ b64
    ratio = m64 / np.linalg.norm(v, axis=0)
    scaled = g64 * ratio
    wanted = (x64 @ v * ratio, scaled @ v.T, 1.5 * x64.T @ scaled @ b64.T, 1.5 * a64.T @ x64.T @ scaled,
              (g64 * (x64 @ v)).sum(0) / np.linalg.norm(v, axis=0))  # fmt: skip
    rough = 2e-6 if dtype == jnp.float32 else 3e-2
    for actual, right in zip((y, *back(jnp.asarray(g, y.dtype))), wanted, strict=True):
        np.testing.assert_allclose(np.asarray(actual, np.float64), right, rtol=rough, atol=rough * np.abs(right).max())


@pytest.mark.slow
def test_dora_starts_at_its_few_bits_and_keeps_its_copy(
    experiment: Callable[..., Experiment], trained: Callable[..., TrainState]
) -> None:
    program = compile(
        experiment(adapter=Adapter.DoRA(rank=2), quantization=Quantization.NF4(block_size=8), model=Small(layers=2))
    )
    state = trained(program)
    sizes = {path for path in state.trainable if path.endswith(lora_math.M)}
    assert set(state.reference) == sizes
    reference = program.blueprint.reference.template
    assert reference is not None
    frozen = logits(program, reference, {path: state.frozen[path] for path in reference.variables})
    start = logits(program, program.blueprint.policy, state.frozen | state.trainable)
    np.testing.assert_allclose(start, frozen, rtol=0, atol=5e-6)
    for path in sizes:
        assert not np.shares_memory(np.asarray(state.reference[path]), np.asarray(state.trainable[path]))
    once = compile(experiment(adapter=Adapter.DoRA(rank=2), model=Small(layers=2), memory=Memory(reference="cached")))
    assert "reference" not in once.layout.arrays


@pytest.mark.slow
def test_dora_asked_once_or_at_every_step(
    experiment: Callable[..., Experiment], pairs: Callable[..., PairBatch], trained: Callable[..., TrainState]
) -> None:
    batch, after = pairs(4, fill=1), {}
    for mode in ("cached", "online"):
        dora = Adapter.DoRA(rank=2, alpha=4.0)
        fields = {"model": Small(layers=2, pattern=1), "microbatch_size": 2, "memory": Memory(reference=mode)}
        program = compile(experiment(adapter=dora, **fields))
        state = trained(program)
        kept = jax.device_get(state.frozen)
        asked = precomputed.with_reference_logps(program, state, batch) if mode == "cached" else batch
        _, metrics = program.step(jax.tree.map(jnp.copy, state), asked)
        # All rows at once were asked before, so that the products' sums may differ in their last bits.
        assert abs(float(metrics["rewards/margins"])) <= (3e-6 if mode == "cached" else 0.0)
        for _ in range(3):
            state, metrics = program.step(state, asked)
        for path, leaf in kept.items():
            np.testing.assert_array_equal(state.frozen[path], leaf)
        after[mode] = jax.device_get((state.trainable, metrics))
    for path, leaf in after["online"][0].items():
        np.testing.assert_allclose(after["cached"][0][path], leaf, rtol=1e-5, atol=1e-6, err_msg=path)
    assert float(after["online"][1]["rewards/margins"]) != 0.0


def keys(rows: int) -> jax.Array:
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(3), jnp.arange(rows, dtype=jnp.uint32))


def places(rows: int, length: int) -> TokenPositions:
    position = jnp.broadcast_to(jnp.arange(length), (rows, length))
    return TokenPositions(position, jnp.ones_like(position), jnp.zeros_like(position))


def left(rows: jax.Array, length: int, *, layer: int = 0, salt: int = 1, is_on: Any = True, rate: float = 0.25) -> Any:
    @jax.jit
    def drop(rows: jax.Array, is_on: Any, layer: Any) -> jax.Array:
        with dropping(rows, is_on):
            stamp(places(len(rows), length))
            with at_layer(layer):
                return dropped(jnp.ones((len(rows), length, 64)), rate, salt)

    return np.asarray(drop(rows, is_on, layer))


@pytest.mark.extended
def test_what_is_left_out_goes_by_row_position_layer_and_module() -> None:
    whole = left(keys(4), 16)
    assert set(np.unique(whole)) == {np.float32(0), np.float32(1 / 0.75)}
    assert (whole == 0).mean() == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / whole.size) ** 0.5)
    np.testing.assert_array_equal(left(keys(4)[1:3], 16), whole[1:3])  # in parts
    np.testing.assert_array_equal(left(keys(4), 20)[:, :16], whole)  # in longer rows
    for other in (left(keys(4), 16, layer=1), left(keys(4), 16, salt=2), whole[::-1], np.roll(whole, 1, axis=1)):
        assert (other == whole).mean() == pytest.approx(0.25**2 + 0.75**2, abs=0.05)
    np.testing.assert_array_equal(left(keys(4), 16, is_on=jnp.array(False)), 1)
    np.testing.assert_array_equal(left(keys(4), 16, rate=0.0), 1)
    with dropping(keys(2)):
        stamp(places(2, 3))
        with pytest.raises(ValueError, match="are not those of the decoder's tokens"):
            dropped(jnp.ones((2, 4, 8)), 0.5, 1)


@pytest.mark.slow
def test_dropout_is_of_the_policy_in_training_alone(
    experiment: Callable[..., Experiment],
    pairs: Callable[..., PairBatch],
    trained: Callable[..., TrainState],
) -> None:
    batch = pairs(4, fill=1)
    fields: dict[str, Any] = {"model": Small(layers=3), "adapter": Adapter.LoRA(rank=2, dropout=0.3)}
    program = compile(experiment(**fields))
    state = moved(program, trained(program))

    def step(program: Program, number: int = 0) -> dict[str, np.ndarray]:
        copied = jax.tree.map(jnp.copy, state)._replace(step=jnp.asarray(number, jnp.int32))
        after, metrics = program.step(copied, batch)
        return {**{p: np.asarray(x) for p, x in after.trainable.items()}, **jax.device_get(metrics)}

    none = compile(experiment(**fields | {"adapter": Adapter.LoRA(rank=2)}))
    first, off = step(program), step(none)
    assert first["logps/chosen"] != off["logps/chosen"]
    # The reference has no adapter, so that what is left out shows in nothing but the policy.
    assert first["logps/chosen"] - first["rewards/chosen"] / 0.5 == pytest.approx(
        off["logps/chosen"] - off["rewards/chosen"] / 0.5, rel=1e-6
    )
    evaluated = [{k: float(r.total) for k, r in p.evaluate(state, batch).items()} for p in (program, none)]
    assert evaluated[0] == evaluated[1]
    # Bits go by seed and step, and not by how the batch is computed.
    assert step(program, 1)["logps/chosen"] != first["logps/chosen"]
    for others in ({"microbatch_size": 2}, {"memory": Memory(reference="online", remat="full")}):
        actual = step(compile(experiment(**fields, **others)))
        for name, value in first.items():
            np.testing.assert_allclose(actual[name], value, rtol=2e-5, atol=1e-6, err_msg=name)
    other = step(compile(experiment(**fields, seed=1)))
    assert other["logps/chosen"] != first["logps/chosen"]


def refusal(of: Callable[[], Any], kind: type[Exception] = PlanError) -> str:
    with pytest.raises(kind) as caught:
        of()
    return str(caught.value)


def test_patterns_that_change_nothing(experiment: Callable[..., Experiment]) -> None:
    lora = Adapter.LoRA(targets=("mlp",), ranks=(("mlp", 2), ("mlp.down", 4)), alphas=(("query", 2.0), ("dwn", 1.0)))
    assert refusal(lambda: build_blueprint(experiment(adapter=lora))) == (
        "3 problems in Experiment 'small'\n"
        "  adapter.ranks.1.0: 'mlp.down' has no effect: earlier patterns match all of its layers, and the "
        "first one counts\n"
        "  adapter.alphas.0.0: 'query' matches no layer that the adapter is on; there are: down, gate, mlp, up\n"
        "  adapter.alphas.1.0: 'dwn' matches no layer that the adapter is on; did you mean 'down'?"
    )


def test_what_does_not_go_together(experiment: Callable[..., Experiment]) -> None:
    lora = Adapter.LoRA(dropout=0.1)
    said = refusal(lambda: experiment(adapter=lora, batching=Batching.Packed(length=64), mesh=Mesh(stage=2)), SpecError)
    assert (
        "  adapter.dropout: 0.1 cannot be drawn in packed batches: masks are keyed by row and position, and the mesh "
        "decides which rows Batching.Packed puts side by side; set batching=Batching.Padded() or "
        "batching=Batching.Bucketed(), which compute the same objective with this dropout, or adapter.dropout=0.0, "
        "which keeps packed batches and trains without dropout\n" in said
    )
    for batching in (Batching.Padded(), Batching.Bucketed()):
        assert experiment(adapter=lora, batching=batching)
    assert experiment(adapter=Adapter.LoRA(), batching=Batching.Packed(length=64))
    assert "  adapter.dropout: is not implemented in the stages of a pipeline; set 0.0, or mesh.stage=1" in said
    weights = Weights.PEFT("adapter")
    assert refusal(lambda: experiment(model=Small(weights=weights)), SpecError) == (
        "1 problem in Experiment 'small'\n"
        "  model.weights: Weights.PEFT is an adapter and no model; continue it with Adapter.LoRA(start=...), or "
        "merge it with Weights.Merged"
    )
    assert refusal(lambda: Adapter.DoRA(ranks=(("", 2), ("up", 0)), start=Weights.HF("model")), SpecError) == (
        "3 problems in Adapter.DoRA\n"
        "  ranks.0.0: is empty\n"
        "  ranks.1.1: expected a value > 0, got 0\n"
        "  start: Weights.HF gives a model's weights; an adapter's are given by Weights.PEFT, Weights.Checkpoint and "
        "Weights.From"
    )
