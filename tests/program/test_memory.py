"""What a plan says of memory: arrays to the byte, activations as XLA has them, and how both change with a placement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from small_lab.model import Small

from nnxdsl import Adapter, Data, Experiment, Memory, Mesh, Model, Objective, Optimizer, Quantization, Schedule, compile
from nnxdsl.config.core.serialization import evolve
from nnxdsl.errors import RunError
from nnxdsl.planning.aot_process import compiled_report, find_compiler
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.program.memory import Part, Share, Trace, activations, memory, rows_of, share_of

ADAMW = Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-3))
BROAD = Small(layers=4, pattern=2, embed_dim=64, mlp_dim=256, heads=4, head_dim=16, vocab_size=320)
PLACES: dict[str, dict[str, Any]] = {
    "one device": {},
    "every axis": {"mesh": Mesh(data=2, fsdp=2, context=2, tensor=2)},
    "stages": {"mesh": Mesh(fsdp=2, stage=2)},
    "copies of the optimizer": {"mesh": Mesh(data=4, zero1=False)},
}
TRAINED: dict[str, dict[str, Any]] = {
    "everything": {},
    "adapters": {"adapter": Adapter.LoRA(rank=4)},
    "adapters of few bits": {"adapter": Adapter.LoRA(rank=4), "quantization": Quantization.NF4(block_size=16)},
}
NAMES = {
    "frozen": "frozen weights",
    "trainable": "trainable weights",
    "reference": "reference copy",
    "optimizer": "optimizer",
}


def untraced(share: Share, rows: int, remat: str) -> int:
    """In place of a trace, for tests that look at arrays alone."""
    return rows


def parts_of(experiment: Experiment, trace: Trace | None = None) -> dict[str, Part]:
    parts = memory(build_blueprint(experiment), trace)
    assert len({part.name for part in parts}) == len(parts)
    return {part.name: part for part in parts}


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("trained", ["everything", "adapters of few bits"])
@pytest.mark.parametrize("place", PLACES)
def test_exact_parts_are_the_layouts(experiment: Callable[..., Experiment], place: str, trained: str) -> None:
    asked = experiment(model=BROAD, optimizer=ADAMW, batch_size=8, **PLACES[place], **TRAINED[trained])
    parts = parts_of(asked, untraced)
    layout = build_blueprint(asked).layout
    exact = {name: part.bytes for name, part in parts.items() if part.tag == "exact"}
    assert exact == {
        NAMES[part]: sum(placed.device_bytes for placed in arrays.values()) for part, arrays in layout.arrays.items()
    }
    assert parts["gradients"].bytes == exact["trainable weights"]
    assert {part.tag for part in parts.values()} == {"exact", "estimated"}
    assert all(part.bytes > 0 and part.memory == "device" for part in parts.values())


def test_what_is_offloaded_counts_in_the_hosts_memory(experiment: Callable[..., Experiment]) -> None:
    asked = experiment(model=BROAD, optimizer=ADAMW, memory=Memory(offload=("optimizer", "reference")))
    here, away = (parts_of(one, untraced) for one in (evolve(asked, {"memory.offload": ()}), asked))
    hosts = {name for name, part in away.items() if part.memory == "host"}
    assert hosts == {"optimizer", "reference copy"}
    assert {name: part.bytes for name, part in away.items()} == {name: part.bytes for name, part in here.items()}


@pytest.mark.extended
def test_a_copy_of_the_layers_in_the_order_that_gathers_them(experiment: Callable[..., Experiment]) -> None:
    lora = experiment(model=BROAD, batch_size=8, adapter=Adapter.LoRA(rank=4), mesh=Mesh(fsdp=2))
    again = parts_of(lora, untraced)["frozen weights, transposed"]
    frozen = build_blueprint(lora).layout.arrays["frozen"]
    assert again.bytes == sum(p.device_bytes for p in frozen.values() if p.path.startswith("layers."))
    for other in (Mesh(), Mesh(data=2), Mesh(tensor=2)):  # nothing is gathered
        assert "frozen weights, transposed" not in parts_of(attrs.evolve(lora, mesh=other), untraced)
    assert "frozen weights, transposed" not in parts_of(attrs.evolve(lora, memory=Memory(offload=("frozen",))))


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("remat", ["none", "full"])
def test_activations_grow_with_rows_by_a_line(experiment: Callable[..., Experiment], remat: Any) -> None:
    asked = experiment(model=BROAD, batch_size=64, memory=Memory(remat=remat))
    blueprint = build_blueprint(asked)
    actual = [activations(blueprint, rows, remat) for rows in (1, 2, 3, 12)]
    for kind in ("trunk", "period"):
        one, two, three, twelve = (getattr(kept, kind) for kept in actual)
        assert 0 < one < two
        # The search extends the line through one and two rows; whole tokens of the head make steps of a row's share.
        assert three == pytest.approx(one + 2 * (two - one), rel=0.01)
        assert twelve == pytest.approx(one + 11 * (two - one), rel=0.01)


@pytest.mark.extended
def test_activations_shrink_where_the_work_is_shared(experiment: Callable[..., Experiment]) -> None:
    base = experiment(model=BROAD, batch_size=8)

    def kept(**changes: Any) -> int:
        asked = attrs.evolve(base, **changes)
        blueprint = build_blueprint(asked)
        return activations(blueprint, rows_of(blueprint), blueprint.remat).trunk

    whole = kept()
    assert kept(memory=Memory(remat="full")) < whole / 3
    assert kept(mesh=Mesh(context=2)) == whole // 2
    assert kept(mesh=Mesh(fsdp=2)) == pytest.approx(whole / 2, rel=0.01)
    assert kept(mesh=Mesh(data=2, fsdp=2)) == pytest.approx(whole / 4, rel=0.01)
    assert kept(microbatch_size=2) == pytest.approx(whole / 4, rel=0.01)
    # Heads and the MLP's columns are shared, what stands between layers is not.
    assert whole / 2 < kept(mesh=Mesh(tensor=2)) < 0.75 * whole
    assert whole / 4 < kept(mesh=Mesh(tensor=4)) < kept(mesh=Mesh(tensor=2))


def test_a_share_is_cut_by_the_rules_of_activations(experiment: Callable[..., Experiment]) -> None:
    def share(**mesh: Any) -> Any:
        return share_of(build_blueprint(experiment(model=BROAD, batch_size=8, mesh=Mesh(**mesh))))

    assert share().config == build_blueprint(experiment(model=BROAD)).config
    four = share(tensor=4).config
    assert (four.num_heads, four.num_kv_heads, four.mlp.dim, four.vocab_size) == (1, 1, 64, 80)
    # Equal shares are traced once, however many meshes have them.
    assert share(tensor=2) == share(tensor=2, fsdp=2) == share(tensor=2, data=4) == share(tensor=2, context=2)
    ours = share(fsdp=2, rules=(("activation_mlp", "fsdp"),)).config
    assert (ours.num_heads, ours.mlp.dim) == (4, 128)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("trained", "remat"),
    [
        pytest.param("everything", "none", marks=pytest.mark.slow),
        pytest.param("everything", "full", marks=pytest.mark.slow),
        ("adapters", "none"),
    ],
)
def test_it_is_close_to_what_xla_takes_on_a_cpu(
    experiment: Callable[..., Experiment], trained: str, remat: Any
) -> None:
    """To 30 %: XLA fuses less for a CPU than for the GPUs that the reckoning is fitted to."""
    asked = experiment(model=BROAD, batch_size=16, memory=Memory(remat=remat), optimizer=ADAMW, **TRAINED[trained])
    report = compile(asked).lower().compile().memory_analysis()
    assert report is not None
    parts = parts_of(asked)
    placed = sum(part.bytes for part in parts.values() if part.tag == "exact")
    moment = sum(part.bytes for part in parts.values()) - placed
    batch = 16 * 4 * (16 + 2 * 16 + 3 + 1)
    assert report.argument_size_in_bytes == pytest.approx(placed + batch, abs=64)  # the step's number and a key
    assert moment == pytest.approx(report.temp_size_in_bytes, rel=0.3)


def gemma(trained: str, **fields: Any) -> Experiment:
    return Experiment(
        name="memory",
        model=Model.Gemma3("270m"),
        objective=Objective.DPO(),
        data=Data.Preferences("none.jsonl", max_prompt_length=128, max_completion_length=64),
        optimizer=ADAMW,
        steps=2,
        **{"batch_size": 16, **TRAINED[trained], **fields},
    )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(fsdp=8)], ids=["one", "eight"])
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("trained", ["everything", "adapters"])
def test_it_is_close_to_what_xla_takes_on_a_gpu(trained: str, remat: Any, mesh: Mesh, tmp_path: Path) -> None:
    """To a tenth, as the larger jobs of `benchmarks/plan_memory.py`, or a quarter of a GiB, where that is more."""
    try:
        find_compiler("gpu")
    except RunError as error:
        pytest.skip(str(error))
    asked = gemma(trained, mesh=mesh, memory=Memory(remat=remat))
    report = compiled_report(asked, "h200", mesh.device_count, home=tmp_path)
    planned = sum(part.bytes for part in memory(build_blueprint(asked, "gpu")))
    assert planned == pytest.approx(report["memory"]["allocated"], rel=0.1, abs=2**28)
