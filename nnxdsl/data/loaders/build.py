"""Builds datasets: reads, tokenizes and counts the rows of a source; `bad_rows` decides about bad ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from nnxdsl.config.data import Data, FileData
from nnxdsl.config.experiment import Experiment
from nnxdsl.data.dataset import Dataset, TokenizedRows, digest_of
from nnxdsl.data.environments.opening import Opener
from nnxdsl.data.environments.registered import tools_of
from nnxdsl.data.loaders.convert import BYTE_PARTS, Conversion, Converted, Example, as_array
from nnxdsl.data.loaders.layouts import Reading, find_reading
from nnxdsl.data.loaders.parallel import convert_all, cpu_count
from nnxdsl.data.loaders.sources import Source, open_source
from nnxdsl.data.loaders.store import Arrays, ArrayStore
from nnxdsl.data.loaders.tally import Tally
from nnxdsl.data.loaders.token_cache import TokenCache, key_of
from nnxdsl.data.ragged import JsonRows, Ragged
from nnxdsl.data.row_ids import RowIds
from nnxdsl.data.row_order import PIECE
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.errors import DataError
from nnxdsl.terminal.display import Display


@functools.singledispatch
def load(
    data: Data,
    tokenizer: TokenizerBase,
    *,
    max_position: int | None = None,
    loss_on: str = "assistant",
    vocabulary: int | None = None,
    cache: TokenCache | None = None,
) -> Dataset:
    """Reads, tokenizes and checks the rows of `data`.

    Other packages register their data with `@nnxdsl.data.load.register(MyData)`.

    Args:
        data: Its config.
        tokenizer: The tokenizer.
        max_position: The model's maximal sequence length; None does not check.
        loss_on: Targets of conversations: "assistant" for the assistant's turns, "last_assistant" for the last of them,
            "completion" for everything after the prompt, "all" for every token but the first.
        vocabulary: The model's vocabulary size, which may be smaller than the tokenizer's; rows with larger ids are
            bad. None does not check.
        cache: Where the tokens of large sources are stored; None for memory.

    Raises:
        DataError: The file cannot be read, there are more bad rows than `bad_rows` allows, no row is left, or a row is
            longer than `max_position`.
    """
    name = type(data).__name__
    raise DataError(f"{name}: nothing is registered to load it; add @nnxdsl.data.load.register({name})")


def load_of(
    experiment: Experiment,
    data: Data,
    tokenizer: TokenizerBase,
    *,
    max_position: int | None,
    vocabulary: int,
    cache: TokenCache | None = None,
) -> Dataset:
    """Loads `data` as an experiment reads it: its targets, and the tools and observations of its environment.

    Args:
        experiment: The experiment.
        data: Its training or evaluation data.
        tokenizer: As of `load`.
        max_position: As of `load`.
        vocabulary: As of `load`.
        cache: As of `load`.

    Raises:
        DataError: See `load`.
        PlanError: A tool of the environment has no docstring or types.
    """
    environment = {"tools": tools_of(experiment.objective), "opener": Opener.of_rows(experiment.objective)}
    return load(
        data,
        tokenizer,
        max_position=max_position,
        loss_on=experiment.objective.loss_on,
        vocabulary=vocabulary,
        cache=cache,
        **{name: value for name, value in environment.items() if value},
    )


def build_dataset(
    data: FileData,
    convert: Callable[[Mapping[str, Any]], Example],
    parts: Sequence[str],
    *,
    tokenizer: TokenizerBase | None = None,
    vocabulary: int | None = None,
    reads: Collection[str] | None = None,
    cache: TokenCache | None = None,
    rules: Any = None,
) -> TokenizedRows:
    """The rows of the source of `data`, converted by `convert`; bad rows follow `data.bad_rows`.

    Args:
        data: The source and the policy.
        convert: From a row's fields to an example; raises RowError for a bad row.
        parts: Names of the parts of every example; all are ids, except `BYTE_PARTS`, which are left out if
            they are empty in every row.
        tokenizer: Decodes ids in messages; None leaves them out, and nothing is cached.
        vocabulary: As of `load`.
        reads: Columns that `convert` reads; the report counts the others. None for all columns.
        cache: As of `load`.
        rules: What `convert` depends on besides `data` and the tokenizer, in plain JSON values.

    Raises:
        DataError: There are more bad rows than the policy allows, or no row is left; or `convert` raised it, with the
            row's position added.
    """
    source = open_source(data, None if cache is None else cache.digests)
    reading = find_reading(data, source.chunks())
    conversion = Conversion(convert, parts, tokenizer, vocabulary, reads, reading)

    def build(store: ArrayStore) -> tuple[Tally, str]:
        assert cache is not None
        tally = _tokenize(data, source, conversion, store, cache.workers or cpu_count(), cache.display)
        return tally, digest_of(_parts(parts, store.arrays()))

    if cache is not None and tokenizer is not None and source.size >= cache.min_bytes:
        key = key_of(data, source, conversion, rules)
        tally, arrays, digest = cache.load_or_build(key, source, build)
        tally.require_allowed(data, source)
        return _rows(source, reading, parts, tally, arrays, digest)
    with ArrayStore() as store:
        tally = _tokenize(data, source, conversion, store)
        tally.require_allowed(data, source)
        return _rows(source, reading, parts, tally, store.arrays())


def _tokenize(
    data: FileData,
    source: Source,
    conversion: Conversion,
    store: ArrayStore,
    workers: int = 1,
    display: Display | None = None,
) -> Tally:
    """Writes the ids of all rows to a store; returns the counts.

    Raises:
        DataError: No row is left, or there are more bad rows than `data.bad_rows` skips.
    """
    tally = Tally([0] * len(source.places))
    if display is not None:
        display.stage(f"tokenizing {source.name}", source.size, unit="bytes")
    for chunk in convert_all(conversion, source.chunks(), workers):
        file = source.places.index(chunk.place)
        tally.add(chunk, file)
        tally.require_allowed(data, source, is_whole=False)
        _append(store, chunk)
        if display is not None:
            display.step(sum(source.sizes[:file]) + chunk.position, source.size, {}, {})
    if not tally.accepted:
        tally.require_allowed(data, source)
    arrays = store.arrays()
    tally.find_duplicates(arrays["hashes"], arrays["numbers"])
    return tally


def _append(store: ArrayStore, chunk: Converted) -> None:
    store.append("numbers", as_array(chunk.numbers))
    store.append("hashes", as_array(chunk.hashes))
    for name, values in chunk.values.items():
        store.append(f"{name}.values", as_array(values))
        store.append(f"{name}.lengths", as_array(chunk.lengths[name]))
        if name in BYTE_PARTS:
            store.append(f"{name}.sums", Ragged(as_array(values), as_array(chunk.lengths[name])).sums())
    if chunk.columns:
        store.append("columns.values", np.frombuffer(b"".join(chunk.columns), np.uint8))
        store.append("columns.lengths", np.array([len(text) for text in chunk.columns], np.int32))


def _parts(names: Sequence[str], arrays: Arrays) -> dict[str, Ragged]:
    """The ids by part, without masks that no row has."""
    has_values = [name for name in names if name not in BYTE_PARTS or len(arrays[f"{name}.values"])]
    return {n: Ragged(arrays[f"{n}.values"], arrays[f"{n}.lengths"], arrays.get(f"{n}.sums")) for n in has_values}


def _rows(
    source: Source,
    reading: Reading,
    names: Sequence[str],
    tally: Tally,
    arrays: Arrays,
    ids_digest: str | None = None,
) -> TokenizedRows:
    parts = _parts(names, arrays)
    has_columns = "columns.values" in arrays
    return TokenizedRows(
        parts,
        RowIds(source.places, tally.ends, arrays["numbers"]),
        attrs.evolve(tally.report(source, parts), layout=reading.describe()),
        source.digest,
        is_chat=2 * tally.chats > tally.accepted,
        columns=JsonRows(Ragged(arrays["columns.values"], arrays["columns.lengths"])) if has_columns else (),
        ids_digest=ids_digest,
    )


def require_fit(
    length: Callable[[slice], npt.NDArray[np.integer]], rows: TokenizedRows, max_position: int | None, remedy: str
) -> None:
    """Raises DataError if a row is longer than the model's positions; names the longest row and the remedy.

    Args:
        length: Lengths of a range of rows.
        rows: All rows.
        max_position: As of `load`.
        remedy: What to change.
    """
    longest = tokens = 0
    for begin in range(0, len(rows.row_ids), PIECE):
        lengths = length(slice(begin, begin + PIECE))
        if lengths.max() > tokens:
            longest, tokens = begin + int(np.argmax(lengths)), int(lengths.max())
    if max_position is not None and tokens > max_position:
        raise DataError(
            f"{rows.row_ids[longest]}: the row has {tokens:,} tokens, more than the model's {max_position:,} "
            f"positions; {remedy}"
        )
