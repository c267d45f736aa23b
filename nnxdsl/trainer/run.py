"""Runs an experiment in three phases: preparation; resume, with precomputation; training."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from nnxdsl import tracking
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.weights import dependencies_of
from nnxdsl.data.sampler import BatchSampler
from nnxdsl.errors import PlanError
from nnxdsl.rollouts.recording import Recording
from nnxdsl.rollouts.rollouts import Rollouts
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runtime import distributed
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.attempt import Attempt
from nnxdsl.trainer.finished import is_finished, require_same_data
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
from nnxdsl.trainer.session import Session
from nnxdsl.trainer.throughput import Speed
from nnxdsl.trainer.trainer import Outcome, Trainer
from nnxdsl.weights import sources


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
    with Session(experiment, home, display, restart=restart) as session:
        if session.finished is not None:
            require_same_data(experiment, home)
            display.say(f"{session.path}: already finished (use --restart to start again)")
            return _outcome_of(session.finished)
        prepared = _prepare(experiment, home, display)
        if isinstance(prepared, Outcome):
            return prepared
        with session.attempt(prepared.program.blueprint.total_steps) as attempt:
            if isinstance(prepared.sampler, Rollouts) and prepared.sampler.objective.is_recorded:
                place = attempt.directory.path
                prepared.sampler.recording = Recording(place / "sampled", place / "checkpoints")
            with attempt.before_training():
                start = resume_or_init(prepared, attempt)
            with attempt.training():
                return _train(prepared, attempt, start, hooks)


def _prepare(experiment: Experiment, home: Path, display: Display) -> Prepared | Outcome:
    """The first phase: everything that can be refused, then the earlier runs; the outcome of one that was stopped."""
    distributed.on_process_0(lambda: _require_trackers(experiment))
    sources.download(experiment, display)
    prepared = prepare(experiment, home, display)  # before the earlier runs, which may take hours
    if (stopped := _run_dependencies(experiment, home, display)) is not None:
        return stopped
    with display.phase("opening weights"):
        prepared.source = sources.open_source(prepared.program.blueprint, home)
        if isinstance(prepared.sampler, Rollouts):
            prepared.sampler.rewards.open()
    return prepared


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
    run_hooks: Sequence[Hook | None] = [
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
    trainer = Trainer(program, prepared.batches(), [*(hook for hook in run_hooks if hook is not None), *hooks])
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


def _run_dependencies(experiment: Experiment, home: Path, display: Display) -> Outcome | None:
    """Runs what `Weights.From` names; returns how the first that did not finish ended."""
    for earlier in dependencies_of(experiment):
        if is_finished(earlier, home):
            require_same_data(earlier, home)
            display.say(f"{experiment.id} starts from {earlier.id}, which has been run")
            continue
        display.say(f"{experiment.id} starts from {earlier.id}, which is run first")
        outcome = run(earlier, home, display)
        if outcome.state != "finished":
            return outcome
    return None


def _outcome_of(directory: RunDirectory) -> Outcome:
    step = directory.status().get("step") or 0
    evaluations, samples = evaluations_by_step(directory), samples_by_step(directory)
    return Outcome(directory.path, "finished", step, None, evaluations, samples)
