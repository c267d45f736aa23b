"""The experiment: one post-training run as one object."""

# ruff: noqa: RUF009 - specs cannot change, so a default may be shared

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import attrs

from nnxdsl.config.adapter import Adapter
from nnxdsl.config.batching import Batching, Padded
from nnxdsl.config.core.base import BROKEN, Spec, declared, gather
from nnxdsl.config.core.run_id import run_id
from nnxdsl.config.core.validators import Limit, inner, name, positive
from nnxdsl.config.data import Data, Mixture
from nnxdsl.config.defaults import EPOCHS, default_optimizer
from nnxdsl.config.diloco import Outer
from nnxdsl.config.evaluation import Evaluation
from nnxdsl.config.memory import Memory
from nnxdsl.config.model import Model
from nnxdsl.config.objectives.base import Objective
from nnxdsl.config.objectives.reference import Initial, Reference
from nnxdsl.config.optimizer import Optimizer
from nnxdsl.config.precision import Precision
from nnxdsl.config.quantization import Quantization
from nnxdsl.config.recording.checkpointing import Checkpoint
from nnxdsl.config.recording.rollouts import RolloutLog
from nnxdsl.config.recording.tracking import Tracking
from nnxdsl.config.sharding import Mesh
from nnxdsl.config.step_guard import Guard, Stop
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.trainer.result import Result


