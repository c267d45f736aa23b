"""Where arrays live: Flax Linen's resolution as the oracle, and every refusal by its whole text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest
from flax.linen import spmd
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from small_lab.model import Small

from nnxdsl import Adapter, Experiment, Mesh, PlanError, Quantization, compile
from nnxdsl.program.blueprint import draw
from nnxdsl.program.layout import DEFAULT_RULES, resolve, with_user_rules

LOGICAL = ("batch", "embed", "mlp", "heads", "vocab")
MESH = ("data", "fsdp", "tensor")
targets = st.none() | st.sampled_from(MESH) | st.lists(st.sampled_from(MESH), max_size=3, unique=True).map(tuple)
rules = st.lists(st.tuples(st.sampled_from(LOGICAL), targets), max_size=8).map(tuple)
axes = st.lists(st.sampled_from((*LOGICAL, "unknown")), max_size=4, unique=True).flatmap(
    lambda names: st.permutations([*names, None])
)


@settings(max_examples=400, deadline=None)
@given(
    axes=axes.map(tuple), rules=rules, sizes=st.fixed_dictionaries({}, optional=dict.fromkeys(MESH, st.integers(1, 3)))
)
def test_resolution_is_that_of_linen(axes: Any, rules: Any, sizes: dict[str, int]) -> None:
    found = resolve(axes, rules, sizes)
    oracle = spmd.logical_to_mesh_axes(axes, rules)
    assert oracle is not None
    # Linen keeps an empty rule as (); both mean replicated.
    assert tuple(found.raw) == tuple(axis or None for axis in oracle)
    expected = []
    for axis in found.raw:
        kept = tuple(name for name in ((axis,) if isinstance(axis, str) else axis or ()) if sizes.get(name, 1) > 1)
        expected.append(kept if len(kept) > 1 else kept[0] if kept else None)
    assert tuple(found.spec) == tuple(expected)
    # The trace names every rule of a dimension, and takes at most one for each.
    assert [tried.rule for tried in found.trace] == [i for i, (name, _) in enumerate(rules) if name in axes]
    taken = [tried.dimension for tried in found.trace if tried.outcome.startswith("taken")]
    assert len(set(taken)) == len(taken)


def test_a_name_twice_is_an_error_as_in_linen() -> None:
    with pytest.raises(ValueError, match="name 'embed' twice"):
        resolve(("embed", "embed"), DEFAULT_RULES, {})
    with pytest.raises(ValueError, match="embed"):
        spmd.logical_to_mesh_axes(("embed", "embed"), DEFAULT_RULES)


def test_the_trace_says_why() -> None:
    rules = (("mlp", "tensor"), ("embed", "tensor"), ("embed", ("fsdp", "data")), ("embed", None))
    found = resolve(("embed", "mlp"), rules, {"data": 1, "fsdp": 4, "tensor": 2})
    assert found.spec == PartitionSpec("fsdp", "tensor")
    assert found.raw == PartitionSpec(("fsdp", "data"), "tensor")
    assert [(tried.dimension, tried.axes, tried.outcome) for tried in found.trace] == [
        (1, "tensor", "taken"),
        (0, "tensor", "skipped: tensor is used by dimension 1"),
        (0, ("fsdp", "data"), "taken; of size 1, so dropped: data"),
        (0, None, "not reached: the dimension is placed already"),
    ]


def test_a_users_rules_stand_where_the_default_stood() -> None:
    user = (("mlp", None), ("vocab", "fsdp"), ("vocab", "tensor"), ("own", "data"))
    default = (("batch", "data"), ("vocab", "tensor"), ("mlp", "tensor"), ("embed", "fsdp"))
    assert with_user_rules(user, default) == (
        ("own", "data"),
        ("batch", "data"),
        ("vocab", "fsdp"),
        ("vocab", "tensor"),
        ("mlp", None),
        ("embed", "fsdp"),
    )
    assert with_user_rules((), default) == default


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(PlanError) as caught:
        make()
    return str(caught.value)


def test_dimensions_that_do_not_divide(experiment: Callable[..., Experiment]) -> None:
    asked = experiment(model=Small(mlp_dim=30, layers=3), mesh=Mesh(fsdp=4, tensor=4), batch_size=4)
    assert refusal(lambda: draw(asked)) == (
        "4 problems in Experiment 'small'\n"
        "  layers.blocks.*.mlp.down.kernel: axis 1 has 30 rows, not divisible by tensor=4\n"
        "  layers.blocks.*.mlp.gate.kernel: axis 2 has 30 rows, not divisible by tensor=4\n"
        "  layers.blocks.*.mlp.up.kernel: axis 2 has 30 rows, not divisible by tensor=4\n"
        "  tail.blocks.*.mlp.down.kernel: axis 0 has 30 rows, not divisible by tensor=4"
    ).replace("4 problems", "6 problems") + (
        "\n  tail.blocks.*.mlp.gate.kernel: axis 1 has 30 rows, not divisible by tensor=4"
        "\n  tail.blocks.*.mlp.up.kernel: axis 1 has 30 rows, not divisible by tensor=4"
    )


def test_rules_and_batches_that_cannot_be(experiment: Callable[..., Experiment]) -> None:
    rules = (("embd", "fsdp"), ("rank", "tensor"), ("batch", ("fsdp", "tensor")))
    asked = experiment(mesh=Mesh(fsdp=2, tensor=2, rules=rules), batch_size=12, microbatch_size=6)
    assert refusal(lambda: draw(asked)) == (
        "3 problems in Experiment 'small'\n"
        "  mesh.rules.0: no array has an axis 'embd'\n"
        "  mesh.rules.1: no array has an axis 'rank'\n"
        "  microbatch_size: 6 rows at a time cannot be split over fsdp=2 x tensor=2"
    )
    # With an adapter there is such an axis.
    asked = experiment(
        mesh=Mesh(fsdp=2, tensor=2, rules=(("rank", "tensor"),)), adapter=Adapter.LoRA(rank=3, targets=("query",))
    )
    assert refusal(lambda: draw(asked)) == (
        "1 problem in Experiment 'small'\n"
        "  layers.blocks.*.attention.query.kernel_lora_b: axis 1 has 3 rows, not divisible by tensor=2"
    ).replace("_b: axis 1", "_a: axis 2")


def test_a_mesh_larger_than_the_devices(experiment: Callable[..., Experiment]) -> None:
    asked = experiment(mesh=Mesh(data=2, fsdp=2, tensor=2))
    assert refusal(lambda: compile(asked, jax.devices()[:1])) == (
        "1 problem in Experiment 'small'\n  mesh: data=2 x fsdp=2 x tensor=2 takes 8 devices, there are 1 (cpu)"
    )


def test_every_array_of_a_program_is_placed(experiment: Callable[..., Experiment]) -> None:
    asked = experiment(
        mesh=Mesh(fsdp=4, tensor=2), adapter=Adapter.LoRA(rank=2), quantization=Quantization.NF4(block_size=2)
    )
    layout = draw(asked).layout
    specs = {placed.path: (placed.part, tuple(placed.resolved.spec)) for placed in layout}
    up = "layers.blocks.0.mlp.up.kernel"
    assert specs["embed.embedding"] == ("frozen", ("tensor", "fsdp"))
    assert specs[f"{up}.array.qvalue"] == ("frozen", (None, "fsdp", "tensor"))
    assert specs[f"{up}.array.scale"] == ("frozen", (None, None, "tensor"))
    assert specs[f"{up}_lora_a"] == ("trainable", (None, "fsdp", None))
    assert specs[f"{up}_lora_b"] == ("trainable", (None, None, "tensor"))
    assert specs["norm.scale"] == ("frozen", (None,))
    assert tuple(layout.batch_spec()) == ("fsdp",)
    dumped = layout.dump().splitlines()
    assert "frozen layers.blocks.0.mlp.up.kernel.array.qvalue 2x16x32 uint4 (None, 'fsdp', 'tensor') 64" in dumped
    assert len(dumped) == len(specs)
