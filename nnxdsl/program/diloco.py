"""Local SGD (DiLoCo): workers take steps of their own, and are synchronized by an outer update from time to time.

Arrays of workers have an axis in front that counts them, and a step is one program over that axis, so that workers on
devices of their own send each other nothing but sums of metrics. Everything lies in the optimizer's state: the trained
weights of a run are the outer ones. Knows no objective and no mesh.
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
    """The workers' arrays, each with an axis of workers in front.

    Attributes:
        leaves: Its float32 parameters by path.
        optimizer: Its own optax state.
    """

    leaves: Leaves
    optimizer: Any


class DiLoCoState(NamedTuple):
    """The optimizer's state.

    Attributes:
        workers: The workers' parameters and optimizers.
        outer: The outer rule's own optax state.
    """

    workers: Workers
    outer: Any


@singledispatch
def build(outer: Outer) -> optax.GradientTransformation:
    """From an outer gradient, the outer weights less the mean of workers, to an update of the outer weights.

    Register an `Outer` of your own here.
    """
    name = type(outer).__name__
    raise NotRegisteredError(
        f"no outer rule is registered for {type(outer).__qualname__}; write\n"
        f"  from nnxdsl.program import diloco\n"
        f"  @diloco.build.register({name})\n"
        f"  def _(spec): return optax.GradientTransformation(...)"
    )


@build.register
def _(outer: DiLoCo) -> optax.GradientTransformation:
    # optax and torch agree: v = momentum * v + g, and the step is lr * (g + momentum * v).
    return optax.sgd(outer.lr, momentum=outer.momentum or None, nesterov=outer.momentum > 0)


def with_diloco(update: optax.GradientTransformation, outer: Outer) -> optax.GradientTransformation:
    """An update rule taken by each worker from its own gradient; the outer weights stay where they are.

    Its `update` takes gradients `[workers, ...]` and gives an update for no parameter.
    """
    rule = build(outer)

    def init(params: optax.Params) -> DiLoCoState:
        leaves = _copies(params, outer.workers)
        return DiLoCoState(Workers(leaves, jax.vmap(update.init)(leaves)), rule.init(params))

    def moved(updates: Any, state: Any, params: optax.Params | None = None) -> tuple[Any, DiLoCoState]:
        leaves, optimizer = state.workers
        steps, optimizer = jax.vmap(update.update)(updates, optimizer, leaves)
        leaves: Any = optax.apply_updates(leaves, steps)
        return {}, state._replace(workers=Workers(leaves, optimizer))

    return optax.GradientTransformation(init, moved)  # pyright: ignore[reportArgumentType]


def is_of_workers(keys: tuple[Any, ...]) -> bool:
    """Whether the array of an optimizer's state with these keys has an axis of workers in front."""
    names = [getattr(key, "name", None) for key in keys]
    return "workers" in names[:-1]


