"""Reference models: initial policy, disabled adapter, synced copy or checkpoint; their arrays and outputs.

`build` creates one from `Experiment.reference`. Any of them may be precomputed (`is_precomputed`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import singledispatch
from typing import Any, ClassVar

import attrs
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from nnxdsl.adapters import lora_math
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.objectives import reference as config
from nnxdsl.data.batch import Batch
from nnxdsl.errors import NotRegisteredError
from nnxdsl.models.params import AbstractModel, ParamSpec
from nnxdsl.program.batches import LossInputs, kind_of
from nnxdsl.program.forward import Forward, Leaves
from nnxdsl.sharding.layout import Array, Layout

_NO_REFERENCE = (
    "batch has no `reference_logps`, and no reference weights are loaded: give that of "
    "`nnxdsl.program.precomputed.with_reference_logps(program, state, batch)` with the first state, or compile with "
    "memory.reference='online'"
)


@attrs.frozen(eq=False, kw_only=True)
class ReferenceModel:
    """A reference that is computed by the policy's forward pass with other leaves.

    Attributes:
        template: The model; None where there is no reference.
        arrays: Leaves of which the state has a copy for the reference, by path.
        is_precomputed: Whether log-probabilities are computed before the first step and come with each batch.
        is_offloaded: Whether its arrays are offloaded to host memory.
    """

    template: AbstractModel | None = None
    arrays: Mapping[str, ParamSpec] = attrs.field(factory=dict)
    is_precomputed: bool = False
    is_offloaded: bool = False

    exists: ClassVar[bool] = True
    is_base: ClassVar[bool] = False
    """Whether it is the policy with its adapter disabled, without any copy."""
    has_own_weights: ClassVar[bool] = False
    """Whether its weights are loaded from a checkpoint."""
    is_synced: ClassVar[bool] = False
    """Whether it is updated from the policy, and so is part of the donated state and of checkpoints."""

    @property
    def is_online(self) -> bool:
        """Whether each step computes it."""
        return self.exists and not self.is_precomputed

    def placed_in(self, layout: Layout) -> Layout:
        """The layout of its arrays, from that of the program."""
        return layout

    def map_forward(self, change: Callable[[Forward], Forward]) -> ReferenceModel:
        """The reference with a changed forward pass, if it has its own."""
        return self

    def outputs(self, leaves: Leaves, batch: Batch) -> LossInputs | None:
        """Its loss inputs where they need no pass through the policy's graph: those in the batch."""
        return kind_of(batch).reference_logps(batch)

    def policy_leaves(self, leaves: Leaves, reference: Leaves) -> Leaves:
        """Leaves with which the policy's forward pass computes the reference.

        Args:
            leaves: The policy's trainable leaves.
            reference: The reference's copies.

        Raises:
            ValueError: there are no copies.
        """
        if not reference:
            raise ValueError(_NO_REFERENCE)
        return lora_math.disable_adapter(leaves, self.fetch(reference))

    def as_model(
        self, policy: AbstractModel, frozen: Leaves, trainable: Leaves, reference: Leaves
    ) -> tuple[AbstractModel, Leaves] | None:
        """A template and its leaves; None where its weights are not in the state.

        Args:
            policy: The policy's template.
            frozen: The policy's frozen leaves.
            trainable: Its trainable leaves, in the compute dtype.
            reference: The reference's copies.
        """
        if self.template is None or not reference:
            return None
        if not frozen:
            return self.template, reference
        return policy, {**frozen, **lora_math.disable_adapter(trainable, reference)}

    def sync(self, done: jax.Array, trainable: Leaves, reference: Leaves) -> Leaves:
        """Its arrays in the donated state after `done` optimizer steps; empty where it is not synced."""
        return reference

    def fetch(self, reference: Leaves) -> Leaves:
        """Its arrays in the device's memory."""
        return to_device(reference) if self.is_offloaded else reference


@attrs.frozen(eq=False, kw_only=True)
class NoReference(ReferenceModel):
    """No reference model."""

    exists: ClassVar[bool] = False


@attrs.frozen(eq=False, kw_only=True)
class InitialCopy(ReferenceModel):
    """The initial policy: a copy of its trainable leaves."""


@attrs.frozen(eq=False, kw_only=True)
class AdapterOff(ReferenceModel):
    """The policy with its new adapter disabled."""

    is_base: ClassVar[bool] = True

    def policy_leaves(self, leaves: Leaves, reference: Leaves) -> Leaves:
        """Leaves with which the policy's forward pass computes the base."""
        return lora_math.disable_adapter(leaves, self.fetch(reference))

    def as_model(
        self, policy: AbstractModel, frozen: Leaves, trainable: Leaves, reference: Leaves
    ) -> tuple[AbstractModel, Leaves] | None:
        """The base's template and its leaves: the policy's frozen ones, and those of a trained MTP layer."""
        assert self.template is not None
        leaves = {**trainable, **frozen}
        return self.template, {path: leaves[path] for path in self.template.variables}


