"""A search finds every placement that fits and no other, ranks them as it says, and its words make the placement."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from small_lab.model import Small

from nnxdsl import Adapter, Experiment, Mesh, Optimizer, Schedule, cli, evolve
from nnxdsl.cli.plan import _overrides
from nnxdsl.errors import PlanError, SpecError
from nnxdsl.planning.plan import plan
from nnxdsl.planning.search import TOLERANCE, search
from nnxdsl.planning.step_time import cost
from nnxdsl.program.auto_remat import REMAT_POLICIES
from nnxdsl.program.blueprint import build_blueprint, build_unplaced
from nnxdsl.program.memory import memory
from nnxdsl.sharding import hardware

H200 = hardware.device("h200")
MODEL = Small(layers=4, pattern=2, embed_dim=32, mlp_dim=64, heads=4, head_dim=8, vocab_size=96)
BASES: dict[str, dict[str, Any]] = {
    "everything": {},
    "adapters": {"adapter": Adapter.LoRA(rank=4)},
    "rules of its own": {"mesh": Mesh(rules=(("activation_mlp", "fsdp"),))},
    "stages": {"mesh": Mesh(stage=2)},
    "slices": {"mesh": Mesh(slices=2, data=2)},
}


@pytest.fixture
def base(experiment: Callable[..., Experiment], request: pytest.FixtureRequest) -> Experiment:
    adamw = Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-3))
    return experiment(model=MODEL, optimizer=adamw, batch_size=6, **BASES[request.param])


def with_memory(usable: int) -> hardware.Device:
    return attrs.evolve(H200, memory=usable, usable=usable)


def everything(base: Experiment, count: int) -> dict[str, int]:
    """Bytes of every placement of `count` devices that may be had at all, by what is set; tried one by one."""
    result: dict[str, int] = {}
    rendered = build_unplaced(base, "gpu")
    for data, fsdp, context, tensor in itertools.product(range(1, count + 1), repeat=4):
        if data * fsdp * context * tensor * base.mesh.stage != count:
            continue
        for rows, remat in itertools.product(range(1, base.batch_size + 1), REMAT_POLICIES):
            changes = {"mesh.data": data, "mesh.fsdp": fsdp, "mesh.context": context, "mesh.tensor": tensor}
            changes |= {"microbatch_size": None if rows == base.batch_size else rows, "memory.remat": remat}
            with contextlib.suppress(SpecError):
                placed = rendered.with_placement(evolve(base, changes))
                if placed.layout.problems() or placed.layout.batch_problems(placed.experiment.rows_at_once):
                    continue
                parts = memory(placed)
                result[str(changes)] = sum(part.bytes for part in parts if part.memory == "device")
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "base",
    ["everything", *(pytest.param(name, marks=pytest.mark.slow) for name in ("rules of its own", "stages", "slices"))],
    indirect=True,
)
def test_everything_that_fits_is_found_and_nothing_else(base: Experiment) -> None:
    other = everything(base, 4 if base.mesh.stage > 1 else 2)
    sizes = sorted(other.values())
    for usable in (sizes[0] - 1, sizes[len(sizes) // 2], sizes[-1]):
        actual, tried = search(base, with_memory(usable), 4 if base.mesh.stage > 1 else 2)
        assert tried == len(other)
        assert {str(one.changes): one.bytes for one in actual} == pytest.approx(
            {changes: size for changes, size in other.items() if size <= usable}, rel=0.005
        )


@pytest.mark.slow
@pytest.mark.parametrize("base", ["adapters"], indirect=True)
def test_the_quickest_come_first_and_of_equals_the_smallest(base: Experiment) -> None:
    actual, _ = search(base, H200, 4)
    assert len(actual) > 20
    for earlier, later in itertools.pairwise(actual):
        assert earlier.cost.step <= later.cost.step * (1 + TOLERANCE)
        if earlier.cost.step > later.cost.step:
            assert earlier.bytes <= later.bytes
    for one in (actual[0], actual[-1]):
        asked = evolve(base, one.changes)
        assert one.cost == cost(build_blueprint(asked, "gpu"), H200)


@pytest.mark.parametrize("base", ["adapters"], indirect=True)
@pytest.mark.slow
def test_its_words_make_the_placement_from_wherever_one_is(base: Experiment) -> None:
    elsewhere = evolve(base, {"mesh": Mesh(fsdp=2), "microbatch_size": 2, "memory.remat": "full"})
    for start in (base, elsewhere):
        actual, _ = search(start, H200, 2)
        for one in actual:
            overrides = _overrides(one, start).split()
            assert cli.override(start, overrides) == evolve(start, one.changes)
    best = actual[0]
    planned = plan(cli.override(elsewhere, _overrides(best, elsewhere).split()), "gpu", H200)
    assert planned["verdict"]["fits"]
    assert planned["bytes_per_device"] == pytest.approx(best.bytes, rel=0.005)
    assert planned["step_seconds"] == attrs.asdict(best.cost)


@pytest.mark.parametrize("base", ["stages"], indirect=True)
def test_what_cannot_be_searched_is_refused(base: Experiment) -> None:
    where = "1 problem in Experiment 'small'"
    for device, count, message in (
        (hardware.device("cpu"), 2, "'cpu' has no published memory and speed, so nothing can be compared"),
        (H200, 3, "mesh: 3 devices cannot be divided by expert=1 x stage=2"),
    ):
        with pytest.raises(PlanError) as caught:
            search(base, device, count)
        assert str(caught.value) == f"{where}\n  {message}"
