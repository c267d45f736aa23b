"""Sweeps: grids of `{path: value}` changes of one experiment, in plain Python."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import attrs

from nnxdsl.config.core.run_id import fingerprint
from nnxdsl.config.core.serialization import evolve
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.launcher import Launcher
from nnxdsl.errors import Problem, SpecError

if TYPE_CHECKING:
    from nnxdsl.trainer.sweep_result import SweepResult

Point = dict[str, object]
Direction = Literal["minimize", "maximize"]


def product(axes: Mapping[str, Sequence[object]]) -> list[Point]:
    """Every combination of the values of several paths; the last path varies fastest.

    >>> product({"a": [1, 2], "b": [3]})
    [{'a': 1, 'b': 3}, {'a': 2, 'b': 3}]

    Raises:
        SpecError: if a path has text in place of a list of values.
    """
    _check_lists(axes)
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def zipped(axes: Mapping[str, Sequence[object]]) -> list[Point]:
    """The first values of all paths, then the second ones, and so on.

    Raises:
        SpecError: if the paths have different numbers of values, or text in place of a list of them.

    >>> zipped({"a": [1, 2], "b": [3, 4]})
    [{'a': 1, 'b': 3}, {'a': 2, 'b': 4}]
    """
    _check_lists(axes)
    lengths = {path: len(values) for path, values in axes.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{path} has {length}" for path, length in lengths.items())
        raise SpecError([Problem("", f"zipped paths need as many values each: {counts}")])
    return [dict(zip(axes, values, strict=True)) for values in zip(*axes.values(), strict=True)]


def cross(*grids: Sequence[Point]) -> list[Point]:
    """Every point of each grid with every point of the others.

    Raises:
        SpecError: if two grids change the same path.
    """
    for left, right in itertools.combinations(grids, 2):
        shared = sorted({p for point in left for p in point} & {p for point in right for p in point})
        if shared:
            raise SpecError([Problem(path, "is changed by two of the crossed grids") for path in shared])
    return [dict(itertools.chain.from_iterable(p.items() for p in points)) for points in itertools.product(*grids)]


def _check_lists(axes: Mapping[str, Sequence[object]]) -> None:
    problems = [
        Problem(path, f"expected a list of values, got {values!r}; write [{values!r}]")
        for path, values in axes.items()
        if isinstance(values, str)
    ]
    if problems:
        raise SpecError(problems)


def _points(points: Iterable[Mapping[str, object]]) -> tuple[Point, ...]:
    return tuple(dict(point) for point in points)


@attrs.frozen
class Sweep:
    """A sweep: a base experiment and the changes of each point.

    Attributes:
        base: The experiment that every point changes.
        points: Changes by path.
        metric: The metric by which the results are sorted, by its name in `metrics.jsonl`; None for the first of
            `nnxdsl.sweep.results.DEFAULT_METRICS`.
        direction: Whether small or large values of the metric are better; None where its name implies it (small for a
            loss).

    Raises:
        SpecError: when built, if any point is not an experiment, naming the point.
    """

    base: Experiment
    points: Sequence[Point] = attrs.field(converter=_points)
    metric: str | None = attrs.field(default=None, kw_only=True)
    direction: Direction | None = attrs.field(default=None, kw_only=True)
    experiments: tuple[Experiment, ...] = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        built: list[Experiment] = []
        problems: list[Problem] = [] if self.points else [Problem("points", "is empty")]
        for index, point in enumerate(self.points):
            try:
                built.append(evolve(self.base, point))
            except SpecError as error:
                problems += [problem.under(f"points.{index}") for problem in error.problems]
        if self.direction not in (None, "minimize", "maximize"):
            problems.append(Problem("direction", f"expected 'minimize' or 'maximize', got {self.direction!r}"))
        if self.direction is not None and self.metric is None:
            problems.append(Problem("direction", "has no effect without a metric"))
        if problems:
            raise SpecError(problems, f"Sweep of '{self.base.name}'")
        object.__setattr__(self, "experiments", tuple(built))

    def __iter__(self) -> Iterator[Experiment]:
        return iter(self.experiments)

    def __len__(self) -> int:
        return len(self.experiments)

    @property
    def digest(self) -> str:
        """64 hex digits: a digest of the experiments in their order, but not of how they are compared."""
        return hashlib.sha256(" ".join(map(fingerprint, self.experiments)).encode()).hexdigest()

    def run(
        self,
        home: str | Path = "runs",
        *,
        launcher: Launcher | None = None,
        quiet: bool = False,
        retry_failed: bool = False,
    ) -> SweepResult:
        """Runs every point in a process of its own and returns the results; finished points are not repeated.

        An interrupt (Ctrl-C) stops the running points, with everything saved: the next call resumes them.

        Args:
            home: Directory of all runs.
            launcher: Where runs are started; None for `Launcher.Local()`, one at a time on this machine.
            quiet: Whether to print nothing.
            retry_failed: Whether points that failed before are started again.

        Raises:
            NnxdslError: Nothing can be started. A point that fails or is refused is a row of the results.
        """
        return run_sweep(self, Path(home), launcher, quiet=quiet, retry_failed=retry_failed)


def run_sweep(sweep: object, home: Path, launcher: Launcher | None, **options: bool) -> SweepResult:
    """Runs a sweep or a search by the registered function.

    Raises:
        RuntimeError: There is none.
    """
    if _runner is None:
        raise RuntimeError("sweep.run() needs the driver: import nnxdsl")
    return _runner(sweep, home, launcher, **options)


_runner: Callable[..., SweepResult] | None = None


def register_runner(run: Callable[..., SweepResult]) -> None:
    """Sets what `Sweep.run` does; the package does so, since the DSL itself knows no driver."""
    global _runner
    _runner = run
