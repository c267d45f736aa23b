"""Training data: files, maximum lengths, order of rows. `nnxdsl/data/` reads the files."""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a member replaces the family's default)

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath
from string import Formatter
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import attrs

from nnxdsl.config.core.base import Spec, declared, gather, members
from nnxdsl.config.core.fields import Pairs
from nnxdsl.config.core.json_object import Json, JsonObject
from nnxdsl.config.core.validators import Limit, filled, not_negative, positive
from nnxdsl.errors import Problem, nearest

if TYPE_CHECKING:
    from nnxdsl.config import data
    from nnxdsl.config.experiment import Experiment


NO_ARGUMENTS = JsonObject({})
ROLES = ("system", "developer", "user", "assistant", "tool", "function_call")
"""Roles that others are mapped to; `function_call` is ShareGPT's message of an assistant that is a tool call."""
TEMPLATE_VARIABLES = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
"""Variables that every chat template gets."""


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
    """The rows in the order of the file, epoch after epoch."""


@attrs.frozen(kw_only=True)
class BadRows(Spec):
    """What happens to bad rows: empty or equal completions, missing fields, invalid JSON."""

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
    """Training rows.

    Attributes:
        order: Order of the rows. An evaluation reads every row once, in the order of an epoch.
    """

    Preferences: ClassVar[type[data.Preferences]]
    Feedback: ClassVar[type[data.Feedback]]
    Conversations: ClassVar[type[data.Conversations]]
    Text: ClassVar[type[data.Text]]
    Prompts: ClassVar[type[data.Prompts]]
    Mixture: ClassVar[type[data.Mixture]]

    batch_kind: ClassVar[str] = ""
    """The kind of batch that it yields: "pairs", "feedback", "sequences" or "prompts"."""
    length_fields: ClassVar[tuple[str, ...]] = ()
    """Fields whose sum is the maximum length of a sequence; () if there is no maximum."""
    caches_reference: ClassVar[bool] = False
    """Whether log-probabilities of the reference are precomputed for it, unless `Memory.reference` is set."""
    rows: ClassVar[str] = "rows"
    """What its rows are called in messages."""
    template_args: ClassVar[Json] = NO_ARGUMENTS
    """Further arguments of the chat template, for its rows and for prompts of the same run."""
    system: ClassVar[str | None] = None
    """The system prompt of chats that have none, in its rows and in prompts of the same run."""
    roles: ClassVar[Pairs[str, str]] = ()
    """Roles of messages in its rows that are renamed, and their new names."""

    has_margins: ClassVar[bool] = False
    """Whether its pairs have margins."""
    has_teacher_prompts: ClassVar[bool] = False
    """Whether its rows have prompts of their own for a teacher."""

    order: Order = Shuffled()

    @property
    def name(self) -> str:
        """What messages call it."""
        return type(self).__qualname__

    def max_lengths(self) -> tuple[int, ...]:
        """The values of `length_fields`, in tokens."""
        return tuple(getattr(self, name) for name in self.length_fields)

    def check(self, experiment: Experiment, path: str = "data") -> Iterable[Problem]:
        """The objective reads such rows; as the training data, or as that of an evaluation at another path."""
        kind, objective = experiment.objective.batch_kind, type(experiment.objective).__qualname__
        if self.batch_kind != kind:
            usable = [cls for cls in members(Data).values() if cls.batch_kind == kind]
            rows = " or ".join(cls.rows for cls in usable) or kind
            remedy = " or ".join(cls.__qualname__ for cls in usable) or f"data that yields {kind}"
            message = f"{objective} reads {rows}, {type(self).__qualname__} yields {self.rows}; use {remedy}"
            yield Problem(path, message)


TEACHER_PROMPT = "{prompt}\n\n{privileged_context}"
"""Of a teacher with privileged context, as in TRL's `SDFTConfig`."""

HUB = "hf://"
"""Beginning of the paths of datasets of the Hugging Face Hub."""

