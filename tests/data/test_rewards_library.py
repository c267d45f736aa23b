"""Rewards that need no code, against TRL's own functions (tests/reference/make_rewards.py) and by hand."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnxdsl import DataError, PlanError, Reward, RunError
from nnxdsl.data.rewards import Rewards, Sampled, Scores

TRL = json.loads((Path(__file__).parents[1] / "reference" / "rewards" / "expected.json").read_text(encoding="utf-8"))
TEXTS, ANSWERS = zip(*TRL["answers"], strict=True)


def scores(
    reward: Reward, texts: Sequence[str], ids: Sequence[Sequence[int]], answers: Sequence[str] = (), limit: int = 1000
) -> Scores:
    answers = answers or [""] * len(texts)
    rows = [{"prompt": "", "answer": answer} for answer in answers]
    result = Rewards((reward,), limit)
    result.check(rows, [f"x.jsonl:{number}" for number in range(len(rows))])
    return result.score(Sampled(texts, ids, rows, ["x.jsonl:1"] * len(rows)))


def values(
    reward: Reward, texts: Sequence[str], ids: Sequence[Sequence[int]] = (), **kwargs: Any
) -> list[float | None]:
    """What a reward gives, None where it does not apply."""
    result = scores(reward, texts, ids or [[1]] * len(texts), **kwargs).values
    return [None if math.isnan(value) else value for (value,) in result]


def of_ids(reward: Reward, **kwargs: Any) -> list[float | None]:
    """What a reward gives for the token ids of the reference, whatever their text."""
    return values(reward, ["text"] * len(TRL["ids"]), TRL["ids"], **kwargs)


def test_answers_in_mathematics_are_those_of_trl() -> None:
    actual = scores(Reward.MathAccuracy(), TEXTS, [[1]] * len(TEXTS), ANSWERS)
    assert [None if math.isnan(value) else value for (value,) in actual.values] == TRL["accuracy"]
    assert actual.extra["answer_parsed"][1] == r"[1/3, '\\frac{2}{6}']"
    assert actual.extra["gold_parsed"][0] == r"[1/3, '\\frac{1}{3}']"


def test_answers_after_reasoning_are_those_of_trl() -> None:
    assert values(Reward.MathAccuracy(after="</think>"), TEXTS, answers=ANSWERS) == TRL["reasoning_accuracy"]


@pytest.mark.parametrize("case", TRL["cosine"])
def test_cosine_length_is_that_of_trl(case: dict[str, Any]) -> None:
    settings = {name: value for name, value in case.items() if name != "values"}
    for length, expected in zip(TRL["lengths"], case["values"], strict=True):
        actual = values(Reward.CosineLength(**settings), TEXTS, [[1] * length] * len(TEXTS), answers=ANSWERS)
        assert [value is None for value in actual] == [value is None for value in expected]
        np.testing.assert_allclose([v for v in actual if v is not None], [v for v in expected if v is not None])


def test_cosine_length_by_hand() -> None:
    """At 0, a third, a half and all of the length: cos(pi / 3) is a half; the paper's r_e is for what is as long."""
    reward = Reward.CosineLength(right_short=2.0, right_long=1.0, wrong_short=-10.0, wrong_long=0.0, exceeded=-20.0)
    ids = [[1] * length for length in (0, 10, 15, 29, 30, 31)]
    long = 1 + 0.5 * (1 + math.cos(29 / 30 * math.pi))
    right = values(reward, [r"\boxed{1}"] * 6, ids, answers=["1"] * 6, limit=30)
    np.testing.assert_allclose(np.asarray(right, float), [2.0, 1.75, 1.5, long, -20.0, -20.0])
    wrong = values(reward, [r"\boxed{2}"] * 6, ids, answers=["1"] * 6, limit=30)
    np.testing.assert_allclose(np.asarray(wrong, float), [-10.0, -7.5, -5.0, 10 - 10 * long, -20.0, -20.0])


def test_an_answer_that_never_ends_is_wrong_and_the_next_one_is_compared() -> None:
    texts = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{42}"]
    assert values(Reward.MathAccuracy(answer_timeout=1.0), texts, answers=["42", "42"]) == [0.0, 1.0]


def test_math_verify_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(PlanError) as error:
        Rewards((Reward.ThinkFormat(), Reward.MathAccuracy(), Reward.CosineLength(max_length=8)))
    install = "compares answers with math-verify, which is not installed: pip install 'nnxdsl[math]'"
    assert f"  objective.rewards.1: Reward.MathAccuracy {install}" in str(error.value)
    assert f"  objective.rewards.2: Reward.CosineLength {install}" in str(error.value)


