"""A run over time: start or resume, train, evaluate, save, stop; what it writes is in `store`, what it shows in `display`."""

from __future__ import annotations

import hashlib
import math
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp

from nnxdsl.data.dataset import Dataset, load
from nnxdsl.data.order import Batches
from nnxdsl.data.tokenizer import TokenizerBase, open_tokenizer
from nnxdsl.program.compiler import Program, State
from nnxdsl.program.compiler import compile as compile_experiment
from nnxdsl.program.step import Leaves
from nnxdsl.run import origin, process
from nnxdsl.run.checkpoint import Checkpoints
from nnxdsl.run.display import Display
from nnxdsl.run.evaluation import Evaluator, Sample
from nnxdsl.run.lock import RunLock
from nnxdsl.run.stop import StopRequest
from nnxdsl.run.store import RunDirectory, checked_path
from nnxdsl.spec.errors import PlanError, Problem, RunError
from nnxdsl.spec.experiment import Experiment
from nnxdsl.spec.identity import canonical
from nnxdsl.spec.objective import SFT
from nnxdsl.spec.source import to_python
from nnxdsl.spec.tree import to_dict
from nnxdsl.spec.weights import From

SHOWN = ("rewards/accuracies", "rewards/margins", "mean_token_accuracy")
"""Metrics beside the loss that the progress bar has room for."""


@attrs.frozen
class Outcome:
    """How a run ended.

    Attributes:
        directory: Its files.
        state: "finished", or "stopped" with everything saved.
        step: Optimizer steps done.
        signal: The signal that stopped it, or None.
        evaluations: Held-out metrics by step.
        samples: Answers after the last step.
    """

    directory: Path
    state: str
    step: int
    signal: int | None
    evaluations: dict[int, dict[str, float]]
    samples: list[Sample]


def run(experiment: Experiment, home: Path, display: Display, *, restart: bool = False) -> Outcome:
    """Run an experiment to its end, going on where its directory stands.

    Args:
        experiment: What to run; the earlier experiment of `Weights.From` is run first if it has not finished.
        home: Directory of all runs.
        display: What people see.
        restart: Move what the directory holds to `<home>/.trash` and begin at step 0.

    Raises:
        SpecError, PlanError, DataError, WeightsError: before anything was written.
        RunError: the directory is in use, holds another experiment or cannot be resumed; or training met a NaN.
    """
    weights = experiment.model.weights
    if isinstance(weights, From) and not is_finished(weights.experiment, home):
        display.say(f"{experiment.id} starts from {weights.experiment.id}, which is run first")
        outcome = run(weights.experiment, home, display)
        if outcome.state != "finished":
            return outcome
    elif isinstance(weights, From):
        display.say(f"{experiment.id} starts from {weights.experiment.id}, which has been run")
    directory = checked_path(home / experiment.id)
    if restart and directory.exists():
        with RunLock(directory):
            trash = home / ".trash" / f"{directory.name}-{time.time_ns()}"
            trash.parent.mkdir(exist_ok=True)
            shutil.move(directory, trash)
            display.say(f"moved what {directory} held to {trash}")
    if is_finished(experiment, home):
        display.say(f"{directory} has finished already; its results stand there (--restart begins again)")
        return _earlier_outcome(RunDirectory(directory))
    parts = _prepare(experiment, home, display)
    opened = RunDirectory.create(
        directory,
        identity=canonical(experiment),
        experiment_json=to_dict(experiment),
        experiment_py=to_python(experiment),
    )
    with RunLock(directory) as lock, StopRequest() as stop:
        if lock.recovered is not None:
            opened.append_event({"event": "stale lock recovered", "of": lock.recovered.process.pid})
        return _Attempt(experiment, opened, display, stop, parts, home).run()


def is_finished(experiment: Experiment, home: Path) -> bool:
    """Whether an experiment's run has come to its end and its last checkpoint is there."""
    path = home / experiment.id
    if not (path / "run.json").exists():
        return False
    directory = RunDirectory(path)
    return directory.status().get("state") == "finished"


