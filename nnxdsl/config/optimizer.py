"""Optimizers; `nnxdsl/optim/optimizers.py` builds them with optax."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Literal

import attrs

from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.validators import not_negative, positive, probability
from nnxdsl.config.schedule import Schedule
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.config import optimizer as members
    from nnxdsl.config.experiment import Experiment

MomentDtype = Literal["float32", "bfloat16"]
"""Dtype in which moments are stored between steps; they are computed in float32."""

MAX_BF16_DECAY = 1 - 2**-7
"""The largest decay of a moment in bfloat16: a change of less than 1/256 of a value is rounded away."""


@attrs.frozen(kw_only=True)
class Optimizer(Spec):
    """The update rule of the trainable parameters.

    Attributes:
        schedule: The learning rate.
        max_grad_norm: Gradients with a larger global norm are scaled down to it; None leaves them as they are.
        weight_decay: Decay per unit of learning rate; norm scales, biases and other vectors are not decayed.
        undecayed: Patterns for the paths of other arrays that are not decayed either, such as "embed".
    """

    AdamW: ClassVar[type[members.AdamW]]
    SGD: ClassVar[type[members.SGD]]
    Lion: ClassVar[type[members.Lion]]
    Adafactor: ClassVar[type[members.Adafactor]]
    Muon: ClassVar[type[members.Muon]]

    schedule: Schedule
    max_grad_norm: float | None = attrs.field(default=1.0, validator=positive)


@attrs.frozen(kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101).

    Attributes:
        b1: Decay of the running mean of gradients.
        b2: Decay of the running mean of squared gradients.
        eps: Added to the root of the latter.
        mu_dtype: Dtype of the mean of gradients.
        nu_dtype: Dtype of the mean of squared gradients.
    """

    fields_added_later: ClassVar[frozenset[str]] = frozenset({"undecayed", "mu_dtype", "nu_dtype"})

    b1: float = attrs.field(default=0.9, validator=probability)
    b2: float = attrs.field(default=0.999, validator=probability)
    eps: float = attrs.field(default=1e-8, validator=positive)
    weight_decay: float = attrs.field(default=0.0, validator=not_negative)
    undecayed: tuple[str, ...] = ()
    mu_dtype: MomentDtype = "float32"
    nu_dtype: MomentDtype = "float32"

    def problems(self) -> Iterable[Problem]:
        """bfloat16 moments need a small enough decay; `undecayed` needs a weight decay."""
        yield from _moment_dtype_problems("mu_dtype", self.mu_dtype, "b1", self.b1)
        yield from _moment_dtype_problems("nu_dtype", self.nu_dtype, "b2", self.b2)
        yield from _undecayed_problems(self.undecayed, self.weight_decay)


