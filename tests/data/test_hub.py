"""Datasets of the Hub from the cache of the `datasets` library, without a network, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nnxdsl import Data, DataError
from nnxdsl.data import BytesTokenizer, load

PROGRAM = """
import json, shutil, sys
from pathlib import Path
from datasets.packaged_modules.json.json import Json
from nnxdsl import Data, DataError
from nnxdsl.data import BytesTokenizer, load

home, rows, commit = Path(sys.argv[1]), sys.argv[2], "0123456789" * 4
built = Json(dataset_name="pairs", hash=commit, data_files={"train": rows, "test": rows})
built.download_and_prepare()
shutil.copytree(built.cache_dir, home / "datasets" / "lab___pairs" / "default" / "0.0.0" / commit)
cases = [
    {"split": "train"}, {"split": "train[:20%]"}, {"split": "test", "revision": commit}, {}, {"split": "tain"},
    {"split": "no[:1%]"}, {"split": "train", "config": "other"}, {"split": "train", "revision": "main"},
    {"split": "train", "path": "hf://lab/none"},
]
for case in cases:
    try:
        data = load(Data.Preferences(**{"path": "hf://lab/pairs", **case}), BytesTokenizer())
        print(json.dumps([data.row_ids[-1], data.digest]))
    except DataError as error:
        print(json.dumps(str(error)))
"""


def test_a_dataset_in_the_cache(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    rows = tmp_path / "rows.jsonl"
    pairs = [{"prompt": f"{number}?", "chosen": "a", "rejected": "b"} for number in range(10)]
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(rows)]
    ran = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    actual: list[Any] = [json.loads(line) for line in ran.stdout.splitlines()]
    (whole, digest), (part, other), again, *errors = actual
    assert (whole, part) == ("hf://lab/pairs:row 10", "hf://lab/pairs:row 2")
    assert again == [whole, digest]
    assert digest != other
    commit, offline = "0123456789" * 4, "HF_HUB_OFFLINE is set, so only what is in the cache of datasets can be read"
    assert errors[:2] == [
        "data.split: hf://lab/pairs has several splits; there are: train, test; write split=...",
        "data.split: hf://lab/pairs has no split 'tain'; there are: train, test; did you mean 'train'?",
    ]
    assert "hf://lab/pairs, split 'no[:1%]': cannot be loaded: Unknown split \"no\"" in errors[2]
    assert "hf://lab/pairs, config 'other', split 'train': cannot be loaded: " in errors[3]
    assert f"cache of datasets has commit {commit} of hf://lab/pairs, not 'main'" in errors[4]
    assert errors[5].startswith("hf://lab/none, split 'train': cannot be loaded: ")
    assert errors[5].endswith(offline)


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError) as error:
        load(Data.Text("hf://lab/texts"), BytesTokenizer())
    assert str(error.value) == "hf://lab/texts: datasets of the Hub need datasets: pip install 'nnxdsl[datasets]'"


def test_a_directory_of_the_same_name_is_not_read_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lab" / "texts").mkdir(parents=True)
    (tmp_path / "lab" / "texts" / "rows.jsonl").write_text('{"text": "local"}\n')
    for path, place in (("hf://lab/texts", tmp_path), ("hf://../lab", tmp_path / "lab")):
        monkeypatch.chdir(place)
        with pytest.raises(DataError) as error:
            load(Data.Text(path), BytesTokenizer())
        assert str(error.value).startswith(f"{path}: is a directory here")