@attrs.frozen
class _Parts:
    """Everything that can be refused before a run directory is touched."""

    program: Program
    tokenizer: TokenizerBase
    dataset: Dataset
    evaluator: Evaluator | None
    source: origin.Source


def _prepare(experiment: Experiment, home: Path, display: Display) -> _Parts:
    display.stage("reading data")
    program = compile_experiment(experiment)
    owner = origin.tokenizer_owner(experiment)
    tokenizer = open_tokenizer(owner.model.tokenizer, origin.tokenizer_directory(owner, home))
    vocabulary = program.blueprint.config.vocab_size
    if tokenizer.vocab_size > vocabulary:
        message = f"has {tokenizer.vocab_size} ids, but the model's vocabulary has {vocabulary}"
        raise PlanError([Problem("model.tokenizer", message)], f"Experiment '{experiment.name}'")
    limit = program.blueprint.config.max_length
    loss_on = experiment.objective.loss_on if isinstance(experiment.objective, SFT) else "assistant"
    dataset = load(experiment.data, tokenizer, max_position=limit, loss_on=loss_on)
    for line in dataset.report.lines():
        display.say(line)
    evaluator = None
    if experiment.evaluation is not None:
        asked = experiment.evaluation.data
        held_out = None if asked is None else load(asked, tokenizer, max_position=limit, loss_on=loss_on)
        evaluator = Evaluator(program, experiment.evaluation, held_out, tokenizer, dataset.is_chat)
    source = origin.open_source(program.blueprint, home)
    return _Parts(program, tokenizer, dataset, evaluator, source)


