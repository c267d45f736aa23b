"""Memory: rematerialization, offload, attention kernels, cached reference log-probs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal, get_args

import attrs

from nnxdsl.config.core.base import Spec, gather
from nnxdsl.config.core.validators import positive
from nnxdsl.config.objectives.reference import Initial
from nnxdsl.errors import Problem, nearest

if TYPE_CHECKING:
    from nnxdsl.config.experiment import Experiment

OFFLOADED = Literal["optimizer", "frozen", "reference"]


AttentionKernel = Literal["auto", "dense", "chunked", "cudnn", "splash"]


@attrs.frozen(kw_only=True)
class Memory(Spec):
    """Rematerialization, offload, attention kernels and the cache of reference log-probs.

    Attributes:
        remat: What is kept for the backward pass; the rest is computed again. "none" computes nothing again; "products"
            keeps the outputs of linear layers, "attention" the input of each layer and what its attention mixed,
            "inputs" the input of each layer, "offload" the same in the host's memory, "full" the input of each period
            of layers. "auto" is the first of these, "offload" left out, that fits the device by the plan's estimate;
            "none" where the device's memory is not known, as on CPUs.
        logprob_tokens: Maximum number of tokens of a micro-batch whose logits are in memory at once, in tiles of the
            vocabulary; None for the smallest number that is fast.
        offload: Arrays that stay in the host's memory and are brought to the device when they are used: the
            optimizer's state, the frozen weights under an adapter, the reference's copy of the weights without one.
        reference: When the reference's log-probabilities are computed: "cached" once for each pair, before the first
            step, and cached beside the runs; "online" at every step, with the reference's weights in memory. "auto" is
            "cached" for files of preference pairs.
        attention: What computes attention in training and evaluation. "auto" takes the fused kernel of the platform
            where it serves, else "chunked" for long rows and "dense" for short ones; the plan shows which, and why.
            "dense" is one product over all slots of a row; "chunked" takes queries in blocks, each with the keys that
            it may see; "cudnn" is cuDNN's kernel for GPUs, "splash" that of Pallas for TPUs; `module:Class` is one of
            another package, a subclass of `nnxdsl.models.attention.kernel.AttentionKernel`, imported where that is
            allowed (see `nnxdsl.allow_imports`). One that is named and cannot serve is refused.
    """

    remat: Literal["auto", "none", "products", "attention", "inputs", "offload", "full"] = "auto"
    logprob_tokens: int | None = attrs.field(default=None, validator=positive)
    offload: tuple[OFFLOADED, ...] = ()
    reference: Literal["auto", "cached", "online"] = "auto"
    attention: AttentionKernel | str = "auto"

    def problems(self) -> Iterable[Problem]:
        """Each part is offloaded once, and attention is computed by a kernel or an import."""
        names = get_args(AttentionKernel)
        if self.attention not in names and self.attention.count(":") != 1:
            expected = f"expected one of {', '.join(map(repr, names))}, or module:Class of another attention kernel"
            yield Problem("attention", f"{expected}, got {self.attention!r}{nearest(self.attention, names)}")
        for index, part in enumerate(self.offload):
            if part in self.offload[:index]:
                yield Problem(f"offload.{index}", f"{part!r} is named twice")

    def import_names(self) -> Mapping[str, str]:
        """The attention kernel of another package."""
        return {"attention": self.attention} if ":" in self.attention else {}

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """What is offloaded exists, and the reference can be computed in the way that is set."""
        return gather(lambda: self._check_reference(experiment), lambda: self._check_offload(experiment))

    def _check_reference(self, experiment: Experiment) -> Iterable[Problem]:
        if self.reference == "auto":
            return
        objective, reference = experiment.objective, experiment.reference
        name, kind = type(objective).__qualname__, type(reference).__qualname__
        if not objective.needs_reference:
            yield Problem("memory.reference", f"{self.reference!r} has no effect: {name} has no reference")
        elif not reference.is_model:
            yield Problem("memory.reference", f"{self.reference!r} has no effect: {kind} is no model")
        elif self.reference == "cached" and not reference.is_constant:
            yield Problem("memory.reference", f"{kind} changes in training, so it cannot be cached; use 'online'")
        elif self.reference == "cached" and objective.batch_kind not in ("pairs", "feedback"):
            message = (
                f"reference log-probs can only be cached for preference pairs, {name} reads {objective.batch_kind}"
            )
            yield Problem("memory.reference", f"{message}; use 'online'")

    def _check_offload(self, experiment: Experiment) -> Iterable[Problem]:
        idle: dict[str, str] = {}
        if experiment.adapter is None and not experiment.frozen:
            idle["frozen"] = "all weights are trained"
        if not experiment.has_reference:
            idle["reference"] = f"{type(experiment.objective).__qualname__} has no reference"
        elif experiment.adapter is not None and isinstance(experiment.reference, Initial):
            idle["reference"] = "the adapter's base is the reference, there is no copy"
        elif experiment.reference_mode == "cached":
            idle["reference"] = "its log-probs are precomputed; add memory.reference='online' to load its weights"
        for index, part in enumerate(self.offload):
            if part in idle:
                yield Problem(f"memory.offload.{index}", f"{part!r} has no effect: {idle[part]}")
