"""One post-training run as one object: the top of every tree."""

# ruff: noqa: RUF009 - specs cannot change, so a default may be shared

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import ClassVar, Literal

import attrs

from nnxdsl.config.adapter import Adapter, adapter_problems
from nnxdsl.config.batching import Batching, Packed, Padded
from nnxdsl.config.checkpointing import Checkpoint
from nnxdsl.config.core.base import Spec, gather
from nnxdsl.config.core.run_id import run_id
from nnxdsl.config.core.validators import Limit, name, positive
from nnxdsl.config.data import Data, Feedback, Preferences, Text
from nnxdsl.config.diloco import Outer, outer_problems
from nnxdsl.config.evaluation import Evaluation
from nnxdsl.config.memory import Memory
from nnxdsl.config.model import Model
from nnxdsl.config.objectives.base import Objective
from nnxdsl.config.objectives.distillation import Distill
from nnxdsl.config.objectives.grpo import GRPO
from nnxdsl.config.objectives.reference import Checkpoint as OtherWeights
from nnxdsl.config.objectives.reference import Initial, Reference, Synced, Uniform, reference_problems
from nnxdsl.config.objectives.sft import SFT
from nnxdsl.config.optimizer import Optimizer
from nnxdsl.config.precision import Precision
from nnxdsl.config.quantization import Quantization
from nnxdsl.config.sharding import BATCH_AXES, Mesh
from nnxdsl.config.step_guard import Guard, Stop
from nnxdsl.config.tokenizer import Auto
from nnxdsl.config.weights import From, Random, parts
from nnxdsl.errors import Problem

_READ = {
    "pairs": ("preference pairs", "Data.Preferences"),
    "feedback": ("labelled answers", "Data.Feedback"),
    "sequences": ("conversations or texts", "Data.Conversations or Data.Text"),
    "prompts": ("prompts", "Data.Prompts"),
}
"""What each kind of batch is made of, and the data that yields it."""


