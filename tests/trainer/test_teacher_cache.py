"""The teacher cache: top-k computed once and reused by key; a run with it trains and resumes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import jax
import numpy as np
import pytest

from nnxdsl import Data, Evaluation, Experiment, Model, Objective, Optimizer, Schedule, compile
from nnxdsl.config.batching import Packed, Padded
from nnxdsl.config.core.serialization import evolve
from nnxdsl.config.recording.checkpointing import Checkpoint
from nnxdsl.data.collate import make_collator
from nnxdsl.data.loaders.build import load
from nnxdsl.data.sequences import Sequences
from nnxdsl.data.tokenizers.base import BytesTokenizer
from nnxdsl.errors import RunError
from nnxdsl.program.batches import kind_of
from nnxdsl.program.compile import Program
from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.terminal.display import Display
from nnxdsl.trainer import precompute_cache
from nnxdsl.trainer.hooks.base import Hook
from nnxdsl.trainer.precompute_cache import PrecomputeCache
from nnxdsl.trainer.precompute_specs import TEACHER, teacher_top_k
from nnxdsl.trainer.run import run
from nnxdsl.trainer.trainer import Trainer

ROWS = 10


class AskedError(Exception):
    """The teacher was asked."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("texts")
    rows = [{"prompt": f"Say {n}: ", "completion": "good" * (1 + n % 3)} for n in range(ROWS)]
    (place / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


@pytest.fixture(scope="module")
def experiment(place: Path) -> Experiment:
    return Experiment(
        name="taught",
        model=Model.Gemma2("tiny"),
        objective=Objective.Distill(teacher=Model.Gemma3("tiny"), top_k=3, loss_on="completion"),
        data=Data.Conversations(str(place / "texts.jsonl"), max_length=48),
        optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-3)),
        steps=2,
        batch_size=4,
    )


@pytest.fixture(scope="module")
def program(experiment: Experiment) -> Program:
    return compile(experiment)


@pytest.fixture(scope="module")
def teacher(program: Program) -> Any:
    return program.load_teacher()


def sequences(experiment: Experiment) -> Sequences:
    found = load(experiment.data, BytesTokenizer(), loss_on="completion")
    assert isinstance(found, Sequences)
    return found


def refuse(*_: Any) -> Any:
    raise AskedError


def silent(program: Program) -> Program:
    """A program that may not be asked."""
    return attrs.evolve(program, jitted=program._jitted._replace(teacher_top_k=refuse))


def counting(program: Program, counts: list[int]) -> Program:
    """A program that counts the batches that it is asked of."""

    def top(*given: Any) -> Any:
        counts.append(1)
        return program._jitted.teacher_top_k(*given)

    return attrs.evolve(program, jitted=program._jitted._replace(teacher_top_k=top))


Ask = Callable[..., Any]


@pytest.fixture
def ask(program: Program, teacher: Any, tmp_path: Path) -> Ask:
    def asked(rows: Any = None, until: int = 1000, **changes: Any) -> Any:
        left = iter(range(until))
        mine = changes.get("program", program)
        dataset = sequences(changes.get("of", mine.experiment))
        spec = teacher_top_k(mine, teacher, changes.get("weights", "of the teacher"), dataset)
        rows = np.arange(ROWS) if rows is None else np.asarray(rows)
        cache = PrecomputeCache(tmp_path, Display(quiet=True), lambda: next(left, None) is None)
        arrays = cache.load_or_compute(spec, dataset, rows)
        return None if arrays is None else dataset.with_teacher_top_k(arrays["ids"], arrays["logp"])

    return asked


def files(home: Path) -> list[Path]:
    return sorted((home / TEACHER).glob("*/*.npz"))


@pytest.mark.extended
def test_batches_carry_what_the_teacher_says(ask: Ask, program: Program, teacher: Any) -> None:
    dataset = ask()
    batch = dataset.batch([4, 9, 4], 4)
    said, mask = program.teacher_top_k(teacher, batch), batch.loss_mask[:, 1:]
    found = kind_of(batch).teacher_top_k(batch)
    assert found is not None
    for ours, theirs in zip(found, said, strict=True):
        np.testing.assert_array_equal(ours[mask], np.asarray(theirs)[mask])  # to the bit
        assert not np.any(ours[~mask])
    np.testing.assert_allclose(np.exp(found.logp).sum(-1)[mask], 1.0, rtol=1e-6)
    # Packed rows carry the same, target by target.
    rows = np.array([1, 4, 7, 9])
    packed: Any = make_collator(Packed(), dataset, 4, 1, lambda: [rows]).batch(rows)
    padded = dataset.batch(rows, 4)
    here, there = packed.loss_mask, padded.loss_mask
    pairs = sorted(zip(packed.target[here].tolist(), packed.teacher_top_logps[here].tolist(), strict=True))
    assert pairs == sorted(zip(padded.tokens[there].tolist(), padded.teacher_top_logps[there].tolist(), strict=True))


