"""A run from its experiment: what can be refused first, the earlier run it starts from, then one attempt."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

import jax

from nnxdsl.config.core.codegen import to_python
from nnxdsl.config.core.run_id import canonical
from nnxdsl.config.core.serialization import to_dict
from nnxdsl.config.data import Data
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.weights import From, parts
from nnxdsl.data.dataset import Dataset
from nnxdsl.data.loaders.build import load
from nnxdsl.data.loaders.files import file_digest
from nnxdsl.data.pairs import Pairs
from nnxdsl.data.prompts import Prompts
from nnxdsl.data.sequences import Sequences
from nnxdsl.data.tokenizers.base import TokenizerBase, open_tokenizer
from nnxdsl.errors import NnxdslError, PlanError, Problem, RunError
from nnxdsl.planning.plan import warnings
from nnxdsl.program.compile import compile as compile_experiment
from nnxdsl.program.fits import require_fit
from nnxdsl.program.teacher import teacher_of
from nnxdsl.runs.checkpointer import Checkpoints
from nnxdsl.runs.follower import Follower
from nnxdsl.runs.lock import RunLock
from nnxdsl.runs.run_dir import RunDirectory, checked_path
from nnxdsl.runtime import distributed
from nnxdsl.runtime.signals import StopRequest
from nnxdsl.sharding.mesh import own_device, usable_memory
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.evaluation import Evaluator, Sample
from nnxdsl.trainer.resume import by_step
from nnxdsl.trainer.rollouts import Rollouts
from nnxdsl.trainer.trainer import Outcome, Prepared, Trainer, TrainingError
from nnxdsl.weights import sources

STOPPING = "stopping after this step, with everything saved; a second signal leaves at once, with what was saved last"


def run(experiment: Experiment, home: Path, display: Display, *, restart: bool = False) -> Outcome:
    """Run an experiment to its end, going on where its directory stands.

    Args:
        experiment: What to run; the earlier experiment of `Weights.From` is run first if it has not finished.
        home: Directory of all runs.
        display: What people see.
        restart: Move what the directory holds to `<home>/.trash` and begin at step 0.

    Raises:
        SpecError, PlanError, DataError, WeightsError, RunError: refused; the directory of runs is as it was before.
        TrainingError: it could not go on, and what was saved last is whole.
    """
    directory = checked_path(home / experiment.id)
    with contextlib.ExitStack() as held:
        lock, doubt = None, None
        if restart:
            _require_ours(directory)
        elif found := RunDirectory.find(directory, identity=canonical(experiment)):
            if (doubt := _doubt(found)) is None:
                _require_same_data(experiment, home)
                display.say(f"{directory} has finished already; its results stand there (--restart begins again)")
                return _earlier_outcome(found)
            lock = held.enter_context(_locked(directory))  # refused now rather than when all is read
        parts = _prepare(experiment, home, display)  # before the earlier run, which may take hours
        stopped = _run_earlier(experiment, home, display)
        if stopped is not None:
            return stopped
        attempt = Trainer(experiment, display, parts, sources.open_source(parts.program.blueprint, home))
        is_new = restart or not directory.exists()
        opened = _opened(experiment, directory, display, restart=restart)
        if lock is None:
            lock = held.enter_context(_locked(directory))
        if doubt:
            opened.append_event({"event": doubt})
            display.say(f"warning: {directory}: {doubt}; going on from there")
        if isinstance(lock, RunLock) and lock.recovered is not None:
            opened.append_event({"event": "stale lock recovered", "of": lock.recovered.process.pid})
        stop = held.enter_context(StopRequest(lambda: display.say(STOPPING)))
        try:
            return attempt.run(opened, stop)
        except TrainingError:
            raise
        except NnxdslError:
            if is_new and distributed.is_first():  # refused before it began: nothing to keep
                shutil.rmtree(directory, ignore_errors=True)
            raise


def _opened(experiment: Experiment, directory: Path, display: Display, *, restart: bool) -> RunDirectory:
    """The run's directory, made by the first process where there is none, and read by the others."""

    def made() -> RunDirectory:
        if restart:
            _move_away(directory, display)
        return RunDirectory.create(
            directory,
            identity=canonical(experiment),
            experiment_json=to_dict(experiment),
            experiment_py=to_python(experiment),
        )

    opened = distributed.first(made)
    return opened if distributed.is_first() else Follower(directory, jax.process_index())


