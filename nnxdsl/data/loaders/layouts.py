"""Layouts of widely used datasets, recognised by the first rows and converted to the loaders' columns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import attrs

from nnxdsl.config.data import FileData
from nnxdsl.data.loaders.files import Chunk, RowError
from nnxdsl.errors import DataError, suggest

Fields = Mapping[str, Any]

FIRST_ROWS = 32
"""Rows by which a layout is recognised: at least half of them have it."""

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


class Layout(NamedTuple):
    """Columns of a dataset.

    Attributes:
        name: What people call it; "" for the loaders' own columns, which reports do not name.
        columns: What it is recognised by, in words.
        kinds: Kinds of data that it is for, by `batch_kind`.
        fits: Whether a row has it.
        convert: A row in the loaders' columns; columns that are not read stay.
        is_own: Whether its columns are those of the loaders, which have rules for rows with several forms.
    """

    name: str
    columns: str
    kinds: Collection[str]
    fits: Callable[[Fields], bool]
    convert: Callable[[Fields], Fields]
    is_own: bool = False

    def described(self) -> str:
        """Its name and its columns."""
        return f"{self.name} ({self.columns})" if self.name else self.columns


def _has(*names: str) -> Callable[[Fields], bool]:
    return lambda row: all(name in row for name in names)


def _has_type(row: Fields, kind: type, *names: str) -> bool:
    return all(isinstance(row.get(name), kind) for name in names)


def _replaced(row: Fields, used: Collection[str], **fields: Any) -> Fields:
    """A row with other fields in place of those that are used."""
    return {**{name: value for name, value in row.items() if name not in used}, **fields}


def _same(row: Fields) -> Fields:
    return row


def _is_ultrafeedback(row: Fields) -> bool:
    return _has("score_chosen", "score_rejected")(row) and _has_type(row, list, "chosen", "rejected")


def _ultrafeedback(row: Fields) -> Fields:
    """The prompt is the beginning of both chats, so that its text is read once."""
    return _replaced(row, ("prompt",))


def _is_hh(row: Fields) -> bool:
    both = (row.get("chosen"), row.get("rejected"))
    return "prompt" not in row and all(isinstance(side, str) and side.lstrip().startswith("Human:") for side in both)


def _hh(row: Fields) -> Fields:
    return _replaced(row, (), chosen=_turns(row["chosen"], "chosen"), rejected=_turns(row["rejected"], "rejected"))


def _turns(text: str, name: str) -> list[dict[str, str]]:
    """The messages of a transcript of `Human:` and `Assistant:`, each after an empty line."""
    first, *parts = _TURN.split(f"\n\n{text.lstrip()}")
    pairs = zip(parts[::2], parts[1::2], strict=True)
    turns = [{"role": _ROLES[speaker], "content": content.strip()} for speaker, content in pairs]
    if first.strip() or turns[-1]["role"] != "assistant":
        raise RowError("another layout", f"field '{name}': expected a transcript that ends with the Assistant's turn")
    return turns


def _orca(row: Fields) -> Fields:
    system = [{"role": "system", "content": row["system"]}] if str(row.get("system", "")).strip() else []
    prompt = [*system, {"role": "user", "content": row["question"]}]
    return _replaced(row, ("system", "question"), prompt=prompt)


def _is_openai_pair(row: Fields) -> bool:
    return _has_type(row, list, "preferred_output", "non_preferred_output") and _has_type(row, dict, "input")


def _openai_pair(row: Fields) -> Fields:
    messages = row["input"]
    tools = {"tools": messages["tools"]} if messages.get("tools") else {}
    sides = {"chosen": row["preferred_output"], "rejected": row["non_preferred_output"]}
    used = ("input", "preferred_output", "non_preferred_output")
    return _replaced(row, used, prompt=messages.get("messages"), **sides, **tools)


def _is_sharegpt(row: Fields) -> bool:
    turns = row.get("conversations")
    return isinstance(turns, list) and any(isinstance(turn, dict) and "from" in turn for turn in turns)


def _sharegpt(row: Fields) -> Fields:
    turns = row["conversations"]
    system = row.get("system")
    if not isinstance(system, str) or not system.strip() or not isinstance(turns, list):
        return row
    return _replaced(row, ("system",), conversations=[{"from": "system", "value": system}, *turns])


def _alpaca(row: Fields) -> Fields:
    texts = [row["instruction"], row.get("input", "")]
    if not all(isinstance(text, str) for text in (*texts, row["output"])):
        raise RowError("wrong type", "fields 'instruction', 'input', 'output': expected text")
    prompt = "\n\n".join(text for text in texts if text.strip())
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": row["output"]}]
    return _replaced(row, ("instruction", "input", "output"), messages=messages)


_PAIRS, _CHATS = ("pairs", "feedback"), ("sequences",)

LAYOUTS = (
    Layout("", "prompt, chosen, rejected", _PAIRS, _has("prompt", "chosen", "rejected"), _same, is_own=True),
    Layout("", "prompt, completion, label", ("feedback",), _has("prompt", "completion", "label"), _same, is_own=True),
    Layout(
        "UltraFeedback-binarized",
        "chats in chosen and rejected, score_chosen, score_rejected",
        *(_PAIRS, _is_ultrafeedback, _ultrafeedback),
        is_own=True,
    ),
    Layout("HH-RLHF", "transcripts of Human: and Assistant: in chosen and rejected", _PAIRS, _is_hh, _hh, is_own=True),
    Layout("Orca pairs", "system, question, chosen, rejected", _PAIRS, _has("question", "chosen", "rejected"), _orca),
    Layout(
        "OpenAI preferences",
        "input, preferred_output, non_preferred_output",
        *(_PAIRS, _is_openai_pair, _openai_pair),
    ),
    Layout("OpenAI chat with tools", "messages, tools", _CHATS, _has("messages", "tools"), _same, is_own=True),
    Layout("", "messages", _CHATS, _has("messages"), _same, is_own=True),
    Layout("ShareGPT", "from and value in conversations", _CHATS, _is_sharegpt, _sharegpt, is_own=True),
    Layout("", "prompt, completion", _CHATS, _has("prompt", "completion"), _same, is_own=True),
    Layout("Alpaca", "instruction, input, output", _CHATS, _has("instruction", "output"), _alpaca),
)
"""All layouts; where rows have several of the loaders' own, the first with a name is reported."""


