"""A server of OpenEnv as an environment: each episode is a session of it, and each completion a step.

    pip install openenv
    openenv init echo_env  # the server that its template makes; in echo_env/server/app.py set max_concurrent_envs=16
    (cd echo_env && python -m server.app --port 8000) &
    python experiments/environments/openenv_echo.py

Any other server is one in the same way: the action that it reads, and a text for what it observes.
"""

import os

from openenv.core import GenericEnvClient

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

URL = os.environ.get("OPENENV_URL", "http://localhost:8000")


@environment("openenv echo")
class Echo:
    """The template of `openenv init`: it returns what it is sent, and pays 0.1 for each character, at most 1."""

    def reset(self, seed: int) -> None:
        self.client = GenericEnvClient(base_url=URL).sync()
        self.client.reset(seed=seed)

    def step(self, text: str) -> tuple[str, float, bool]:
        result = self.client.step({"message": text})
        return f"{result.observation['message_length']} characters", float(result.reward or 0), result.done

    def close(self) -> None:  # once the episode is over
        self.client.close()


experiment = Experiment(
    name="openenv-echo",
    model=Model.Gemma3("tiny"),
    objective=Objective.GRPO(
        rewards=(Reward.Environment(),), environment=Environment("openenv echo", max_turns=2), num_generations=8
    ),
    data=Data.Prompts(
        save_rows([{"prompt": [{"role": "user", "content": "Say something."}], "seed": seed} for seed in range(16)]),
        max_prompt_length=64,
        max_completion_length=192,
    ),
    optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-3)),
    batch_size=16,
    steps=100,
)

if __name__ == "__main__":
    experiment.main()