@pytest.mark.extended
def test_it_is_asked_once_for_all_that_ask_the_same(ask: Ask, experiment: Experiment, tmp_path: Path) -> None:
    known = ask([1, 2, 3])
    assert np.isfinite(known.batch([1, 2, 3], 3).teacher_top_logps).all()
    assert np.isnan(known.batch([4], 1).teacher_top_logps).any()  # what nobody asked for is no number
    ask([2, 3], program=silent(compile(experiment)))
    ask()
    changes = {"steps": 9, "optimizer.b2": 0.95, "objective.hard_weight": 0.5, "batch_size": 2}
    again = ask(program=silent(compile(evolve(experiment, changes))))
    batches = (dataset.batch([1, 2, 3], 3) for dataset in (again, known))
    np.testing.assert_array_equal(*(batch.teacher_top_logps for batch in batches))
    assert len(files(tmp_path)) == 1
    # Another teacher, temperature, number of words, or other ids: other questions.
    for changes in ({"objective.temperature": 2.0}, {"objective.top_k": 2}, {"data.max_length": 20}):
        with pytest.raises(AskedError):
            ask(program=silent(compile(evolve(experiment, changes))))
    with pytest.raises(AskedError):
        ask(weights="of another", program=silent(compile(experiment)))


@pytest.mark.extended
def test_what_is_cut_short_or_damaged_is_asked_again_and_no_more(
    ask: Ask, program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precompute_cache, "FILE_BYTES", 800)
    assert ask(until=1) is None
    whole = ask().batch(range(ROWS), ROWS)
    assert len(files(tmp_path)) > 2
    for damage in (lambda data: data[:100], lambda data: b"", lambda data: data[:-60] + b"x" * 60):
        path, counts = files(tmp_path)[1], []
        path.write_bytes(damage(path.read_bytes()))
        again = ask(program=counting(program, counts)).batch(range(ROWS), ROWS)
        assert len(counts) == 1
        np.testing.assert_array_equal(again.teacher_top_ids, whole.teacher_top_ids)
        np.testing.assert_array_equal(again.teacher_top_logps, whole.teacher_top_logps)


@attrs.frozen
class StopAt(Hook):
    """A hook of somebody else's: asks a run to stop at a step."""

    step: int
    path: Path

    def on_step_begin(self, trainer: Trainer) -> None:
        if trainer.step == self.step:
            RunDirectory(self.path).request_stop()


def state_of(directory: Path) -> dict[str, np.ndarray]:
    """Every array of a finished run's last checkpoint."""
    with CheckpointReader(directory / "checkpoints") as checkpoints:
        step = checkpoints.steps()[-1]
        targets = {
            group: {name: jax.ShapeDtypeStruct(info.shape, info.dtype) for name, info in infos.items()}
            for group, infos in checkpoints.contents(step).items()
        }
        restored = checkpoints.restore(step, targets)
    return {f"{step} {group}.{name}": np.asarray(x) for group, leaves in restored.items() for name, x in leaves.items()}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_learns_and_goes_on_bit_equal(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"steps": 30, "optimizer.schedule.lr": 3e-3, "objective.top_k": 16}
    asked = attrs.evolve(
        evolve(experiment, changes),
        evaluation=Evaluation(every_steps=30, data=experiment.data),
        checkpoint=Checkpoint(every_steps=10),
    )
    home, other, quiet = tmp_path / "one", tmp_path / "two", Display(quiet=True)
    done = run(asked, home, quiet)
    before, after = done.evaluations[0]["eval/distill_loss"], done.evaluations[30]["eval/distill_loss"]
    assert after < before / 4
    assert len(files(home)) == 1  # held-out rows are those of the data

    # Stopped within, and run again to its end, it knows what the teacher said at first and asks nothing.
    other.mkdir()
    (home / TEACHER).rename(other / TEACHER)
    monkeypatch.setattr(Program, "teacher_top_k", refuse)
    stopped = run(asked, other, quiet, hooks=[StopAt(17, other / asked.id)])
    assert (stopped.state, stopped.step) == ("stopped", 18)
    assert run(asked, other, quiet).evaluations[30] == done.evaluations[30]
    one, two = state_of(home / asked.id), state_of(other / asked.id)
    assert one.keys() == two.keys()
    for name, array in one.items():
        assert array.tobytes() == two[name].tobytes(), name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_packed_rows_are_taught_the_same(experiment: Experiment, tmp_path: Path) -> None:
    losses = []
    for name, batching in (("padded", Padded()), ("packed", Packed())):
        done = run(attrs.evolve(experiment, batching=batching), tmp_path / name, Display(quiet=True))
        rows = [json.loads(line) for line in (done.directory / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows])
    assert losses[1] == pytest.approx(losses[0], rel=2e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_going_on_with_another_teacher_is_refused(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = attrs.evolve(experiment, checkpoint=Checkpoint(every_steps=1))
    quiet = Display(quiet=True)
    run(asked, tmp_path, quiet)
    status = tmp_path / asked.id / "status.json"  # as if it had not come to its end
    status.write_text(json.dumps({**json.loads(status.read_text()), "state": "stopped"}))
    drawn = Program.load_teacher
    monkeypatch.setattr(Program, "load_teacher", lambda *given: {k: v + 1 for k, v in drawn(*given).items()})
    with pytest.raises(RunError, match=r"the teacher has changed \(digest of what objective\.teacher\.weights gives\)"):
        run(asked, tmp_path, quiet)
