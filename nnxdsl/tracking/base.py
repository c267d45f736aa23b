"""What a tracker is, what it is opened with, and which class writes to which service."""

from __future__ import annotations

import abc
import functools
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from nnxdsl.config.recording.tracking import Tracking
from nnxdsl.errors import NotRegisteredError, Problem, join

End = Literal["finished", "stopped", "failed", "killed"]
"""How a run ended: "stopped" to be resumed, "killed" without a word."""


@attrs.frozen
class TrackedRun:
    """A run as a tracker sees it.

    Attributes:
        id: Of the run: the name of its directory.
        files: Directory inside the run's own, for files of trackers.
        experiment: The experiment as JSON.
        first_step: The first step that this tracker is given from now on; 0 in the first attempt.
        saved: What the tracker wrote here when the run was first opened, such as the service's own id of it; empty in
            the first attempt. What is in it after opening is stored.
    """

    id: str
    files: Path
    experiment: Mapping[str, Any]
    first_step: int
    saved: dict[str, str]

    def settings(self) -> dict[str, Any]:
        """Every setting of the experiment by its dotted path."""
        return dict(_leaves(self.experiment, ""))


class Tracker(abc.ABC):
    """Writes the metrics of one run to a service. What any method raises is a warning, and the end of this tracker.

    A third party's is one class, registered with `@open_tracker.register(MyTracking)` and called with the settings, an
    object of `MyTracking`, and a `TrackedRun`. Its module is imported in the process that writes to the trackers.
    """

    @abc.abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a training step or of an evaluation, in the order of steps and each once.

        Args:
            step: The step; an evaluation comes before the training step of the same number.
            metrics: Numbers by name, which may be NaN or infinite; those of evaluations begin with "eval/".
        """

    def flush(self) -> None:  # noqa: B027 - not every tracker has something to do
        """Hands over what `log` has taken; called after every few rows, whose steps are not given again after it."""

    def finish(self, end: End) -> None:  # noqa: B027
        """Ends the tracked run, or this attempt at it; called once, after all rows.

        Args:
            end: How the run ended.
        """


@functools.singledispatch
def open_tracker(settings: Tracking, run: TrackedRun) -> Tracker:
    """Opens the tracker of some settings; register the class for a `Tracking` of your own here.

    Args:
        settings: Where to write.
        run: The run, in its first attempt or in a later one.
    """
    raise _not_registered(type(settings))


def require_registered(cls: type[Tracking]) -> None:
    """Refuses settings that no tracker takes.

    Raises:
        NotRegisteredError: No class is registered for them.
    """
    if open_tracker.dispatch(cls) is open_tracker.dispatch(Tracking):
        raise _not_registered(cls)


def problems(tracking: Sequence[Tracking]) -> Iterator[Problem]:
    """Trackers whose package is not installed; paths from the experiment.

    Raises:
        NotRegisteredError: No class is registered for a third party's settings.
    """
    for index, settings in enumerate(tracking):
        cls = type(settings)
        require_registered(cls)
        if cls.library and importlib.util.find_spec(cls.library) is None:
            package = f"'nnxdsl[{cls.extra}]'" if cls.extra else cls.library
            message = f"{cls.__qualname__} needs {cls.library}, which is not installed: pip install {package}"
            yield Problem(f"tracking.{index}", message)


def _not_registered(cls: type[Tracking]) -> NotRegisteredError:
    return NotRegisteredError(
        f"no tracker is registered for {cls.__qualname__}; write\n"
        f"  from nnxdsl.tracking import Tracker, open_tracker\n"
        f"  @open_tracker.register({cls.__name__})\n"
        f"  class My{cls.__name__}(Tracker): ...  # __init__(self, settings, run), log(self, step, metrics)"
    )


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Leaves of a JSON tree by dotted path; lists of plain values are leaves."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, join(path, name))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, join(path, str(index)))
    else:
        yield path, value
