"""One optimizer step as a pure function, and what wraps one: guards and offloading here, DiLoCo in `diloco.py`."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import attrs
import jax
import jax.numpy as jnp
import optax

from nnxdsl.config.objectives.adaptive_entropy import AdaptiveEntropy
from nnxdsl.data.batch import Batch, token_count
from nnxdsl.losses.base import LossTerms, derived_metrics
from nnxdsl.optim import entropy_control, step_guard
from nnxdsl.optim.qk_clip import QKClip
from nnxdsl.optim.step_guard import SkipStep, StopOnNonFinite
from nnxdsl.program.forward import Leaves
from nnxdsl.program.gradients.accumulation import mean_grads
from nnxdsl.program.loss_fn import EntropyBonus, divide, mean_or_nan
from nnxdsl.program.policy_loss import GradsAndTerms, PolicyLoss
from nnxdsl.program.reference import to_device

Metrics = dict[str, jax.Array]


class DonatedState(NamedTuple):
    """What a step replaces; its buffers are donated.

    Attributes:
        step: int32 scalar, optimizer steps done.
        trainable: Float32 parameters by path.
        optimizer: The optax state.
        reference: The reference's float32 parameters by path where it follows the policy; else empty.
    """

    step: jax.Array
    trainable: Leaves
    optimizer: Any
    reference: Leaves


class Step(Protocol):
    """One optimizer step."""

    def __call__(
        self, state: DonatedState, frozen: Leaves, reference: Leaves, batch: Batch
    ) -> tuple[DonatedState, Metrics]:
        """The state after a step over a batch, and scalars under the names that TRL gives them.

        Args:
            state: What the step replaces.
            frozen: The policy's frozen leaves.
            reference: Leaves of the reference or teacher that the state does not hold.
            batch: The batch.
        """
        ...


@attrs.frozen
class TrainStep:
    """One optimizer step of one model.

    Attributes:
        loss: The loss of a micro-batch.
        optimizer: The update rule.
        learning_rate: From the state before a step to its learning rate.
        microbatches: In how many parts a batch is computed.
        uses_gradcache: Whether the loss compares rows of different micro-batches.
        dropout_seed: Of the adapter's dropout; None for no dropout.
        qk_clip: What scales queries and keys down after an update; None for nothing.
        adaptive_entropy: What the weight of the entropy bonus follows; None for a constant one.
    """

    loss: PolicyLoss
    optimizer: optax.GradientTransformation
    learning_rate: Callable[[DonatedState], jax.Array]
    microbatches: int = 1
    uses_gradcache: bool = False
    dropout_seed: int | None = None
    qk_clip: QKClip | None = None
    adaptive_entropy: AdaptiveEntropy | None = None

    def __call__(
        self, state: DonatedState, frozen: Leaves, reference: Leaves, batch: Batch
    ) -> tuple[DonatedState, Metrics]:
        """See `Step`."""
        keys = self.row_keys(state.step, len(batch.weight))
        grads, terms = self.with_entropy_coef(state.optimizer).mean_grads(
            state.trainable, frozen, state.reference or reference, batch, keys
        )
        norm = optax.tree.norm(grads)
        updates, optimizer = self.optimizer.update(grads, state.optimizer, state.trainable)
        trainable: Any = optax.apply_updates(state.trainable, updates)
        if self.qk_clip is not None and terms.max_logits is not None:
            trainable = self.qk_clip(trainable, terms.max_logits)
        if self.adaptive_entropy is not None:
            entropy = divide(*terms.metrics[EntropyBonus.name])
            optimizer = entropy_control.after_step(self.adaptive_entropy, optimizer, entropy)
        after = self.after(state, trainable, optimizer)
        metrics = self.metrics(state, terms, norm, batch)
        if self.adaptive_entropy is not None:
            metrics["entropy_coef"] = step_guard.inner(optimizer).coef
        return after, metrics

    def with_entropy_coef(self, optimizer: Any) -> TrainStep:
        """This step with the weight of the entropy bonus that the optimizer's state has."""
        if self.adaptive_entropy is None:
            return self
        coef = entropy_control.coef(self.adaptive_entropy, optimizer)
        loss = attrs.evolve(self.loss, loss=self.loss.loss.with_coef(EntropyBonus.name, -coef))
        return attrs.evolve(self, loss=loss)

    def mean_grads(
        self, trainable: Leaves, frozen: Leaves, reference: Leaves, batch: Batch, keys: jax.Array | None
    ) -> GradsAndTerms:
        """Gradients of the mean loss over a batch (float32), and its terms; `keys` as of `row_keys`."""
        inputs = trainable, frozen, reference, batch, keys
        return mean_grads(self.loss, self.microbatches, *inputs, uses_gradcache=self.uses_gradcache)

    def row_keys(self, step: jax.Array, rows: int) -> jax.Array | None:
        """A key for each row of a step's batch `[B]`; None for no dropout."""
        if self.dropout_seed is None:
            return None
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.dropout_seed), zlib.crc32(b"dropout")), step)
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows, dtype=jnp.uint32))

    def after(self, state: DonatedState, trainable: Leaves, optimizer: Any) -> DonatedState:
        """The state with new parameters and a new optimizer state; a reference that follows the policy does so."""
        step = state.step + 1
        return DonatedState(step, trainable, optimizer, self.loss.reference.sync(step, trainable, state.reference))

    def metrics(self, state: DonatedState, terms: LossTerms, norm: jax.Array, batch: Batch) -> Metrics:
        """Float32 scalars under the names that TRL gives them, with `num_tokens` (int32) of the batch.

        A mean or maximum over nothing, as of a label that the batch lacks, is NaN.
        """
        return {
            "loss": self.loss.loss.mean(terms),
            "grad_norm": norm,
            "learning_rate": jnp.asarray(self.learning_rate(state), jnp.float32),
            **derived_metrics({name: mean_or_nan(*mean) for name, mean in terms.metrics.items()}),
            **{name: jnp.where(jnp.isneginf(x), jnp.nan, x) for name, x in (terms.maxima or {}).items()},
            "num_tokens": token_count(batch),
            **({} if self.qk_clip is None or terms.max_logits is None else self.qk_clip.metrics(terms.max_logits)),
        }


def guarded(step: Step, guard: StopOnNonFinite | SkipStep) -> Step:
    """A step that changes nothing where the guard finds its loss or gradient norm harmful."""

    def guarded_step(
        state: DonatedState, frozen: Leaves, reference: Leaves, batch: Batch
    ) -> tuple[DonatedState, Metrics]:
        after, metrics = step(state, frozen, reference, batch)
        after, more = guard.select(state, after, metrics["loss"], metrics["grad_norm"])
        return after, {**metrics, **more}

    return guarded_step


def offloaded(step: Step, parts: tuple[str, ...]) -> Step:
    """A step whose state lies in the host's memory: `parts` names the fields that are fetched before it."""
    fetched = [name for name in ("optimizer", "reference") if name in parts]
    if not fetched:
        return step

    def fetching_step(
        state: DonatedState, frozen: Leaves, reference: Leaves, batch: Batch
    ) -> tuple[DonatedState, Metrics]:
        # Frozen weights are fetched by the forward pass, a layer at a time.
        state = state._replace(**{name: to_device(getattr(state, name)) for name in fetched})
        return step(state, frozen, reference, batch)

    return fetching_step
