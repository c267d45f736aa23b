"""Which kernel computes attention and why, what is refused by name, and that a step says the same with either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_lab.model import Small

from nnxdsl import Data, Experiment, Memory, Mesh, Model, Precision, compile
from nnxdsl.config.core.imports import VARIABLE
from nnxdsl.errors import PlanError
from nnxdsl.models.attention import row_layout as rows
from nnxdsl.models.attention.blockwise import SHORT
from nnxdsl.models.attention.dot_product import dot_product_attention
from nnxdsl.models.attention.kernel import CompileTarget, ScoreOptions
from nnxdsl.models.attention.kernels import find_kernel
from nnxdsl.models.attention.mask import attention_mask
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.models.attention.row_layout import AttentionMethod
from nnxdsl.models.attention.view import View
from nnxdsl.program.architecture import architecture
from nnxdsl.program.attention_kernel import Kernels
from nnxdsl.program.blueprint import build_blueprint

RING = "small_lab.ring_attention:RingAttention"
LONG, BRIEF = rows.pair(SHORT, SHORT), rows.sequence(SHORT - 1)
CPU = Kernels(architecture(Small(head_dim=256)))
GPU = attrs.evolve(CPU, target=CompileTarget(platform="gpu", dtype="bfloat16"))


def test_long_rows_are_cut_into_blocks_and_short_ones_are_not() -> None:
    assert CPU.choose(LONG) == (
        "chunked",
        "of rows of 768 slots, blocks leave out what no token sees",
    )
    assert CPU.choose(BRIEF) == ("dense", "rows of 255 slots are short")
    assert attrs.evolve(CPU, setting="chunked").choose(BRIEF) == ("chunked", "set by memory.attention")
    assert GPU.choose(None) == ("dense", "KV cache: no static layout")
    assert CPU.method(LONG).queries < attrs.evolve(GPU, setting="chunked").method(LONG).queries


@pytest.mark.parametrize(
    ("changes", "kernel", "why"),
    [
        ({}, "cudnn", "cuDNN's attention serves this program"),
        (
            {"platform": "tpu", "dtype": "float32", "attention.soft_cap": 5.0},
            "splash",
            "splash attention serves this program",
        ),
        ({"dtype": "float32"}, "chunked", "cuDNN's attention computes in bfloat16 or float16, this program in float32"),
        ({"attention.soft_cap": 5.0}, "chunked", "cuDNN's attention has no soft cap of scores"),
        ({"capability": 8.0}, "chunked", "at most 128, these are 256 wide"),
        ({"head_dim": 36}, "chunked", "heads of a multiple of 8"),
        ({"stages": 2}, "chunked", "not computed in a pipeline's stages"),
        ({"window_kind": "chunks"}, "chunked", "cuDNN's attention has no chunks"),
        ({"attention.sinks": True}, "chunked", "cuDNN's attention has no sinks"),
        ({"splits_heads_alike": False}, "chunked", "query heads and key/value heads split alike"),
        ({"length_shards": 2, "length_axis": "context"}, "dense", "over 2 devices; only the dense product spans them"),
    ],
)
def test_fused_kernels_where_they_serve(changes: dict[str, Any], kernel: str, why: str) -> None:
    of_target = {name: changes.pop(name) for name in attrs.fields_dict(CompileTarget).keys() & changes.keys()}
    actual = Kernels(GPU.config.with_fields(changes), target=attrs.evolve(GPU.target, **of_target)).choose(LONG)
    assert actual.kernel == kernel
    assert why in actual.why


def test_packed_rows_are_cut_into_blocks() -> None:
    actual = GPU.choose(rows.packed(SHORT))
    assert actual.kernel == "chunked"
    assert "cannot tell the sequences of a packed row apart" in actual.why


@pytest.mark.parametrize(
    ("asked", "fields", "message"),
    [
        ("cudnn", {}, "cuDNN's attention runs on a GPU, this program on a CPU"),
        ("splash", {}, "splash attention runs on a TPU, this program on a CPU"),
        ("chunked", {"mesh": Mesh(context=2)}, "the tokens of a row are split over 2 devices"),
    ],
)
def test_what_cannot_serve_is_refused_by_its_path(
    experiment: Callable[..., Experiment], asked: Any, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError) as error:
        build_blueprint(experiment(memory=Memory(attention=asked), **fields))
    (problem,) = error.value.problems
    assert problem.path == "memory.attention"
    assert message in problem.message
    assert problem.message.endswith("use 'auto'")


def test_heads_that_are_split_unlike(experiment: Callable[..., Experiment]) -> None:
    def kernels_of(**fields: Any) -> Kernels:
        return build_blueprint(
            experiment(model=Small(heads=4), precision=Precision(compute="bfloat16"), **fields), "gpu"
        ).kernels

    assert (kernels_of().target.platform, kernels_of().target.dtype) == ("gpu", "bfloat16")
    assert kernels_of(mesh=Mesh(tensor=2)).target.splits_heads_alike
    assert not kernels_of(mesh=Mesh(tensor=4)).target.splits_heads_alike


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("small_lab.ring_attention:RingAttention", "'small_lab.ring_attention', which is not allowed"),
        ("small_lab.model:Small", "'small_lab.model:Small' is no subclass of nnxdsl.models.attention.kernel"),
        ("small_lab.ring_attention:Rings", "has no attribute 'Rings'"),
    ],
)
def test_what_is_no_kernel_of_another_package(
    experiment: Callable[..., Experiment], setting: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "" if "not allowed" in message else "small_lab")
    with pytest.raises(PlanError) as error:
        build_blueprint(experiment(memory=Memory(attention=setting)))
    (problem,) = error.value.problems
    assert problem.path == "memory.attention"
    assert message in problem.message


def test_a_kernel_of_another_package_is_one_file(
    experiment: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name selects it, it owns a mesh axis, and its order of tokens balances the work of that axis' devices."""
    monkeypatch.setenv(VARIABLE, RING)

    def kernels(**fields: Any) -> Kernels:
        return build_blueprint(experiment(memory=Memory(attention=RING), **fields)).kernels

    row, ring = rows.pair(4, 6), kernels(mesh=Mesh(context=4))
    assert ring.choose(row) == (RING, "set by memory.attention")
    assert kernels().token_order(row) is None
    order = ring.token_order(row)
    assert order is not None
    assert order.reshape(4, 4).tolist() == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    dealt = attrs.evolve(row, in_order=False)
    assert {block.keys for block in dealt.blocks(2, 4)} == {((0, 16),)}
    with pytest.raises(PlanError, match=r"split over 2 devices"):  # over an axis that it does not own
        kernels(mesh=Mesh(tensor=2, rules=(("length", "tensor"),)))
    with pytest.raises(PlanError, match="ring attention has no sinks"):
        kernels(model=Model.GPTOSS("tiny"))

    # On one device, with a window and a soft cap.
    query, key, value = (jax.random.normal(jax.random.key(n), (2, 16, heads, 8)) for n, heads in enumerate((4, 2, 2)))
    places = positions_right_padded(jnp.asarray([16, 9]), 16)
    mask, scores = attention_mask(places, places, 5), ScoreOptions(0.3, soft_cap=2.0)
    view = View(AttentionMethod(RING, rows.sequence(16), window=5), places, None, (query, query))
    actual = find_kernel(RING)(query, key, value, view, scores)
    np.testing.assert_allclose(actual, dot_product_attention(query, key, value, mask, 0.3, 2.0), atol=1e-5)


@pytest.mark.slow
def test_ring_attention_of_another_package_trains_as_the_dense_product_does(
    on_eight_devices: Callable[..., Any],
) -> None:
    dense, ring = on_eight_devices("program/on_ring.py").values()
    assert (dense["attention"], ring["attention"]) == (
        "dense: set by memory.attention",
        f"{RING}: set by memory.attention",
    )
    for actual, expected in zip(ring["metrics"], dense["metrics"], strict=True):
        assert actual == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_a_step_is_the_same_in_blocks(experiment: Callable[..., Experiment], pairs: Callable[..., Any]) -> None:
    metrics = []
    for kernel in ("dense", "chunked"):
        data = Data.Preferences("none.jsonl", max_prompt_length=16, max_completion_length=16)
        asked = experiment(memory=Memory(attention=kernel, reference="online"), data=data)
        program = compile(asked)
        state = program.init()
        _, actual = program.step(state, pairs(asked.batch_size, seed=0))
        metrics.append({name: float(value) for name, value in actual.items()})
    dense, blocks = metrics
    assert blocks.keys() == dense.keys()
    for name, value in dense.items():
        np.testing.assert_allclose(blocks[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
