"""`compile(experiment)`: a spec becomes a program that other people's loops can use. Sees everything of its floor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nnxdsl import losses
from nnxdsl.adapters import lora
from nnxdsl.config.diloco import over
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.objectives.distillation import Distill
from nnxdsl.config.objectives.grpo import GRPO
from nnxdsl.config.objectives.reference import Synced
from nnxdsl.losses.base import WeightedMean
from nnxdsl.losses.lm_head.teacher_top_k import TeacherTopK, with_teacher_top_k
from nnxdsl.models.params import AbstractModel
from nnxdsl.optim import schedules, step_guard
from nnxdsl.program import diloco, xla_options
from nnxdsl.program import init as initial
from nnxdsl.program.activation_sharding import OnSharding, report_shardings
from nnxdsl.program.auto_remat import resolve_remat
from nnxdsl.program.batch_shapes import abstract_batch
from nnxdsl.program.blueprint import Blueprint, build_blueprint
from nnxdsl.program.forward import Forward, cached_reference_logps, with_reference_logps, without_cached
from nnxdsl.program.step import Batch, DonatedState, ForwardOutput, Leaves, TeacherModel, TrainStep
from nnxdsl.sharding.layout import Layout
from nnxdsl.sharding.mesh import device_mesh, on_devices, own_device, usable_memory


class TrainState(NamedTuple):
    """All arrays of a run.

    Attributes:
        step: int32 scalar, optimizer steps done.
        trainable: Float32 parameters that are trained, by path.
        optimizer: The optax state.
        frozen: Parameters of the policy that are not trained, by path.
        reference: The reference's parameters where it has a copy of its own of some, or the teacher's; else empty.
    """

    step: jax.Array
    trainable: Leaves
    optimizer: Any
    frozen: Leaves
    reference: Leaves


@attrs.frozen(eq=False)
class Program:
    """An experiment on its devices.

    Attributes:
        experiment: What was asked for.
        blueprint: What is known without devices.
        mesh: The devices.
        train_step: The mathematics of one step.
    """

    experiment: Experiment
    blueprint: Blueprint
    mesh: Mesh
    train_step: TrainStep
    _step: Any = None
    _evaluate: Any = None
    _score: Any = None
    _judge: Any = None
    _compare: Any = None
    _top: Any = None

    @property
    def layout(self) -> Layout:
        """Every array: path, logical axes, partition spec, per-device shape and bytes, and the rules tried."""
        return self.blueprint.layout

    def init(self, source: initial.Source | None = None) -> TrainState:
        """First state, every array born with its sharding.

        Args:
            source: Where base weights come from; None for random weights and Hub directories, which need no run
                directory to be found.

        Raises:
            PlanError: tensors that are missing or of another shape, all at once.
            WeightsError: files that cannot be read.
        """
        if source is None:
            source = initial.open_source(self.blueprint)
        trainable, frozen, reference = initial.init_arrays(self.blueprint, source, self.mesh)
        trainable = initial.order(trainable, self.blueprint.trainable)
        begin = jax.jit(self.blueprint.update.init, out_shardings=self._optimizer_shardings())
        step = self._number(0)
        return TrainState(step, trainable, begin(trainable), initial.order(frozen, self.blueprint.frozen), reference)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step; `state`'s step, trainable and optimizer buffers are donated and must not be used again.

        Args:
            state: From `init`, `step` or a checkpoint.
            batch: `batch_size` rows; packed in as many blocks as `blueprint.blocks`, or a multiple.

        Returns:
            The new state, and scalars that are still on the device: reading them waits for the step.
        """
        moving, still = self._donated(state)
        moved, metrics = self._step(moving, state.frozen, still, self.shard_batch(batch))
        reference = moved.reference or state.reference
        return TrainState(moved.step, moved.trainable, moved.optimizer, state.frozen, reference), metrics

    def _donated(self, state: TrainState) -> tuple[DonatedState, Leaves]:
        """What a step replaces, and the reference where it stands still."""
        moving = DonatedState(state.step, state.trainable, state.optimizer, {})
        if not self.blueprint.syncs_reference:
            return moving, state.reference
        return moving._replace(reference=state.reference), {}

    def evaluate(self, state: TrainState, batch: Batch) -> dict[str, WeightedMean]:
        """Sums and counts of the loss and all metrics over one batch; add them over batches, then divide."""
        batch = self.shard_batch(batch)
        is_asked = self.train_step.reference is not None and cached_reference_logps(batch) is None
        if is_asked or self.train_step.teacher is not None:
            return self._evaluate(state.trainable, state.frozen, state.reference, batch)
        return self._judge(self.score(state, batch), batch)

    def score(self, state: TrainState, batch: Batch) -> ForwardOutput:
        """What the policy says of a batch; equal weights and equal shapes give equal bits."""
        return self._score(state.trainable, state.frozen, self.shard_batch(without_cached(batch)))

    def with_reference_logps(self, state: TrainState, batch: Batch) -> Batch:
        """The batch with what the policy of `state` says of its pairs, which is then its reference.

        Args:
            state: Whose policy is the reference: the first one, before any step.
            batch: Pairs.

        Raises:
            ValueError: the batch has no pairs.
        """
        return with_reference_logps(batch, self.score(state, batch).scored)

    def load_reference(self, source: initial.Source | None = None) -> Leaves:
        """The weights of a reference that has its own, on the devices.

        Args:
            source: As of `init`.

        Raises:
            PlanError: as `init`.
            WeightsError: as `init`.
        """
        source = initial.open_source(self.blueprint) if source is None else source
        return initial.init_reference(self.blueprint, source, self.mesh)

    def reference_outputs(self, apart: Leaves, batch: Batch) -> Any:
        """What a reference with weights of its own says of a batch."""
        return self._compare(apart, self.shard_batch(without_cached(batch)))

    def load_teacher(self, source: initial.Source | None = None) -> Leaves:
        """The weights of a teacher, on the devices: of one that is asked once, before there is any state.

        Args:
            source: As of `init`.

        Raises:
            PlanError: as `init`.
            WeightsError: as `init`.
        """
        source = initial.open_source(self.blueprint) if source is None else source
        return initial.init_teacher(self.blueprint, source, self.mesh)

    def teacher_top_k(self, teacher: Leaves, batch: Batch) -> TeacherTopK:
        """The words that a teacher finds likeliest in place of each target of a batch, `[B, T - 1, k]`."""
        return self._top(teacher, self.shard_batch(without_cached(batch)))

    def with_teacher_top_k(self, teacher: Leaves, batch: Batch) -> Batch:
        """The batch with what a teacher says of it, which a step with `objective.top_k` reads.

        Args:
            teacher: Its weights.
            batch: Sequences, padded or packed.

        Raises:
            ValueError: the batch has no sequences.
        """
        return with_teacher_top_k(batch, self.teacher_top_k(teacher, batch))

    def shard_batch(self, batch: Batch) -> Batch:
        """A batch on the devices, its rows split over the data axes of the mesh; not waited for.

        A batch that is there already is left as it is.
        """
        sharding = self.batch_sharding(len(batch.weight))
        if getattr(batch.weight, "sharding", None) == sharding:
            return batch
        return on_devices(batch, sharding)

    @property
    def replicated(self) -> NamedSharding:
        """How an array lies that every device has whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    def batch_sharding(self, rows: int) -> NamedSharding:
        """How every array of a batch of so many rows, or blocks, is cut."""
        # What holds for the rows of a micro-batch holds for a batch, which is micro-batches one after another.
        return NamedSharding(self.mesh, self.layout.batch_spec(math.gcd(rows, self.experiment.rows_at_once)))

    def policy(self, state: TrainState) -> tuple[AbstractModel, Leaves]:
        """The trained model as a template and its leaves, in the dtype that is computed in."""
        return self.train_step.policy, {
            **self._fetched("frozen", state.frozen),
            **self.train_step.cast(state.trainable),
        }

    def reference(self, state: TrainState) -> tuple[AbstractModel, Leaves] | None:
        """The reference model as a template and its leaves; None where the objective has none.

        None as well where it is what was trained as it was before any step, and was asked once: it is gone by then.
        """
        template = self.train_step.reference
        if template is None or not (state.reference or self.train_step.reference_is_base):
            return None
        frozen = self._fetched("frozen", state.frozen)
        if self.train_step.reference_is_base:
            return template, {path: frozen[path] for path in template.variables}
        kept = self._fetched("reference", state.reference)
        if not frozen or self.blueprint.reference_has_own_weights:
            return template, kept
        return self.train_step.policy, {**frozen, **lora.disable_adapter(self.train_step.cast(state.trainable), kept)}

    def _fetched(self, part: str, leaves: Leaves) -> Leaves:
        """The leaves of a part on the devices, whole, wherever they lie."""
        if part not in self.layout.offload:
            return leaves
        return {p: jax.device_put(x, self.layout.sharding(part, p, self.mesh, fetched=True)) for p, x in leaves.items()}

    def checkpoint_targets(self) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
        """What a checkpoint holds: abstract arrays with their shardings, by group and path."""

        def abstract(part: str) -> dict[str, jax.ShapeDtypeStruct]:
            placed = self.layout.arrays.get(part, {})
            return {
                path: jax.ShapeDtypeStruct(
                    p.shape, jnp.dtype(p.dtype), sharding=self.layout.sharding(part, path, self.mesh)
                )
                for path, p in placed.items()
            }

        parts = ("trainable", "optimizer", *(("reference",) if self.blueprint.syncs_reference else ()))
        return {part: abstract(part) for part in parts}

    def checkpoint_arrays(self, state: TrainState) -> dict[str, dict[str, jax.Array]]:
        """The arrays of a checkpoint, by group and path, in the form of `targets`."""
        leaves = jax.tree.leaves(state.optimizer)
        return {
            "trainable": dict(state.trainable),
            "optimizer": dict(zip(self.layout.arrays.get("optimizer", {}), leaves, strict=True)),
            **({"reference": dict(state.reference)} if self.blueprint.syncs_reference else {}),
        }

    def with_restored(self, state: TrainState, step: int, groups: Mapping[str, Mapping[str, jax.Array]]) -> TrainState:
        """`state` with what a checkpoint of `step` holds in its place."""
        structure = jax.tree.structure(state.optimizer)
        kept = self.layout.arrays.get("optimizer", {})
        optimizer_state = jax.tree.unflatten(structure, [groups["optimizer"][path] for path in kept])
        return TrainState(
            self._number(step),
            initial.order(groups["trainable"], self.blueprint.trainable),
            optimizer_state,
            state.frozen,
            initial.order(groups["reference"], state.reference) if self.blueprint.syncs_reference else state.reference,
        )

    def _number(self, step: int) -> jax.Array:
        return on_devices(np.int32(step), self.replicated)

    def abstract(self) -> TrainState:
        """The state without its arrays: shapes, dtypes and shardings."""

        def part(name: str) -> dict[str, Any]:
            placed = self.layout.arrays.get(name, {})
            return {
                path: jax.ShapeDtypeStruct(
                    p.shape, jnp.dtype(p.dtype), sharding=self.layout.sharding(name, path, self.mesh)
                )
                for path, p in placed.items()
            }

        step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(self.mesh, PartitionSpec()))
        optimizer = jax.tree.unflatten(self._optimizer_structure(), list(part("optimizer").values()))
        return TrainState(step, part("trainable"), optimizer, part("frozen"), part("reference") or part("teacher"))  # pyright: ignore[reportArgumentType]

    def lower(self, batch: Batch | None = None) -> jax.stages.Lowered:
        """The step as XLA reads it, on devices that need not be there; `.compile()` compiles it ahead of time.

        Args:
            batch: What a step will be given, or its shapes; None for the largest that the data may yield.
        """
        if batch is None:
            rows = self.experiment.batch_size
            asked = self.experiment.objective
            is_kept = self.experiment.reference_mode == "cached"
            is_kept |= isinstance(asked, GRPO) and asked.num_iterations > 1
            batch = abstract_batch(
                self.experiment.data,
                rows,
                self.batch_sharding(rows),
                referenced=is_kept,
                taught=asked.top_k if isinstance(asked, Distill) else None,
                batching=self.experiment.batching,
                blocks=self.blueprint.blocks,
            )
        state = self.abstract()
        moving, still = self._donated(state)
        return self._step.lower(moving, state.frozen, still, batch)

    def memory_compiled(self, batch: Batch | None = None) -> Any:
        """XLA's own report of the compiled step (`argument_size_in_bytes`, `temp_size_in_bytes`, ..., per device)."""
        return self.lower(batch).compile().memory_analysis()

    def _optimizer_structure(self) -> Any:
        params = {p: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for p, leaf in self.blueprint.trainable.items()}
        return jax.tree.structure(jax.eval_shape(self.blueprint.update.init, params))

    def _optimizer_shardings(self, *, fetched: bool = False) -> Any:
        shardings = self.layout.shardings("optimizer", self.mesh, fetched=fetched)
        return jax.tree.unflatten(self._optimizer_structure(), list(shardings.values()))


