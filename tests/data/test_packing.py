"""Packing: all rows come back whole, nothing exceeds its room, and a batch depends on its step alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnxdsl import Batching, Data, DataError, Order
from nnxdsl.data import BatchSampler, BytesTokenizer, Dataset, Pairs, Sequences, load
from nnxdsl.data.batch import PackedPairs, PackedSequences, PairBatch, SequenceBatch, non_padding_fraction, token_count
from nnxdsl.data.collate import buckets, make_collator
from nnxdsl.data.dataset import TokenizedRows
from nnxdsl.data.loaders.report import Report
from nnxdsl.data.packing import Packer, Size, fit, levels, quantum, rounded
from nnxdsl.data.ragged import RaggedBuilder

PARTS = ("prompt", "chosen", "rejected")
LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=20)
BATCHINGS = st.sampled_from(
    [Batching.Padded(), Batching.Bucketed(buckets=3), Batching.Packed(), Batching.Packed(length=128)]
)


def kept(parts: dict[str, Sequence[Sequence[int]]]) -> TokenizedRows:
    built = {}
    for name, rows in parts.items():
        builder = RaggedBuilder()
        for row in rows:
            builder.add(row)
        built[name] = builder.build()
    ids = [f"rows.jsonl:{number + 1}" for number in range(len(next(iter(parts.values()))))]
    report = Report(
        source="rows.jsonl", rows=len(ids), accepted=len(ids), cut={}, dropped={}, odd={}, first={}, lengths={}
    )
    return TokenizedRows(built, ids, report, "digest", is_chat=False)


def pairs_of(lengths: Sequence[tuple[int, int, int]]) -> Pairs:
    """Pairs of such lengths, in which no token occurs twice."""
    tokens = iter(range(1, 10**6))
    rendered = [[[next(tokens) for _ in range(length)] for length in row] for row in lengths]
    return Pairs(kept({name: [row[part] for row in rendered] for part, name in enumerate(PARTS)}))


def sequences_of(lengths: Sequence[int], seed: int = 0) -> Sequences:
    """Sequences of such lengths, in which no token occurs twice, and about half of which are targets."""
    tokens, draw = iter(range(1, 10**6)), np.random.default_rng(seed)
    rows = [[next(tokens) for _ in range(length)] for length in lengths]
    targets = [[0, 1, *draw.integers(0, 2, length - 2).tolist()] for length in lengths]
    return Sequences(kept({"tokens": rows, "target": targets}))


def batches(dataset: Dataset, batching: Batching, size: int, blocks: int = 1) -> BatchSampler:
    return BatchSampler(dataset, batch_size=size, seed=1, order=Order.Shuffled(), batching=batching, blocks=blocks)


@given(lengths=LENGTHS, size=st.integers(1, 12), blocks=st.integers(1, 3), length=st.sampled_from([None, 100, 160]))
def test_every_pair_lies_once_and_whole_where_it_is_said_to(
    lengths: list[tuple[int, int, int]], size: int, blocks: int, length: int | None
) -> None:
    dataset = pairs_of(lengths)
    actual = batches(dataset, Batching.Packed(length=length), size, blocks)
    batch, where = actual.batch_at(0), actual.places(0)
    assert isinstance(batch, PackedPairs)
    assert (batch.tokens.shape[0], batch.weight.shape) == (blocks, where.shape)
    assert length is None or batch.tokens.shape[2] == length
    assert sorted(where[where >= 0]) == sorted(actual.indices(0))
    assert np.array_equal(batch.weight, where >= 0)
    assert token_count(batch) == sum(sum(lengths[row]) for row in actual.indices(0))
    for block, rows in enumerate(where):
        flat = {name: getattr(batch, name)[block].reshape(-1) for name in ("tokens", "position", "branch", "segment")}
        line = np.repeat(np.arange(batch.tokens.shape[1]), batch.tokens.shape[2])
        for number, row in enumerate(rows):
            if row < 0:
                assert (batch.prompt_length[block, number], batch.weight[block, number]) == (1, 0)
                continue
            prompt, chosen, rejected = (dataset.row(row)[name].tolist() for name in PARTS)
            # No token occurs twice, but a row may: then each of its places is a whole copy.
            starts = np.flatnonzero(flat["tokens"] == prompt[0])
            assert len(starts) == np.sum(rows == row)
            slots = starts[0] + np.arange(sum(lengths[row]))
            assert flat["tokens"][slots].tolist() == prompt + chosen + rejected
            after = [*range(len(prompt), len(prompt) + len(chosen)), *range(len(prompt), len(prompt) + len(rejected))]
            assert flat["position"][slots].tolist() == [*range(len(prompt)), *after]
            assert flat["branch"][slots].tolist() == np.repeat([0, 1, 2], lengths[row]).tolist()
            assert len(set(flat["segment"][slots])) == len(set(line[slots])) == 1
            for ours, said in ((number, chosen), (batch.weight.shape[1] + number, rejected)):
                mine = batch.owner[block] == ours
                assert batch.target[block][mine].tolist() == said
                before = flat["tokens"][batch.source[block][mine]].tolist()
                assert before == [prompt[-1], *said[:-1]]
    segments = batch.segment.reshape(-1, batch.segment.shape[2])
    assert all((np.diff((segment > 0).astype(int)) <= 0).all() for segment in segments)  # padding at the end alone


@given(lengths=st.lists(st.integers(2, 60), min_size=1, max_size=20), size=st.integers(1, 12), blocks=st.integers(1, 3))
def test_every_sequence_lies_once_and_its_targets_are_predicted_from_the_token_before(
    lengths: list[int], size: int, blocks: int
) -> None:
    dataset = sequences_of(lengths)
    actual = batches(dataset, Batching.Packed(), size, blocks)
    batch, where = actual.batch_at(0), actual.places(0)
    assert isinstance(batch, PackedSequences)
    assert sorted(where[where >= 0]) == sorted(actual.indices(0))
    assert token_count(batch) == sum(lengths[row] for row in actual.indices(0))
    expected = [
        (int(ids[slot - 1]), int(ids[slot]))
        for ids, target in ((row["tokens"], row["target"]) for row in map(dataset.row, actual.indices(0)))
        for slot in np.flatnonzero(target)
    ]
    before = np.take_along_axis(batch.tokens.reshape(blocks, -1), batch.source, axis=1)
    got = zip(before[batch.loss_mask].tolist(), batch.target[batch.loss_mask].tolist(), strict=True)
    assert sorted(got) == sorted(expected)
    assert np.array_equal(batch.weight > 0, batch.loss_mask.any(axis=1))


@given(lengths=LENGTHS, size=st.integers(1, 12), step=st.integers(0, 30), batching=BATCHINGS, blocks=st.integers(1, 2))
def test_a_step_has_the_same_batch_however_it_is_reached(
    lengths: list[tuple[int, int, int]], size: int, step: int, batching: Batching, blocks: int
) -> None:
    dataset = pairs_of(lengths)
    logps = np.random.default_rng(0).standard_normal((len(dataset), 2)).astype(np.float32)
    first = batches(dataset.with_reference_logps(logps), batching, size, blocks)
    for earlier in range(max(0, step - 2), step):
        first.batch_at(earlier)
    again = batches(dataset, batching, size, blocks).over(dataset.with_reference_logps(logps))
    one, other = first.batch_at(step), again.batch_at(step)
    assert isinstance(one, PairBatch | PackedPairs)
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
    where = first.places(step)
    assert where.shape == one.weight.shape == np.shape(one.reference_chosen)
    real = where >= 0
    assert np.array_equal(np.stack([one.reference_chosen, one.reference_rejected], -1)[real], logps[where[real]])
    assert not np.asarray(one.reference_chosen)[~real].any()


@given(
    items=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=25),
    size=st.builds(Size, st.integers(1, 3), st.integers(1, 4), *[st.integers(1, 200)] * 2, st.integers(1, 9)),
)
def test_nothing_is_over_its_room(items: list[tuple[int, int]], size: Size) -> None:
    tokens, targets = np.array(items).T
    layout = fit(tokens, targets, size)
    if layout is None:
        return
    assert (len(layout), {len(block) for block in layout}) == (size.blocks, {size.rows})
    assert sorted(item for block in layout for row in block for item in row) == list(range(len(items)))
    assert all(sum(tokens[item] for item in row) <= size.length for block in layout for row in block)
    blocks = [[item for row in block for item in row] for block in layout]
    assert all(len(block) <= size.items for block in blocks)
    assert all(sum(targets[item] for item in block) <= size.targets for block in blocks)


def test_few_sizes_serve_all_steps_and_little_is_padding() -> None:
    draw = np.random.default_rng(0)
    prompt, response = draw.lognormal(5, 0.7, 4000).clip(8, 512), draw.lognormal(5.7, 0.6, (2, 4000)).clip(8, 512)
    targets = response.astype(np.int32).sum(axis=0)
    tokens = prompt.astype(np.int32) + targets
    steps = draw.permuted(np.arange(4000))[: 62 * 64].reshape(62, 64)
    for blocks, least in ((1, 0.97), (4, 0.97)):
        packer = Packer(tokens, targets, batch_size=64, blocks=blocks, length=None, sample=steps[:31])
        sizes = [packer.pack(step)[0] for step in steps[31:]]
        assert len(set(sizes)) <= 10
        assert sum(tokens[step].sum() for step in steps[31:]) / sum(size.slots for size in sizes) > least
        said = sum(size.blocks * size.targets for size in sizes)
        assert sum(targets[step].sum() for step in steps[31:]) / said > least - 0.02


@given(values=st.lists(st.integers(1, 40), min_size=1, max_size=30), count=st.integers(1, 4))
def test_levels_cost_least(values: list[int], count: int) -> None:
    def cost(chosen: Sequence[int]) -> int:
        return sum(min(level for level in chosen if level >= value) for value in values)

    actual = levels(values, count)
    assert actual == sorted(set(actual))
    assert actual[-1] == max(values)
    assert len(actual) <= count
    if count == 2:
        assert cost(actual) == min(cost((value, max(values))) for value in values)


@given(st.integers(1, 100_000))
def test_lengths_are_rounded_up_by_little(length: int) -> None:
    assert quantum(length) in (8, 16, 32, 64, 128)
    assert 0 <= rounded(length) - length < max(8, length / 16)
    assert rounded(length) % quantum(length) == 0


def test_buckets_are_few_and_the_last_is_the_longest() -> None:
    needed = np.random.default_rng(0).lognormal(4, 0.8, 5000).clip(1, 500).astype(np.int32)
    actual = buckets(needed, 504, 4, 16)
    assert actual[-1] == 504
    assert list(actual) == sorted(set(actual))
    assert len(actual) <= 4
    longest = needed.reshape(-1, 20)[:, :16].max(axis=1)
    shares = [np.mean(longest <= length) for length in actual]
    assert shares == pytest.approx([0.25, 0.5, 0.75, 1], abs=0.12)


def test_a_bucketed_batch_is_as_long_as_its_rows_need() -> None:
    dataset = pairs_of([(3, 4, 5)] * 6 + [(30, 20, 4), (90, 6, 60)])
    actual = batches(dataset, Batching.Bucketed(buckets=4), 2)
    whole = batches(dataset, Batching.Padded(), 2)
    shapes = set()
    for step in range(8):
        batch, padded = actual.batch_at(step), whole.batch_at(step)
        assert isinstance(batch, PairBatch)
        assert isinstance(padded, PairBatch)
        shapes.add((batch.prompt.shape[1], batch.chosen.shape[1]))
        assert batch.prompt_length.max() <= batch.prompt.shape[1] <= padded.prompt.shape[1] == 96
        assert np.array_equal(padded.prompt[:, 96 - batch.prompt.shape[1] :], batch.prompt)
        assert np.array_equal(padded.rejected[:, : batch.rejected.shape[1]], batch.rejected)
        assert non_padding_fraction(batch) >= non_padding_fraction(padded)
    assert (8, 8) in shapes
    assert (96, 64) in shapes


def test_a_bucketed_sequence() -> None:
    batch = batches(sequences_of([5] * 7 + [70]), Batching.Bucketed(), 1).batch_at(3)
    assert isinstance(batch, SequenceBatch)
    assert batch.tokens.shape[1] == rounded(int(batch.length[0]))


def test_a_row_that_is_too_short_is_refused_with_the_pair() -> None:
    dataset = pairs_of([(3, 4, 5), (30, 20, 40)])
    with pytest.raises(DataError) as error:
        batches(dataset, Batching.Packed(length=89), 2)
    assert str(error.value) == (
        "batching.length: rows.jsonl:2 has 90 tokens, more than the 89 of a row, and is not split; raise "
        "batching.length, or leave it out"
    )
    batch = batches(dataset, Batching.Packed(length=90), 2).batch_at(0)
    assert isinstance(batch, PackedPairs)
    assert batch.tokens.shape == (1, 2, 90)


class Custom(Dataset):
    """A kind of dataset of another package."""

    def _shapes(self) -> dict[str, int]:
        return {}

    def batch(self, indices: Any, size: int) -> SequenceBatch:
        return SequenceBatch(*[np.zeros((size, 2), np.int32)] * 3, weight=np.ones(size, np.float32))


@attrs.frozen(kw_only=True)
class Halved(Batching):
    """A way of another package."""

    least: ClassVar[int] = 1


def test_what_does_not_say_how_it_is_packed_is_refused() -> None:
    dataset = Custom(kept({"tokens": [[1, 2]]}))
    assert batches(dataset, Batching.Padded(), 1).batch_at(0).weight.tolist() == [1]
    for batching, method in ((Batching.Packed(), "packing_lengths"), (Batching.Bucketed(), "axis_lengths")):
        with pytest.raises(DataError) as error:
            batches(dataset, batching, 1)
        assert (
            str(error.value) == f"batching: Custom of rows.jsonl does not implement {method}(); use Batching.Padded()"
        )


def test_a_way_of_another_package() -> None:
    dataset = sequences_of([5, 6])
    with pytest.raises(DataError) as error:
        batches(dataset, Halved(), 2)
    assert str(error.value) == (
        "batching: nothing is registered for Halved; add @nnxdsl.data.collate.make_collator.register(Halved)"
    )
    make_collator.register(Halved, cast("Any", make_collator.dispatch(Batching.Padded)))
    assert batches(dataset, Halved(), 2).batch_at(0).weight.tolist() == [1, 1]


def test_the_demo_data_pack(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.chdir(request.config.rootpath)
    dataset = load(Data.Preferences("experiments/data/preferences.jsonl"), BytesTokenizer())
    packed, padded = (batches(dataset, batching, 32) for batching in (Batching.Packed(), Batching.Padded()))
    assert np.mean([non_padding_fraction(packed.batch_at(step)) for step in range(5)]) > 0.93
    assert np.mean([non_padding_fraction(padded.batch_at(step)) for step in range(5)]) < 0.85
