"""Group relative policy optimisation with a tool: the tiny Gemma 3 of `sft_calculator.py` learns to calculate."""

import re

from sft_calculator import experiment as sft

from nnxdsl import (
    Data,
    Environment,
    Evaluation,
    Experiment,
    Model,
    Objective,
    Optimizer,
    Reward,
    Schedule,
    Weights,
    tools,
)


def calculate(expression: str) -> int:
    """Computes a sum.

    Args:
        expression: Two numbers with a plus between them.
    """
    match = re.fullmatch(r"(\d+) \+ (\d+)", expression)
    if match is None:
        raise ValueError("expected two numbers with a plus between them")
    return int(match[1]) + int(match[2])


tools("calculator", calculate)

experiment = Experiment(
    name="grpo-calculator",
    model=Model.Gemma3("tiny", weights=Weights.From(sft)),
    objective=Objective.GRPO(
        rewards=(Reward("exact_answer"),), environment=Environment("calculator", max_turns=3), num_generations=8
    ),
    data=Data.Prompts("experiments/data/sum_prompts.jsonl", max_prompt_length=128, max_completion_length=128),
    optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=2e-4)),
    batch_size=64,
    steps=40,
    evaluation=Evaluation(
        every_steps=20,
        data=Data.Prompts(
            "experiments/data/sum_prompts_held_out.jsonl", max_prompt_length=128, max_completion_length=128
        ),
    ),
)

if __name__ == "__main__":
    experiment.main()
