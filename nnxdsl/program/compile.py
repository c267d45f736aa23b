"""`compile(experiment)`: an experiment as a program of jitted functions, for any training loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nnxdsl.config.diloco import worker_axis
from nnxdsl.config.experiment import Experiment
from nnxdsl.data.dataset import Reads, Rows
from nnxdsl.losses.base import WeightedMean
from nnxdsl.models.params import AbstractModel
from nnxdsl.optim import qk_clip, step_guard
from nnxdsl.program import diloco, xla_options
from nnxdsl.program import init as initial
from nnxdsl.program.activation_sharding import OnSharding, report_shardings
from nnxdsl.program.auto_remat import resolve_remat
from nnxdsl.program.batches import kind_of
from nnxdsl.program.batches.abstract import abstract_batch
from nnxdsl.program.blueprint import Blueprint, build_blueprint
from nnxdsl.program.forward import Forward, ForwardOutput, ForwardSharding, Leaves, forward_options
from nnxdsl.program.loss_fn import build_loss
from nnxdsl.program.policy_loss import PolicyLoss
from nnxdsl.program.reference import OwnWeights
from nnxdsl.program.step import Batch, DonatedState, Step, TrainStep, guarded, offloaded
from nnxdsl.runtime.distributed import is_single_process
from nnxdsl.sharding.layout import Layout, abstract_arrays
from nnxdsl.sharding.mesh import device_mesh, on_devices, own_device, usable_memory


class TrainState(NamedTuple):
    """All arrays of a run.

    Attributes:
        step: int32 scalar, optimizer steps done.
        trainable: Float32 trained parameters, by path.
        optimizer: The optax state.
        frozen: Frozen parameters of the policy, by path.
        reference: Parameters of the reference that are not the policy's, or those of the teacher; else empty.
    """

    step: jax.Array
    trainable: Leaves
    optimizer: Any
    frozen: Leaves
    reference: Leaves


class Jitted(NamedTuple):
    """Jitted functions of `PolicyLoss` and `TrainStep`."""

    step: Any
    evaluate: Any
    score: Any
    score_with_reference: Any
    loss_metrics: Any
    reference_outputs: Any
    teacher_top_k: Any


@attrs.frozen(eq=False)
class Program:
    """An experiment on its devices.

    Attributes:
        experiment: The experiment.
        blueprint: The program without devices.
        mesh: The devices.
        policy_loss: The models and the loss of a micro-batch, as pure functions.
        train_step: One optimizer step, as a pure function.
        jitted: Both, jitted with the shardings of their results.
    """

    experiment: Experiment
    blueprint: Blueprint
    mesh: Mesh
    policy_loss: PolicyLoss
    train_step: Step
    jitted: Jitted

    def with_steps(self, steps: int) -> Program:
        """This program in a run of `steps` steps, for epochs whose rows have been counted."""
        blueprint = self.blueprint.with_steps(steps)
        step = build_step(blueprint, self.mesh, self.policy_loss)
        jitted = jit_step(blueprint, self.mesh, self.policy_loss, step)
        return Program(self.experiment, blueprint, self.mesh, self.policy_loss, step, jitted)

    @property
    def layout(self) -> Layout:
        """Every array: path, logical axes, partition spec, per-device shape and bytes, and the rules tried."""
        return self.blueprint.layout

    def init(self, source: initial.Source | None = None) -> TrainState:
        """The initial state, every array created with its sharding.

        Args:
            source: Source of base weights; None for random weights and Hub directories, which need no run directory.

        Raises:
            PlanError: tensors are missing or have another shape; all are named.
            WeightsError: files cannot be read.
        """
        if source is None:
            source = initial.open_source(self.blueprint)
        trainable, frozen, reference = initial.init_arrays(self.blueprint, source, self.mesh)
        begin = jax.jit(self.blueprint.update.init, out_shardings=optimizer_shardings(self.blueprint, self.mesh))
        step = on_devices(np.int32(0), self.replicated)
        return TrainState(step, trainable, begin(trainable), frozen, reference)

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step; `state`'s step, trainable and optimizer buffers are donated and must not be used again.

        Args:
            state: From `init`, `step` or a checkpoint.
            batch: `batch_size` rows; packed in as many blocks as `blueprint.blocks`, or a multiple.

        Returns:
            The new state, and scalars that are still on the device: reading them waits for the step.
        """
        donated, reference = self._donated(state)
        after, metrics = self.jitted.step(donated, state.frozen, reference, self.shard_batch(batch))
        reference = after.reference or state.reference
        return TrainState(after.step, after.trainable, after.optimizer, state.frozen, reference), metrics

    def _donated(self, state: TrainState) -> tuple[DonatedState, Leaves]:
        """The state that a step donates and replaces, and the reference where it is constant."""
        donated = DonatedState(state.step, state.trainable, state.optimizer, {})
        if not self.blueprint.reference.is_synced:
            return donated, state.reference
        return donated._replace(reference=state.reference), {}

    def evaluate(self, state: TrainState, batch: Batch) -> dict[str, WeightedMean]:
        """Sums and counts of the loss and all metrics over one batch; add them over batches, then divide."""
        batch = self.shard_batch(batch)
        is_compared = self.blueprint.reference.exists and kind_of(batch).reference_logps(batch) is None
        if is_compared or self.blueprint.teacher is not None:
            return self.jitted.evaluate(state.trainable, state.frozen, state.reference, batch)
        return self.jitted.loss_metrics(self.score(state, batch), batch)

    def score(self, state: TrainState, batch: Batch) -> ForwardOutput:
        """The policy's forward outputs of a batch; bitwise reproducible for equal weights and shapes."""
        return self.jitted.score(state.trainable, state.frozen, self.shard_batch(kind_of(batch).without_cached(batch)))

    def score_with_reference(self, state: TrainState, batch: Batch) -> tuple[ForwardOutput, Any]:
        """The policy's forward outputs of a batch, and the reference's loss inputs (None without one)."""
        batch = self.shard_batch(kind_of(batch).without_cached(batch))
        return self.jitted.score_with_reference(state.trainable, state.frozen, state.reference, batch)

    def shard_batch(self, batch: Batch) -> Batch:
        """A batch on the devices, its rows sharded over the data axes of the mesh; transferred asynchronously.

        A batch with this sharding is returned as it is.
        """
        sharding = self.batch_sharding(len(batch.weight))
        if getattr(batch.weight, "sharding", None) == sharding:
            return batch
        return on_devices(batch, sharding)

    @property
    def reads(self) -> Reads | None:
        """Selects the rows of a batch on devices of this process; None for a single process."""
        return None if is_single_process() else self._local_rows

    def _local_rows(self, places: Rows) -> list[int]:
        indices = self.batch_sharding(len(places)).addressable_devices_indices_map(places.shape)
        local = [places[index].ravel() for index in indices.values()]
        return [row for row in np.unique(np.concatenate(local)).tolist() if row >= 0]

    @property
    def replicated(self) -> NamedSharding:
        """Replicated sharding."""
        return NamedSharding(self.mesh, PartitionSpec())

    def batch_sharding(self, rows: int) -> NamedSharding:
        """The sharding of every array of a batch of so many rows, or blocks."""
        # A batch is sharded as its micro-batches are.
        return NamedSharding(self.mesh, self.layout.batch_spec(math.gcd(rows, self.experiment.rows_at_once)))

    def policy(self, state: TrainState) -> tuple[AbstractModel, Leaves]:
        """The trained model as a template and its leaves, in the compute dtype."""
        trainable = self.policy_loss.cast(state.trainable)
        return self.blueprint.policy, {**self._fetched("frozen", state.frozen), **trainable}

    def reference(self, state: TrainState) -> tuple[AbstractModel, Leaves] | None:
        """The reference model as a template and its leaves; None without one, or where log-probs are precomputed."""
        reference = self.blueprint.reference
        if not reference.exists:
            return None
        frozen, leaves = self._fetched("frozen", state.frozen), self._fetched("reference", state.reference)
        return reference.as_model(self.blueprint.policy, frozen, self.policy_loss.cast(state.trainable), leaves)

    def _fetched(self, part: str, leaves: Leaves) -> Leaves:
        """The leaves of a part in device memory, also where they are offloaded."""
        if part not in self.layout.offload:
            return leaves
        return {p: jax.device_put(x, self.layout.sharding(part, p, self.mesh, fetched=True)) for p, x in leaves.items()}

    def abstract(self) -> TrainState:
        """The abstract state: shapes, dtypes and shardings."""
        part = partial(abstract_arrays, self.layout, self.mesh)
        step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(self.mesh, PartitionSpec()))
        optimizer = jax.tree.unflatten(optimizer_structure(self.blueprint), list(part("optimizer").values()))
        return TrainState(step, part("trainable"), optimizer, part("frozen"), part("reference") or part("teacher"))  # pyright: ignore[reportArgumentType]

    def lower(self, batch: Batch | None = None) -> jax.stages.Lowered:
        """Lower the step for ahead-of-time compilation, also for devices that are not attached; then `.compile()`.

        Args:
            batch: A batch, or its shapes; None for the largest that the data may yield.
        """
        if batch is None:
            rows = self.blueprint.rows_at_once * self.experiment.microbatches
            objective = self.experiment.objective
            batch = abstract_batch(
                self.experiment.data,
                rows,
                self.batch_sharding(rows),
                has_ref_logps=self.experiment.reference_mode == "cached" or objective.has_kl_in_reward,
                has_old_logps=objective.num_iterations > 1,
                has_entropy_mask=objective.top_entropy_quantile < 1,
                routed_experts=self.blueprint.routed_experts,
                served_teachers=len(objective.served_teachers),
                teacher_top_k=objective.teacher_top_k,
                batching=self.experiment.batching,
                blocks=self.blueprint.blocks,
                num_generations=self.blueprint.num_generations,
            )
        state = self.abstract()
        donated, reference = self._donated(state)
        return self.jitted.step.lower(donated, state.frozen, reference, batch)


