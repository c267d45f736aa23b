"""Warnings about a layout, each by its whole text, and none where there is nothing to say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
from small_lab.model import Small

from nnxdsl import Adapter, Experiment, Mesh, Model
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.program.layout_warnings import warnings
from nnxdsl.sharding.mesh_candidates import candidates, factorizations

LARGE = Small(embed_dim=64, mlp_dim=256, heads=4, vocab_size=192)  # norms are few of its bytes
KINDS = ("replicated", "axis", "rule", "batch", "indivisible", "heads", "stage")


@pytest.fixture(scope="session")
def said(experiment: Callable[..., Experiment]) -> Callable[..., list[tuple[str, str, str]]]:
    """The warnings of a small experiment on a mesh."""

    def warnings_of(length: int = 48, **fields: Any) -> list[tuple[str, str, str]]:
        blueprint = build_blueprint(experiment(**{"model": LARGE, **fields}))
        heads = blueprint.config.num_heads, blueprint.config.num_kv_heads
        rows = blueprint.experiment.rows_at_once
        listed = [attrs.astuple(one) for one in warnings(blueprint.layout, rows, length, heads)]
        assert {kind for kind, _, _ in listed} <= set(KINDS)
        return listed

    return warnings_of


Said = Callable[..., list[tuple[str, str, str]]]


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(),
        Mesh(data=4),
        Mesh(fsdp=4),
        Mesh(fsdp=2, tensor=2),
        Mesh(data=2, fsdp=2, tensor=2, context=2),
        Mesh(expert=2, fsdp=2),
        Mesh(data=2, fsdp=2, slices=2, indivisible="replicate"),
        Mesh(fsdp=4, rules=(("mlp", None), ("embed", "fsdp"), ("batch", ("fsdp",)))),
        Mesh(fsdp=2, tensor=2, array_rules=(("*.mlp.*", (("embed", "tensor"), ("mlp", "fsdp"))),)),
    ],
)
def test_sensible_layouts_are_not_spoken_of(said: Said, mesh: Mesh) -> None:
    assert said(mesh=mesh) == []


def test_large_models_are_not_spoken_of_either(said: Said) -> None:
    for adapter in (None, Adapter.LoRA(rank=16)):
        assert said(model=Model.Llama3("8b"), adapter=adapter, mesh=Mesh(fsdp=4, tensor=8)) == []


def test_copies_along_an_axis(said: Said) -> None:
    mlp = "'layers' or 'mlp' or 'embed' could be sharded over fsdp"
    assert said(mesh=Mesh(fsdp=2, rules=(("embed", None),))) == [
        (
            "replicated",
            "mesh.fsdp",
            "100% of the parameters' bytes are replicated along fsdp=2; the largest: "
            f"layers.blocks.*.mlp.down.kernel ({mlp}), "
            "layers.blocks.*.mlp.gate.kernel ('layers' or 'embed' or 'mlp' could be sharded over fsdp), "
            "layers.blocks.*.mlp.up.kernel ('layers' or 'embed' or 'mlp' could be sharded over fsdp)",
        )
    ]
    # Copies are what `data` is for.
    assert said(mesh=Mesh(data=4)) == []
    # Four percent are said, and what cannot be helped as well.
    assert said(model=attrs.evolve(LARGE, layers=6), mesh=Mesh(stage=3), batch_size=64) == [
        (
            "replicated",
            "mesh.stage",
            "4% of the parameters' bytes are replicated along stage=3; the largest: "
            "embed.embedding ('vocab' could be sharded over stage), norm.scale (no dimension divides by stage=3)",
        )
    ]


def test_axes_without_work(said: Said) -> None:
    rules = (("embed", "fsdp"), ("batch", "data"), ("head_batch", "data"))
    actual = said(mesh=Mesh(expert=2, rules=rules))
    assert [(kind, path) for kind, path, _ in actual] == [("replicated", "mesh.expert"), ("axis", "mesh.expert")]
    assert actual[1][2] == "nothing is sharded over expert=2: its devices do the same work"
    # Tokens over `context` are work, though rows must be filled up for it and no weight is cut.
    for length in (48, 47, 0):
        actual = said(mesh=Mesh(context=2, rules=(("embed", "fsdp"),)), length=length)
        assert [(kind, path) for kind, path, _ in actual] == [("replicated", "mesh.context")]


def test_rules_without_effect(said: Said) -> None:
    rules = (
        ("embed", "fsdp"),
        ("rank", "fsdp"),
        ("mlp", "tensor"),
        ("mlp", "tensor"),
        ("mlp", "data"),
        ("vocab", None),
        ("vocab", ("tensor", "data")),
        ("length", "data"),
    )
    assert said(mesh=Mesh(data=2, fsdp=2, rules=rules)) == [
        ("rule", "mesh.rules.1", "('rank', 'fsdp') has no effect: no array of this experiment has an axis 'rank'"),
        ("rule", "mesh.rules.3", "('mlp', 'tensor') has no effect: duplicate rule"),
        ("rule", "mesh.rules.4", "('mlp', 'data') has no effect: ('mlp', 'tensor') was taken"),
        (
            "rule",
            "mesh.rules.6",
            "('vocab', ('tensor', 'data')) has no effect: ('vocab', None) claims the dimension as replicated",
        ),
        # Alone it would be taken, but tokens never stand alone.
        ("rule", "mesh.rules.7", "('length', 'data') has no effect: data is used by dimension 0"),
    ]
    adapter = Adapter.LoRA(rank=2)
    assert [one for one in said(mesh=Mesh(rules=(("rank", "tensor"),)), adapter=adapter) if one[0] == "rule"] == []


def test_rules_of_arrays_without_effect(said: Said) -> None:
    array_rules = (
        ("*.mlp.*", (("mlp", None), ("mlp", "fsdp"))),
        ("*.mlp.up.*", (("mlp", "tensor"), ("embed", ("fsdp", "data")))),
    )
    assert said(mesh=Mesh(fsdp=2, array_rules=array_rules)) == [
        (
            "rule",
            "mesh.array_rules.0.1.1",
            "('mlp', 'fsdp') has no effect: ('mlp', None) claims the dimension as replicated",
        ),
        (
            "rule",
            "mesh.array_rules.1.1.0",
            "('mlp', 'tensor') has no effect: ('mlp', None) claims the dimension as replicated",
        ),
    ]
    # A rule that only arrays with rules of their own come to is tried there.
    mesh = Mesh(fsdp=2, rules=(("mlp", "fsdp"),), array_rules=(("*.mlp.*", (("embed", None),)),))
    assert [one for one in said(mesh=mesh) if one[0] == "rule"] == []


def test_rows_and_dimensions_that_do_not_divide(said: Said) -> None:
    actual = said(mesh=Mesh(fsdp=3, indivisible="replicate"))
    assert [kind for kind, _, _ in actual] == ["replicated", "axis", "batch", "indivisible"]
    assert actual[2:] == [
        ("batch", "microbatch_size", "4 rows do not divide by fsdp=3: every device computes all of them"),
        (
            "indivisible",
            "mesh.indivisible",
            "not sharded where rules do not divide: "
            "embed.embedding (axis 1: 64 does not divide by fsdp=3), "
            "layers.blocks.*.attention.key.kernel (axis 1: 64 does not divide by fsdp=3), "
            "layers.blocks.*.attention.output.kernel (axis 2: 64 does not divide by fsdp=3) and 5 more",
        ),
    ]
    assert actual[0][2].startswith("100% of the parameters' bytes are replicated along fsdp=3; the largest: ")
    assert actual[0][2].count("(no dimension divides by fsdp=3)") == 3

    rules = (("batch", ("data", "fsdp")), ("batch", "data"))
    actual = said(mesh=Mesh(data=2, fsdp=4, rules=rules, indivisible="replicate"))
    assert actual == [
        ("rule", "mesh.rules.0", "('batch', ('data', 'fsdp')) has no effect: 4 does not divide by data=2 x fsdp=4"),
        ("batch", "microbatch_size", "4 rows do not divide by data=2 x fsdp=4: they are sharded over data=2 alone"),
    ]


def test_heads_that_are_cut(said: Said) -> None:
    assert said(mesh=Mesh(tensor=4)) == [
        (
            "heads",
            "mesh.tensor",
            "2 kv_heads do not divide over tensor=4: they are sharded within a head, and gathered for use",
        )
    ]
    assert said(mesh=Mesh(tensor=8)) == [
        (
            "heads",
            "mesh.tensor",
            "4 heads do not divide over tensor=8: they are sharded within a head, and gathered for use",
        ),
        (
            "heads",
            "mesh.tensor",
            "2 kv_heads do not divide over tensor=8: they are sharded within a head, and gathered for use",
        ),
    ]
    assert {kind for kind, _, _ in said(mesh=Mesh(tensor=4, rules=(("kv_heads", None),)))} == {"replicated"}


def test_stages_that_wait(said: Said) -> None:
    fields = {"model": attrs.evolve(LARGE, layers=6), "mesh": Mesh(fsdp=2, stage=3)}
    assert [one for one in said(batch_size=8, **fields) if one[0] == "stage"] == [
        (
            "stage",
            "mesh.stage",
            # (stages - 1) / (parts + stages - 1) of the time: Huang et al. 2019, arXiv:1811.06965.
            "pipeline stages are idle 33% of the time: 4 rows pass in 4 micro-batches; "
            "a larger microbatch_size makes it less",
        )
    ]
    assert [one for one in said(batch_size=128, **fields) if one[0] == "stage"] == []


def test_meshes_that_are_tried_are_of_as_many_devices_and_near_ones_first() -> None:
    asked = Mesh(fsdp=4, tensor=2)
    actual = [(mesh.data, mesh.fsdp, mesh.tensor) for mesh in candidates(asked)]
    assert all(mesh.device_count == 8 for mesh in candidates(asked))
    assert len(set(actual)) == len(actual) == 9  # all of the ten but the one that was asked for
    assert (1, 4, 2) not in actual
    assert actual[:2] == [(1, 2, 4), (1, 8, 1)]
    # Axes that were asked for are kept in play, and slices must be cut out of all that is tried.
    sliced = list(candidates(Mesh(fsdp=4, context=2, slices=4)))
    assert {mesh.context for mesh in sliced} == {1, 2}
    assert all(mesh.data * mesh.fsdp % 4 == 0 and mesh.slices == 4 for mesh in sliced)


def test_factorizations() -> None:
    assert list(factorizations(6, 2)) == [(1, 6), (2, 3), (3, 2), (6, 1)]
    assert list(factorizations(1, 3)) == [(1, 1, 1)]
    assert len(list(factorizations(4096, 3))) == 91  # 12 twos in three places
