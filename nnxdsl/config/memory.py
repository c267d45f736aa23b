"""What is traded for device memory: rematerialization, offload, attention kernels, cached reference log-probs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import attrs

from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.validators import positive
from nnxdsl.errors import Problem

OFFLOADED = Literal["optimizer", "frozen", "reference"]


Attention = Literal["auto", "dense", "chunked", "cudnn", "splash"]


@attrs.frozen(kw_only=True)
class Memory(Spec):
    """What is kept where, and what is computed again.

    Attributes:
        remat: What is kept for the backward pass; the rest is computed again. "none" computes nothing again; "products"
            keeps the outputs of linear layers, "attention" the input of each layer and what its attention mixed,
            "inputs" the input of each layer, "offload" the same in the host's memory, "full" the input of each period
            of layers. "auto" is the first of these, "offload" left out, that fits the device by the plan's estimate;
            "none" where the device's memory is not known, as on CPUs.
        logprob_tokens: The most tokens of a micro-batch whose logits may exist at one time, in parts of the vocabulary
            at that; None for as many as are quick, which is few.
        offload: Arrays that stay in the host's memory and are brought to the device when they are used: the
            optimizer's state, the frozen weights under an adapter, the reference's copy of the weights without one.
        reference: When the reference's log-probabilities are computed: "cached" once for each pair, before the first
            step, and kept beside the runs for all that ask the same; "online" at every step, with the reference's
            weights at hand. "auto" is "cached" for files of preference pairs.
        attention: What computes attention in training and evaluation. "auto" takes the fused kernel of the platform
            where it serves, else "chunked" for long rows and "dense" for short ones; a plan says which, and why.
            "dense" is one product over all slots of a row; "chunked" takes queries in blocks, each with the keys that
            it may see; "cudnn" is cuDNN's kernel for GPUs, "splash" that of Pallas for TPUs. One that is named and
            cannot serve is refused.
    """

    remat: Literal["auto", "none", "products", "attention", "inputs", "offload", "full"] = "auto"
    logprob_tokens: int | None = attrs.field(default=None, validator=positive)
    offload: tuple[OFFLOADED, ...] = ()
    reference: Literal["auto", "cached", "online"] = "auto"
    attention: Attention = "auto"

    def problems(self) -> Iterable[Problem]:
        """Each part is offloaded once."""
        for index, part in enumerate(self.offload):
            if part in self.offload[:index]:
                yield Problem(f"offload.{index}", f"{part!r} is named twice")
