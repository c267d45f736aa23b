"""The recipes' data gives the same batches from every kind of source."""

from __future__ import annotations

import csv
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnxdsl import Batching, Data, Order
from nnxdsl.data import BatchSampler, BytesTokenizer, Dataset, Prompts, load
from nnxdsl.data.loaders.token_cache import TokenCache
from tests.data.test_sources import save

RECIPES = Path(__file__).parents[2] / "experiments" / "data"
KINDS: dict[str, tuple[type[Any], str]] = {
    "pairs": (Data.Preferences, "preferences_held_out"),
    "labelled answers": (Data.Feedback, "preferences_held_out"),
    "chats": (Data.Conversations, "instructions_held_out"),
    "quickstart": (Data.Conversations, "quickstart"),
    "prompts": (Data.Prompts, "prompts_held_out"),
}
FILES = ("jsonl", "jsonl.gz", "jsonl.zst", "json", "parquet", "arrow", "feather")


def rows_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECIPES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def same_batches(one: Dataset, other: Dataset) -> None:
    assert (len(one), one.shapes, one.is_chat, one.ids_digest()) == (
        *(len(other), other.shapes, other.is_chat, other.ids_digest()),
    )
    if isinstance(one, Prompts):
        assert isinstance(other, Prompts)
        assert list(one.columns) == list(other.columns)
        return
    for batching in (Batching.Padded(), Batching.Packed()):
        options: dict[str, Any] = {"batch_size": 16, "seed": 3, "order": Order.Shuffled(), "batching": batching}
        samplers = BatchSampler(one, **options), BatchSampler(other, **options)
        for step in range(len(one) // 16 + 2):
            for left, right in zip(*(sampler.batch_at(step) for sampler in samplers), strict=True):
                assert (left is None and right is None) or (left.dtype == right.dtype and np.array_equal(left, right))


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_the_same_from_every_source(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (data, name), tokens = KINDS[kind], BytesTokenizer()
    rows = rows_of(name)
    expected = load(data(str(RECIPES / f"{name}.jsonl")), tokens)
    sources: list[str | tuple[str, ...]] = [str(save(tmp_path / f"whole.{suffix}", rows)) for suffix in FILES]
    third = len(rows) // 3
    for folder, suffix in (("parts", "jsonl.gz"), ("tables", "parquet")):
        (tmp_path / folder).mkdir()
        for index, part in enumerate((rows[:third], rows[third : 2 * third], rows[2 * third :])):
            save(tmp_path / folder / f"{index}.{suffix}", part)
    sources += ["parts", "tables", "parts/*.gz", ("parts/0.jsonl.gz", "tables/1.parquet", "parts/2*")]
    importlib.import_module("datasets").Dataset.from_list(rows).save_to_disk("saved", num_shards=2)
    for source in (*sources, "saved"):
        same_batches(load(data(source), tokens), expected)
    same_batches(load(data("tables"), tokens, cache=TokenCache(tmp_path / "home", workers=1, min_bytes=0)), expected)


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_batches_of_texts_are_the_same_from_tables_of_text(suffix: str, tmp_path: Path) -> None:
    rows = [{name: chat[0]["content"] for name, chat in row.items()} for row in rows_of("preferences_held_out")]
    with (tmp_path / f"texts.{suffix}").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]), delimiter="\t" if suffix == "tsv" else ",")
        table.writeheader()
        table.writerows(rows)
    one, other = (
        load(Data.Preferences(str(path)), BytesTokenizer())
        for path in (save(tmp_path / "texts.jsonl", rows), tmp_path / f"texts.{suffix}")
    )
    same_batches(one, other)
