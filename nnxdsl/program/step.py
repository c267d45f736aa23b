"""One optimizer step and one evaluation as pure functions over flat leaves; the compiler jits them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import optax

from nnxdsl.adapters import lora
from nnxdsl.config.objectives.reference import Synced
from nnxdsl.data.batch import Batch, PackedSequences, SequenceBatch, token_count
from nnxdsl.losses.base import Loss, LossTerms, PairLogps, WeightedMean, derived_metrics, row_mean
from nnxdsl.losses.distillation import DistillationInputs, TeacherOutputs
from nnxdsl.losses.grpo import RolloutOutputs
from nnxdsl.losses.lm_head.teacher_top_k import TeacherTopK, cached_teacher_top_k
from nnxdsl.losses.lm_head.token_stats import TokenStats
from nnxdsl.models.dropout import dropping
from nnxdsl.models.moe.router import load_balance
from nnxdsl.models.params import AbstractModel
from nnxdsl.optim.step_guard import SkipStep, StopOnNonFinite
from nnxdsl.program import gradcache
from nnxdsl.program.diloco import DiLoCoStep
from nnxdsl.program.forward import Forward, ForwardOutput, cached_reference_logps, mtp_mask, target_mask

Leaves = dict[str, jax.Array]
LossInputs = PairLogps | TokenStats | RolloutOutputs | DistillationInputs
"""What a loss reads of one model: of pairs, of the tokens of sequences, of a policy's answers, or of a student."""
_TURNS = np.array([False, True])  # whether it is the policy's turn
_NO_REFERENCE = (
    "batch has no `reference_logps`, and no reference weights are loaded: give the first state's "
    "`program.with_reference_logps(state, batch)`, or compile with memory.reference='online'"
)
_NO_TEACHER = (
    "batch has no precomputed teacher top-k: give `program.with_teacher_top_k(program.load_teacher(), batch)`, or "
    "leave objective.top_k out"
)


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


@attrs.frozen
class TeacherModel:
    """A frozen model that another learns from.

    Attributes:
        template: The model.
        forward: How its forward pass is computed.
    """

    template: AbstractModel
    forward: Forward

    def outputs(self, leaves: Leaves, batch: Batch) -> TeacherOutputs:
        """What it says of a micro-batch; carries no gradient."""
        return self.forward.teach(self.forward.model(self.template, leaves), batch)

    def top_k(self, leaves: Leaves, batch: Batch) -> TeacherTopK:
        """The words that it finds likeliest in place of each target of a micro-batch; carries no gradient."""
        return jax.lax.stop_gradient(self.forward.top(self.forward.model(self.template, leaves), batch))


