"""Local SGD (DiLoCo): workers take inner steps, and an outer update synchronizes them every few steps.

Arrays of workers have a leading worker axis, and a step is one program over that axis, so that workers on different
devices exchange only sums of metrics. Workers are part of the optimizer's state; the trained weights of a run are the
outer ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import optax

from nnxdsl.config.diloco import DiLoCo, Outer
from nnxdsl.data.batch import Batch
from nnxdsl.errors import NotRegisteredError
from nnxdsl.losses.base import LossTerms
from nnxdsl.optim import step_guard

if TYPE_CHECKING:
    from nnxdsl.program.step import DonatedState, Leaves, Metrics, Step, TrainStep


class Workers(NamedTuple):
    """The workers' arrays, each with a leading worker axis.

    Attributes:
        leaves: Float32 parameters by path.
        optimizer: Optax states.
    """

    leaves: Leaves
    optimizer: Any


class DiLoCoState(NamedTuple):
    """The optimizer's state of a DiLoCo run.

    Attributes:
        workers: The workers' parameters and optimizers.
        outer: The optax state of the outer optimizer.
    """

    workers: Workers
    outer: Any


@singledispatch
def build(outer: Outer) -> optax.GradientTransformation:
    """Build the outer optimizer, whose gradient is the outer weights minus the mean over workers.

    Register an `Outer` of your own here.
    """
    name = type(outer).__name__
    raise NotRegisteredError(
        f"no outer optimizer is registered for {type(outer).__qualname__}; write\n"
        f"  from nnxdsl.program import diloco\n"
        f"  @diloco.build.register({name})\n"
        f"  def _(spec): return optax.GradientTransformation(...)"
    )


@build.register
def _(outer: DiLoCo) -> optax.GradientTransformation:
    # optax and torch agree: v = momentum * v + g, and the step is lr * (g + momentum * v).
    return optax.sgd(outer.lr, momentum=outer.momentum or None, nesterov=outer.momentum > 0)


def with_diloco(update: optax.GradientTransformation, outer: Outer) -> optax.GradientTransformation:
    """An inner optimizer vectorized over workers; the outer weights do not change.

    Its `update` takes gradients `[workers, ...]` and returns no updates.
    """
    rule = build(outer)

    def init(params: optax.Params) -> DiLoCoState:
        leaves = _copies(params, outer.workers)
        return DiLoCoState(Workers(leaves, jax.vmap(update.init)(leaves)), rule.init(params))

    def inner_update(updates: Any, state: Any, params: optax.Params | None = None) -> tuple[Any, DiLoCoState]:
        leaves, optimizer = state.workers
        steps, optimizer = jax.vmap(update.update)(updates, optimizer, leaves)
        leaves: Any = optax.apply_updates(leaves, steps)
        return {}, state._replace(workers=Workers(leaves, optimizer))

    return optax.GradientTransformation(init, inner_update)  # pyright: ignore[reportArgumentType]


def is_of_workers(keys: tuple[Any, ...]) -> bool:
    """Whether the array of an optimizer's state with these keys has a leading worker axis."""
    names = [getattr(key, "name", None) for key in keys]
    return "workers" in names[:-1]


