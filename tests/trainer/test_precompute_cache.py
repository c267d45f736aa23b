"""The precompute cache, of reference log-probs and of teacher top-k: computed once, reused by key, completed later."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import jax
import numpy as np
import pytest

from nnxdsl import Adapter, Data, Evaluation, Experiment, Model, Objective, Optimizer, Schedule, compile
from nnxdsl.config.batching import Packed, Padded
from nnxdsl.config.core.serialization import evolve
from nnxdsl.config.recording.checkpointing import Checkpoint
from nnxdsl.data.collate import make_collator
from nnxdsl.data.loaders.build import load
from nnxdsl.data.sampler import BatchSampler
from nnxdsl.data.tokenizers.base import BytesTokenizer
from nnxdsl.errors import RunError
from nnxdsl.program import precomputed
from nnxdsl.program.batches import kind_of
from nnxdsl.program.compile import Program
from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.terminal.display import Display
from nnxdsl.trainer import precompute_cache
from nnxdsl.trainer.hooks.base import Hook
from nnxdsl.trainer.precompute import training_rows
from nnxdsl.trainer.precompute_cache import PrecomputeCache, PrecomputeSpec
from nnxdsl.trainer.precompute_specs import REFERENCE, TEACHER, reference_logps, teacher_top_k
from nnxdsl.trainer.run import run
from nnxdsl.trainer.trainer import Trainer

ROWS = 10
ADAMW = Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-3))


class AskedError(Exception):
    """The model was asked."""


def asked_again(*_: Any) -> Any:
    raise AskedError


def compared(place: Path) -> Experiment:
    """Pairs that are compared with a reference."""
    return Experiment(
        name="asks",
        model=Model.Gemma3("tiny"),
        adapter=Adapter.LoRA(rank=2),
        objective=Objective.DPO(beta=0.1),
        data=Data.Preferences(str(place / "pairs.jsonl"), max_prompt_length=16, max_completion_length=16),
        optimizer=ADAMW,
        steps=2,
        batch_size=4,
    )


def taught(place: Path) -> Experiment:
    """Sequences that are learned from a teacher."""
    return Experiment(
        name="taught",
        model=Model.Gemma2("tiny"),
        objective=Objective.Distill(teacher=Model.Gemma3("tiny"), top_k=3, loss_on="completion"),
        data=Data.Conversations(str(place / "texts.jsonl"), max_length=48),
        optimizer=ADAMW,
        steps=2,
        batch_size=4,
    )


def dataset_of(experiment: Experiment) -> Any:
    return load(experiment.data, BytesTokenizer(), loss_on="completion")


@attrs.frozen
class Kind:
    """What is cached.

    Attributes:
        experiment: From the directory of the data.
        directory: Of the cache.
        model: What is asked, from the program: a state or weights.
        spec: From a program, what is asked, its digest and the rows.
        file_bytes: Of a file with at most the rows of one batch, several files for all rows.
        same: Changes of the experiment with which the same is asked.
        others: Changes with which something else is.
    """

    experiment: Callable[[Path], Experiment]
    directory: str
    model: Callable[[Program], Any]
    spec: Callable[[Program, Any, str, Any], PrecomputeSpec]
    file_bytes: int
    same: Mapping[str, Any]
    others: tuple[Mapping[str, Any], ...]


KINDS = {
    "reference": Kind(
        compared,
        REFERENCE,
        Program.init,
        lambda program, state, digest, rows: reference_logps(program, digest, rows, state),
        file_bytes=32,
        same={"objective.beta": 0.5, "steps": 9, "microbatch_size": 2, "adapter.rank": 4},
        others=({"data.max_completion_length": 4}, {"precision.compute": "bfloat16"}),
    ),
    "teacher": Kind(
        taught,
        TEACHER,
        precomputed.load_teacher,
        lambda program, weights, digest, rows: teacher_top_k(program, weights, digest, rows),
        file_bytes=800,
        same={"steps": 9, "optimizer.b2": 0.95, "objective.hard_weight": 0.5, "batch_size": 2},
        others=({"objective.temperature": 2.0}, {"objective.top_k": 2}, {"data.max_length": 20}),
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("rows")
    pairs = [{"prompt": f"Say {n}: ", "chosen": "good" * (1 + n % 2), "rejected": "bad"} for n in range(ROWS)]
    texts = [{"prompt": f"Say {n}: ", "completion": "good" * (1 + n % 3)} for n in range(ROWS)]
    for name, rows in (("pairs", pairs), ("texts", texts)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


@pytest.fixture(scope="module", params=["reference", pytest.param("teacher", marks=pytest.mark.extended)])
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def program(kind: Kind, place: Path) -> Program:
    return compile(kind.experiment(place))


@pytest.fixture(scope="module")
def model(kind: Kind, program: Program) -> Any:
    return kind.model(program)


Ask = Callable[..., Any]


@pytest.fixture
def ask(kind: Kind, program: Program, model: Any, tmp_path: Path) -> Ask:
    """Gives the entries of each row, a tuple of arrays; what is not known is NaN. None where it was cut short."""

    def asked(
        rows: Any = range(ROWS),
        until: int = 1000,
        changes: Mapping[str, Any] | None = None,
        digest: str = "of the model",
        compute: Callable[..., Any] | None = None,
    ) -> list[tuple[np.ndarray, ...]] | None:
        left = iter(range(until))
        mine = compile(evolve(program.experiment, changes)) if changes else program
        dataset = dataset_of(mine.experiment)
        spec = kind.spec(mine, model, digest, dataset)
        if compute is not None:
            spec = attrs.evolve(spec, compute=lambda batch, usual=spec.compute: compute(usual, batch))
        cache = PrecomputeCache(tmp_path, Display(quiet=True), lambda: next(left, None) is None)
        arrays = cache.load_or_compute(spec, dataset, np.asarray(rows))
        if arrays is None:
            return None
        indices = [spec.entry_indices(np.array([row])) for row in range(ROWS)]
        return [tuple(array[ours] for array in arrays.values()) for ours in indices]

    return asked


def files(home: Path, directory: str) -> list[Path]:
    return sorted((home / directory).glob("*/*.npz"))


def are_known(rows: list[tuple[np.ndarray, ...]]) -> list[bool]:
    return [bool(np.isfinite(row[-1]).all()) for row in rows]


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["reference"], indirect=True)
def test_a_reference_is_the_first_policy(ask: Ask, program: Program, model: Any) -> None:
    logps, dataset = np.concatenate([row[0] for row in ask()]), dataset_of(program.experiment)
    scored: Any = program.score(model, dataset.batch(range(4, 8), 4)).loss_inputs
    np.testing.assert_array_equal(logps[4:8, 0], scored.chosen_logps)  # to the bit
    np.testing.assert_array_equal(logps[4:8, 1], scored.rejected_logps)
    carried = dataset.with_reference_logps(logps).batch([9, 4], 3)
    np.testing.assert_array_equal(carried.reference_chosen, logps[[9, 4, 9], 0])
    np.testing.assert_array_equal(carried.reference_rejected, logps[[9, 4, 9], 1])


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["teacher"], indirect=True)
def test_batches_carry_what_the_teacher_says(ask: Ask, program: Program, model: Any) -> None:
    ids, logp = (np.concatenate(arrays) for arrays in zip(*ask(), strict=True))
    dataset = dataset_of(program.experiment).with_teacher_top_k(ids, logp)
    batch = dataset.batch([4, 9, 4], 4)
    said, mask = precomputed.teacher_top_k(program, model, batch), batch.loss_mask[:, 1:]
    actual = kind_of(batch).teacher_top_k(batch)
    assert actual is not None
    for ours, theirs in zip(actual, said, strict=True):
        np.testing.assert_array_equal(ours[mask], np.asarray(theirs)[mask])  # to the bit
        assert not np.any(ours[~mask])
    np.testing.assert_allclose(np.exp(actual.logp).sum(-1)[mask], 1.0, rtol=1e-6)
    # Packed rows carry the same, target by target.
    rows = np.array([1, 4, 7, 9])
    packed: Any = make_collator(Packed(), dataset, 4, 1, lambda: [rows]).batch(rows)
    padded = dataset.batch(rows, 4)
    here, other = packed.loss_mask, padded.loss_mask
    pairs = sorted(zip(packed.target[here].tolist(), packed.teacher_top_logps[here].tolist(), strict=True))
    assert pairs == sorted(zip(padded.tokens[other].tolist(), padded.teacher_top_logps[other].tolist(), strict=True))


@pytest.mark.extended
def test_it_is_asked_once_for_all_that_ask_the_same(kind: Kind, ask: Ask, tmp_path: Path) -> None:
    values = ask()
    np.testing.assert_equal(ask(changes=kind.same, compute=asked_again), values)
    assert len(files(tmp_path, kind.directory)) == 1


@pytest.mark.extended
def test_other_weights_settings_and_rows_are_other_questions(kind: Kind, ask: Ask) -> None:
    ask()
    for changes in kind.others:
        with pytest.raises(AskedError):
            ask(changes=changes, compute=asked_again)
    with pytest.raises(AskedError):
        ask(digest="of another", compute=asked_again)


@pytest.mark.extended
def test_only_what_is_missing_is_asked(ask: Ask) -> None:
    some = ask([1, 2, 3])
    assert are_known(some) == [False, True, True, True] + [False] * 6
    np.testing.assert_equal(ask([2, 3], compute=asked_again), some)
    everything = ask()
    assert all(are_known(everything))
    np.testing.assert_equal(everything[1:4], some[1:4])


@pytest.mark.extended
def test_cut_short_it_keeps_what_it_knows(kind: Kind, ask: Ask, tmp_path: Path) -> None:
    assert ask(until=1) is None
    (file,) = files(tmp_path, kind.directory)
    with np.load(file) as held:
        assert held["is_computed"].tolist() == [True] * 4 + [False] * 6
    assert are_known(ask([0, 1, 2, 3], compute=asked_again)) == [True] * 4 + [False] * 6
    assert all(are_known(ask()))


@pytest.mark.parametrize("damage", [lambda data: data[:100], lambda data: b"", lambda data: data[:-60] + b"x" * 60])
def test_a_damaged_file_is_asked_again_and_no_other(
    kind: Kind, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setattr(precompute_cache, "FILE_BYTES", kind.file_bytes)
    values, batches = ask(), []

    def counted(usual: Callable[[Any], Any], batch: Any) -> Any:
        batches.append(batch)
        return usual(batch)

    assert len(files(tmp_path, kind.directory)) > 2
    file = files(tmp_path, kind.directory)[1]
    file.write_bytes(damage(file.read_bytes()))
    np.testing.assert_equal(ask(compute=counted), values)
    assert len(batches) == 1


def test_rows_are_those_that_the_steps_learn_from(place: Path) -> None:
    experiment = compared(place)
    batches = BatchSampler(dataset_of(experiment), batch_size=4, seed=0, order=experiment.data.order)
    assert training_rows(batches, 2).tolist() == sorted({*batches.indices(0).tolist(), *batches.indices(1).tolist()})
    assert training_rows(batches, 3).tolist() == list(range(ROWS))


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
def test_a_run_learns_and_goes_on_bit_equal(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = taught(place)
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
    assert len(files(home, TEACHER)) == 1  # held-out rows are those of the data

    # Stopped within, and run again to its end, it knows what the teacher said at first and asks nothing.
    other.mkdir()
    (home / TEACHER).rename(other / TEACHER)
    monkeypatch.setattr(precomputed, "teacher_top_k", asked_again)
    stopped = run(asked, other, quiet, hooks=[StopAt(17, other / asked.id)])
    assert (stopped.state, stopped.step) == ("stopped", 18)
    assert run(asked, other, quiet).evaluations[30] == done.evaluations[30]
    one, two = state_of(home / asked.id), state_of(other / asked.id)
    assert one.keys() == two.keys()
    for name, array in one.items():
        assert array.tobytes() == two[name].tobytes(), name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_packed_rows_are_taught_the_same(place: Path, tmp_path: Path) -> None:
    losses = []
    for name, batching in (("padded", Padded()), ("packed", Packed())):
        done = run(attrs.evolve(taught(place), batching=batching), tmp_path / name, Display(quiet=True))
        rows = [json.loads(line) for line in (done.directory / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows])
    assert losses[1] == pytest.approx(losses[0], rel=2e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_going_on_with_another_teacher_is_refused(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = attrs.evolve(taught(place), checkpoint=Checkpoint(every_steps=1))
    quiet = Display(quiet=True)
    run(asked, tmp_path, quiet)
    status = tmp_path / asked.id / "status.json"  # as if it had not come to its end
    status.write_text(json.dumps({**json.loads(status.read_text()), "state": "stopped"}))
    rendered = precomputed.load_teacher
    monkeypatch.setattr(precomputed, "load_teacher", lambda *fields: {k: v + 1 for k, v in rendered(*fields).items()})
    with pytest.raises(RunError, match=r"the teacher has changed \(digest of what objective\.teacher\.weights gives\)"):
        run(asked, tmp_path, quiet)