@attrs.frozen(kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent.

    Attributes:
        momentum: Decay of the velocity; None keeps none.
    """

    momentum: float | None = attrs.field(default=None, validator=probability)


@attrs.frozen(kw_only=True)
class Lion(Optimizer):
    """The sign of a mean of gradients, with decoupled weight decay (Chen et al. 2023, arXiv:2302.06675).

    Every element moves by the learning rate, which is therefore to be 3 to 10 times smaller than AdamW's, and the decay
    as much larger.

    Attributes:
        b1: Weight of the running mean, beside the gradient itself, in the mean whose sign is taken.
        b2: Decay of the running mean of gradients.
        mu_dtype: Dtype of the mean of gradients.
    """

    b1: float = attrs.field(default=0.9, validator=probability)
    b2: float = attrs.field(default=0.99, validator=probability)
    weight_decay: float = attrs.field(default=0.0, validator=not_negative)
    undecayed: tuple[str, ...] = ()
    mu_dtype: MomentDtype = "float32"

    def problems(self) -> Iterable[Problem]:
        """bfloat16 moments need a small enough decay; `undecayed` needs a weight decay."""
        yield from _moment_dtype_problems("mu_dtype", self.mu_dtype, "b2", self.b2)
        yield from _undecayed_problems(self.undecayed, self.weight_decay)


@attrs.frozen(kw_only=True)
class Adafactor(Optimizer):
    """Adaptive rates from means of squared gradients by row and by column (Shazeer & Stern 2018, arXiv:1804.04235).

    Each matrix is one of its own, however many layers and experts are stacked in an array, and keeps a row and a column
    where Adam keeps a matrix. There is no mean of gradients.

    Attributes:
        decay_exponent: The means' decay at step t (from 1) is `1 - t ** -decay_exponent`.
        max_update_rms: Updates of a weight with a larger root mean square are scaled down to it; None leaves them.
        scale: What the learning rate is a part of: "weights", the root mean square of the weight that is updated (at
            least 0.001), or "one".
        min_factored: Matrices of which both axes are as long or longer keep rows and columns, others all elements.
    """

    decay_exponent: float = attrs.field(default=0.8, validator=positive)
    max_update_rms: float | None = attrs.field(default=1.0, validator=positive)
    scale: Literal["weights", "one"] = "weights"
    min_factored: int = attrs.field(default=128, validator=positive)
    weight_decay: float = attrs.field(default=0.0, validator=not_negative)
    undecayed: tuple[str, ...] = ()

    def problems(self) -> Iterable[Problem]:
        """`undecayed` needs a weight decay."""
        return _undecayed_problems(self.undecayed, self.weight_decay)


@attrs.frozen(kw_only=True)
class Muon(Optimizer):
    """Momentum made orthogonal by Newton-Schulz steps (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon).

    Weights of linear layers, of routers and of adapters are matrices, each of its own, however many layers and experts
    are stacked in an array. Embeddings, output heads, norms, biases and all else is updated by AdamW.

    Attributes:
        momentum: Decay of the running mean of gradients, which is Nesterov's.
        iterations: Newton-Schulz steps.
        update_rms: Root mean square of each matrix's update in units of the learning rate, so that a rate for AdamW
            serves (Liu et al. 2025, arXiv:2502.16982); None scales by `sqrt(max(1, outputs / inputs))` as Jordan does.
        b1: Of AdamW, decay of the running mean of gradients.
        b2: Of AdamW, decay of the running mean of squared gradients.
        eps: Of AdamW, added to the root of the latter.
        by_adamw: Patterns for the paths of matrices that AdamW updates as well, such as "router".
        adamw_rate: AdamW's learning rate as a part of the schedule's.
        mu_dtype: Dtype of means of gradients.
        max_attention_logit: Threshold of QK-clip, Kimi K2's tau (arXiv:2507.20534, which has 100): after an update,
            query and key projections of the heads with a larger attention score in the step are scaled down to it;
            None leaves them.
    """

    fields_added_later: ClassVar[frozenset[str]] = frozenset({"max_attention_logit"})

    momentum: float = attrs.field(default=0.95, validator=probability)
    iterations: int = attrs.field(default=5, validator=positive)
    update_rms: float | None = attrs.field(default=0.2, validator=positive)
    b1: float = attrs.field(default=0.9, validator=probability)
    b2: float = attrs.field(default=0.95, validator=probability)
    eps: float = attrs.field(default=1e-8, validator=positive)
    by_adamw: tuple[str, ...] = ()
    adamw_rate: float = attrs.field(default=1.0, validator=positive)
    weight_decay: float = attrs.field(default=0.0, validator=not_negative)
    undecayed: tuple[str, ...] = ()
    mu_dtype: MomentDtype = "float32"
    max_attention_logit: float | None = attrs.field(default=None, validator=positive)

    def problems(self) -> Iterable[Problem]:
        """bfloat16 moments need a small enough decay; `undecayed` needs a weight decay."""
        yield from _moment_dtype_problems("mu_dtype", self.mu_dtype, "momentum", self.momentum)
        yield from _moment_dtype_problems("mu_dtype", self.mu_dtype, "b1", self.b1)
        yield from _undecayed_problems(self.undecayed, self.weight_decay)

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """QK-clip rescales the model's own weights, by the scores of all rows of a step."""
        if self.max_attention_logit is None:
            return
        path = "optimizer.max_attention_logit"
        if experiment.adapter is not None:
            name = type(experiment.adapter).__qualname__
            message = f"rescales the weights of queries and keys, which are frozen under adapter={name}"
            yield Problem(path, f"{message}; unset it, or train all weights with adapter=None")
        if experiment.quantization is not None:
            name = type(experiment.quantization).__qualname__
            yield Problem(path, f"attention scores are not recorded with quantization={name}; unset one of them")
        if experiment.outer is not None:
            yield Problem(path, "each worker of outer= has its own weights and scores; unset one of them")
        if experiment.mesh.stage > 1:
            yield Problem(path, f"attention scores are not recorded in mesh.stage={experiment.mesh.stage}; set 1")
        if experiment.mtp_loss_weight:
            yield Problem(path, "the layer of objective.mtp_loss_weight is not rescaled; set that to 0")


def _moment_dtype_problems(name: str, dtype: MomentDtype, decay_name: str, decay: float) -> Iterable[Problem]:
    if dtype == "bfloat16" and decay > MAX_BF16_DECAY:
        message = (
            f"a mean in 'bfloat16' cannot follow {decay_name}={decay}, whose changes are rounded away; use 'float32', "
            f"or {decay_name} of at most {MAX_BF16_DECAY:.3f}"
        )
        yield Problem(name, message)


def _undecayed_problems(patterns: tuple[str, ...], weight_decay: float) -> Iterable[Problem]:
    if patterns and weight_decay == 0:
        yield Problem("undecayed", "has no effect with weight_decay=0")