@attrs.frozen
class TrainStep:
    """The mathematics of a run, without its arrays.

    Attributes:
        policy: The model that is trained.
        reference: The model that it is compared with, or None.
        forward: How a forward pass is computed.
        loss: What is minimised.
        optimizer: The update rule.
        curve: The learning rate by step.
        microbatches: In how many parts a batch is computed.
        offload: The parts that lie in the host's memory, and are fetched when they are used.
        synced: How the reference follows the policy; None where it stands still.
        apart: How a reference with weights of its own is computed; None where it is made of the policy's.
        guard: What becomes of a step that would do harm.
        dropout: Seed of what an adapter leaves out in training; None where it leaves out nothing.
        teacher: The model that is learnt from, whose leaves are given as those of the reference; or None.
        reference_is_base: Whether the reference is the policy with its adapter off, so that no copy of anything is
            needed.
        uses_gradcache: Whether the loss compares rows of different micro-batches.
        router_aux_loss_coef: What the load-balancing loss of routers is multiplied by where it is added to the loss.
        outer: How workers take this step apart; None for one model.
        mtp_loss_weight: What the loss of targets that are predicted one token earlier is multiplied by where it is
            added.
        mtp_scale: Targets of the whole batch, over those of them that are predicted one token earlier as well; None:
            those of the micro-batch.
    """

    policy: AbstractModel
    reference: AbstractModel | None
    forward: Forward
    loss: Loss
    optimizer: optax.GradientTransformation
    curve: Callable[[Any], Any]
    microbatches: int
    offload: tuple[str, ...] = ()
    router_aux_loss_coef: float = 0.0
    dropout: int | None = None
    reference_is_base: bool = False
    uses_gradcache: bool = False
    guard: StopOnNonFinite | SkipStep = attrs.field(factory=StopOnNonFinite)
    synced: Synced | None = None
    apart: Forward | None = None
    teacher: TeacherModel | None = None
    outer: DiLoCoStep | None = None
    mtp_loss_weight: float = 0.0
    mtp_scale: jax.Array | None = None
    _says: Callable[..., ForwardOutput] = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        # Asked for several times in one program: of its result's shapes, with and without gradients. It is traced once.
        object.__setattr__(self, "_says", jax.jit(partial(_forward, self.forward, self.policy)))

    def step(
        self, moving: DonatedState, frozen: Leaves, reference: Leaves, batch: Batch
    ) -> tuple[DonatedState, dict[str, jax.Array]]:
        """One optimizer step.

        Returns:
            What moves, moved, and float32 scalars under the names that TRL gives them, with `num_tokens` (int32) of
            this batch.
        """
        reference = moving.reference or reference
        keys = self._row_keys(moving.step, len(batch.weight))
        before = self._fetch("optimizer", moving.optimizer)
        if self.outer is None:
            gradients, terms = self.grads_over_microbatches(moving.trainable, frozen, reference, batch, keys)
            norm = optax.tree.norm(gradients)
        else:
            gradients, terms, norm = self.outer.gradients(before, frozen, reference, batch, keys)
        updates, optimizer = self.optimizer.update(gradients, before, moving.trainable)
        metrics = {
            "loss": _divide(*terms.loss),
            "grad_norm": norm,
            "learning_rate": jnp.asarray(self.curve(self.guard.done(moving)), jnp.float32),
            **derived_metrics({name: _divide(*ratio) for name, ratio in terms.metrics.items()}),
            "num_tokens": token_count(batch),
        }
        trainable: Any = moving.trainable
        if self.outer is None:
            trainable = optax.apply_updates(trainable, updates)
        followed = self._sync_reference(moving.step + 1, trainable, moving.reference)
        moved = DonatedState(moving.step + 1, trainable, optimizer, followed)
        fetched = moving._replace(optimizer=before, reference=self._fetch("reference", moving.reference))
        moved, told = self.guard.settle(fetched, moved, metrics["loss"], metrics["grad_norm"])
        if self.outer is not None:
            moved = self.outer.joined(moving, moved)
        return moved, {**metrics, **told}

    def grads_over_microbatches(
        self, trainable: Leaves, frozen: Leaves, reference: Leaves, batch: Batch, keys: jax.Array | None
    ) -> tuple[Leaves, LossTerms]:
        """Gradients of the mean loss over a batch (float32), computed in micro-batches, and its terms.

        Args:
            trainable: As of a step, as the next three.
            frozen: As above.
            reference: As above.
            batch: As above.
            keys: Of its rows `[B]`, for the policy's dropout; None for no dropout.
        """

        def add(
            total: tuple[Leaves, LossTerms], part: tuple[Batch, jax.Array | None]
        ) -> tuple[tuple[Leaves, LossTerms], None]:
            return self.accumulate_grads(total, trainable, frozen, reference, *part), None

        if self.mtp_loss_weight:
            self = attrs.evolve(self, mtp_scale=_mtp_scale(batch))
        parts = jax.tree.map(self._split, (batch, keys))
        if self.uses_gradcache:
            gradients, terms = gradcache.gradients(self, trainable, frozen, reference, *parts)
        elif self.microbatches == 1:
            gradients, terms = self.accumulate_grads(None, trainable, frozen, reference, batch, keys)
        else:
            first, own = jax.tree.map(lambda x: x[0], parts)
            terms = self._no_terms(self.make_forward(frozen, first, reference, own), self.cast(trainable), first)
            nothing = {path: jnp.zeros(leaf.shape, jnp.float32) for path, leaf in trainable.items()}
            (gradients, terms), _ = jax.lax.scan(add, (nothing, terms), parts)
        return jax.tree.map(lambda g: _divide(g, terms.loss.count), gradients), terms

    def _sync_reference(self, done: jax.Array, trainable: Leaves, reference: Leaves) -> Leaves:
        """The reference after so many steps: at some of them it takes its share of the policy."""
        if self.synced is None:
            return reference
        is_due, share = done % self.synced.every_steps == 0, self.synced.ref_model_mixup_alpha
        before = self._fetch("reference", reference)
        return {
            path: jnp.where(is_due, share * trainable[path] + (1 - share) * leaf, leaf) for path, leaf in before.items()
        }

    def score(self, trainable: Leaves, frozen: Leaves, batch: Batch) -> ForwardOutput:
        """What the policy says of one batch, forward only."""
        return self.make_forward(frozen, batch)(self.cast(trainable))

    def loss_metrics(self, read: ForwardOutput, batch: Batch) -> dict[str, WeightedMean]:
        """Sums and counts of the loss and every metric of one batch; add them up over batches, then divide.

        Args:
            read: What the policy says of the batch.
            batch: The batch, with what the reference says of it where the objective has one.
        """
        terms = self._loss_terms(read, cached_reference_logps(batch), batch)
        return {"loss": terms.loss, **terms.metrics}

    def evaluate(self, trainable: Leaves, frozen: Leaves, reference: Leaves, batch: Batch) -> dict[str, WeightedMean]:
        """As `judge`, of a batch that nothing is known of: the reference, or the teacher, is asked as well."""
        read, compared = self.policy_and_reference(self.cast(trainable), frozen, reference, batch)
        terms = self._loss_terms(read, compared, batch)
        return {"loss": terms.loss, **terms.metrics}

    def policy_and_reference(
        self, leaves: Leaves, frozen: Leaves, reference: Leaves, batch: Batch, keys: jax.Array | None = None
    ) -> tuple[ForwardOutput, LossInputs | None]:
        """What the policy and the reference (None where there is none) say of a micro-batch, forward only.

        Args:
            leaves: Trainable ones, in the dtype that is computed in.
            frozen: As of a step, as the next.
            reference: As above.
            batch: The micro-batch.
            keys: As of `accumulate`.
        """
        read, known = self.make_forward(frozen, batch, reference, keys), self._cached_reference(reference, batch)
        if self.reference is None or known is not None:
            return read(leaves), known
        # One piece of code for both models, so that equal models give equal bits: see `accumulate`.
        off = self._without_adapter(leaves, reference)

        def turn(_: None, is_policy: jax.Array) -> tuple[None, ForwardOutput]:
            return None, read(_either(is_policy, leaves, off), is_policy)

        _, said = jax.lax.scan(turn, None, jnp.asarray(_TURNS))
        compared, out = (jax.tree.map(lambda x, side=side: x[side], said) for side in (0, 1))
        return out, compared.scored

    def microbatch_grads(
        self, trainable: Leaves, frozen: Leaves, reference: Leaves, batch: Batch
    ) -> tuple[Leaves, LossTerms]:
        """Gradients of the loss's sum over one micro-batch (float32), and its terms."""
        return self.accumulate_grads(None, trainable, frozen, reference, batch)

    def accumulate_grads(
        self,
        total: tuple[Leaves, LossTerms] | None,
        trainable: Leaves,
        frozen: Leaves,
        reference: Leaves,
        batch: Batch,
        keys: jax.Array | None = None,
    ) -> tuple[Leaves, LossTerms]:
        """`total` with the gradients of the loss's sum over one micro-batch (float32), and its terms, added to it.

        With a reference that the batch knows nothing of, both models go through one loop of two turns: first the
        reference, forward only, then the policy, forward and backward. Two separate passes would be compiled into
        different kernels that round differently, and the margin of two equal models would be noise instead of exactly
        zero. The sums are carried through that loop, so that gradients are added where they are made.

        Args:
            total: What there is already; None for nothing.
            trainable: As of a step, as the next two.
            frozen: As above.
            reference: As above.
            batch: The micro-batch.
            keys: Of its rows, for the policy's dropout; None for no dropout.
        """
        read = self.make_forward(frozen, batch, reference, keys)

        def pull(
            leaves: Leaves, compared: LossInputs | None, is_policy: jax.Array | bool = True
        ) -> tuple[ForwardOutput, Callable[[], tuple[Leaves, LossTerms]]]:
            out, back = jax.vjp(lambda leaves: read(leaves, is_policy), leaves)

            def gradient() -> tuple[Leaves, LossTerms]:
                toward, terms = jax.grad(lambda out: _total(self.total_loss(out, compared, batch)), has_aux=True)(out)
                return back(toward)[0], terms

            return out, gradient

        leaves = self.cast(trainable)
        known = self._cached_reference(reference, batch)
        if self.reference is None or known is not None:
            return _added(total, pull(leaves, known)[1]())
        off = self._without_adapter(leaves, reference)
        nothing = _zeros(jax.eval_shape(read, leaves).scored)
        # In the form of a gradient and its terms.
        zeros = self.forward.laid_out(_zeros(leaves)), self._no_terms(read, leaves, batch)

        def turn(carry: tuple[LossInputs, Any], is_policy: jax.Array) -> tuple[tuple[LossInputs, Any], None]:
            compared, summed = carry
            out, gradient = pull(_either(is_policy, leaves, off), compared, is_policy)
            if total is None:  # the gradient takes the place of the zeros before it: one set of arrays
                return (out.scored, jax.lax.cond(is_policy, gradient, lambda: summed)), None
            # Added outside of the condition, where XLA adds in place; within, it would copy the sums.
            return (out.scored, _added(summed, jax.lax.cond(is_policy, gradient, lambda: zeros))), None

        (_, summed), _ = jax.lax.scan(turn, (nothing, zeros if total is None else total), jnp.asarray(_TURNS))
        return _added(None, summed) if total is None else summed

    def cast(self, trainable: Mapping[str, jax.Array]) -> Leaves:
        """Trainable leaves in the format that is computed in; their gradients come back as float32.

        Magnitudes stay float32: rounded, they would not be the norms that they are divided by.
        """
        dtype = self.forward.dtype
        return {path: leaf if path.endswith(lora.M) else leaf.astype(dtype) for path, leaf in trainable.items()}

    def make_forward(
        self, frozen: Leaves, batch: Batch, reference: Leaves | None = None, keys: jax.Array | None = None
    ) -> Callable[..., ForwardOutput]:
        """From trainable leaves (in the dtype that is computed in) to what the loss reads of a micro-batch.

        The function takes, after the leaves, whether they are the policy's (which may be traced): only it has dropout.

        With a teacher, whose leaves are those of `reference`, it is asked once, before the policy is; of one that was
        asked before the first step, the batch carries what it said.

        Args:
            frozen: As of a step.
            batch: The micro-batch.
            reference: As of a step; None where nobody compares.
            keys: Of its rows, for the policy's dropout; None for no dropout.

        Raises:
            ValueError: it does not, and no `reference` is given, empty as it may be, only where nobody compares.
        """
        taught = None if self.teacher is None or not reference else self.teacher.outputs(reference, batch)
        if self.precomputes_teacher and reference is not None:
            taught = cached_teacher_top_k(batch)
            if taught is None:
                raise ValueError(_NO_TEACHER)

        def read(leaves: Leaves, is_policy: jax.Array | bool = True) -> ForwardOutput:
            return self._says({**frozen, **leaves}, batch, taught, keys, is_policy)

        return read

    @property
    def precomputes_teacher(self) -> bool:
        """Whether batches carry what a teacher said before the first step."""
        return self.forward.distill is not None and self.forward.distill.top_k is not None

    def teacher_top_k(self, teacher: Leaves, batch: Batch) -> TeacherTopK:
        """The words that a teacher finds likeliest in place of each target of a micro-batch."""
        assert self.teacher is not None
        return self.teacher.top_k(teacher, batch)

    def reference_outputs(self, reference: Leaves, batch: Batch) -> LossInputs:
        """What a reference with weights of its own says of a micro-batch; carries no gradient.

        Raises:
            ValueError: they are not there.
        """
        if not reference:
            raise ValueError(_NO_REFERENCE)
        assert self.apart is not None
        assert self.reference is not None
        model = self.apart.model(self.reference, jax.lax.stop_gradient(reference))
        return jax.lax.stop_gradient(self.apart.read(model, batch).scored)

    def _cached_reference(self, reference: Leaves, batch: Batch) -> LossInputs | None:
        """What a reference says of a micro-batch, where it need not be asked beside the policy."""
        known = cached_reference_logps(batch)
        return self.reference_outputs(reference, batch) if known is None and self.apart is not None else known

    def _without_adapter(self, leaves: Leaves, reference: Leaves) -> Leaves:
        """Leaves that make the policy's graph the reference: its own copy of them, or the adapter as it began."""
        if not reference and not self.reference_is_base:
            raise ValueError(_NO_REFERENCE)
        return lora.disable_adapter(leaves, self._fetch("reference", reference))

    def _row_keys(self, step: jax.Array, rows: int) -> jax.Array | None:
        """A key for each row of a step's batch `[B]`; None for no dropout."""
        if self.dropout is None:
            return None
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.dropout), zlib.crc32(b"dropout")), step)
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows, dtype=jnp.uint32))

    def _fetch(self, part: str, tree: Any) -> Any:
        """The arrays of a part on the device. Frozen weights are fetched by the forward pass, a layer at a time."""
        if part not in self.offload:
            return tree
        return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device), tree)

    def _no_terms(self, read: Callable[..., ForwardOutput], leaves: Leaves, batch: Batch) -> LossTerms:
        """Zeros in the form of the terms of a micro-batch."""

        def terms() -> LossTerms:
            out = read(leaves)
            return self.total_loss(out, None if self.reference is None else out.scored, batch)

        return _zeros(jax.eval_shape(terms))

    def total_loss(self, out: ForwardOutput, compared: LossInputs | None, batch: Batch) -> LossTerms:
        """What is minimised: the objective's terms and what is added to them where it is asked for.

        That is the loss of tokens predicted further ahead, and the load-balancing loss of routers, which both belong to
        the batch as a whole. They are added with the count of the objective's own loss, so that dividing by that leaves
        them as they are. The metric of the latter is `aux_loss`, TRL's name, not multiplied by its strength.
        """
        terms = self._loss_terms(out, compared, batch)
        if out.further is not None:
            # A mean over targets of its own, though the sum is divided by the count of all targets.
            scale = _mtp_scale(batch) if self.mtp_scale is None else self.mtp_scale
            more = self.mtp_loss_weight * scale * terms.metrics["mtp_loss"].total
            terms = terms._replace(loss=WeightedMean(terms.loss.total + more, terms.loss.count))
        if out.routing is None:
            return terms
        uneven = load_balance(out.routing)
        loss = terms.loss.total + self.router_aux_loss_coef * terms.loss.count * _divide(*uneven)
        return LossTerms(WeightedMean(loss, terms.loss.count), {**terms.metrics, "aux_loss": WeightedMean(*uneven)})

    def _loss_terms(self, out: ForwardOutput, compared: LossInputs | None, batch: Batch) -> LossTerms:
        weight = batch.weight.reshape(-1)
        terms = self.loss(out.scored, compared, weight)
        extra = {}
        if isinstance(out.scored, PairLogps):
            logps = {"logps/chosen": out.scored.chosen, "logps/rejected": out.scored.rejected}
            extra = {name: row_mean(value, weight) for name, value in logps.items()}
        if out.further is not None:
            counted = out.further.mask * weight[:, None]
            extra = {"mtp_loss": WeightedMean(-jnp.sum(out.further.logp * counted), jnp.sum(counted))}
        return LossTerms(terms.loss, {**extra, **terms.metrics, **_token_metrics(out.stats)})

    def _split(self, x: jax.Array) -> jax.Array:
        """`[B, ...]` as `[microbatches, B / microbatches, ...]`, so that each device keeps rows that it already has."""
        return jnp.moveaxis(x.reshape(-1, self.microbatches, *x.shape[1:]), 1, 0)


