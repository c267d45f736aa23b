"""Adapters: small trainable additions to a frozen model; `nnxdsl/adapters/lora.py` applies them."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a member replaces the family's default)

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import attrs

from nnxdsl.config.batching import Packed
from nnxdsl.config.core.base import Spec, gather
from nnxdsl.config.core.validators import positive, probability
from nnxdsl.config.weights import ADAPTER_WEIGHTS, ADAPTERS, From, Weights
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.config.experiment import Experiment

if TYPE_CHECKING:
    from nnxdsl.config import adapter as members

Scaling = Literal["rank", "sqrt_rank"]


@attrs.frozen(kw_only=True)
class Adapter(Spec):
    """An adapter, which is trained while the model's own weights are frozen."""

    LoRA: ClassVar[type[members.LoRA]]
    DoRA: ClassVar[type[members.DoRA]]

    start: ClassVar[Weights | None] = None
    """Where its arrays come from; None for new ones."""
    dropout: ClassVar[float] = 0.0
    """Probability with which an input is left out in a training step."""
    targets: ClassVar[tuple[str, ...]] = ()
    """Which linear layers it is added to."""

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """It freezes the model."""
        if experiment.frozen:
            message = f"has no effect: {type(self).__qualname__} leaves all of the model frozen"
            yield Problem("frozen", message)


@attrs.frozen(kw_only=True)
class LowRank(Adapter):
    """A low-rank adapter: adds the product of two matrices A and B to a weight.

    Attributes:
        rank: Inner dimension of A and B.
        alpha: Scale; the update is multiplied by alpha / rank.
        targets: Which linear layers: names of modules or of groups of them ("attention", "mlp", "query", "mlp.up"), or
            names of transformers ("q_proj"); the default is all of them but the output head, as "all-linear" of PEFT.
        scaling: What alpha is divided by: "rank", or "sqrt_rank" so that updates keep their size at high ranks (rsLoRA,
            Kalajdzievski 2023, arXiv:2312.03732).
        dropout: Probability with which an input of `x A B` is left out in a training step; the rest is scaled up.
        ranks: Other ranks for some of the targets, such as `(("mlp.down", 32),)`; the first that names a layer counts.
        alphas: Other values of alpha for some of the targets, in the same way.
        start: Where A and B come from, to continue training an adapter: a directory of PEFT's, or one of our runs. The
            reference is then that adapter as it was. None for a new one.
    """

    is_base: ClassVar[bool] = True

    rank: int = attrs.field(default=16, validator=positive)
    alpha: float = attrs.field(default=32.0, validator=positive)
    targets: tuple[str, ...] = ("attention", "mlp")
    scaling: Scaling = "rank"
    dropout: float = attrs.field(default=0.0, validator=probability)
    ranks: tuple[tuple[str, int], ...] = ()
    alphas: tuple[tuple[str, float], ...] = ()
    start: Weights | None = None

    def problems(self) -> Iterable[Problem]:
        """Targets are not empty and unique; ranks are above 0; `start` is an adapter."""
        return gather(
            lambda: target_problems(self.targets),
            lambda: _pattern_problems("ranks", self.ranks),
            lambda: _pattern_problems("alphas", self.alphas),
            lambda: _start_problems(self.start),
        )

    def identity_values(self) -> Mapping[str, object]:
        """Layers by our names, whichever they were given by."""
        return {
            "targets": our_names(self.targets),
            "ranks": _by_our_names(self.ranks),
            "alphas": _by_our_names(self.alphas),
        }

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """Dropout works with the batching, and the settings equal those of the adapter in `start`."""
        return gather(
            lambda: super(LowRank, self).check(experiment),
            lambda: self._check_packed(experiment),
            lambda: self._check_stages(experiment),
            lambda: self._check_start(experiment),
        )

    def _check_packed(self, experiment: Experiment) -> Iterable[Problem]:
        if self.dropout and isinstance(experiment.batching, Packed):
            yield Problem("adapter.dropout", DROPOUT_OF_PACKED.format(self.dropout))

    def _check_stages(self, experiment: Experiment) -> Iterable[Problem]:
        if self.dropout and experiment.mesh.stage > 1:
            yield Problem("adapter.dropout", "is not implemented in the stages of a pipeline; set 0.0, or mesh.stage=1")

    def _check_start(self, experiment: Experiment) -> Iterable[Problem]:
        if isinstance(self.start, From):
            yield from _start_differences(self, self.start.experiment, experiment)


