"""Whether a checkpoint that orbax has written holds all of its arrays: reads tensorstore's index, not the data."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import tensorstore

_HEADER = ".zarray"


def check_complete(arrays: Path, contents: Mapping[str, Iterable[str]]) -> None:
    """Refuses a directory of orbax in which a chunk of an array is missing.

    Args:
        arrays: The directory, with a directory for each group that has arrays; its path is plain.
        contents: Names of the arrays by group.

    Raises:
        OSError: Names the first missing array, and the number of others.
    """
    missing = [f"{group}.{name}" for group, names in contents.items() for name in _missing(arrays / group, names)]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise OSError(f"orbax has written it without all of {missing[0]}{more}")


def _missing(group: Path, names: Iterable[str]) -> list[str]:
    names = list(names)
    if not names:
        return []
    base = {"driver": "file", "path": f"{group}/"}
    index = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    keys = [key.decode() for key in index.list().result()]
    headers = {key.removesuffix(f"/{_HEADER}"): index.read(key) for key in keys if key.endswith(f"/{_HEADER}")}
    chunks = Counter(key.rpartition("/")[0] for key in keys)
    return [
        name
        for name in names
        if name not in headers or chunks[name] != 1 + _num_chunks(json.loads(headers[name].result().value))
    ]


def _num_chunks(header: Mapping[str, list[int]]) -> int:
    return math.prod(-(-size // chunk) for size, chunk in zip(header["shape"], header["chunks"], strict=True))