_FILE = re.compile(r"\.(jsonl|ndjson|json|csv|tsv|parquet|feather)(\.gz|\.zst)?$|[*?]")
"""Paths that no folder has."""
_IDS = ("prompt_ids", "chosen_ids", "rejected_ids")


@attrs.frozen(kw_only=True)
class FileData(Data):
    """Rows of files, of a folder that `datasets.save_to_disk` wrote, or of a dataset of the Hugging Face Hub.

    The name of a file says its format: JSONL, JSON, CSV, Parquet or Arrow.

    Attributes:
        path: File, glob, folder, several of these, or `hf://name` of a dataset of the Hub; relative to the directory
            in which the command runs.
        split: Split of a dataset of the Hub, also a part of one (`train[:1%]`), or of a folder that `save_to_disk`
            wrote; None for the only one.
        config: Configuration of a dataset of the Hub; None for the default one.
        revision: Commit, tag or branch of a dataset of the Hub; None for `main`.
        columns: Columns to rename, `{their name: our name}`. Without it the layouts of widely used datasets are
            recognised by their columns.
        order: Order of the rows.
        bad_rows: What happens to bad rows.
    """

    is_base: ClassVar[bool] = True
    fields_added_later: ClassVar[frozenset[str]] = frozenset({"split", "config", "revision", "columns"})
    columns_read: ClassVar[tuple[str, ...]] = ()
    """Columns that rows may have; () for any."""

    path: str | tuple[str, ...] = attrs.field(validator=filled)
    split: str | None = attrs.field(default=None, validator=filled)
    config: str | None = attrs.field(default=None, validator=filled)
    revision: str | None = attrs.field(default=None, validator=filled)
    columns: Pairs[str, str] = ()
    bad_rows: BadRows = Stop()

    @classmethod
    def field_hint(cls, name: str, value: object) -> str:
        """What to write for rows in memory, a list of paths, or a `Path`."""
        if name == "path" and isinstance(value, PurePath):
            return f"; write {str(value)!r}"
        if name != "path" or isinstance(value, str | tuple) or not isinstance(value, Iterable):
            return ""
        paths = cast("list[object]", value) if isinstance(value, list) else []
        is_several = len(paths) > 0 and all(isinstance(path, str) for path in paths)
        return f"; write {tuple(paths)!r}" if is_several else "; write nnxdsl.save_rows(rows) for rows in memory"

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths."""
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def name(self) -> str:
        """The first path, and how many there are besides."""
        first, *others = self.paths
        return f"{first} and {len(others)} more" if others else first

    def problems(self) -> Iterable[Problem]:
        """Paths that name nothing, settings that have no effect on them, and columns that nothing reads."""
        return gather(super().problems, self._path_problems, self._setting_problems, self._column_problems)

    def _path_problems(self) -> Iterable[Problem]:
        if not all(path.strip() for path in self.paths) or not self.paths:
            yield Problem("path", f"expected one path or more, none of them blank, got {self.path!r}")
            return
        is_hub = [path.startswith(HUB) for path in self.paths]
        if any(is_hub) and len(self.paths) > 1:
            yield Problem("path", f"an {HUB} path cannot be combined with other paths; use {Mixture.__qualname__}")
        for path in (path for path in self.paths if path.startswith(HUB)):
            parts = path.removeprefix(HUB).split("/")
            if len(parts) > 2 or not all(re.fullmatch(r"[\w.-]+", part) for part in parts):
                remedy = f"; write {HUB}{'/'.join(parts[1:3])}" if parts[0] == "datasets" and len(parts) > 2 else ""
                yield Problem("path", f"expected {HUB}name or {HUB}owner/name of a dataset, got {path!r}{remedy}")

    def _setting_problems(self) -> Iterable[Problem]:
        if any(path.startswith(HUB) for path in self.paths):
            return
        for name in ("config", "revision"):
            if getattr(self, name) is not None:
                yield Problem(name, f"has no effect: {self.name} is no dataset of the Hub ({HUB}...)")
        files = [path for path in self.paths if _FILE.search(path)]
        if self.split is not None and files:
            kinds = f"datasets of the Hub ({HUB}...) and folders that save_to_disk wrote have splits"
            yield Problem("split", f"has no effect: {files[0]} is no folder; {kinds}")

    def _column_problems(self) -> Iterable[Problem]:
        columns = tuple(self.columns)
        for index, (name, ours) in enumerate(columns):
            if self.columns_read and ours not in self.columns_read:
                hint = nearest(ours, self.columns_read) or f"; it reads {', '.join(self.columns_read)}"
                yield Problem("columns", f"{type(self).__qualname__} reads no column {ours!r}{hint}")
            if any(name == other or ours == new for other, new in columns[:index]):
                yield Problem("columns", f"{name!r} as {ours!r}: one of the two is listed twice")


@attrs.frozen(kw_only=True)
class ChatData(FileData):
    """Rows that may be chats.

    Attributes:
        template_args: Further arguments of the chat template, as `{"enable_thinking": False}`: plain JSON values by
            names that the template reads. Prompts of samples are rendered with them, too.
        system: A system message for chats that have none, prompts of samples among them; None adds none.
        roles: Roles of messages to rename, `{"bot": "assistant", "api": "tool"}`.
    """

    is_base: ClassVar[bool] = True
    fields_added_later: ClassVar[frozenset[str]] = FileData.fields_added_later | {"template_args", "system", "roles"}

    template_args: Json = NO_ARGUMENTS
    system: str | None = attrs.field(default=None, validator=filled)
    roles: Pairs[str, str] = ()

    def problems(self) -> Iterable[Problem]:
        """Arguments that every template is given anyway, and roles that no chat has."""
        yield from super().problems()
        for name in TEMPLATE_VARIABLES:
            if name in self.template_args:
                yield Problem("template_args", f"{name!r} comes from the rows or the tokenizer; take it out")
        for name, role in dict(self.roles).items():
            if role not in ROLES:
                remedy = nearest(role, ROLES) or f"; use {', '.join(ROLES)}"
                yield Problem("roles", f"{name!r} as {role!r}: no role of chats{remedy}")


@attrs.frozen(kw_only=True)
class PromptCompletionData(ChatData):
    """Prompts with completions; the lengths of both are limited separately.

    Attributes:
        path: File, glob, folder, several of these, or `hf://name` of a dataset of the Hub.
        max_prompt_length: Longest prompt in tokens; longer ones are cut on their left.
        max_completion_length: Longest completion in tokens, end token included; longer ones are cut on their right.
        order: Order of the rows.
        bad_rows: What happens to bad rows.
    """

    is_base: ClassVar[bool] = True
    length_fields: ClassVar[tuple[str, ...]] = ("max_prompt_length", "max_completion_length")

    path: str | tuple[str, ...] = attrs.field(kw_only=False, validator=filled)
    max_prompt_length: int = attrs.field(default=512, validator=positive)
    max_completion_length: int = attrs.field(default=512, validator=positive)


@attrs.frozen(kw_only=True)
class Preferences(PromptCompletionData):
    """Preference pairs: a chosen and a rejected completion of one prompt.

    In each row `prompt`, `chosen`, `rejected` as text or chat messages (an implicit prompt is found), or
    `prompt_ids`, `chosen_ids`, `rejected_ids`, which need no tokenizer.

    Attributes:
        path: As of all files.
        margin: The column with a number by which the reward of the chosen completion is to exceed that of the rejected
            one, for `Objective.Reward`; None for 0 in all rows.
    """

    batch_kind: ClassVar[str] = "pairs"
    caches_reference: ClassVar[bool] = True
    rows: ClassVar[str] = "preference pairs"
    columns_read: ClassVar[tuple[str, ...]] = ("prompt", "chosen", "rejected", "tools", *_IDS)
    fields_added_later: ClassVar[frozenset[str]] = PromptCompletionData.fields_added_later | {"margin"}

    margin: str | None = attrs.field(default=None, validator=filled)

    @property
    def has_margins(self) -> bool:
        """Whether its rows have margins."""
        return self.margin is not None

    def check(self, experiment: Experiment, path: str = "data") -> Iterable[Problem]:
        """Margins are read by reward models alone."""
        yield from super().check(experiment, path)
        if self.margin is not None and not experiment.objective.reads_margins:
            kind = type(experiment.objective).__qualname__
            yield Problem(f"{path}.margin", f"has no effect with {kind}; leave it out, or use Objective.Reward")


@attrs.frozen(kw_only=True)
class Feedback(PromptCompletionData):
    """Unpaired feedback (KTO): single completions, each with a label, desirable or not.

    In each row `prompt`, `completion` (text or chat messages) and `label`, true if the completion is desirable; or
    `prompt_ids`, `completion_ids` and `label`. A row that is a preference pair, as `Data.Preferences` reads it, counts
    as two: its chosen completion is desirable, its rejected one is not.
    """

    batch_kind: ClassVar[str] = "feedback"
    caches_reference: ClassVar[bool] = True
    rows: ClassVar[str] = "labelled answers"
    columns_read: ClassVar[tuple[str, ...]] = (
        *("prompt", "completion", "label", "completion_ids", "chosen", "rejected", "tools"),
        *_IDS,
    )


@attrs.frozen(kw_only=True)
class Conversations(ChatData):
    """Chats for supervised fine-tuning: `messages` (or `prompt` and `completion`) in each row.

    `tool_calls` of messages and the field `tools` of a row are written by the chat template.

    Attributes:
        path: File, glob, folder, several of these, or `hf://name` of a dataset of the Hub.
        max_length: Longest conversation in tokens; longer ones are cut on their right.
        order: Order of the rows.
        bad_rows: What happens to bad rows.
    """

    batch_kind: ClassVar[str] = "sequences"
    length_fields: ClassVar[tuple[str, ...]] = ("max_length",)
    rows: ClassVar[str] = "conversations"
    columns_read: ClassVar[tuple[str, ...]] = ("messages", "conversations", "prompt", "completion", "tools")

    path: str | tuple[str, ...] = attrs.field(kw_only=False, validator=filled)
    max_length: int = attrs.field(default=1024, validator=Limit(at_least=2))


@attrs.frozen(kw_only=True)
class Text(FileData):
    """Plain text, one document a row; every token after the first is a target.

    Attributes:
        path: File, glob, folder, several of these, or `hf://name` of a dataset of the Hub.
        field: Name of the row's field that holds the text.
        max_length: Longest document in tokens; longer ones are cut on their right.
        order: Order of the rows.
        bad_rows: What happens to bad rows.
    """

    batch_kind: ClassVar[str] = "sequences"
    length_fields: ClassVar[tuple[str, ...]] = ("max_length",)
    rows: ClassVar[str] = "texts"

    path: str | tuple[str, ...] = attrs.field(kw_only=False, validator=filled)
    field: str = attrs.field(default="text", validator=filled)
    max_length: int = attrs.field(default=1024, validator=Limit(at_least=2))

    @property
    def columns_read(self) -> tuple[str, ...]:
        """The column that holds the text."""
        return (self.field,)

    def check(self, experiment: Experiment, path: str = "data") -> Iterable[Problem]:
        """Text has no turns and no prompts, of which an objective could read some alone."""
        yield from super().check(experiment, path)
        objective = experiment.objective
        has_choice = objective.batch_kind == self.batch_kind and "loss_on" in declared(type(objective))
        if has_choice and objective.loss_on != "all":
            message = f"{objective.loss_on!r} has no meaning for {type(self).__qualname__} ({path}); use loss_on='all'"
            yield Problem("objective.loss_on", message)


@attrs.frozen(kw_only=True)
class Prompts(PromptCompletionData):
    """Prompts for online RL, whose completions the policy samples: `prompt` in each row, as text or messages.

    All other fields of a row are passed to the reward functions that read them.

    Attributes:
        max_prompt_length: Longest prompt in tokens, that of a teacher as well; longer ones are cut on their left.
        max_completion_length: Maximum length of a sampled completion in tokens, end token included.
        bad_rows: What happens to bad rows.
        privileged_context: The column with text that only the teacher of `Objective.OnPolicyDistill` sees, as a
            reference answer or a hint: the teacher reads completions after a prompt of its own, made by
            `teacher_prompt_template`. None for a teacher that sees the student's prompt.
        teacher_prompt_template: The teacher's prompt, with `{privileged_context}` and, unless the column has whole
            prompts, `{prompt}`; of a chat it is the text of the last message, a user's. As TRL's `SDFTConfig`.
    """

    batch_kind: ClassVar[str] = "prompts"
    rows: ClassVar[str] = "prompts"
    fields_added_later: ClassVar[frozenset[str]] = PromptCompletionData.fields_added_later | {
        "privileged_context",
        "teacher_prompt_template",
    }

    privileged_context: str | None = attrs.field(default=None, validator=filled)
    teacher_prompt_template: str = TEACHER_PROMPT

    @property
    def has_teacher_prompts(self) -> bool:
        """Whether its rows have prompts of their own for a teacher."""
        return self.privileged_context is not None

    def problems(self) -> Iterable[Problem]:
        """A template without its fields, with others, or for nothing."""
        yield from super().problems()
        if self.privileged_context is None and self.teacher_prompt_template != TEACHER_PROMPT:
            yield Problem("teacher_prompt_template", "has no effect without privileged_context; name its column")
        try:
            fields = [
                field + (f"!{conversion}" if conversion else "") + (f":{style}" if style else "")
                for _, field, style, conversion in Formatter().parse(self.teacher_prompt_template)
                if field is not None
            ]
        except ValueError as error:
            yield Problem("teacher_prompt_template", f"{error}; write {{{{ and }}}} for braces in the text")
            return
        if "privileged_context" not in fields:
            yield Problem("teacher_prompt_template", "has no {privileged_context}; write it where the text goes")
        for field in (field for field in fields if field not in ("prompt", "privileged_context")):
            message = f"expected {{prompt}} and {{privileged_context}} alone, got {{{field}}}"
            yield Problem("teacher_prompt_template", f"{message}; write {{{{ and }}}} for braces in the text")

    def check(self, experiment: Experiment, path: str = "data") -> Iterable[Problem]:
        """Privileged context is read by teachers alone, and in evaluations where it is in training."""
        yield from super().check(experiment, path)
        objective = experiment.objective
        if self.has_teacher_prompts and not objective.reads_teacher_prompts:
            message = f"has no effect with {type(objective).__qualname__}; leave it out, or use OnPolicyDistill"
            yield Problem(f"{path}.privileged_context", message)
        elif self.has_teacher_prompts != experiment.data.has_teacher_prompts:
            remedy = "name its column here too" if experiment.data.has_teacher_prompts else "leave it out"
            has = "has" if experiment.data.has_teacher_prompts else "has no"
            yield Problem(
                f"{path}.privileged_context", f"other data of the experiment {has} privileged_context; {remedy}"
            )


@attrs.frozen(kw_only=True)
class Mixture(Data):
    """Rows of several sources with weights: `Data.Mixture({Data.Text("web.jsonl"): 3, Data.Text("code.jsonl"): 1})`.

    Each source goes through its own epochs, in its own order. The share of each in a batch is a metric.

    Attributes:
        sources: Data of one kind, and the weight of each.
        unit: What the weights count: "rows", "tokens" (of a whole row), or "epochs" of each source.
        order: `Order.Shuffled()` shuffles the sources of every 1,024 rows; `Order.AsInFile()` spreads each evenly.
    """

    sources: Pairs[Data, float] = attrs.field(kw_only=False)
    unit: Literal["rows", "tokens", "epochs"] = "rows"

    @property
    def name(self) -> str:
        """The names of the sources."""
        return " + ".join(part.name for part in self.parts)

    @property
    def parts(self) -> tuple[Data, ...]:
        """The sources."""
        return tuple(dict(self.sources))

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each source."""
        return tuple(dict(self.sources).values())

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each source among the metrics: that of its file, numbered where several have the same."""
        stems = [_stem(part.paths[0]) if isinstance(part, FileData) else type(part).__name__ for part in self.parts]
        return tuple(stem if stems.count(stem) == 1 else f"{stem}-{index}" for index, stem in enumerate(stems))

    @property
    def batch_kind(self) -> str:
        """The kind of batch of all sources."""
        return self.parts[0].batch_kind

    @property
    def length_fields(self) -> tuple[str, ...]:
        """The fields of the first source that bound the length of a row."""
        return tuple(f"sources.0.0.{name}" for name in self.parts[0].length_fields)

    @property
    def caches_reference(self) -> bool:
        """Whether log-probabilities of the reference are precomputed for all sources."""
        return all(part.caches_reference for part in self.parts)

    @property
    def has_margins(self) -> bool:
        """Whether pairs of a source have margins."""
        return any(part.has_margins for part in self.parts)

    @property
    def has_teacher_prompts(self) -> bool:
        """Whether rows have prompts of their own for a teacher: those of all sources, if those of one do."""
        return any(part.has_teacher_prompts for part in self.parts)

    @property
    def rows(self) -> str:
        """What the rows are called in messages."""
        return self.parts[0].rows

    @property
    def template_args(self) -> Json:
        """The arguments of the chat template for prompts of samples: those of the first source."""
        return self.parts[0].template_args

    @property
    def system(self) -> str | None:
        """The system prompt for prompts of samples: that of the first source."""
        return self.parts[0].system

    def max_lengths(self) -> tuple[int, ...]:
        """The largest value of each length among the sources, in tokens."""
        return tuple(map(max, zip(*(part.max_lengths() for part in self.parts), strict=False)))

    def problems(self) -> Iterable[Problem]:
        """Sources of several kinds, mixtures among them, and weights that are not positive."""
        return gather(self._source_problems, self._weight_problems)

    def _source_problems(self) -> Iterable[Problem]:
        if not self.sources:
            yield Problem("sources", "expected one source or more, got none")
            return
        kinds = {part.batch_kind: part.rows for part in self.parts}
        if len(kinds) > 1:
            yield Problem("sources", f"expected rows of one kind, got {' and '.join(kinds.values())}")
        for index, part in enumerate(self.parts):
            if isinstance(part, Mixture):
                yield Problem(f"sources.{index}.0", "a mixture cannot be a source of a mixture; write its sources")
        if len(self.parts) != len(tuple(self.sources)):
            yield Problem("sources", "the same source is listed twice; add its weights")

    def _weight_problems(self) -> Iterable[Problem]:
        for index, weight in enumerate(self.weights):
            if weight <= 0:
                yield Problem(f"sources.{index}.1", f"expected a weight above 0, got {weight:g}")

    def check(self, experiment: Experiment, path: str = "data") -> Iterable[Problem]:
        """The objective reads the rows of each source; an evaluation reads every row once, which a mixture has not."""
        if path != "data":
            yield Problem(path, "a mixture has no last row, so nothing can be evaluated on it; use one of its sources")
            return
        for index, part in enumerate(self.parts):
            yield from part.check(experiment, f"{path}.sources.{index}.0")


def _stem(path: str) -> str:
    """The name of a file without its format, or of the folder of a glob."""
    place = PurePath(path.removesuffix(".gz").removesuffix(".zst"))
    names = (place.stem, *(parent.name for parent in place.parents))
    return next((name for name in names if name and not set(name) & set("*?[")), "source")
