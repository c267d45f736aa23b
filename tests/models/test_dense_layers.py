"""Dense layers among those with experts: which they are, as transformers says; what is written; refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nnxdsl.errors import WeightsError
from nnxdsl.formats import hf
from nnxdsl.formats.hf_names import tensor_sources
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.families.qwen3_moe import QWEN3_MOE
from nnxdsl.models.families.registry import from_hf, to_hf

REFERENCE = Path(__file__).parent.parent / "reference" / "families"
DENSE = ("qwen3_moe_dense_list", "qwen3_moe_dense_step")


def file_of(layers: int, only: list[int], step: int, **fields: Any) -> dict[str, Any]:
    return to_hf(QWEN3_MOE["tiny"]) | {
        "num_hidden_layers": layers,
        "mlp_only_layers": only,
        "decoder_sparse_step": step,
        **fields,
    }


def formula(fields: dict[str, Any]) -> list[bool]:
    """Whether each layer is dense: transformers' modeling_qwen3_moe.py, Qwen3MoeDecoderLayer."""
    return [
        layer in fields["mlp_only_layers"] or (layer + 1) % fields["decoder_sparse_step"] != 0
        for layer in range(fields["num_hidden_layers"])
    ]


def tensors(config: DecoderConfig) -> set[str]:
    return {name for source in tensor_sources(config, "qwen3_moe").values() for name in source.names}


@settings(max_examples=300, deadline=None)
@given(
    which=st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), max_size=n))),
    step=st.integers(1, 9),
    window=st.sampled_from([None, 6]),
)
@example((4, [1]), 1, None)
@example((4, []), 2, None)
@example((8, [0, 1, 2]), 1, None)
@example((8, [0, 2, 5]), 2, 6)
@example((3, [0, 1, 2]), 1, None)
def test_dense_layers_are_those_of_transformers(which: tuple[int, list[int]], step: int, window: int | None) -> None:
    fields = file_of(*which, step, use_sliding_window=window is not None, sliding_window=window)
    wanted = formula(fields)
    config = from_hf(fields)
    assert list(config.dense) == wanted
    names = tensors(config)
    for layer, is_dense in enumerate(wanted):
        assert (f"layers.{layer}.mlp.up_proj.weight" in names) == is_dense
        assert (f"layers.{layer}.mlp.experts.0.up_proj.weight" in names) == (not is_dense)
    written = to_hf(config, like="qwen3_moe")
    assert from_hf(written) == config
    if all(wanted):
        assert written["model_type"] == "qwen3"
    else:
        assert formula(written) == wanted


def test_the_fewest_layers_are_compiled() -> None:
    def parts(layers: int, only: list[int], step: int = 1) -> tuple[int, int, int]:
        config = from_hf(file_of(layers, only, step))
        return len(config.layers.prefix), config.layers.period, len(config.layers.suffix)

    assert parts(48, []) == (0, 1, 0)
    assert parts(48, [0, 1, 2]) == (3, 1, 0)
    assert parts(48, [], 2) == (0, 2, 0)
    assert parts(48, [0, *range(1, 48, 3)]) == (1, 3, 2)
    assert parts(4, [1]) == (0, 3, 1)


def test_a_step_is_written_as_a_step_and_a_list_as_a_list() -> None:
    def written(only: list[int], step: int) -> tuple[int, list[int]]:
        fields = to_hf(from_hf(file_of(6, only, step)))
        return fields["decoder_sparse_step"], fields["mlp_only_layers"]

    assert written([], 1) == (1, [])
    assert written([], 3) == written([0, 1, 3, 4], 1) == (3, [])
    assert written([4], 1) == (1, [4])
    assert written([1], 3) == (3, [])


@pytest.mark.parametrize("name", DENSE)
def test_what_is_written_transformers_loads_to_the_same_logits(name: str, tmp_path: Path) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    reader = hf.HubReader(REFERENCE / name)
    leaves = {path: reader.leaf(path) for path in tensor_sources(reader.config, "qwen3_moe")}
    hf.write(tmp_path, reader.config, leaves, like="qwen3_moe")
    model, about = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not about["missing_keys"]
    assert not about["unexpected_keys"]
    expected = np.load(REFERENCE / name / "expected.npz")
    length = int(expected["lengths"][0])
    with torch.no_grad():
        actual = model.eval()(input_ids=torch.tensor(expected["tokens"][:1, :length]).long()).logits.numpy()
    wanted = expected["logits"][:1, :length]
    np.testing.assert_allclose(actual, wanted, atol=1e-5 * np.abs(wanted).max(), rtol=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mlp_only_layers": [4]}, "mlp_only_layers: expected a list of layers from 0 to 3, got [4]"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers: expected a list of layers from 0 to 3, got [-1]"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers: expected a list of layers from 0 to 3, got [True]"),
        ({"mlp_only_layers": "1"}, "mlp_only_layers: expected a list of layers from 0 to 3, got '1'"),
        ({"mlp_only_layers": 1}, "mlp_only_layers: expected a list of layers from 0 to 3, got 1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step: expected an integer from 1 to 16,777,216, got 0"),
        ({"decoder_sparse_step": 1.5}, "decoder_sparse_step: expected an integer from 1 to 16,777,216, got 1.5"),
    ],
)
def test_fields_that_say_no_layers(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError) as caught:
        from_hf(file_of(4, [], 1) | fields)
    assert str(caught.value) == f"config.json is not a Qwen3 MoE that can be read:\n  {message}"


def test_impossible_patterns() -> None:
    config = QWEN3_MOE["tiny"].with_fields(
        {"layers.pattern": ("global", "global"), "layers.dense_pattern": (True, False)}
    )
    for wrong in ((True,), (True, True), (False, False), (True, False, True)):
        with pytest.raises(ValueError, match="expected True or False for each layer of pattern"):
            config.with_fields({"layers.dense_pattern": wrong})
    with pytest.raises(ValueError, match="dense_layers and dense_pattern need a feed_forward"):
        attrs.evolve(config, feed_forward=None)
