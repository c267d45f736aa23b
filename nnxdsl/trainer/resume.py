"""Resumes a run from its newest checkpoint, or initializes it. Refuses missing or damaged checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from nnxdsl.config.weights import Random
from nnxdsl.errors import RunError
from nnxdsl.models.params import ParamSpec
from nnxdsl.program import precomputed
from nnxdsl.program.blueprint import Blueprint
from nnxdsl.program.checkpoint_views import checkpoint_targets, with_restored
from nnxdsl.program.compile import Program, TrainState
from nnxdsl.runs.array_digest import digest
from nnxdsl.runs.checkpointer import Checkpoints
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runtime import distributed
from nnxdsl.storage.jsonl import Row
from nnxdsl.storage.records import is_number
from nnxdsl.trainer.attempt import Attempt
from nnxdsl.trainer.evaluation import Sample
from nnxdsl.trainer.precompute import precompute_reference, precompute_teacher
from nnxdsl.trainer.precompute_cache import PrecomputeCache
from nnxdsl.trainer.prepare import Prepared
from nnxdsl.trainer.provenance import Provenance, reference_of
from nnxdsl.weights.progress import reading_weights


class Start(NamedTuple):
    """Where an attempt begins.

    Attributes:
        state: After `step` steps.
        step: Steps done before.
        tokens: Tokens of these steps.
        provenance: Digests of everything that a later resume must find unchanged.
        damage: Checkpoints that were passed over, as messages.
    """

    state: TrainState
    step: int
    tokens: int
    provenance: Provenance
    damage: list[str]


def resume_or_init(prepared: Prepared, attempt: Attempt) -> Start:
    """Loads the first weights, precomputes what training reads, and restores the newest checkpoint if there is one.

    Args:
        prepared: Its datasets get the precomputed values, and its source is given up.
        attempt: The run directory.

    Raises:
        NnxdslError: The checkpoint does not fit the experiment, data or weights; the directory is as it was.
    """
    attempt.display.stage("placing weights")
    program, directory, source = prepared.program, attempt.directory, prepared.source
    attempt.checkpoints = Checkpoints(directory.checkpoints, keep=program.experiment.checkpoint.keep)
    checkpoints = attempt.checkpoints
    step, damage = _newest_step(attempt)
    saved = None if step is None else checkpoints.meta(step)
    distributed.on_process_0(lambda: require_free_space(checkpoints, program, step or 0))
    if saved is not None:
        prepared.sampler.check(saved["batches"])
    provenance = Provenance(directory.path, saved)
    provenance.record(tokenizer=prepared.tokenizer.fingerprint, compute=program.blueprint.compute.name)
    cache = PrecomputeCache(directory.path.parent, attempt.display, attempt.should_stop)
    assert source is not None
    precompute_teacher(prepared, source, provenance, cache)
    with reading_weights(attempt.display, _title(program), source, *_models(program.blueprint)) as counted:
        state = program.init(counted)
    own_weights = None
    if program.blueprint.reference.has_own_weights and program.experiment.reference_mode == "cached":
        title = "reading the reference's weights"
        with reading_weights(attempt.display, title, source, program.blueprint.base) as counted:
            own_weights = precomputed.load_reference(program, counted)
    prepared.source = source = counted = None  # its arrays are on the devices now: the copy on the host is given up
    reference = reference_of(program, state) if own_weights is None else own_weights
    teacher = program.blueprint.teacher
    with attempt.display.phase("computing the digest of the weights"):
        if teacher is not None and not teacher.is_precomputed and (saved is None or "teacher" in saved["identity"]):
            provenance.record(teacher=digest(teacher.leaves(state.frozen, state.reference)))
        provenance.record(
            frozen=digest({**state.frozen, **{f"reference.{path}": leaf for path, leaf in reference.items()}})
        )
    precompute_reference(prepared, state, own_weights, provenance, cache)
    if step is None or saved is None:
        return Start(state, 0, 0, provenance, damage)
    with attempt.display.phase(f"reading checkpoint step {step}"):
        state = with_restored(program, state, step, checkpoints.restore(step, checkpoint_targets(program)))
    return Start(state, step, saved["tokens"], provenance, damage)


def _title(program: Program) -> str:
    return "drawing initial weights" if isinstance(program.experiment.model.weights, Random) else "reading weights"


def _models(blueprint: Blueprint) -> Iterator[Mapping[str, ParamSpec]]:
    """The weights of each model that the first state holds: the policy, a reference or a teacher with its own."""
    yield blueprint.base
    if blueprint.reference.arrays and blueprint.reference.has_own_weights:
        yield blueprint.base
    if blueprint.teacher is not None and blueprint.teacher.arrays:
        yield blueprint.teacher.base


def _newest_step(attempt: Attempt) -> tuple[int | None, list[str]]:
    """As `newest_step`, in the first process; the messages stay there, where they are written."""
    damage: list[str] = []

    def find() -> int | None:
        step, messages = newest_step(attempt.directory, attempt.checkpoints)
        for message in messages:
            attempt.reporter.info(message)
        damage.extend(messages)
        return step

    return distributed.on_process_0(find), damage


def newest_step(directory: RunDirectory, checkpoints: Checkpoints) -> tuple[int | None, list[str]]:
    """The newest checkpoint whose bytes are all as they were written, and messages about newer ones.

    Args:
        directory: Its status names the step that was saved last.
        checkpoints: Of the run.

    Raises:
        RunError: All checkpoints are damaged, or one was saved and there is none.
    """
    good = checkpoints.latest_good()
    messages = [f"{damage}; going back to step {good.step}" for damage in good.damaged]
    saved = directory.status().get("checkpoint") or 0
    if good.step is None and saved:
        raise RunError(
            f"{directory.path}: step {saved} was saved, and {checkpoints.directory} has no checkpoint; "
            "restore it, or start again with --restart"
        )
    if good.step is not None and saved > max(good.step, *(damage.step for damage in good.damaged), 0):
        messages.append(f"checkpoint step {saved} is missing; going back to step {good.step}")
    return good.step, messages


def require_free_space(checkpoints: Checkpoints, program: Program, step: int) -> None:
    """Refuses a run whose next checkpoint does not fit on the disk, before it computes anything.

    Raises:
        CheckpointError: How much it takes, and how much is free.
    """
    every, total = program.experiment.checkpoint.every_steps, program.blueprint.total_steps
    if step < total:
        checkpoints.require_free_space(min((step // every + 1) * every, total), checkpoint_targets(program))


def evaluations_by_step(
    directory: RunDirectory, warn: Callable[[str], object] | None = None
) -> dict[int, dict[str, float]]:
    """Held-out metrics of all evaluations.

    Args:
        directory: Of the run.
        warn: Called with a message about lines that cannot be read, which are no failure of a trained and saved run.

    Raises:
        RunError: A line cannot be read, and `warn` is None.
    """
    rows = _readable(directory.evaluations, warn)
    return {row["step"]: {k: v for k, v in row.items() if k.startswith("eval/") and is_number(v)} for row in rows}


def samples_by_step(directory: RunDirectory, warn: Callable[[str], object] | None = None) -> dict[int, list[Sample]]:
    """Completions of the prompts of all evaluations; see `evaluations_by_step`."""
    samples: dict[int, list[Sample]] = {}
    for row in _readable(directory.samples, warn):
        if {"prompt", "policy"} <= row.keys():
            samples.setdefault(row["step"], []).append(Sample(row["prompt"], row["policy"], row.get("reference")))
    return samples


def _readable(read: Callable[[], list[Row]], warn: Callable[[str], object] | None) -> list[Row]:
    """Rows of a run; none where a line cannot be read and `warn` takes the message."""
    try:
        return read()
    except RunError as error:
        if warn is None:
            raise
        warn(f"warning: {error}")
        return []