@attrs.frozen(kw_only=True)
class LoRA(LowRank):
    """Low-rank adaptation (Hu et al. 2021, arXiv:2106.09685).

    `y = x W + (alpha / rank) x A B`, with A drawn He-uniform and B zero, so that training starts at the model itself.
    A and B are float32.

    Its fields are those of `LowRank`.
    """

    fields_added_later: ClassVar[frozenset[str]] = frozenset({"scaling", "dropout", "ranks", "alphas", "start"})


@attrs.frozen(kw_only=True)
class DoRA(LowRank):
    """Weight-decomposed low-rank adaptation (Liu et al. 2024, arXiv:2402.09353): separate direction and magnitude.

    `y = (m / |V|) x V` with `V = W + (alpha / rank) A B`, where `|V|` is the norm of V's weights for each output, taken
    as a constant in gradients (section 4.3 of the paper, and PEFT). The magnitude m, one number for each output, starts
    at `|W|`, so that training starts at the model itself. A, B and m are float32.

    Its fields are those of `LowRank`.

    Attributes:
        start: Where A, B and m come from, to continue training an adapter: a directory of PEFT's, or one of our runs.
            The reference is then that adapter as it was. None for a new one.
    """


HUB_NAMES = {
    "all-linear": ("attention", "mlp"),
    "q_proj": ("attention.query",),
    "k_proj": ("attention.key",),
    "v_proj": ("attention.value",),
    "qkv_proj": ("attention.query", "attention.key", "attention.value"),
    "o_proj": ("attention.output",),
    "out_proj": ("attention.output",),
    "q_a_proj": ("attention.query_down",),
    "q_b_proj": ("attention.query_up",),
    "kv_a_proj_with_mqa": ("attention.key_value_down",),
    "kv_b_proj": ("attention.key_value_up",),
    "in_proj": ("attention.inputs",),
    "in_proj_qkv": ("attention.inputs",),
    "in_proj_qkvz": ("attention.inputs",),
    "in_proj_ba": ("attention.rates",),
    "in_proj_a": ("attention.decay",),
    "a_proj": ("attention.decay",),
    "in_proj_b": ("attention.rate",),
    "b_proj": ("attention.rate",),
    "in_proj_z": ("attention.output_gate",),
    "g_proj": ("attention.output_gate",),
    "gate_proj": ("gate",),
    "up_proj": ("up",),
    "gate_up_proj": ("gate", "up"),
    "down_proj": ("down",),
}
"""Names of PEFT and of transformers' linear layers, and ours; those of MLPs are also those of experts."""


def named(target: str, path: str) -> bool:
    """Whether a target such as "attention", "mlp.up" or "up_proj" names the module at a path, or one around it."""
    return any(f".{name}." in f".{path}." for name in HUB_NAMES.get(target, (target,)))


def our_names(targets: Iterable[str]) -> tuple[str, ...]:
    """Targets with names of PEFT and transformers replaced by ours, each once."""
    return tuple(dict.fromkeys(name for target in targets for name in HUB_NAMES.get(target, (target,))))


def _by_our_names(pattern: tuple[tuple[str, float], ...]) -> tuple[tuple[str, float], ...]:
    """A pattern over `our_names`; the first value of a name counts."""
    first = {name: value for target, value in reversed(pattern) for name in our_names([target])}
    return tuple((name, first[name]) for name in our_names(target for target, _ in pattern))


