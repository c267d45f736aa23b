"""The token cache: equal to rows in memory, reused by later starts, rebuilt if it is damaged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from nnxdsl import BadRows, Data, DataError, Order
from nnxdsl.data import BytesTokenizer, load
from nnxdsl.data.dataset import Dataset
from nnxdsl.data.loaders import token_cache
from nnxdsl.data.loaders.token_cache import TokenCache, checksums
from nnxdsl.terminal.display import Display
from tests.waiting import HANG_SECONDS

ROWS = 1500
ROOT = Path(__file__).parents[2]


def chat(number: int) -> dict[str, Any]:
    turns = [{"role": role, "content": f"{number} {role} " * (number % 40)} for role in ("user", "assistant")]
    return {"messages": turns, "note": number}


@pytest.fixture
def path(write) -> str:
    """A file of several chunks with chats, texts, bad rows, duplicates and long rows."""
    rows: list[Any] = [chat(number) for number in range(1, ROWS)]
    rows[100] = {"prompt": "p" * 3000, "completion": "c"}
    rows[200] = rows[7]
    rows[300] = b'{"messages": [}'
    rows[400] = {"messages": [{"role": "user", "content": "nobody answers"}]}
    return write(*rows * 3)


def data(path: str, **fields: Any) -> Data.Conversations:
    return Data.Conversations(path, max_length=256, bad_rows=BadRows.Skip(at_most=5000), **fields)


def same(one: Dataset, other: Dataset) -> None:
    assert one.report == other.report
    assert list(one.row_ids) == list(other.row_ids)
    assert (one.digest, one.is_chat, one.shapes) == (other.digest, other.is_chat, other.shapes)
    assert one.ids_digest() == other.ids_digest()
    assert [len(part) for part in one.packing_lengths()] == [len(one), len(one)]
    for left, right in zip(one.packing_lengths(), other.packing_lengths(), strict=True):
        assert left.tolist() == right.tolist()
    for row in (0, len(one) // 2, len(one) - 1):
        batches = one.batch([row], 2), other.batch([row], 2)
        for left, right in zip(*batches, strict=True):
            assert (left is None and right is None) or (left.dtype == right.dtype and left.tolist() == right.tolist())


@pytest.mark.extended
def test_stored_tokens_are_those_in_memory(path: str, tmp_path: Path) -> None:
    tokens = BytesTokenizer()
    expected = load(data(path), tokens)
    cache = TokenCache(tmp_path / "home", min_bytes=0, workers=2)
    same(load(data(path), tokens, cache=cache), expected)  # written by two processes
    (stored,) = (tmp_path / "home").glob("*/meta.json")
    written = stored.stat().st_mtime_ns
    same(load(data(path), tokens, cache=TokenCache(tmp_path / "home", min_bytes=0, workers=1)), expected)
    assert stored.stat().st_mtime_ns == written

    moved = shutil.copy(path, tmp_path / "moved.jsonl")
    elsewhere = load(data(str(moved)), tokens, cache=cache)
    assert stored.stat().st_mtime_ns == written  # the same content under another name
    assert len(list((tmp_path / "home").glob("*/meta.json"))) == 1
    assert elsewhere.row_ids[0] == f"{moved}:1"
    assert elsewhere.report.first == {
        kind: f"{tmp_path}/moved{where[4:]}" for kind, where in expected.report.first.items()
    }


def test_prompts_store_the_columns_of_rewards(write, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} ?", "answer": n, "more": {"ü": [1.5, None, "\u2028"]}} for n in range(10)]
    for cache in (None, TokenCache(tmp_path / "home", min_bytes=0), TokenCache(tmp_path / "home", min_bytes=0)):
        dataset = load(Data.Prompts(write(*rows), max_completion_length=4), BytesTokenizer(), cache=cache)
        assert list(getattr(dataset, "columns")) == rows  # noqa: B009
        assert getattr(dataset, "columns")[-1] == rows[-1]  # noqa: B009


def keys(home: Path) -> set[str]:
    return {file.parent.name for file in home.glob("*/meta.json")}


@pytest.mark.extended
def test_whatever_changes_the_ids_changes_the_key(path: str, write, tmp_path: Path) -> None:
    home = tmp_path / "home"
    cache, tokens = TokenCache(home, workers=1, min_bytes=0), BytesTokenizer()
    load(data(path), tokens, cache=cache)
    load(data(path, order=Order.AsInFile()), tokens, cache=cache)
    assert len(keys(home)) == 1
    load(Data.Conversations(path, max_length=255, bad_rows=BadRows.Skip(at_most=5000)), tokens, cache=cache)
    assert len(keys(home)) == 2
    load(data(path), tokens, loss_on="all", cache=cache)
    assert len(keys(home)) == 3
    load(data(path), tokens, vocabulary=400, cache=cache)
    assert len(keys(home)) == 4
    template = BytesTokenizer("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}")
    load(data(path), template, cache=cache)
    assert len(keys(home)) == 5
    with open(path, "ab") as file:
        file.write(json.dumps(chat(3)).encode() + b"\n")
    load(data(path), tokens, cache=cache)
    assert len(keys(home)) == 6


@pytest.mark.extended
@pytest.mark.parametrize("damage", ["tokens.values", "numbers", "meta.json", "meta", "content"])
def test_damage_is_found_and_mended_with_a_warning(
    path: str, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, tokens = TokenCache(tmp_path / "home", display=Display(), workers=1, min_bytes=0), BytesTokenizer()
    expected = load(data(path), tokens)
    load(data(path), tokens, cache=cache)
    (directory,) = (file.parent for file in (tmp_path / "home").glob("*/meta.json"))
    if damage == "meta":
        meta = json.loads((directory / "meta.json").read_text())
        meta["arrays"]["numbers"][1] += 1
        (directory / "meta.json").write_text(json.dumps(meta))
    elif damage == "content":  # of the same size
        with (directory / "tokens.values").open("r+b") as file:
            file.seek(4000)
            file.write(b"\0")
    else:
        os.truncate(directory / damage, 100)
    capsys.readouterr()
    same(load(data(path), tokens, cache=cache), expected)
    shown = " ".join(capsys.readouterr().err.split())
    assert f"warning: the tokens of {path} are damaged; tokenizing again:" in shown
    same(load(data(path), tokens, cache=cache), expected)
    assert "warning" not in capsys.readouterr().err


def test_large_arrays_are_checked_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_cache, "BLOCK", 8)
    monkeypatch.setattr(token_cache, "CHECKED", 32)
    array = np.arange(30, dtype=np.int32)  # 120 bytes: every fourth block of 8 is read
    before = checksums({"a": array})
    assert checksums({"empty": array[:0]}) == {"empty": 0}
    for place, is_read in ((0, True), (1, True), (2, False), (8, True), (25, True), (29, False)):
        changed = array.copy()
        changed[place] += 1
        assert (checksums({"a": changed}) != before) == is_read, place


@pytest.mark.extended
def test_tokens_of_another_version_are_made_again_which_is_said(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, said = TokenCache(tmp_path / "home", display=Display(), workers=1, min_bytes=0), []
    expected = load(data(path), BytesTokenizer(), cache=cache)
    for version in ("", "0.1", "0.1"):
        if version:
            monkeypatch.setattr(token_cache, "_version", lambda name: "0.1")
        same(load(data(path), BytesTokenizer(), cache=cache), expected)
        said.append("were written by another version of nnxdsl or its libraries" in capsys.readouterr().err)
    assert said == [False, True, False]


@pytest.mark.extended
def test_bad_rows_are_refused_alike_and_rows_are_not_tokenized_twice(path: str, tmp_path: Path) -> None:
    strict = Data.Conversations(path, max_length=256)
    messages = []
    for cache in (
        None,
        TokenCache(tmp_path / "home", min_bytes=0, workers=1),
        TokenCache(tmp_path / "home", min_bytes=0, workers=2),
    ):
        with pytest.raises(DataError) as error:
            load(strict, BytesTokenizer(), cache=cache)
        messages.append(str(error.value))
    assert len(set(messages)) == 1
    (stored,) = (tmp_path / "home").glob("*/meta.json")
    written = stored.stat().st_mtime_ns
    cache = TokenCache(tmp_path / "home", min_bytes=0)
    same(load(data(path), BytesTokenizer(), cache=cache), load(data(path), BytesTokenizer()))
    for skipped in (cache, None):
        with pytest.raises(DataError, match="more than 3 bad rows, the limit of bad_rows"):
            load(attrs.evolve(strict, bad_rows=BadRows.Skip(at_most=3)), BytesTokenizer(), cache=skipped)
    assert stored.stat().st_mtime_ns == written
    assert len(keys(tmp_path / "home")) == 1
    assert not list((tmp_path / "home").glob(".writing-*"))


WRITER = """
import os, resource, signal, sys
from pathlib import Path
from nnxdsl import BadRows, Data
from nnxdsl.data import BytesTokenizer, load
from nnxdsl.data.loaders.token_cache import TokenCache
data = Data.Conversations(sys.argv[1], max_length=256, bad_rows=BadRows.Skip(at_most=5000))
if "LARGEST_FILE" in os.environ:  # writing fails beyond it, as on a full disk
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["LARGEST_FILE"]),) * 2)
print("begin", flush=True)
dataset = load(data, BytesTokenizer(), cache=TokenCache(Path(sys.argv[2]), workers=int(sys.argv[3]), min_bytes=0))
print(dataset.ids_digest())
"""


def start(path: str, home: Path, workers: int, **options: Any) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", WRITER, path, str(home), str(workers)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_a_full_disk_leaves_nothing_and_says_so(path: str, tmp_path: Path) -> None:
    process = start(path, tmp_path / "home", 1, env={**os.environ, "LARGEST_FILE": "100000"})
    _, errors = process.communicate(timeout=HANG_SECONDS)
    assert f"DataError: {path}: its tokens cannot be stored: " in errors
    assert not [file for file in (tmp_path / "home").iterdir() if file.is_dir()]


@pytest.mark.extended
def test_a_kill_leaves_nothing_that_is_taken_for_whole(path: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    expected = load(data(path), BytesTokenizer()).ids_digest()
    for delay in (0.0, 0.1):
        process = start(path, home, 2)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.kill()
        process.communicate(timeout=HANG_SECONDS)
    assert start(path, home, 1).communicate(timeout=HANG_SECONDS)[0].split()[-1] == expected
    assert not list(home.glob(".writing-*"))


@pytest.mark.extended
def test_two_processes_tokenize_once(path: str, tmp_path: Path) -> None:
    both = [start(path, tmp_path / "home", 1) for _ in range(2)]
    digests = {process.communicate(timeout=HANG_SECONDS)[0].split()[-1] for process in both}
    assert digests == {load(data(path), BytesTokenizer()).ids_digest()}
    assert len(keys(tmp_path / "home")) == 1
