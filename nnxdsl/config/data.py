"""What a run learns from: which file, how long, in which order. Reading the files is `nnxdsl/data/`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import attrs

from nnxdsl.config.core.base import Spec, declared, members
from nnxdsl.config.core.validators import Limit, filled, not_negative, positive
from nnxdsl.errors import Problem

if TYPE_CHECKING:
    from nnxdsl.config import data
    from nnxdsl.config.experiment import Experiment


@attrs.frozen(kw_only=True)
class Order(Spec):
    """The order in which rows are seen."""

    Shuffled: ClassVar[type[data.Shuffled]]
    AsInFile: ClassVar[type[data.AsInFile]]


@attrs.frozen(kw_only=True)
class Shuffled(Order):
    """A new permutation every epoch, drawn from the experiment's seed."""


@attrs.frozen(kw_only=True)
class AsInFile(Order):
    """The rows as they stand in the file, epoch after epoch."""


@attrs.frozen(kw_only=True)
class BadRows(Spec):
    """What happens to rows that cannot be learnt from (empty or equal completions, missing fields, bad JSON)."""

    Stop: ClassVar[type[data.Stop]]
    Skip: ClassVar[type[data.Skip]]


@attrs.frozen(kw_only=True)
class Stop(BadRows):
    """Refuse to start, naming the first bad rows and the number of all."""


@attrs.frozen(kw_only=True)
class Skip(BadRows):
    """Leave bad rows out and count them in the report.

    Attributes:
        at_most: Refuse to start if more rows than this are bad.
    """

    at_most: int = attrs.field(default=100, validator=not_negative)


@attrs.frozen(kw_only=True)
class Data(Spec):
    """A source of training rows: JSONL or Parquet, by the file's name.

    Attributes:
        path: File, relative to the directory in which the command runs.
        order: Order of the rows. An evaluation reads every row once, in the order of an epoch.
        bad_rows: What happens to rows that cannot be learnt from.
    """

    Preferences: ClassVar[type[data.Preferences]]
    Feedback: ClassVar[type[data.Feedback]]
    Conversations: ClassVar[type[data.Conversations]]
    Text: ClassVar[type[data.Text]]
    Prompts: ClassVar[type[data.Prompts]]

    batch_kind: ClassVar[str] = ""
    """The kind of batch that it yields: "pairs", "feedback", "sequences" or "prompts"."""
    length_fields: ClassVar[tuple[str, ...]] = ()
    """Its fields whose sum is the most tokens of a sequence; () where nothing bounds it."""
    caches_reference: ClassVar[bool] = False
    """Whether log-probabilities of the reference are precomputed for it, unless `Memory.reference` is set."""
    rows: ClassVar[str] = "rows"
    """What its rows are called in messages."""

    path: str = attrs.field(validator=filled)
    order: Order = Shuffled()
    bad_rows: BadRows = Stop()

    def max_lengths(self) -> tuple[int, ...]:
        """The values of `length_fields`, in tokens."""
        return tuple(getattr(self, name) for name in self.length_fields)

    def check(self, experiment: Experiment, path: str = "data") -> Iterable[Problem]:
        """The objective reads such rows; as the training data, or as that of an evaluation at another path."""
        kind, objective = experiment.objective.batch_kind, type(experiment.objective).__qualname__
        if self.batch_kind != kind:
            usable = [cls for cls in members(Data).values() if cls.batch_kind == kind]
            rows = " or ".join(cls.rows for cls in usable) or kind
            cure = " or ".join(cls.__qualname__ for cls in usable) or f"data that yields {kind}"
            message = f"{objective} reads {rows}, {type(self).__qualname__} yields {self.rows}; use {cure}"
            yield Problem(path, message)