@attrs.define
class _Attempt:
    """One start of a run, from its first or its last saved step to its end or the next stop."""

    experiment: Experiment
    directory: RunDirectory
    display: Display
    stop: StopRequest
    parts: _Parts
    home: Path
    number: int = 0
    tokens: int = 0
    last_read: float = 0.0
    samples: list[Sample] = attrs.field(factory=list)

    def run(self) -> Outcome:
        experiment, directory = self.experiment, self.directory
        directory.clear_requests()
        directory.take_over(state="starting", total=experiment.steps, step=0, stage="placing weights")
        devices = [f"{d.platform}:{d.device_kind}" for d in self.parts.program.mesh.devices.flat]
        record = {**process.environment(sys.argv, Path.cwd()), "experiment": to_dict(experiment), "devices": devices}
        self.number = directory.append_attempt(record)
        directory.write_status(attempt=self.number)
        try:
            with Checkpoints(directory.checkpoints, keep=experiment.checkpoint.keep) as checkpoints:
                return self._train(checkpoints)
        except BaseException as error:
            what = str(error) or type(error).__name__
            directory.append_event({"event": "failed", "error": f"{type(error).__name__}: {what}"})
            directory.write_status(state="failed", error=f"{type(error).__name__}: {what}", exit_code=1, eta_seconds=None)
            raise
        finally:
            directory.close()

    def _train(self, checkpoints: Checkpoints) -> Outcome:
        experiment, program, directory = self.experiment, self.parts.program, self.directory
        self.display.stage("placing weights")
        state = program.init(self.parts.source)
        identity = self._identity(state)
        state, start = self._resume(checkpoints, state, identity)
        directory.truncate_metrics(start - 1)
        directory.write_layout([attrs.asdict(p, filter=_plain) | {"spec": list(p.resolved.spec)} for p in program.layout])
        batches = self._batches()
        total, every = experiment.steps, experiment.checkpoint.every_steps
        directory.write_status(state="compiling", step=start, stage="compiling the first step")
        self.display.stage("training", total)
        pending: _Pending | None = None
        for step in range(start, total + 1):
            if step != start and (step == total or step % every == 0):
                pending = self._record(pending)
                self._save(checkpoints, step, state, identity)
            if self._is_due(step):
                pending = self._record(pending)
                self._evaluate(step, state)
            if step == total:
                break
            if self.stop.signal is not None or directory.stop_requested():
                return self._stop(checkpoints, step, state, identity, pending)
            began = time.perf_counter()
            state, metrics = program.step(state, batches.at(step))
            pending = self._record(pending, following=_Pending(step, metrics, began))
            checkpoints.poll()
        checkpoints.wait()
        directory.append_event({"event": "finished", "step": total})
        directory.write_status(state="finished", step=total, exit_code=0, eta_seconds=0.0, stage=None, checkpoint=total)
        return self._outcome("finished", total)

    def _resume(self, checkpoints: Checkpoints, state: State, identity: Mapping[str, Any]) -> tuple[State, int]:
        good = checkpoints.latest_good()
        for damage in good.damaged:
            self._tell(f"{damage}; going back to step {good.step}")
        if good.step is None:
            return state, 0
        meta = checkpoints.meta(good.step)
        self._batches().check(meta["batches"])
        changed = [
            f"{words}: the checkpoint has {meta['identity'].get(name)}, this run {identity[name]}"
            for name, words in _IDENTITY.items()
            if meta["identity"].get(name) != identity[name]
        ]
        if changed:
            raise RunError(f"{self.directory.path}: cannot go on from step {good.step}: {'; '.join(changed)}")
        self.tokens = meta["tokens"]
        groups = checkpoints.restore(good.step, self.parts.program.targets())
        self._tell(f"resuming {self.directory.path} at step {good.step}")
        return self.parts.program.restored(state, good.step, groups), good.step

    def _identity(self, state: State) -> dict[str, Any]:
        """What must be the same after a resume beside the data: frozen weights and reference, dtype, tokenizer."""
        return {
            "frozen": digest({**state.frozen, **{f"reference.{path}": leaf for path, leaf in state.reference.items()}}),
            "compute": self.parts.program.blueprint.compute.name,
            "tokenizer": self.parts.tokenizer.fingerprint,
        }

    def _batches(self) -> Batches:
        experiment = self.experiment
        return Batches(
            self.parts.dataset, batch_size=experiment.batch_size, seed=experiment.seed, order=experiment.data.order
        )

    def _is_due(self, step: int) -> bool:
        evaluation = self.experiment.evaluation
        return evaluation is not None and (step % evaluation.every_steps == 0 or step == self.experiment.steps)

    def _evaluate(self, step: int, state: State) -> None:
        assert self.parts.evaluator is not None
        self.directory.write_status(stage="evaluating", step=step)
        metrics = self.parts.evaluator.metrics(state)
        self.samples = self.parts.evaluator.samples(state)
        if metrics:
            self.directory.append_evaluation({"step": step, "attempt": self.number, **metrics})
            shown = [f"{name} {metrics[f'eval/{name}']:.4g}" for name in ("loss", *SHOWN) if f"eval/{name}" in metrics]
            self.display.say(f"step {step}, held out: {', '.join(shown)}")
        for sample in self.samples:
            self.directory.append_sample({"step": step, "attempt": self.number, **sample._asdict()})

    def _save(self, checkpoints: Checkpoints, step: int, state: State, identity: Mapping[str, Any]) -> None:
        self.directory.sync()
        meta = {"batches": self._batches().state(step), "identity": dict(identity), "tokens": self.tokens}
        checkpoints.save(step, self.parts.program.saved(state), meta)

    def _record(self, pending: _Pending | None, following: _Pending | None = None) -> _Pending | None:
        """Write the metrics of the step before, which have arrived while the next one is computed."""
        if pending is None:
            return following
        values = {name: value.item() for name, value in jax.device_get(pending.metrics).items()}
        now = time.perf_counter()
        seconds, self.last_read = now - max(pending.began, self.last_read), now
        self.tokens += values["num_tokens"]
        rates = {"tokens/s": values["num_tokens"] / seconds, "rows/s": self.experiment.batch_size / seconds}
        row = {"step": pending.step, "attempt": self.number, **values, "num_tokens": self.tokens, **rates}
        self.directory.append_metrics(row)
        if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            self._refuse_nan(pending.step, values)
        total = self.experiment.steps
        shown = {"loss": values["loss"], **{name: values[name] for name in SHOWN if name in values}}
        self.display.step(pending.step + 1, total, shown, rates)
        eta = (total - pending.step - 1) * seconds
        self.directory.beat(state="running", step=pending.step + 1, stage="training", eta_seconds=round(eta, 1))
        return following

    def _refuse_nan(self, step: int, values: Mapping[str, float]) -> None:
        dataset = self.parts.dataset
        rows = ", ".join(dataset.row_ids[index] for index in self._batches().indices(step)[:8])
        steps = Checkpoints.open(self.directory.checkpoints).steps()
        last = f"the last checkpoint is step {steps[-1]}" if steps else "there is no checkpoint yet"
        raise RunError(
            f"step {step}: loss is {values['loss']}, grad_norm {values['grad_norm']}; its rows begin with {rows}; "
            f"{last}; lower the learning rate, or look at those rows"
        )

    def _stop(
        self, checkpoints: Checkpoints, step: int, state: State, identity: Mapping[str, Any], pending: _Pending | None
    ) -> Outcome:
        self._record(pending)
        self.directory.write_status(state="stopping", step=step, stage="saving")
        if step > 0:
            self._save(checkpoints, step, state, identity)
            checkpoints.wait()
        code = 0 if self.stop.signal is None else 128 + self.stop.signal
        self._tell(f"stopped at step {step}, everything saved; run it again to go on")
        self.directory.write_status(state="stopped", step=step, exit_code=code, stage=None, eta_seconds=None)
        return self._outcome("stopped", step)

    def _tell(self, text: str) -> None:
        self.directory.append_event({"event": text})
        self.display.say(text)

    def _outcome(self, state: str, step: int) -> Outcome:
        return Outcome(self.directory.path, state, step, self.stop.signal, _by_step(self.directory), self.samples)


