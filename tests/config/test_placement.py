"""Meshes and memory: invalid settings are refused at construction; slices are taken from slow axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnxdsl import Adapter, Data, Memory, Mesh, Objective, SpecError
from nnxdsl.config.sharding import BATCH_AXES, MESH_AXES, SLOW_AXES

Text = Data.Text("texts.jsonl")
AXES = "there are: context, data, expert, fsdp, stage, tensor"


def refusal(build: Callable[[], object]) -> list[str]:
    """What a SpecError says below its first line."""
    with pytest.raises(SpecError) as caught:
        build()
    heading, *problems = str(caught.value).split("\n  ")
    assert heading.split(" in ")[0] == f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    return problems


def test_sizes() -> None:
    mesh = Mesh(tensor=2, fsdp=3, stage=5)
    assert mesh.sizes == {"stage": 5, "data": 1, "fsdp": 3, "expert": 1, "context": 1, "tensor": 2}
    assert tuple(mesh.sizes) == MESH_AXES
    assert (mesh.device_count, Mesh().device_count) == (30, 1)
    assert set(SLOW_AXES) | set(BATCH_AXES) <= set(MESH_AXES)


@pytest.mark.parametrize("axis", [*MESH_AXES, "slices"])
def test_sizes_that_are_wrong_are_named(axis: str) -> None:
    for size, problem in ((0, "expected a value > 0, got 0"), ("2", "expected int, got '2'")):
        fields: dict[str, Any] = {axis: size}
        assert refusal(lambda fields=fields: Mesh(**fields)) == [f"{axis}: {problem}"]


@pytest.mark.parametrize(
    ("fields", "across"),
    [
        ({}, (1, 1, 1)),
        ({"data": 4, "slices": 2}, (2, 1, 1)),
        ({"data": 2, "fsdp": 4, "slices": 4}, (2, 1, 2)),
        ({"data": 2, "stage": 2, "fsdp": 2, "slices": 2}, (2, 1, 1)),
        ({"data": 2, "stage": 2, "fsdp": 2, "slices": 8}, (2, 2, 2)),
        ({"data": 6, "fsdp": 2, "slices": 4}, (2, 1, 2)),
        ({"stage": 3, "fsdp": 2, "slices": 6}, (1, 3, 2)),
        ({"fsdp": 64, "slices": 4, "tensor": 8}, (1, 1, 4)),
    ],
)
def test_slices_are_taken_from_the_slowest_axes_first(fields: dict[str, int], across: tuple[int, ...]) -> None:
    assert Mesh(**fields).across == dict(zip(SLOW_AXES, across, strict=True))


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.fixed_dictionaries({axis: st.integers(1, 12) for axis in SLOW_AXES}),
    slices=st.integers(1, 40),
    tensor=st.integers(1, 8),
)
def test_slices_are_cut_wherever_they_can_be(sizes: dict[str, int], slices: int, tensor: int) -> None:
    possible = math.prod(sizes.values()) % slices == 0
    try:
        mesh = Mesh(**sizes, slices=slices, tensor=tensor)
    except SpecError:
        assert not possible
        return
    assert possible
    assert math.prod(mesh.across.values()) == slices
    assert all(sizes[axis] % steps == 0 for axis, steps in mesh.across.items())


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({"data": 3, "slices": 2}, "data=3 x stage=1 x fsdp=1"),
        ({"slices": 2}, "data=1 x stage=1 x fsdp=1"),
        ({"tensor": 8, "context": 2, "expert": 2, "slices": 2}, "data=1 x stage=1 x fsdp=1"),
        ({"data": 2, "stage": 3, "fsdp": 2, "slices": 8}, "data=2 x stage=3 x fsdp=2"),
    ],
)
def test_slices_that_cannot_be_cut(fields: dict[str, int], sizes: str) -> None:
    assert refusal(lambda: Mesh(**fields)) == [f"slices: {fields['slices']} slices cannot be cut out of {sizes}"]


def test_rules_that_cannot_be() -> None:
    rules: Any = (
        ("mlp", "tensr"),
        ("embed", ("fsdp", "batch", "fsdp")),
        ("vocab", None),
        ("heads", ()),
        ("own", "tensor"),
        ("mlp", ("sequence", "data")),
    )
    array_rules: Any = (("*.up.*", (("mlp", "tensor"), ("mlp", "contxt"))), ("*.down.*", (("mlp", ("data", "data")),)))
    assert refusal(lambda: Mesh(rules=rules, array_rules=array_rules, slices=2)) == [
        "rules.0: ('mlp', 'tensr') names no mesh axis; did you mean 'tensor'?",
        "rules.1: ('embed', ('fsdp', 'batch', 'fsdp')) names the mesh axis 'fsdp' twice",
        f"rules.1: ('embed', ('fsdp', 'batch', 'fsdp')) names no mesh axis; {AXES}",
        f"rules.5: ('mlp', ('sequence', 'data')) names no mesh axis; {AXES}",
        "array_rules.0.1.1: ('mlp', 'contxt') names no mesh axis; did you mean 'context'?",
        "array_rules.1.1.0: ('mlp', ('data', 'data')) names the mesh axis 'data' twice",
        "slices: 2 slices cannot be cut out of data=1 x stage=1 x fsdp=1",
    ]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"rules": (("mlp",),)}, "rules.0: expected tuple[str, str or tuple[str, ...] or None], got ('mlp',)"),
        ({"rules": (("mlp", 3),)}, "rules.0.1: expected str or tuple[str, ...] or None, got 3"),
        (
            {"rules": ("mlp", "tensor")},
            "rules.0: expected tuple[str, str or tuple[str, ...] or None], got 'mlp'; write ('mlp',)",
        ),
        ({"indivisible": "ignore"}, "indivisible: expected one of 'error', 'replicate', got 'ignore'"),
        ({"zero1": 1}, "zero1: expected bool, got 1"),
    ],
)
def test_malformed_rules_are_named(fields: dict[str, Any], problem: str) -> None:
    assert problem in refusal(lambda: Mesh(**fields))


def test_parts_are_offloaded_once_and_are_known() -> None:
    wrong: Any = ("optimizer", "frozen", "optimizer", "optimizer")
    assert refusal(lambda: Memory(offload=wrong)) == [
        "offload.2: 'optimizer' is named twice",
        "offload.3: 'optimizer' is named twice",
    ]
    wrong = ("optimiser",)
    assert refusal(lambda: Memory(offload=wrong)) == [
        "offload.0: expected one of 'optimizer', 'frozen', 'reference', got 'optimiser'; did you mean 'optimizer'?"
    ]


def test_parts_that_are_not_there_are_not_offloaded(design: Any) -> None:
    full: dict[str, Any] = {"adapter": None, "quantization": None}
    sft: dict[str, Any] = {"objective": Objective.SFT(loss_on="all"), "data": Text}

    def asked(*parts: Any, reference: Any = "auto", **fields: Any) -> Callable[[], object]:
        return lambda: design(memory=Memory(offload=parts, reference=reference), **fields)

    base = "the adapter's base is the reference, there is no copy"
    assert refusal(asked("optimizer", "reference")) == [f"memory.offload.1: 'reference' has no effect: {base}"]
    assert refusal(asked("frozen", **full)) == ["memory.offload.0: 'frozen' has no effect: all weights are trained"]
    assert refusal(asked("reference", "frozen", **full, **sft)) == [
        "memory.offload.0: 'reference' has no effect: Objective.SFT has no reference",
        "memory.offload.1: 'frozen' has no effect: all weights are trained",
    ]
    asked("optimizer", "frozen")()
    asked("optimizer", "reference", **full, reference="online")()
    assert refusal(asked("reference", **full)) == [
        "memory.offload.0: 'reference' has no effect: its log-probs are precomputed; "
        "add memory.reference='online' to load its weights"
    ]
    asked("optimizer", "frozen", **sft, adapter=Adapter.LoRA())()


def test_a_reference_is_asked_once_unless_that_is_not_wanted(design: Any) -> None:
    assert design().reference_mode == "cached"
    assert design(memory=Memory(reference="online")).reference_mode == "online"
    text: dict[str, Any] = {"objective": Objective.SFT(loss_on="all"), "data": Text}
    assert design(**text).reference_mode == "none"
    for mode in ("cached", "online"):
        assert refusal(lambda mode=mode: design(**text, memory=Memory(reference=mode))) == [
            f"memory.reference: '{mode}' has no effect: Objective.SFT has no reference"
        ]
    assert design(memory=Memory(reference="online")).id == design().id


def test_a_batch_lies_over_data_fsdp_and_expert(design: Any) -> None:
    mesh = Mesh(data=2, fsdp=3, expert=5, tensor=7, context=2, stage=2)
    over = "cannot be split over mesh data=2 x fsdp=3 x expert=5"
    assert refusal(lambda: design(mesh=mesh, microbatch_size=8)) == [f"microbatch_size: 8 rows {over}"]
    assert refusal(lambda: design(mesh=mesh, microbatch_size=None)) == [f"batch_size: 64 rows {over}"]
    assert refusal(lambda: design(mesh=Mesh(expert=3))) == [
        "microbatch_size: 8 rows cannot be split over mesh expert=3"
    ]
    design(mesh=mesh, batch_size=60, microbatch_size=30)
    design(mesh=Mesh(tensor=7, context=3, stage=5))
    # A rule of the user's own for "batch", or copies where nothing divides, are for the plan.
    design(mesh=Mesh(fsdp=3, rules=(("batch", None),)))
    design(mesh=Mesh(fsdp=3, indivisible="replicate"))


def test_placement_is_no_part_of_a_run(design: Any) -> None:
    placed = design(
        mesh=Mesh(data=2, fsdp=4, slices=2, rules=(("mlp", None),), zero1=False),
        memory=Memory(remat="full", offload=("optimizer",)),
    )
    assert placed != design()
    assert placed.id == design().id
