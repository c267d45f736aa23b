"""Reward functions: looked up, checked against rows, and called; errors name row, function and value."""

from __future__ import annotations

import math

import pytest

from nnxdsl import DataError, PlanError, Reward, RunError, reward
from nnxdsl.config.objectives.reward import functions
from nnxdsl.data.rewards import Rewards


@pytest.fixture(autouse=True)
def _registered():
    before = dict(functions)
    yield
    functions.clear()
    functions.update(before)


def test_a_function_gets_the_columns_that_it_names() -> None:
    seen = {}

    @reward("some")
    def some(completion: str, answer: str, *, bonus: float = 2.0) -> float:
        seen.update(completion=completion, answer=answer, bonus=bonus)
        return bonus

    @reward("all")
    def everything(completion: str, **columns: object) -> int:
        return len(columns)

    found = Rewards((Reward("some"), Reward("all", weight=0.5)))
    row = {"prompt": "Hi", "answer": "a", "bonus": 3.0}
    found.check([row], ["x.jsonl:1"])
    assert found.score("text", row, "x.jsonl:1") == [3.0, 3.0]
    assert seen == {"completion": "text", "answer": "a", "bonus": 3.0}
    assert (found.names, found.weights) == (("some", "all"), (1.0, 0.5))


def test_rewards_that_are_there() -> None:
    found = Rewards((Reward("exact_answer"), Reward("contains_answer")))
    row = {"prompt": "?", "answer": "Paris"}
    assert found.score(" Paris\n", row, "") == [1.0, 1.0]
    assert found.score("It is paris.", row, "") == [0.0, 1.0]
    assert found.score("Rome", row, "") == [0.0, 0.0]


def test_a_function_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNXDSL_ALLOW", "operator")
    assert Rewards((Reward("operator:length_hint"),)).score("four", {}, "") == [4.0]


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
        Rewards((Reward("bad"),)).score("Yes", {}, "x.jsonl:7")


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1", [1.0]])
def test_a_value_that_is_no_finite_number(value: object) -> None:
    reward("odd")(lambda completion: value)
    with pytest.raises(RunError) as error:
        Rewards((Reward("odd"),)).score("Yes", {}, "x.jsonl:7")
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

    found = Rewards((Reward("any order"), Reward("own name")))
    row = {"prompt": "Hi"}
    found.check([row], ["x.jsonl:1"])
    assert found.score("text", row, "x.jsonl:1") == [1.0, 1.0]
    for name in ("completion", "text"):
        with pytest.raises(DataError) as error:
            found.check([row, {**row, name: "noise"}], ["x.jsonl:1", "x.jsonl:2"])
        assert f"x.jsonl:2: the column '{name}' has the name of the completion's parameter" in str(error.value)


def test_other_forms_of_rewards_are_refused_in_words() -> None:
    @reward("waits")
    async def waits(completion: str) -> float:
        return 1.0

    class Waits:
        async def __call__(self, completion: str) -> float:
            return 1.0

    reward("object")(Waits())

    @reward("batch")
    def batch(completions: list[str], **columns: object) -> list[float]:
        return [1.0 for _ in completions]

    @reward("prompt")
    def prompt_first(prompt: str, answer: str) -> float:
        return 1.0

    @reward("list")
    def gives_list(completion: str) -> list[float]:
        return [1.0]

    with pytest.raises(PlanError) as error:
        Rewards(tuple(map(Reward, ("waits", "object", "batch", "prompt", "list"))))
    text = str(error.value)
    assert "rewards.0.name: the function of 'waits' is async; a reward function must be synchronous" in text
    assert "rewards.1.name: the function of 'object' is async" in text
    assert "rewards.2.name: the function of 'batch' reads 'completions', a batch, as TRL's reward functions do" in text
    assert "rewards.3.name: the function of 'prompt' has 'prompt' as its first parameter and no 'completion'" in text
    assert "rewards.4" not in text
    with pytest.raises(RunError, match=r"\[1.0\], not a finite number \(expected one number for one completion\)"):
        Rewards((Reward("list"),)).score("a", {}, "")
