"""A run of an experiment in three phases: preparation, precomputation of what training reads, training."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax

from nnxdsl import tracking
from nnxdsl.config.core.codegen import to_python
from nnxdsl.config.core.run_id import canonical
from nnxdsl.config.core.serialization import to_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.data.sampler import BatchSampler
from nnxdsl.errors import NnxdslError, PlanError, RunError
from nnxdsl.runs.follower import Follower
from nnxdsl.runs.lock import RunLock
from nnxdsl.runs.run_dir import RunDirectory, checked_path
from nnxdsl.runtime import distributed
from nnxdsl.runtime.compile_progress import compile_progress
from nnxdsl.runtime.signals import StopRequest
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.attempt import Attempt
from nnxdsl.trainer.finished import earlier_experiments, is_finished, require_same_data, unfinished_reason
from nnxdsl.trainer.hooks.base import Hook
from nnxdsl.trainer.hooks.checkpointing import Checkpointing
from nnxdsl.trainer.hooks.evaluation import PeriodicEvaluation
from nnxdsl.trainer.hooks.metrics import MetricsWriter
from nnxdsl.trainer.hooks.non_finite import NonFiniteSteps
from nnxdsl.trainer.hooks.progress import Progress
from nnxdsl.trainer.hooks.reference_check import ReferenceCheck
from nnxdsl.trainer.hooks.rollouts import RolloutWriter
from nnxdsl.trainer.hooks.run_log import RunLog
from nnxdsl.trainer.hooks.stopping import StopOnRequest
from nnxdsl.trainer.hooks.tracking import Track
from nnxdsl.trainer.prepare import Prepared, prepare
from nnxdsl.trainer.resume import Start, evaluations_by_step, resume_or_init, samples_by_step
from nnxdsl.trainer.rollouts import Rollouts
from nnxdsl.trainer.throughput import Speed
from nnxdsl.trainer.trainer import Outcome, Trainer, TrainingError
from nnxdsl.weights import sources

STOPPING = "stopping after this step, with everything saved; a second signal exits at once (the last checkpoint stays)"


def run(
    experiment: Experiment, home: Path, display: Display, *, restart: bool = False, hooks: Sequence[Hook] = ()
) -> Outcome:
    """Runs an experiment to its end, or resumes it.

    Args:
        experiment: What to run; the earlier experiment of `Weights.From` is run first if it has not finished.
        home: Directory of all runs.
        display: What people see.
        restart: Move what the directory holds to `<home>/.trash` and begin at step 0.
        hooks: Called after the hooks of the run itself.

    Raises:
        SpecError, PlanError, DataError, WeightsError, RunError: refused; the directory of runs is as it was before.
        TrainingError: training failed; the last checkpoint is whole.
    """
    path = checked_path(home / experiment.id)
    with contextlib.ExitStack() as stack:
        lock, inconsistency = None, None
        if restart:
            _require_run_directory(path)
        elif found := RunDirectory.find(path, identity=canonical(experiment)):
            if (inconsistency := unfinished_reason(found)) is None:
                require_same_data(experiment, home)
                display.say(f"{path}: already finished (use --restart to start again)")
                return _earlier_outcome(found)
            lock = stack.enter_context(_locked(path))  # refused now rather than after the data are read
        distributed.on_process_0(lambda: _require_trackers(experiment))
        sources.download(experiment, display)
        prepared = prepare(experiment, home, display)  # before the earlier run, which may take hours
        if (stopped := _run_earlier(experiment, home, display)) is not None:
            return stopped
        with display.phase("opening weights"):
            prepared.source = sources.open_source(prepared.program.blueprint, home)
        is_new = restart or not path.exists()
        directory = _open_directory(experiment, path, display, restart=restart)
        if lock is None:
            lock = stack.enter_context(_locked(path))
        _record_recovery(directory, lock, inconsistency, display)
        stop = stack.enter_context(StopRequest(lambda: display.say(STOPPING)))
        stack.enter_context(compile_progress(display))
        try:
            with Attempt(directory, display, stop, prepared.program.blueprint.total_steps) as attempt:
                with attempt.before_training():
                    start = resume_or_init(prepared, attempt)
                with attempt.training():
                    return _train(prepared, attempt, start, hooks)
        except TrainingError:
            raise
        except NnxdslError:
            if is_new and distributed.is_first():  # refused before it began: nothing to keep
                shutil.rmtree(path, ignore_errors=True)
            raise


def _train(prepared: Prepared, attempt: Attempt, start: Start, hooks: Sequence[Hook]) -> Outcome:
    """The third phase: the training loop with the hooks of a run, and then those of the caller."""
    program, evaluator, sampler = prepared.program, prepared.evaluator, prepared.sampler
    experiment = program.experiment
    speed, stopping, track = Speed.of(program), StopOnRequest(attempt), Track(attempt, experiment.tracking)
    metrics = MetricsWriter(attempt, speed, start.tokens)
    checkpointing = Checkpointing(attempt, experiment.checkpoint, start.provenance.digests, metrics)
    if evaluator is not None:
        checkpointing.is_evaluated = partial(evaluator.is_due, total=program.blueprint.total_steps)
    is_cached = experiment.reference_mode == "cached"
    datasets = {"data": prepared.dataset, "held-out data": None if evaluator is None else evaluator.dataset}
    own: Sequence[Hook | None] = [
        RunLog(attempt, stopping, start.damage, datasets),
        track,
        metrics,
        RolloutWriter(attempt, sampler, experiment.rollouts) if isinstance(sampler, Rollouts) else None,
        NonFiniteSteps(attempt, experiment.guard, checkpointing),
        ReferenceCheck(attempt, sampler) if is_cached and isinstance(sampler, BatchSampler) else None,
        checkpointing,  # a step is saved before it is evaluated, and evaluated before the run stops there
        None if evaluator is None else PeriodicEvaluation(attempt, evaluator),
        stopping,
        Progress(attempt, speed),
    ]
    trainer = Trainer(program, prepared.batches(), [*(hook for hook in own if hook is not None), *hooks])
    with track:
        trainer.train(start.state, start.step)
    return Outcome(
        directory=attempt.directory.path,
        state="stopped" if trainer.is_stopping else "finished",
        step=trainer.step,
        signal=attempt.stop_request.signal,
        evaluations=evaluations_by_step(attempt.directory, attempt.reporter.info),
        samples=samples_by_step(attempt.directory, attempt.reporter.info),
    )


def _require_trackers(experiment: Experiment) -> None:
    """Refuses trackers that cannot be imported, or whose package is not installed, in process 0."""
    specs = experiment.tracking
    if problems := list(tracking.problems(specs)) or list(tracking.import_problems(specs)):
        raise PlanError(problems, f"Experiment '{experiment.name}'")


def _run_earlier(experiment: Experiment, home: Path, display: Display) -> Outcome | None:
    """Runs what `Weights.From` names; returns how the first that did not finish ended."""
    for earlier in earlier_experiments(experiment):
        if is_finished(earlier, home):
            require_same_data(earlier, home)
            display.say(f"{experiment.id} starts from {earlier.id}, which has been run")
            continue
        display.say(f"{experiment.id} starts from {earlier.id}, which is run first")
        outcome = run(earlier, home, display)
        if outcome.state != "finished":
            return outcome
    return None


def _open_directory(experiment: Experiment, path: Path, display: Display, *, restart: bool) -> RunDirectory:
    """The run's directory, created by the first process where there is none, and read by the others."""

    def create() -> RunDirectory:
        if restart:
            _move_away(path, display)
        return RunDirectory.create(
            path,
            identity=canonical(experiment),
            experiment_json=to_dict(experiment),
            experiment_py=to_python(experiment),
        )

    directory = distributed.on_process_0(create)
    return directory if distributed.is_first() else Follower(path, jax.process_index())


