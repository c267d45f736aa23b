"""The plan as plain values: facts, sums, verdicts, policies, and every array as the layout has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import pytest
from small_lab.model import Small

from nnxdsl import Adapter, Experiment, Memory, Mesh, Model, Optimizer, Quantization, Schedule
from nnxdsl.config.data import FileData
from nnxdsl.planning.plan import describe, plan
from nnxdsl.planning.step_time import cost
from nnxdsl.program.auto_remat import REMAT_POLICIES
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.sharding import hardware

H200 = hardware.device("h200")
MODEL = Small(embed_dim=32, mlp_dim=64, heads=4, vocab_size=96)


@pytest.fixture
def asked(experiment: Callable[..., Experiment]) -> Callable[..., Experiment]:
    def make(**fields: Any) -> Experiment:
        adamw = Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-3))
        return experiment(**{"model": MODEL, "optimizer": adamw, "batch_size": 8, **fields})

    return make


@pytest.mark.extended
def test_it_is_plain_json(asked: Callable[..., Experiment]) -> None:
    for fields in ({}, {"mesh": Mesh(fsdp=2, tensor=2, rules=(("mlp", None),))}, {"memory": Memory(remat="full")}):
        for device in (None, H200, hardware.device("cpu")):
            actual = plan(asked(**fields), device=device)
            assert json.loads(json.dumps(actual)) == actual


@pytest.mark.extended
def test_sums_are_of_their_parts(asked: Callable[..., Experiment]) -> None:
    actual = plan(asked(memory=Memory(offload=("optimizer",)), mesh=Mesh(fsdp=2)))
    sizes = {
        where: [part["bytes"] for part in actual["memory"] if part["memory"] == where] for where in ("device", "host")
    }
    assert actual["bytes_per_device"] == sum(sizes["device"])
    assert actual["host_bytes_per_device"] == sum(sizes["host"]) > 0
    exact = sum(part["bytes"] for part in actual["memory"] if part["tag"] == "exact")
    assert exact == sum(array["device_bytes"] for array in actual["arrays"])
    assert actual["devices"] == 2
    assert actual["activations"][actual["remat"]] == next(
        part["bytes"] for part in actual["memory"] if part["name"] == "activations"
    )
    other = plan(asked(memory=Memory(offload=("optimizer",), remat="full"), mesh=Mesh(fsdp=2)))
    assert other["activations"] == actual["activations"]
    assert other["remat"] == "full"


@pytest.mark.extended
def test_verdicts_go_by_what_is_usable(asked: Callable[..., Experiment]) -> None:
    experiment = asked(memory=Memory(remat="none", reference="online"))
    needed = plan(experiment, "gpu")["bytes_per_device"]
    fits = attrs.evolve(H200, memory=2**33, usable=needed)
    actual = plan(experiment, "gpu", fits)
    assert actual["verdict"]["fits"] is True
    assert actual["verdict"]["share"] == 1
    assert actual["device"] == {
        "name": "h200",
        "description": "NVIDIA H200",
        "memory": 2**33,
        "usable": needed,
    }
    short = plan(experiment, "gpu", attrs.evolve(fits, usable=needed - 1))
    assert short["verdict"]["fits"] is False
    verdicts = {
        share: plan(experiment, "gpu", attrs.evolve(fits, usable=int(needed * share)))["verdict"]["share"]
        for share in (0.5, 2.0)
    }
    assert verdicts == {share: pytest.approx(1 / share, rel=1e-4) for share in verdicts}


@pytest.mark.slow
def test_rematerialisation_goes_by_what_is_usable(asked: Callable[..., Experiment]) -> None:
    experiment = asked(model=Small(layers=6, pattern=2), batch_size=16)
    by_policy = {
        remat: plan(asked(model=Small(layers=6, pattern=2), batch_size=16, memory=Memory(remat=remat)), "gpu")
        for remat in ("none", "products", "attention", "inputs", "full")
    }
    kept = [actual["activations"][remat] for remat, actual in by_policy.items()]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 5
    for remat, actual in by_policy.items():
        just = plan(experiment, "gpu", attrs.evolve(H200, usable=actual["bytes_per_device"]))
        assert just["verdict"]["fits"] is True
        assert just["activations"][just["remat"]] >= actual["activations"][remat]
    roomy = plan(experiment, "gpu", H200)
    assert (roomy["remat"], roomy["remat_why"]) == ("none", "fits")
    tight = plan(experiment, "gpu", attrs.evolve(H200, usable=by_policy["products"]["bytes_per_device"]))
    assert (tight["remat"], tight["remat_why"]) == ("products", "first that fits")
    hopeless = plan(experiment, "gpu", attrs.evolve(H200, usable=1))
    least = min(by_policy, key=lambda remat: by_policy[remat]["bytes_per_device"])
    assert (hopeless["remat"], hopeless["verdict"]["fits"]) == (least, False)
    assert plan(experiment, "cpu")["remat"] == "none"


@pytest.mark.extended
def test_where_nothing_fits_the_policy_with_the_least_memory_is_taken(asked: Callable[..., Experiment]) -> None:
    """Gemma's "full" computes a period, six layers, again at once: more than it saves of short inputs."""
    gemma = {"model": Model.Gemma3("tiny"), "batch_size": 1}
    needed = {
        remat: plan(asked(**gemma, memory=Memory(remat=remat)), "gpu")["bytes_per_device"] for remat in REMAT_POLICIES
    }
    least = min(needed.values())
    assert needed["inputs"] == least < needed["full"]
    actual = plan(asked(**gemma), "gpu", attrs.evolve(H200, usable=least - 1))
    assert (actual["remat"], actual["remat_why"]) == ("inputs", "none fits; this takes the least memory")
    assert actual["bytes_per_device"] == least
    unasked = plan(asked(**gemma, memory=Memory(remat="full")), "gpu", attrs.evolve(H200, usable=least))
    assert "with memory.remat=inputs microbatch_size=1 it would take" in unasked["verdict"]["message"]