@attrs.frozen
class Reading:
    """How the rows of a source are brought into the loaders' columns.

    Attributes:
        layout: Position in `LAYOUTS` of what the first rows have; None for no layout.
        columns: Columns to rename, and their new names.
    """

    layout: int | None = None
    columns: tuple[tuple[str, str], ...] = ()

    def __call__(self, row: Fields) -> Fields:
        """A row in the loaders' columns; raises RowError if it has not the layout of the first rows."""
        if self.columns:
            names = dict(self.columns)
            new = {names[name]: value for name, value in row.items() if name in names}
            return {**{name: value for name, value in row.items() if name not in names}, **new}
        if self.layout is None:
            return row
        layout = LAYOUTS[self.layout]
        if not layout.fits(row):
            if layout.is_own:
                return row
            has = ", ".join(row) or "nothing"
            raise RowError("another layout", f"the first rows are {layout.described()}; this row has: {has}")
        return layout.convert(row)

    def describe(self) -> str:
        """For reports: the name and the columns of the layout, or what is renamed; "" for neither."""
        if self.columns:
            return ", ".join(f"{theirs} as {ours}" for theirs, ours in self.columns)
        if self.layout is None:
            return ""
        return LAYOUTS[self.layout].described()


UNCHANGED = Reading()
"""Rows that have the loaders' columns."""


def find_reading(data: FileData, chunks: Iterable[Chunk]) -> Reading:
    """How the rows of a source are read, by the first of them.

    Raises:
        DataError: They fit two layouts, or `data.columns` names a column that none of them has.
    """
    columns = tuple(dict(data.columns).items())
    if not columns and not any(data.batch_kind in layout.kinds for layout in LAYOUTS):
        return UNCHANGED
    rows = (value for chunk in chunks for _, value in chunk.rows() if not isinstance(value, RowError))
    first = list(itertools.islice(rows, FIRST_ROWS))
    if columns:
        _require_columns(data, first)
        return Reading(columns=columns)
    count = {
        number: sum(map(layout.fits, first)) for number, layout in enumerate(LAYOUTS) if data.batch_kind in layout.kinds
    }
    fitting = [number for number, rows in count.items() if rows and 2 * rows >= len(first)]
    layouts = [LAYOUTS[number] for number in fitting]
    if len(layouts) > 1 and not all(layout.is_own for layout in layouts):
        names = " and ".join(layout.described() for layout in layouts)
        raise DataError(
            f"{data.name}: the rows fit {len(layouts)} layouts: {names}; say which columns are read with "
            f'columns={{"theirs": "ours"}}'
        )
    return Reading(next((number for number in fitting if LAYOUTS[number].name), None))


def _require_columns(data: FileData, rows: Collection[Fields]) -> None:
    """Refuses to rename columns that are not there."""
    columns = dict.fromkeys(name for row in rows for name in row)
    for name in dict(data.columns):
        if rows and name not in columns:
            raise DataError(f"data.columns: {data.name} has no column {name!r}{suggest(name, columns)}")
