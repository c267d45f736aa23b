"""The losses of pairs: against float64 figures of another program, at their starts, at extremes, every field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxdsl import Divergence, Experiment, Memory, Objective, SpecError, evolve, from_dict, losses
from nnxdsl.config.core.base import declared, members
from nnxdsl.config.core.codegen import render
from nnxdsl.errors import NotRegisteredError
from nnxdsl.losses import preference
from nnxdsl.losses.base import LossTerms, PairLogps, WeightedMean
from nnxdsl.losses.lm_head.token_stats import TokenStats

STORED = json.loads((Path(__file__).parents[1] / "reference" / "objectives" / "figures.json").read_text())
PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "objectives.md").read_text(encoding="utf-8")
SUM = Objective.Sum(terms=(Objective.DPO(), Objective.BCO(), Objective.ChosenSFT()), weights=(0.8, 0.2, 1.0))
OF_PAIRS: dict[str, Any] = {
    **{
        name: cls()
        for name, cls in members(Objective).items()
        if cls.batch_kind == "pairs" and cls.reads_logps and cls is not Objective.Sum
    },
    "Sum": SUM,
}
"""An object of every class whose loss is one of log-probabilities of pairs, with its defaults."""
REFERENCE_FREE = ("ORPO", "SimPO", "CPO", "ChosenSFT")


def column(name: str) -> jax.Array:
    return jnp.array(STORED["pairs"][name], jnp.float32)


TOKENS = column("chosen_tokens"), column("rejected_tokens")
POLICY = PairLogps(column("chosen"), column("rejected"), *TOKENS)
REFERENCE = PairLogps(column("reference_chosen"), column("reference_rejected"), *TOKENS)
ONES = jnp.ones(len(TOKENS[0]))


def numbers(pairs: PairLogps) -> list[jax.Array]:
    """What there is of pairs: more is told of some kinds than of others."""
    return [part for part in pairs if part is not None]


def say(
    objective: Objective, policy: PairLogps = POLICY, reference: PairLogps = REFERENCE, weight: jax.Array = ONES
) -> LossTerms:
    """What the loss says; a reference is there only for those that need one."""
    return losses.build(objective)(policy, reference if objective.needs_reference else None, weight)


def mean(ratio: WeightedMean) -> float:
    return float(ratio.total / ratio.count)


def gradients(
    objective: Objective, policy: PairLogps, reference: PairLogps, weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Of the mean loss, by the policy's log-probabilities of both completions."""

    def loss(chosen: jax.Array, rejected: jax.Array) -> jax.Array:
        terms = say(objective, policy._replace(chosen_logps=chosen, rejected_logps=rejected), reference, weight)
        return terms.loss.total / terms.loss.count

    return jax.grad(loss, argnums=(0, 1))(policy.chosen_logps, policy.rejected_logps)


@pytest.mark.parametrize("case", STORED["cases"])
def test_against_float64_of_another_program(case: str) -> None:
    stored = STORED["cases"][case]
    objective = from_dict(stored["objective"], expected=Objective)
    terms = say(objective)
    assert mean(terms.loss) == pytest.approx(stored["loss"], rel=2e-6)
    for name in ("chosen", "rejected", "margins", "accuracies"):
        if f"rewards/{name}" in stored:
            assert mean(terms.metrics[f"rewards/{name}"]) == pytest.approx(stored[f"rewards/{name}"], rel=5e-6)
    assert any(name.startswith("rewards/") for name in terms.metrics) == ("rewards/margins" in stored)
    for actual, name in zip(gradients(objective, POLICY, REFERENCE, ONES), ("by_chosen", "by_rejected"), strict=True):
        # Each pair's own, so that none hides behind a larger one; where terms cancel, what is left is no more exact.
        rounding = 8e-6 * float(np.median(np.abs(stored[name])))
        np.testing.assert_allclose(actual, stored[name], rtol=5e-5, atol=rounding)
    for row, expected in enumerate(stored.get("pairs", ())):
        alone = mean(say(objective, weight=jnp.zeros_like(ONES).at[row].set(1.0)).loss)
        assert alone == pytest.approx(expected, rel=1e-5, abs=1e-12)


def test_the_figures_hold_every_class() -> None:
    kinds = {case["objective"]["type"] for case in STORED["cases"].values()}
    assert kinds == set(OF_PAIRS)
    divergences = {case["objective"].get("divergence", {}).get("type") for case in STORED["cases"].values()}
    assert divergences - {None} == set(members(Divergence))


