"""Datasets of the Hugging Face Hub, through the `datasets` library: no code of a dataset runs."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from nnxdsl.data.loaders.files import Chunk, ValueChunk
from nnxdsl.data.sources.digests import Digests
from nnxdsl.data.sources.paths import chosen_split
from nnxdsl.data.sources.tables import ROWS, values_of
from nnxdsl.errors import DataError


@attrs.frozen
class HubRows:
    """The rows of a split.

    Attributes:
        name: In places and messages.
        split: The split, or a part of one.
        dataset: A `datasets.Dataset`.
    """

    name: str
    split: str
    dataset: Any

    @property
    def size(self) -> int:
        """Bytes of all rows in memory, about."""
        return max(1, int(self.dataset.data.nbytes))

    @property
    def place(self) -> str:
        """Beginning of the places of the rows."""
        return f"{self.name}:row "

    def chunks(self) -> Iterator[Chunk]:
        """The rows, without null fields."""
        number, total = 0, len(self.dataset)
        for table in self.dataset.with_format("arrow").iter(ROWS):
            values = values_of(table)
            yield ValueChunk(self.place, number + 1, values, self.size * (number + len(values)) // total)
            number += len(values)

    def digest(self, digests: Digests) -> str:
        """sha256 hex of the rows, cached until the library's files change."""
        files = [Path(file["filename"]) for file in self.dataset.cache_files]
        return digests.cached(files, f"rows {self.split}", self._digest) if files else self._digest()

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for chunk in self.chunks():
            assert isinstance(chunk, ValueChunk)
            for value in chunk.values:
                text = json.dumps(value, ensure_ascii=False, default=str)
                digest.update(text.encode("utf-8", "surrogatepass") + b"\n")
        return digest.hexdigest()


@functools.lru_cache(maxsize=4)  # a source is opened to read its first rows, its rows, and a few of them again
def open_hub(name: str, config: str | None, split: str | None, revision: str | None) -> HubRows:
    """The rows of a dataset, which is downloaded if it is not in the library's cache.

    Args:
        name: `owner/name`, after `hf://`.
        config: Its configuration; None for the default one.
        split: Its split, or a part of one; None for the only one.
        revision: Commit, tag or branch; None for `main`.

    Raises:
        DataError: The library is missing; or there is no such dataset, configuration or split, it is empty, or the Hub
            cannot be reached; or a directory has its name.
    """
    path = f"hf://{name}"
    if Path(name).is_dir():  # which the library would read instead
        raise DataError(
            f"{path}: is a directory here, which hides the dataset of the Hub; write {name!r} for its files"
        )
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(f"{path}: datasets of the Hub need datasets: pip install 'nnxdsl[datasets]'") from error
    try:
        builder = datasets.load_dataset_builder(name, config, revision=revision)
        _require_revision(path, revision, builder)
        builder.download_and_prepare()
        splits = list(builder.info.splits or ())
        chosen = chosen_split(path, split, splits) if split is None or split.isidentifier() else split
        dataset = builder.as_dataset(chosen)
    except DataError:
        raise
    except Exception as error:  # of the library, of the Hub's client, of the network
        raise DataError(_reason(path, config, split, revision, error)) from error
    if not len(dataset):
        raise DataError(f"data.split: {path} has no rows in {chosen!r}")
    return HubRows(path, chosen, dataset)


def _require_revision(path: str, revision: str | None, builder: Any) -> None:
    """Refuses another revision, which the library gives without a network: the last one in its cache."""
    is_cached = type(builder).__module__.endswith("packaged_modules.cache.cache")
    commit = str(builder.hash or "")
    if revision is not None and is_cached and not (len(revision) >= 7 and commit.startswith(revision)):
        raise DataError(
            f"data.revision: the Hub cannot be reached; the cache of datasets has commit {commit} of {path}, not "
            f"{revision!r}; give that commit, or connect to the network"
        )


def _reason(path: str, config: str | None, split: str | None, revision: str | None, error: Exception) -> str:
    """The message of an error of the library, and what to do."""
    text = " ".join(str(error).split()).removesuffix(".") or type(error).__name__
    settings = {"config": config, "split": split, "revision": revision}
    named = "".join(f", {name} {value!r}" for name, value in settings.items() if value is not None)
    hint = ""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        hint = "; HF_HUB_OFFLINE is set, so only what is in the cache of datasets can be read"
    elif isinstance(error, ConnectionError) or "connect" in text.lower() or "couldn't reach" in text.lower():
        hint = "; without a network, only what is in the cache of datasets can be read"
    elif type(error).__name__ == "DatasetNotFoundError":
        hint = "; look at its name, or log in with `hf auth login` if it is private or gated"
    return f"{path}{named}: cannot be loaded: {text}{hint}"
