"""Sources of rows: formats, compression, globs, folders, `save_to_disk`, digests."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from nnxdsl import Data, DataError, SpecError
from nnxdsl.data import BytesTokenizer, load
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.loaders.sources import read_rows, source_rows
from nnxdsl.data.sources.digests import Digests
from nnxdsl.data.sources.paths import files_of

ROWS: list[dict[str, Any]] = [
    {"prompt": "a", "chosen": [{"role": "assistant", "content": "ü"}], "n": 1},
    {"prompt": "b\nc", "chosen": [{"role": "assistant", "content": "c"}], "n": 2},
    {"prompt": 'd, "e"', "chosen": [{"role": "assistant", "content": "d"}], "n": 3},
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def save(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows as the format that the file's name says, written by the library that people use for it."""
    zstandard, arrow = importlib.import_module("zstandard"), importlib.import_module("pyarrow")
    lines, table = "".join(json.dumps(row) + "\n" for row in rows).encode(), arrow.Table.from_pylist(rows)
    match path.name.partition(".")[2]:
        case "jsonl" | "ndjson":
            path.write_bytes(lines)
        case "jsonl.gz":
            path.write_bytes(gzip.compress(lines))
        case "jsonl.zst":
            half = len(lines) // 2  # as `zstd -T0` and `cat a.zst b.zst` do: several frames
            path.write_bytes(zstandard.compress(lines[:half]) + zstandard.compress(lines[half:]))
        case "json":
            path.write_text(json.dumps(rows, indent=2))
        case "json.gz":
            path.write_bytes(gzip.compress(json.dumps(rows).encode()))
        case "parquet":
            importlib.import_module("pyarrow.parquet").write_table(table, path)
        case "arrow":
            with importlib.import_module("pyarrow.ipc").new_stream(path, table.schema) as stream:
                stream.write_table(table)
        case "feather":
            importlib.import_module("pyarrow.feather").write_feather(table, path)
        case name:
            raise AssertionError(name)
    return path


@pytest.mark.parametrize(
    "name",
    ["r.jsonl", "r.ndjson", "r.jsonl.gz", "r.jsonl.zst", "r.json", "r.json.gz", "r.parquet", "r.arrow", "r.feather"],
)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / name, ROWS)
    rows = list(read_rows(str(path)))
    assert [row.value for row in rows] == ROWS
    unit = ":" if "jsonl" in name or "ndjson" in name else ":row "
    assert [row.place for row in rows] == [f"{path}{unit}{number}" for number in (1, 2, 3)]


def test_fields_that_are_null_within_arrow_structs_are_missing(tmp_path: Path) -> None:
    rows = [{"m": [{"role": "user", "content": "a"}]}, {"m": [{"role": "tool", "content": "b", "name": "f"}]}]
    path = save(tmp_path / "r.parquet", rows)
    assert [row.value for row in read_rows(str(path))] == rows