@attrs.frozen(eq=False, kw_only=True)
class Synced(ReferenceModel):
    """A float32 copy of the trainable leaves that is updated from the policy (TR-DPO).

    Attributes:
        every_steps: Optimizer steps between updates.
        mixup_alpha: The policy's weight in an update.
    """

    every_steps: int
    mixup_alpha: float

    is_synced: ClassVar[bool] = True

    def sync(self, done: jax.Array, trainable: Leaves, reference: Leaves) -> Leaves:
        """The copy after `done` optimizer steps, updated at every `every_steps`-th."""
        is_due, alpha = done % self.every_steps == 0, self.mixup_alpha
        return {
            path: jnp.where(is_due, alpha * trainable[path] + (1 - alpha) * leaf, leaf)
            for path, leaf in self.fetch(reference).items()
        }


@attrs.frozen(eq=False, kw_only=True)
class OwnWeights(ReferenceModel):
    """A model of the policy's architecture with weights from a checkpoint, and its own forward pass.

    Attributes:
        forward: Its forward pass; None before it is on devices.
    """

    forward: Forward | None = None

    has_own_weights: ClassVar[bool] = True

    def placed_in(self, layout: Layout) -> Layout:
        """The layout of its weights, also where they are freed before the first step."""
        if "reference" in layout.arrays:
            return layout
        assert self.template is not None
        arrays = {path: Array(leaf.shape, leaf.dtype, leaf.axes) for path, leaf in self.template.variables.items()}
        return Layout(layout.mesh, {"reference": arrays}, workers=layout.workers)

    def map_forward(self, change: Callable[[Forward], Forward]) -> ReferenceModel:
        """The reference with a changed forward pass."""
        return self if self.forward is None else attrs.evolve(self, forward=change(self.forward))

    def outputs(self, leaves: Leaves, batch: Batch) -> LossInputs:
        """Its loss inputs; carry no gradient.

        Raises:
            ValueError: the batch has none, and the weights are not loaded.
        """
        cached = super().outputs(leaves, batch)
        return self.compute(leaves, batch) if cached is None else cached

    def compute(self, leaves: Leaves, batch: Batch) -> LossInputs:
        """Its loss inputs, computed even if the batch has them."""
        if not leaves:
            raise ValueError(_NO_REFERENCE)
        assert self.forward is not None
        assert self.template is not None
        model = self.forward.model(self.template, jax.lax.stop_gradient(leaves))
        return jax.lax.stop_gradient(self.forward.read(model, batch).loss_inputs)

    def as_model(
        self, policy: AbstractModel, frozen: Leaves, trainable: Leaves, reference: Leaves
    ) -> tuple[AbstractModel, Leaves] | None:
        """Its template and weights; None where they are not in the state."""
        assert self.template is not None
        return (self.template, reference) if reference else None


@attrs.frozen(eq=False)
class PolicyParts:
    """Templates and leaves from which a reference is built.

    Attributes:
        experiment: The experiment.
        published: The published network, without adapter or quantization.
        base: The policy without its adapter, quantized as the policy is.
        trainable: The policy's trainable leaves.
        compute: Dtype of activations and products.
    """

    experiment: Experiment
    published: AbstractModel
    base: AbstractModel
    trainable: Mapping[str, ParamSpec]
    compute: DTypeLike

    @property
    def common(self) -> dict[str, Any]:
        """Fields that all references have."""
        return {
            "is_precomputed": self.experiment.reference_mode == "cached",
            "is_offloaded": "reference" in self.experiment.memory.offload,
        }


def build_reference(parts: PolicyParts) -> ReferenceModel:
    """The reference of an experiment; `NoReference` where its objective has none."""
    return build(parts.experiment.reference, parts) if parts.experiment.has_reference else NoReference()


@singledispatch
def build(spec: config.Reference, parts: PolicyParts) -> ReferenceModel:
    """The reference that a spec describes; register a `Reference` of your own here."""
    name = type(spec).__name__
    raise NotRegisteredError(
        f"no reference is registered for {type(spec).__qualname__}; write\n"
        f"  from nnxdsl.program import reference\n"
        f"  @reference.build.register({name})\n"
        f"  def _(spec, parts): return reference.ReferenceModel(...)"
    )


@build.register
def _(spec: config.Initial, parts: PolicyParts) -> ReferenceModel:
    adapter, trainable = parts.experiment.adapter, parts.trainable
    if adapter is not None:
        copies = {path: leaf for path, leaf in trainable.items() if lora_math.needs_initial_copy(adapter, path)}
        if not copies:
            return AdapterOff(template=parts.base, **parts.common)
    else:
        copies = {path: attrs.evolve(leaf, dtype=jnp.dtype(parts.compute)) for path, leaf in trainable.items()}
    is_online = parts.experiment.reference_mode == "online"
    return InitialCopy(template=parts.base, arrays=copies if is_online else {}, **parts.common)


@build.register
def _(spec: config.Synced, parts: PolicyParts) -> ReferenceModel:
    # In float32 as well: updates with a small alpha would be rounded away in bfloat16.
    every_steps, mixup_alpha = spec.every_steps, spec.ref_model_mixup_alpha
    arrays = parts.trainable
    return Synced(template=parts.base, arrays=arrays, every_steps=every_steps, mixup_alpha=mixup_alpha, **parts.common)


@build.register
def _(spec: config.Checkpoint, parts: PolicyParts) -> ReferenceModel:
    arrays = parts.published.variables if parts.experiment.reference_mode == "online" else {}
    return OwnWeights(template=parts.published, arrays=arrays, **parts.common)


def to_device(tree: Any) -> Any:
    """Arrays in the device's memory."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device), tree)
