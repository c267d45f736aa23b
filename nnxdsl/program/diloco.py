"""Workers that train apart and come together: what they have beside the outer weights, and how both move.

Arrays of workers have an axis in front that counts them, and a step is one program over that axis, so that workers on
devices of their own send each other nothing but sums of metrics. Everything lies in the optimizer's state: the trained
weights of a run are the outer ones. Knows no objective and no mesh.
"""

from __future__ import annotations

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
    from nnxdsl.program.step import DonatedState, Leaves, TrainStep


class Workers(NamedTuple):
    """What each worker has; every array has an axis of workers in front.

    Attributes:
        leaves: Its float32 parameters by path.
        optimizer: Its own optax state.
    """

    leaves: Leaves
    optimizer: Any


class DiLoCoState(NamedTuple):
    """The state of an optimizer whose steps workers take apart.

    Attributes:
        workers: What they have.
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
        f"  @outer.build.register({name})\n"
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
    """How workers take their steps, and come together.

    Attributes:
        worker: The mathematics of one worker, laid out within its own devices.
        count: How many workers there are.
        every_steps: Steps from one time that they come together to the next.
        steps: Of the whole run, after the last of which they come together as well.
        rule: How the outer weights move.
        axis: The mesh axis that workers are cut over; None for none.
        shardings: Where the outer weights and the state lie; None on one device.
    """

    worker: TrainStep
    count: int
    every_steps: int
    steps: int
    rule: optax.GradientTransformation
    axis: str | None
    shardings: tuple[Any, Any] | None = None

    def gradients(
        self, optimizer: Any, frozen: Leaves, reference: Leaves, batch: Batch, keys: jax.Array | None
    ) -> tuple[Leaves, LossTerms, jax.Array]:
        """Each worker's gradients of its own mean loss `[workers, ...]`, the terms of all, and the gradients' norm.

        The norm is the root of the mean over workers of their squared norms.

        Args:
            optimizer: The optimizer's state, on the device.
            frozen: As of a step, as the next two.
            reference: As above.
            batch: As above; consecutive rows are a worker's.
            keys: Of its rows, for dropout; None for no dropout.
        """

        def own(leaves: Leaves, rows: tuple[Batch, jax.Array | None]) -> tuple[Leaves, LossTerms, jax.Array]:
            batch, keys = rows
            gradients, terms = self.worker.grads_over_microbatches(leaves, frozen, reference, self._placed(batch), keys)
            return gradients, terms, optax.tree.norm(gradients)

        rows = jax.tree.map(lambda x: x.reshape(self.count, -1, *x.shape[1:]), (batch, keys))
        leaves = step_guard.inner(optimizer).workers.leaves
        gradients, terms, norms = jax.vmap(own, spmd_axis_name=self.axis)(leaves, rows)
        return gradients, jax.tree.map(lambda x: jnp.sum(x, axis=0), terms), jnp.sqrt(jnp.mean(jnp.square(norms)))

    def joined(self, before: DonatedState, after: DonatedState) -> DonatedState:
        """What a step replaces, after the workers have come together if it is time.

        Args:
            before: What it replaces.
            after: What it has become, by the guard's leave.
        """
        done = self.worker.guard.done
        is_due = (done(after) % self.every_steps == 0) & (done(after) > done(before))
        is_due |= after.step == self.steps

        def join(trainable: Leaves, state: DiLoCoState) -> tuple[Leaves, DiLoCoState]:
            gone = {path: leaf - jnp.mean(state.workers.leaves[path], axis=0) for path, leaf in trainable.items()}
            updates, outer = self.rule.update(gone, state.outer, trainable)
            met: Any = optax.apply_updates(trainable, updates)
            return lie(met, DiLoCoState(state.workers._replace(leaves=_copies(met, self.count)), outer))

        def lie(*both: Any) -> Any:
            # Without a word XLA lets them leave the branch in other pieces, and gathers these at every step.
            return both if self.shardings is None else jax.lax.with_sharding_constraint(both, self.shardings)

        trainable, state = jax.lax.cond(is_due, join, lie, after.trainable, step_guard.inner(after.optimizer))
        return after._replace(trainable=trainable, optimizer=step_guard.with_inner(after.optimizer, state))

    def _placed(self, batch: Batch) -> Batch:
        """A worker's rows on its own devices: token ids are moved, and nothing that is made of them."""
        constrain = self.worker.forward.constrain
        if constrain is None:
            return batch
        return jax.tree.map(lambda x: constrain(x, ("batch", *(None,) * (x.ndim - 1))), batch)


def _copies(leaves: Any, count: int) -> Any:
    return {path: jnp.broadcast_to(leaf, (count, *leaf.shape)) for path, leaf in leaves.items()}
