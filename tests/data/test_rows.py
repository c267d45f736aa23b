"""Reading rows from files, and the messages about bad ones."""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path

import pytest

from nnxdsl import DataError
from nnxdsl.data.loaders import files
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.loaders.sources import file_digest, read_rows

ROWS = [
    {"prompt": "a", "chosen": [{"role": "assistant", "content": "ü"}], "n": [1, 2]},
    {"prompt": "b", "chosen": [{"role": "assistant", "content": "c"}], "n": []},
]


def test_rows_carry_their_lines_and_blank_lines_are_passed_over(write) -> None:
    path = write(b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode(), b"", b"  \r", ROWS[1])
    assert [tuple(row) for row in read_rows(path)] == [("rows.jsonl:1", ROWS[0]), ("rows.jsonl:4", ROWS[1])]


def test_last_line_without_a_newline_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_bytes(b'{"a": 1}\n{"a": 2}')
    assert [row.value for row in read_rows(str(tmp_path / "r.jsonl"))] == [{"a": 1}, {"a": 2}]


def test_null_fields_are_missing_fields(write) -> None:
    assert [row.value for row in read_rows(write({"a": None, "b": 1}))] == [{"b": 1}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": 1', "bad JSON at column 8: Expecting ',' delimiter"),
        (
            b"{",
            "bad JSON at column 2: Expecting property name enclosed in double quotes; JSONL wants one whole object on",
        ),
        (b"\xff\xfe", "bad UTF-8: byte 0xff at position 1: invalid start byte"),
        (b"[1, 2]", "expected an object with fields, got a list"),
        (b'"text"', "expected an object with fields, got text"),
        (b"true", "expected an object with fields, got true"),
        (b'{"a": "\\ud800"}', "bad text: half of a surrogate pair (\\ud800 to \\udfff) without its other half"),
        (b"[" * 200_000, "bad JSON: "),
        (b"9" * 5_000, "bad JSON: "),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "bad JSON: nested deeper than 64 levels"),
        (b'{"a": 1, "b": 2, "a": 1}', "bad JSON: 'a' is repeated in one object"),
        (b'{"a": [{"b": 1, "b": null}]}', "bad JSON: 'b' is repeated in one object"),
        (b'{"a": NaN}', "bad JSON: NaN is not a JSON value; write null, or a finite number"),
        (b'{"a": [-Infinity]}', "bad JSON: -Infinity is not a JSON value; write null, or a finite number"),
        (b'{"a": 1e999}', "bad JSON: the number 1e999 is out of the range of a double"),
    ],
)
def test_what_cannot_be_read_is_said_and_the_next_row_is_read(write, line: bytes, message: str) -> None:
    first, second = read_rows(write(line, {"a": 1}))
    assert isinstance(first.value, RowError)
    assert first.place == "rows.jsonl:1"
    assert first.value.what.startswith(message)
    assert tuple(second) == ("rows.jsonl:2", {"a": 1})


def test_nesting_up_to_the_limit_is_read(write) -> None:
    line = b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}"
    assert [row.value for row in read_rows(write(line))] == [json.loads(line)]


def test_a_whole_surrogate_pair_is_text(write) -> None:
    assert [row.value for row in read_rows(write(b'{"a": "\\ud83d\\ude00"}'))] == [{"a": "\U0001f600"}]


def test_a_line_over_the_limit_is_passed_over(write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE", 2**20)
    path = write({"a": "x" * 3 * 2**20}, {"a": "x" * 2**19})
    first, second = read_rows(path)
    assert isinstance(first.value, RowError)
    assert first.value.what == "the line is longer than 1 MiB"
    assert second.place == "rows.jsonl:2"
    assert isinstance(second.value, dict)


def test_digest_is_that_of_the_bytes(write) -> None:
    path = write(*ROWS)
    assert file_digest(path) == hashlib.sha256(Path(path).read_bytes()).hexdigest()


def test_missing_file_names_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as error:
        read_rows("data/none.jsonl")
    assert str(error.value) == f"data/none.jsonl: no such file (looked in the current directory, {tmp_path})"


def test_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is a directory; give a file$"):
        read_rows(str(tmp_path))


def test_parquet_gives_the_same_rows_as_jsonl(write) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist([*ROWS, {"prompt": "no more"}]), Path("rows.parquet"))
    path = write(*ROWS, {"prompt": "no more"})
    assert [row.value for row in read_rows("rows.parquet")] == [row.value for row in read_rows(path)]
    assert [row.place for row in read_rows("rows.parquet")] == [f"rows.parquet:row {n}" for n in (1, 2, 3)]


def test_damaged_parquet_is_one_error(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"PAR1 nothing of it")
    with pytest.raises(DataError, match=r"rows.parquet: no readable Parquet file: "):
        list(read_rows(str(file)))


def test_parquet_without_pyarrow_says_what_to_install(write, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    path = write(name="rows.parquet")
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(DataError) as error:
        list(read_rows(path))
    assert str(error.value) == "rows.parquet: reading Parquet needs pyarrow: pip install 'nnxdsl[parquet]'"
