"""Reward functions: looked up, checked against rows, and called; errors name row, function and value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import pytest

from nnxdsl import DataError, PlanError, Reward, RunError, reward
from nnxdsl.config.objectives.reward import functions
from nnxdsl.data.rewards import Rewards, Sampled, Scores, function_of


@pytest.fixture(autouse=True)
def _registered():
    before = dict(functions)
    yield
    functions.clear()
    functions.update(before)


def scored(name: str | Reward, *texts: str, row: Mapping[str, Any] | None = None) -> Scores:
    """What one reward gives for completions of rows `x.jsonl:7`, `x.jsonl:8`, ... with the same columns."""
    rows = [{"prompt": "Hi", **(row or {})} for _ in texts]
    asked = Sampled(
        texts, [[*text.encode(), 0] for text in texts], rows, [f"x.jsonl:{7 + n}" for n in range(len(texts))]
    )
    return Rewards((Reward(name) if isinstance(name, str) else name,)).score(asked)


def test_a_function_gets_the_columns_that_it_names() -> None:
    seen = {}

    @reward("some")
    def some(completion: str, answer: str, *, bonus: float = 2.0) -> float:
        seen.update(completion=completion, answer=answer, bonus=bonus)
        return bonus

    @reward("all")
    def everything(completion: str, **columns: object) -> int:
        return len(columns)

    actual = Rewards((Reward("some"), Reward("all", weight=0.5)))
    row = {"prompt": "Hi", "answer": "a", "bonus": 3.0}
    actual.check([row], ["x.jsonl:1"])
    assert actual.score(Sampled(["text"], [[1, 2]], [row], ["x.jsonl:1"])).values == [[3.0, 3.0]]
    assert seen == {"completion": "text", "answer": "a", "bonus": 3.0}
    assert (actual.names, actual.weights) == (("some", "all"), (1.0, 0.5))


def test_rewards_that_are_there() -> None:
    texts, row = (" Paris\n", "It is paris.", "Rome"), {"answer": "Paris"}
    assert scored("exact_answer", *texts, row=row).values == [[1.0], [0.0], [0.0]]
    assert scored("contains_answer", *texts, row=row).values == [[1.0], [1.0], [0.0]]


def test_a_function_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNXDSL_ALLOW", "operator")
    assert scored("operator:length_hint", "four").values == [[4.0]]


def test_names_that_nothing_has_are_told_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNXDSL_ALLOW", "no.such")
    with pytest.raises(PlanError) as error:
        Rewards((Reward("exact_anser"), Reward("no.such:thing"), Reward("exact_answer")))
    text = str(error.value)
    assert "objective.rewards.0.name: no reward 'exact_anser' is registered; did you mean 'exact_answer'?" in text
    assert "objective.rewards.1.name: 'no.such:thing' cannot be imported" in text
    assert "rewards.2" not in text


def test_a_row_without_what_a_function_reads() -> None:
    with pytest.raises(DataError, match=r"x.jsonl:2: reward 'exact_answer' reads 'answer'.*it has: prompt"):
        Rewards((Reward("exact_answer"),)).check([{"answer": "a"}, {"prompt": "b"}], ["x.jsonl:1", "x.jsonl:2"])


def test_a_function_that_raises_names_row_function_and_answer() -> None:
    @reward("bad")
    def bad(completion: str) -> float:
        return 1 / len(completion[:0])

    with pytest.raises(
        RunError, match=r"^x.jsonl:7: reward 'bad' failed with ZeroDivisionError: .*completion was 'Yes'$"
    ):
        scored("bad", "Yes")


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", [1.0]])
def test_a_value_that_is_no_finite_number(value: object) -> None:
    reward("odd")(lambda completion: value)
    with pytest.raises(RunError) as error:
        scored("odd", "Yes")
    hint = " (expected one number for one completion)" if isinstance(value, list) else ""
    assert str(error.value) == (
        f"x.jsonl:7: reward 'odd' returned {value!r}, not a finite number{hint}; the completion was 'Yes'"
    )


def test_another_source_is_another_fingerprint() -> None:
    def first(completion: str) -> float:
        return 1.0

    def second(completion: str) -> float:
        return 2.0

    asked = (Reward("it"),)
    reward("it")(first)
    before = Rewards(asked).fingerprint()
    assert Rewards(asked).fingerprint() == before
    reward("it")(second)
    assert Rewards(asked).fingerprint() != before


def test_the_answer_goes_by_name() -> None:
    @reward("any order")
    def any_order(prompt: str, completion: str) -> float:
        return float((prompt, completion) == ("Hi", "text"))

    @reward("own name")
    def own_name(text: str, prompt: str) -> float:
        return float((prompt, text) == ("Hi", "text"))

    actual = Rewards((Reward("any order"), Reward("own name")))
    row = {"prompt": "Hi"}
    actual.check([row], ["x.jsonl:1"])
    assert actual.score(Sampled(["text"], [[1]], [row], ["x.jsonl:1"])).values == [[1.0, 1.0]]
    for name in ("completion", "text"):
        with pytest.raises(DataError) as error:
            actual.check([row, {**row, name: "noise"}], ["x.jsonl:1", "x.jsonl:2"])
        assert f"x.jsonl:2: the column '{name}' has the name of a parameter for completions" in str(error.value)


def test_functions_that_cannot_be_called_are_refused() -> None:
    reward("prompt")(lambda prompt, answer: 1.0)
    reward("nothing")(lambda: 1.0)
    reward("one of many")(lambda prompt, completions: [1.0])
    reward("in C")(max)
    with pytest.raises(PlanError) as error:
        Rewards(tuple(map(Reward, ("prompt", "nothing", "one of many", "in C"))))
    text = str(error.value)
    assert "rewards.0.name: the function of 'prompt' has 'prompt' as its first parameter and no 'completion'" in text
    assert "rewards.1.name: the function of 'nothing' takes no completion" in text
    assert "rewards.3.name: the parameters of 'in C' cannot be read" in text
    assert (
        "rewards.2.name: the function of 'one of many' gets all prompts at once; name the parameter 'prompts'" in text
    )


def test_a_function_of_one_completion_gets_its_token_ids() -> None:
    @reward("tokens")
    def tokens(completion: str, completion_ids: list[int]) -> int:
        return len(completion_ids)

    assert scored("tokens", "", "one", "three").values == [[1.0], [4.0], [6.0]]
    with pytest.raises(
        DataError, match=r"x:1: the column 'completion_ids' has the name of a parameter for completions"
    ):
        Rewards((Reward("tokens"),)).check([{"prompt": "", "completion_ids": "1"}], ["x:1"])


# A row's prompt is text or messages, and TRL gives completions in the form of their prompts.
CHAT = [{"role": "user", "content": "Hi"}]


def test_a_function_of_all_completions_is_called_once_as_by_trl() -> None:
    calls: list[dict[str, Any]] = []

    @reward("everything")
    def everything(completions: list[Any], **kwargs: Any) -> list[float]:
        calls.append({"completions": completions, **kwargs})
        return [float(number) for number in kwargs["number"]]

    @reward("some")
    def some(prompts: list[Any], number: list[int]) -> np.ndarray:
        return np.asarray(number) + len(prompts)

    actual = Rewards((Reward("everything"), Reward("some")))
    rows = [{"prompt": "Hi", "number": 1}, {"prompt": CHAT, "number": 2, "only": True}]
    actual.check(rows, ["a", "b"])
    scores = actual.score(Sampled(["x", "y"], [[1], [2, 3]], rows, ["a", "b"]))
    assert scores.values == [[1.0, 3.0], [2.0, 4.0]]
    assert calls == [
        {
            "completions": ["x", [{"role": "assistant", "content": "y"}]],
            "prompts": ["Hi", CHAT],
            "completion_ids": [[1], [2, 3]],
            "number": [1, 2],
            "only": [None, True],
        }
    ]
    with pytest.raises(DataError, match=r"b: reward 'some' reads 'number'.*it has: prompt"):
        Rewards((Reward("some"),)).check([rows[0], {"prompt": "Hi"}], ["a", "b"])


def test_trls_functions_of_token_ids_are_functions_of_all() -> None:
    class Lengths:
        def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
            return [float(len(ids)) for ids in completion_ids]

    reward("lengths")(Lengths())
    assert scored("lengths", "a", "abc").values == [[2.0], [4.0]]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], r"^x.jsonl:7 ... x.jsonl:8: reward 'all' returned 1 values for 2 completions, not a list of one each$"),
        (1.0, r"^x.jsonl:7 ... x.jsonl:8: reward 'all' returned 1.0 for 2 completions"),
        ([1.0, math.nan], r"^x.jsonl:8: reward 'all' returned nan, not a finite number; the completion was 'b'$"),
        (ValueError("no"), r"^x.jsonl:7 ... x.jsonl:8: reward 'all' failed with ValueError: no$"),
    ],
)
def test_what_is_wrong_with_values_of_all_completions(result: Any, message: str) -> None:
    @reward("all")
    def everything(completions: list[str]) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    with pytest.raises(RunError, match=message):
        scored("all", "a", "b")


def test_a_reward_that_does_not_apply_is_left_out_of_the_sum() -> None:
    reward("one")(lambda completion: None if "n" in completion else 1.0)
    reward("two")(lambda completions: [None if "m" in text else 10.0 for text in completions])
    actual = Rewards((Reward("one", weight=2.0), Reward("two", weight=0.5)))
    scores = actual.score(Sampled(["a", "n", "m", "nm"], [[1]] * 4, [{"prompt": ""}] * 4, ["r"] * 4))
    again = Scores(**json.loads(json.dumps(scores._asdict())))  # as other processes get them
    np.testing.assert_equal(np.asarray(again.values), np.asarray(scores.values))
    np.testing.assert_equal(np.asarray(scores.values), [[1, 10], [math.nan, 10], [1, math.nan], [math.nan] * 2])
    np.testing.assert_equal(actual.totals(scores.values), [7.0, 5.0, 2.0, math.nan])


def test_functions_report_metrics_and_values_of_completions() -> None:
    @reward("one")
    def one(completion: str, log_metric: Any, log_extra: Any) -> float:
        log_metric("letters", len(completion))
        if completion != "ccc":
            log_extra("first", completion[0])
        return 0.0

    @reward("all")
    def everything(completions: list[str], log_metric: Any, log_extra: Any, **columns: Any) -> list[float]:
        log_metric("letters", 9)
        log_extra("sizes", np.array([len(text) for text in completions]))
        log_extra("is long", [np.bool_(len(text) > 2) for text in completions])
        return [0.0 for _ in completions]

    actual = Rewards((Reward("one"), Reward("all")))
    scores = actual.score(Sampled(["a", "bb", "ccc"], [[1]] * 3, [{"prompt": ""}] * 3, ["r"] * 3))
    assert scores.metrics == {"letters": [1.0, 2.0, 3.0, 9.0]}
    assert scores.extra == {"first": ["a", "b", None], "sizes": [1, 2, 3], "is long": [False, False, True]}
    assert {type(value) for each in scores.extra.values() for value in each} == {str, int, bool, type(None)}


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (lambda metric, extra: metric("m", math.nan), r"log_metric\('m', nan\): expected a finite number"),
        (lambda metric, extra: extra("e", [1, 2]), r"log_extra\('e', \.\.\.\): 2 values for 1 completions"),
        (lambda metric, extra: extra("e", object()), r"expected text, a finite number, a bool or None, got <object"),
    ],
)
def test_what_cannot_be_reported(report: Any, message: str) -> None:
    @reward("reports")
    def reports(completion: str, log_metric: Any, log_extra: Any) -> float:
        report(log_metric, log_extra)
        return 0.0

    with pytest.raises(RunError, match=rf"^x.jsonl:7: reward 'reports' failed with ValueError: .*{message}"):
        scored("reports", "a")


def test_a_class_of_another_package_has_a_function_of_its_own() -> None:
    @attrs.frozen(kw_only=True)
    class EndsWith(Reward):
        """Theirs."""

        name: str = "ends_with"
        suffix: str

    with pytest.raises(
        PlanError, match=r"rewards.0: nothing computes .*EndsWith; add @nnxdsl.data.rewards.function_of"
    ):
        scored(EndsWith(suffix="."), "a.")

    @function_of.register(EndsWith)
    def _ends_with(reward: EndsWith, max_completion_length: int | None) -> Any:
        return lambda completion: float(completion.endswith(reward.suffix))

    assert scored(EndsWith(suffix="."), "a.", "b").values == [[1.0], [0.0]]