def optimizer_structure(blueprint: Blueprint) -> Any:
    """The tree structure of the optimizer's state."""
    params = {p: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for p, leaf in blueprint.trainable.items()}
    return jax.tree.structure(jax.eval_shape(blueprint.update.init, params))


def optimizer_shardings(blueprint: Blueprint, mesh: Mesh, *, fetched: bool = False) -> Any:
    """The shardings of the optimizer's state; with `fetched`, in device memory, also where it is offloaded."""
    shardings = blueprint.layout.shardings("optimizer", mesh, fetched=fetched)
    return jax.tree.unflatten(optimizer_structure(blueprint), list(shardings.values()))


def build_forward(blueprint: Blueprint, mesh: Mesh, on_sharding: OnSharding | None = None) -> Forward:
    """The policy's forward pass on a mesh."""
    experiment, layout, device = blueprint.experiment, blueprint.layout, own_device(mesh, _title(blueprint))
    constrain = layout.constrain(mesh) if mesh.size > 1 else None
    # Within a vmap over workers, or in stages, shardings cannot be inspected.
    if constrain is not None and on_sharding is not None and layout.stages == 1 and experiment.outer is None:
        constrain = report_shardings(constrain, on_sharding)
    is_sharded = mesh.size > 1
    sharding = ForwardSharding(
        constrain=constrain,
        shard_weights=layout.shard_weights(mesh) if is_sharded or layout.offload else None,
        shard_map_call=layout.shard_map_call(mesh) if is_sharded else None,
        shard_counts=layout.shard_counts if is_sharded else None,
        length_multiple=layout.length_shards,
        stages=layout.stages,
        row_shards=layout.batch_shards(experiment.rows_at_once),
        platform=blueprint.platform,
    )
    return Forward(
        dtype=blueprint.compute,
        remat=blueprint.remat,
        logprob_tokens=experiment.memory.logprob_tokens,
        kernels=blueprint.kernels.on(device, experiment.name),
        sharding=sharding,
        options=forward_options(experiment),
        head=blueprint.head,
    )


