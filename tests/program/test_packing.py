"""However rows are laid into arrays, a step computes the same: loss, metrics, gradients, what the reference says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import attrs
import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_lab.model import Small

from nnxdsl import Adapter, Batching, Data, Experiment, Memory, Objective, SpecError, compile
from nnxdsl.data import BatchSampler, Pairs, Sequences
from nnxdsl.data.batch import PackedPairs, PackedSequences, token_count
from nnxdsl.data.dataset import Dataset, TokenizedRows
from nnxdsl.data.loaders.report import Report
from nnxdsl.data.packing import Size, fit
from nnxdsl.data.ragged import RaggedBuilder
from nnxdsl.planning.flops import work
from nnxdsl.program import precomputed
from nnxdsl.program.batches.abstract import abstract_batch
from nnxdsl.program.compile import Program

VOCAB = 48
BATCHINGS = (Batching.Padded(), Batching.Bucketed(buckets=2), Batching.Packed(), Batching.Packed(length=56))
SIZE = Size(blocks=2, rows=2, length=48, targets=96, items=4)
PAIR = st.tuples(st.integers(1, 16), st.integers(1, 16), st.integers(1, 16))


@attrs.frozen(kw_only=True)
class MeanOfSequences(Objective):
    """A mean over sequences, of another package."""

    batch_kind: ClassVar[str] = "sequences"


def ragged(rows: Sequence[Sequence[int]]) -> Any:
    builder = RaggedBuilder()
    for row in rows:
        builder.add(row)
    return builder.build()


def kept(parts: dict[str, Any], rows: int) -> TokenizedRows:
    report = Report(source="rows.jsonl", rows=rows, accepted=rows, cut={}, dropped={}, odd={}, first={}, lengths={})
    return TokenizedRows(parts, [f"rows.jsonl:{row + 1}" for row in range(rows)], report, "digest", is_chat=False)


def pairs_of(lengths: Sequence[tuple[int, int, int]], seed: int = 0) -> Pairs:
    draw = np.random.default_rng(seed)
    names = ("prompt", "chosen", "rejected")
    parts = {
        name: ragged([draw.integers(1, VOCAB, row[i]).tolist() for row in lengths]) for i, name in enumerate(names)
    }
    return Pairs(kept(parts, len(lengths)))


def sequences_of(lengths: Sequence[int], seed: int = 0, targets: float = 0.5) -> Sequences:
    draw = np.random.default_rng(seed)
    tokens = ragged([draw.integers(1, VOCAB, length).tolist() for length in lengths])
    target = ragged([[0, 1, *(draw.random(length - 2) < targets).astype(int)] for length in lengths])
    return Sequences(kept({"tokens": tokens, "target": target}, len(lengths)))


def batches(dataset: Dataset, program: Program, batching: Batching) -> BatchSampler:
    asked = program.experiment
    blocks = program.blueprint.blocks
    order = Data.Text("none.jsonl").order
    return BatchSampler(dataset, batch_size=asked.batch_size, seed=0, order=order, batching=batching, blocks=blocks)


@pytest.fixture(scope="module")
def dpo(experiment: Callable[..., Experiment]) -> Program:
    asked = {"adapter": Adapter.LoRA(rank=2), "microbatch_size": 2, "memory": Memory(reference="online")}
    return compile(experiment(model=Small(layers=2, pattern=2), **asked))


@pytest.fixture(scope="module")
def sft(experiment: Callable[..., Experiment]) -> Program:
    asked = {"objective": Objective.SFT(loss_on="all"), "microbatch_size": 2}
    return compile(experiment(model=Small(layers=1, pattern=1), **asked))


def close(result: Any, expected: Any, shaken: Sequence[Any]) -> None:
    """Losses are within 1e-6 and gradients within 1e-5 of the largest, or within twice what hangs on last bits.

    Losses and rewards are differences of summed log-probabilities, which are rounded as large numbers, and gradients
    are weighted by the sigmoid of such differences: what is 1e-6 of the largest there is so much of a gradient.
    `shaken` is what is expected of weights that differ in their last bit: heads of a few numbers are normalised here,
    and where a vector happens to be short, float32 says little about its direction.
    """
    (gradients, terms), (other, others), shaken = jax.device_get((result, expected, list(shaken)))
    assert set(terms.metrics) == set(others.metrics)
    wanted = jax.tree.leaves(others)
    difference = 1e-6 * max(map(abs, wanted))
    np.testing.assert_allclose(jax.tree.leaves(terms), wanted, rtol=1e-6, atol=difference)
    scale = max(1.0, *(np.abs(leaf).max() for leaf in other.values()))
    rounding = max(np.abs(leaves[path] - leaf).max() for leaves, _ in shaken for path, leaf in other.items())
    atol = max((1e-5 + difference) * scale, 2 * rounding)
    for path, leaf in other.items():
        np.testing.assert_allclose(gradients[path], leaf, rtol=1e-5, atol=atol, err_msg=path)


def last_bit(leaves: dict[str, Any], seed: int) -> dict[str, Any]:
    """Leaves whose values are one unit in the last place higher or lower, by chance."""
    draw = np.random.default_rng(seed)
    moved = {path: np.nextafter(leaf, np.where(draw.random(leaf.shape) < 0.5, -9, 9)) for path, leaf in leaves.items()}
    return {path: jax.device_put(moved[path].astype(leaf.dtype), leaf.sharding) for path, leaf in leaves.items()}


@pytest.mark.slow
def test_pairs_side_by_side_have_the_gradients_of_pairs_alone(
    dpo: Program, trained: Callable[..., Any], with_b: Callable[..., Any]
) -> None:
    state, gradients = with_b(trained(dpo)), jax.jit(dpo.policy_loss.grads)
    arrays = state.trainable, state.frozen, state.reference
    others = [(state.trainable, last_bit(state.frozen, seed), state.reference) for seed in range(4)]

    @settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(lengths=st.lists(PAIR, min_size=1, max_size=4), seed=st.integers(0, 99))
    def law(lengths: list[tuple[int, int, int]], seed: int) -> None:
        dataset, rows = pairs_of([*lengths, (16, 16, 16)], seed), np.arange(len(lengths))
        tokens, targets = dataset.packing_lengths()
        layout = fit(tokens[rows], targets[rows], SIZE)
        assert layout is not None
        packed = dataset.packed(rows, SIZE, layout)
        padded = dataset.batch(rows, 4)
        shaken = [gradients(*other, padded) for other in others]
        close(gradients(*arrays, packed), gradients(*arrays, padded), shaken)

    law()


@pytest.mark.slow
def test_sequences_side_by_side_have_the_gradients_of_sequences_alone(
    sft: Program, trained: Callable[..., Any]
) -> None:
    state, gradients = trained(sft), jax.jit(sft.policy_loss.grads)
    arrays = state.trainable, state.frozen, state.reference
    others = [(last_bit(state.trainable, seed), state.frozen, state.reference) for seed in range(4)]

    @settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(lengths=st.lists(st.integers(2, 24), min_size=1, max_size=4), seed=st.integers(0, 99))
    def law(lengths: list[int], seed: int) -> None:
        dataset, rows = sequences_of([*lengths, 24], seed), np.arange(len(lengths))
        tokens, targets = dataset.packing_lengths()
        layout = fit(tokens[rows], targets[rows], SIZE)
        assert layout is not None
        packed = dataset.packed(rows, SIZE, layout)
        padded = dataset.batch(rows, 4)
        shaken = [gradients(*other, padded) for other in others]
        close(gradients(*arrays, packed), gradients(*arrays, padded), shaken)

    law()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "sft"])
def test_a_step_is_the_same_however_its_rows_are_batched(
    kind: str, request: pytest.FixtureRequest, trained: Callable[..., Any]
) -> None:
    program: Program = request.getfixturevalue(kind)
    draw = np.random.default_rng(3)
    dataset: Dataset = pairs_of(draw.integers(1, [17, 17, 17], (30, 3)).tolist())
    if kind == "sft":
        dataset = sequences_of(draw.integers(2, 33, 30).tolist())
    actual = {}
    for batching in BATCHINGS:
        batch = batches(dataset, program, batching).batch_at(1)
        state, metrics = program.step(trained(program), batch)
        flops = work(program.blueprint, batch)
        assert flops.executed > 0
        actual[batching] = state.trainable, metrics, token_count(batch), flops.model_flops
    (trainable, metrics, tokens, fewest), *others = actual.values()
    for leaves, figures, count, least in others:
        assert int(figures["num_tokens"]) == count == tokens
        assert least == pytest.approx(fewest, rel=1e-12)
        for name, value in metrics.items():
            assert float(figures[name]) == pytest.approx(float(value), rel=1e-5, abs=1e-6), name
        for path, leaf in trainable.items():
            np.testing.assert_allclose(leaves[path], leaf, rtol=1e-5, atol=1e-5, err_msg=path)


@pytest.mark.slow
def test_what_the_reference_says_is_kept_of_packed_pairs(dpo: Program, trained: Callable[..., Any]) -> None:
    dataset = pairs_of(np.random.default_rng(4).integers(1, [17, 17, 17], (9, 3)).tolist())
    state = trained(dpo)
    padded, packed = (batches(dataset, dpo, batching) for batching in (Batching.Padded(), Batching.Packed()))
    asked = precomputed.with_reference_logps(dpo, state, packed.batch_at(0))
    assert isinstance(asked, PackedPairs)
    rows, where = padded.indices(0), packed.places(0)
    scored: Any = dpo.score(state, padded.batch_at(0)).loss_inputs
    for side, said in (
        (scored.chosen_logps, asked.reference_chosen),
        (scored.rejected_logps, asked.reference_rejected),
    ):
        expected = np.zeros(len(dataset))
        expected[rows] = side
        np.testing.assert_allclose(np.asarray(said)[where >= 0], expected[where[where >= 0]], rtol=1e-5)
    online = dpo.evaluate(state, packed.batch_at(0))
    kept = dpo.evaluate(state, asked)
    assert set(online) == set(kept)
    for name, ratio in online.items():
        assert float(kept[name].total) == pytest.approx(float(ratio.total), rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("batching", BATCHINGS, ids=repr)
def test_what_is_compiled_ahead_is_what_may_come(batching: Batching, experiment: Callable[..., Experiment]) -> None:
    for asked in (experiment(batching=batching), experiment(batching=batching, objective=Objective.SFT(loss_on="all"))):
        program = compile(asked)
        dataset: Dataset = pairs_of([(16, 16, 16)] * 4)
        if asked.objective.batch_kind == "sequences":
            dataset = sequences_of([32] * 4, targets=1.0)
        come = batches(dataset, program, batching).batch_at(0)
        blocks = program.blueprint.blocks
        ahead = abstract_batch(asked.data, asked.batch_size, batching=batching, blocks=blocks)
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), ahead) == jax.tree.map(
            lambda leaf: (leaf.shape, leaf.dtype), come
        )
        packed = isinstance(come, PackedPairs | PackedSequences)
        assert packed == isinstance(batching, Batching.Packed)


def test_sequences_are_packed_only_for_sums_over_tokens(experiment: Callable[..., Experiment]) -> None:
    with pytest.raises(SpecError) as error:
        experiment(objective=MeanOfSequences(), batching=Batching.Packed())
    assert str(error.value).endswith(
        "batching: MeanOfSequences does not declare that it is a sum over tokens (`is_token_sum`), and a packed row "
        "has several sequences; use Batching.Bucketed() or Batching.Padded()"
    )
    assert experiment(objective=MeanOfSequences(), batching=Batching.Bucketed()).batching == Batching.Bucketed()


@pytest.mark.slow
def test_packed_steps_agree_on_eight_devices(on_eight_devices: Callable[..., Any]) -> None:
    padded, *packed = on_eight_devices("program/on_packed.py").values()
    assert [entry["shape"] for entry in packed] != [padded["shape"]] * len(packed)
    for entry in packed:
        assert entry["metrics"] == {name: pytest.approx(v, rel=1e-5, abs=2e-6) for name, v in padded["metrics"].items()}
        assert entry["norm"] == pytest.approx(padded["norm"], rel=1e-5)
