"""One attempt at a run: from its first or its last saved step to its end, or to the next stop or failure."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import jax
import numpy as np

from nnxdsl.config.adapter import DoRA
from nnxdsl.config.core.serialization import to_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.data.dataset import Dataset
from nnxdsl.data.pairs import Pairs
from nnxdsl.data.sampler import BatchSampler
from nnxdsl.data.sequences import Sequences
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.errors import NnxdslError, RunError
from nnxdsl.optim.step_guard import IN_A_ROW, SKIPPED, TOTAL
from nnxdsl.planning.flops import Flops, work
from nnxdsl.planning.plan import describe
from nnxdsl.program.compile import Program, TrainState
from nnxdsl.program.init import Source
from nnxdsl.program.step import Batch, Leaves
from nnxdsl.runs.array_digest import digest
from nnxdsl.runs.checkpointer import Checkpoints
from nnxdsl.runs.heartbeat import beating
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runs.status import Status
from nnxdsl.runtime import allocator, distributed
from nnxdsl.runtime.prefetch import Prefetch
from nnxdsl.runtime.signals import StopRequest
from nnxdsl.storage import process_info
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.evaluation import Evaluator, Sample
from nnxdsl.trainer.first_step import unlike
from nnxdsl.trainer.provenance import Provenance, reference_of
from nnxdsl.trainer.reference_cache import ReferenceCache, Rows, rows_of
from nnxdsl.trainer.reporter import Reporter
from nnxdsl.trainer.resume import by_step, newest_step, require_room
from nnxdsl.trainer.rollouts import Rollouts
from nnxdsl.trainer.teacher_cache import TeacherCache
from nnxdsl.trainer.throughput import Speed, peak_memory_gib

FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "NNXDSL_DEVICE_GIB")
"""Variables by which compilers and allocators are told what to do."""

STOP = 1
"""What stands for `control/stop` among the numbers of signals: a number of its own, for it is not one that we catch."""

AHEAD = 2
"""Batches that wait on an accelerator for their steps."""


class TrainingError(RunError):
    """A run that had begun and cannot go on: the step, and what was saved last."""


@attrs.frozen
class Prepared:
    """What an attempt needs and what can be refused before a run directory is touched."""

    program: Program
    tokenizer: TokenizerBase
    dataset: Dataset
    evaluator: Evaluator | None
    rollouts: Rollouts | None = None


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


@attrs.frozen
class _Pending:
    """A step whose metrics are still on the device."""

    step: int
    metrics: Mapping[str, jax.Array]
    began: float
    flops: Flops
    answers: Mapping[str, float]


@attrs.define(init=False)
class Trainer:
    """One start of a run."""

    experiment: Experiment
    display: Display
    parts: Prepared
    source: Source | None
    directory: RunDirectory
    stop: StopRequest
    chronicle: Reporter
    checkpoints: Checkpoints
    batches: BatchSampler
    ahead: Prefetch[tuple[Batch, Flops]]
    speed: Speed
    made_of: Provenance
    committed: int | None
    latest: TrainState | None
    number: int
    tokens: int
    pending: _Pending | None
    samples: list[Sample]
    passed_over: list[str]
    last_read: float
    vote: distributed.Vote

    def __init__(self, experiment: Experiment, display: Display, parts: Prepared, source: Source) -> None:
        """Begins nothing yet.

        Args:
            experiment: What is run.
            display: What people see.
            parts: What was prepared for it.
            source: Its first weights; given up once they are on the devices.
        """
        self.experiment, self.display, self.parts, self.source = experiment, display, parts, source
        self.batches = BatchSampler(
            parts.dataset,
            batch_size=experiment.batch_size,
            seed=experiment.seed,
            order=experiment.data.order,
            batching=experiment.batching,
            blocks=parts.program.blueprint.blocks,
        )
        self.speed = Speed.of(parts.program)
        self.samples, self.pending, self.committed, self.latest = [], None, None, None
        self.passed_over, self.number, self.tokens, self.last_read = [], 0, 0, 0.0

    def run(self, directory: RunDirectory, stop: StopRequest) -> Outcome:
        """Goes on where the directory stands.

        Args:
            directory: The run's files, whose lock this process holds.
            stop: Says whether to stop at the next step boundary.

        Raises:
            NnxdslError: what was saved does not go with the experiment, data or weights; the directory is as it was.
            TrainingError: it cannot go on.
        """
        self.directory, self.stop, self.vote = directory, stop, distributed.Vote()
        distributed.first(directory.require_readable)
        before = _status_of(directory)
        directory.clear_requests()
        directory.take_over(state="starting", total=self.experiment.steps, stage="placing weights")
        keep = self.experiment.checkpoint.keep
        with contextlib.ExitStack() as held:
            held.callback(directory.close)
            self.chronicle = held.enter_context(Reporter(directory, self.display))
            held.enter_context(beating(directory))
            held.enter_context(distributed.on_peer_failure(self.chronicle.lost))
            try:
                self.checkpoints = Checkpoints(directory.checkpoints, keep=keep)
                state, start = self._begin()
            except NnxdslError as error:
                self.chronicle.log(f"refused: {error}")
                directory.put_back(before)
                raise
            except BaseException as error:
                self.chronicle.failed(error)
                raise
            try:
                self.ahead = Prefetch(self._placed, self.experiment.steps, _depth(self.parts.program))
                with self.checkpoints, self.ahead:
                    return self._train(state, start)
            except NnxdslError as error:
                self.chronicle.failed(error)
                raise TrainingError(str(error)) from error
            except BaseException as error:
                self.chronicle.failed(error)
                raise

    def _begin(self) -> tuple[TrainState, int]:
        """The state from which this attempt goes on, and how many steps it has behind it."""
        self.display.stage("placing weights")
        program, step = self.parts.program, self._newest_step()
        saved = None if step is None else self.checkpoints.meta(step)
        distributed.first(
            lambda: require_room(self.checkpoints, self.experiment, step or 0, program.checkpoint_targets())
        )
        if saved is not None:
            self._order.check(saved["batches"])
        self.made_of = Provenance(self.directory.path, saved)
        self.made_of.note(tokenizer=self.parts.tokenizer.fingerprint, compute=program.blueprint.compute.name)
        assert self.source is not None
        self._ask_teacher()  # which is gone when the state comes
        state = program.init(self.source)
        is_apart = program.blueprint.reference_has_own_weights and self.experiment.reference_mode == "cached"
        apart = program.load_reference(self.source) if is_apart else None
        self.source = None  # its arrays are on the devices now; the host's copy is not needed any more
        compared = reference_of(program, state) if apart is None else apart
        reference = {f"reference.{path}": leaf for path, leaf in compared.items()}
        self.made_of.note(frozen=digest({**state.frozen, **reference}))
        self._ask_reference(state, apart)
        if step is None or saved is None:
            return state, 0
        self.tokens = saved["tokens"]
        return program.with_restored(state, step, self.checkpoints.restore(step, program.checkpoint_targets())), step

    def _ask_teacher(self) -> None:
        """Sees to it that what the teacher says is known of all sequences, where it is asked but once."""
        program = self.parts.program
        if not program.blueprint.precomputes_teacher:
            return
        leaves = program.load_teacher(self.source)
        weights = digest(leaves)
        self.made_of.note(teacher=weights)
        kept = TeacherCache(program, leaves, weights, self.directory.path.parent)

        def taught(dataset: Dataset, rows: Rows) -> Dataset:
            assert isinstance(dataset, Sequences)  # refused before, where it is not
            known = kept.of(dataset, rows, self.display, self._is_asked_to_stop)
            return dataset if known is None else known

        self._know_of_all(taught)

    def _ask_reference(self, first: TrainState, apart: Leaves | None) -> None:
        """Sees to it that what the reference says is known of all pairs, where it is asked but once.

        Args:
            first: The state before any step.
            apart: The reference's weights where it has its own.
        """
        if self.experiment.reference_mode != "cached":
            return
        parts = self.parts
        # A new DoRA is its base, but for rounding; what is kept of the one is not of the other.
        weights = self.made_of.parts["frozen"] + (" DoRA" if isinstance(self.experiment.adapter, DoRA) else "")
        weights = weights if apart is None else digest(apart)
        kept = ReferenceCache(parts.program, weights, self.directory.path.parent, apart)

        def referenced(dataset: Dataset, rows: Rows) -> Pairs:
            assert isinstance(dataset, Pairs)  # refused before, where it is not
            logps = kept.of(first, dataset, rows, self.display, self._is_asked_to_stop)
            return dataset if logps is None else dataset.referenced(logps)

        self._know_of_all(referenced)
        if parts.evaluator is not None and not self._is_asked_to_stop():
            parts.evaluator.prepare(first, apart)

    def _know_of_all(self, known: Callable[[Dataset, Rows], Dataset]) -> None:
        """Puts what a model says once beside the rows that are learnt from, and beside the held-out ones."""
        self.batches = self.batches.over(known(self.batches.dataset, rows_of(self.batches, self.experiment.steps)))
        evaluator = self.parts.evaluator
        if evaluator is not None and evaluator.dataset is not None:
            evaluator.dataset = known(evaluator.dataset, np.arange(len(evaluator.dataset)))

    def _newest_step(self) -> int | None:
        def found() -> int | None:
            step, said = newest_step(self.directory, self.checkpoints)
            for line in said:
                self.chronicle.say(line)
            self.passed_over = said
            return step

        return distributed.first(found)

    def _train(self, state: TrainState, start: int) -> Outcome:
        total, every = self.experiment.steps, self.experiment.checkpoint.every_steps
        self._announce(start)
        for step in range(start, total + 1):
            if step > start and (step == total or step % every == 0):
                self._save(step, state)
            evaluated = self._evaluate(step, state) if self._is_due(step) else True
            if step == total and evaluated:
                break
            if self.vote(self._asked_to_stop()) or not evaluated:
                return self._stop(step, state)
            state = self._step(step, state)
        return self._finish(total)

    def _announce(self, start: int) -> None:
        """Writes down what is about to begin, and takes back what went beyond the step it begins at."""
        directory, program, evaluator = self.directory, self.parts.program, self.parts.evaluator
        for said in self.passed_over:  # not before: an attempt that is refused leaves the directory as it was
            directory.append_event({"event": said})
        evaluation = self.experiment.evaluation
        prompts = () if evaluation is None else evaluation.prompts
        for problem in distributed.first(lambda: directory.repair_rows(start, prompts)):
            self.chronicle.tell(f"warning: {problem}")
        devices = [f"{device.platform}:{device.device_kind}" for device in program.mesh.devices.flat]
        record = {
            **process_info.environment(sys.argv, Path.cwd()),
            "experiment": to_dict(self.experiment),
            "devices": devices,
            "flags": {name: os.environ[name] for name in FLAGS if name in os.environ},
        }
        self.number = directory.append_attempt({**record, "start": start})
        self.chronicle.log(f"attempt {self.number}: {' '.join(record['argv'])}")
        for name, dataset in (
            ("data", self.parts.dataset),
            ("held-out data", evaluator.dataset if evaluator else None),
        ):
            if dataset is not None:
                directory.append_event({"event": name, **dataset.report.to_dict()})
                self.chronicle.log("\n".join(dataset.report.lines()))
        self.chronicle.tell(f"resuming {directory.path} at step {start}" if start else f"starting {directory.path}")
        directory.write_layout(describe(program.layout))
        checkpoint = start or None
        directory.write_status(
            state="compiling", attempt=self.number, step=start, checkpoint=checkpoint, stage="compiling the first step"
        )
        self.display.stage(f"training {self.experiment.name}", self.experiment.steps)

    def _step(self, step: int, state: TrainState) -> TrainState:
        """Starts one step, and reads the metrics of the one before while it is computed."""
        if not self.last_read:
            self.display.note("compiling the step ...")
        began = time.perf_counter()
        batch, flops, answers = self._batch(step, state)
        self.latest, metrics = self.parts.program.step(state, batch)
        for value in metrics.values():
            value.copy_to_host_async()
        self._settle()
        self.pending = _Pending(step, metrics, began, flops, answers)
        self._note_committed(self.checkpoints.poll())
        return self.latest

    @property
    def _order(self) -> BatchSampler | Rollouts:
        """What says which rows a step learns from."""
        return self.parts.rollouts or self.batches

    def _batch(self, step: int, state: TrainState) -> tuple[Batch, Flops, Mapping[str, float]]:
        """The batch of a step, what the step takes, and what the policy's answers are like where it gave any."""
        if self.parts.rollouts is None:
            return *self.ahead.at(step), {}
        rollout = self.parts.rollouts.at(step, state)
        return rollout.batch, work(self.parts.program.blueprint, rollout.batch), rollout.metrics

    def _placed(self, step: int) -> tuple[Batch, Flops]:
        """The batch of a step on its way to the devices, and what the step takes."""
        batch = self.batches.at(step)
        return self.parts.program.shard_batch(batch), work(self.parts.program.blueprint, batch)

    def _settle(self) -> None:
        """Waits for the metrics of the last step and writes them."""
        if self.pending is None:
            return
        step, began, flops = self.pending.step, self.pending.began, self.pending.flops
        values = {name: value.item() for name, value in self.pending.metrics.items()} | dict(self.pending.answers)
        self.pending = None
        if not self.last_read and _is_cpu(self.parts.program):  # its temporaries are known now
            allocator.keep_memory()
        now = time.perf_counter()
        seconds, self.last_read = now - max(began, self.last_read), now
        self.tokens += int(values["num_tokens"])
        rates = self.speed.rates(values["num_tokens"], seconds)
        row = {"step": step, "attempt": self.number, **values, "num_tokens": self.tokens, **rates}
        held = {"peak_memory_gib": peak_memory_gib(self.parts.program.mesh.local_devices)}
        self.directory.append_metrics({**row, **self.speed.use(flops, seconds), **held})
        if values.get(SKIPPED):
            self._note_skipped(step, values)
        elif not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            self.tokens -= int(values["num_tokens"])  # of a step that is not taken
            self._refuse_nan(step, values)
        if step == 0 and self.experiment.reference_mode == "cached":
            for said in unlike(self.parts.program, self.batches.at(0), values, self.directory.path.parent):
                self.chronicle.tell(said)
        is_stopping = self._asked_to_stop() != 0
        self.chronicle.step(step + 1, self.experiment.steps, values, rates, is_stopping=is_stopping)

    def _is_due(self, step: int) -> bool:
        evaluation = self.experiment.evaluation
        return evaluation is not None and (step % evaluation.every_steps == 0 or step == self.experiment.steps)

    def _evaluate(self, step: int, state: TrainState) -> bool:
        """Writes held-out metrics and samples of a step; False if it was asked to stop before they were complete."""
        assert self.parts.evaluator is not None
        self._settle()
        self.directory.write_status(stage="evaluating", step=step)
        self.display.note("evaluating ...")
        metrics = self.parts.evaluator.metrics(state, self._is_asked_to_stop)
        if metrics is None:
            return False
        self.samples = self.parts.evaluator.samples(state)
        if metrics:
            self.directory.append_evaluation({"step": step, "attempt": self.number, **metrics})
            self.chronicle.held_out(step, metrics)
        for sample in self.samples:
            self.directory.append_sample({"step": step, "attempt": self.number, **sample._asdict()})
        return True

    def _save(self, step: int, state: TrainState) -> None:
        """Starts to save a step; it counts once the checkpoints say that it is committed."""
        self._settle()
        self.directory.sync()
        meta = {"batches": self._order.state(step), "identity": self.made_of.parts, "tokens": self.tokens}
        self.checkpoints.save(step, self.parts.program.checkpoint_arrays(state), meta)

    def _note_committed(self, step: int | None) -> None:
        if step != self.committed:
            self.committed = step
            self.directory.write_status(checkpoint=step)
            self.chronicle.log(f"checkpoint step {step} saved")

    def _asked_to_stop(self) -> int:
        """The signal that asked this process to stop; `STOP` where its directory does, 0 where nobody does."""
        return self.stop.signal or (STOP if self.directory.stop_requested() else 0)

    def _is_asked_to_stop(self) -> bool:
        """Whether any process is asked to; all ask at the same places, and wait for each other."""
        return distributed.most(self._asked_to_stop()) != 0

    def _stop(self, step: int, state: TrainState) -> Outcome:
        self._settle()
        self.directory.write_status(state="stopping", step=step, stage="saving")
        if step > 0:
            self._save(step, state)
            self._note_committed(self.checkpoints.wait())
        asked = distributed.most(self._asked_to_stop())  # the same signal for all, whichever process it came to
        self.stop.signal = None if asked == STOP else asked
        code = 0 if self.stop.signal is None else 128 + self.stop.signal
        self.chronicle.tell(f"stopped at step {step}, everything saved; run it again to go on")
        self.directory.write_status(state="stopped", step=step, exit_code=code, stage=None, eta_seconds=None)
        return self._outcome("stopped", step)

    def _finish(self, step: int) -> Outcome:
        self._note_committed(self.checkpoints.wait())
        self.chronicle.log(f"finished at step {step}")
        self.directory.append_event({"event": "finished", "step": step})
        self.directory.write_status(state="finished", step=step, exit_code=0, eta_seconds=0.0, stage=None)
        return self._outcome("finished", step)

    def _refuse_nan(self, step: int, values: Mapping[str, float]) -> None:
        raise RunError(
            f"{self._harm(step, values)}; {self._rescued(step)}; lower the learning rate, look at those rows, or skip "
            "such steps with guard=Guard.Skip()"
        )

    def _note_skipped(self, step: int, values: Mapping[str, float]) -> None:
        """Tells of a step that changed nothing, and ends the run when there were too many."""
        in_a_row, total, guard = int(values[IN_A_ROW]), int(values[TOTAL]), self.experiment.guard
        self.chronicle.tell(f"{self._harm(step, values)}; skipped, {in_a_row} in a row, {total} in all")
        for name, count in (("max_in_a_row", in_a_row), ("max_total", total)):
            if count > getattr(guard, name, count):
                self.checkpoints.wait()
                steps = self.checkpoints.steps()
                last = f"the last checkpoint is step {steps[-1]}" if steps else "there is no checkpoint yet"
                raise RunError(f"{count} steps were skipped by step {step}, more than guard.{name}; {last}")

    def _harm(self, step: int, values: Mapping[str, float]) -> str:
        """What is wrong with a step, and which rows it learnt from."""
        rows = ", ".join(self.parts.dataset.row_ids[index] for index in self._order.indices(step)[:8])
        figures = f"loss is {values['loss']:.4g}, grad_norm {values['grad_norm']:.4g}"
        return f"step {step}: {figures}; its rows begin with {rows}"

    def _rescued(self, step: int) -> str:
        """Saves the state from before a step that was not taken, which no step since has changed, and says so."""
        if step == 0:
            return "there is no checkpoint yet"
        self.checkpoints.wait()
        if step not in self.checkpoints.steps():
            assert self.latest is not None
            self._save(step, self.latest)
        self._note_committed(self.checkpoints.wait())
        return f"the state before it is saved as step {step}"

    def _outcome(self, state: str, step: int) -> Outcome:
        evaluations = by_step(self.directory, self.chronicle.say)
        return Outcome(self.directory.path, state, step, self.stop.signal, evaluations, self.samples)


def _depth(program: Program) -> int:
    """For how many steps ahead batches are made: a CPU has no idle moment for it, and makes them in microseconds."""
    return 0 if _is_cpu(program) else AHEAD


def _is_cpu(program: Program) -> bool:
    return program.blueprint.platform == "cpu"


def _status_of(directory: RunDirectory) -> Status:
    try:
        return directory.status()
    except RunError:  # damaged; it is about to be written anew
        return Status(state="queued")