def test_no_verdict_where_nothing_is_known(asked: Callable[..., Experiment]) -> None:
    assert plan(asked())["verdict"] is plan(asked())["device"] is plan(asked())["step_seconds"] is None
    cpu = plan(asked(), device=hardware.device("cpu"))
    assert (cpu["verdict"], cpu["step_seconds"]) == (None, None)
    assert cpu["device"]["memory"] is None


@pytest.mark.extended
def test_seconds_are_those_of_the_search(asked: Callable[..., Experiment]) -> None:
    experiment = asked(mesh=Mesh(fsdp=2))
    expected = attrs.asdict(cost(build_blueprint(experiment, "gpu"), H200))
    assert plan(experiment, "gpu", H200)["step_seconds"] == expected


@pytest.mark.default_variants(1)
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "online: a frozen copy of the initial weights, run on every batch"),
        (
            {"memory": Memory(reference="cached")},
            "cached: precomputed from the initial policy before step 0; "
            "no reference weights in a step, no per-step cost",
        ),
        (
            {"adapter": Adapter.LoRA(rank=2)},
            "online: the frozen base with the adapter off (no copy), run on every batch",
        ),
        (
            {"adapter": Adapter.LoRA(rank=2), "quantization": Quantization.NF4(block_size=16)},
            "online: the frozen base in NF4 with the adapter off (no copy), run on every batch",
        ),
    ],
)
def test_the_reference_in_words(asked: Callable[..., Experiment], fields: dict[str, Any], text: str) -> None:
    assert plan(asked(**fields))["reference"] == text


@pytest.mark.extended
def test_the_layout_within_is_the_layout(asked: Callable[..., Experiment]) -> None:
    experiment = asked(mesh=Mesh(data=2, fsdp=2, tensor=2, slices=2), adapter=Adapter.LoRA(rank=2))
    actual, layout = plan(experiment), build_blueprint(experiment).layout
    assert {name: actual[name] for name in describe(layout)} == json.loads(json.dumps(describe(layout)))
    assert actual["across"] == experiment.mesh.across
    assert [tuple(rule) for rule in actual["rules"]] == [
        (logical, list(target) if isinstance(target, tuple) else target) for logical, target in layout.rules
    ]
    for array, placed in zip(actual["arrays"], layout, strict=True):
        assert (array["path"], array["part"]) == (placed.path, placed.part)
        assert array["bytes"] == placed.bytes
        assert array["device_bytes"] == placed.device_bytes
        assert array["replicas"] * placed.bytes == layout.mesh.device_count * placed.device_bytes
        for one in array["why"]:
            assert one["rule"] is None or actual["rules"][one["rule"]] == [one["logical"], one["axes"]]


@attrs.frozen(kw_only=True)
class Streamed(FileData):
    """Data of a third party, of whose lengths nothing is known."""

    batch_kind: ClassVar[str] = "pairs"


def test_data_of_unknown_lengths(asked: Callable[..., Experiment]) -> None:
    actual = plan(asked(data=Streamed(path="none")), "gpu", H200)
    assert (actual["tokens_at_most"], actual["activations"], actual["step_seconds"]) == (0, {}, None)
    assert [part["name"] for part in actual["memory"]] == [
        "trainable weights", "reference copy", "optimizer", "gradients",
    ]  # fmt: skip
