"""Adapters and quantised bases: where they are put, what they hold, and what is refused, by its whole text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx
from small_lab.model import Small

from nnxdsl import Adapter, Experiment, Model, PlanError, Quantization, compile
from nnxdsl.adapters import lora_math, weight_only_quant
from nnxdsl.config.adapter import alpha_at, named, rank_at
from nnxdsl.errors import NotRegisteredError
from nnxdsl.formats.hf_names import tensor_sources
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.models.decoder import LayerGroup, example_inputs
from nnxdsl.models.families.registry import FAMILIES, Family
from nnxdsl.models.params import flatten, path_in_group
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.program.compile import Program, TrainState

ATTENTION = {"attention.query", "attention.key", "attention.value", "attention.output"}
MLP = {"mlp.gate", "mlp.up", "mlp.down"}
SUBSETS: dict[tuple[str, ...], set[str]] = {
    ("attention", "mlp"): ATTENTION | MLP,
    ("attention",): ATTENTION,
    ("mlp",): MLP,
    ("query", "value"): {"attention.query", "attention.value"},
    ("mlp.up", "key"): {"mlp.up", "attention.key"},
    ("blocks.0",): ATTENTION | MLP,
}


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("targets", SUBSETS)
def test_adapters_are_exactly_at_the_targets(targets: tuple[str, ...], experiment: Callable[..., Experiment]) -> None:
    model = Small(layers=3)  # one period of two blocks, a tail of one
    blueprint = build_blueprint(
        experiment(
            model=model,
            adapter=Adapter.LoRA(rank=2, targets=targets),
            quantization=Quantization.Int8(block_size=4, targets=targets),
        )
    )
    blocks = ("layers.blocks.0", "tail.blocks.0") + (() if targets == ("blocks.0",) else ("layers.blocks.1",))
    kernels = {f"{block}.{layer}.kernel" for block in blocks for layer in SUBSETS[targets]}
    assert set(blueprint.trainable) == {kernel + end for kernel in kernels for end in (lora_math.A, lora_math.B)}
    assert {
        path.removesuffix(weight_only_quant.QVALUE)
        for path in blueprint.frozen
        if path.endswith(weight_only_quant.QVALUE)
    } == kernels
    for path, leaf in blueprint.trainable.items():
        base = blueprint.base[path[: path.rindex("_lora")]]
        rank_axis = -1 if path.endswith(lora_math.A) else -2
        assert leaf.axes[rank_axis] == "rank"
        assert leaf.shape[rank_axis] == 2
        assert leaf.axes[-3 - rank_axis] == base.axes[-3 - rank_axis]
        assert leaf.axes[:-2] == base.axes[:-2]
        assert issubclass(leaf.kind, nnx.LoRAParam)
    # All optimizer state is for these, or a scalar.
    for path, placed in blueprint.layout.arrays["optimizer"].items():
        assert placed.shape == () or any(path.endswith(name) for name in blueprint.trainable)


def refusal(experiment: Experiment) -> str:
    with pytest.raises(PlanError) as caught:
        build_blueprint(experiment)
    return str(caught.value)


def test_targets_that_match_nothing_and_blocks_that_do_not_divide(experiment: Callable[..., Experiment]) -> None:
    asked = experiment(
        adapter=Adapter.LoRA(targets=("atention", "mlp", "embed_tokens")),
        quantization=Quantization.NF4(block_size=32, targets=("mlp", "layers")),
    )
    candidates = (
        "there are: attention, down, gate, key, mlp, output, query, up, value, or as transformers names them: "
        "all-linear, down_proj, gate_proj, gate_up_proj, k_proj, o_proj, out_proj, q_proj, qkv_proj, up_proj, v_proj"
    )
    assert refusal(asked) == (
        "4 problems in Experiment 'small'\n"
        "  adapter.targets.0: 'atention' matches no linear layer; did you mean 'attention'?\n"
        "  adapter.targets.2: 'embed_tokens' takes no adapter: the embedding stays as it is; "
        "name linear layers of blocks (adapter=None trains all weights)\n"
        f"  quantization.targets.1: 'layers' matches no linear layer; {candidates}\n"
        "  quantization.block_size: 16 inputs of blocks.*.mlp.gate are not divisible by blocks of 32\n"
        "  quantization.block_size: 16 inputs of blocks.*.mlp.up are not divisible by blocks of 32"
    ).replace("4 problems", "5 problems")


def test_targets_by_the_names_of_transformers(experiment: Callable[..., Experiment]) -> None:
    def trained(*targets: str, **fields: Any) -> set[str]:
        return set(build_blueprint(experiment(adapter=Adapter.LoRA(targets=targets, **fields))).trainable)

    assert trained("all-linear") == trained("attention", "mlp")
    assert trained("q_proj", "v_proj", "down_proj") == trained("attention.query", "attention.value", "mlp.down")
    assert trained("qkv_proj") == trained("query", "key", "value")
    ranked = Adapter.LoRA(targets=("all-linear",), ranks=(("down_proj", 3),), alphas=(("q_proj", 2.0),))
    assert (rank_at(ranked, "mlp.down"), alpha_at(ranked, "attention.query")) == (3, 2.0)
    refused = refusal(experiment(adapter=Adapter.LoRA(targets=("q_porj", "kv_b_proj"))))
    assert "adapter.targets.0: 'q_porj' matches no linear layer; did you mean 'q_proj'?" in refused
    assert "adapter.targets.1: 'kv_b_proj' matches no linear layer" in refused


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.title)
def test_names_of_transformers_name_the_same_layers_in_all_families(family: Family) -> None:
    """But for the outputs of mixers: "o_proj" and "out_proj" are those of attention and of recurrent layers alike."""
    config = family.sizes["tiny"]
    modules = {
        path_in_group(path).removesuffix(".kernel"): {
            name.removesuffix(".weight").replace("out_proj", "o_proj") for name in source.names
        }
        for path, source in tensor_sources(config).items()
        if path.endswith(".kernel") and path != "lm_head.kernel"
    }
    for name in {module.rpartition(".")[2] for each in modules.values() for module in each}:
        theirs = {path for path, each in modules.items() if any(module.endswith(f".{name}") for module in each)}
        theirs -= {path for path in theirs if name == "gate_proj" and path.endswith("output_gate")}  # Muse Glimmer's
        assert {path for path in modules if named(name, path)} == theirs, name


def test_an_output_head_is_refused_in_clear_words(experiment: Callable[..., Experiment]) -> None:
    for model in (Model.Gemma3("tiny"), Model.Llama3("tiny")):  # tied and not
        for spec in (
            {"adapter": Adapter.LoRA(targets=("lm_head",))},
            {"quantization": Quantization.NF4(targets=("lm_head",))},
        ):
            (field,) = spec
            fields = {"adapter": Adapter.LoRA(), **spec}
            message = (
                f"{field}.targets.0: 'lm_head' takes no {field}: the output head stays as it is; name linear layers"
            )
            assert message in refusal(experiment(model=model, **fields))


@pytest.mark.extended
@pytest.mark.parametrize(
    "quantization", [Quantization.NF4(block_size=8), Quantization.Int8(block_size=4)], ids=["nf4", "int8"]
)
@pytest.mark.parametrize(
    "dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)], ids=["float32", "bfloat16"]
)
def test_quantise_is_what_qwix_does(
    quantization: Quantization, dtype: Any, experiment: Callable[..., Experiment]
) -> None:
    config = build_blueprint(experiment(model=Small(layers=2))).config
    period = LayerGroup(config, config.layers.pattern, rngs=nnx.Rngs(0), param_dtype=dtype)
    rule = qwix.QuantizationRule(
        module_path=r".*", weight_qtype=weight_only_quant.qtype(quantization), tile_size=quantization.block_size
    )
    theirs = flatten(qwix.quantize_model(period, qwix.PtqProvider([rule]), *example_inputs(config, dtype)))
    for path, weight in flatten(period).items():
        if path.endswith(".kernel"):
            for stacked in (weight, jnp.stack([weight, -2 * weight])):
                values, scales = jax.jit(weight_only_quant.quantize, static_argnums=1)(stacked, quantization)
                first = (values, scales) if stacked.ndim == 2 else (values[0], scales[0])
                np.testing.assert_array_equal(first[0], theirs[path + weight_only_quant.QVALUE])
                np.testing.assert_array_equal(first[1], theirs[path + weight_only_quant.SCALE])
                assert (values.dtype, scales.dtype) == (
                    theirs[path + weight_only_quant.QVALUE].dtype,
                    theirs[path + weight_only_quant.SCALE].dtype,
                )


def logits(program: Program, leaves: dict[str, jax.Array]) -> jax.Array:
    tokens = np.random.default_rng(0).integers(0, 48, (2, 9))
    length = jnp.array([9, 6])

    @jax.jit
    def run(leaves: dict[str, jax.Array]) -> jax.Array:
        model: Any = (
            program.blueprint.policy.merge(leaves) if adapted(leaves) else program.blueprint.base_template.merge(leaves)
        )
        return model(tokens, positions_right_padded(length, 9), dtype=jnp.float32)[0] @ model.head().T

    return run(leaves)


def adapted(leaves: dict[str, jax.Array]) -> bool:
    return any(map(lora_math.is_adapter, leaves))


def test_the_merged_weights_are_the_adapted_model(
    experiment: Callable[..., Experiment],
    trained: Callable[..., TrainState],
    with_b: Callable[[TrainState], TrainState],
) -> None:
    lora = Adapter.LoRA(rank=2, alpha=6.0, targets=("attention", "mlp.down"))
    program = compile(experiment(adapter=lora, model=Small(layers=3)))
    fresh = trained(program)
    base = logits(program, fresh.frozen)
    # B is zero at first: the identity, whatever A is.
    # Equal but for rounding: logits reach 4, of which 2e-6 is a few units in the last place.
    np.testing.assert_allclose(logits(program, fresh.frozen | fresh.trainable), base, rtol=0, atol=2e-6)
    state = with_b(fresh)
    merged = {
        path: lora_math.merge(lora, leaf, state.trainable[path + lora_math.A], state.trainable[path + lora_math.B])
        if path + lora_math.A in state.trainable
        else leaf
        for path, leaf in state.frozen.items()
    }
    actual = logits(program, state.frozen | state.trainable)
    assert float(jnp.abs(actual - base).max()) > 0.5
    np.testing.assert_allclose(logits(program, merged), actual, rtol=1e-5, atol=2e-5)


@pytest.mark.slow
def test_first_values_of_a_are_he_uniform_and_its_own_for_each_path_and_seed(
    experiment: Callable[..., Experiment],
) -> None:
    lora = Adapter.LoRA(rank=8, targets=("mlp",))
    first, again, other = (compile(experiment(adapter=lora, seed=seed)).init().trainable for seed in (0, 0, 1))
    seen = set()
    for path, leaf in first.items():
        np.testing.assert_array_equal(leaf, again[path])
        if path.endswith(lora_math.B):
            assert not leaf.any()
            continue
        assert not np.array_equal(leaf, other[path])
        bound = (6 / leaf.shape[-2]) ** 0.5
        assert 0.9 * bound < float(jnp.abs(leaf).max()) < bound
        assert float(jnp.std(leaf)) == pytest.approx(bound / 3**0.5, rel=0.1)
        for part in leaf:  # the layers of a stack differ
            seen.add(float(part[0, 0]))
    assert len(seen) == 2 * len(first) / 2


@attrs.frozen(kw_only=True)
class Strange(Adapter):
    """An adapter that nothing knows how to put on a model."""

    rank: int = 4


def test_an_adapter_that_nothing_knows_is_refused(experiment: Callable[..., Experiment]) -> None:
    with pytest.raises(NotRegisteredError) as caught:
        build_blueprint(experiment(adapter=Strange()))
    assert str(caught.value) == "Strange: cannot be applied to a model; use Adapter.LoRA or Adapter.DoRA"
