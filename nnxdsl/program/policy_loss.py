"""The loss of a micro-batch as a function of the policy's trainable leaves, and its gradient.

Without precomputed reference log-probs, policy and reference go through one loop of two turns. Two separate passes
would be compiled into different kernels that round differently, and the margin of two equal models would be noise
instead of exactly zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.adapters import lora_math
from nnxdsl.data.batch import Batch
from nnxdsl.losses.base import LossTerms, WeightedMean
from nnxdsl.models.dropout import dropping
from nnxdsl.models.params import AbstractModel
from nnxdsl.program.batches import LossInputs, kind_of
from nnxdsl.program.forward import Forward, ForwardOutput, Leaves
from nnxdsl.program.loss_fn import LossFn, zeros_like
from nnxdsl.program.reference import NoReference, ReferenceModel
from nnxdsl.program.teacher import Teacher

GradsAndTerms = tuple[Leaves, LossTerms]
"""Gradients of the loss's sum over rows (float32), and its terms."""

_TURNS = np.array([False, True])  # whether it is the policy's turn


@attrs.frozen
class PolicyLoss:
    """The models of a run and the loss between them, without arrays.

    In all methods, `trainable` and `frozen` are the policy's leaves by path, `reference` those of the reference or of
    the teacher that the state holds, and `keys` one key for each row of the batch for the policy's dropout `[B]`, None
    for no dropout.

    Attributes:
        policy: The model that is trained.
        forward: Its forward pass.
        loss: The loss from forward outputs.
        reference: The model that it is compared with.
        teacher: The model that it learns from, or None.
    """

    policy: AbstractModel
    forward: Forward
    loss: LossFn
    reference: ReferenceModel = attrs.field(factory=NoReference)
    teacher: Teacher | None = None
    _forward: Callable[..., ForwardOutput] = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        # Used several times in one program: for the result's shapes, with and without gradients. It is traced once.
        object.__setattr__(self, "_forward", jax.jit(partial(_forward, self.forward, self.policy)))

    def for_batch(self, batch: Batch) -> PolicyLoss:
        """The loss of micro-batches of `batch`."""
        loss = self.loss.for_batch(batch)
        return self if loss is self.loss else attrs.evolve(self, loss=loss)

    def cast(self, trainable: Mapping[str, jax.Array]) -> Leaves:
        """Trainable leaves in the dtype that is computed in; their gradients come back as float32.

        Magnitudes of DoRA stay float32: rounded, they would not be the norms that they are divided by.
        """
        dtype = self.forward.dtype
        return {path: leaf if path.endswith(lora_math.M) else leaf.astype(dtype) for path, leaf in trainable.items()}

    def make_forward(
        self, frozen: Leaves, batch: Batch, reference: Leaves | None = None, keys: jax.Array | None = None
    ) -> Callable[..., ForwardOutput]:
        """A function from trainable leaves, as `cast` gives them, to the forward outputs of a micro-batch.

        The function takes, after the leaves, whether they are the policy's (which may be traced): only the policy has
        dropout. A teacher is computed once, outside of the function.

        Args:
            frozen: Frozen leaves of the policy.
            batch: The micro-batch.
            reference: Leaves of the reference or teacher; None: no teacher is computed.
            keys: For dropout.

        Raises:
            ValueError: the teacher is precomputed, `reference` is not None, and the batch carries no top-k.
        """
        teacher = None
        if self.teacher is not None and reference is not None:
            teacher = self.teacher.outputs(self.teacher.leaves(frozen, reference), batch)

        def forward(leaves: Leaves, is_policy: jax.Array | bool = True) -> ForwardOutput:
            return self._forward({**frozen, **leaves}, batch, teacher, keys, is_policy)

        return forward

    def score(self, trainable: Leaves, frozen: Leaves, batch: Batch) -> ForwardOutput:
        """The policy's forward outputs of one batch."""
        return self.make_forward(frozen, batch)(self.cast(trainable))

    def score_with_reference(
        self, trainable: Leaves, frozen: Leaves, reference: Leaves, batch: Batch
    ) -> tuple[ForwardOutput, LossInputs | None]:
        """The policy's forward outputs of one batch, and the reference's loss inputs (None without one)."""
        return self.policy_and_reference(self.cast(trainable), frozen, reference, batch)

    def policy_and_reference(
        self, leaves: Leaves, frozen: Leaves, reference: Leaves, batch: Batch, keys: jax.Array | None = None
    ) -> tuple[ForwardOutput, LossInputs | None]:
        """Forward outputs of the policy, and the reference's loss inputs (None without one), forward only."""
        forward, reference_inputs = (
            self.make_forward(frozen, batch, reference, keys),
            self.reference.outputs(reference, batch),
        )
        if not self.reference.exists or reference_inputs is not None:
            return forward(leaves), reference_inputs
        reference_leaves = self.reference.policy_leaves(leaves, reference)

        def turn(_: None, is_policy: jax.Array) -> tuple[None, ForwardOutput]:
            return None, forward(_either(is_policy, leaves, reference_leaves), is_policy)

        _, outputs = jax.lax.scan(turn, None, jnp.asarray(_TURNS))
        compared, out = (jax.tree.map(lambda x, side=side: x[side], outputs) for side in (0, 1))
        return out, compared.loss_inputs

    def loss_metrics(self, out: ForwardOutput, batch: Batch) -> dict[str, WeightedMean]:
        """Sums and counts of the loss and every metric of one batch; add them up over batches, then divide.

        Args:
            out: The policy's forward outputs.
            batch: The batch, with the reference's log-probs where the objective has a reference.
        """
        return _metrics(self.loss.evaluate(out, kind_of(batch).reference_logps(batch), batch))

    def evaluate(self, trainable: Leaves, frozen: Leaves, reference: Leaves, batch: Batch) -> dict[str, WeightedMean]:
        """As `loss_metrics`, from weights: reference and teacher are computed as well."""
        out, compared = self.policy_and_reference(self.cast(trainable), frozen, reference, batch)
        return _metrics(self.loss.evaluate(out, compared, batch))

    def grads(self, trainable: Leaves, frozen: Leaves, reference: Leaves, batch: Batch) -> GradsAndTerms:
        """Gradients of the loss's sum over one micro-batch (float32), and its terms."""
        return self.accumulate_grads(None, trainable, frozen, reference, batch)

    def accumulate_grads(
        self,
        total: GradsAndTerms | None,
        trainable: Leaves,
        frozen: Leaves,
        reference: Leaves,
        batch: Batch,
        keys: jax.Array | None = None,
    ) -> GradsAndTerms:
        """`total` (None for nothing yet) with the gradients and terms of one micro-batch added to it.

        The first turn is the reference's, forward only, the second the policy's, forward and backward. The sums are
        carried through that loop, so that gradients are added where they are made.
        """
        forward = self.make_forward(frozen, batch, reference, keys)

        def pull(
            leaves: Leaves, compared: LossInputs | None, is_policy: jax.Array | bool = True
        ) -> tuple[ForwardOutput, Callable[[], GradsAndTerms]]:
            out, backward = jax.vjp(lambda leaves: forward(leaves, is_policy), leaves)

            def gradient() -> GradsAndTerms:
                cotangents, terms = jax.grad(lambda out: self._minimized(out, compared, batch), has_aux=True)(out)
                return backward(cotangents)[0], terms

            return out, gradient

        leaves = self.cast(trainable)
        reference_inputs = self.reference.outputs(reference, batch)
        if not self.reference.exists or reference_inputs is not None:
            return add_grads(total, pull(leaves, reference_inputs)[1]())
        reference_leaves = self.reference.policy_leaves(leaves, reference)
        nothing = zeros_like(jax.eval_shape(forward, leaves).loss_inputs)
        zeros = self.forward.with_shardings(zeros_like(leaves)), self.zero_terms(forward, leaves, batch)

        def turn(carry: tuple[LossInputs, Any], is_policy: jax.Array) -> tuple[tuple[LossInputs, Any], None]:
            compared, summed = carry
            out, gradient = pull(_either(is_policy, leaves, reference_leaves), compared, is_policy)
            if total is None:  # the gradient takes the place of the zeros before it: one set of arrays
                return (out.loss_inputs, jax.lax.cond(is_policy, gradient, lambda: summed)), None
            # Added outside of the condition, where XLA adds in place; within, it would copy the sums.
            return (out.loss_inputs, add_grads(summed, jax.lax.cond(is_policy, gradient, lambda: zeros))), None

        (_, summed), _ = jax.lax.scan(turn, (nothing, zeros if total is None else total), jnp.asarray(_TURNS))
        return add_grads(None, summed) if total is None else summed

    def _minimized(self, out: ForwardOutput, compared: LossInputs | None, batch: Batch) -> tuple[jax.Array, LossTerms]:
        terms = self.loss(out, compared, batch)
        return self.loss.minimized(terms), terms

    def zero_terms(self, forward: Callable[..., ForwardOutput], leaves: Leaves, batch: Batch) -> LossTerms:
        """Zeros in the form of the terms of a micro-batch."""
        out = jax.eval_shape(forward, leaves)
        return self.loss.zeros(out, out.loss_inputs if self.reference.exists else None, batch)


def add_grads(total: GradsAndTerms | None, more: GradsAndTerms) -> GradsAndTerms:
    """Sums in the dtype of `total`, which is float32, as are gradients that are added to nothing; the larger maxima."""
    if total is None:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), more[0]), more[1]
    (grads, terms), (more_grads, more_terms) = total, more
    summed = jax.tree.map(lambda one, other: one + other.astype(one.dtype), grads, more_grads)
    return summed, terms.added_to(more_terms)


def _forward(
    forward: Forward,
    policy: AbstractModel,
    leaves: Leaves,
    batch: Batch,
    teacher: Any,
    keys: jax.Array | None,
    is_policy: jax.Array | bool,
) -> ForwardOutput:
    """A model's forward outputs: a function of its arguments, so that it need not be traced anew."""
    with dropping(keys, is_policy):
        return forward.read(forward.model(policy, leaves), batch, teacher)


def _metrics(terms: LossTerms) -> dict[str, WeightedMean]:
    return {"loss": terms.loss, **terms.metrics}


def _either(is_policy: jax.Array, policy: Leaves, other: Leaves) -> Leaves:
    return jax.tree.map(lambda mine, theirs: jnp.where(is_policy, mine, theirs), policy, other)
