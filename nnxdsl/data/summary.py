"""Statistics of a dataset or of a source as JSON values, for `nnxdsl data`."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from nnxdsl.config.data import BadRows, Data, Feedback, FileData, Mixture
from nnxdsl.data.dataset import Dataset, Int32
from nnxdsl.data.loaders.build import load
from nnxdsl.data.loaders.convert import BYTE_PARTS
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.loaders.layouts import FIRST_ROWS, LAYOUTS, Fields
from nnxdsl.data.loaders.sources import source_chunks, source_rows
from nnxdsl.data.pairs import Pairs
from nnxdsl.data.sequences import Sequences
from nnxdsl.data.sources.in_memory import save_rows
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.data.tokenizers.missing_tokenizer import MissingTokenizer
from nnxdsl.errors import DataError
from nnxdsl.terminal.row_counts import Use

UNLIMITED = 2**30
"""A limit that no length and no number of bad rows reaches."""
BINS = 12
"""Most bins of a histogram."""
AMONG = 1000
"""First rows of a source among which examples are chosen, so that no more of it is read again."""

Json = dict[str, Any]
DataT = TypeVar("DataT", bound=Data)

_TYPES = {str: "text", list: "list", dict: "object", bool: "boolean", int: "number", float: "number"}


def without_limits(data: DataT) -> DataT:
    """The same data of which no row is cut, and bad rows are left out and counted."""
    if isinstance(data, Mixture):
        return attrs.evolve(data, sources=tuple(zip(map(without_limits, data.parts), data.weights, strict=True)))
    lengths = dict.fromkeys(data.length_fields, UNLIMITED)
    return attrs.evolve(counting_bad_rows(data), **lengths)


def counting_bad_rows(data: DataT) -> DataT:
    """The same data of which any number of bad rows is left out and counted."""
    if isinstance(data, Mixture):
        return attrs.evolve(data, sources=tuple(zip(map(counting_bad_rows, data.parts), data.weights, strict=True)))
    return attrs.evolve(data, bad_rows=BadRows.Skip(at_most=UNLIMITED)) if isinstance(data, FileData) else data


def describe_source(data: FileData) -> tuple[Json, type[FileData] | None]:
    """The columns, rows and characters of a source as it is, and the kind of data that its first rows are."""
    rows, bad, first_bad = 0, Counter[str](), dict[str, str]()
    counts: dict[str, Counter[str]] = {}
    first: list[Fields] = []
    for chunk in source_chunks(data):
        for number, row in chunk.rows():
            rows += 1
            if isinstance(row, RowError):
                bad[row.kind] += 1
                first_bad.setdefault(row.kind, f"{chunk.place}{number}: {row.what}")
                continue
            if len(first) < FIRST_ROWS:
                first.append(row)
            for name, value in row.items():
                count = counts.setdefault(name, Counter())
                count["rows"] += 1
                count["characters"] += _characters(value)
                count[_TYPES.get(type(value), type(value).__name__)] += 1
    columns = [
        {"name": name, "rows": count.pop("rows"), "characters": count.pop("characters"), "kinds": sorted(count)}
        for name, count in counts.items()
    ]
    summary = {"source": data.name, "rows": rows, "bad": dict(bad), "first": first_bad, "columns": columns}
    names = dict(data.columns)
    return summary, _kind([{names.get(name, name): value for name, value in row.items()} for row in first])


def _characters(value: object) -> int:
    """Characters of the texts in a JSON value, without the keys of objects and who speaks."""
    if isinstance(value, Mapping):
        return sum(_characters(item) for key, item in value.items() if key not in ("role", "from"))
    if isinstance(value, list):
        return sum(map(_characters, value))
    return len(value) if isinstance(value, str) else 0


def _kind(rows: Sequence[Fields]) -> type[FileData] | None:
    """The first kind of data that at least half of some rows can be read as."""
    loader_columns: dict[type[FileData], tuple[tuple[str, ...], ...]] = {
        Data.Preferences: (("chosen", "rejected"), ("prompt_ids", "chosen_ids", "rejected_ids")),
        Data.Feedback: (("completion_ids", "label"),),
        Data.Conversations: (("conversations",),),
        Data.Text: (("text",),),
        Data.Prompts: (("prompt",),),
    }
    for kind, column_sets in loader_columns.items():
        layouts = [layout for layout in LAYOUTS if kind.batch_kind in layout.kinds]
        fitting = sum(
            any(layout.fits(row) for layout in layouts)
            or any(all(map(row.__contains__, names)) for names in column_sets)
            for row in rows
        )
        if fitting and 2 * fitting >= len(rows):
            return kind
    return None


def summarize(dataset: Dataset, data: Data, tokenizer: TokenizerBase, examples: int, use: Use = "accepted") -> Json:
    """Statistics of `data`, which was loaded as `dataset`: counts, lengths, and some rows as tokens.

    Args:
        dataset: The dataset.
        data: Its spec.
        tokenizer: Of the dataset.
        examples: Number of rows to show: the shortest, the longest and those between of the first ones.
        use: What the rows are for.
    """
    everything = np.arange(len(dataset))
    if not isinstance(data, Mixture):
        return _summary(dataset, data, tokenizer, examples, everything, dataset.report.to_dict(), use)
    ends = np.cumsum([source.rows for source in dataset.mixture])[:-1]
    parts = zip(data.parts, dataset.mixture, dataset.report.sources, np.split(everything, ends), strict=True)
    each = max(1, examples // len(data.parts)) if examples else 0
    return {
        **_summary(dataset, data, tokenizer, 0, everything, {**dataset.report.to_dict(), "sources": []}, use),
        "unit": data.unit,
        "sources": [
            {
                "name": source.name,
                "share": source.share,
                **_summary(dataset, part, tokenizer, each, rows, report.to_dict(), use),
            }
            for part, source, report, rows in parts
        ],
    }


def _summary(
    dataset: Dataset,
    data: Data,
    tokenizer: TokenizerBase,
    examples: int,
    rows: npt.NDArray[np.int64],
    report: Json,
    use: Use,
) -> Json:
    """The summary of some rows of a dataset, which are those of one source."""
    lengths, tokens, targets = _lengths(dataset, rows)
    return {
        "kind": type(data).__qualname__,
        "use": use,
        "columns": _columns(data) if isinstance(data, FileData) else [],
        "report": report,
        "rows": len(rows),
        "tokens": tokens,
        "tokens_with_loss": targets,
        "lengths": {name: _statistics(lengths_of_part) for name, lengths_of_part in lengths.items()},
        "examples": list(_examples(dataset, data, tokenizer, rows, next(reversed(lengths.values())), examples)),
    }


def _columns(data: FileData) -> list[str]:
    """The columns of the first rows."""
    rows = (row for chunk in source_chunks(data) for _, row in chunk.rows() if not isinstance(row, RowError))
    return list(dict.fromkeys(name for row in itertools.islice(rows, FIRST_ROWS) for name in row))


def _lengths(dataset: Dataset, rows: npt.NDArray[np.int64]) -> tuple[dict[str, Int32], int, int | None]:
    """[rows] lengths by what they count, the whole row last; the number of tokens; and of tokens with loss."""
    parts = {name: part.lengths[rows] for name, part in dataset._parts.items()}
    if isinstance(dataset, Sequences):
        slots, targets = (lengths[rows] for lengths in dataset.packing_lengths())
        lengths = {"without loss": slots - targets, "with loss": targets, "total": slots}
        return lengths, int(slots.sum()), int(targets.sum())
    if isinstance(dataset, Pairs):
        prompt, chosen, rejected = (parts[name] for name in ("prompt", "chosen", "rejected"))
        if dataset.desirable is not None:  # its `rejected` is the completion of another row
            lengths = {"prompt": prompt, "completion": chosen, "total": prompt + chosen}
            return lengths, int(lengths["total"].sum()), int(dataset.targets("chosen")[rows].sum())
        lengths = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        lengths["prompt and longer completion"] = prompt + chosen.clip(min=rejected)
        targets = sum(int(dataset.targets(name)[rows].sum()) for name in ("chosen", "rejected"))
        return lengths, int(prompt.sum() + chosen.sum() + rejected.sum()), targets
    return parts, int(sum(lengths_of_part.sum() for lengths_of_part in parts.values())), None


def _statistics(lengths: Int32) -> Json:
    """Quantiles and a histogram of lengths: bin k begins at `start` + k * `width`."""
    start, last = int(lengths.min()), int(lengths.max())
    width = -(-(last + 1 - start) // BINS)
    edges = np.arange(start, last + 1 + width, width)
    quantiles = np.quantile(lengths, (0.5, 0.95), method="inverted_cdf")
    return {
        "min": start,
        "median": int(quantiles[0]),
        "p95": int(quantiles[1]),
        "max": last,
        "total": int(lengths.sum()),
        "histogram": {"start": start, "width": width, "counts": np.histogram(lengths, edges)[0].tolist()},
    }


def _examples(
    dataset: Dataset, data: Data, tokenizer: TokenizerBase, rows: npt.NDArray[np.int64], lengths: Int32, count: int
) -> Iterator[Json]:
    """Some of the first rows as runs of tokens, from the shortest to the longest."""
    order = np.argsort(lengths[:AMONG], kind="stable")
    chosen = rows[order[np.unique(np.linspace(0, len(order) - 1, count).round().astype(int))]].tolist()
    names: dict[int, str] = {row: dataset.row_ids[int(row)] for row in chosen}
    uncut = _uncut(data, tokenizer, set(names.values())) if isinstance(data, FileData) else {}
    for row, name in names.items():
        parts = dataset.row(row)
        if isinstance(dataset, Pairs) and dataset.desirable is not None:
            parts = _single(parts)
        runs = ([*_runs(parts, whole, tokenizer)] for whole in (*uncut.get(name, ()), parts) if _contains(parts, whole))
        yield {"row": name, "runs": next(runs)}


def _uncut(data: FileData, tokenizer: TokenizerBase, names: set[str]) -> dict[str, list[dict[str, Int32]]]:
    """The ids of some rows before truncation; a row of labelled answers may be two examples. Empty if it fails."""
    rows: dict[str, Any] = {}
    for place, value in source_rows(data):
        if place in names:
            rows[place] = value
        if len(rows) == len(names):
            break
    with tempfile.TemporaryDirectory() as directory:
        try:
            path = save_rows(rows.values(), directory)
            here = attrs.evolve(without_limits(data), path=path, split=None, config=None, revision=None, columns=())
            dataset = load(here, tokenizer, loss_on="all", vocabulary=UNLIMITED)
        except DataError:  # such as labelled answers that all have one prompt
            return {}
        by_row: dict[str, list[dict[str, Int32]]] = {}
        lines = {f"{path}:{line}": name for line, name in enumerate(rows, start=1)}
        for index, place in enumerate(dataset.row_ids):
            parts = dataset.row(index)
            if isinstance(data, Feedback):
                parts = _single(parts)
            by_row.setdefault(lines[place], []).append(parts)
    return by_row


def _single(parts: Mapping[str, Int32]) -> dict[str, Int32]:
    """A labelled answer, without the mismatched one beside it."""
    names = {"prompt": "prompt", "completion": "chosen", "completion_mask": "chosen_mask"}
    return {name: parts[part] for name, part in names.items() if part in parts}


def _untruncated(part: Int32, whole: Int32) -> npt.NDArray[np.bool_] | None:
    """[whole] which ids of a part before truncation are those of `part`; None if it is not made from it."""
    left = len(whole) - len(part)
    for begin in range(min(2, len(part) + 1) if left > 0 else 1):  # a prompt is cut on its left, after its BOS
        is_used = np.arange(len(whole)) >= left + begin
        is_used[:begin] = True
        if left >= 0 and np.array_equal(whole[is_used], part):
            return is_used
    is_used = np.arange(len(whole)) < len(part)
    return is_used if left > 0 and np.array_equal(whole[is_used], part) else None


def _contains(parts: Mapping[str, Int32], whole: Mapping[str, Int32]) -> bool:
    return all(_untruncated(ids, whole[name]) is not None for name, ids in parts.items() if name not in BYTE_PARTS)


def _runs(parts: Mapping[str, Int32], whole: Mapping[str, Int32], tokenizer: TokenizerBase) -> Iterable[Json]:
    """Consecutive tokens of a part that all have loss or not, and are all cut or not."""
    for name, ids in whole.items():
        if name in BYTE_PARTS:
            continue
        is_used = _untruncated(parts[name], ids)
        assert is_used is not None
        state = np.where(is_used, name not in ("prompt", "tokens"), 2)
        mask = parts.get("target" if name == "tokens" else f"{name}_mask", ())
        if len(mask):
            state[is_used] = mask
        borders = [0, *(np.flatnonzero(np.diff(state)) + 1).tolist(), len(ids)]
        for begin, end in itertools.pairwise(borders):
            if begin < end:
                text = _text(ids, begin, end, tokenizer)
                is_cut, has_loss = bool(state[begin] == 2), bool(state[begin] == 1)
                yield {"part": name, "loss": has_loss, "cut": is_cut, "tokens": end - begin, "text": text}


def _text(ids: Int32, begin: int, end: int, tokenizer: TokenizerBase) -> str:
    """The text of some of the ids as it stands in the text of all; tokenizers drop a blank at the beginning.

    Without a tokenizer, the ids.
    """
    if isinstance(tokenizer, MissingTokenizer):
        return " ".join(map(str, ids[begin:end].tolist()))
    before, upto = (tokenizer.decode(ids[:place].tolist(), skip_special=False) for place in (begin, end))
    is_beginning = upto.startswith(before)
    return upto[len(before) :] if is_beginning else tokenizer.decode(ids[begin:end].tolist(), skip_special=False)
