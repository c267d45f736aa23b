"""What Nemotron-H is made of: layers of one sub-block, Mamba-2, squared ReLU, experts; and its config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from nnxdsl.errors import WeightsError
from nnxdsl.formats.hf_names import tensor_sources
from nnxdsl.models import params
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.layer_pattern import with_tail
from nnxdsl.models.config.mamba2 import Mamba2Config
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.families.nemotron_h import NEMOTRON_H
from nnxdsl.models.families.registry import from_hf, to_hf
from nnxdsl.models.layers import mlp
from nnxdsl.models.mamba2 import layer as mamba2
from tests.models.stored import FAMILIES, compared, read

WITHOUT = 5e-3
"""Of the largest logit: what leaving an ingredient out changes at least; the tests of families allow 1e-5."""


ZEROS = (
    *("attention.skip", "attention.dt_bias", "attention.conv.bias", "mlp.router.correction"),
    "mlp.shared.down.kernel",
)


@pytest.mark.extended
def test_each_array_counts() -> None:
    config, leaves = read("nemotron_h")
    difference = compared("nemotron_h", config)
    assert difference(leaves) == pytest.approx(0, abs=1e-5)
    for name in ZEROS:
        zeros = {path: jnp.zeros_like(leaf) for path, leaf in leaves.items() if path.endswith(name)}
        assert zeros
        assert difference(leaves | zeros) > WITHOUT, name


def test_the_projections_around_experts_count() -> None:
    config, leaves = read("nemotron_h_latent")
    difference = compared("nemotron_h_latent", config)
    assert difference(leaves) == pytest.approx(0, abs=1e-5)
    zeros = {path: jnp.zeros_like(leaf) for path, leaf in leaves.items() if path.endswith("latent_up.kernel")}
    assert zeros
    assert difference(leaves | zeros) > WITHOUT


def with_experts(config: DecoderConfig, **changes: Any) -> DecoderConfig:
    assert config.moe is not None
    return attrs.evolve(config, feed_forward=attrs.evolve(config.moe, **changes))


def with_positions(config: DecoderConfig) -> DecoderConfig:
    changes = {
        f"layers.{name}": tuple("global" if kind == "nope" else kind for kind in kinds)
        for name, kinds in {"pattern": config.layers.pattern, "tail_pattern": config.layers.tail_pattern}.items()
    }
    return config.with_fields(changes)


LEFT_OUT: dict[str, Callable[[DecoderConfig], DecoderConfig]] = {
    "attention without positions": with_positions,
    "groups of experts": lambda config: with_experts(config, n_group=1, topk_group=1),
    "weights that sum to one": lambda config: with_experts(config, norm_topk_prob=False),
    "their factor": lambda config: with_experts(config, routed_scaling_factor=1.0),
    "sigmoid scores": lambda config: with_experts(config, scoring="softmax", e_score_correction_bias=False),
    "time steps without limits": lambda config: attrs.evolve(
        config, linear_attention=attrs.evolve(config.linear_attention, time_step_limit=(0.5, 0.9))
    ),
}


@pytest.mark.extended
@pytest.mark.parametrize("left_out", LEFT_OUT)
def test_each_ingredient_counts(left_out: str) -> None:
    config, leaves = read("nemotron_h")
    other = LEFT_OUT[left_out](config)
    template = params.abstract(lambda: Decoder(other, rngs=nnx.Rngs(0)))
    assert compared("nemotron_h", other)({path: leaves[path] for path in template.variables}) > WITHOUT


def _norm_of_all_heads(eps: float, dtype: Any, out: jax.Array, gate: jax.Array, scale: jax.Array) -> jax.Array:
    rows = (*gate.shape[:2], 1, -1)
    normed = mamba2_norm(eps, dtype, out, gate.reshape(rows), scale.reshape(1, -1))
    return normed.reshape(gate.shape)


mamba2_norm = mamba2._gated_norm
PATCHED: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {
    "squares of the ReLU": [(mlp, "ACTIVATIONS", mlp.ACTIVATIONS | {"relu2": jax.nn.relu})],
    "softplus": [(mamba2, "_time_steps", lambda rates, limit: jax.nn.relu(rates))],
    "groups of the gated norm": [(mamba2, "_gated_norm", _norm_of_all_heads)],
    "the gate before the norm": [
        (mamba2, "_gated_norm", lambda eps, dtype, out, gate, scale: mamba2_norm(eps, dtype, out, 50 + 0 * gate, scale))
    ],
}


@pytest.mark.default_variants(1)
@pytest.mark.parametrize(
    "left_out",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("softplus", "groups of the gated norm") else [])
        for name in PATCHED
    ],
)
def test_each_function_counts(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, other in PATCHED[left_out]:
        monkeypatch.setattr(module, name, other)
    config, leaves = read("nemotron_h")
    assert compared("nemotron_h", config)(leaves) > WITHOUT


def test_a_layer_has_one_norm_and_one_sub_block() -> None:
    config, _ = read("nemotron_h")
    assert config.layers.pattern == ("linear", "none", "linear", "nope", "none")
    assert (config.layers.periods, config.layers.tail_pattern) == (2, ("linear", "nope", "none"))
    decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    for block in (*decoder.layers.blocks, *decoder.tail.blocks):
        assert (block.attention is None) == (block.mlp is not None)
        assert (block.pre_attention_norm is None) == (block.pre_mlp_norm is not None)
    names = {name for source in tensor_sources(config, "nemotron_h").values() for name in source.names}
    layers = [name.split(".")[1] for name in names if name.endswith(".norm.weight") and "mixer" not in name]
    assert sorted(map(int, layers)) == list(range(config.layers.num_layers))
    for layer in range(config.layers.num_layers):  # paths and numbers of layers agree with those of the file
        path, position = config.layers.path(layer)
        norm = "pre_mlp_norm" if config.layers.kinds[layer] == "none" else "pre_attention_norm"
        source = tensor_sources(config, "nemotron_h")[f"{path}.{norm}.scale"]
        assert source.names[position or 0] == f"layers.{layer}.norm.weight"


@pytest.mark.parametrize(
    ("layers", "pattern", "tail"),
    [
        ("AB", "AB", ""),
        ("ABABA", "AB", ""),
        ("ABCABCBA", "ABC", "BA"),
        ("AAAB", "A", "B"),
        ("ABCD", "ABCD", ""),
    ],
)
def test_last_layers_that_repeat_nothing(layers: str, pattern: str, tail: str) -> None:
    assert with_tail(layers) == (tuple(pattern), tuple(tail))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers.sublayers": "both"}, "layers without a mixer need sublayers='one'"),
        ({"mtp_layers": 1}, "sublayers='one': not with mtp_layers"),
        ({"layers.tail_pattern": ("none",) * 11}, "tail_pattern: expected at most 10 layers"),
        ({"layers.sublayers": "two"}, "sublayers: expected one of"),
    ],
)
def test_layers_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NEMOTRON_H["tiny"].with_fields(changes)


# The config.json of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.
PUBLISHED = """
{"architectures": ["NemotronHForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
 "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"}, "bos_token_id": 1, "chunk_size": 128,
 "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "head_dim": 128, "hidden_dropout": 0.0, "hidden_size": 2688,
 "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "initializer_range": 0.02,
 "intermediate_size": 1856, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu",
 "mamba_num_heads": 64, "mamba_proj_bias": false, "mamba_ssm_cache_dtype": "float32",
 "max_position_embeddings": 262144, "mlp_bias": false, "mlp_hidden_act": "relu2", "model_type": "nemotron_h",
 "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8,
 "n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": true,
 "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2,
 "num_logits_to_keep": 1, "pad_token_id": 0, "partial_rotary_factor": 1.0, "rescale_prenorm_residual": true,
 "residual_in_fp32": false, "rope_theta": 10000, "routed_scaling_factor": 2.5, "sliding_window": null,
 "ssm_state_size": 128, "tie_word_embeddings": false, "time_step_floor": 0.0001, "time_step_max": 0.1,
 "time_step_min": 0.001, "topk_group": 1, "torch_dtype": "bfloat16", "transformers_version": "4.55.4",
 "use_bias": false, "use_cache": true, "use_conv_bias": true, "use_mamba_kernels": true, "vocab_size": 131072}