@attrs.frozen
class DiLoCoStep:
    """One optimizer step of every worker; a `Step` (see `step.py`), as `TrainStep` is one of a single model.

    Attributes:
        worker: The step of one worker, laid out within its own devices.
        count: How many workers there are.
        axis: The mesh axis that workers are split over; None for none.
    """

    worker: TrainStep
    count: int
    axis: str | None

    def __call__(
        self, state: DonatedState, frozen: Leaves, reference: Leaves, batch: Batch
    ) -> tuple[DonatedState, Metrics]:
        """See `Step`; the outer weights stay where they are until `synchronized` moves them."""
        keys = self.worker.row_keys(state.step, len(batch.weight))
        grads, terms, norm = self._mean_grads(state.optimizer, frozen, state.reference or reference, batch, keys)
        _, optimizer = self.worker.optimizer.update(grads, state.optimizer, state.trainable)
        after = self.worker.after(state, state.trainable, optimizer)
        return after, self.worker.metrics(state, terms, norm, batch)

    def _mean_grads(
        self, optimizer: Any, frozen: Leaves, reference: Leaves, batch: Batch, keys: jax.Array | None
    ) -> tuple[Leaves, LossTerms, jax.Array]:
        """Each worker's gradients of its own mean loss `[workers, ...]`, the terms of all, and the gradients' norm.

        The norm is the root of the mean over workers of their squared norms. Consecutive rows are a worker's.
        """

        def own(leaves: Leaves, rows: tuple[Batch, jax.Array | None]) -> tuple[Leaves, LossTerms, jax.Array]:
            batch, keys = rows
            grads, terms = self.worker.mean_grads(leaves, frozen, reference, self._constrained(batch), keys)
            return grads, terms, optax.tree.norm(grads)

        rows = jax.tree.map(lambda x: x.reshape(self.count, -1, *x.shape[1:]), (batch, keys))
        leaves = step_guard.inner(optimizer).workers.leaves
        grads, terms, norms = jax.vmap(own, spmd_axis_name=self.axis)(leaves, rows)
        return grads, jax.tree.map(lambda x: jnp.sum(x, axis=0), terms), jnp.sqrt(jnp.mean(jnp.square(norms)))

    def _constrained(self, batch: Batch) -> Batch:
        """A worker's rows on its own devices: token ids are moved, and nothing that is made of them."""
        constrain = self.worker.loss.forward.sharding.constrain
        if constrain is None:
            return batch
        return jax.tree.map(lambda x: constrain(x, ("batch", *(None,) * (x.ndim - 1))), batch)


@attrs.frozen
class OuterUpdate:
    """When and how the outer weights move.

    Attributes:
        every_steps: Optimizer steps from one synchronization to the next.
        steps: Of the whole run, after the last of which workers synchronize as well.
        rule: How the outer weights move.
        done: From a state to its optimizer steps that changed something.
        shardings: Of the outer weights and of the optimizer's state; None on one device.
    """

    every_steps: int
    steps: int | None
    rule: optax.GradientTransformation
    done: Callable[[Any], jax.Array]
    shardings: tuple[Any, Any] | None = None

    def synchronize(self, before: DonatedState, after: DonatedState) -> DonatedState:
        """The state after a step (`before` is that before it), whose workers are synchronized if it is time."""
        is_due = (self.done(after) % self.every_steps == 0) & (self.done(after) > self.done(before))
        is_due |= after.step == self.steps

        def synchronized(trainable: Leaves, state: DiLoCoState) -> tuple[Leaves, DiLoCoState]:
            change = {path: leaf - jnp.mean(state.workers.leaves[path], axis=0) for path, leaf in trainable.items()}
            count = len(next(iter(state.workers.leaves.values())))
            updates, outer = self.rule.update(change, state.outer, trainable)
            outer_weights: Any = optax.apply_updates(trainable, updates)
            workers = state.workers._replace(leaves=_copies(outer_weights, count))
            return constrained(outer_weights, DiLoCoState(workers, outer))

        def constrained(*both: Any) -> Any:
            # Without a constraint XLA lets them leave the branch in other shards, and gathers these at every step.
            return both if self.shardings is None else jax.lax.with_sharding_constraint(both, self.shardings)

        given = after.trainable, step_guard.inner(after.optimizer)
        trainable, state = jax.lax.cond(is_due, synchronized, constrained, *given)
        return after._replace(trainable=trainable, optimizer=step_guard.with_inner(after.optimizer, state))


def synchronized(step: Step, outer: OuterUpdate) -> Step:
    """A step after which workers are synchronized if it is time."""

    def synchronizing_step(
        state: DonatedState, frozen: Leaves, reference: Leaves, batch: Batch
    ) -> tuple[DonatedState, Metrics]:
        after, metrics = step(state, frozen, reference, batch)
        return outer.synchronize(state, after), metrics

    return synchronizing_step


def _copies(leaves: Any, count: int) -> Any:
    return {path: jnp.broadcast_to(leaf, (count, *leaf.shape)) for path, leaf in leaves.items()}
