"""The functions of `config/objectives/reward_library.py`, each of one completion."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from nnxdsl.config.objectives.reward_library import (
    CosineLength,
    Environment,
    MathAccuracy,
    OfMath,
    RepetitionPenalty,
    SoftOverlong,
    ThinkFormat,
)
from nnxdsl.data.rewards import math_answers
from nnxdsl.data.rewards.functions import function_of, refused

Score = Callable[..., float | None]


@function_of.register
def _math_accuracy(reward: MathAccuracy, max_completion_length: int | None) -> Score:
    is_right = _checked(reward)

    def math_accuracy(completion: str, answer: str | float, log_extra: Callable[[str, Any], None]) -> float | None:
        compared = is_right(completion, answer)
        log_extra("gold_parsed", compared.gold)
        log_extra("answer_parsed", compared.answer)
        return None if compared.is_equal is None else float(compared.is_equal)

    return math_accuracy


@function_of.register
def _cosine_length(reward: CosineLength, max_completion_length: int | None) -> Score:
    is_right, longest = _checked(reward), _longest(reward.max_length, max_completion_length)

    def cosine_length(completion: str, completion_ids: Sequence[int], answer: str | float) -> float | None:
        is_equal, length = is_right(completion, answer).is_equal, len(completion_ids)
        if is_equal is None:
            return None
        if reward.exceeded is not None and length >= longest:
            return reward.exceeded
        short, long = (reward.right_short, reward.right_long) if is_equal else (reward.wrong_short, reward.wrong_long)
        return long + 0.5 * (short - long) * (1 + math.cos(min(length / longest, 1.0) * math.pi))

    return cosine_length


def _checked(reward: OfMath) -> Callable[[str, str | float], math_answers.Compared]:
    """Compares the final answer of a completion with the right one."""
    if not math_answers.is_installed():
        kind = type(reward).__qualname__
        raise refused(
            "", f"{kind} compares answers with math-verify, which is not installed: pip install 'nnxdsl[math]'"
        )

    def is_right(completion: str, answer: str | float) -> math_answers.Compared:
        if not isinstance(answer, str | int | float):
            raise TypeError(f"the column 'answer' must be text or a number, got {answer!r}")
        if reward.after is not None and reward.after not in completion:
            return math_answers.Compared(False, "", "")
        text = completion if reward.after is None else completion.rpartition(reward.after)[2]
        return math_answers.compared(text, str(answer), reward.answer_timeout)

    return is_right


@function_of.register
def _think_format(reward: ThinkFormat, max_completion_length: int | None) -> Score:
    start, end = re.escape(reward.start), re.escape(reward.end)
    once = f"(?!.*{start})" if reward.start else ""
    rest = r".*\S" if reward.needs_answer else ""
    pattern = re.compile(f"{start}{once}.*?{end}{rest}", re.DOTALL)

    def think_format(completion: str) -> float:
        return float(pattern.match(completion) is not None)

    return think_format


@function_of.register
def _repetition_penalty(reward: RepetitionPenalty, max_completion_length: int | None) -> Score:
    size = reward.ngram_size

    def repetition_penalty(completion: str, completion_ids: Sequence[int]) -> float:
        ngrams = [tuple(completion_ids[start : start + size]) for start in range(len(completion_ids) - size + 1)]
        return reward.max_penalty * (1 - len(set(ngrams)) / len(ngrams)) + 0.0 if ngrams else 0.0  # not -0.0

    return repetition_penalty


@function_of.register
def _soft_overlong(reward: SoftOverlong, max_completion_length: int | None) -> Score:
    longest = _longest(reward.max_length, max_completion_length)
    if reward.cache > longest:
        raise refused("cache", f"{reward.cache:,} tokens are more than max_completion_length={longest:,}")
    if max_completion_length is not None and longest - reward.cache >= max_completion_length:
        message = f"has no effect: up to {longest - reward.cache:,} tokens nothing is subtracted, and completions have "
        raise refused("max_length", f"{message}at most {max_completion_length:,}")

    def soft_overlong(completion: str, completion_ids: Sequence[int]) -> float:
        return max(-1.0, min(0.0, (longest - reward.cache - len(completion_ids)) / reward.cache))

    return soft_overlong


@function_of.register
def _environment(reward: Environment, max_completion_length: int | None) -> Score:
    def environment(completion: str, environment_reward: float) -> float:
        return environment_reward

    return environment


def _longest(max_length: int | None, max_completion_length: int | None) -> int:
    longest = max_length or max_completion_length
    if longest is None:
        raise refused("max_length", "None stands for max_completion_length of the data, which is not known; set it")
    return longest