def _forward(
    forward: Forward,
    policy: AbstractModel,
    leaves: Leaves,
    batch: Batch,
    taught: TeacherOutputs | TeacherTopK | None,
    keys: jax.Array | None,
    is_policy: jax.Array | bool,
) -> ForwardOutput:
    """What a model says of a micro-batch: a function of its arguments, so that it need not be traced anew."""
    with dropping(keys, is_policy):
        return forward.read(forward.model(policy, leaves), batch, taught)


def _mtp_scale(batch: Batch) -> jax.Array:
    """How many targets of a batch there are for each that is predicted one token earlier as well."""
    assert isinstance(batch, SequenceBatch | PackedSequences)
    weight = batch.weight[:, None]
    return _divide(jnp.sum(target_mask(batch) * weight), jnp.sum(mtp_mask(batch) * weight))


def _token_metrics(stats: TokenStats) -> dict[str, WeightedMean]:
    count = jnp.sum(stats.mask)
    return {
        "entropy": WeightedMean(jnp.sum(stats.entropy * stats.mask), count),
        "mean_token_accuracy": WeightedMean(jnp.sum(stats.correct * stats.mask), count),
    }


def _added(total: tuple[Leaves, LossTerms] | None, more: tuple[Leaves, LossTerms]) -> tuple[Leaves, LossTerms]:
    """Sums in the dtype of `total`, which is float32, as are gradients that are added to nothing."""
    if total is None:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), more[0]), more[1]
    return jax.tree.map(lambda one, other: one + other.astype(one.dtype), total, more)


def _either(is_policy: jax.Array, policy: Leaves, other: Leaves) -> Leaves:
    return jax.tree.map(lambda mine, theirs: jnp.where(is_policy, mine, theirs), policy, other)


def _total(terms: LossTerms) -> tuple[jax.Array, LossTerms]:
    return terms.loss.total, terms


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _divide(total: jax.Array, count: jax.Array) -> jax.Array:
    """`total / count`, and exactly zero where nothing was counted."""
    return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), 0.0)
