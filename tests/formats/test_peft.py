"""Adapters in PEFT's format: the logits that PEFT itself gives, its own names when written, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxdsl import Adapter
from nnxdsl.adapters import lora_math
from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.errors import WeightsError
from nnxdsl.formats import peft, safetensors
from nnxdsl.formats.hf import HubReader
from nnxdsl.formats.peft_config import is_targeted
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.models.params import ParamSpec
from nnxdsl.program.init import AdapterSource

REFERENCE = Path(__file__).parent.parent / "reference"
BASES = {
    "gemma3": "gemma3/plain",
    "llama3": "llama3/untied",
    "dora": "llama3/untied",
    "layers": "llama3/untied",
    "pissa": "llama3/untied",
    "phi3": "families/phi3",
    "experts": "families/qwen3_moe",
    "gpt_oss": "families/gpt_oss",
    "saved": "llama3/untied",
}
KINDS = {"phi3": "phi3", "experts": "qwen3_moe", "gpt_oss": "gpt_oss"}
ADAPTERS = {
    "gemma3": Adapter.LoRA(rank=3, alpha=12.0, targets=("attention", "mlp")),
    "llama3": Adapter.LoRA(rank=4, alpha=3.0, targets=("attention.query", "attention.value", "mlp.down")),
    "dora": Adapter.DoRA(
        rank=4,
        alpha=3.0,
        targets=("attention.query", "attention.value", "mlp.down"),
        scaling="sqrt_rank",
        ranks=(("mlp.down", 6),),
        alphas=(("attention.query", 9.0),),
    ),
    "layers": Adapter.LoRA(rank=4, alpha=3.0, targets=("attention.query", "mlp.up")),
    "pissa": Adapter.LoRA(rank=3, alpha=5.0, targets=("attention.query", "mlp.down")),
    "phi3": Adapter.LoRA(rank=4, alpha=9.0, targets=("attention", "mlp.gate", "mlp.up"), scaling="sqrt_rank"),
    "experts": Adapter.LoRA(rank=2, alpha=3.0, targets=("attention.query", "mlp")),
    "gpt_oss": Adapter.LoRA(rank=2, alpha=5.0, targets=("mlp",), scaling="sqrt_rank"),
    "saved": Adapter.LoRA(rank=3, alpha=5.0, targets=("attention.query",)),
}


def base_of(name: str) -> tuple[HubReader, dict[str, ParamSpec]]:
    reader = HubReader(REFERENCE / BASES[name])
    return reader, abstract_decoder(reader.config, jnp.float32).variables


def read(directory: Path, name: str) -> peft.PeftAdapter:
    reader, base = base_of(name)
    return peft.read(directory, reader.config, base, KINDS.get(name))


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("name", BASES)
def test_logits_equal_those_of_peft(name: str) -> None:
    actual = read(REFERENCE / "peft" / name, name)
    lora = actual.adapter
    assert attrs.evolve(lora, targets=tuple(sorted(lora.targets))) == ADAPTERS[name]
    assert actual.base == BASES[name]
    reader, _ = base_of(name)
    expected = np.load(REFERENCE / "peft" / name / "expected.npz")
    policy = abstract_decoder(reader.config, jnp.float32, lora)
    assert set(actual.leaves) == {path for path in policy.variables if lora_math.is_adapter(path)}
    for path, leaf in actual.leaves.items():
        assert leaf.shape == policy.variables[path].shape
    assert set(actual.whole) == ({"embed.embedding", "lm_head.kernel"} if name == "saved" else set())
    source = AdapterSource(reader, {**actual.leaves, **actual.whole}, is_pissa=actual.is_pissa)
    leaves = {path: jnp.asarray(source.leaf(path)) for path in policy.variables}
    tokens = jnp.asarray(expected["tokens"])

    @jax.jit
    def logits(leaves: dict[str, jax.Array]) -> jax.Array:
        model: Any = policy.merge(leaves)
        places = positions_right_padded(jnp.full(2, tokens.shape[1]), tokens.shape[1])
        return model.logits(model(tokens, places, dtype=jnp.float32).hidden)

    got = logits(leaves)
    assert np.abs(expected["logits"]).max() > 3
    # Differences from PEFT's float32 are 4e-7 to 2e-6 of the largest logit, and so are those of both from float64. PEFT
    # decomposes a PiSSA base in float32, and its logits are 3.4e-6 from those of float64; ours are 1e-6 from them.
    bound = 2e-5 if actual.is_pissa else 1e-5
    np.testing.assert_allclose(got, expected["logits"], atol=bound * np.abs(expected["logits"]).max(), rtol=0)


@pytest.mark.parametrize("name", [name for name in BASES if name != "saved"])
def test_written_as_peft_writes_it(name: str, tmp_path: Path) -> None:
    actual = read(REFERENCE / "peft" / name, name)
    reader, _ = base_of(name)
    peft.write(
        tmp_path,
        reader.config,
        actual.leaves,
        adapter=actual.adapter,
        base=actual.base,
        model_type=KINDS.get(name),
        is_pissa=actual.is_pissa,
    )
    mine, theirs = (safetensors.index(place / peft.WEIGHTS) for place in (tmp_path, REFERENCE / "peft" / name))
    assert mine.keys() == theirs.keys()
    for tensor in theirs:
        assert mine[tensor].shape == theirs[tensor].shape
        assert np.array_equal(mine[tensor].read(), theirs[tensor].read())
    ours, original = (json.loads((p / peft.CONFIG).read_text()) for p in (tmp_path, REFERENCE / "peft" / name))
    for field in ("target_modules", "target_parameters"):
        original[field] = original[field] and sorted(original[field])
    if name == "dora":  # its patterns name each module by itself, and dropout is not in what was read
        modules = [f"model.layers.{number}." for number in range(reader.config.layers.num_layers)]
        assert ours.pop("rank_pattern") == {f"{module}mlp.down_proj": 6 for module in modules}
        assert ours.pop("alpha_pattern") == {f"{module}self_attn.q_proj": 9 for module in modules}
        assert ours.pop("lora_dropout") == 0.0
    assert {key: original[key] for key in ours} == ours
    again = read(tmp_path, name)
    assert again.adapter == actual.adapter
    assert all(np.array_equal(again.leaves[path], leaf) for path, leaf in actual.leaves.items())


@pytest.mark.extended
def test_names_of_other_bases(tmp_path: Path) -> None:
    actual = read(REFERENCE / "peft" / "gemma3", "gemma3")
    reader, _ = base_of("gemma3")
    some = {path: leaf for path, leaf in actual.leaves.items() if path.startswith("layers.blocks.4.mlp.up.")}
    peft.write(tmp_path, reader.config, some, adapter=actual.adapter, base=None, is_multimodal=True)
    assert set(safetensors.index(tmp_path / peft.WEIGHTS)) == {
        f"base_model.model.model.language_model.layers.4.mlp.up_proj.lora_{side}.weight" for side in "AB"
    }
    settings = json.loads((tmp_path / peft.CONFIG).read_text())
    assert (settings["target_modules"], settings["layers_to_transform"]) == (["up_proj"], [4])
    again = read(tmp_path, "gemma3")
    assert again.adapter.targets == ("blocks.4.mlp.up",)
    assert all(np.array_equal(again.leaves[path], leaf) for path, leaf in some.items())


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., str]:
    """Reads a copy of the Gemma adapter with settings and tensors changed; gives what is said of it."""

    def change(settings: dict[str, Any] | None = None, tensors: Callable[[dict[str, Any]], None] | None = None) -> str:
        place = Path(shutil.copytree(REFERENCE / "peft" / "gemma3", tmp_path / "adapter", dirs_exist_ok=True))
        config = json.loads((place / peft.CONFIG).read_text())
        (place / peft.CONFIG).write_text(json.dumps({**config, **(settings or {})}))
        if tensors is not None:
            file = place / peft.WEIGHTS
            arrays = {name: np.array(tensor.read()) for name, tensor in safetensors.index(file).items()}
            tensors(arrays)
            safetensors.write(file, {name: (a.shape, a.dtype) for name, a in arrays.items()}, lambda name: arrays[name])
        with pytest.raises(WeightsError) as caught:
            read(place, "gemma3")
        return str(caught.value).replace(str(place), "DIR")

    return change


def test_settings_that_mean_something_else_are_named(changed: Callable[..., str]) -> None:
    settings = {
        "use_dora": "yes",
        "init_lora_weights": "pissa_niter_4",
        "modules_to_save": ["lm_head", "norm"],
        "peft_type": "IA3",
        "bias": "lora_only",
        "newer": 2,
    }
    said = changed(settings).splitlines()
    assert said[0].startswith("DIR: cannot be read as Adapter.")
    assert set(said[1:]) == {
        "  adapter_config.json: use_dora: expected true or false, got 'yes'",
        "  adapter_config.json: init_lora_weights: expected True or False or None or 'gaussian' or 'orthogonal' or "
        "'eva' or 'pissa', got 'pissa_niter_4': it stands on a base without some of its weights, which "
        "this does not compute; merge the adapter with PEFT (merge_and_unload) and load that model",
        "  adapter_config.json: modules_to_save: ['norm'] is not supported by Adapter.LoRA or Adapter.DoRA; merge "
        "the adapter with PEFT (merge_and_unload) and load that model",
        "  adapter_config.json: peft_type: expected 'LORA', got 'IA3'",
        "  adapter_config.json: bias: expected 'none', got 'lora_only': biases that are trained beside A and B are no "
        "part of Adapter.LoRA; merge the adapter with PEFT (merge_and_unload) and load that model",
        "  adapter_config.json: newer: 2 is not supported by Adapter.LoRA or Adapter.DoRA",
    }


@pytest.mark.extended
def test_patterns_of_ranks(changed: Callable[..., str], tmp_path: Path) -> None:
    said = changed({"alpha_pattern": {"layers.0.self_attn.q_proj": 6}})
    assert said == (
        "DIR: cannot be read as Adapter.LoRA:\n  adapter_config.json: rank_pattern, alpha_pattern: "
        "model.layers.0.self_attn.q_proj has r=3, alpha=6, model.layers.6.self_attn.q_proj has r=3, alpha=12; layers "
        "that are stacked must share rank and alpha"
    )
    place = tmp_path / "adapter"
    config = json.loads((place / peft.CONFIG).read_text())
    for pattern, wanted in (
        ({".*_proj": 6}, Adapter.LoRA(rank=3, alpha=6.0)),
        ({"2.self_attn.q_proj": 6}, Adapter.LoRA(rank=3, alpha=12.0, alphas=(("blocks.2.attention.query", 6.0),))),
        ({"q_proj": 6}, Adapter.LoRA(rank=3, alpha=12.0, alphas=(("attention.query", 6.0),))),
    ):
        (place / peft.CONFIG).write_text(json.dumps({**config, "alpha_pattern": pattern}))
        assert read(place, "gemma3").adapter == wanted
    assert "lora_alpha: expected a number above 0, got 'six'" in changed({"alpha_pattern": {"q_proj": "six"}})


def test_in_what_another_differs() -> None:
    actual = read(REFERENCE / "peft" / "dora", "dora")
    assert not list(actual.unlike(ADAPTERS["dora"], actual.leaves))
    asked = Adapter.LoRA(rank=4, alpha=3.0, targets=("query", "value"), alphas=(("query", 9.0),))
    paths = [path for path in actual.leaves if ".down." not in path]
    start = "as in adapter_config.json of adapter.start"
    assert [str(problem) for problem in actual.unlike(asked, paths)] == [
        f"adapter: expected Adapter.DoRA, {start}, got Adapter.LoRA",
        f"adapter.scaling: expected 'sqrt_rank', {start}, got 'rank'",
        f"adapter.targets: expected ('attention.query', 'attention.value', 'mlp.down'), {start}, got "
        "('query', 'value')",
    ]
    other = attrs.evolve(ADAPTERS["dora"], rank=5, alphas=())
    assert [str(problem) for problem in actual.unlike(other, actual.leaves)] == [
        f"adapter.rank: expected 4 at blocks.0.attention.query, {start}, got 5",
        f"adapter.alpha: expected 9.0 at blocks.0.attention.query, {start}, got 3.0",
    ]


def test_every_tensor_that_does_not_fit(changed: Callable[..., str]) -> None:
    def damage(arrays: dict[str, Any]) -> None:
        name = "base_model.model.model.layers.{}.{}.weight"
        del arrays[name.format(2, "self_attn.q_proj.lora_B")]
        arrays[name.format(7, "mlp.up_proj.lora_A")] = np.zeros((4, 24), np.float32)
        arrays[name.format(9, "mlp.up_proj.lora_A")] = np.zeros((3, 24), np.float32)
        arrays["base_model.model.model.embed_tokens.lora_embedding_A"] = np.zeros((3, 24), np.float32)

    said = changed(tensors=damage).splitlines()
    full = "base_model.model.model.layers"
    assert set(said[1:]) == {
        f"  layers.blocks.2.attention.query.kernel_lora_b: expected a tensor {full}.2.self_attn.q_proj.lora_B.weight, "
        "there is none",
        f"  tail.blocks.1.mlp.up.kernel_lora_a: {full}.7.mlp.up_proj.lora_A.weight: expected shape (3, 24), "
        "got (4, 24)",
        f"  {full}.9.mlp.up_proj.lora_A.weight: is no adapter of a linear layer of this model, shape (3, 24)",
        "  base_model.model.model.embed_tokens.lora_embedding_A: is no adapter of a linear layer of this model, "
        "shape (3, 24)",
    }


def test_a_pickle_is_refused(tmp_path: Path) -> None:
    shutil.copy(REFERENCE / "peft" / "gemma3" / peft.CONFIG, tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(WeightsError, match=r"adapter_model.bin would be read with pickle.*convert it with torch"):
        read(tmp_path, "gemma3")


def written_again(directory: Path, result: peft.PeftAdapter, leaves: dict[str, np.ndarray]) -> peft.PeftAdapter:
    reader, _ = base_of("phi3")
    peft.write(directory, reader.config, leaves, adapter=result.adapter, base=None, model_type="phi3")
    return read(directory, "phi3")


def test_joined_projections_after_training_have_blocks(tmp_path: Path) -> None:
    """Each layer has an A of its own by then: PEFT's one A holds them all, and B is block diagonal."""
    actual = read(REFERENCE / "peft" / "phi3", "phi3")
    draw = np.random.default_rng(0)
    trained = {path: leaf + draw.normal(size=leaf.shape).astype(np.float32) for path, leaf in actual.leaves.items()}
    again = written_again(tmp_path, actual, trained)
    settings = json.loads((tmp_path / peft.CONFIG).read_text())
    assert {module.rpartition(".")[2]: rank for module, rank in settings["rank_pattern"].items()} == {
        "qkv_proj": 12,
        "gate_up_proj": 8,
    }
    assert again.adapter == actual.adapter
    for path, leaf in trained.items():
        np.testing.assert_array_equal(again.leaves[path], leaf)
    # What PEFT computes of the file: alpha / sqrt(r) times B A.
    tensors = {name: np.array(tensor.read()) for name, tensor in safetensors.index(tmp_path / peft.WEIGHTS).items()}
    module = "base_model.model.model.layers.1.self_attn.qkv_proj"
    scale = settings["alpha_pattern"]["model.layers.1.self_attn.qkv_proj"] / np.sqrt(12)
    change = scale * tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
    a, b = ([trained[f"layers.blocks.0.attention.{name}.kernel_lora_{side}"][1] for name in ("query", "key", "value")]
            for side in "ab")  # fmt: skip
    wanted = np.concatenate([4.5 * (one @ other).T for one, other in zip(a, b, strict=True)])
    np.testing.assert_allclose(change, wanted, atol=1e-5 * np.abs(wanted).max())