def _locked(directory: Path) -> contextlib.AbstractContextManager[object]:
    """The run's lock, which the first process holds for all."""
    lock = distributed.first(lambda: RunLock(directory))
    return lock if distributed.is_first() else contextlib.nullcontext(directory)  # it is held, if not here


def is_finished(experiment: Experiment, home: Path) -> bool:
    """Whether an experiment's run has come to its end.

    Raises:
        RunError: its directory holds something else.
    """
    found = RunDirectory.find(home / experiment.id, identity=canonical(experiment))
    return found is not None and _doubt(found) is None


def _require_same_data(experiment: Experiment, home: Path) -> None:
    """Refuses to reuse a finished run, or one that it started from, if a data file is another by now.

    Raises:
        RunError: names the file, and what to do.
    """
    for earlier in _earlier(experiment):
        _require_same_data(earlier, home)
    directory, data = home / experiment.id, experiment.data
    # Those whose digest is that of the file.
    ours = Data.Preferences | Data.Feedback | Data.Conversations | Data.Text | Data.Prompts
    is_ours = isinstance(data, ours)
    path = Path(data.path)
    if not is_ours or not path.is_file() or not is_finished(experiment, home):
        return
    with Checkpoints.open(directory / "checkpoints") as checkpoints:
        steps = checkpoints.steps()
        learnt = checkpoints.meta(steps[-1])["batches"]["digest"] if steps else None
    now = file_digest(data.path)
    if learnt is not None and learnt != now:
        raise RunError(
            f"{directory} has finished with another {path} (sha256 {learnt[:12]}... then, {now[:12]}... now); "
            f"put the file back, or run {experiment.name} again with --restart"
        )


def _doubt(directory: RunDirectory) -> str | None:
    """Why a run has not finished, empty where it does not say so; None where it has."""
    try:
        return directory.doubt() if directory.status().get("state") == "finished" else ""
    except RunError:  # damaged: the checkpoints say how far it came
        return ""


def _run_earlier(experiment: Experiment, home: Path, display: Display) -> Outcome | None:
    """Runs what `Weights.From` names; returns how the first that did not finish ended."""
    for earlier in _earlier(experiment):
        if is_finished(earlier, home):
            _require_same_data(earlier, home)
            display.say(f"{experiment.id} starts from {earlier.id}, which has been run")
            continue
        display.say(f"{experiment.id} starts from {earlier.id}, which is run first")
        outcome = run(earlier, home, display)
        if outcome.state != "finished":
            return outcome
    return None


def _earlier(experiment: Experiment) -> list[Experiment]:
    """The experiments that one starts from: with its weights, its adapter, its teacher and its reference."""
    teacher = getattr(getattr(experiment.objective, "teacher", None), "weights", None)
    compared = getattr(experiment.reference, "weights", None)
    starts = experiment.model.weights, getattr(experiment.adapter, "start", None), teacher, compared
    return [start.experiment for weights in starts for start in parts(weights) if isinstance(start, From)]