@attrs.frozen(kw_only=True)
class Answered(Data):
    """Prompts with answers, each of which is a part of its own.

    Attributes:
        path: File, relative to the directory in which the command runs.
        max_prompt_length: Longest prompt in tokens; longer ones are cut on their left.
        max_completion_length: Longest completion in tokens, end token included; longer ones are cut on their right.
        order: Order of the rows.
        bad_rows: What happens to rows that cannot be learnt from.
    """

    is_base: ClassVar[bool] = True
    length_fields: ClassVar[tuple[str, ...]] = ("max_prompt_length", "max_completion_length")

    path: str = attrs.field(kw_only=False, validator=filled)
    max_prompt_length: int = attrs.field(default=512, validator=positive)
    max_completion_length: int = attrs.field(default=512, validator=positive)


@attrs.frozen(kw_only=True)
class Preferences(Answered):
    """Pairs of a better and a worse answer to one prompt.

    In each row `prompt`, `chosen`, `rejected` as text or chat messages (an implicit prompt is found), or
    `prompt_ids`, `chosen_ids`, `rejected_ids`, which need no tokenizer.
    """

    batch_kind: ClassVar[str] = "pairs"
    caches_reference: ClassVar[bool] = True
    rows: ClassVar[str] = "preference pairs"


@attrs.frozen(kw_only=True)
class Feedback(Answered):
    """Single answers, each of which was liked or not.

    In each row `prompt`, `completion` (text or chat messages) and `label`, true where the answer is desirable; or
    `prompt_ids`, `completion_ids` and `label`. A row that is a preference pair, as `Data.Preferences` reads it, counts
    as two: its chosen answer is desirable, its rejected one is not.
    """

    batch_kind: ClassVar[str] = "feedback"
    caches_reference: ClassVar[bool] = True
    rows: ClassVar[str] = "labelled answers"


@attrs.frozen(kw_only=True)
class Conversations(Data):
    """Chats for supervised fine-tuning: `messages` (or `prompt` and `completion`) in each row.

    `tool_calls` of messages and the field `tools` of a row are written by the chat template.

    Attributes:
        path: File, relative to the directory in which the command runs.
        max_length: Longest conversation in tokens; longer ones are cut on their right.
        order: Order of the rows.
        bad_rows: What happens to rows that cannot be learnt from.
    """

    batch_kind: ClassVar[str] = "sequences"
    length_fields: ClassVar[tuple[str, ...]] = ("max_length",)
    rows: ClassVar[str] = "conversations"

    path: str = attrs.field(kw_only=False, validator=filled)
    max_length: int = attrs.field(default=1024, validator=Limit(at_least=2))


@attrs.frozen(kw_only=True)
class Text(Data):
    """Plain text, one document a row; every token after the first is a target.

    Attributes:
        path: File, relative to the directory in which the command runs.
        field: Name of the row's field that holds the text.
        max_length: Longest document in tokens; longer ones are cut on their right.
        order: Order of the rows.
        bad_rows: What happens to rows that cannot be learnt from.
    """

    batch_kind: ClassVar[str] = "sequences"
    length_fields: ClassVar[tuple[str, ...]] = ("max_length",)
    rows: ClassVar[str] = "texts"

    path: str = attrs.field(kw_only=False, validator=filled)
    field: str = attrs.field(default="text", validator=filled)
    max_length: int = attrs.field(default=1024, validator=Limit(at_least=2))

    def check(self, experiment: Experiment, path: str = "data") -> Iterable[Problem]:
        """Text has no turns and no prompts, of which an objective could read some alone."""
        yield from super().check(experiment, path)
        objective = experiment.objective
        has_choice = objective.batch_kind == self.batch_kind and "loss_on" in declared(type(objective))
        if has_choice and objective.loss_on != "all":
            message = f"{objective.loss_on!r} has no meaning for {type(self).__qualname__} ({path}); use loss_on='all'"
            yield Problem("objective.loss_on", message)


@attrs.frozen(kw_only=True)
class Prompts(Answered):
    """Prompts that the policy answers itself: `prompt` in each row, as text or chat messages.

    All other fields of a row are given to the rewards that read them.

    Attributes:
        max_completion_length: Longest answer that is drawn, in tokens, end token included.
        bad_rows: What happens to rows that cannot be answered.
    """

    batch_kind: ClassVar[str] = "prompts"
    rows: ClassVar[str] = "prompts"
