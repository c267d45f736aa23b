"""Logical axes to mesh axes: Flax Linen's function is the oracle; the trace is checked rule by rule."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from flax.linen import spmd
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from nnxdsl.config.sharding import MESH_AXES
from nnxdsl.sharding.rules import DEFAULT_RULES, Resolved, Tried, mesh_axes, resolve, sizes, with_user_rules

CASES = 10_000
LOGICAL = ("batch", "embed", "mlp", "heads", "vocab", "layers")
UNCONSTRAINED = PartitionSpec.UNCONSTRAINED

MAXTEXT_BATCH = ["data", "fsdp", "fsdp_transpose", "expert"]
MAXTEXT_WIDTH = ["tensor", "tensor_transpose", "tensor_sequence", "autoregressive"]
MAXTEXT: list[Any] = [
    ["activation_batch", MAXTEXT_BATCH],
    ["activation_batch_no_exp", ["data", "fsdp", "fsdp_transpose"]],
    ["activation_embed_and_logits_batch", ["data", "stage", "fsdp", "fsdp_transpose", "expert"]],
    ["activation_heads", ["tensor", "tensor_transpose", "sequence", "tensor_sequence", "autoregressive"]],
    ["activation_kv_heads", ["tensor", "tensor_transpose", "sequence", "tensor_sequence"]],
    ["activation_length", ["sequence", "context"]],
    ["activation_length", ["context"]],
    ["activation_norm_length", ["tensor_sequence", "context", "sequence"]],
    ["activation_embed", ["tensor", "tensor_transpose"]],
    ["activation_mlp", ["tensor", "tensor_transpose", "tensor_sequence"]],
    ["activation_kv", ["tensor", "tensor_transpose", "tensor_sequence"]],
    ["activation_vocab", ["tensor", "tensor_transpose", "sequence", "tensor_sequence"]],
    ["activation_vocab", ["tensor", "tensor_transpose"]],
    ["activation_vocab", "tensor_sequence"],
    ["activation_vocab", ["sequence", "context"]],
    ["activation_stage", "stage"],
    ["activation_exp", ["expert"]],
    ["mlp", ["fsdp_transpose", "tensor", "tensor_sequence", "autoregressive"]],
    ["vocab", MAXTEXT_WIDTH],
    ["heads", MAXTEXT_WIDTH],
    ["q_heads", MAXTEXT_WIDTH],
    ["kv_heads", MAXTEXT_WIDTH],
    ["embed", ["fsdp", "fsdp_transpose", "sequence", "tensor_transpose", "context", "expert"]],
    ["embed", ["fsdp", "sequence", "tensor_transpose", "context", "expert"]],
    ["embed", ["fsdp", "fsdp_transpose", "sequence", "context", "expert"]],
    ["embed", ["fsdp", "sequence", "context", "expert"]],
    ["embed_no_exp", ["fsdp", "fsdp_transpose", "sequence", "tensor_transpose", "context"]],
    ["embed_no_exp", ["fsdp", "sequence", "tensor_transpose", "context"]],
    ["embed_no_exp", ["fsdp", "fsdp_transpose", "sequence", "context"]],
    ["embed_no_exp", ["fsdp", "sequence", "context"]],
    ["q_lora", ["fsdp", "fsdp_transpose", "sequence", "context", "tensor_transpose", "expert"]],
    ["q_lora", ["fsdp", "sequence", "context", "tensor_transpose", "expert"]],
    ["q_lora", ["fsdp", "fsdp_transpose", "sequence", "context", "expert"]],
    ["q_lora", ["fsdp", "sequence", "context", "expert"]],
    ["kv_lora", ["fsdp", "fsdp_transpose", "sequence", "context", "tensor_transpose", "expert"]],
    ["kv_lora", ["fsdp", "sequence", "context", "tensor_transpose", "expert"]],
    ["kv_lora", ["fsdp", "fsdp_transpose", "sequence", "context", "expert"]],
    ["kv_lora", ["fsdp", "sequence", "context", "expert"]],
    ["norm", ["tensor", "tensor_transpose", "tensor_sequence"]],
    ["layers", "stage"],
    ["kv", []],
    ["kv_head_dim", []],
    ["cache_batch", []],
    ["cache_heads", ["autoregressive", "tensor", "tensor_transpose", "tensor_sequence"]],
    ["cache_kv", []],
    ["cache_sequence", []],
    ["exp", "expert"],
]
"""Rules in the manner of MaxText: pairs are lists, targets are lists, empty ones too, and names have fallbacks."""

TUPLES: dict[str, tuple[Any, ...]] = {
    "embedding": ("vocab", "embed"),
    "head": ("embed", "vocab"),
    "query": ("embed", "heads"),
    "query by head": ("embed", "heads", "head_dim"),
    "query by head, MaxText": ("embed", "q_heads", "kv"),
    "key": ("embed", "kv_heads"),
    "key by head, MaxText": ("embed", "kv_heads", "kv_head_dim"),
    "query, key and value in one": ("embed", None, "heads", "head_dim"),
    "query, key and value in one, MaxText": ("embed", "qkv", "heads", "kv"),
    "attention output": ("heads", "embed"),
    "attention output by head": ("heads", "head_dim", "embed"),
    "norm of queries": ("head_dim",),
    "norm": ("norm",),
    "mlp up": ("embed", "mlp"),
    "mlp gate and up in one": ("embed", "num_activations", "mlp"),
    "mlp down": ("mlp", "embed"),
    "router": ("embed", "experts"),
    "experts up": ("experts", "embed", "mlp"),
    "experts down": ("experts", "mlp", "embed"),
    "experts up, MaxText": ("exp", "embed_no_exp", "mlp"),
    "latent query down": ("embed", "q_lora"),
    "latent query up": ("q_lora", "q_heads", "kv"),
    "latent key and value down": ("embed", "kv_lora"),
    "latent key and value up": ("kv_lora", "kv_heads", "kv_head_dim"),
    "latent norm": ("kv_lora",),
    "scanned query": ("layers", "embed", "heads"),
    "scanned experts": ("layers", "experts", "embed", "mlp"),
    "scanned experts, inner axis": ("experts", "layers", "embed", "mlp"),
    "scanned norm": ("layers", "norm"),
    "adapter A": ("layers", "embed", "rank"),
    "adapter B": ("layers", "rank", "mlp"),
    "quantised values": ("layers", "embed", "mlp"),
    "quantization scales": ("layers", "blocks", "mlp"),
    "tokens": ("batch", "length"),
    "hidden": ("batch", "length", "activation_embed"),
    "queries": ("batch", "length", "activation_heads", None),
    "keys": ("batch", "length", "activation_kv_heads", None),
    "mlp hidden": ("batch", "length", "activation_mlp"),
    "logits": ("batch", "length", "activation_vocab"),
    "hidden, MaxText": ("activation_batch", "activation_norm_length", "activation_embed"),
    "queries, MaxText": ("activation_batch", "activation_length", "activation_heads", "activation_kv"),
    "logits, MaxText": ("activation_embed_and_logits_batch", "activation_length", "activation_vocab"),
    "stages, MaxText": ("activation_stage", "activation_batch", UNCONSTRAINED, UNCONSTRAINED),
    "cache, MaxText": ("cache_batch", "cache_sequence", "cache_heads", "cache_kv"),
    "scalar": (),
}

MESHES: tuple[dict[str, int], ...] = (
    {},
    dict.fromkeys(MESH_AXES, 1),
    {"fsdp": 8},
    {"data": 2, "fsdp": 2, "tensor": 2, "context": 2},
    {"stage": 2, "data": 1, "fsdp": 4, "expert": 8, "context": 1, "tensor": 4},
    {"fsdp": 16, "fsdp_transpose": 2, "sequence": 2, "tensor": 8, "tensor_transpose": 1, "tensor_sequence": 1},
)


def kept(target: Any, mesh: Mapping[str, int]) -> Any:
    """An entry of a spec without the mesh axes that are absent or of size 1; () is None, and (x,) is x."""
    if target is UNCONSTRAINED:
        return target
    names = (target,) if isinstance(target, str) else tuple(target or ())
    left = [name for name in names if mesh.get(name, 1) > 1]
    return None if not left else left[0] if len(left) == 1 else tuple(left)


def agree(axes: Sequence[Any], rules: Sequence[Any], mesh: Mapping[str, int]) -> Resolved:
    """What `resolve` finds, having found it to be what Linen finds, and its trace to tell the same story."""
    result, oracle = resolve(axes, rules, mesh), spmd.logical_to_mesh_axes(tuple(axes), rules)
    assert oracle is not None
    assert tuple(result.raw) == tuple(oracle), (axes, rules)
    expected = [kept(target, mesh) for target in oracle]
    assert list(result.spec) == expected, (axes, rules, mesh)
    assert result.spec == PartitionSpec(*expected)
    placed = [name for target in result.spec if target is not UNCONSTRAINED for name in mesh_axes(target)]
    assert len(placed) == len(set(placed)), (axes, rules, mesh)

    # Every rule that names one of the axes is there, in order, and says what it is.
    named = [(number, rule[0]) for number, rule in enumerate(rules) if rule[0] in axes]
    assert [(one.rule, one.logical) for one in result.trace] == named
    assert all(axes[one.dimension] == one.logical for one in result.trace)
    reported: dict[int, Tried] = {}
    taken: dict[str, int] = {}
    for one in result.trace:
        wanted = [] if one.axes is UNCONSTRAINED else mesh_axes(one.axes)
        assert list(wanted) == flat(rules[one.rule][1] if one.rule is not None else None)
        if one.dimension in reported:
            before = reported[one.dimension]
            claimed = before.axes is None or before.axes == ()
            assert one.outcome == ("shadowed" if claimed else "not reached"), (one, before)
            assert one.why.startswith(f"rule {before.rule} ")
        elif busy := [axis for axis in wanted if axis in taken]:
            assert one.outcome == "used", one
            assert all(f"is used by dimension {taken[axis]}" in one.why for axis in busy)
            assert [axis for axis in busy if f"{axis} (of size 1)" in one.why] == [a for a in busy if mesh.get(a) == 1]
            assert [axis for axis in busy if f"{axis} (absent" in one.why] == [a for a in busy if a not in mesh]
        else:
            assert one.outcome == "taken", one
            reported[one.dimension] = one
            taken |= dict.fromkeys(wanted, one.dimension)
    unnamed = {number: name for number, name in enumerate(axes) if not isinstance(name, str)}
    story = [reported[d].axes if d in reported else unnamed.get(d) for d in range(len(axes))]
    assert result.raw == PartitionSpec(*story)
    return result


def flat(target: Any) -> list[str]:
    return [] if target is UNCONSTRAINED else [target] if isinstance(target, str) else list(target or ())


def one_case(draw: random.Random) -> tuple[tuple[Any, ...], list[Any], dict[str, int]]:
    """Axes, rules and a mesh of every kind that anybody writes, and some that nobody does."""

    def target() -> Any:
        names = draw.sample(draw.choice((MESH_AXES, MESH_AXES[:3])), draw.choice((1, 1, 2, 3)))
        return draw.choice((None, (), [], names[0], names[0], tuple(names), tuple(names), list(names), UNCONSTRAINED))

    names: list[Any] = draw.sample((*LOGICAL, "unknown"), draw.randint(0, 6))
    for _ in range(draw.choice((0, 0, 1, 2))):
        names.insert(draw.randint(0, len(names)), draw.choice((None, UNCONSTRAINED)))
    pairs: list[Any] = [(draw.choice((*LOGICAL, "other")), target()) for _ in range(draw.randint(0, 12))]
    rules = [list(pair) if draw.random() < 0.2 else pair for pair in pairs]
    mesh = {axis: draw.choice((1, 1, 2, 3, 4)) for axis in MESH_AXES if draw.random() < 0.7}
    return tuple(names), rules, mesh


def test_ten_thousand_random_cases_are_those_of_linen() -> None:
    draw = random.Random(20_240_501)
    outcomes: dict[str, int] = {}
    for _ in range(CASES):
        for one in agree(*one_case(draw)).trace:
            outcomes[one.outcome] = outcomes.get(one.outcome, 0) + 1
    # The cases are worth having: each thing that can happen happens often.
    assert set(outcomes) == {"taken", "used", "shadowed", "not reached"}
    assert min(outcomes.values()) > 1000, outcomes


targets = (
    st.none()
    | st.sampled_from(MESH_AXES)
    | st.lists(st.sampled_from(MESH_AXES), max_size=3, unique=True)
    | st.lists(st.sampled_from(MESH_AXES), max_size=3, unique=True).map(tuple)
)
names = st.lists(st.sampled_from((*LOGICAL, "unknown")), max_size=4, unique=True).flatmap(
    lambda names: st.lists(st.sampled_from((None, UNCONSTRAINED)), max_size=2).flatmap(
        lambda others: st.permutations([*names, *others])
    )
)


@settings(max_examples=300, deadline=None)
@given(
    axes=names.map(tuple),
    rules=st.lists(st.tuples(st.sampled_from(LOGICAL), targets), max_size=8),
    mesh=st.fixed_dictionaries({}, optional=dict.fromkeys(MESH_AXES, st.integers(1, 3))),
)
def test_the_smallest_case_that_is_not_that_of_linen(
    axes: tuple[Any, ...], rules: list[Any], mesh: dict[str, int]
) -> None:
    agree(axes, rules, mesh)


@pytest.mark.parametrize("name", TUPLES)
def test_axes_that_decoders_have(name: str) -> None:
    axes = TUPLES[name]
    for rules in (DEFAULT_RULES, MAXTEXT):
        for order in (axes, axes[::-1]):
            for mesh in MESHES:
                agree(order, rules, mesh)


def test_where_the_weights_of_a_decoder_lie() -> None:
    mesh = {"stage": 2, "data": 2, "fsdp": 4, "expert": 2, "context": 2, "tensor": 4}
    where = {name: tuple(resolve(axes, DEFAULT_RULES, mesh).spec) for name, axes in TUPLES.items()}
    everywhere = ("fsdp", "context", "expert")
    assert where["embedding"] == ("tensor", everywhere)
    assert where["query"] == (everywhere, "tensor")
    assert where["attention output"] == ("tensor", everywhere)
    assert where["mlp down"] == ("tensor", everywhere)
    assert where["experts up"] == ("expert", ("fsdp", "context"), "tensor")
    assert where["scanned experts"] == ("stage", "expert", ("fsdp", "context"), "tensor")
    assert where["router"] == (("fsdp", "context"), "expert")
    assert where["scanned norm"] == ("stage", None)
    assert where["adapter A"] == ("stage", everywhere, None)
    assert where["adapter B"] == ("stage", None, "tensor")
    assert where["quantization scales"] == ("stage", None, "tensor")
    assert where["hidden"] == (("data", "fsdp", "expert"), "context", None)
    assert where["queries"] == (("data", "fsdp", "expert"), "context", "tensor", None)
    assert where["logits"] == (("data", "fsdp", "expert"), "context", "tensor")


def test_where_they_lie_by_rules_of_maxtext() -> None:
    mesh = {"data": 2, "fsdp": 4, "fsdp_transpose": 1, "sequence": 2, "tensor": 4, "expert": 2, "context": 1}
    where = {name: tuple(resolve(axes, MAXTEXT, mesh).spec) for name, axes in TUPLES.items()}
    assert where["embedding"] == ("tensor", ("fsdp", "sequence", "expert"))
    # `fsdp_transpose` has one device and is taken by `mlp`, so that the first rule of `embed` cannot be.
    assert where["mlp up"] == (("fsdp", "sequence", "expert"), "tensor")
    assert tuple(resolve(("embed", "mlp"), MAXTEXT, mesh).raw) == (
        ("fsdp", "sequence", "tensor_transpose", "context", "expert"),
        ("fsdp_transpose", "tensor", "tensor_sequence", "autoregressive"),
    )
    assert where["experts up, MaxText"] == ("expert", ("fsdp", "sequence"), "tensor")
    assert where["latent query down"] == (("fsdp", "sequence", "expert"), None)
    assert where["latent query up"] == (("fsdp", "sequence", "expert"), "tensor", None)
    assert where["logits, MaxText"] == (("data", "fsdp", "expert"), "sequence", "tensor")
    assert where["stages, MaxText"] == (None, ("data", "fsdp", "expert"), UNCONSTRAINED, UNCONSTRAINED)
    assert where["cache, MaxText"] == (None, None, "tensor", None)


@pytest.mark.parametrize("axes", [("embed", "embed"), ("embed", None, "mlp", "mlp", "embed")])
def test_a_name_twice_is_an_error_as_in_linen(axes: tuple[Any, ...]) -> None:
    twice = ", ".join(repr(name) for name in sorted({name for name in axes if name and axes.count(name) > 1}))
    with pytest.raises(ValueError, match="name 'embed'") as caught:
        resolve(axes, DEFAULT_RULES, {})
    assert str(caught.value) == f"axes {axes} name {twice} twice"
    with pytest.raises(ValueError, match="occur more than once"):
        spmd.logical_to_mesh_axes(axes, DEFAULT_RULES)


def rows_of(result: Resolved) -> list[tuple[int, int | None, Any, str, str]]:
    return [(one.dimension, one.rule, one.axes, one.outcome, one.why) for one in result.trace]


def test_the_trace_says_why() -> None:
    rules = (
        ("mlp", "tensor"),
        ("embed", "tensor"),
        ("other", "data"),
        ("embed", ["fsdp", "data", "expert"]),
        ("embed", "context"),
        ("norm", None),
        ("norm", "context"),
        ("layers", ("stage", "expert", "data")),
        ("layers", ()),
        ("heads", "context"),
    )
    actual = resolve(
        ("layers", "embed", "mlp", "norm", "heads"), rules, {"data": 1, "fsdp": 4, "tensor": 2, "stage": 3}
    )
    assert actual.raw == PartitionSpec(None, ("fsdp", "data", "expert"), "tensor", None, "context")
    assert actual.spec == PartitionSpec(None, "fsdp", "tensor", None, None)
    assert rows_of(actual) == [
        (2, 0, "tensor", "taken", "its axes were free"),
        (1, 1, "tensor", "used", "tensor is used by dimension 2"),
        (1, 3, ("fsdp", "data", "expert"), "taken", "dropped, since of size 1: data; absent from the mesh: expert"),
        (1, 4, "context", "not reached", "rule 3 was taken"),
        (3, 5, None, "taken", "replicated"),
        (3, 6, "context", "shadowed", "rule 5 claims the dimension as replicated"),
        (
            0,
            7,
            ("stage", "expert", "data"),
            "used",
            "expert (absent from the mesh) is used by dimension 1, data (of size 1) is used by dimension 1",
        ),
        (0, 8, (), "taken", "replicated"),
        (4, 9, "context", "taken", "dropped, since absent from the mesh: context"),
    ]


def test_an_axis_of_one_device_blocks_another_dimension_and_is_said_to() -> None:
    rules = (("experts", "expert"), ("embed", ("fsdp", "expert")))
    actual = resolve(("experts", "embed"), rules, {"fsdp": 4, "expert": 1})
    assert actual.spec == PartitionSpec(None, None)
    assert rows_of(actual) == [
        (0, 0, "expert", "taken", "dropped, since of size 1: expert"),
        (1, 1, ("fsdp", "expert"), "used", "expert (of size 1) is used by dimension 0"),
    ]


def test_a_rule_may_leave_its_dimension_to_the_compiler() -> None:
    rules = (("embed", UNCONSTRAINED), ("embed", "fsdp"), ("mlp", "fsdp"))
    actual = agree(("embed", "mlp"), rules, {"fsdp": 4})
    assert tuple(actual.spec) == (UNCONSTRAINED, "fsdp")
    assert [one.why for one in actual.trace] == ["left to the compiler", "rule 0 was taken", "its axes were free"]


def test_with_a_shape_rules_that_do_not_divide_are_passed_over() -> None:
    rules = (("embed", ("fsdp", "tensor", "data")), ("embed", "fsdp"), ("mlp", "tensor"), ("mlp", "context"))
    mesh = {"data": 1, "fsdp": 4, "tensor": 2}
    axes = ("embed", "mlp")
    # Without a shape, as Linen: sizes are not looked at.
    assert resolve(axes, rules, mesh).spec == PartitionSpec(("fsdp", "tensor"), None)
    assert resolve(axes, rules, mesh, shape=(16, 6)).spec == PartitionSpec(("fsdp", "tensor"), None)
    # What a rule that is passed over would have used is free for others.
    actual = resolve(axes, rules, mesh, shape=(12, 6))
    assert actual.spec == PartitionSpec("fsdp", "tensor")
    assert rows_of(actual) == [
        (0, 0, ("fsdp", "tensor", "data"), "indivisible", "12 does not divide by fsdp=4 x tensor=2"),
        (0, 1, "fsdp", "taken", "its axes were free"),
        (1, 2, "tensor", "taken", "its axes were free"),
        (1, 3, "context", "not reached", "rule 2 was taken"),
    ]
    # An axis of one device divides everything, and is taken.
    actual = resolve(axes, rules, mesh, shape=(3, 5))
    assert actual.spec == PartitionSpec(None, None)
    assert actual.raw == PartitionSpec(None, "context")
    assert [one.outcome for one in actual.trace] == ["indivisible", "indivisible", "indivisible", "taken"]
    # No rows are divided by anything.
    assert resolve(axes, rules, mesh, shape=(0, 0)).spec == PartitionSpec(("fsdp", "tensor"), None)


def test_a_users_rules_stand_where_the_default_stood() -> None:
    user = (("mlp", None), ("vocab", "fsdp"), ("own", "data"), ("vocab", "tensor"))
    default = (("batch", "data"), ("vocab", "tensor"), ("mlp", "tensor"), ("embed", "fsdp"), ("mlp", "fsdp"))
    assert with_user_rules(user, default) == (
        ("own", "data"),
        ("batch", "data"),
        ("vocab", "fsdp"),
        ("vocab", "tensor"),
        ("mlp", None),
        ("embed", "fsdp"),
    )
    assert with_user_rules((), default) == default
    assert with_user_rules(()) == DEFAULT_RULES


def test_sizes_in_words() -> None:
    mesh = {"data": 1, "fsdp": 4, "tensor": 2}
    assert sizes(("fsdp", "data", "tensor", "stage"), mesh) == "fsdp=4 x tensor=2"
    assert sizes("fsdp", mesh) == "fsdp=4"
    assert sizes(None, mesh) == ""
    assert mesh_axes("fsdp") == ("fsdp",)
    assert mesh_axes(("fsdp", "data")) == ("fsdp", "data")
    assert mesh_axes(None) == mesh_axes(UNCONSTRAINED) == mesh_axes(()) == ()