def rows() -> Iterator[list[str]]:
    """The cells of the page's table of objectives."""
    for line in PAGE.partition("| objective |")[2].partition("\n\n")[0].splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_has_every_objective_with_its_fields_and_paper() -> None:
    table = {row[0].strip("`"): row for row in rows()}
    assert list(table) == list(OF_PAIRS)
    for name, row in table.items():
        cls = members(Objective)[name]
        fields = [
            f"`{field}`" if spec.default is attrs.NOTHING else f"`{field}={render(spec.default)}`"
            for field, spec in declared(cls).items()
            if field != "mtp_loss_weight"  # which all of them have: a section of its own
        ]
        assert row[3] == ", ".join(fields)
        assert all(f"arXiv:{paper}" in (cls.__doc__ or "") for paper in re.findall(r"\[(\d+\.\d+)\]", row[2]))
        assert bool(re.search(r"\[\d+\.\d+\]", row[2])) == (name != "Sum")


@pytest.mark.parametrize("name", [name for name in OF_PAIRS if name != "Sum"])
def test_it_starts_where_the_page_says(name: str) -> None:
    objective = OF_PAIRS[name]
    formula = next(row[4] for row in rows() if row[0] == f"`{name}`").strip("`")
    a = -0.7
    even = PairLogps(a * TOKENS[0], a * TOKENS[0], TOKENS[0], TOKENS[0])
    policy = POLICY if objective.needs_reference else even
    terms = say(objective, policy, policy)
    space = {**vars(math), **{field: getattr(objective, field) for field in declared(type(objective))}, "a": a}
    assert mean(terms.loss) == pytest.approx(eval(formula, space), rel=1e-6)
    for metric in ("margins", "accuracies"):  # exactly, not within rounding
        if name != "ChosenSFT":
            assert mean(terms.metrics[f"rewards/{metric}"]) == 0.0
    if objective.needs_reference:
        assert mean(terms.metrics["rewards/chosen"]) == mean(terms.metrics["rewards/rejected"]) == 0.0


def swapped(pairs: PairLogps) -> PairLogps:
    return PairLogps(pairs.rejected_logps, pairs.chosen_logps, pairs.rejected_tokens, pairs.chosen_tokens)


@pytest.mark.parametrize("name", [name for name in OF_PAIRS if name != "ChosenSFT"])
def test_swapping_negates_the_margin(name: str) -> None:
    other, back = say(OF_PAIRS[name]), say(OF_PAIRS[name], swapped(POLICY), swapped(REFERENCE))
    assert mean(back.metrics["rewards/margins"]) == -mean(other.metrics["rewards/margins"])
    assert mean(back.metrics["rewards/chosen"]) == mean(other.metrics["rewards/rejected"])
    assert mean(back.loss) != mean(other.loss)


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("name", OF_PAIRS)
def test_rows_of_weight_zero_do_not_matter_whatever_they_hold(name: str) -> None:
    objective = OF_PAIRS[name]
    bad = jnp.array([math.nan, math.inf, -math.inf, 0.0])

    def filled(pairs: PairLogps, seed: int) -> PairLogps:
        # In the middle, so that what is sorted or counted has to pass over them.
        return PairLogps(
            *(jnp.concatenate([x[:5], jnp.roll(bad, seed + i), x[5:]]) for i, x in enumerate(numbers(pairs)))
        )

    weight = jnp.concatenate([ONES[:5], jnp.zeros(4), ONES[5:]])
    policy, reference = filled(POLICY, 0), filled(REFERENCE, 1)
    alone, actual = say(objective), say(objective, policy, reference, weight)
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(actual), strict=True):
        assert float(other) == pytest.approx(float(one), rel=1e-6)
    for plain, toward in zip(
        gradients(objective, POLICY, REFERENCE, ONES), gradients(objective, policy, reference, weight), strict=True
    ):
        np.testing.assert_array_equal(toward[5:9], 0.0)
        np.testing.assert_allclose(jnp.delete(toward, jnp.arange(5, 9)), plain, rtol=1e-6)
    nothing = say(objective, policy, reference, jnp.zeros_like(weight))
    assert all(float(leaf) == 0.0 for leaf in jax.tree.leaves(nothing))