def _locked(path: Path) -> contextlib.AbstractContextManager[object]:
    """The run's lock, which the first process holds for all."""
    lock = distributed.on_process_0(lambda: RunLock(path))
    return lock if distributed.is_first() else contextlib.nullcontext(path)


def _record_recovery(directory: RunDirectory, lock: object, inconsistency: str | None, display: Display) -> None:
    """Records what a crash left: a status that is wrong, the lock of a process that is gone."""
    if inconsistency:
        directory.append_event({"event": inconsistency})
        display.say(f"warning: {directory.path}: {inconsistency}; resuming from there")
    if isinstance(lock, RunLock) and lock.recovered is not None:
        directory.append_event({"event": "stale lock recovered", "of": lock.recovered.process.pid})


def _require_run_directory(path: Path) -> None:
    """Refuses to move away a directory that is no run directory."""
    is_run = any((path / name).exists() for name in ("run.json", "experiment.json"))
    if path.exists() and not is_run:
        raise RunError(f"{path} is no run directory, so --restart leaves it alone; give another --home")


def _move_away(path: Path, display: Display) -> None:
    if not path.exists():
        return
    trash = path.parent / ".trash" / f"{path.name}-{time.time_ns()}"
    with RunLock(path):
        trash.parent.mkdir(exist_ok=True)
        shutil.move(path, trash)
    display.say(f"moved what {path} held to {trash}")


def _earlier_outcome(directory: RunDirectory) -> Outcome:
    step = directory.status().get("step") or 0
    evaluations, samples = evaluations_by_step(directory), samples_by_step(directory)
    return Outcome(directory.path, "finished", step, None, evaluations, samples)
