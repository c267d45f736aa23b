"""A game of Gymnasium as an environment: the policy answers with a direction, turn by turn.

    pip install gymnasium
    python experiments/environments/frozen_lake.py

Any environment with discrete actions is one in the same way: a text for each state, a word for each action.
"""

import gymnasium

from nnxdsl import (
    Data,
    Environment,
    Experiment,
    Model,
    Objective,
    Optimizer,
    Reward,
    Schedule,
    environment,
    save_rows,
)

DIRECTIONS = {"left": 0, "down": 1, "right": 2, "up": 3}
RULES = "Cross the frozen lake from row 0, column 0 to row 3, column 3. Say left, down, right or up."


@environment("frozen lake")
class FrozenLake:
    """`FrozenLake-v1` of 4 x 4 fields; the goal is worth 1, and the game ends there or in a hole."""

    def reset(self, seed: int) -> None:
        self.game = gymnasium.make("FrozenLake-v1", is_slippery=False)
        self.game.reset(seed=seed)

    def step(self, text: str) -> tuple[str, float, bool]:
        action = DIRECTIONS.get(text.strip().lower())
        if action is None:
            return "Say left, down, right or up.", 0.0, False
        field, reward, terminated, truncated, _ = self.game.step(action)
        row, column = divmod(int(field), 4)
        return f"You are at row {row}, column {column}.", float(reward), terminated or truncated


experiment = Experiment(
    name="frozen-lake",
    model=Model.Gemma3("tiny"),
    objective=Objective.GRPO(
        rewards=(Reward.Environment(),), environment=Environment("frozen lake", max_turns=12), num_generations=8
    ),
    data=Data.Prompts(
        save_rows([{"prompt": [{"role": "user", "content": RULES}], "seed": seed} for seed in range(16)]),
        max_prompt_length=128,
        max_completion_length=448,
    ),
    optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-4)),
    batch_size=16,
    steps=100,
)

if __name__ == "__main__":
    experiment.main()