def test_a_json_file_of_lines_is_jsonl(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_bytes(b"\xef\xbb\xbf" + LINES)
    rows = list(read_rows(str(tmp_path / "r.json")))
    assert [row.value for row in rows] == ROWS
    assert rows[1].place == f"{tmp_path}/r.json:2"


def test_csv_is_text_in_named_columns(tmp_path: Path) -> None:
    file = tmp_path / "r.csv"
    file.write_bytes(b'\xef\xbb\xbfprompt,completion\r\n"a, ""b""\nc",\xc3\xbc\r\n\r\nd,1\r\nlonely\r\ne,f\r\n')
    first, second, bad, last = read_rows(str(file))
    assert (first.place, first.value) == (f"{file}:row 1", {"prompt": 'a, "b"\nc', "completion": "ü"})
    assert second.value == {"prompt": "d", "completion": "1"}
    assert isinstance(bad.value, RowError)
    assert bad.value.what == "the row has 1 cells, and the header 2"
    assert last.value == {"prompt": "e", "completion": "f"}
    (tmp_path / "r.tsv.gz").write_bytes(gzip.compress(b"a\tb\n1,2\t3\n"))
    assert [row.value for row in read_rows(str(tmp_path / "r.tsv.gz"))] == [{"a": "1,2", "b": "3"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.csv", b"", "r.csv: is empty; the first line of CSV names the columns"),
        ("r.csv", b"a,b,a\n", "r.csv:1: the first line of CSV names the columns, and has 'a' twice"),
        ("r.csv", b"a,,b\n", "r.csv:1: the first line of CSV names the columns, and has '' without a name"),
        ("r.csv", b'a,b\n1,2\n"3,4\n', "r.csv:3: bad CSV: unexpected end of data"),
        ("r.csv", b"a,b\n1,\xff\n", "r.csv: bad UTF-8 after line 0: byte 0xff"),
        ("r.json", b'[{"a": 1},\n {"a": 2]', "r.json:2: bad JSON at column 9: Expecting ',' delimiter"),
        (
            "r.json",
            b"[1]\n[2]\n",
            "r.json:2: bad JSON at column 1: Extra data; name it .jsonl if each line is one list",
        ),
        ("r.json", b'[{"a": NaN}]', "r.json: bad JSON: NaN is not a JSON value; write null, or a finite number"),
        ("r.json", b'[{"a": "\xff"}]', "r.json: bad UTF-8: byte 0xff at 9"),
        ("r.arrow", b"ARROW1 nothing of it", "r.arrow: no readable Arrow file: "),
        ("r.jsonl.gz", LINES, "r.jsonl.gz: is no readable .gz file: Not a gzipped file"),
        ("r.jsonl.gz", gzip.compress(LINES)[:-12], "r.jsonl.gz: the compressed file ends too early; was it copied who"),
        ("r.jsonl.zst", LINES, "r.jsonl.zst: is no readable .zst file: "),
    ],
)
def test_what_is_not_of_its_format_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(content)
    with pytest.raises(DataError) as error:
        list(read_rows(name))
    assert str(error.value).startswith(message)


@pytest.mark.extended
def test_zstd_that_ends_too_early_is_refused(tmp_path: Path) -> None:
    whole = save(tmp_path / "r.jsonl.zst", ROWS * 50_000).read_bytes()
    for length in (len(whole) - 1, len(whole) // 4):
        (tmp_path / "cut.jsonl.zst").write_bytes(whole[:length])
        with pytest.raises(DataError, match="ends too early"):
            list(read_rows(str(tmp_path / "cut.jsonl.zst")))


def test_items_of_a_list_that_are_no_objects_are_bad_rows(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('[{"a": 1}, 2, {"a": "\\ud800"}]')
    first, second, third = read_rows(str(tmp_path / "r.json"))
    assert first.value == {"a": 1}
    assert isinstance(second.value, RowError)
    assert second.value.what == "expected an object with fields, got the number 2"
    assert isinstance(third.value, RowError)
    assert third.value.what.startswith("bad text: half of a surrogate pair")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("r.jsonl.zst", "r.jsonl.zst: reading .zst needs zstandard: pip install 'nnxdsl[zstd]'"),
        ("r.arrow", "r.arrow: reading Arrow needs pyarrow: pip install 'nnxdsl[parquet]'"),
    ],
)
def test_a_missing_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    save(tmp_path / name, ROWS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(DataError) as error:
        list(read_rows(name))
    assert str(error.value) == message


def names(*paths: str, split: str | None = None) -> list[str]:
    return [file.name for file in files_of(paths, split)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_files_of_globs_and_folders_stand_in_the_order_of_their_names(here: Path) -> None:
    (here / "shards" / "deep").mkdir(parents=True)
    for name in ("b.jsonl", "a.jsonl.gz", "README.md", ".hidden.jsonl", "deep/c.jsonl"):
        (here / "shards" / name).touch()
    assert names("shards") == names("shards/") == ["shards/a.jsonl.gz", "shards/b.jsonl"]
    assert names("shards/*.jsonl") == ["shards/b.jsonl"]
    assert names("shards/**/*.jsonl") == ["shards/b.jsonl", "shards/deep/c.jsonl"]
    assert names("shards/deep/c.jsonl", "shards/b.jsonl") == ["shards/deep/c.jsonl", "shards/b.jsonl"]
    save(here / "[1].jsonl", ROWS)
    assert names("[1].jsonl") == ["[1].jsonl"]


def test_existing_folders_of_a_glob_stand_for_themselves(here: Path) -> None:
    for folder in ("runs [v1]", "runs 1", "a*", "ab", "a?/[c]"):
        (here / folder).mkdir(parents=True)
        (here / folder / "x.jsonl").touch()
    assert names("runs [v1]/*.jsonl") == ["runs [v1]/x.jsonl"]
    assert names(f"{here}/a?/[c]/[x].jsonl") == [f"{here}/a?/[c]/x.jsonl"]
    assert names("a*/*.jsonl") == ["a*/x.jsonl"]
    assert names("a[b]/*.jsonl") == ["ab/x.jsonl"]
    assert names("[r]uns*/x.jsonl") == ["runs 1/x.jsonl", "runs [v1]/x.jsonl"]


@pytest.mark.parametrize(
    ("files", "paths", "message"),
    [
        ([], ("x*.jsonl",), "x*.jsonl: no file matches (looked in the current directory, "),
        (["rows.jsonl"], ("row.jsonl",), "row.jsonl: no such file (looked in the current directory, "),
        (["d/notes.md"], ("d",), "d: the folder has no rows (.jsonl, .json, .csv, .parquet, .arrow); it has: notes.md"),
        (
            ["d/a.jsonl", "d/b.csv"],
            ("d",),
            "d: the folder has files of several formats: CSV (b.csv), JSONL (a.jsonl); write d/*.csv or d/*.jsonl",
        ),
        (
            ["d/train-0.jsonl", "d/train-1.jsonl", "d/test.jsonl"],
            ("d",),
            "d: the folder has files of several splits: test (test.jsonl), train (train-0.jsonl); write d/test* or "
            "d/train*",
        ),
        (["a.jsonl"], ("a.jsonl", "./a.jsonl"), "./a.jsonl: the same file is listed twice, as a.jsonl; its rows would"),
        (["a.jsonl"], ("a.jsonl", "*.jsonl"), "a.jsonl: the same file is listed twice; its rows would count twice"),
    ],
)
def test_what_names_no_files_says_why(here: Path, files: list[str], paths: tuple[str, ...], message: str) -> None:
    for name in files:
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).touch()
    with pytest.raises(DataError) as error:
        files_of(paths)
    assert str(error.value).startswith(message)


def test_rows_of_several_files_have_their_own_places_and_one_digest(here: Path) -> None:
    save(here / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    save(here / "b.parquet", [{"text": "three"}])
    data = load(Data.Text(("b.parquet", "a.jsonl")), BytesTokenizer())
    assert list(data.row_ids) == ["b.parquet:row 1", "a.jsonl:1", "a.jsonl:2"]
    assert data.report.source == "b.parquet and 1 more"
    digests = [hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in ("b.parquet", "a.jsonl")]
    assert data.digest == hashlib.sha256("".join(digests).encode()).hexdigest()
    assert load(Data.Text("b.*"), BytesTokenizer()).digest == digests[0]
    assert [row.place for row in source_rows(Data.Text("*"))] == ["a.jsonl:1", "a.jsonl:2", "b.parquet:row 1"]


def test_a_folder_of_save_to_disk(here: Path) -> None:
    datasets = pytest.importorskip("datasets")
    split = datasets.Dataset.from_list(ROWS, split="train")
    split.save_to_disk("one", num_shards=2)
    datasets.DatasetDict({"train": split, "test": split.select([2, 0])}).save_to_disk("several")
    assert [len(names(*where)) for where in (("one",), ("several/test",))] == [2, 1]
    assert [row.value for row in source_rows(Data.Prompts("one"))] == ROWS
    assert [row.value for row in source_rows(Data.Prompts("several", split="test"))] == [ROWS[2], ROWS[0]]
    for path, chosen, message in (
        ("several", None, "data.split: several has several splits; there are: train, test; write split=..."),
        ("several", "tets", "data.split: several has no split 'tets'; there are: train, test; did you mean 'test'?"),
        ("one", "test", "data.split: one has 'train' alone, not 'test'"),
    ):
        with pytest.raises(DataError) as error:
            names(path, split=chosen)
        assert str(error.value) == message


def test_a_split_of_a_folder_of_files_has_no_effect(here: Path) -> None:
    save(here / "a.jsonl", ROWS)
    with pytest.raises(DataError, match=r"data.split: \. has no splits, so split='train' has no effect"):
        load(Data.Text(".", split="train"), BytesTokenizer())


@pytest.mark.parametrize(
    ("path", "settings", "problem"),
    [
        ("a.jsonl", {"config": "x"}, "config: has no effect: a.jsonl is no dataset of the Hub (hf://...)"),
        (("a", "b"), {"revision": "x"}, "revision: has no effect: a and 1 more is no dataset of the Hub (hf://...)"),
        *(
            (path, {"split": "x"}, f"split: has no effect: {path} is no folder; datasets of the Hub (hf://...) and "
             "folders that save_to_disk wrote have splits")
            for path in ("a.jsonl", "b/a.csv.gz", "parts/*", "a.parquet")
        ),
    ],
)  # fmt: skip
def test_settings_without_effect_are_refused_at_once(path: Any, settings: dict[str, str], problem: str) -> None:
    with pytest.raises(SpecError) as error:
        Data.Text(path, **settings)
    assert str(error.value) == f"1 problem in Data.Text\n  {problem}"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ((), "path: expected one path or more, none of them blank, got ()"),
        (("a", " "), "path: expected one path or more, none of them blank, got ('a', ' ')"),
        (("hf://a/b", "c.jsonl"), "path: an hf:// path cannot be combined with other paths; use Data.Mixture"),
        ("hf://datasets/a/b", "path: expected hf://name or hf://owner/name of a dataset, got 'hf://datasets/a/b'; wri"),
    ],
)
def test_paths_that_name_nothing_are_refused_at_once(path: Any, message: str) -> None:
    with pytest.raises(SpecError) as error:
        Data.Text(path)
    assert message in str(error.value)


def test_the_digest_of_a_large_file_is_remembered_until_it_changes(tmp_path: Path) -> None:
    file, memory = tmp_path / "a.jsonl", tmp_path / "home" / "digests.json"
    file.write_bytes(LINES)
    digests, expected = Digests(memory, large=1), hashlib.sha256(LINES).hexdigest()
    assert digests.of_file("a", file) == expected
    assert not memory.exists()  # changed a moment ago: a further change might not show in its time
    os.utime(file, (1e9, 1e9))
    assert digests.of_file("a", file) == expected
    memory.write_text(memory.read_text().replace(expected, "remembered"))
    assert digests.of_file("a", file) == "remembered"
    assert Digests(memory).of_file("a", file) == expected  # small
    file.write_bytes(LINES[:-1] + b" ")
    assert digests.of_file("a", file) == hashlib.sha256(LINES[:-1] + b" ").hexdigest()
    memory.write_text("no JSON")
    os.utime(file, (1e9, 1e9))
    assert digests.of_file("a", file) == hashlib.sha256(LINES[:-1] + b" ").hexdigest()
