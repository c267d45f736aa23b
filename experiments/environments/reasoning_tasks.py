"""Tasks of reasoning-gym: rows that it makes, and its own scores as a reward.

    pip install reasoning-gym
    python experiments/environments/reasoning_tasks.py

They have one turn, so they need a reward and no environment.
"""

from typing import Any

import reasoning_gym

from nnxdsl import Data, Experiment, Model, Objective, Optimizer, Reward, Schedule, reward, save_rows


def rows(task: str, size: int, seed: int) -> list[dict[str, Any]]:
    """Prompts with the whole entry beside them, which the score reads."""
    entries = list(reasoning_gym.create_dataset(task, size=size, seed=seed))
    return [{"prompt": [{"role": "user", "content": entry["question"]}], "entry": entry} for entry in entries]


@reward("reasoning gym")
def reasoning_gym_score(completion: str, entry: dict[str, Any]) -> float:
    """Between 0 and 1, as the task's own `score_answer` says."""
    score = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
    return float(score(completion.strip(), entry))


experiment = Experiment(
    name="reasoning-tasks",
    model=Model.Gemma3("tiny"),
    objective=Objective.GRPO(rewards=(Reward("reasoning gym"),), num_generations=8),
    data=Data.Prompts(save_rows(rows("chain_sum", 200, seed=0)), max_prompt_length=128, max_completion_length=32),
    optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-4)),
    batch_size=16,
    steps=100,
)

if __name__ == "__main__":
    experiment.main()