def _teacher_model(
    blueprint: Blueprint,
    forward: Forward,
    mesh: Mesh,
    device: jax.Device,  # pyright: ignore[reportInvalidTypeForm]
) -> TeacherModel | None:
    """The teacher, computed as the model that it teaches, with a network, weights and kernels of its own."""
    if blueprint.teacher is None:
        return None
    arrive = None if forward.arrive is None else blueprint.teacher_layout.arrive(mesh, ("teacher",))
    kernels = blueprint.teacher_kernels.on(device, blueprint.experiment.name)
    own = attrs.evolve(forward, remat="none", arrive=arrive, kernels=kernels, routed=False)
    return TeacherModel(blueprint.teacher.template, own)


def _reference_forward(blueprint: Blueprint, forward: Forward, mesh: Mesh) -> Forward | None:
    """How a reference with weights of its own is computed: as the policy, with its own weights laid out."""
    if not blueprint.reference_has_own_weights:
        return None
    arrive = None if forward.arrive is None else blueprint.reference_layout.arrive(mesh, ("reference",))
    return attrs.evolve(forward, remat="none", arrive=arrive, routed=False)


def _with_workers(program: Program) -> TrainStep:
    """The mathematics of a program, whose steps workers take apart if that is asked for, each on its own devices."""
    blueprint, computation, mesh = program.blueprint, program.train_step, program.mesh
    asked = blueprint.experiment.outer
    if asked is None:
        return computation
    own = blueprint.layout.of_worker
    optimizer_shardings = step_guard.inner(program._optimizer_shardings(fetched=True))
    shardings = blueprint.layout.shardings("trainable", mesh), optimizer_shardings

    def within(forward: Forward, layout: Layout, parts: Sequence[str]) -> Forward:
        limit = forward.logprob_tokens
        return attrs.evolve(
            forward,
            logprob_tokens=None if limit is None else max(limit // asked.workers, 1),
            constrain=own.constrain(mesh) if forward.constrain else None,
            arrive=layout.arrive(mesh, parts) if forward.arrive else None,
            cuts=own.cuts if forward.cuts else None,
            apart=own.apart(mesh) if forward.apart else None,
        )

    teacher, apart = computation.teacher, computation.apart
    worker = attrs.evolve(
        computation,
        forward=within(computation.forward, own, ("trainable", "frozen")),
        teacher=teacher and attrs.evolve(teacher, forward=within(teacher.forward, own, ("teacher",))),
        apart=apart and within(apart, blueprint.reference_layout.of_worker, ("reference",)),
    )
    return attrs.evolve(
        computation,
        outer=diloco.DiLoCoStep(
            worker,
            count=asked.workers,
            every_steps=asked.every_steps,
            steps=blueprint.experiment.steps,
            rule=diloco.build(asked),
            axis=over(asked.workers, blueprint.layout.mesh),
            shardings=shardings if mesh.size > 1 else None,
        ),
    )


def compile(
    experiment: Experiment,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
    told: OnSharding | None = None,
) -> Program:
    """Compile an experiment into a program on devices; XLA compiles at the first step.

    Args:
        experiment: What is asked for.
        devices: Devices to use, as many as the mesh takes; None for the first ones of this machine.
        told: Called, when XLA compiles the step, with each activation's axes and shape and the sharding that it has.

    Raises:
        PlanError: with everything that does not fit, among it a mesh larger than the devices.
    """
    available = list(jax.devices() if devices is None else devices)
    mesh = device_mesh(experiment.mesh, available, f"Experiment '{experiment.name}'")
    own = own_device(mesh, f"Experiment '{experiment.name}'")
    blueprint, _ = resolve_remat(build_blueprint(experiment, own.platform), usable_memory(own))
    layout = blueprint.layout
    constrain = layout.constrain(mesh) if mesh.size > 1 else None
    is_one = layout.stages == 1 and experiment.outer is None  # within a vmap nobody can be asked
    if constrain is not None and told is not None and is_one:
        constrain = report_shardings(constrain, told)
    objective = experiment.objective
    forward = Forward(
        dtype=blueprint.compute,
        remat=blueprint.remat,
        logprob_tokens=experiment.memory.logprob_tokens,
        constrain=constrain,
        arrive=layout.arrive(mesh) if mesh.size > 1 or layout.offload else None,
        length_multiple=layout.length_shards,
        stages=layout.stages,
        row_shards=layout.batch_shards(experiment.rows_at_once),
        cuts=layout.cuts if mesh.size > 1 else None,
        platform=blueprint.platform,
        kernels=blueprint.kernels.on(own, experiment.name),
        apart=layout.apart(mesh) if mesh.size > 1 else None,
        temperature=objective.temperature if isinstance(objective, GRPO) else 1.0,
        ld_alpha=objective.ld_alpha,
        weighted="wpo" in (term.weighting for term in objective.all_terms),
        distill=objective if isinstance(objective, Distill) else None,
        routed=experiment.router_aux_loss_coef > 0,
        further=experiment.mtp_loss_weight > 0,
    )
    computation = TrainStep(
        policy=blueprint.policy,
        reference=blueprint.reference,
        forward=forward,
        teacher=_teacher_model(blueprint, forward, mesh, own),
        apart=_reference_forward(blueprint, forward, mesh),
        loss=losses.build(experiment.objective),
        optimizer=blueprint.update,
        curve=schedules.learning_rate(experiment.optimizer.schedule, experiment.steps),
        microbatches=experiment.microbatches,
        offload=experiment.memory.offload,
        router_aux_loss_coef=experiment.router_aux_loss_coef,
        mtp_loss_weight=experiment.mtp_loss_weight,
        dropout=experiment.seed if experiment.adapter is not None and experiment.adapter.dropout else None,
        reference_is_base=blueprint.reference_is_base,
        uses_gradcache=experiment.compares_parts,
        guard=step_guard.build(experiment.guard),
        synced=experiment.reference if isinstance(experiment.reference, Synced) and blueprint.syncs_reference else None,
    )
    scalar = NamedSharding(mesh, PartitionSpec())
    program = Program(experiment, blueprint, mesh, computation)
    computation = _with_workers(program)
    program = attrs.evolve(program, train_step=computation)
    followed = blueprint.layout.shardings("reference", mesh) if blueprint.syncs_reference else {}
    placed = (scalar, blueprint.layout.shardings("trainable", mesh), program._optimizer_shardings(), followed)
    moving = DonatedState._make(placed)
    jit = partial(jax.jit, compiler_options=xla_options.options(blueprint.platform))
    return attrs.evolve(
        program,
        step=jit(computation.step, donate_argnums=0, out_shardings=(moving, scalar)),
        evaluate=jit(computation.evaluate, out_shardings=scalar),
        score=jit(computation.score, out_shardings=scalar),
        judge=jit(computation.loss_metrics, out_shardings=scalar),
        compare=jit(computation.reference_outputs, out_shardings=scalar),
        top=jit(computation.teacher_top_k, out_shardings=scalar),
    )