@attrs.frozen(kw_only=True)
class Experiment(Spec):
    """A post-training run. Equal objects are the same run.

    Attributes:
        name: First part of the run's directory.
        model: The network and the weights it starts from.
        data: The training rows.
        objective: The loss.
        optimizer: How gradients become updates; where it is not given, AdamW with the usual peak learning rate of the
            objective, ten times as large with an adapter (`nnxdsl.config.defaults`), which it follows when one of these
            is changed with `evolve`, a sweep or `path=value`. One that is given equal to it is the same experiment, and
            follows too.
        steps: Optimizer steps; None where `epochs` are given.
        epochs: Passes over the training rows, in place of `steps`; 1 where neither is given. They become steps when the
            rows are counted: as many as give every row as often, rounded up, so that the last step may begin the next
            epoch. A run whose rows have changed is not resumed.
        batch_size: Rows (pairs or sequences) per optimizer step, over all devices and micro-batches.
        test_size: Share of the data's rows that are held out of training and evaluated, in place of `evaluation.data`.
            Which ones a hash of each row's prompt decides, or of the whole row where it has none: a row stays on its
            side when others are added, and the share is met on average. None trains on all rows.
        adapter: The adapter that is trained; None trains the model's own weights.
        quantization: The format of frozen weights, or of the products with trained ones; None for neither.
        reference: The reference model, where the objective has one.
        frozen: Patterns for the paths of the model's arrays that are not trained, such as "embed" or "layers.*.mlp":
            there are no gradients and no optimizer state for them. Empty: all are, where there is no adapter.
        precision: Number formats.
        guard: What happens at a non-finite or spiking step.
        outer: Local SGD (DiLoCo): several workers and the optimizer that synchronizes them; None for none.
        seed: Seed of the order of rows, of random weights and of adapters.
        mesh: Devices. Not part of the run's identity.
        microbatch_size: Rows of a micro-batch over all devices, for gradient accumulation; None is the whole batch. Not
            part of the run's identity.
        batching: How rows of unequal length become arrays. Not part of the run's identity.
        memory: Rematerialization, offload and kernels. Not part of the run's identity.
        evaluation: Held-out metrics and samples; None for none. Where it is not given and `test_size` is, before the
            first step and after the last. Not part of the run's identity.
        checkpoint: When the state is saved. Not part of the run's identity.
        rollouts: Which sampled completions are written to the run directory, where the objective samples. Not
            part of the run's identity.
        tracking: Where metrics are shown besides the run directory. Not part of the run's identity.
        notes: For people. Not part of the run's identity.
    """

    outside_identity: ClassVar[frozenset[str]] = frozenset(
        {"name", "notes", "evaluation", "checkpoint", "rollouts", "tracking"}
        | {"mesh", "microbatch_size", "batching", "memory"}
    )

    fields_added_later: ClassVar[frozenset[str]] = frozenset(
        {"epochs", "test_size", "reference", "guard", "frozen", "outer"}
    )
    derived: ClassVar[Mapping[str, str]] = {
        "optimizer": "objective and adapter",
        "epochs": "steps",
        "evaluation": "test_size",
    }

    name: str = attrs.field(validator=name)
    model: Model
    data: Data
    objective: Objective
    if TYPE_CHECKING:
        optimizer: Optimizer = cast("Optimizer", None)  # may be left out
    else:
        optimizer: Optimizer  # no default of the class: it follows from `objective` and `adapter`
    steps: int | None = attrs.field(default=None, validator=positive)
    epochs: float | None = attrs.field(default=None, validator=positive)
    batch_size: int = attrs.field(default=8, validator=positive)
    test_size: float | None = attrs.field(default=None, validator=inner)
    adapter: Adapter | None = None
    quantization: Quantization | None = None
    reference: Reference = Initial()
    frozen: tuple[str, ...] = ()
    precision: Precision = Precision()
    guard: Guard = Stop()
    outer: Outer | None = None
    seed: int = attrs.field(default=0, validator=Limit(at_least=0, below=2**32))
    mesh: Mesh = Mesh()
    microbatch_size: int | None = attrs.field(default=None, validator=positive)
    batching: Batching = Padded()
    memory: Memory = Memory()
    evaluation: Evaluation | None = None
    checkpoint: Checkpoint = Checkpoint()
    rollouts: RolloutLog = RolloutLog()
    tracking: tuple[Tracking, ...] = ()
    notes: str = ""

    @classmethod
    def derived_defaults(cls, values: Mapping[str, object]) -> Mapping[str, object]:
        """The optimizer by objective and adapter, one epoch without steps, the evaluation of held-out rows.

        A wrong objective is reported once, by `objective`.
        """
        objective, adapter = values.get("objective"), values.get("adapter")
        defaults: dict[str, object] = {
            "epochs": EPOCHS if values.get("steps") is None else None,
            "evaluation": None if values.get("test_size") is None else Evaluation(),
        }
        if not isinstance(objective, Objective):
            return {**defaults, "optimizer": BROKEN}
        optimizer = default_optimizer(objective, cast("Adapter | None", adapter))
        return defaults if optimizer is None else {**defaults, "optimizer": optimizer}

    def steps_for(self, rows: int) -> int:
        """The optimizer steps of a run on so many training rows.

        With `epochs`, the fewest that train on every row (on `num_generations` completions of every prompt) as often.
        """
        if self.steps is not None:
            return self.steps
        # The decimal number as it is written: the nearest binary one may be larger, and give a step too many.
        samples = Fraction(repr(self.epochs)) * rows * self.objective.num_generations
        return math.ceil(samples / self.batch_size) * self.objective.num_iterations

    @property
    def rows_at_once(self) -> int:
        """Rows of one micro-batch, over all devices."""
        return self.microbatch_size or self.batch_size

    @property
    def rows_path(self) -> str:
        """The field that gives `rows_at_once`."""
        return "batch_size" if self.microbatch_size is None else "microbatch_size"

    @property
    def microbatches(self) -> int:
        """The number of micro-batches of a batch."""
        return self.batch_size // self.rows_at_once

    @property
    def compares_parts(self) -> bool:
        """Whether the loss compares rows of different micro-batches, so that each has two passes (GradCache)."""
        return self.microbatches > 1 and (self.objective.compares_across_batch or self.router_aux_loss_coef > 0)

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference model."""
        return self.objective.needs_reference and self.reference.is_model

    @property
    def reference_mode(self) -> Literal["none", "cached", "online"]:
        """Whether the reference's log-probabilities are precomputed ("cached") or computed at every step ("online")."""
        if not self.has_reference:
            return "none"
        if not self.reference.is_constant:
            return "online"
        if self.memory.reference != "auto":
            return self.memory.reference
        held_out = None if self.evaluation is None else self.evaluation.data
        return "cached" if all(data is None or data.caches_reference for data in (self.data, held_out)) else "online"

    @property
    def router_aux_loss_coef(self) -> float:
        """Strength of the load-balancing loss of routers; 0 where the model has none."""
        return self.model.router_aux_loss_coef

    @property
    def indexer_loss_coef(self) -> float:
        """Strength of the loss of indexers; 0 where the model has none."""
        return self.model.indexer_loss_coef

    @property
    def mtp_loss_weight(self) -> float:
        """Strength of multi-token prediction; 0 where the objective has none."""
        return self.objective.mtp_loss_weight

    @property
    def id(self) -> str:
        """`<name>-<8 hex digits>`: the name, and a digest of all fields that change the run's mathematics."""
        return run_id(self)

    def problems(self) -> Iterable[Problem]:
        """Problems between the parts: each part checks its own conditions."""
        parts = (lambda name=name: self._check_part(name) for name in declared(Experiment))
        return gather(self._check_length, self._check_split, self._check_batch, self._check_tracking, *parts)

    def _check_part(self, name: str) -> Iterable[Problem]:
        part = getattr(self, name)
        return part.check(self) if isinstance(part, Spec) else ()

    def _check_length(self) -> Iterable[Problem]:
        if self.steps is None and self.epochs is None:
            yield Problem("steps", "how long the run is needs steps or epochs, and both are None")
        elif self.steps is not None and self.epochs is not None:
            yield Problem(
                "epochs", f"{self.epochs:g} and steps={self.steps} are two lengths of one run; set one to None"
            )
        elif self.epochs is not None and isinstance(self.data, Mixture):
            yield Problem("epochs", "a mixture has no last row, so its epochs cannot be counted; give steps")

    def _check_split(self) -> Iterable[Problem]:
        if self.test_size is None:
            return
        if self.evaluation is None:
            yield Problem("test_size", "holds out rows that evaluation=None does not read; unset one of them")
        elif self.evaluation.data is not None:
            yield Problem("test_size", "holds out rows for an evaluation that has its own; leave out evaluation.data")
        if isinstance(self.data, Mixture):
            yield Problem("test_size", "a mixture has no row that it trains on once; give evaluation.data")
        if self.objective.batch_kind == "feedback":
            name = type(self.objective).__qualname__
            message = f"{name} compares answers with those of other rows, which may be held out; give evaluation.data"
            yield Problem("test_size", message)

    def _check_batch(self) -> Iterable[Problem]:
        if self.microbatch_size is not None and self.batch_size % self.microbatch_size:
            yield Problem("microbatch_size", f"{self.microbatch_size} does not divide batch_size={self.batch_size}")

    def _check_tracking(self) -> Iterable[Problem]:
        for index, tracker in enumerate(self.tracking):
            if tracker in self.tracking[:index]:
                yield Problem(f"tracking.{index}", f"is the same as tracking.{self.tracking.index(tracker)}")

    def main(self) -> None:
        """The command line of this experiment: `python FILE [run|show|plan|diff OTHER] [path=value ...]`."""
        if _command_line is None:
            raise RuntimeError("experiment.main() needs the command line: import nnxdsl")
        raise SystemExit(_command_line(self))

    def run(self, home: str | Path = "runs", *, quiet: bool = False, restart: bool = False) -> Result:
        """Trains in this process, or resumes the run from its last checkpoint, and returns its result.

        An interrupt (Ctrl-C) stops it after the step, with everything saved: the next call resumes there.

        Args:
            home: Directory of all runs.
            quiet: Whether to print nothing.
            restart: Move what the run directory holds to `<home>/.trash` and begin at step 0.

        Raises:
            SpecError, PlanError, DataError, WeightsError, RunError: It cannot be run; nothing was written.
        """
        if _run is None:
            raise RuntimeError("experiment.run() needs the trainer: import nnxdsl")
        return _run(self, Path(home), quiet=quiet, restart=restart)


_command_line: Callable[[Experiment], int] | None = None
_run: Callable[..., Result] | None = None


def register_runners(main: Callable[[Experiment], int], run: Callable[..., Result]) -> None:
    """Sets what `Experiment.main` and `Experiment.run` do; the package does so, since the DSL itself knows no trainer.

    Args:
        main: Runs the command line of an experiment on `sys.argv`, and returns the exit code.
        run: Trains an experiment; takes the arguments of `Experiment.run`.
    """
    global _command_line, _run
    _command_line, _run = main, run