"""


def test_the_published_file() -> None:
    assert from_hf(json.loads(PUBLISHED)) == NEMOTRON_H["3-nano-30b-a3b"]


def fields(name: str = "nemotron_h") -> dict[str, Any]:
    return json.loads((FAMILIES / name / "config.json").read_text())


def test_spellings() -> None:
    saved = fields()
    config = from_hf(saved)
    assert isinstance(config.linear_attention, Mamba2Config)
    old = {"linear_attention": "mamba", "full_attention": "attention"}
    earlier = [old.get(kind, kind) for kind in saved["layers_block_type"]]
    assert from_hf({**saved, "layers_block_type": earlier}) == config
    without = {name: value for name, value in saved.items() if name != "layers_block_type"}
    assert from_hf({**without, "hybrid_override_pattern": "MEM*EMEM*EM*E"}) == config
    limited = from_hf({**saved, "time_step_limit": [0.01, 0.5]})
    assert limited.linear_attention == attrs.evolve(config.linear_attention, time_step_limit=(0.01, 0.5))
    assert to_hf(limited)["time_step_limit"] == [0.01, 0.5]
    assert "time_step_limit" not in to_hf(config)  # JSON has no infinity
    assert from_hf(fields("nemotron_h_dense")).feed_forward is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers_block_type": ["linear_attention", "conv"]}, "layers_block_type: expected one of 'linear_attention'"),
        ({"layers_block_type": None}, "hybrid_override_pattern: expected one of 'M', "),
        ({"num_hidden_layers": 14}, "num_hidden_layers=14: layers_block_type has 13 layers"),
        ({"time_step_limit": [0.5]}, "time_step_limit: expected the least and the largest time step, got"),
        ({"mlp_hidden_act": "mish"}, "mlp_hidden_act: expected one of 'silu', .* and 'relu2', got 'mish'"),
        ({"use_bias": "yes"}, "use_bias: expected true or false, got 'yes'"),
        ({"residual_in_fp32": True}, "residual_in_fp32: only False is implemented, got True"),
        ({"sliding_window": 6}, "sliding_window: only None is implemented, got 6"),
        ({"n_groups": 4, "mamba_num_heads": 6}, "num_heads=6 is not a multiple of n_groups=4"),
        ({"layer_norm_epsilon": -1}, "layer_norm_epsilon: expected a number above 0, got -1"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06: this family has layer_norm_epsilon"),
        ({"num_local_experts": 4}, "num_local_experts=4: not understood, and it could change the mathematics"),
        ({"mamba_n_groups": 4}, "mamba_n_groups=4: not understood, and it could change the mathematics"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        from_hf({**fields(), **change})


def test_other_mixers_are_no_nemotron() -> None:
    other = NEMOTRON_H["tiny"].with_fields({"norm.scale": "plain"})
    with pytest.raises(WeightsError, match=r"Nemotron-H has norm\.scale='wide'"):
        to_hf(other)
