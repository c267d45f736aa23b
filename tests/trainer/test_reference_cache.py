"""The reference cache: computed once, reused by key, and completed after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from nnxdsl import Adapter, Data, Experiment, Model, Objective, Optimizer, Schedule, compile
from nnxdsl.config.core.serialization import evolve
from nnxdsl.data.loaders.build import load
from nnxdsl.data.pairs import Pairs
from nnxdsl.data.sampler import BatchSampler
from nnxdsl.data.tokenizers.base import BytesTokenizer
from nnxdsl.program.compile import Program, TrainState
from nnxdsl.runs.array_digest import digest
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.precompute import training_rows
from nnxdsl.trainer.precompute_cache import PrecomputeCache
from nnxdsl.trainer.precompute_specs import REFERENCE, reference_logps

ROWS = 10


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pairs")
    rows = [{"prompt": f"Say {n}: ", "chosen": "good" * (1 + n % 2), "rejected": "bad"} for n in range(ROWS)]
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


@pytest.fixture(scope="module")
def experiment(place: Path) -> Experiment:
    return Experiment(
        name="asks",
        model=Model.Gemma3("tiny"),
        adapter=Adapter.LoRA(rank=2),
        objective=Objective.DPO(beta=0.1),
        data=Data.Preferences(str(place / "pairs.jsonl"), max_prompt_length=16, max_completion_length=16),
        optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-3)),
        steps=2,
        batch_size=4,
    )


@pytest.fixture(scope="module")
def program(experiment: Experiment) -> Program:
    return compile(experiment)


@pytest.fixture(scope="module")
def first(program: Program) -> TrainState:
    return program.init()


@pytest.fixture(scope="module")
def dataset(experiment: Experiment) -> Pairs:
    found = load(experiment.data, BytesTokenizer())
    assert isinstance(found, Pairs)
    return found


Ask = Callable[..., Any]


@pytest.fixture
def ask(program: Program, first: TrainState, dataset: Pairs, tmp_path: Path) -> Ask:
    def asked(rows: Any = None, until: int = 1000, **changes: Any) -> Any:
        left = iter(range(until))
        display = Display(quiet=True)
        pairs = changes.get("dataset", dataset)
        weights = changes.get("weights", digest(first.frozen))
        spec = reference_logps(changes.get("program", program), weights, pairs, first)
        rows = np.arange(ROWS) if rows is None else np.asarray(rows)
        cache = PrecomputeCache(tmp_path, display, lambda: next(left, None) is None)
        arrays = cache.load_or_compute(spec, pairs, rows)
        return None if arrays is None else arrays["logps"]

    return asked


def silent(program: Program) -> Program:
    """A program that may not be asked."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("the reference was asked again")

    return attrs.evolve(program, jitted=program._jitted._replace(score=refuse))


def files(home: Path) -> set[Path]:
    return set((home / REFERENCE).glob("*/*.npz"))


@pytest.mark.extended
def test_it_says_what_the_first_policy_says(ask: Ask, program: Program, first: TrainState, dataset: Pairs) -> None:
    logps = ask()
    batch = dataset.batch(range(4, 8), 4)
    scored: Any = program.score(first, batch).loss_inputs
    np.testing.assert_array_equal(logps[4:8, 0], scored.chosen_logps)  # to the bit
    np.testing.assert_array_equal(logps[4:8, 1], scored.rejected_logps)
    carried = dataset.with_reference_logps(logps).batch([9, 4], 3)
    np.testing.assert_array_equal(carried.reference_chosen, logps[[9, 4, 9], 0])
    np.testing.assert_array_equal(carried.reference_rejected, logps[[9, 4, 9], 1])


@pytest.mark.extended
def test_it_is_asked_once_whatever_the_objective_and_the_steps(
    ask: Ask, experiment: Experiment, tmp_path: Path
) -> None:
    logps = ask()
    changed = evolve(experiment, {"objective.beta": 0.5, "steps": 9, "microbatch_size": 2, "adapter.rank": 4})
    again = ask(program=silent(compile(changed)))
    np.testing.assert_array_equal(again, logps)
    assert len(files(tmp_path)) == 1


def test_only_what_is_missing_is_asked(ask: Ask, program: Program) -> None:
    some = ask([1, 2, 3])
    assert np.isnan(some).any(axis=1).tolist() == [True, False, False, False] + [True] * 6
    np.testing.assert_array_equal(ask([2, 3], program=silent(program)), some)
    everything = ask()
    assert not np.isnan(everything).any()
    np.testing.assert_array_equal(everything[1:4], some[1:4])


def test_cut_short_it_keeps_what_it_knows(ask: Ask, tmp_path: Path) -> None:
    assert ask(until=1) is None
    (file,) = files(tmp_path)
    with np.load(file) as held:
        assert (~np.isnan(held["logps"])).sum() == 2 * 4
    assert not np.isnan(ask()).any()


@pytest.mark.parametrize("damage", [lambda data: data[:100], lambda data: b"", lambda data: data[:-60] + b"x" * 60])
def test_a_damaged_file_is_asked_again(ask: Ask, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    logps = ask()
    (file,) = files(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    np.testing.assert_array_equal(ask(), logps)


@pytest.mark.extended
def test_another_base_or_other_ids_are_other_questions(ask: Ask, experiment: Experiment, tmp_path: Path) -> None:
    ask()
    ask(weights="another base")
    shorter = load(evolve(experiment, {"data.max_completion_length": 4}).data, BytesTokenizer())
    ask(dataset=shorter)
    ask(program=compile(evolve(experiment, {"precision.compute": "bfloat16"})))
    assert len(files(tmp_path)) == 4


def test_rows_are_those_that_the_steps_learn_from(experiment: Experiment, dataset: Pairs) -> None:
    batches = BatchSampler(dataset, batch_size=4, seed=0, order=experiment.data.order)
    assert training_rows(batches, 2).tolist() == sorted({*batches.indices(0).tolist(), *batches.indices(1).tolist()})
    assert training_rows(batches, 3).tolist() == list(range(ROWS))