@attrs.frozen(kw_only=True)
class Experiment(Spec):
    """What a post-training run is. Equal objects are the same run.

    Attributes:
        name: First part of the run's directory.
        model: The network and the weights it starts from.
        data: What it learns from.
        objective: What is optimised.
        optimizer: How gradients become updates.
        steps: Optimizer steps.
        batch_size: Rows (pairs or sequences) per optimizer step, over all devices and micro-batches.
        adapter: What is trained in place of the model's own weights; None trains all of them.
        quantization: In how few bits frozen weights are kept, or trained ones computed with; None for neither.
        reference: What the policy is compared with, where the objective compares.
        frozen: Patterns for the paths of the model's arrays that are not trained, such as "embed" or "layers.*.mlp":
            there are no gradients and no optimizer state for them. Empty: all are, where there is no adapter.
        precision: Number formats.
        guard: What happens at a step that would do harm.
        outer: How workers that train apart become one model from time to time; None for one model.
        seed: Of the order of rows, of random weights and of adapters.
        mesh: Devices. Not part of the run's identity.
        microbatch_size: Rows that are computed at one time, over all devices; None is the whole batch. Not part of the
            run's identity.
        batching: How rows of unequal length become arrays. Not part of the run's identity.
        memory: What is kept and what is computed again. Not part of the run's identity.
        evaluation: Held-out metrics and samples; None for none. Not part of the run's identity.
        checkpoint: When the state is saved. Not part of the run's identity.
        notes: For people. Not part of the run's identity.
    """

    outside_identity: ClassVar[frozenset[str]] = frozenset(
        {"name", "notes", "evaluation", "checkpoint", "mesh", "microbatch_size", "batching", "memory"}
    )

    fields_added_later: ClassVar[frozenset[str]] = frozenset({"reference", "guard", "frozen", "outer"})

    name: str = attrs.field(validator=name)
    model: Model
    data: Data
    objective: Objective
    optimizer: Optimizer
    steps: int = attrs.field(validator=positive)
    batch_size: int = attrs.field(validator=positive)
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
    notes: str = ""

    @property
    def rows_at_once(self) -> int:
        """Rows of one micro-batch, over all devices."""
        return self.microbatch_size or self.batch_size

    @property
    def microbatches(self) -> int:
        """In how many parts a batch is computed."""
        return self.batch_size // self.rows_at_once

    @property
    def compares_parts(self) -> bool:
        """Whether what is minimised compares rows of different micro-batches, so that each is asked twice."""
        return self.microbatches > 1 and (self.objective.compares_across_batch or self.router_aux_loss_coef > 0)

    @property
    def has_reference(self) -> bool:
        """Whether the policy is compared with a model."""
        return self.objective.needs_reference and not isinstance(self.reference, Uniform)

    @property
    def reference_mode(self) -> Literal["none", "cached", "online"]:
        """Whether the reference's log-probabilities are computed once and kept, or at every step."""
        if not self.has_reference:
            return "none"
        if isinstance(self.reference, Synced):
            return "online"
        if self.memory.reference != "auto":
            return self.memory.reference
        held_out = None if self.evaluation is None else self.evaluation.data
        return (
            "cached"
            if all(isinstance(data, Preferences | Feedback | None) for data in (self.data, held_out))
            else "online"
        )

    @property
    def id(self) -> str:
        """`<name>-<8 hex digits>`: the name, and a digest of all that changes the run's mathematics."""
        return run_id(self)

    def problems(self) -> Iterable[Problem]:
        """What is wrong between the parts."""
        return gather(
            self._check_data,
            self._check_held_out,
            self._check_batch,
            self._check_groups,
            self._check_split,
            self._check_packed,
            self._check_quantized,
            self._check_frozen,
            lambda: reference_problems(self),
            lambda: outer_problems(self),
            self._check_offload,
            self._check_earlier,
            self._check_router,
            self._check_further,
            lambda: adapter_problems(self),
        )

    def _check_data(self) -> Iterable[Problem]:
        return self._readable("data", self.data)

    def _check_held_out(self) -> Iterable[Problem]:
        if self.evaluation is not None and self.evaluation.data is not None:
            yield from self._readable("evaluation.data", self.evaluation.data)

    def _readable(self, path: str, data: Data) -> Iterable[Problem]:
        reads, objective = self.objective.batch_kind, type(self.objective).__qualname__
        if data.yields != reads:
            wanted, cure = _READ.get(reads, (reads, f"data that yields {reads}"))
            yield Problem(path, f"{objective} reads {wanted}, {type(data).__qualname__} yields {data.rows}; use {cure}")
        elif isinstance(data, Text) and (scope := getattr(self.objective, "loss_on", "all")) != "all":
            message = f"{scope!r} has no meaning for {type(data).__qualname__} ({path}); use loss_on='all'"
            yield Problem("objective.loss_on", message)

    def _check_batch(self) -> Iterable[Problem]:
        if self.microbatch_size is not None and self.batch_size % self.microbatch_size:
            yield Problem("microbatch_size", f"{self.microbatch_size} does not divide batch_size={self.batch_size}")

    def _check_groups(self) -> Iterable[Problem]:
        if not isinstance(self.objective, GRPO):
            return
        if self.batch_size % self.objective.num_generations:
            message = f"{self.objective.num_generations} answers to a prompt do not divide batch_size={self.batch_size}"
            yield Problem("objective.num_generations", message)
        if not isinstance(self.batching, Padded):
            message = f"{type(self.batching).__qualname__} arranges rows of a file, and answers are in none; leave it"
            yield Problem("batching", message)

    def _check_split(self) -> Iterable[Problem]:
        size, path = self.rows_at_once, "batch_size" if self.microbatch_size is None else "microbatch_size"
        own_rule = any(logical == "batch" for logical, _ in self.mesh.rules)  # then the plan knows
        if own_rule or self.mesh.indivisible == "replicate":
            return
        axes = {axis: count for axis in BATCH_AXES if (count := self.mesh.sizes[axis]) > 1}
        if size % math.prod(axes.values()):
            over = " x ".join(f"{axis}={count}" for axis, count in axes.items())
            yield Problem(path, f"{size} rows cannot be split over mesh {over}")

    def _check_packed(self) -> Iterable[Problem]:
        if (
            isinstance(self.batching, Packed)
            and self.objective.batch_kind == "sequences"
            and not self.objective.is_token_sum
        ):
            message = (
                f"{type(self.objective).__qualname__} does not say that it is a sum over tokens (`is_token_sum`), and "
                "rows of several sequences tell no more; use Batching.Bucketed() or Batching.Padded()"
            )
            yield Problem("batching", message)

    def _check_quantized(self) -> Iterable[Problem]:
        if self.quantization is not None and not self.quantization.freezes and self.adapter is not None:
            kind, adapter = type(self.quantization).__qualname__, type(self.adapter).__qualname__
            message = f"{kind} is for weights that are trained, {adapter} freezes them; use Quantization.Int8()"
            yield Problem("quantization", message)
        elif self.quantization is not None and self.quantization.freezes and self.adapter is None:
            yield Problem(
                "quantization",
                f"{type(self.quantization).__qualname__} freezes the base, so there is nothing to train without an "
                "adapter; add adapter=Adapter.LoRA()",
            )

    def _check_frozen(self) -> Iterable[Problem]:
        if self.frozen and self.adapter is not None:
            yield Problem("frozen", f"has no effect: {type(self.adapter).__qualname__} leaves all of the model frozen")
        if self.precision.frozen != "auto" and self.adapter is None and not self.frozen:
            message = f"{self.precision.frozen!r} has no effect, since all weights are trained (a reference is kept in "
            yield Problem("precision.frozen", message + "the format that is computed in)")

    def _check_offload(self) -> Iterable[Problem]:
        idle = {
            "frozen": self.adapter is None and not self.frozen and "all weights are trained",
            "reference": self.adapter is not None
            and isinstance(self.reference, Initial)
            and "the adapter's base is the reference, there is no copy",
        }
        if not self.has_reference:
            idle["reference"] = f"{type(self.objective).__qualname__} has no reference"
        elif not idle["reference"] and self.reference_mode == "cached":
            idle["reference"] = "it is asked once and not kept; add memory.reference='online' to keep it"
        for index, part in enumerate(self.memory.offload):
            if idle.get(part):
                yield Problem(f"memory.offload.{index}", f"{part!r} has no effect: {idle[part]}")

    def _check_earlier(self) -> Iterable[Problem]:
        teacher = self.objective.teacher if isinstance(self.objective, Distill) else None
        other = self.reference.weights if isinstance(self.reference, OtherWeights) else None
        compared = None if other is None else attrs.evolve(self.model, weights=other)
        for path, model in (("model", self.model), ("objective.teacher", teacher), ("reference", compared)):
            if model is None:
                continue
            for weights in parts(model.weights):
                if isinstance(weights, From) and _network(weights.experiment.model) != _network(model):
                    message = f"is another network than that of {path}.weights.experiment; both must be of one family "
                    yield Problem(path, message + "and size")

    @property
    def router_aux_loss_coef(self) -> float:
        """Strength of the load-balancing loss of routers; 0 where the model has no such field."""
        return getattr(self.model, "router_aux_loss_coef", 0.0)

    def _check_router(self) -> Iterable[Problem]:
        if self.router_aux_loss_coef and self.mesh.stage > 1:
            yield Problem(
                "model.router_aux_loss_coef", "router statistics are not available under pipeline parallelism; set 0"
            )

    @property
    def mtp_loss_weight(self) -> float:
        """Strength of multi-token prediction; 0 where the objective has no such field."""
        return self.objective.mtp_loss_weight if isinstance(self.objective, SFT) else 0.0

    def _check_further(self) -> Iterable[Problem]:
        layers, where = getattr(self.model, "mtp_layers", 0), "objective.mtp_loss_weight"
        if self.mtp_loss_weight and not layers:
            cure = "set model.mtp_layers=1" if hasattr(self.model, "mtp_layers") else "set 0"
            message = f"has no effect: {type(self.model).__qualname__} has no layer that predicts further ahead; {cure}"
            yield Problem(where, message)
        for field, given in (("adapter", self.adapter), ("quantization", self.quantization)):
            if self.mtp_loss_weight and given is not None:
                message = f"an MTP layer is trained whole, without {type(given).__qualname__}; "
                yield Problem(where, message + f"set 0, or {field}=None")
        for weights in parts(self.model.weights)[:1]:  # of what is merged, the base has it
            if layers and isinstance(weights, From) and not getattr(weights.experiment.model, "mtp_layers", 0):
                message = "model.weights.experiment ends without that layer; set 1 there, or 0 here"
                yield Problem("model.mtp_layers", message)
        if isinstance(self.objective, Distill) and getattr(self.objective.teacher, "mtp_layers", 0):
            yield Problem("objective.teacher.mtp_layers", "has no effect: no teacher predicts further ahead; set 0")

    def main(self) -> None:
        """The command line of this experiment: `python FILE [run|show|plan|diff OTHER] [path=value ...]`."""
        if _command_line is None:
            raise RuntimeError("experiment.main() needs the command line: import nnxdsl")
        raise SystemExit(_command_line(self))


_command_line: Callable[[Experiment], int] | None = None


def register_command_line(main: Callable[[Experiment], int]) -> None:
    """Sets what `Experiment.main` runs; the package does so, since the DSL itself knows no command line.

    Args:
        main: Runs the command line of an experiment on `sys.argv`, and returns the exit code.
    """
    global _command_line
    _command_line = main


def _network(model: Model) -> Model:
    """The model without where its weights and tokenizer come from, and without what only its training reads."""
    others = {name: 0 for name in ("router_aux_loss_coef", "mtp_layers") if hasattr(model, name)}
    return attrs.evolve(model, weights=Random(), tokenizer=Auto(), **others)