def test_a_row_without_an_answer_is_refused() -> None:
    with pytest.raises(DataError, match=r"x:1: reward 'math_accuracy' reads 'answer', which the row does not have"):
        Rewards((Reward.MathAccuracy(),)).check([{"prompt": ""}], ["x:1"])


def test_an_answer_is_text_or_a_number() -> None:
    texts, rows = [r"\boxed{42}", r"\boxed{0.5}", r"\boxed{7}"], [{"answer": 42}, {"answer": 0.5}, {"answer": 8}]
    rewards = Rewards((Reward.MathAccuracy(),))
    assert rewards.score(Sampled(texts, [[1]] * 3, rows, ["x:1"] * 3)).values == [[1.0], [1.0], [0.0]]
    with pytest.raises(
        RunError, match=r"^x:1: reward 'math_accuracy' failed with TypeError: the column 'answer' must be"
    ):
        rewards.score(Sampled(["a"], [[1]], [{"answer": ["42"]}], ["x:1"]))


def test_the_format_of_reasoning_is_that_of_trl() -> None:
    assert values(Reward.ThinkFormat(), TRL["formats"]) == TRL["think_format"]


def test_the_format_of_reasoning_by_hand() -> None:
    texts = ["<think>a</think>", "<think>a</think> \n", "<think>a</think>b", "a</think>b", "a", "[r]a[/r]b"]
    assert values(Reward.ThinkFormat(needs_answer=True), texts) == [0, 0, 1, 0, 0, 0]
    assert values(Reward.ThinkFormat(start=""), texts) == [1, 1, 1, 1, 0, 0]
    assert values(Reward.ThinkFormat(start="[r]", end="[/r]"), texts) == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("case", TRL["repetition"])
def test_the_penalty_of_repetition_is_that_of_trl(case: dict[str, Any]) -> None:
    reward = Reward.RepetitionPenalty(ngram_size=case["ngram_size"], max_penalty=case["max_penalty"])
    actual = of_ids(reward)
    assert actual == case["values"]
    assert not any(math.copysign(1, value) < 0 and value == 0 for value in actual if value is not None)


@pytest.mark.parametrize("case", TRL["soft_overlong"])
def test_the_soft_overlong_punishment_is_that_of_trl(case: dict[str, Any]) -> None:
    assert of_ids(Reward.SoftOverlong(max_length=case["max_length"], cache=case["cache"])) == case["values"]
    assert of_ids(Reward.SoftOverlong(cache=case["cache"]), limit=case["max_length"]) == case["values"]


def test_lengths_are_tokens_and_not_characters() -> None:
    """Tunix takes `len(completion)` of the text: 150 characters of 30 tokens would be over the length of 100."""
    text, ids = "seven " * 25, [1] * 30
    assert values(Reward.SoftOverlong(max_length=100, cache=20), [text], [ids]) == [0.0]
    assert len(text) > 100
    assert values(Reward.SoftOverlong(max_length=100, cache=20), ["short"], [[1] * 95]) == [-0.75]
    assert values(Reward.RepetitionPenalty(ngram_size=2), ["aaaa"], [[1, 2, 3]]) == [0.0]


def test_lengths_without_effect_are_refused() -> None:
    rewards = (
        Reward.SoftOverlong(max_length=100, cache=20),
        Reward.SoftOverlong(name="other", cache=65),
        Reward.SoftOverlong(name="third", max_length=80, cache=20),
    )
    with pytest.raises(PlanError) as error:
        Rewards(rewards, 64)
    assert str(error.value).splitlines()[1:] == [
        "  objective.rewards.0.max_length: has no effect: up to 80 tokens nothing is subtracted, and completions have "
        "at most 64",
        "  objective.rewards.1.cache: 65 tokens are more than max_completion_length=64",
    ]
    with pytest.raises(PlanError, match=r"rewards.0.max_length: None stands for max_completion_length of the data"):
        Rewards((Reward.SoftOverlong(cache=2),))


def test_names_are_the_settings_and_weights_act() -> None:
    actual = Rewards((Reward.ThinkFormat(name="think", weight=2.0), Reward.RepetitionPenalty(weight=3.0)))
    assert actual.names == ("think", "repetition_penalty")
    scored = actual.score(Sampled(["<think>a</think>"], [[1, 1, 1, 1]], [{"prompt": ""}], ["x"]))
    assert actual.totals(scored.values).tolist() == [2.0 - 1.5]