def build_policy_loss(blueprint: Blueprint, mesh: Mesh, forward: Forward) -> PolicyLoss:
    """The loss of a micro-batch, with the forward passes of a reference or teacher that has its own weights."""
    experiment = blueprint.experiment

    def without_policy_stats(layout: Layout, part: str) -> Forward:
        sharding = forward.sharding
        policy_stats = ("uses_router_stats", "uses_mtp", "uses_max_logits", "uses_indexer_stats")
        options = attrs.evolve(forward.options, **dict.fromkeys(policy_stats, False))
        if sharding.shard_weights is not None:
            sharding = attrs.evolve(sharding, shard_weights=layout.shard_weights(mesh, (part,)))
        return attrs.evolve(forward, remat="none", sharding=sharding, options=options)

    reference, teacher = blueprint.reference, blueprint.teacher
    if isinstance(reference, OwnWeights):
        reference = attrs.evolve(
            reference, forward=without_policy_stats(reference.placed_in(blueprint.layout), "reference")
        )
    if teacher is not None:
        kernels = blueprint.teacher_kernels.on(own_device(mesh, _title(blueprint)), experiment.name)
        teacher_forward = without_policy_stats(blueprint.teacher_layout, "teacher")
        teacher = attrs.evolve(teacher, forward=attrs.evolve(teacher_forward, kernels=kernels, head=teacher.head))
    return PolicyLoss(blueprint.policy, forward, build_loss(experiment), reference, teacher)


