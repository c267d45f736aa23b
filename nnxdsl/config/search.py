"""Hyperparameter search: spaces, samplers, pruners."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a member replaces the family's default)

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal, cast

import attrs

from nnxdsl.config.core.base import Spec, gather
from nnxdsl.config.core.codegen import render
from nnxdsl.config.core.fields import show
from nnxdsl.config.core.run_id import fingerprint
from nnxdsl.config.core.serialization import evolve, to_dict
from nnxdsl.config.core.validators import Limit, not_negative, positive
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.sweep import Direction
from nnxdsl.errors import Problem, SpecError

EVALUATED = "eval/"
"""Prefix of the names of evaluation metrics."""


@attrs.frozen(kw_only=True)
class Range(Spec):
    """A numeric search range of a path; a list of values is a categorical choice."""

    Float: ClassVar[type[Float]]
    Log: ClassVar[type[Log]]
    Int: ClassVar[type[Int]]

    low: ClassVar[float | None] = None
    """The smallest value."""
    high: ClassVar[float | None] = None
    """The largest value."""


@attrs.frozen(kw_only=True)
class Float(Range):
    """Uniform in [low, high].

    Attributes:
        low: The smallest value.
        high: The largest value.
    """

    low: float = attrs.field(kw_only=False)
    high: float = attrs.field(kw_only=False)

    def problems(self) -> Iterable[Problem]:
        """`low` must be below `high`."""
        return gather(lambda: _order(self.low, self.high))


@attrs.frozen(kw_only=True)
class Log(Range):
    """Log-uniform in [low, high]: for learning rates and other scales.

    Attributes:
        low: The smallest value.
        high: The largest value.
    """

    low: float = attrs.field(kw_only=False, validator=positive)
    high: float = attrs.field(kw_only=False, validator=positive)

    def problems(self) -> Iterable[Problem]:
        """`low` must be below `high`."""
        return gather(lambda: _order(self.low, self.high))


@attrs.frozen(kw_only=True)
class Int(Range):
    """Integers from low to high, uniform.

    Attributes:
        low: The smallest value.
        high: The largest value.
        step: The step from `low`; it must lead to `high`.
    """

    low: int = attrs.field(kw_only=False)
    high: int = attrs.field(kw_only=False)
    step: int = attrs.field(default=1, validator=positive)

    def problems(self) -> Iterable[Problem]:
        """`low` must be below `high`, and the steps must end at `high`."""
        return gather(lambda: _order(self.low, self.high), self._check_step)

    def _check_step(self) -> Iterable[Problem]:
        if self.high > self.low and (self.high - self.low) % self.step:
            yield Problem("step", f"steps of {self.step} from {self.low} do not lead to {self.high}")


def _order(low: float, high: float) -> Iterable[Problem]:
    if low >= high:
        yield Problem("high", f"expected more than low={low:g}, got {high:g}")
    elif not math.isfinite(high - low):
        yield Problem("high", "is too far from low")


@attrs.frozen(kw_only=True)
class Pruner(Spec):
    """Early stopping of runs in a search, by their evaluation metrics so far."""

    Median: ClassVar[type[Median]]
    Halving: ClassVar[type[Halving]]


@attrs.frozen(kw_only=True)
class Median(Pruner):
    """Stops a run whose best metric so far is worse than the median of the other runs at the same step.

    Attributes:
        startup_trials: Runs that must finish before any is pruned.
        warmup_steps: Steps before which no run is pruned.
    """

    startup_trials: int = attrs.field(default=5, validator=positive)
    warmup_steps: int = attrs.field(default=0, validator=not_negative)


@attrs.frozen(kw_only=True)
class Halving(Pruner):
    """Successive halving: of the runs that reach a rung, the best continue (Li et al. 2020, arXiv:1810.05934).

    Attributes:
        first_step: Steps up to the first rung.
        factor: One of `factor` runs continues at each rung, and each rung has `factor` times the steps of the one
            before.
    """

    first_step: int = attrs.field(validator=positive)
    factor: int = attrs.field(default=4, validator=Limit(at_least=2))


Axis = Range | tuple[object, ...]


def _axes(space: Mapping[str, object]) -> dict[str, Axis]:
    return {
        path: cast("Axis", tuple(cast("list[object]", axis)) if isinstance(axis, list) else axis)
        for path, axis in space.items()
    }


@attrs.frozen
class Search:
    """A hyperparameter search: a base experiment, a search space, and the metric to optimize.

    Attributes:
        base: The experiment that every trial changes.
        space: By path, a `Range` or a list of values.
        trials: Number of runs.
        metric: The metric to optimize, by its name in `metrics.jsonl`: "eval/loss", "eval/rewards/accuracies".
        direction: Whether to minimize or maximize it.
        sampler: "tpe" learns from the trials so far (Bergstra et al. 2011), "random" does not.
        pruner: Stops bad runs early; None for no pruning.
        seed: Of the sampler.

    Raises:
        SpecError: The search is invalid; lists all problems.
    """

    base: Experiment
    space: Mapping[str, Axis] = attrs.field(converter=_axes)
    trials: int = attrs.field(kw_only=True)
    metric: str = attrs.field(kw_only=True)
    direction: Direction = attrs.field(kw_only=True)
    sampler: Literal["tpe", "random"] = attrs.field(default="tpe", kw_only=True)
    pruner: Pruner | None = attrs.field(default=None, kw_only=True)
    seed: int = attrs.field(default=0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        problems = [*self._check_plain(), *self._check_space(), *self._check_figures()]
        if problems:
            raise SpecError(problems, f"Search from '{self.base.name}'")

    def __len__(self) -> int:
        return self.trials

    @property
    def digest(self) -> str:
        """64 hex digits: a digest of everything that determines the trials, except their number."""
        fields = {
            "base": fingerprint(self.base),
            "space": {path: axis_to_json(axis) for path, axis in self.space.items()},
            "figure": [self.metric, self.direction],
            "how": [self.sampler, self.seed, None if self.pruner is None else to_dict(self.pruner)],
        }
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    def _check_plain(self) -> Iterable[Problem]:
        for name, least in (("trials", 1), ("seed", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                yield Problem(name, f"expected a whole number >= {least}, got {show(value)}")
        for name, choices in (("direction", ("minimize", "maximize")), ("sampler", ("tpe", "random"))):
            if getattr(self, name) not in choices:
                wanted = " or ".join(map(repr, choices))
                yield Problem(name, f"expected {wanted}, got {show(getattr(self, name))}")

    def _check_space(self) -> Iterable[Problem]:
        if not self.space:
            yield Problem("space", "is empty")
        for path, axis in cast("Mapping[str, object]", self.space).items():
            if not isinstance(axis, Range | tuple):
                yield Problem(f"space.{path}", f"expected a Range or a list of values, got {show(axis)}")
                continue
            values = cast("tuple[object, ...]", axis) if isinstance(axis, tuple) else (axis.low, axis.high)
            if not values:
                yield Problem(f"space.{path}", "has no values")
            problems: dict[str, Problem] = {}
            for value in values:
                try:
                    evolve(self.base, {path: value})
                except SpecError as error:
                    problems |= {str(problem): problem for problem in error.problems}
            yield from (problem.under("space") for problem in problems.values())

    def _check_figures(self) -> Iterable[Problem]:
        evaluation = self.base.evaluation
        is_evaluated = evaluation is not None and (evaluation.data is not None or self.base.test_size is not None)
        if str(self.metric).startswith(EVALUATED) and not is_evaluated:
            yield Problem("metric", f"{self.metric!r} needs an evaluation with data, and the experiment has none")
        if self.pruner is not None and not str(self.metric).startswith(EVALUATED):
            yield Problem("pruner", f"needs an evaluation metric ({EVALUATED}...), but the metric is {self.metric!r}")
        elif self.pruner is not None and is_evaluated:
            assert evaluation is not None
            every, steps = evaluation.every_steps, self.base.steps
            if every is None or (steps is not None and every >= steps):
                end = f"{steps} steps" if steps is not None else "the run"
                yield Problem("pruner", f"has no effect: there is no evaluation before the end of {end}")


def axis_to_json(axis: Axis) -> object:
    """A range or a choice as plain JSON values; values of a choice as Python source."""
    return to_dict(axis) if isinstance(axis, Range) else [render(value) for value in axis]