@attrs.frozen
class DiLoCoStep:
    """One optimizer step of every worker; a `Step` (see `step.py`), as `TrainStep` is one of a single model.

    Attributes:
        worker: The step of one worker, sharded over its own devices.
        count: Number of workers.
        axis: The mesh axis that workers are sharded over; None for none.
    """

    worker: TrainStep
    count: int
    axis: str | None

    def __call__(
        self, state: DonatedState, frozen: Leaves, reference: Leaves, batch: Batch
    ) -> tuple[DonatedState, Metrics]:
        """See `Step`; the outer weights change in `synchronized` only."""
        keys = self.worker.row_keys(state.step, len(batch.weight))
        grads, terms, norm = self._mean_grads(state.optimizer, frozen, state.reference or reference, batch, keys)
        _, optimizer = self.worker.optimizer.update(grads, state.optimizer, state.trainable)
        after = self.worker.after(state, state.trainable, optimizer)
        return after, self.worker.metrics(state, terms, norm, batch)

    def _mean_grads(
        self, optimizer: Any, frozen: Leaves, reference: Leaves, batch: Batch, keys: jax.Array | None
    ) -> tuple[Leaves, LossTerms, jax.Array]:
        """Gradients of each worker's mean loss `[workers, ...]`, the summed terms, and the gradient norm.

        The norm is the root mean square over workers. Each worker takes consecutive rows.
        """

        def worker_grads(leaves: Leaves, rows: tuple[Batch, jax.Array | None]) -> tuple[Leaves, LossTerms, jax.Array]:
            batch, keys = rows
            grads, terms = self.worker.mean_grads(leaves, frozen, reference, self._constrained(batch), keys)
            return grads, terms, optax.tree.norm(grads)

        rows = jax.tree.map(lambda x: x.reshape(self.count, -1, *x.shape[1:]), (batch, keys))
        leaves = step_guard.inner(optimizer).workers.leaves
        grads, terms, norms = jax.vmap(worker_grads, spmd_axis_name=self.axis)(leaves, rows)
        return grads, jax.tree.map(lambda x: jnp.sum(x, axis=0), terms), jnp.sqrt(jnp.mean(jnp.square(norms)))

    def _constrained(self, batch: Batch) -> Batch:
        """A worker's rows on its own devices: token ids move between devices, activations do not."""
        constrain = self.worker.loss.forward.sharding.constrain
        if constrain is None:
            return batch
        return jax.tree.map(lambda x: constrain(x, ("batch", *(None,) * (x.ndim - 1))), batch)


@attrs.frozen
class OuterUpdate:
    """When and how the outer weights are updated.

    Attributes:
        every_steps: Optimizer steps between synchronizations.
        steps: Steps of the whole run; workers are synchronized after the last one as well.
        rule: The outer optimizer.
        done: The number of optimizer steps that a state was updated by; skipped steps do not count.
        shardings: Of the outer weights and of the optimizer's state; None on one device.
    """

    every_steps: int
    steps: int | None
    rule: optax.GradientTransformation
    done: Callable[[Any], jax.Array]
    shardings: tuple[Any, Any] | None = None

    def synchronize(self, before: DonatedState, after: DonatedState) -> DonatedState:
        """The state `after` a step with its workers synchronized, if a synchronization is due."""
        is_due = (self.done(after) % self.every_steps == 0) & (self.done(after) > self.done(before))
        is_due |= after.step == self.steps

        def synchronized(trainable: Leaves, state: DiLoCoState) -> tuple[Leaves, DiLoCoState]:
            change = {path: leaf - jnp.mean(state.workers.leaves[path], axis=0) for path, leaf in trainable.items()}
            count = len(next(iter(state.workers.leaves.values())))
            updates, outer = self.rule.update(change, state.outer, trainable)
            outer_weights: Any = optax.apply_updates(trainable, updates)
            workers = state.workers._replace(leaves=_copies(outer_weights, count))
            return constrained(outer_weights, DiLoCoState(workers, outer))

        def constrained(*arrays: Any) -> Any:
            # Without a constraint XLA changes their sharding within the branch, and gathers them at every step.
            return arrays if self.shardings is None else jax.lax.with_sharding_constraint(arrays, self.shardings)

        arrays = after.trainable, step_guard.inner(after.optimizer)
        trainable, state = jax.lax.cond(is_due, synchronized, constrained, *arrays)
        return after._replace(trainable=trainable, optimizer=step_guard.with_inner(after.optimizer, state))


def synchronized(step: Step, outer: OuterUpdate) -> Step:
    """A step that synchronizes workers where it is due."""

    def synchronizing_step(
        state: DonatedState, frozen: Leaves, reference: Leaves, batch: Batch
    ) -> tuple[DonatedState, Metrics]:
        after, metrics = step(state, frozen, reference, batch)
        return outer.synchronize(state, after), metrics

    return synchronizing_step


def _copies(leaves: Any, count: int) -> Any:
    return {path: jnp.broadcast_to(leaf, (count, *leaf.shape)) for path, leaf in leaves.items()}