def build_step(blueprint: Blueprint, mesh: Mesh, loss: PolicyLoss) -> Step:
    """One optimizer step, of a single model or of DiLoCo's workers, with its guard and offloading."""
    experiment, guard = blueprint.experiment, step_guard.build(blueprint.experiment.guard)
    train_step = TrainStep(
        loss,
        blueprint.update,
        learning_rate=lambda state: blueprint.learning_rate(guard.applied_steps(state)),
        microbatches=experiment.microbatches,
        uses_gradcache=experiment.compares_parts,
        dropout_seed=experiment.seed if experiment.adapter is not None and experiment.adapter.dropout else None,
        qk_clip=qk_clip.build(experiment.optimizer, blueprint.config),
        adaptive_entropy=experiment.objective.adaptive_entropy,
    )
    outer = experiment.outer
    if outer is None:
        step = guarded(train_step, guard)
    else:
        worker = attrs.evolve(train_step, loss=worker_loss(loss, blueprint, mesh, outer.workers))
        workers = diloco.DiLoCoStep(worker, outer.workers, worker_axis(outer.workers, blueprint.layout.mesh))
        state_shardings = step_guard.inner(optimizer_shardings(blueprint, mesh, fetched=True))
        shardings = (blueprint.layout.shardings("trainable", mesh), state_shardings) if mesh.size > 1 else None
        rule = diloco.build(outer)
        update = diloco.OuterUpdate(outer.every_steps, blueprint.steps, rule, guard.applied_steps, shardings)
        step = diloco.synchronized(guarded(workers, guard), update)
    return offloaded(step, experiment.memory.offload)


def worker_loss(loss: PolicyLoss, blueprint: Blueprint, mesh: Mesh, workers: int) -> PolicyLoss:
    """The loss of one of DiLoCo's workers, sharded over its own devices."""
    within_worker = blueprint.layout.within_worker

    def within(forward: Forward, layout: Layout, *parts: str) -> Forward:
        limit, sharding = forward.logprob_tokens, forward.sharding
        return attrs.evolve(
            forward,
            logprob_tokens=None if limit is None else max(limit // workers, 1),
            sharding=attrs.evolve(
                sharding,
                constrain=within_worker.constrain(mesh) if sharding.constrain else None,
                shard_weights=layout.shard_weights(mesh, parts) if sharding.shard_weights else None,
                shard_map_call=within_worker.shard_map_call(mesh) if sharding.shard_map_call else None,
                shard_counts=within_worker.shard_counts if sharding.shard_counts else None,
            ),
        )

    reference_layout = loss.reference.placed_in(blueprint.layout).within_worker
    return attrs.evolve(
        loss,
        forward=within(loss.forward, within_worker, "trainable", "frozen"),
        reference=loss.reference.map_forward(lambda forward: within(forward, reference_layout, "reference")),
        teacher=loss.teacher and loss.teacher.map_forward(lambda forward: within(forward, within_worker, "teacher")),
    )


def jit_step(blueprint: Blueprint, mesh: Mesh, loss: PolicyLoss, step: Step) -> Jitted:
    """The functions of a program, jitted with the shardings of their results."""
    layout, replicated = blueprint.layout, NamedSharding(mesh, PartitionSpec())
    reference = layout.shardings("reference", mesh) if blueprint.reference.is_synced else {}
    trainable: Any = layout.shardings("trainable", mesh)
    donated = DonatedState._make((replicated, trainable, optimizer_shardings(blueprint, mesh), reference))
    jit = partial(xla_options.jit, platform=blueprint.platform)
    jit_replicated = partial(jit, out_shardings=replicated)
    own_reference = loss.reference if isinstance(loss.reference, OwnWeights) else None
    return Jitted(
        step=jit(step, donate_argnums=0, out_shardings=(donated, replicated)),
        evaluate=jit_replicated(loss.evaluate),
        score=jit_replicated(loss.score),
        score_with_reference=jit_replicated(loss.score_with_reference),
        loss_metrics=jit_replicated(loss.loss_metrics),
        reference_outputs=own_reference and jit_replicated(own_reference.compute),
        teacher_top_k=loss.teacher and jit_replicated(loss.teacher.compute),
    )


def _title(blueprint: Blueprint) -> str:
    return f"Experiment '{blueprint.experiment.name}'"


def compile(
    experiment: Experiment,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
    on_sharding: OnSharding | None = None,
    *,
    steps: int | None = None,
) -> Program:
    """Compile an experiment into a program on devices; XLA compiles at the first step.

    Args:
        experiment: The experiment.
        devices: Devices of the mesh; None for the first ones of this machine.
        on_sharding: Called, when XLA compiles the step, with each activation's axes, shape and sharding.
        steps: The experiment's epochs in steps, which `step` needs for the learning rate; None where it has steps, or
            where nothing is trained.

    Raises:
        PlanError: with all problems at once, a mesh of more devices than there are among them.
    """
    available = list(jax.devices() if devices is None else devices)
    mesh = device_mesh(experiment.mesh, available, f"Experiment '{experiment.name}'")
    device = own_device(mesh, f"Experiment '{experiment.name}'")
    blueprint, _ = resolve_remat(build_blueprint(experiment, device.platform, steps), usable_memory(device))
    loss = build_policy_loss(blueprint, mesh, build_forward(blueprint, mesh, on_sharding))
    step = build_step(blueprint, mesh, loss)
    return Program(experiment, blueprint, mesh, loss, step, jit_step(blueprint, mesh, loss, step))
