"""Rows 14 to 18, 23, 24: what is other than it was when a run was saved is refused by name, or makes no difference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fault_lab import Lab, Whole, digests, rows, without_times
from small_lab.model import Small

from nnxdsl import Batching, Data, Order, Tokenizer, compile, from_json
from nnxdsl.config.experiment import Experiment
from nnxdsl.data.loaders.build import load
from nnxdsl.data.sampler import BatchSampler
from nnxdsl.data.tokenizers.base import open_tokenizer
from nnxdsl.program.checkpoint_views import checkpoint_targets, with_restored
from nnxdsl.runs.checkpoint_format import CheckpointError
from nnxdsl.runs.checkpoint_reader import CheckpointReader

pytestmark = pytest.mark.faults

EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


@pytest.mark.parametrize("mesh", ["Mesh(fsdp=4)", "Mesh(data=2, fsdp=2)", "Mesh(data=2, tensor=2)"])
def test_on_another_mesh_it_begins_bit_exact_and_stays_near(killed: Lab, whole: Whole, mesh: str) -> None:
    """Row 14: what is restored is the same to the bit; what is computed from there differs by rounding."""
    child = killed.finish(f"mesh={mesh}", "checkpoint.keep=100", environment=EIGHT)
    assert f"resuming runs/{killed.run.name} at step 9\n" in child.said()
    assert len(killed.directory.attempts()[-1]["devices"]) == (8 if "8" in mesh else 4)
    with CheckpointReader(killed.checkpoints) as checkpoints:
        assert checkpoints.steps() == [6, 9, 12]
        assert digests(checkpoints, 9) == whole.arrays[9]
    actual, wanted = (
        [row for row in of if "kind" not in row] for of in (without_times(rows(killed.directory)), whole.rows)
    )
    assert actual[:9] == wanted[:9]
    for row, other in zip(actual[9:], wanted[9:], strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert row["num_tokens"] == other["num_tokens"]
    # The step that the other mesh saved comes back on one device.
    program = compile(tiny(killed))
    with CheckpointReader(killed.checkpoints) as checkpoints:
        state = with_restored(program, program.init(), 12, checkpoints.restore(12, checkpoint_targets(program)))
    assert all(np.isfinite(leaf).all() for leaf in state.trainable.values())


def test_from_another_mesh_the_same_arrays_come_back(lab: Lab, killed: Lab, whole: Whole) -> None:
    """Saved on four devices, restored on one: the arrays that the program gets are those of the files, to the bit."""
    child = lab.start("mesh=Mesh(fsdp=4)", point="save-begun@3", environment=EIGHT)
    assert child.wait() == -9, child.said()
    with CheckpointReader(lab.checkpoints) as checkpoints:
        before = digests(checkpoints, 6)
    again = lab.start("checkpoint.keep=100", point="save-begun")  # on one device, to its first save
    assert again.wait() == -9, again.said()
    assert f"resuming runs/{lab.run.name} at step 6\n" in again.said()
    with CheckpointReader(lab.checkpoints) as checkpoints:
        assert digests(checkpoints, 6) == before
    assert rows(lab.directory)[6]["loss"] == pytest.approx(whole.rows[6]["loss"], rel=1e-4)


def tiny(lab: Lab) -> Experiment:
    return from_json((lab.run / "experiment.json").read_text(), Experiment)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"embed_dim": 32}, "trainable.embed.embedding: saved as float32[512, 16], expected float32[512, 32]"),
        ({"mlp_dim": 64}, "mlp.up.kernel: saved as float32["),
        ({"layers": 2}, "saved as float32[1, "),
    ],
)
def test_another_shape_is_refused_in_few_words(killed: Lab, model: dict[str, int], message: str) -> None:
    """Row 15: an experiment of another shape has another id; whoever forces it is told which array does not fit."""
    fields = {"layers": 1, "pattern": 1, "vocab_size": 512, "tokenizer": Tokenizer.Bytes(), **model}
    program = compile(attrs.evolve(tiny(killed), model=Small(**fields)))
    with CheckpointReader(killed.checkpoints) as checkpoints, pytest.raises(CheckpointError) as raised:
        checkpoints.restore(9, checkpoint_targets(program))
    said = str(raised.value)
    assert said.startswith(f"checkpoint step 9 in {killed.checkpoints} does not fit: ")
    assert message in said
    assert said.endswith("restore it with the experiment that wrote it")
    assert len(said.splitlines()) <= 9


def test_a_run_directory_of_another_shape_is_refused(killed: Lab) -> None:
    recipe = killed.place / "tiny.py"
    run = killed.run
    recipe.write_text(recipe.read_text().replace("layers=1,", "layers=2,"))
    other = killed.start(point="run-renamed")  # to learn its id
    assert other.wait() == -9
    (new,) = (path for path in (killed.place / "runs").glob("tiny-*") if path != run)
    shutil.rmtree(new)
    run.rename(new)
    said = killed.refused()
    assert said.startswith(f"RunError: runs/{new.name} holds another experiment (tiny, made ")
    record = json.loads((new / "run.json").read_text())  # and if even its record is forged
    other = killed.start("--home", "elsewhere", point="run-renamed")
    assert other.wait() == -9
    forged = json.loads(next((killed.place / "elsewhere").glob("tiny-*/run.json")).read_text())
    (new / "run.json").write_text(json.dumps({**record, "identity": forged["identity"]}))
    said = killed.refused()
    assert said.startswith(f"CheckpointError: checkpoint step 9 in {new / 'checkpoints'} does not fit: "), said


def test_another_dtype_is_refused_and_never_cast(killed: Lab) -> None:
    """Row 15: orbax would cast without a word."""
    program = compile(tiny(killed))
    targets = {
        group: {name: jax.ShapeDtypeStruct(one.shape, jnp.bfloat16) for name, one in asked.items()}
        for group, asked in checkpoint_targets(program).items()
    }
    with CheckpointReader(killed.checkpoints) as checkpoints, pytest.raises(CheckpointError) as raised:
        checkpoints.restore(9, {"trainable": targets["trainable"]})
    assert "trainable.embed.embedding: saved as float32[512, 16], expected bfloat16[512, 16]" in str(raised.value)


def test_data_that_have_changed_are_refused_by_name(killed: Lab) -> None:
    """Row 16."""
    file = "texts.jsonl"
    before = {path: path.read_bytes() for path in killed.checkpoints.rglob("*") if path.is_file()}
    path = killed.place / file
    path.write_bytes(path.read_bytes().replace(b"row 3", b"row 4", 1))
    said = killed.refused()
    assert said.startswith(
        f"DataError: {file}: cannot resume from the checkpoint: the data file has changed (sha256): "
    )
    assert {path: path.read_bytes() for path in killed.checkpoints.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("order", [Order.Shuffled(), Order.AsInFile()])
@pytest.mark.parametrize("batching", [Batching.Padded(), Batching.Bucketed(buckets=3), Batching.Packed()])
def test_batches_are_the_same_from_every_position(lab: Lab, order: Any, batching: Any) -> None:
    """Row 17: through the JSON that a checkpoint keeps, over more than two epochs."""
    data = Data.Text(str(lab.place / "texts.jsonl"), max_length=32)
    tokenizer = open_tokenizer(Tokenizer.Bytes(), None)
    settings = {"batch_size": 4, "seed": 3, "order": order, "batching": batching}
    loaded = [load(data, tokenizer, max_position=64, vocabulary=512, loss_on="all") for _ in range(2)]
    whole, other = (BatchSampler(dataset, **settings) for dataset in loaded)
    for position in range(15):
        state = json.loads(json.dumps(whole.state(position)))
        assert other.check(state) == position
        one, two = whole.batch_at(position), other.batch_at(position)
        assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True) if a is not None)


def test_there_are_no_workers_whose_number_could_change() -> None:
    """Row 18: batches are a function of the seed and the step, made by one process; nothing of it is set anywhere."""
    names = [field.name for kind in (Experiment, *kinds(Batching), *kinds(Data)) for field in attrs.fields(kind)]
    assert len(names) > 20
    assert not [name for name in names if "worker" in name or "thread" in name or "process" in name]


def kinds(family: type) -> list[type]:
    """Members of a family."""
    return [kind for kind in vars(family).values() if isinstance(kind, type)]


@pytest.mark.parametrize("gib", ["0.0001", "1e-4"])
def test_a_program_that_does_not_fit_is_refused_before_it_is_compiled(lab: Lab, gib: str) -> None:
    """Row 23."""
    said = lab.refused(environment={"NNXDSL_DEVICE_GIB": gib})
    assert said.startswith(
        "PlanError: 1 problem in Experiment 'tiny'\n  memory: a step takes 0.0"
    )  # fmt: skip
    assert "of which 0.0001 GiB are usable:\n" in said
    for part in ("trainable weights", "optimizer", "gradients", "activations"):
        assert f"\n    {part} " in said
    assert not (lab.place / "runs").exists() or not list((lab.place / "runs").glob("tiny-*"))
    assert "compiling" not in said
    assert "expected a number of GiB above 0, got 'much'" in lab.refused(environment={"NNXDSL_DEVICE_GIB": "much"})


BAD = [b"not json\n", b'{"text": 3}\n', b'{"txt": "x"}\n', b'{"text": ""}\n', b"[1]\n", b'\xff{"text": "x"}\n']


def test_bad_rows_of_each_kind_are_named_or_counted(lab: Lab, whole: Whole) -> None:
    """Row 24."""
    path = lab.place / "texts.jsonl"
    good = path.read_bytes()
    path.write_bytes(good + b"".join(BAD))
    said = lab.refused().splitlines()
    assert said[0] == (
        "DataError: texts.jsonl: 6 of 29 rows are bad; fix them, or leave them out with "
        "bad_rows=BadRows.Skip(at_most=6)"
    )
    assert [line.split(": ")[0] for line in said[1:]] == [f"  texts.jsonl:{number}" for number in range(24, 29)] + [
        said[-1].split(": ")[0]
    ]
    assert not (lab.place / "runs").exists() or not list((lab.place / "runs").glob("tiny-*"))
    child = lab.finish("data.bad_rows=BadRows.Skip(at_most=6)")
    assert {"read        29", "trained on  23"} <= {line.strip() for line in child.said().splitlines()}
    actual, wanted = (
        [row["loss"] for row in of if "kind" not in row] for of in (rows(lab.directory), whole.rows)
    )  # fmt: skip
    assert actual == wanted
    fewer = lab.refused("data.bad_rows=BadRows.Skip(at_most=5)")
    assert fewer.startswith("DataError: texts.jsonl: more than 5 bad rows, the limit of ")


def test_hostile_files_are_refused(lab: Lab, tmp_path: Path) -> None:
    """Row 29, where a run meets them: a run that is a link out, a lock that is one, an id that leads out."""
    outside = tmp_path / "outside"
    outside.mkdir()
    lab.start(point="run-renamed").wait()
    name = lab.run.name
    shutil.rmtree(lab.run)
    (lab.place / "runs" / name).symlink_to(outside)
    assert "is a link that leads out of runs; name the run directory itself" in lab.refused()
    assert list(outside.iterdir()) == []