@attrs.frozen
class _Pending:
    """A step whose metrics are still on the device."""

    step: int
    metrics: Mapping[str, jax.Array]
    began: float


_IDENTITY = {
    "frozen": "the frozen weights or the reference have changed (digest)",
    "compute": "the dtype that is computed in has changed (set precision.compute)",
    "tokenizer": "the tokenizer has changed (fingerprint)",
}


def digest(leaves: Leaves) -> str:
    """A digest of arrays that does not depend on where they lie: exact sums of their bits, weighted by position."""
    hashed = hashlib.sha256()
    sums = jax.device_get({path: _bit_sum(leaf) for path, leaf in leaves.items()})
    for path in sorted(sums):
        hashed.update(f"{path} {leaves[path].dtype} {leaves[path].shape} {int(sums[path])}\n".encode())
    return hashed.hexdigest()


@jax.jit
def _bit_sum(leaf: jax.Array) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = jax.lax.bitcast_convert_type(leaf, {2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize])
    # An odd weight for each place, so that swapped values show; by axis, so that nothing is gathered from other devices.
    places = [jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * jnp.uint32(p) for axis, p in zip(range(leaf.ndim), _PRIMES, strict=False)]
    weight = 2 * sum(places, jnp.zeros(leaf.shape, jnp.uint32)) + 1
    return jnp.sum(leaf.astype(jnp.uint32) * weight, dtype=jnp.uint32)


_PRIMES = (2654435761, 2246822519, 3266489917, 668265263, 374761393)


def _plain(attribute: Any, _value: object) -> bool:
    return attribute.name not in ("resolved",)


def _by_step(directory: RunDirectory) -> dict[int, dict[str, float]]:
    return {row["step"]: {k: v for k, v in row.items() if k.startswith("eval/")} for row in directory.evaluations()}


def _earlier_outcome(directory: RunDirectory) -> Outcome:
    step = directory.status().get("step") or 0
    samples = [Sample(row["prompt"], row["policy"], row["reference"]) for row in directory.samples() if row["step"] == step]
    return Outcome(directory.path, "finished", step, None, _by_step(directory), samples)