@pytest.mark.parametrize("divergence", members(Divergence))
@pytest.mark.parametrize("name", OF_PAIRS)
def test_extremes_stay_numbers(name: str, divergence: str) -> None:
    objective = OF_PAIRS[name]
    if "divergence" in declared(type(objective)):
        objective = attrs.evolve(objective, divergence=members(Divergence)[divergence]())
    elif divergence != "ReverseKL":
        return
    far = jnp.array([0.0, -1e-30, -3e-8, -500.0, -20_000.0])
    chosen, rejected = (x.reshape(-1) for x in jnp.meshgrid(far, far))
    tokens = jnp.full(len(chosen), 100.0)
    policy = PairLogps(chosen, rejected, tokens, tokens)
    reference = PairLogps(rejected, chosen, tokens, tokens)
    weight = jnp.ones(len(chosen))
    terms = say(objective, policy, reference, weight)
    assert all(np.isfinite(leaf) for leaf in jax.tree.leaves(terms.metrics))
    assert np.isfinite(mean(terms.loss))
    for toward in gradients(objective, policy, reference, weight):
        assert np.isfinite(toward).all()


def another(field: str, value: object) -> object:
    """Another value of a field."""
    if field == "divergence":
        return Divergence.JensenShannon()
    if field == "terms":
        return (Objective.DPO(beta=0.2), *SUM.terms[1:])
    if field == "weights":
        return (0.8, 0.3, 1.0)
    if field == "shift":
        return "batch"
    assert isinstance(value, float)
    return value + 0.1


FIELDS = [
    (name, field)
    for name, objective in OF_PAIRS.items()
    for field in declared(type(objective))
    # Which act before a loss reads anything (test_tail_weight.py), or beside it (test_mtp_pairs.py).
    if field not in ("ld_alpha", "weighting", "mtp_loss_weight")
]


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_every_field_acts(name: str, field: str) -> None:
    objective = OF_PAIRS[name]
    changed = attrs.evolve(objective, **{field: another(field, getattr(objective, field))})
    before, after = mean(say(objective).loss), mean(say(changed).loss)
    assert abs(after - before) > 1e-4 * abs(before)


def test_every_field_of_a_sum_s_terms_acts() -> None:
    for path in ("terms.0.beta", "terms.0.label_smoothing", "terms.1.beta"):
        assert mean(say(evolve(SUM, {path: 0.3})).loss) != mean(say(SUM).loss)


def test_every_field_of_sft_acts() -> None:
    # What `loss_on` marks is known to the data (tests/data/test_conversations.py); a loss sees the mask. What is added
    # for tokens further ahead is no part of it (test_mtp_weight.py).
    assert set(declared(Objective.SFT)) == {"loss_on", "z_loss", "mtp_loss_weight"}
    one = jnp.ones((1, 3))
    stats = TokenStats(-one, 2 * one, one, one, one)
    said = [losses.build(Objective.SFT(z_loss=z))(stats, None, jnp.ones(1)) for z in (0.0, 0.1)]
    assert [mean(terms.loss) for terms in said] == pytest.approx([1.0, 1.4])


def test_alpha_goes_from_reverse_to_forward_kl() -> None:
    x = jnp.array([-3.0, -0.2, 0.0, 0.5, 4.0])
    for alpha, limit in ((1e-5, Divergence.ReverseKL()), (1 - 1e-6, Divergence.ForwardKL())):
        near = preference.score(Divergence.Alpha(alpha=alpha), x)
        np.testing.assert_allclose(near, preference.score(limit, x), rtol=1e-4)


def test_a_divergence_without_a_score() -> None:
    @attrs.frozen(kw_only=True)
    class Mine(Divergence):
        """Of somebody else."""

    with pytest.raises(
        NotRegisteredError, match=r"no score is registered for .*Mine; write\n  from nnxdsl.losses import preference"
    ):
        say(Objective.DPO(divergence=Mine()))


def test_a_sum_is_the_sum_of_its_terms() -> None:
    parts = [say(term) for term in SUM.terms]
    terms = say(SUM)
    weighted = [weight * mean(part.loss) for weight, part in zip(SUM.weights, parts, strict=True)]
    assert mean(terms.loss) == pytest.approx(sum(weighted), rel=1e-6)
    assert {name: mean(ratio) for name, ratio in terms.metrics.items() if name.startswith("loss/")} == {
        f"loss/{name}": mean(part.loss) for name, part in zip(("DPO", "BCO", "ChosenSFT"), parts, strict=True)
    }
    assert mean(terms.metrics["rewards/chosen"]) == mean(parts[0].metrics["rewards/chosen"])
    twice = Objective.Sum(terms=(Objective.DPO(), Objective.DPO(beta=0.5)), weights=(1.0, 1.0))
    assert {"loss/DPO", "loss/DPO_2"} <= set(say(twice).metrics)


