"""KTO: its loss against float64 figures and TRL's, the statistic of the batch, and a small model that learns by it."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_lab.model import Small

from nnxdsl import Adapter, Data, Evaluation, Experiment, Objective, Order, compile, from_dict, losses
from nnxdsl.config.core.base import declared
from nnxdsl.data import BytesTokenizer, load
from nnxdsl.data.batch import PackedPairs, PairBatch
from nnxdsl.data.packing import Size, fit
from nnxdsl.losses.base import LossTerms, PairLogps, derived_metrics
from nnxdsl.program import precomputed
from nnxdsl.program.compile import Program, TrainState
from nnxdsl.trainer.evaluation import Evaluator
from nnxdsl.trainer.trainer import _present

STORED = json.loads((Path(__file__).parents[1] / "reference" / "objectives" / "feedback.json").read_text())
PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "objectives.md").read_text(encoding="utf-8")


def answers(which: str) -> tuple[PairLogps, PairLogps]:
    columns = {name: jnp.array(column, jnp.float32) for name, column in STORED["answers"][which].items()}
    tokens = columns["chosen_tokens"], columns["rejected_tokens"]
    policy = PairLogps(columns["chosen"], columns["rejected"], *tokens, columns["desirable"])
    return policy, PairLogps(columns["reference_chosen"], columns["reference_rejected"], *tokens)


def say(objective: Objective, policy: PairLogps, reference: PairLogps, weight: jax.Array | None = None) -> LossTerms:
    return losses.build(objective)(policy, reference, jnp.ones(len(policy.chosen_logps)) if weight is None else weight)


def means(terms: LossTerms) -> dict[str, float]:
    return derived_metrics(
        {name: float(total / count) for name, (total, count) in {"loss": terms.loss, **terms.metrics}.items()}
    )


def gradients(objective: Objective, policy: PairLogps, reference: PairLogps, weight: jax.Array | None = None) -> Any:
    def loss(chosen: jax.Array, rejected: jax.Array) -> jax.Array:
        terms = say(objective, policy._replace(chosen_logps=chosen, rejected_logps=rejected), reference, weight)
        return terms.loss.total / terms.loss.count

    return jax.grad(loss, argnums=(0, 1))(policy.chosen_logps, policy.rejected_logps)


@pytest.mark.parametrize("case", STORED["cases"])
def test_against_float64_of_another_program(case: str) -> None:
    stored = STORED["cases"][case]
    objective = from_dict(stored["objective"], expected=Objective)
    policy, reference = answers(stored["answers"])
    actual = means(say(objective, policy, reference))
    for name in ("loss", "kl", *(f"rewards/{n}" for n in ("chosen", "rejected", "margins")), "logps/chosen"):
        assert actual[name] == pytest.approx(stored[name], rel=5e-6), name
    ours, other = gradients(objective, policy, reference)
    # A loss near its largest value is flat; how flat is no more exact than float32 is around 1.
    np.testing.assert_allclose(ours, stored["by_chosen"], rtol=5e-5, atol=2e-7 / len(ours))
    np.testing.assert_array_equal(other, 0.0)  # nothing is learnt from mismatched answers


def test_the_figures_have_a_baseline_and_none() -> None:
    assert {case["kl"] > 0 for case in STORED["cases"].values()} == {True, False}


def test_it_starts_at_a_half() -> None:
    objective = Objective.KTO(desirable_weight=3.0, undesirable_weight=0.5)
    policy, _ = answers("far")
    actual = means(say(objective, policy, policy._replace(desirable=None)))
    liked = float(jnp.mean(policy.desirable))  # type: ignore[arg-type]
    assert actual["loss"] == pytest.approx(0.5 * (3.0 * liked + 0.5 * (1 - liked)), rel=1e-6)
    assert actual["kl"] == actual["rewards/chosen"] == actual["rewards/rejected"] == actual["rewards/margins"] == 0.0


def test_rows_of_weight_zero_do_not_matter_whatever_they_hold() -> None:
    objective, (policy, reference) = Objective.KTO(beta=0.3), answers("near")
    bad = jnp.array([jnp.nan, jnp.inf])

    def filled(pairs: PairLogps) -> PairLogps:
        columns = (None if x is None else jnp.concatenate([x[:5], bad, x[5:]]) for x in pairs)
        return PairLogps(*columns)  # type: ignore[arg-type]

    weight = jnp.ones(14).at[5:7].set(0)
    alone, actual = say(objective, policy, reference), say(objective, filled(policy), filled(reference), weight)
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(actual), strict=True):
        assert float(other) == pytest.approx(float(one), rel=1e-6)
    plain, toward = (
        gradients(objective, *said)[0] for said in ((policy, reference), (filled(policy), filled(reference), weight))
    )
    np.testing.assert_array_equal(toward[5:7], 0.0)
    np.testing.assert_allclose(jnp.delete(toward, jnp.arange(5, 7)), plain, rtol=1e-6)
    nothing = say(objective, filled(policy), filled(reference), jnp.zeros(14))
    assert all(float(leaf) == 0.0 for leaf in jax.tree.leaves(nothing))


def test_extremes_stay_numbers() -> None:
    far = jnp.array([0.0, -1e-30, -500.0, -20_000.0])
    ours, other = (x.reshape(-1) for x in jnp.meshgrid(far, far))
    policy = PairLogps(ours, other, jnp.ones(16), jnp.ones(16), (jnp.arange(16) % 3 > 0).astype(jnp.float32))
    for way in (policy, policy._replace(chosen_logps=other, rejected_logps=ours)):
        reference = PairLogps(way.rejected_logps, way.chosen_logps, way.chosen_tokens, way.rejected_tokens)
        assert np.isfinite(list(means(say(Objective.KTO(), way, reference)).values())).all()
        assert np.isfinite(gradients(Objective.KTO(), way, reference)).all()


@pytest.mark.parametrize(
    "field", sorted(declared(Objective.KTO).keys() - {"mtp_loss_weight"})
)  # test_mtp_pairs.py has it
def test_every_field_acts(field: str) -> None:
    policy, reference = answers("near")
    changed = attrs.evolve(Objective.KTO(), **{field: 0.4})
    before, after = (means(say(o, policy, reference))["loss"] for o in (Objective.KTO(), changed))
    assert abs(after - before) > 1e-4 * before


def test_the_page_has_it() -> None:
    row = next(line for line in PAGE.splitlines() if line.startswith("| `KTO` |"))
    assert "`beta=0.1`, `desirable_weight=1.0`, `undesirable_weight=1.0`" in row


def labelled(batch: PairBatch) -> PairBatch:
    return batch._replace(desirable=np.array([1, 0, 1, 0], np.float32))


def program_of(experiment: Callable[..., Experiment], **fields: Any) -> Program:
    small = {"model": Small(layers=1, pattern=1), "adapter": Adapter.LoRA(rank=2)}
    return compile(experiment(objective=Objective.KTO(beta=0.5), **{**small, **fields}))


@pytest.mark.extended
@pytest.mark.parametrize("way", ["known", pytest.param("asked", marks=pytest.mark.slow)])
def test_it_trains(
    way: str,
    experiment: Callable[..., Experiment],
    pairs: Callable[..., PairBatch],
    trained: Callable[..., TrainState],
    with_b: Callable[[TrainState], TrainState],
) -> None:
    program, batch = program_of(experiment), labelled(pairs(4, fill=1))
    first = trained(program)
    asked = precomputed.with_reference_logps(program, first, batch) if way == "known" else batch
    at_first = {name: float(x.total / x.count) for name, x in program.evaluate(first, asked).items()}
    assert at_first["loss"] == 0.5
    assert at_first["kl"] == at_first["rewards/chosen"] == 0.0  # to the bit
    state = with_b(first)
    policy, reference = program.score(state, batch).loss_inputs, program.score(first, batch).loss_inputs
    assert isinstance(policy, PairLogps)
    whole = means(losses.build(program.experiment.objective)(policy, reference, batch.weight))
    state, metrics = program.step(state, asked)
    for name, value in whole.items():
        assert float(metrics[name]) == pytest.approx(value, rel=2e-5, abs=1e-6), name
    # Tokens of mismatched answers are read, and not counted.
    assert int(metrics["num_tokens"]) == (batch.prompt_length + batch.chosen_length)[:3].sum()
    for _ in range(8):
        state, metrics = program.step(state, asked)
    assert float(metrics["loss"]) < whole["loss"]
    assert float(metrics["rewards/margins"]) > whole["rewards/margins"]
    # A batch without a label has no mean over its rows: neither 0 nor NaN is logged.
    state, metrics = program.step(state, asked._replace(desirable=np.ones(4, np.float32)))
    row = _present({name: float(value) for name, value in metrics.items()})
    assert set(metrics) - set(row) == {"rewards/rejected", "logps/rejected", "rewards/margins"}
    assert row["rewards/chosen"] != 0
    assert _present({"loss": math.nan, "kl": math.nan}).keys() == {"loss", "kl"}


def test_a_label_that_most_batches_lack_has_the_mean_of_its_rows(
    experiment: Callable[..., Experiment], trained: Callable[..., TrainState], tmp_path: Path
) -> None:
    """Held-out answers come in three batches, the last of them partial; no sum is divided before all are added."""

    def evaluated(*labels: bool) -> tuple[dict[str, float], dict[str, float]]:
        rows = [
            {"prompt_ids": [1 + n, 2], "completion_ids": list(range(3, 5 + n)), "label": label}
            for n, label in enumerate(labels)
        ]
        file = tmp_path / f"{sum(labels)}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        held_out = Data.Feedback(str(file), max_prompt_length=16, max_completion_length=16, order=Order.AsInFile())
        evaluation, tokenizer = Evaluation(data=held_out, every_steps=1), BytesTokenizer()
        program = program_of(experiment, evaluation=evaluation)
        dataset, state = load(held_out, tokenizer), trained(program)
        evaluator = Evaluator(program, evaluation, dataset, tokenizer, is_chat=False)
        assert evaluator.batch_count == 3
        result = evaluator.metrics(state)
        assert result is not None
        last = program.evaluate(state, dataset.batch(np.arange(len(rows))[-1:], program.blueprint.forward_batch_size))
        return result, {name: float(ratio.total / ratio.count) for name, ratio in last.items() if ratio.count}

    lacks, alone = evaluated(*[True] * 9)
    names = {f"eval/{kind}/rejected" for kind in ("rewards", "logps")} | {"eval/rewards/margins"}
    assert lacks.keys() & names == set()
    assert "eval/rewards/chosen" in lacks
    actual, alone = evaluated(*[True] * 8, False)
    assert actual.keys() - lacks.keys() == names
    assert actual["eval/logps/rejected"] == pytest.approx(alone["logps/rejected"], rel=1e-5)
    assert actual["eval/rewards/margins"] == actual["eval/rewards/chosen"] - actual["eval/rewards/rejected"]
    assert all(map(math.isfinite, [*lacks.values(), *actual.values()]))


LABELLED = {f"{kind}/rejected" for kind in ("rewards", "logps")} | {"rewards/margins"}
"""Metrics that need an undesirable answer."""


def assert_whole(result: dict[str, dict[str, float]], whole: dict[str, dict[str, float]]) -> None:
    """Metrics by labels are those of the batch in one piece, and only that without undesirable answers lacks some."""
    for labels, metrics in whole.items():
        assert {name for name, value in metrics.items() if math.isnan(value)} == (
            LABELLED if labels == "none" else set()
        )
        assert result[labels] == pytest.approx(metrics, rel=2e-4, abs=2e-6, nan_ok=True), labels
    assert len({metrics["logps/chosen"] for metrics in whole.values()}) == len(whole)
    assert whole["halves"]["rewards/margins"] != 0


@pytest.fixture(scope="module")
def by_layout(on_eight_devices: Callable[..., Any]) -> dict[str, Any]:
    return on_eight_devices("losses/on_labels.py")


@pytest.mark.extended
def test_parts_of_a_batch_may_lack_a_label(by_layout: dict[str, Any]) -> None:
    whole, *parts = by_layout.values()
    assert len(parts) == 3  # micro-batches, devices, and both
    for part in parts:
        assert_whole(part, whole)


@pytest.mark.extended
def test_one_of_two_processes_may_lack_a_label(by_layout: dict[str, Any]) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    script = Path(__file__).with_name("on_labels.py")
    flags = os.environ.get("XLA_FLAGS", "")
    path = os.pathsep.join(map(str, (script.parents[1] / "packages", script.parents[2])))
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), port], env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    printed = [rank.communicate()[0].splitlines()[-1:] for rank in ranks]  # gloo prints as well
    assert [rank.returncode for rank in ranks] == [0, 0]
    for (line,) in printed:
        assert_whole(json.loads(line)["devices"], by_layout["whole"])


@pytest.mark.slow
def test_answers_side_by_side_are_answers_alone(
    experiment: Callable[..., Experiment],
    trained: Callable[..., TrainState],
    with_b: Callable[[TrainState], TrainState],
    answers_of: Callable[[], Any],
) -> None:
    dataset = answers_of()
    program, rows = program_of(experiment), np.arange(4)
    state = with_b(trained(program))
    size = Size(blocks=2, rows=2, length=48, targets=96, items=4)
    layout = fit(*dataset.packing_lengths(), size)
    assert layout is not None
    packed = dataset.packed(rows, size, layout)
    assert isinstance(packed, PackedPairs)
    gradients = jax.jit(program.policy_loss.grads)
    arrays = state.trainable, state.frozen, state.reference
    (alone, terms), (beside, others) = (
        jax.device_get(gradients(*arrays, batch)) for batch in (dataset.batch(rows, 4), packed)
    )
    for name, value in means(terms).items():
        assert means(others)[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    scale = max(np.abs(leaf).max() for leaf in alone.values())
    for path, leaf in alone.items():
        np.testing.assert_allclose(beside[path], leaf, rtol=1e-4, atol=1e-4 * scale, err_msg=path)


@pytest.fixture
def answers_of(tmp_path: Path) -> Callable[[], Any]:
    """Makes a dataset of four answers of unequal lengths."""

    def make() -> Any:
        draw = np.random.default_rng(1)
        lengths = [(5, 7), (11, 3), (2, 1), (16, 12)]
        ids = [
            {n: draw.integers(1, 48, s).tolist() for n, s in zip(("prompt_ids", "completion_ids"), row, strict=True)}
            for row in lengths
        ]
        (tmp_path / "rows.jsonl").write_text(
            "".join(json.dumps({**row, "label": number % 2 == 0}) + "\n" for number, row in enumerate(ids))
        )
        return load(Data.Feedback(str(tmp_path / "rows.jsonl")), BytesTokenizer())

    return make