def test_joined_projections_before_training_share_a(tmp_path: Path) -> None:
    actual = read(REFERENCE / "peft" / "phi3", "phi3")
    draw = np.random.default_rng(0)
    fresh = {path: draw.normal(size=leaf.shape) if path.endswith("_a") else np.zeros(leaf.shape)
             for path, leaf in actual.leaves.items()}  # fmt: skip
    again = written_again(tmp_path, actual, {path: leaf.astype(np.float32) for path, leaf in fresh.items()})
    assert again.adapter == actual.adapter
    assert not any(np.any(leaf) for path, leaf in again.leaves.items() if path.endswith("_b"))


def test_joined_projections_are_adapted_as_one(tmp_path: Path) -> None:
    actual = read(REFERENCE / "peft" / "phi3", "phi3")
    some = {path: leaf for path, leaf in actual.leaves.items() if ".key." not in path}
    with pytest.raises(WeightsError, match="qkv_proj: PEFT has one adapter for all layers that it joins, this adapter"):
        written_again(tmp_path, actual, some)


@pytest.mark.parametrize("name", ["experts", "gpt_oss"])
def test_experts_after_training_are_read_as_they_were_written(name: str, tmp_path: Path) -> None:
    """Gate and up have an A of their own by then; what PEFT adds to its parameter is what ours add to ours."""
    actual, (reader, base) = read(REFERENCE / "peft" / name, name), base_of(name)
    draw = np.random.default_rng(0)
    trained = {path: leaf + draw.normal(size=leaf.shape).astype(np.float32) for path, leaf in actual.leaves.items()}
    peft.write(tmp_path, reader.config, trained, adapter=actual.adapter, base=None, model_type=KINDS[name])
    again = read(tmp_path, name)
    assert again.adapter == actual.adapter
    for path, leaf in trained.items():
        np.testing.assert_array_equal(again.leaves[path], leaf)
    # peft.tuners.lora.ParamWrapper.get_delta_weight, of the inner of two parameters of a module.
    settings = json.loads((tmp_path / peft.CONFIG).read_text())
    assert settings["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    tensors = safetensors.index(tmp_path / peft.WEIGHTS)
    module = "base_model.model.model.layers.0.mlp.experts.base_layer"
    a, b = (tensors[f"{module}.lora_{side}.weight"].read() for side in "AB")
    kernels = ["layers.blocks.0.mlp.gate.kernel", "layers.blocks.0.mlp.up.kernel"]
    experts, inputs, width = base[kernels[0]].shape[1:]
    key = "model.layers.0.mlp.experts.gate_up_proj"
    rank, alpha = settings["rank_pattern"][key], settings["alpha_pattern"][key]
    scale = alpha / (np.sqrt(rank) if settings["use_rslora"] else rank)
    a, b = a.reshape(experts, rank, inputs), b.reshape(2 * width, rank, experts)
    change = scale * np.einsum("ore,eri->eio", b, a)
    ours = actual.adapter.alpha / (np.sqrt(2) if settings["use_rslora"] else 2)
    gate, up = (ours * trained[f"{path}_lora_a"][0] @ trained[f"{path}_lora_b"][0] for path in kernels)
    wanted = (
        np.stack([gate, up], axis=-1).reshape(change.shape) if name == "gpt_oss" else np.concatenate([gate, up], -1)
    )
    np.testing.assert_allclose(change, wanted, atol=1e-5 * np.abs(wanted).max())


def test_some_experts_layers_have_names_of_their_own(tmp_path: Path) -> None:
    actual, (reader, _) = read(REFERENCE / "peft" / "gpt_oss", "gpt_oss"), base_of("gpt_oss")
    some = {path: leaf for path, leaf in actual.leaves.items() if path.startswith("tail.") and ".down." in path}
    peft.write(tmp_path, reader.config, some, adapter=actual.adapter, base=None, model_type="gpt_oss")
    settings = json.loads((tmp_path / peft.CONFIG).read_text())
    assert settings["target_parameters"] == ["model.layers.4.mlp.experts.down_proj"]
    names = {f"base_model.model.model.layers.4.mlp.experts.lora_{side}.weight" for side in "AB"}
    assert set(safetensors.index(tmp_path / peft.WEIGHTS)) == names
    again = read(tmp_path, "gpt_oss")
    assert again.leaves.keys() == some.keys()
    assert all(np.array_equal(again.leaves[path], leaf) for path, leaf in some.items())


@pytest.mark.parametrize(
    "adapter", [Adapter.DoRA(rank=2, alpha=5.0, targets=("mlp",)), Adapter.LoRA(rank=2, alpha=5.0, dropout=0.1)]
)
def test_adapters_of_experts_that_peft_refuses(adapter: Any, tmp_path: Path) -> None:
    actual, (reader, _) = read(REFERENCE / "peft" / "gpt_oss", "gpt_oss"), base_of("gpt_oss")
    with pytest.raises(WeightsError, match="PEFT does not support this layer; export the model with its adapter merg"):
        peft.write(tmp_path, reader.config, actual.leaves, adapter=adapter, base=None, model_type="gpt_oss")


def test_whole_modules_that_do_not_fit(tmp_path: Path) -> None:
    place = Path(shutil.copytree(REFERENCE / "peft" / "saved", tmp_path / "adapter"))
    arrays = {name: tensor.read() for name, tensor in safetensors.index(place / peft.WEIGHTS).items()}
    arrays["base_model.model.model.embed_tokens.weight"] = np.zeros((3, 24), np.float32)
    del arrays["base_model.model.lm_head.weight"]
    shapes = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    safetensors.write(place / peft.WEIGHTS, shapes, arrays.__getitem__)
    with pytest.raises(WeightsError) as caught:
        read(place, "saved")
    shape = base_of("saved")[1]["embed.embedding"].shape
    assert str(caught.value).splitlines()[1:] == [
        f"  embed.embedding: base_model.model.model.embed_tokens.weight: expected shape {shape}, got (3, 24)",
        "  lm_head.kernel: expected a tensor base_model.model.(...)lm_head.weight, there is none",
    ]


def test_an_embedding_without_the_head_that_is_tied_to_it(tmp_path: Path) -> None:
    place = Path(shutil.copytree(REFERENCE / "peft" / "gemma3", tmp_path / "adapter"))
    arrays = {name: tensor.read() for name, tensor in safetensors.index(place / peft.WEIGHTS).items()}
    embedding = np.ones(base_of("gemma3")[1]["embed.embedding"].shape, np.float32)
    arrays["base_model.model.model.embed_tokens.weight"] = embedding
    shapes = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    safetensors.write(place / peft.WEIGHTS, shapes, arrays.__getitem__)
    with pytest.raises(WeightsError, match="modules_to_save: the head of this model is its embedding, and the adapter"):
        read(place, "gemma3")
    settings = json.loads((place / peft.CONFIG).read_text())
    settings |= {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    (place / peft.CONFIG).write_text(json.dumps(settings))
    actual = read(place, "gemma3")
    assert actual.whole.keys() == {"embed.embedding"}
    assert np.array_equal(actual.whole["embed.embedding"], embedding)


def test_a_layer_that_settings_leave_out_stays_without_change(tmp_path: Path) -> None:
    actual = read(REFERENCE / "peft" / "layers", "layers")
    for path, leaf in actual.leaves.items():
        if path.startswith("layers."):
            assert [bool(np.any(layer)) for layer in leaf] == [True, False, True, False][: len(leaf)], path


@pytest.mark.parametrize(
    ("settings", "targeted"),
    [
        ({"target_modules": ["q_proj"]}, True),
        ({"target_modules": ["proj"]}, False),
        ({"target_modules": r".*\.3\..*q_proj"}, True),
        ({"target_modules": r".*\.q"}, False),
        ({"target_modules": "all-linear", "exclude_modules": ["q_proj"]}, False),
        ({"layers_to_transform": 3}, True),
        ({"layers_to_transform": [2, 3], "layers_pattern": "layers"}, True),
        ({"layers_to_transform": [2], "layers_pattern": ["layers"]}, False),
        ({"layers_to_transform": [3], "layers_pattern": "h"}, False),
    ],
)
def test_which_modules_settings_name(settings: dict[str, Any], targeted: bool) -> None:
    assert is_targeted(settings, "model.layers.3.self_attn.q_proj") == targeted
