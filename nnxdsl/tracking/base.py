"""The tracker interface, and the registry of trackers by type of settings."""

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
"""How a run ended: "stopped" can be resumed; "killed" reported nothing."""


@attrs.frozen
class TrackedRun:
    """The run that a tracker logs.

    Attributes:
        id: Of the run: the name of its directory.
        files: Directory inside the run's own, for files of trackers.
        experiment: The experiment as JSON.
        first_step: The first step that will be logged in this attempt; 0 in the first attempt.
        saved: State of the tracker that persists between attempts, such as the service's run id; empty in the first
            attempt. Its content after opening is stored.
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
    """Logs the metrics of one run to a service. An exception of any method becomes a warning and ends the tracker.

    A third party's is one class, registered with `@open_tracker.register(MyTracking)` and called with the settings, an
    object of `MyTracking`, and a `TrackedRun`. Its module is imported in the process that writes to the trackers.
    """

    @abc.abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a training step or of an evaluation; called once for each, in the order of steps.

        Args:
            step: The step; an evaluation comes before the training step of the same number.
            metrics: Numbers by name, which may be NaN or infinite; those of evaluations begin with "eval/".
        """

    def flush(self) -> None:  # noqa: B027 - not every tracker has something to do
        """Flushes logged metrics to the service; called after every few rows, which are not logged again."""

    def finish(self, end: End) -> None:  # noqa: B027
        """Ends the tracked run, or this attempt of it; called once, after all rows.

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
    """Refuses settings without a registered tracker.

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
