"""Which kernel computes attention and why, what is refused by name, and that a step says the same with either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from small_lab.model import Small

from nnxdsl import Data, Experiment, Memory, Mesh, Precision, compile
from nnxdsl.errors import PlanError
from nnxdsl.models.attention import row_layout as rows
from nnxdsl.models.attention.blockwise import SHORT
from nnxdsl.models.attention.kernel import CompileTarget
from nnxdsl.program.architecture import architecture
from nnxdsl.program.attention_kernel import Kernels
from nnxdsl.program.blueprint import build_blueprint

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
            {"platform": "tpu", "dtype": "float32", "attention_soft_cap": 5.0},
            "splash",
            "splash attention serves this program",
        ),
        ({"dtype": "float32"}, "chunked", "cuDNN's attention computes in bfloat16 or float16, this program in float32"),
        ({"attention_soft_cap": 5.0}, "chunked", "cuDNN's attention has no soft cap of scores"),
        ({"capability": 8.0}, "chunked", "at most 128, these are 256 wide"),
        ({"head_dim": 36}, "chunked", "heads of a multiple of 8"),
        ({"stages": 2}, "chunked", "not computed in a pipeline's stages"),
        ({"window_kind": "chunks"}, "chunked", "cuDNN's attention has no chunks"),
        ({"sinks": True}, "chunked", "cuDNN's attention has no sinks"),
        ({"splits_heads_alike": False}, "chunked", "query heads and key/value heads split alike"),
        ({"length_shards": 2, "length_axis": "context"}, "dense", "over 2 devices; only the dense product spans them"),
    ],
)
def test_fused_kernels_where_they_serve(changes: dict[str, Any], kernel: str, why: str) -> None:
    of_target = {name: changes.pop(name) for name in attrs.fields_dict(CompileTarget).keys() & changes.keys()}
    found = Kernels(attrs.evolve(GPU.config, **changes), target=attrs.evolve(GPU.target, **of_target)).choose(LONG)
    assert found.kernel == kernel
    assert why in found.why


def test_packed_rows_are_cut_into_blocks() -> None:
    found = GPU.choose(rows.packed(SHORT))
    assert found.kernel == "chunked"
    assert "cannot tell the sequences of a packed row apart" in found.why


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
    def found(**fields: Any) -> Kernels:
        return build_blueprint(
            experiment(model=Small(heads=4), precision=Precision(compute="bfloat16"), **fields), "gpu"
        ).kernels

    assert (found().target.platform, found().target.dtype) == ("gpu", "bfloat16")
    assert found(mesh=Mesh(tensor=2)).target.splits_heads_alike
    assert not found(mesh=Mesh(tensor=4)).target.splits_heads_alike


@pytest.mark.slow
def test_a_step_is_the_same_in_blocks(experiment: Callable[..., Experiment], pairs: Callable[..., Any]) -> None:
    metrics = []
    for kernel in ("dense", "chunked"):
        data = Data.Preferences("none.jsonl", max_prompt_length=16, max_completion_length=16)
        asked = experiment(memory=Memory(attention=kernel, reference="online"), data=data)
        program = compile(asked)
        state = program.init()
        _, found = program.step(state, pairs(asked.batch_size, seed=0))
        metrics.append({name: float(value) for name, value in found.items()})
    dense, blocks = metrics
    assert blocks.keys() == dense.keys()
    for name, value in dense.items():
        np.testing.assert_allclose(blocks[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