def _prepare(experiment: Experiment, home: Path, display: Display) -> Prepared:
    """All that can be refused before anything is written, but for the weights."""
    display.stage(f"{experiment.name}: reading data")
    program = compile_experiment(experiment)
    require_fit(program.blueprint, usable_memory(own_device(program.mesh)))
    for found in warnings(program.blueprint):
        display.say(f"warning: {found.path}: {found.message}")
    owner = sources.tokenizer_owner(experiment)
    tokenizer = open_tokenizer(owner.model.tokenizer, sources.tokenizer_directory(owner, home))
    _require_same_tokenizer(experiment, tokenizer, home)
    vocabulary, limit = program.blueprint.config.vocab_size, program.blueprint.config.max_length
    loss_on: str = getattr(experiment.objective, "loss_on", "assistant")
    dataset = load(experiment.data, tokenizer, max_position=limit, vocabulary=vocabulary, loss_on=loss_on)
    _require_carried(experiment, dataset, "data")
    for line in dataset.report.lines():
        display.say(line)
    evaluator = None
    rollouts = Rollouts.of(program, dataset, tokenizer) if isinstance(dataset, Prompts) else None
    if experiment.evaluation is not None:
        asked = experiment.evaluation.data
        held_out = (
            None
            if asked is None
            else load(asked, tokenizer, max_position=limit, vocabulary=vocabulary, loss_on=loss_on)
        )
        if held_out is not None:
            _require_carried(experiment, held_out, "evaluation.data")
            if rollouts is not None and isinstance(held_out, Prompts):
                rollouts.rewards.check(held_out.columns, held_out.row_ids)
        evaluator = Evaluator(program, experiment.evaluation, held_out, tokenizer, dataset.is_chat, rollouts)
    return Prepared(program, tokenizer, dataset, evaluator, rollouts)


def _require_same_tokenizer(experiment: Experiment, tokenizer: TokenizerBase, home: Path) -> None:
    """Refuses a teacher whose words are others: its distributions would be over something else."""
    teacher = teacher_of(experiment)
    if teacher is None:
        return
    owner = sources.tokenizer_owner(teacher)
    own = open_tokenizer(owner.model.tokenizer, sources.tokenizer_directory(owner, home))
    if own.fingerprint != tokenizer.fingerprint:
        message = "has another tokenizer than the model, so that the same id is another word to each of them"
        raise PlanError([Problem("objective.teacher", message)], f"Experiment '{experiment.name}'")


def _require_carried(experiment: Experiment, dataset: Dataset, path: str) -> None:
    """Refuses to keep what the reference, or a teacher, says of rows that cannot carry it."""
    if getattr(experiment.objective, "top_k", None) and teacher_of(experiment) and not isinstance(dataset, Sequences):
        message = f"{path} yields {type(dataset).__qualname__}, which cannot carry what a teacher says; leave it out"
        raise PlanError([Problem("objective.top_k", message)], f"Experiment '{experiment.name}'")
    if experiment.reference_mode == "cached" and not isinstance(dataset, Pairs):
        message = f"{path} yields {type(dataset).__qualname__}, which cannot carry what is kept of it; use 'online'"
        raise PlanError([Problem("memory.reference", message)], f"Experiment '{experiment.name}'")


def _require_ours(directory: Path) -> None:
    """Refuses to move away a directory that no run of ours has made."""
    is_ours = any((directory / name).exists() for name in ("run.json", "experiment.json"))
    if directory.exists() and not is_ours:
        raise RunError(f"{directory} is no run directory, so --restart leaves it alone; give another --home")


def _move_away(directory: Path, display: Display) -> None:
    if not directory.exists():
        return
    trash = directory.parent / ".trash" / f"{directory.name}-{time.time_ns()}"
    with RunLock(directory):
        trash.parent.mkdir(exist_ok=True)
        shutil.move(directory, trash)
    display.say(f"moved what {directory} held to {trash}")


def _earlier_outcome(directory: RunDirectory) -> Outcome:
    step = directory.status().get("step") or 0
    rows = [row for row in directory.samples() if row["step"] == step and {"prompt", "policy"} <= row.keys()]
    samples = [Sample(row["prompt"], row["policy"], row.get("reference")) for row in rows]
    return Outcome(directory.path, "finished", step, None, by_step(directory), samples)
