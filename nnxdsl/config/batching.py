"""How rows of unequal length are laid into arrays of one shape, which changes nothing in a run's mathematics."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs

from nnxdsl.config.core.base import Spec
from nnxdsl.config.core.validators import Limit, positive

if TYPE_CHECKING:
    from nnxdsl.config import batching as members


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
    """Pairs, or sequences, lie side by side in long rows, none of them split: least padding, a few programs.

    Attributes:
        length: Tokens of a row, of which there are as many as a step needs; None takes rows of several times the mean
            length, and makes them as long as a step needs.
    """

    length: int | None = attrs.field(default=None, validator=Limit(at_least=2))
