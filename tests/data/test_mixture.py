"""Mixtures: shares to two rows, every row of a source once an epoch, random access."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnxdsl import BadRows, Data, Order, SpecError
from nnxdsl.config.core.codegen import parse_value, render
from nnxdsl.data import BatchSampler, BytesTokenizer, Prompts, load
from nnxdsl.data.mixture import BLOCK, MixedRows
from nnxdsl.data.sampler import ordered

SKIP = BadRows.Skip(at_most=1)

SOURCES = st.lists(st.tuples(st.integers(1, 100_000), st.integers(1, 3000)), min_size=1, max_size=6)


def chat(number: int, text: str = "") -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": role, "content": f"{text}{role} {number}"} for role in roles]}


def mixed(shares: list[int], rows: list[int], seed: int = 0, *, shuffled: bool = True) -> MixedRows:
    order = Order.Shuffled() if shuffled else Order.AsInFile()
    return MixedRows(
        shares, rows, seed, lambda source, epoch: ordered(order, rows[source], seed, epoch), shuffled=shuffled
    )


@pytest.mark.extended
@given(SOURCES, st.integers(0, 5), st.booleans())
def test_no_source_is_two_rows_from_its_share(sources: list[tuple[int, int]], seed: int, shuffled: bool) -> None:
    shares, rows = [list(values) for values in zip(*sources, strict=True)]
    mixture, places = mixed(shares, rows, seed, shuffled=shuffled), 3 * BLOCK
    rendered = mixture.source_of(mixture.rows_at(np.arange(places)))
    for blocks in (1, 2, 3):
        counts = np.bincount(rendered[: blocks * BLOCK], minlength=len(rows))
        assert np.abs(counts - mixture.shares * blocks * BLOCK).max() < 2
    expected = mixture.shares * places / np.array(rows)
    assert mixture.epochs(places) == pytest.approx(expected.tolist())


@pytest.mark.extended
@given(SOURCES, st.integers(0, 3 * BLOCK), st.integers(1, 50))
def test_any_place_is_the_same_without_those_before(sources: list[tuple[int, int]], place: int, size: int) -> None:
    shares, rows = [list(values) for values in zip(*sources, strict=True)]
    here = np.arange(place, place + size)
    whole = mixed(shares, rows).rows_at(np.arange(place + size))
    assert mixed(shares, rows).rows_at(here).tolist() == whole[place:].tolist()
    assert mixed(shares, rows).rows_at(here[::-1]).tolist() == whole[place:][::-1].tolist()


def test_a_source_goes_through_its_epochs_whatever_the_others_do() -> None:
    mixture = mixed([3, 1], [500, 70])
    rows = mixture.rows_at(np.arange(4 * BLOCK))
    for source, (first, count) in enumerate(((0, 500), (500, 70))):
        ours = rows[mixture.source_of(rows) == source] - first
        for epoch in range(len(ours) // count):
            seen = ours[epoch * count : (epoch + 1) * count]
            assert seen.tolist() == ordered(Order.Shuffled(), count, 0, epoch).tolist()


def test_sources_are_spread_evenly_without_shuffling() -> None:
    mixture = mixed([3, 1], [9, 9], shuffled=False)
    assert mixture.source_of(mixture.rows_at(np.arange(8))).tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
    assert mixture.rows_at(np.arange(8)).tolist() == [0, 1, 9, 2, 3, 4, 10, 5]


def test_another_seed_shuffles_otherwise() -> None:
    one, other = (mixed([1, 1], [5000, 5000], seed).rows_at(np.arange(64)) for seed in (0, 1))
    assert one.tolist() != other.tolist()


def test_the_rows_of_all_sources_are_joined(write, tokens: BytesTokenizer) -> None:
    one = Data.Conversations(write(*(chat(n) for n in range(9)), name="one.jsonl"))
    two = Data.Conversations(write(*(chat(n, "other ") for n in range(5)), {"x": 1}, name="two.jsonl"), bad_rows=SKIP)
    apart = [load(data, tokens) for data in (one, two)]
    both = load(Data.Mixture({one: 3, two: 1}), tokens)
    assert list(both.row_ids) == [*apart[0].row_ids, *apart[1].row_ids]
    assert [both.row_ids[0], both.row_ids[-1], *both.row_ids[8:10]] == [
        "one.jsonl:1",
        "two.jsonl:5",
        "one.jsonl:9",
        "two.jsonl:1",
    ]
    for row in range(len(both)):
        ours = apart[0].row(row) if row < 9 else apart[1].row(row - 9)
        assert {name: part.tolist() for name, part in both.row(row).items()} == {n: p.tolist() for n, p in ours.items()}
    assert both.shapes["length"] == max(dataset.shapes["length"] for dataset in apart)
    assert (both.report.rows, both.report.accepted, both.report.dropped) == (15, 14, {"missing field": 1})
    assert both.report.first == {"missing field": "two.jsonl:6"}
    assert both.report.lines() == [*apart[0].report.lines(), *apart[1].report.lines()]
    assert both.packing_lengths()[1].tolist() == [*apart[0].packing_lengths()[1], *apart[1].packing_lengths()[1]]
    assert load(Data.Mixture({two: 1, one: 3}), tokens).digest != both.digest

    sampler = BatchSampler(both, batch_size=8, seed=0, order=Order.Shuffled())
    counts = np.bincount(np.concatenate([sampler.indices(step) for step in range(128)]) >= 9)
    assert counts.tolist() == [768, 256]
    shares = [sampler.shares(step) for step in range(128)]
    assert np.mean([share["mixture/one"] for share in shares]) == 0.75
    assert all(share["mixture/one"] + share["mixture/two"] == 1 for share in shares)
    assert sampler.shares(5)["mixture/two"] == np.mean(sampler.indices(5) >= 9)
    assert BatchSampler(apart[0], batch_size=8, seed=0, order=Order.Shuffled()).shares(0) == {}


def test_a_mixture_may_stand_on_the_command_line() -> None:
    text = 'Data.Mixture({Data.Text("a.jsonl"): 3, Data.Text("b.jsonl", max_length=8): 1}, unit="tokens")'
    value = parse_value(text)
    expected = Data.Mixture({Data.Text("a.jsonl"): 3, Data.Text("b.jsonl", max_length=8): 1}, unit="tokens")
    assert value == expected == parse_value(render(expected))
    assert parse_value('{Data.Text("a.jsonl"): 2.0}') == {Data.Text("a.jsonl"): 2.0}
    with pytest.raises(SpecError, match="neither a literal nor a constructor call"):
        parse_value('Data.Mixture({Data.Text("a.jsonl"): 3, **other})')


def test_sources_are_named_after_their_files() -> None:
    paths = ["web.jsonl.gz", "a/code/**/*.jsonl.zst", "hf://owner/chats", "b/web.parquet", "*.csv", ("v1.2.csv", "x")]
    names = Data.Mixture({Data.Text(path): 1 for path in paths}).names
    assert names == ("web-0", "code", "chats", "web-3", "source", "v1.2")


@pytest.mark.parametrize(
    ("unit", "share"), [("rows", 0.5), ("epochs", 100 / 150), ("tokens", None)], ids=["rows", "epochs", "tokens"]
)
def test_weights_count_rows_epochs_or_tokens(write, tokens: BytesTokenizer, unit: Any, share: float | None) -> None:
    many = Data.Text(write(*({"text": "short"} for _ in range(100)), name="many.jsonl"))
    small = Data.Text(write(*({"text": "long" * 30} for _ in range(50)), name="few.jsonl"))
    both = load(Data.Mixture({many: 1, small: 1}, unit=unit), tokens)
    first, second = both.mixture
    assert (first.name, second.name, first.rows, second.rows) == ("many", "few", 100, 50)
    if share is not None:
        assert first.share == pytest.approx(share)
    else:
        assert first.share * 7 == pytest.approx(second.share * 122)  # BOS and EOS count


def test_pairs_labels_and_prompts_are_joined(write, tokens: BytesTokenizer) -> None:
    labelled = [
        [{"prompt": f"{n}?", "completion": f"{n}", "label": n % 2 == side} for n in range(4)] for side in (0, 1)
    ]
    datas = [Data.Feedback(write(*rows, name=f"{name}.jsonl")) for name, rows in zip("ab", labelled, strict=True)]
    joined, ours = load(Data.Mixture(dict.fromkeys(datas, 1)), tokens), [load(data, tokens) for data in datas]
    for row, dataset in enumerate(ours):
        mine = joined.batch(np.arange(4) + 4 * row, 4)
        theirs = dataset.with_shapes(joined.shapes).batch(np.arange(4), 4)
        for left, right in zip(mine, theirs, strict=True):
            assert np.array_equal(left, right) or left is right is None

    prompts = [Data.Prompts(write({"prompt": name, "answer": name}, name=f"{name}.jsonl")) for name in "ab"]
    joined = load(Data.Mixture(dict.fromkeys(prompts, 1)), tokens)
    assert isinstance(joined, Prompts)
    assert [row["answer"] for row in joined.columns] == ["a", "b"]