def test_the_order_of_rows_means_nothing() -> None:
    order = np.random.default_rng(0).permutation(len(ONES))

    def moved(pairs: PairLogps) -> PairLogps:
        return PairLogps(*(x[order] for x in numbers(pairs)))

    for name in ("AOT", "AOTUnpaired"):
        actual = say(OF_PAIRS[name], moved(POLICY), moved(REFERENCE))
        assert mean(actual.loss) == pytest.approx(mean(say(OF_PAIRS[name]).loss), rel=1e-6)


@pytest.mark.parametrize("name", [name for name, objective in OF_PAIRS.items() if not objective.compares_across_batch])
def test_parts_of_a_batch_add_up(name: str) -> None:
    # Of unequal sizes, and lengths: a mean of means would be another number.
    parts = [
        say(
            OF_PAIRS[name],
            *(PairLogps(*(x[part] for x in numbers(pairs))) for pairs in (POLICY, REFERENCE)),
            ONES[part],
        )
        for part in (slice(0, 5), slice(5, 12))
    ]
    for whole, one, other in zip(*map(jax.tree.leaves, (say(OF_PAIRS[name]), *parts)), strict=True):
        assert float(one + other) == pytest.approx(float(whole), rel=2e-6, abs=1e-6)


def test_the_page_s_sums_are_sums() -> None:
    space: dict[str, Any] = {"Objective": Objective}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        if "Objective.Sum(" in block:
            exec(block, space)
    assert space["mpo"] == SUM
    assert space["rpo"].needs_reference


def said(build: Callable[[], object]) -> str:
    with pytest.raises(SpecError) as caught:
        build()
    return str(caught.value)


def test_what_has_no_reference_refuses_settings_of_one(experiment: Callable[..., Experiment]) -> None:
    free = Objective.Sum(terms=(Objective.SimPO(), Objective.ChosenSFT()), weights=(1.0, 1.0))
    assert {name for name, objective in OF_PAIRS.items() if not objective.needs_reference} == set(REFERENCE_FREE)
    for objective in (free, *(OF_PAIRS[name] for name in REFERENCE_FREE)):
        kind = type(objective).__qualname__
        assert experiment(objective=objective).reference_mode == "none"
        assert said(
            lambda objective=objective: experiment(objective=objective, memory=Memory(reference="online"))
        ).endswith(f"memory.reference: 'online' has no effect: {kind} has no reference")


def test_sums_of_what_cannot_be_added() -> None:
    inner = Objective.Sum(terms=(Objective.DPO(),), weights=(1.0,))
    assert said(lambda: Objective.Sum(terms=(Objective.SFT(), inner), weights=(1.0, -1.0, 2.0))) == (
        "4 problems in Objective.Sum\n"
        "  terms.0: Objective.SFT reads sequences, a sum reads pairs; use Objective.ChosenSFT()\n"
        "  terms.1: Objective.Sum within Objective.Sum; write its terms here\n"
        "  weights.1: expected a value > 0, got -1.0\n"
        "  weights: 3 of them for 2 terms; write one for each"
    )
    assert said(lambda: Objective.Sum(terms=(Objective.DPO(), Objective.Reward()), weights=(1.0, 1.0))) == (
        "1 problem in Objective.Sum\n  terms.1: Objective.Reward has another head than the other terms; train it alone"
    )
    assert said(lambda: Objective.Sum(terms=(), weights=())) == (
        "1 problem in Objective.Sum\n  terms: is empty; expected at least one objective"
    )


def test_modifiers_that_a_loss_cannot_take() -> None:
    assert said(lambda: Objective.NCA(divergence=Divergence.ForwardKL())) == (
        "1 problem in Objective.NCA\n  divergence: NCA has no field 'divergence'; there are: beta, mtp_loss_weight"
    )
    assert said(lambda: Objective.EXO(label_smoothing=0)).endswith("expected a value > 0 and < 0.5, got 0.0")
    assert said(lambda: Divergence.Alpha(alpha=1)).endswith("alpha: expected a value > 0 and < 1, got 1.0")
