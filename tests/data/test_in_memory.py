"""Rows in memory: saved under a digest of their content, and read back unchanged."""

from __future__ import annotations

import math
import types
from pathlib import Path
from typing import Any

import pytest

from nnxdsl import Data, DataError, SpecError, save_rows
from nnxdsl.data import BytesTokenizer, load
from nnxdsl.data.loaders.sources import read_rows

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "ü"}], "n": 1},
    {"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}], "n": 2},
]


@pytest.mark.parametrize("library", ["list", "generator", "datasets", "pyarrow", "pandas", "polars"])
def test_every_container_is_the_same_file(tmp_path: Path, library: str) -> None:
    rows: Any = ROWS
    match library:
        case "generator":
            rows = iter(ROWS)
        case "datasets":
            rows = pytest.importorskip("datasets").Dataset.from_list(ROWS)
        case "pyarrow":
            rows = pytest.importorskip("pyarrow").Table.from_pylist(ROWS)
        case "pandas":
            rows = pytest.importorskip("pandas").DataFrame(ROWS)
        case "polars":
            rows = pytest.importorskip("polars").DataFrame(ROWS)
    path = save_rows(rows, tmp_path / "new")
    assert path == save_rows(ROWS, tmp_path / "new")
    assert [row.value for row in read_rows(path)] == ROWS
    assert [file.name for file in (tmp_path / "new").iterdir()] == [Path(path).name]
    assert len(load(Data.Conversations(path), BytesTokenizer())) == 2


@pytest.mark.parametrize(
    ("inputs", "cure"),
    [
        (ROWS, "; write nnxdsl.save_rows(rows) for rows in memory"),
        (iter(ROWS), "; write nnxdsl.save_rows(rows) for rows in memory"),
        (["a.jsonl", "b.jsonl"], "; write ('a.jsonl', 'b.jsonl')"),
        (Path("a.jsonl"), "; write 'a.jsonl'"),
        (5, ", got 5"),
    ],
)
def test_what_is_no_path_is_refused_with_what_to_write(inputs: Any, cure: str) -> None:
    with pytest.raises(SpecError) as error:
        Data.Conversations(inputs)
    assert str(error.value).endswith(cure)


def test_missing_values_of_frames_are_missing_fields(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"prompt": ["a", None], "score": [math.nan, 0.5]})
    assert [row.value for row in read_rows(save_rows(frame, tmp_path))] == [{"prompt": "a"}, {"score": 0.5}]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "save_rows: there are no rows"),
        ({"train": ROWS}, "save_rows: expected rows, got dict; give one split, such as rows['train']"),
        ("rows.jsonl", "save_rows: expected dicts or a frame, got str"),
        (types.SimpleNamespace(to_dict=dict), "save_rows: expected dicts or a frame, got SimpleNamespace"),
        ([{"a": 1}, ["b"]], "save_rows: row 2: expected a dict, got list"),
        ([{"a": [math.nan]}], "save_rows: row 1: is not of JSON values: Out of range float values"),
        ([{"a": object()}], "save_rows: row 1: is not of JSON values: object is no JSON value"),
    ],
)
def test_what_are_no_rows_is_refused_and_leaves_no_file(tmp_path: Path, rows: Any, message: str) -> None:
    with pytest.raises(DataError) as error:
        save_rows(rows, tmp_path)
    assert str(error.value).startswith(message)
    assert list(tmp_path.iterdir()) == []