def rank_at(adapter: LowRank, path: str) -> int:
    """The rank at the linear layer of a dotted path."""
    return next((rank for target, rank in adapter.ranks if named(target, path)), adapter.rank)


def alpha_at(adapter: LowRank, path: str) -> float:
    """Alpha at the linear layer of a dotted path."""
    return next((alpha for target, alpha in adapter.alphas if named(target, path)), adapter.alpha)


def scale_at(adapter: LowRank, path: str) -> float:
    """What the product A B is multiplied by at the linear layer of a dotted path."""
    rank = rank_at(adapter, path)
    return alpha_at(adapter, path) / (rank if adapter.scaling == "rank" else math.sqrt(rank))


def target_problems(targets: tuple[str, ...]) -> Iterable[Problem]:
    """Problems of a tuple of module names that need no model."""
    if not targets:
        yield Problem("targets", "names no module; the usual choice is ('attention', 'mlp')")
    for index, target in enumerate(targets):
        if not target.strip():
            yield Problem(f"targets.{index}", "is empty")
        elif target in targets[:index]:
            yield Problem(f"targets.{index}", f"'{target}' is named twice")


def _pattern_problems(field: str, pattern: tuple[tuple[str, float], ...]) -> Iterator[Problem]:
    names = [target for target, _ in pattern]
    for index, (target, value) in enumerate(pattern):
        if not target.strip():
            yield Problem(f"{field}.{index}.0", "is empty")
        elif target in names[:index]:
            yield Problem(f"{field}.{index}.0", f"'{target}' is named twice, and the first counts")
        if value <= 0:
            yield Problem(f"{field}.{index}.1", f"expected {positive.describe()}, got {value!r}")


def _start_problems(start: Weights | None) -> Iterator[Problem]:
    if start is not None and not isinstance(start, ADAPTERS):
        kind = type(start).__qualname__
        yield Problem("start", f"{kind} gives a model's weights; an adapter's are given by {ADAPTER_WEIGHTS}")


SAME = ("rank", "alpha", "targets", "scaling", "ranks", "alphas")
"""Fields in which an adapter must equal the one that it continues."""


DROPOUT_OF_PACKED = (
    "{} cannot be drawn in packed batches: masks are keyed by row and position, and the mesh decides which rows "
    "Batching.Packed puts side by side; set batching=Batching.Padded() or batching=Batching.Bucketed(), which compute "
    "the same objective with this dropout, or adapter.dropout=0.0, which keeps packed batches and trains without "
    "dropout"
)


def adapter_differences(ours: LowRank, theirs: LowRank) -> Iterator[Problem]:
    """The differences between an adapter and the one that it continues."""
    if type(ours) is not type(theirs):
        message = f"expected {type(theirs).__qualname__}, which adapter.start holds, got {type(ours).__qualname__}"
        yield Problem("adapter", message)
    fields, other = (
        {name: getattr(one, name) for name in SAME} | dict(one.identity_values()) for one in (ours, theirs)
    )
    for name in SAME:
        if fields[name] != other[name]:
            wanted, actual = getattr(theirs, name), getattr(ours, name)
            message = f"expected {wanted!r}, which adapter.start was trained with, got {actual!r}"
            yield Problem(f"adapter.{name}", message)


def _start_differences(adapter: LowRank, earlier: Experiment, experiment: Experiment) -> Iterator[Problem]:
    if not isinstance(earlier.adapter, LowRank):
        yield Problem("adapter.start", f"{earlier.name} trains all weights and has no adapter; use model.weights")
        return
    yield from adapter_differences(adapter, earlier.adapter)
    if earlier.model.weights != experiment.model.weights:
        message = f"its adapter belongs to {earlier.model.weights!r}, not to model.weights; both must be the same"
        yield Problem("adapter.start", message)
