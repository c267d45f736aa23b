"""A search's trials as tasks for the driver, by Optuna's ask-and-tell interface.

Trials are in Optuna's journal in the search's directory, so that a search that was killed resumes with them; the next
trial depends on them and the seed alone.
"""

# pyright: reportMissingImports=false
# (its library is an extra)

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from nnxdsl.config.core.codegen import render
from nnxdsl.config.core.serialization import evolve
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.search import Axis, Float, Halving, Int, Log, Median, Pruner, Search
from nnxdsl.errors import RunError, SpecError
from nnxdsl.launch.driver import Task, TaskResult
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runs.run_list import last_metrics
from nnxdsl.sweep.results import evaluation_values
from nnxdsl.terminal.display import Display

try:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import TrialState
except ImportError as error:
    raise RunError(f"a search needs optuna: pip install 'nnxdsl[search]' ({error})") from error

JOURNAL = "journal.log"


@attrs.define
class _Trial:
    trial: Any  # optuna.Trial
    reported: set[int]
    seen_bytes: int = -1


class Trials:
    """The trials of a search: first those that were running when it was interrupted, then new ones."""

    def __init__(self, path: Path, home: Path, search: Search, display: Display) -> None:
        """Opens the journal; samples nothing yet.

        Args:
            path: Directory of the search.
            home: Directory of the runs.
            search: The search.
            display: The display.

        Raises:
            RunError: the journal cannot be read.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.total = search.trials
        self._home, self._search, self._display = home, search, display
        self._study = _study(path, search)
        self._space = {path: _distribution(axis) for path, axis in search.space.items()}
        frozen = self._study.get_trials(deepcopy=False)
        self._left = [trial for trial in frozen if trial.state == TrialState.RUNNING]
        self._active: dict[int, _Trial] = {}
        self._done = sum(trial.state.is_finished() for trial in frozen)

    def next(self) -> Task | None:
        """The next trial: an interrupted one, else a new one; None after the last."""
        while self._left:
            frozen = self._left.pop(0)
            trial = optuna.Trial(self._study, frozen._trial_id)
            if task := self._task(trial, frozen.params, set(frozen.intermediate_values)):
                return task
        while (count := len(self._study.get_trials(deepcopy=False))) < self._search.trials:
            self._study.sampler = _sampler(self._search, count)
            trial = self._study.ask(self._space)
            if task := self._task(trial, trial.params, set()):
                return task
        return None

    def should_stop(self, task: Task) -> bool:
        """Whether the pruner stops a run, by its evaluation metrics."""
        trial = self._active.get(-1 if task.index is None else task.index)
        if self._search.pruner is None or trial is None:
            return False
        file = self._home / task.run / "metrics.jsonl"
        with contextlib.suppress(OSError):
            size = file.stat().st_size
            if size != trial.seen_bytes:
                trial.seen_bytes = size
                return self._report(trial, task) and trial.trial.should_prune()
        return False

    def on_end(self, task: Task, result: TaskResult) -> None:
        """Reports the result of a trial to Optuna; one that a person stopped is run again the next time."""
        trial = self._active.get(-1 if task.index is None else task.index)
        if result.state == "stopped" or trial is None:
            return
        run = self._home / task.run
        self._report(trial, task)
        value = last_metrics(run).get(self._search.metric)
        if result.state == "pruned":
            self._study.tell(trial.trial, state=TrialState.PRUNED)
        elif result.state == "finished" and value is not None and math.isfinite(value):
            self._study.tell(trial.trial, value)
        else:
            why = result.error or f"{self._search.metric} is {value}"
            trial.trial.set_user_attr("error", why)
            self._study.tell(trial.trial, state=TrialState.FAIL)
        self._done += 1
        self._display.step(self._done, self.total, {}, {})

    def _task(self, trial: Any, params: Mapping[str, Any], reported: set[int]) -> Task | None:
        try:
            experiment = evolve(self._search.base, _changes(self._search, params))
        except SpecError as error:
            trial.set_user_attr("error", str(error))
            self._study.tell(trial.number, state=TrialState.FAIL)
            self._display.say(f"trial {trial.number} has an invalid config: {'; '.join(map(str, error.problems))}")
            self._done += 1
            return None
        self._active[trial.number] = _Trial(trial, reported)
        if trial.user_attrs.get("run") != experiment.id:
            trial.set_user_attr("run", experiment.id)
        return Task(experiment, trial.number)

    def _report(self, trial: _Trial, task: Task) -> bool:
        """Reports new evaluation metrics to Optuna, without those of the last step; returns whether there were any."""
        is_new, run = False, self._home / task.run
        last = task.experiment.steps or RunDirectory(run).status().get("total") or 0
        for step, value in evaluation_values(run, self._search.metric):
            if step not in trial.reported and step < last and math.isfinite(value):
                trial.trial.report(value, step)
                trial.reported.add(step)
                is_new = True
        return is_new


def valid_trials(path: Path, search: Search) -> list[tuple[int, Experiment, Mapping[str, object]]]:
    """All trials so far with a valid config: their numbers, experiments and changes."""
    trials: list[tuple[int, Experiment, Mapping[str, object]]] = []
    if (path / JOURNAL).exists():
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        for trial in _study(path, search).get_trials(deepcopy=False):
            changes = _changes(search, trial.params)
            with contextlib.suppress(SpecError):
                trials.append((trial.number, evolve(search.base, changes), changes))
    return trials


def _study(path: Path, search: Search) -> Any:
    try:
        return optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(path / JOURNAL))),
            study_name=path.name,
            direction=search.direction,
            pruner=_pruner(search.pruner),
            load_if_exists=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"{path / JOURNAL}: cannot be read: {error}") from error


def _sampler(search: Search, count: int) -> Any:
    """A sampler for one trial, seeded by the search and the trial's number: a resumed search samples the same."""
    seed = (search.seed * 1_000_003 + count) % 2**32
    if search.sampler == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constant_liar counts running trials as bad ones; Optuna calls it experimental
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)


def _pruner(pruner: Pruner | None) -> Any:
    if isinstance(pruner, Median):
        return optuna.pruners.MedianPruner(pruner.startup_trials, pruner.warmup_steps)
    if isinstance(pruner, Halving):
        return optuna.pruners.SuccessiveHalvingPruner(pruner.first_step, pruner.factor)
    return optuna.pruners.NopPruner()


def _distribution(axis: Axis) -> Any:
    if isinstance(axis, Float | Log):
        return optuna.distributions.FloatDistribution(axis.low, axis.high, log=isinstance(axis, Log))
    if isinstance(axis, Int):
        return optuna.distributions.IntDistribution(axis.low, axis.high, step=axis.step)
    assert isinstance(axis, tuple)
    return optuna.distributions.CategoricalDistribution([render(value) for value in axis])


def _changes(search: Search, params: Mapping[str, Any]) -> dict[str, object]:
    """The changed fields of a trial; values of choices are parsed from their Python source."""
    changes: dict[str, object] = {}
    for path, axis in search.space.items():
        if path in params:
            by_source = {render(value): value for value in axis} if isinstance(axis, tuple) else {}
            changes[path] = by_source.get(params[path], params[path])
    return changes
