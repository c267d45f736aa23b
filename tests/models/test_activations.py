"""Activations are named for each of their dimensions, a constraint acts on them, and without one nothing changes."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx

from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.models import params
from nnxdsl.models.attention.kv_cache import init_cache
from nnxdsl.models.attention.positions import positions_left_padded, positions_right_padded
from nnxdsl.models.config.layer_pattern import local_then_global
from nnxdsl.models.decoder import Decoder, LayerGroup, example_inputs
from nnxdsl.models.families.gemma3 import GEMMA3
from nnxdsl.models.families.llama3 import LLAMA3
from nnxdsl.models.logical_axes import Axes, constrain, sharding_hooks

SMALL = {"vocab_size": 50, "embed_dim": 32, "mlp.dim": 64, "head_dim": 8}
CONFIGS = {
    "gemma3": GEMMA3["tiny"].with_fields(
        {**SMALL, "layers.num_layers": 8, "layers.pattern": local_then_global(3)}
    ),  # two periods and a tail of two
    "llama3": LLAMA3["tiny"].with_fields({**SMALL, "layers.num_layers": 3}),
}
HIDDEN = ("batch", "length", "activation_embed")
QUERY = ("batch", "length", "activation_heads", None)
KEY = ("batch", "length", "activation_kv_heads", None)
MLP = ("batch", "length", "activation_mlp")


class Recorder:
    """A constraint that changes nothing and writes down what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], Axes]] = []

    def __call__(self, x: jax.Array, axes: Axes) -> jax.Array:
        assert len(axes) == x.ndim
        self.calls.append((x.shape, axes))
        return x


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("remat", ["none", "full"])
def test_every_activation_of_a_forward_is_named(name: str, remat: str) -> None:
    config = CONFIGS[name]
    template = abstract_decoder(config)
    values = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in template.variables.items()}
    seen = Recorder()

    def forward(values: dict[str, jax.Array]) -> jax.Array:
        with sharding_hooks(seen):
            places = positions_right_padded(jnp.array([5, 3]), 5)
            return template.merge(values)(jnp.zeros((2, 5), jnp.int32), places, dtype=jnp.float32, remat=remat)[0]

    jax.eval_shape(forward, values)
    # A scan's body is traced once, and layers of it that are alike are, too.
    traced = len(set(config.layers.pattern)) + len(set(config.layers.suffix))
    assert Counter(seen.calls) == {
        ((2, 5, 32), HIDDEN): 2 + 2 * traced,
        ((2, 5, 4, 8), QUERY): traced,
        ((2, 5, 2, 8), KEY): 2 * traced,
        ((2, 5, 64), MLP): traced,
        ((50, 32), ("vocab", None)): 1,  # the table, which is looked up whole
    }


@pytest.mark.extended
def test_what_the_constraint_returns_is_what_goes_on() -> None:
    config = CONFIGS["llama3"]
    template = abstract_decoder(config)
    leaves = jax.jit(lambda: params.flatten(Decoder(config, rngs=nnx.Rngs(0))))()
    tokens, places = jax.random.randint(jax.random.key(0), (2, 6), 0, 50), positions_left_padded(jnp.array([6, 4]), 6)

    def run() -> jax.Array:  # traced anew each time
        return jax.jit(lambda leaves: template.merge(leaves)(tokens, places, dtype=jnp.float32)[0])(leaves)

    plain = run()
    for doubled in (HIDDEN, QUERY, KEY, MLP):
        with sharding_hooks(lambda x, axes, doubled=doubled: x * 2 if axes == doubled else x):
            assert float(jnp.abs(run() - plain).max()) > 1e-3, doubled
    again = run()
    assert bool((again == plain).all())  # after the context nothing is left of it


@pytest.mark.extended
def test_a_sharding_constraint_changes_no_number_and_stands_in_the_program() -> None:
    config = CONFIGS["gemma3"]
    template = abstract_decoder(config)
    leaves = jax.jit(lambda: params.flatten(Decoder(config, rngs=nnx.Rngs(0))))()
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tokens, places = jax.random.randint(jax.random.key(0), (2, 6), 0, 50), positions_right_padded(jnp.array([6, 4]), 6)
    cache = init_cache(config, 2, 8, jnp.float32)

    def placed(x: jax.Array, axes: Axes) -> jax.Array:
        spec = jax.sharding.PartitionSpec(*("data" if axis == "batch" else None for axis in axes))
        return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, spec))

    def plain(leaves, cache):
        return template.merge(leaves)(tokens, places, cache=cache, return_kv=True, dtype=jnp.float32)

    def constrained(leaves, cache):
        with sharding_hooks(placed):
            return plain(leaves, cache)

    assert "sharding_constraint" not in str(jax.make_jaxpr(plain)(leaves, cache))
    assert "sharding_constraint" in str(jax.make_jaxpr(constrained)(leaves, cache))
    got, wanted = jax.jit(constrained)(leaves, cache), jax.jit(plain)(leaves, cache)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=0)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:The 'm.iter_modules:DeprecationWarning")
@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_find_all_layers_under_a_constraint(name: str) -> None:
    config, seen = CONFIGS[name], Recorder()

    def adapt(period: LayerGroup) -> LayerGroup:
        provider = qwix.LoraProvider([qwix.LoraRule(module_path=".*", rank=2, alpha=2.0)])
        return qwix.apply_lora_to_model(period, provider, *example_inputs(config), rngs=nnx.Rngs(1))

    def variables() -> dict[str, params.ParamSpec]:
        return params.abstract(lambda: Decoder(config, rngs=nnx.Rngs(0), adapt=adapt)).variables

    plain = variables()
    with sharding_hooks(seen):
        assert variables() == plain
    assert ((1, 1, 64), MLP) in seen.calls  # traced under vmap, which hides its axis
    linears = {path.removesuffix(".kernel") for path in plain if path.endswith(".kernel")} - {"lm_head"}
    assert {path.removesuffix(".kernel_lora_a") for path in plain if path.endswith("_lora_a")} == linears


def test_names_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"2 logical axes \('batch', None\) for an activation of shape \(1, 2, 3\)"):
        constrain(jnp.zeros((1, 2, 3)), "batch", None)
