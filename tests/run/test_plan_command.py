"""The plan's figures are those of the arrays that a program makes, and need no devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from nnxdsl import compile, evolve
from nnxdsl.cli import load
from nnxdsl.program.plan import plan


@pytest.fixture
def place(lab: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(lab.place)
    return lab.place


@pytest.mark.parametrize("file", ["sft.py", "dpo.py"])
def test_bytes_are_those_of_the_arrays(place: Path, file: str) -> None:
    experiment = evolve(load(file, Path("runs")), {"model.weights": load("sft.py", Path("runs")).model.weights})
    found = plan(experiment)
    state = compile(experiment).init()
    parts = {"frozen weights": state.frozen, "trainable weights": state.trainable, "optimizer": state.optimizer,
             "reference copy": state.reference}  # fmt: skip
    planned = {part["name"]: part["bytes"] for part in found["memory"] if part["tag"] == "exact"}
    made = {name: sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for name, tree in parts.items()}
    assert planned == {name: size for name, size in made.items() if size}
    arrays = {(array["part"], array["path"]): array for array in found["arrays"]}
    for path, leaf in state.trainable.items():
        array = arrays["trainable", path]
        assert (tuple(array["shape"]), array["dtype"], array["device_bytes"]) == (leaf.shape, leaf.dtype, leaf.nbytes)
    assert found["parameters"]["trainable"] == sum(leaf.size for leaf in state.trainable.values())
    assert found["bytes_per_device"] == sum(part["bytes"] for part in found["memory"])


def test_a_plan_needs_no_devices_and_reads_no_data(lab: Any) -> None:
    for file in lab.place.glob("*.jsonl"):
        file.unlink()
    code, out, err = lab.cli("plan", "dpo.py", "mesh.fsdp=4", "mesh.tensor=2", "batch_size=8", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["devices"] == 8
    assert (found["steps"], found["rows"], found["microbatches"]) == (40, 320, 1)
    assert found["tokens_at_most"] == 320 * (48 + 2 * 16)
    embedding = next(array for array in found["arrays"] if array["path"] == "embed.embedding")
    assert embedding["spec"] == ["tensor", "fsdp"]
    assert embedding["device_shape"] == [320 // 2, 128 // 4]
    assert embedding["device_bytes"] * 8 == 320 * 128 * 4
    assert not (lab.place / "runs").exists()


def test_what_does_not_fit_is_refused(lab: Any) -> None:
    code, out, err = lab.cli("plan", "dpo.py", "mesh.tensor=3", "adapter.targets=('mpl',)")
    assert (code, out) == (2, "")
    assert err.startswith("PlanError: ")
    assert "adapter.targets.0: 'mpl' matches no linear layer; did you mean 'mlp'?" in err


def test_the_plan_for_people(lab: Any) -> None:
    code, out, err = lab.cli("plan", "dpo.py")
    assert (code, err) == (0, "")
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[0].startswith("dpo-")
    assert "computed in  float32, on cpu" in lines
    assert "reference    the frozen base with the adapter off: no copy" in lines
    assert "memory on each device" in lines
    found = plan(load(str(lab.place / "dpo.py"), Path("runs")))
    assert f"{len(found['arrays'])} arrays" in lines
    row = next(line for line in lines if "layers.blocks.*.mlp.up.kernel " in line)
    assert [cell.strip() for cell in row.split("│")[1:7]] == [
        "frozen", "layers.blocks.*.mlp.up.kernel", "1x128x384", "float32", "-, -, -", "1x128x384",
    ]  # fmt: skip
    assert row.split("│")[7].strip() == "6"
