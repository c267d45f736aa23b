"""Sources of initial weights; `nnxdsl/weights/sources.py` opens them."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a member replaces the family's default)

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar, cast

import attrs

from nnxdsl.config.core.base import Spec, declared, gather
from nnxdsl.config.core.validators import filled
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.config import weights as members
    from nnxdsl.config.experiment import Experiment


@attrs.frozen(kw_only=True)
class Weights(Spec):
    """The initial weights of a model."""

    Random: ClassVar[type[members.Random]]
    HF: ClassVar[type[members.HF]]
    Checkpoint: ClassVar[type[members.Checkpoint]]
    From: ClassVar[type[members.From]]
    PEFT: ClassVar[type[members.PEFT]]
    Merged: ClassVar[type[members.Merged]]

    path: ClassVar[str | None] = None
    """Where the files are, if they are files."""
    allow_non_finite: ClassVar[bool] = False
    """Whether files that hold NaN or infinity are loaded."""


@attrs.frozen(kw_only=True)
class Random(Weights):
    """Drawn from the experiment's seed."""


@attrs.frozen(kw_only=True)
class HF(Weights):
    """A directory in the format of the Hugging Face Hub: `config.json` and safetensors, one file or many.

    Attributes:
        path: The directory, or a repository's name on the Hub (`google/gemma-3-1b-it`), which is downloaded.
        allow_non_finite: Whether weights that hold NaN or infinity are loaded as they are; else they are refused, with
            the names of such tensors.
    """

    fields_added_later: ClassVar[frozenset[str]] = frozenset({"allow_non_finite"})

    path: str = attrs.field(kw_only=False, validator=filled)
    allow_non_finite: bool = False


@attrs.frozen(kw_only=True)
class Checkpoint(Weights):
    """The checkpoint of an earlier run; its adapter is merged into the base, unless another adapter continues it.

    Attributes:
        path: The run's directory (its newest good checkpoint is used), or one step of it:
            `runs/NAME-ID/checkpoints/STEP`; or weights alone, as `nnxdsl convert --to checkpoint` writes them.
        allow_non_finite: Whether arrays that hold NaN or infinity are loaded as they are; else they are refused.
    """

    fields_added_later: ClassVar[frozenset[str]] = frozenset({"allow_non_finite"})

    path: str = attrs.field(kw_only=False, validator=filled)
    allow_non_finite: bool = False


@attrs.frozen(kw_only=True)
class From(Weights):
    """The final weights of another experiment, which is run first unless it has finished before.

    Attributes:
        experiment: The experiment to start from.
    """

    experiment: Experiment = attrs.field(kw_only=False)


@attrs.frozen(kw_only=True)
class PEFT(Weights):
    """An adapter in PEFT's format, for `Adapter.LoRA(start=...)`; it is no model by itself.

    Attributes:
        path: The directory, with `adapter_config.json` and `adapter_model.safetensors`.
        allow_non_finite: Whether an adapter that holds NaN or infinity is loaded as it is; else it is refused.
    """

    fields_added_later: ClassVar[frozenset[str]] = frozenset({"allow_non_finite"})

    path: str = attrs.field(kw_only=False, validator=filled)
    allow_non_finite: bool = False


@attrs.frozen(kw_only=True)
class Merged(Weights):
    """A model with adapters merged into it, in float32: `W + sum of coefficient (V - W)`, V a weight with one.

    Attributes:
        base: The model's own weights, on which the adapters were trained.
        adapters: A directory of PEFT's (`Weights.PEFT`) or one of our runs (`Weights.Checkpoint`, `Weights.From`) each.
        coefficients: A number for each adapter; 1 merges it as it is.
    """

    base: Weights = attrs.field(kw_only=False)
    adapters: tuple[Weights, ...]
    coefficients: tuple[float, ...]

    def problems(self) -> Iterable[Problem]:
        """The base is a model, the others are adapters, and each has a coefficient."""
        return gather(self._check_base, self._check_adapters, self._check_coefficients)

    def _check_base(self) -> Iterator[Problem]:
        if isinstance(self.base, PEFT | Merged):
            yield Problem("base", f"{type(self.base).__qualname__} is not what adapters are trained on; name the model")

    def _check_adapters(self) -> Iterator[Problem]:
        if not self.adapters:
            yield Problem("adapters", "is empty; use the base alone")
        for index, adapter in enumerate(self.adapters):
            if not isinstance(adapter, ADAPTERS):
                yield Problem(f"adapters.{index}", f"{type(adapter).__qualname__} is no adapter; {ADAPTER_WEIGHTS} are")

    def _check_coefficients(self) -> Iterator[Problem]:
        if len(self.coefficients) != len(self.adapters):
            yield Problem("coefficients", f"{len(self.coefficients)} of them for {len(self.adapters)} adapters")
        for index, coefficient in enumerate(self.coefficients):
            if coefficient == 0:
                yield Problem(f"coefficients.{index}", "0.0 has no effect; leave the adapter out")


ADAPTERS = PEFT | Checkpoint | From
"""Weights that may be an adapter."""
ADAPTER_WEIGHTS = "Weights.PEFT, Weights.Checkpoint and Weights.From"


def dependencies_of(experiment: Experiment) -> list[Experiment]:
    """The experiments whose final weights (`Weights.From`) an experiment starts from, without duplicates.

    They give the weights of its model, its adapter, its reference or its teacher.
    """
    return list({one.id: one for one in _dependencies_in(experiment)}.values())


def _dependencies_in(value: object) -> Iterator[Experiment]:
    if isinstance(value, From):
        yield value.experiment
    elif isinstance(value, Spec):
        for name in declared(type(value)):
            yield from _dependencies_in(getattr(value, name))
    elif isinstance(value, tuple):
        for item in cast("tuple[object, ...]", value):
            yield from _dependencies_in(item)


def parts(weights: Weights | None) -> tuple[Weights, ...]:
    """The weights themselves, or what is merged in them, the model's own first; nothing of None."""
    if isinstance(weights, Merged):
        return weights.base, *weights.adapters
    return () if weights is None else (weights,)
