"""Padding, bucketing and packing of rows, which change nothing in a run's mathematics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import attrs

from nnxdsl.config.core.base import Spec, gather
from nnxdsl.config.core.validators import Limit, positive
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.config import batching as members
    from nnxdsl.config.experiment import Experiment


@attrs.frozen(kw_only=True)
class Batching(Spec):
    """How the rows of a step become arrays; an evaluation's rows are always padded."""

    Padded: ClassVar[type[members.Padded]]
    Bucketed: ClassVar[type[members.Bucketed]]
    Packed: ClassVar[type[members.Packed]]


@attrs.frozen(kw_only=True)
class Padded(Batching):
    """Every batch is as long as the longest row of the data: one program, and most padding."""


@attrs.frozen(kw_only=True)
class Bucketed(Batching):
    """Every batch is cut to one of a few lengths, none shorter than its own longest row; each is compiled once.

    Attributes:
        buckets: How many lengths there are at most; of prompts and of completions, each for themselves.
    """

    buckets: int = attrs.field(default=4, validator=positive)


@attrs.frozen(kw_only=True)
class Packed(Batching):
    """Pairs or sequences are packed in long rows, none of them split: least padding, a few programs.

    Attributes:
        length: Tokens of a row, of which there are as many as a step needs; None takes rows of several times the mean
            length, and makes them as long as a step needs.
    """

    length: int | None = attrs.field(default=None, validator=Limit(at_least=2))

    def check(self, experiment: Experiment) -> Iterable[Problem]:
        """A row that holds several sequences must be enough for the loss, and belongs to one worker."""
        return gather(lambda: self._check_loss(experiment), lambda: self._check_workers(experiment))

    def _check_loss(self, experiment: Experiment) -> Iterable[Problem]:
        objective = experiment.objective
        if objective.batch_kind == "sequences" and not objective.is_token_sum:
            message = (
                f"{type(objective).__qualname__} does not declare that it is a sum over tokens (`is_token_sum`), and a "
                "packed row has several sequences; use Batching.Bucketed() or Batching.Padded()"
            )
            yield Problem("batching", message)

    def _check_workers(self, experiment: Experiment) -> Iterable[Problem]:
        if experiment.outer is not None:
            message = "puts rows of several workers side by side; use Batching.Bucketed() or Batching.Padded()"
            yield Problem("batching", f"{type(self).__qualname__} {message}")
