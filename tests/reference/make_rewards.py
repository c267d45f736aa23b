"""Records what TRL's own reward functions give for completions.

Run it in an environment that has trl and math-verify (stored here: TRL 1.16, math-verify 0.9):

    python tests/reference/make_rewards.py

It writes tests/reference/rewards/expected.json: the completions with their token ids and right answers, and for each
function and its settings the values, null where it does not apply.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trl.rewards import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)

OUT = Path(__file__).parent / "rewards" / "expected.json"

THIRD = r"\frac{1}{3}"
# A completion and the right answer.
ANSWERS: list[tuple[str, str]] = [
    (r"My answer is \boxed{\frac{1}{3}}", THIRD),
    (r"My answer is \boxed{\frac{2}{6}}.", THIRD),
    (r"My answer is \boxed{\frac{1}{2}}.", THIRD),
    ("My answer is 42.", "42"),
    ("The final answer is $42$. I hope it is correct.", "42"),
    (r"First $7$, and then \boxed{42}", "42"),
    (r"\boxed{42}", "#### 42"),
    (r"\boxed{42\text{ km}}", "42"),
    (r"\boxed{1{,}000}", "1000"),
    (r"\boxed{(x+1)^2}", "$x^2+2x+1$"),
    (r"\boxed{\{1, 2\}}", r"$\{2, 1\}$"),
    (r"\boxed{0.333}", THIRD),
    (r"\boxed{", "3"),
    ("", "3"),
    (r"\boxed{1}", "no mathematics"),
    (rf"<think>Let me see: {THIRD}</think> It is \boxed{{{THIRD}}}", THIRD),
    (rf"<think>Let me see: \boxed{{{THIRD}}}</think> It is \boxed{{1}}", THIRD),
    (rf"<think>\boxed{{{THIRD}}}, but I am not", THIRD),
    (rf"<think>a</think> \boxed{{1}} </think> \boxed{{{THIRD}}}", THIRD),
]
FORMATS = [
    "<think>\nThis is my reasoning.\n</think>\nThis is my answer.",
    "<think>\nThis is my reasoning.\nThis is my answer.",
    "<think></think>",
    "<think>a</think>",
    "<think>a</think>b",
    "<think>a</think>b</think>",
    "<think>a<think>b</think>c",
    "<think>a</think><think>b</think>",
    " <think>a</think>b",
    "a<think>b</think>c",
    "a\n<think>b</think>c",
    "</think>a<think>",
    "a</think>b",
    "",
]
# Token ids: different ones, repeated ones, too few, none.
IDS: list[list[int]] = [
    [1, 2, 3, 4],
    [5, 5, 5, 5, 5],
    [1, 2, 1, 2, 1, 2, 1, 2],
    [1, 2, 3, 1, 2, 3, 9, 1, 2, 3],
    [7, 7],
    [7],
    [],
    list(range(90)),
    [number % 10 for number in range(100)],
    [number % 33 for number in range(101)],
    [3] * 80,
    [3] * 81,
    [3] * 300,
]
LENGTHS = (0, 1, 25, 50, 99, 100, 150)


def messages(texts: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def main() -> None:
    texts, answers = (list(each) for each in zip(*ANSWERS, strict=True))
    result: dict[str, Any] = {"answers": ANSWERS, "formats": FORMATS, "ids": IDS, "lengths": LENGTHS}
    result["accuracy"] = accuracy_reward(messages(texts), answers)
    result["reasoning_accuracy"] = reasoning_accuracy_reward(messages(texts), answers)
    result["think_format"] = think_format_reward(messages(FORMATS))
    result["repetition"] = [
        {"ngram_size": size, "max_penalty": most, "values": get_repetition_penalty_reward(size, most)(IDS)}
        for size, most in ((3, -1.0), (1, -0.5), (2, -2.0))
    ]
    result["soft_overlong"] = [
        {"max_length": longest, "cache": cache, "values": get_soft_overlong_punishment(longest, cache)(IDS)}
        for longest, cache in ((100, 20), (90, 90), (300, 1))
    ]
    result["cosine"] = [
        {
            "max_length": longest,
            "wrong_short": low,
            "wrong_long": middle,
            "right_long": high,
            "right_short": top,
            "values": [
                get_cosine_scaled_reward(longest, low, middle, high, top)(
                    messages(texts), answers, [[1] * length for _ in texts]
                )
                for length in LENGTHS
            ],
        }
        for longest, low, middle, high, top in ((100, -1.0, -0.5, 0.5, 1.0), (60, -10.0, 0.0, 1.0, 2.0))
    ]
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
