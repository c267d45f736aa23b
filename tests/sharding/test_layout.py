"""Where arrays live: all arrays of all models on many meshes, what users may change, and every refusal's whole text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from small_lab.model import Small

from nnxdsl import Adapter, Experiment, Memory, Mesh, Optimizer, PlanError, Quantization, Schedule, compile
from nnxdsl.adapters import lora_math
from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.config.sharding import MESH_AXES
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.families.gemma3 import GEMMA3
from nnxdsl.models.families.llama3 import LLAMA3
from nnxdsl.models.params import ParamSpec
from nnxdsl.optim import optimizers
from nnxdsl.optim.param_roles import roles
from nnxdsl.program.blueprint import build_blueprint, optimizer_arrays
from nnxdsl.sharding.layout import ACTIVATION_AXES, DEFAULT_RULES, HOST, Array, Layout, Placed, bits, starred
from nnxdsl.sharding.rules import mesh_axes

ADAMW = Optimizer.AdamW(schedule=Schedule.Constant(lr=0.1))
MESHES = (
    Mesh(),
    Mesh(fsdp=2, tensor=4),
    Mesh(data=2, fsdp=2, tensor=2, context=2),
    Mesh(fsdp=16, tensor=16),
    Mesh(fsdp=64, tensor=64),
    Mesh(fsdp=64, tensor=8, context=8),
    Mesh(stage=2, data=2, fsdp=4, expert=2, context=2, tensor=4),
    Mesh(data=8, expert=8, stage=4, slices=8),
)
MODELS = {f"gemma3 {size}": config for size, config in GEMMA3.items()} | {
    f"llama3 {size}": config for size, config in LLAMA3.items()
}
# qwix runs every layer of a period and of the tail: of Gemma's, one without a tail and one with it.
QUICK = {name for name in MODELS if not name.startswith("gemma3")} | {"gemma3 tiny", "gemma3 1b"}
UP = "layers.blocks.0.mlp.up.kernel"


def parts_of(config: DecoderConfig, adapter: Adapter | None, quantization: Quantization | None) -> Any:
    """The arrays of a program, from its templates: so that dimensions which do not divide stop nothing."""
    leaves = abstract_decoder(config, jnp.bfloat16, adapter, quantization).variables
    trained = {path: leaf for path, leaf in leaves.items() if adapter is None or lora_math.is_adapter(path)}
    frozen = {path: leaf for path, leaf in leaves.items() if path not in trained}

    def arrays(leaves: Mapping[str, ParamSpec]) -> dict[str, Array]:
        return {path: Array(leaf.shape, leaf.dtype, leaf.axes) for path, leaf in leaves.items()}

    update = optimizers.build(ADAMW, lambda step: 0.1, roles(trained))
    return {
        "frozen": arrays(frozen),
        "trainable": arrays(trained),
        "reference": arrays(leaves) if adapter is None else {},
        "optimizer": optimizer_arrays(update, trained),
    }


def check_everywhere(parts: Any) -> None:
    whole = Layout(Mesh(), parts)
    paths = [(placed.part, placed.path) for placed in whole]
    assert all(set(placed.spec) <= {None} and placed.replicas == 1 for placed in whole)
    for mesh in MESHES:
        for indivisible in ("error", "replicate"):
            layout = whole.on(Mesh(**{**mesh.sizes, "slices": mesh.slices, "indivisible": indivisible}))
            assert [(placed.part, placed.path) for placed in layout] == paths
            for placed in layout:
                check(placed, layout.mesh)


def check(placed: Placed, mesh: Mesh) -> None:
    """A spec that jax takes: a part for each dimension, no axis that the mesh lacks, none twice, none of size 1."""
    axes = [axis for target in placed.spec for axis in mesh_axes(target)]
    assert len(placed.spec) == len(placed.shape) == len(placed.axes) == len(placed.shards), placed
    assert len(set(axes)) == len(axes), placed
    assert set(axes) <= set(MESH_AXES), placed
    assert all(mesh.sizes[axis] > 1 for axis in axes), placed
    assert math.prod(mesh.sizes[axis] for axis in axes) == math.prod(placed.shards), placed
    assert math.prod(placed.shards) * placed.replicas == mesh.device_count, placed
    assert placed.used_axes == set(axes)
    if mesh.indivisible == "replicate":
        abstract = AbstractMesh(tuple(mesh.sizes.values()), MESH_AXES)
        sharding = NamedSharding(abstract, placed.spec)
        assert sharding.shard_shape(placed.shape) == placed.device_shape
    # Each linear weight of more than one dimension is cut, wherever the mesh cuts weights and nothing is in the way.
    if placed.part != "optimizer" and {"embed", "mlp"} <= set(placed.axes) and mesh.indivisible == "error":
        cuts = math.prod(mesh.sizes[axis] for axis in ("fsdp", "context", "expert", "tensor"))
        layers = mesh.stage if "layers" in placed.axes else 1
        assert math.prod(placed.shards) == cuts * layers, placed


@pytest.mark.default_variants(3)
@pytest.mark.parametrize("name", MODELS)
def test_every_array_of_every_model_on_every_mesh(name: str) -> None:
    check_everywhere(parts_of(MODELS[name], None, None))


def with_adapters(name: str) -> None:
    parts = parts_of(MODELS[name], Adapter.LoRA(rank=16), Quantization.NF4(block_size=32))
    assert any(path.endswith(".qvalue") for path in parts["frozen"])
    assert all(lora_math.is_adapter(path) for path in parts["trainable"])
    check_everywhere(parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(QUICK))
def test_every_array_of_every_model_with_adapters_and_four_bits(name: str) -> None:
    with_adapters(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(MODELS) - QUICK))
def test_every_array_of_the_other_models_with_adapters_and_four_bits(name: str) -> None:
    with_adapters(name)


@pytest.mark.extended
def test_every_axis_of_the_models_has_a_rule() -> None:
    known = {logical for logical, _ in DEFAULT_RULES}
    assert set(ACTIVATION_AXES) <= known
    for config in MODELS.values():
        leaves = abstract_decoder(config, jnp.float32).variables.values()
        assert {axis for leaf in leaves for axis in leaf.axes} <= known


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(PlanError) as caught:
        make()
    return str(caught.value)


def test_dimensions_that_do_not_divide(experiment: Callable[..., Experiment]) -> None:
    asked = experiment(model=Small(mlp_dim=30, layers=3), mesh=Mesh(fsdp=2, tensor=4), batch_size=4)
    assert refusal(lambda: build_blueprint(asked)) == (
        "7 problems in Experiment 'small'\n"
        "  layers.blocks.*.mlp.down.kernel: axis 1 has 30 rows, not divisible by tensor=4\n"
        "  layers.blocks.*.mlp.gate.kernel: axis 2 has 30 rows, not divisible by tensor=4\n"
        "  layers.blocks.*.mlp.up.kernel: axis 2 has 30 rows, not divisible by tensor=4\n"
        "  tail.blocks.*.mlp.down.kernel: axis 0 has 30 rows, not divisible by tensor=4\n"
        "  tail.blocks.*.mlp.gate.kernel: axis 1 has 30 rows, not divisible by tensor=4\n"
        "  tail.blocks.*.mlp.up.kernel: axis 1 has 30 rows, not divisible by tensor=4\n"
        "  mesh: meshes of 8 devices that divide everything: fsdp=4 x tensor=2; data=2 x fsdp=2 x tensor=2; "
        "data=4 x tensor=2; or indivisible='replicate', which replicates what does not divide"
    )
    for mesh in (Mesh(fsdp=4, tensor=2), Mesh(data=2, fsdp=2, tensor=2), Mesh(data=4, tensor=2)):
        assert build_blueprint(experiment(model=asked.model, mesh=mesh, batch_size=4)).layout.problems() == []


def test_no_mesh_of_so_many_devices_divides(experiment: Callable[..., Experiment]) -> None:
    asked = experiment(model=Small(embed_dim=15, vocab_size=47), mesh=Mesh(fsdp=2, tensor=2), batch_size=2)
    assert refusal(lambda: build_blueprint(asked)) == (
        "10 problems in Experiment 'small'\n"
        "  embed.embedding: axis 0 has 47 rows, not divisible by tensor=2\n"
        "  embed.embedding: axis 1 has 15 rows, not divisible by fsdp=2\n"
        "  layers.blocks.*.attention.key.kernel: axis 1 has 15 rows, not divisible by fsdp=2\n"
        "  layers.blocks.*.attention.output.kernel: axis 2 has 15 rows, not divisible by fsdp=2\n"
        "  layers.blocks.*.attention.query.kernel: axis 1 has 15 rows, not divisible by fsdp=2\n"
        "  layers.blocks.*.attention.value.kernel: axis 1 has 15 rows, not divisible by fsdp=2\n"
        "  layers.blocks.*.mlp.down.kernel: axis 2 has 15 rows, not divisible by fsdp=2\n"
        "  layers.blocks.*.mlp.gate.kernel: axis 1 has 15 rows, not divisible by fsdp=2\n"
        "  layers.blocks.*.mlp.up.kernel: axis 1 has 15 rows, not divisible by fsdp=2\n"
        "  mesh: no mesh of 4 devices divides everything; use fewer, or indivisible='replicate', "
        "which replicates what does not divide"
    )


def test_rules_and_batches_that_cannot_be(experiment: Callable[..., Experiment]) -> None:
    rules = (("embd", "fsdp"), ("own", None), ("batch", ("fsdp", "tensor")))
    asked = experiment(mesh=Mesh(fsdp=2, tensor=2, rules=rules), batch_size=12, microbatch_size=6)
    assert refusal(lambda: build_blueprint(asked)) == (
        "4 problems in Experiment 'small'\n"
        "  mesh.rules.0: no array has an axis 'embd'; did you mean 'embed'?\n"
        "  mesh.rules.1: no array has an axis 'own'\n"
        "  microbatch_size: 6 rows at a time cannot be split over fsdp=2 x tensor=2\n"
        "  mesh: meshes of 4 devices that divide everything: data=2 x tensor=2; data=2 x fsdp=2; data=4; "
        "or indivisible='replicate', which replicates what does not divide"
    )
    asked = experiment(
        mesh=Mesh(fsdp=2, tensor=2, rules=(("rank", "tensor"),)), adapter=Adapter.LoRA(rank=3, targets=("query",))
    )
    assert refusal(lambda: build_blueprint(asked)) == (
        "2 problems in Experiment 'small'\n"
        "  layers.blocks.*.attention.query.kernel_lora_a: axis 2 has 3 rows, not divisible by tensor=2\n"
        "  mesh: meshes of 4 devices that divide everything: fsdp=4; data=2 x fsdp=2; data=4; "
        "or indivisible='replicate', which replicates what does not divide"
    )


def test_rules_of_arrays_that_are_not_there(experiment: Callable[..., Experiment]) -> None:
    array_rules = (
        ("*.mlp.upp.kernel", (("mlp", "fsdp"),)),
        ("*.mlp.up.kernel", (("embed", None), ("mpl", "fsdp"))),
        ("*.nothing.at.all", ()),
        ("1.*.mu.*", (("embed", None),)),  # the optimizer's arrays follow their parameters
    )
    asked = experiment(mesh=Mesh(fsdp=2, tensor=2, array_rules=array_rules), optimizer=ADAMW)
    assert refusal(lambda: build_blueprint(asked)) == (
        "4 problems in Experiment 'small'\n"
        "  mesh.array_rules.0: no array has a path like '*.mlp.upp.kernel'; did you mean "
        "'layers.blocks.*.mlp.up.kernel'?\n"
        "  mesh.array_rules.1.1.1: no array with a path like '*.mlp.up.kernel' has an axis 'mpl'; did you mean 'mlp'?\n"
        "  mesh.array_rules.2: no array has a path like '*.nothing.at.all'\n"
        "  mesh.array_rules.3: no array has a path like '1.*.mu.*'"
    )


def test_a_mesh_larger_than_the_devices(experiment: Callable[..., Experiment]) -> None:
    asked = experiment(mesh=Mesh(data=2, fsdp=2, tensor=2), batch_size=4)
    assert refusal(lambda: compile(asked, jax.devices()[:1])) == (
        "1 problem in Experiment 'small'\n  mesh: data=2 x fsdp=2 x tensor=2 takes 8 devices, there are 1 (cpu)"
    )


def specs(layout: Layout, part: str) -> dict[str, tuple[Any, ...]]:
    return {path: tuple(placed.spec) for path, placed in layout.arrays[part].items()}


def test_every_array_of_a_program_is_placed(experiment: Callable[..., Experiment]) -> None:
    asked = experiment(
        mesh=Mesh(fsdp=4, tensor=2), adapter=Adapter.LoRA(rank=2), quantization=Quantization.NF4(block_size=2)
    )
    layout = build_blueprint(asked).layout
    assert set(layout.arrays) == {"frozen", "trainable", "optimizer"}
    assert set(specs(layout, "optimizer").values()) == {()}  # plain SGD counts its steps
    frozen, trainable = specs(layout, "frozen"), specs(layout, "trainable")
    assert frozen["embed.embedding"] == ("tensor", "fsdp")
    assert frozen[f"{UP}.array.qvalue"] == (None, "fsdp", "tensor")
    assert frozen[f"{UP}.array.scale"] == (None, None, "tensor")
    assert trainable[f"{UP}_lora_a"] == (None, "fsdp", None)
    assert trainable[f"{UP}_lora_b"] == (None, None, "tensor")
    assert frozen["norm.scale"] == (None,)
    assert tuple(layout.batch_spec()) == ("fsdp",)
    assert (layout.batch_shards(), layout.batch_shards(8)) == (4, 4)
    assert {placed.memory for placed in layout} == {"device"}


def test_the_dump(experiment: Callable[..., Experiment]) -> None:
    fields = {"adapter": Adapter.LoRA(rank=2, targets=("up",)), "quantization": Quantization.NF4(block_size=2)}
    asked = experiment(
        model=Small(layers=2),
        mesh=Mesh(data=2, fsdp=4, tensor=2),
        memory=Memory(offload=("frozen",)),
        optimizer=ADAMW,
        batch_size=8,
        **fields,
    )
    layout = build_blueprint(asked).layout
    lines = layout.dump().splitlines()
    assert layout.dump().endswith("\n")
    assert [line.split()[:2] for line in lines] == [[placed.part, placed.path] for placed in layout]
    assert [line for line in lines if "blocks.1.mlp.up" in line or not line.split()[1].count(".blocks.")] == [
        "frozen embed.embedding 48x16 float32 ('tensor', 'fsdp') 384 host",
        # 16 x 32 values of half a byte on 4 x 2 devices.
        "frozen layers.blocks.1.mlp.up.kernel.array.qvalue 1x16x32 uint4 (None, 'fsdp', 'tensor') 32 host",
        "frozen layers.blocks.1.mlp.up.kernel.array.scale 1x8x32 float32 (None, None, 'tensor') 512 host",
        "frozen norm.scale 16 float32 (None,) 64 host",
        "trainable layers.blocks.1.mlp.up.kernel_lora_a 1x16x2 float32 (None, 'fsdp', None) 32",
        "trainable layers.blocks.1.mlp.up.kernel_lora_b 1x2x32 float32 (None, None, 'tensor') 128",
        "optimizer 1.0.count scalar int32 () 4",
        "optimizer 1.0.mu.layers.blocks.1.mlp.up.kernel_lora_a 1x16x2 float32 (None, ('fsdp', 'data'), None) 16",
        "optimizer 1.0.mu.layers.blocks.1.mlp.up.kernel_lora_b 1x2x32 float32 (None, None, ('tensor', 'data')) 64",
        "optimizer 1.0.nu.layers.blocks.1.mlp.up.kernel_lora_a 1x16x2 float32 (None, ('fsdp', 'data'), None) 16",
        "optimizer 1.0.nu.layers.blocks.1.mlp.up.kernel_lora_b 1x2x32 float32 (None, None, ('tensor', 'data')) 64",
        "optimizer 1.2.count scalar int32 () 4",
    ]


def test_a_users_rules(experiment: Callable[..., Experiment]) -> None:
    # In the place of the default, so that what comes before it still does: the heads keep `tensor`.
    rules = (("embed", "tensor"), ("embed", "fsdp"), ("mlp", None), ("batch", "data"), ("length", None))
    layout = build_blueprint(experiment(mesh=Mesh(data=2, fsdp=2, tensor=2, rules=rules), batch_size=4)).layout
    placed = specs(layout, "trainable")
    assert placed["layers.blocks.0.attention.query.kernel"] == (None, "fsdp", "tensor")
    assert placed[UP] == (None, "tensor", None)
    assert placed["embed.embedding"] == ("tensor", "fsdp")
    assert specs(layout, "reference") == placed
    assert tuple(layout.batch_spec()) == ("data",)
    assert layout.resolve(("batch", "length", "activation_mlp")).spec == PartitionSpec("data", None, "tensor")


def test_rules_of_some_arrays_go_first(experiment: Callable[..., Experiment]) -> None:
    array_rules = (
        ("*.mlp.*", (("mlp", None), ("embed", "tensor"))),
        ("*.blocks.0.mlp.down.kernel", (("mlp", "fsdp"), ("embed", "fsdp"))),
    )
    mesh = Mesh(data=2, fsdp=2, tensor=2, array_rules=array_rules)
    layout = build_blueprint(experiment(mesh=mesh, batch_size=4, optimizer=ADAMW)).layout
    trainable, state = specs(layout, "trainable"), specs(layout, "optimizer")
    assert trainable[UP] == (None, "tensor", None)
    # Of two patterns for one array, the first goes first.
    assert trainable["layers.blocks.0.mlp.down.kernel"] == (None, None, "tensor")
    assert trainable["layers.blocks.0.attention.query.kernel"] == (None, "fsdp", "tensor")
    assert specs(layout, "reference") == trainable
    for moment in ("mu", "nu"):
        assert state[f"1.0.{moment}.{UP}"] == (None, "tensor", "data")
        assert state[f"1.0.{moment}.layers.blocks.0.mlp.down.kernel"] == (None, "data", "tensor")
        assert state[f"1.0.{moment}.layers.blocks.0.attention.query.kernel"] == (None, ("fsdp", "data"), "tensor")
    trace = layout.arrays["trainable"][UP].resolved.trace
    assert [(one.rule, one.logical, one.axes, one.outcome) for one in trace[:2]] == [
        (0, "mlp", None, "taken"),
        (1, "embed", "tensor", "taken"),
    ]
    assert layout.resolve(("embed", "mlp"), path=UP).spec == PartitionSpec("tensor", None)
    assert layout.resolve(("embed", "mlp")).spec == PartitionSpec("fsdp", "tensor")


def test_what_does_not_divide_falls_through_to_later_rules_and_then_to_copies(
    experiment: Callable[..., Experiment],
) -> None:
    rules = (("mlp", ("tensor", "context")), ("mlp", "context"))
    mesh = Mesh(fsdp=3, tensor=4, context=2, rules=rules, indivisible="replicate")
    layout = build_blueprint(experiment(model=Small(mlp_dim=30, embed_dim=12), mesh=mesh, batch_size=4)).layout
    assert layout.problems() == []
    trainable = specs(layout, "trainable")
    # 30 by 8 fails and by 2 does not; `context` is used then, so that `embed` cannot be cut over it.
    assert trainable[UP] == (None, None, "context")
    assert trainable["layers.blocks.0.attention.query.kernel"] == (None, ("fsdp", "context"), "tensor")
    assert [(one.logical, one.outcome) for one in layout.arrays["trainable"][UP].resolved.trace] == [
        ("layers", "taken"),
        ("mlp", "indivisible"),
        ("mlp", "taken"),
        ("embed", "used"),
        ("embed", "used"),
    ]
    # 10 by 3 fails, and there is no later rule.
    layout = build_blueprint(experiment(model=Small(embed_dim=10), mesh=Mesh(fsdp=3, indivisible="replicate"))).layout
    assert layout.problems() == []
    assert {tuple(placed.spec) for placed in layout} == {(None,) * count for count in range(4)}
    assert {placed.replicas for placed in layout} == {3}
    # Neither do four rows by 3: all devices compute all of them.
    assert layout.batch_problems(4) == []
    assert (tuple(layout.batch_spec(4)), tuple(layout.batch_spec(6)), tuple(layout.batch_spec())) == (
        (None,),
        ("fsdp",),
        ("fsdp",),
    )
    assert (layout.batch_shards(4), layout.batch_shards(6)) == (1, 3)


def test_the_optimizers_copies_over_data_are_cut(experiment: Callable[..., Experiment]) -> None:
    def layout(**fields: Any) -> Layout:
        return build_blueprint(experiment(optimizer=ADAMW, batch_size=12, mesh=Mesh(**fields))).layout

    cut = layout(data=2, fsdp=2, tensor=2)
    whole = layout(data=2, fsdp=2, tensor=2, zero1=False)
    assert specs(cut, "trainable") == specs(whole, "trainable")
    trainable, state = cut.arrays["trainable"], cut.arrays["optimizer"]
    moments = {path: placed for path, placed in state.items() if placed.shape}
    assert len(moments) == 2 * len(trainable)
    for path, placed in moments.items():
        parameter = trainable[path.split(".", 3)[3] if path.startswith("1.0.") else path]
        assert "data" not in parameter.used_axes
        assert placed.used_axes == parameter.used_axes | {"data"}
        assert placed.replicas * 2 == parameter.replicas
        # Within the parameter's own piece: what a device updates, it has.
        for mine, theirs in zip(placed.spec, parameter.spec, strict=True):
            assert mesh_axes(mine) in (mesh_axes(theirs), (*mesh_axes(theirs), "data"))
        last = placed.resolved.trace[-1]
        assert (last.rule, last.outcome) == (None, "taken")
        assert last.why == "ZeRO stage 1: optimizer state is sharded over data"
        assert placed.spec[last.dimension] == last.axes
        whole_pieces = [size // shards for size, shards in zip(placed.shape, parameter.shards, strict=True)]
        assert whole_pieces[last.dimension] == max(whole_pieces)
    # Scalars cannot be cut.
    assert {tuple(p.spec) for p in state.values() if not p.shape} == {()}
    for path, placed in whole.arrays["optimizer"].items():
        assert tuple(placed.spec) == (() if not placed.shape else tuple(trainable[path.split(".", 3)[3]].spec))
    # A rule that cuts a parameter over data leaves nothing to do.
    ours = layout(data=2, tensor=2, rules=(("embed", "data"),))
    assert specs(ours, "optimizer")[f"1.0.mu.{UP}"] == specs(ours, "trainable")[UP] == (None, "data", "tensor")
    assert specs(ours, "optimizer")["1.0.mu.norm.scale"] == ("data",)
    # What no dimension divides by stays whole, and is no error.
    three = layout(data=3)
    assert specs(three, "optimizer")["1.0.mu.norm.scale"] == (None,)
    assert specs(three, "optimizer")["1.0.mu.embed.embedding"] == ("data", None)


def test_what_is_offloaded(experiment: Callable[..., Experiment]) -> None:
    mesh = Mesh(data=2, fsdp=2)
    asked = experiment(mesh=mesh, optimizer=ADAMW, memory=Memory(offload=("optimizer", "reference")))
    layout, plain = build_blueprint(asked).layout, build_blueprint(experiment(mesh=mesh, optimizer=ADAMW)).layout
    assert {(placed.part, placed.memory) for placed in layout} == {
        ("trainable", "device"),
        ("reference", "host"),
        ("optimizer", "host"),
    }
    for line, before in zip(layout.dump().splitlines(), plain.dump().splitlines(), strict=True):
        assert line == before + ("" if line.startswith("trainable") else " host")
    sums = plain.device_bytes()
    assert layout.device_bytes() == {"trainable": sums["trainable"], "reference": 0, "optimizer": 0}
    assert layout.device_bytes("host") == {**sums, "trainable": 0}
    abstract = AbstractMesh(tuple(mesh.sizes.values()), MESH_AXES)
    sharding = layout.sharding("reference", UP, abstract)
    assert (sharding.spec, sharding.memory_kind) == (PartitionSpec(None, "fsdp", None), HOST)
    fetched = layout.sharding("reference", UP, abstract, fetched=True)
    assert fetched == plain.sharding("reference", UP, abstract) != sharding
    assert layout.shardings("reference", abstract)[UP] == sharding
    assert layout.shardings("frozen", abstract) == {}
    assert layout.on(Mesh(fsdp=2)).device_bytes("host")["reference"] == sums["reference"]


def test_bytes_on_a_device() -> None:
    arrays = {
        "values": Array((8, 6), jnp.uint4, ("embed", "mlp")),
        "odd": Array((3,), jnp.int4, (None,)),
        "bytes": Array((8,), jnp.int8, ("embed",)),
        "halves": Array((8, 5), jnp.bfloat16, ("mlp", None)),
        "scalar": Array((), jnp.float32, ()),
    }
    layout = Layout(Mesh(fsdp=4, tensor=2), {"frozen": arrays, "trainable": {}})
    actual = {
        path: (p.bytes, p.device_shape, p.device_bytes, p.replicas) for path, p in layout.arrays["frozen"].items()
    }
    assert actual == {
        "values": (24, (2, 3), 3, 1),
        "odd": (2, (3,), 2, 8),  # the half of a byte is a byte
        "bytes": (8, (2,), 2, 2),
        "halves": (80, (4, 5), 40, 4),
        "scalar": (4, (), 4, 8),
    }
    assert layout.device_bytes() == {"frozen": 3 + 2 + 2 + 40 + 4}
    assert layout.device_bytes("host") == {"frozen": 0}
    assert [bits(name) for name in ("uint4", "int4", "int8", "bool", "bfloat16", "float32")] == [4, 4, 8, 8, 16, 32]


def test_the_same_arrays_on_another_mesh(experiment: Callable[..., Experiment]) -> None:
    first, second = Mesh(fsdp=4), Mesh(data=2, tensor=2, rules=(("mlp", "data"),))
    fields: dict[str, Any] = {"optimizer": ADAMW, "memory": Memory(offload=("optimizer",))}
    layout = build_blueprint(experiment(mesh=first, **fields)).layout
    other = build_blueprint(experiment(mesh=second, **fields)).layout
    assert layout.on(second).dump() == other.dump() != layout.dump()
    assert other.on(first).dump() == layout.dump()
    assert layout.on(second).rules == other.rules


def test_names_of_blocks() -> None:
    assert starred("1.0.mu.layers.blocks.11.mlp.up.kernel") == "1.0.mu.layers.blocks.*.mlp.up.kernel"
