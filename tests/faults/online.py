"""Recipes of runs whose episodes have several turns, with tools or an environment, and of the policy before them."""

from __future__ import annotations

from pathlib import Path

from fault_lab import EVERY, STEPS

COMMON = f"""
from small_lab.model import Long

from nnxdsl import *
from nnxdsl import environment, save_rows


@environment("counter")
class Counter:
    def reset(self, start: int) -> None:
        self.count = start

    def add(self, n: int) -> int:
        \"\"\"Adds.

        Args:
            n: How much.
        \"\"\"
        self.count += n
        return self.count

    def get_reward(self) -> float:
        return float(self.count)


@environment("asks again")
class AsksAgain:
    def reset(self, start: int) -> None:
        self.turn = 0

    def step(self, text: str) -> tuple[str, float, bool]:
        self.turn += 1
        return f"Start {{self.turn}}", float(len(text)), self.turn == 3


def made(**fields):
    tokenizer = Tokenizer.Bytes(chat_template={str(Path(__file__).parents[2] / "experiments" / "tools.jinja")!r})
    size = dict(layers=2, pattern=1, embed_dim=32, mlp_dim=64, heads=2, head_dim=16, vocab_size=512)
    return Long(**size, tokenizer=tokenizer, **fields)
"""

POLICY = (
    COMMON
    + """

PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer", "description": "How much."}}, "required": ["n"]}
ADD = {"name": "add", "description": "Adds.", "parameters": PARAMETERS, "return": {"type": "integer"}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"n": 1}}}


def chat(start, calls):
    messages = [{"role": "user", "content": f"Start {start}"}]
    for count in range(start + 1, start + 1 + calls):
        messages += [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": str(count)}]
    return {"messages": [*messages, {"role": "assistant", "content": "ok"}]}


tools = [{"type": "function", "function": ADD}]
chats = [{**chat(start, calls), "tools": tools} for start in range(5) for calls in range(3)]
chats += [
    {"messages": [{"role": "user", "content": f"Start {start}"}, {"role": "assistant", "content": "ok" * times}]}
    for start in range(5) for times in (1, 2, 3)
]

experiment = Experiment(
    name="tiny",
    model=made(),
    objective=Objective.SFT(loss_on="assistant"),
    data=Data.Conversations(save_rows(chats), max_length=256),
    optimizer=Optimizer.AdamW(schedule=Schedule.WarmupCosine(peak_lr=1e-2, warmup_ratio=0.1)),
    batch_size=15,
    steps=90,
)

if __name__ == "__main__":
    experiment.main()
"""
)
"""What an assistant learns first: to call a tool, none to two times, or to answer shortly."""

ONLINE = (
    COMMON
    + f"""

rows = [{{"prompt": [{{"role": "user", "content": f"Start {{start}}"}}], "start": start}} for start in range(5)]
prompts = Data.Prompts(save_rows(rows), max_prompt_length=64, max_completion_length=192)

experiment = Experiment(
    name="tiny",
    model=made(weights=Weights.Checkpoint("POLICY")),
    objective=Objective.GRPO(
        rewards=(Reward.Environment(),),
        environment=Environment("ENVIRONMENT", max_turns=3),
        num_generations=4,
        num_iterations=2,
        max_num_gen_batches=2,
    ),
    data=prompts,
    optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-3)),
    batch_size=8,
    steps={STEPS},
    seed=3,
    evaluation=Evaluation(every_steps=6, data=prompts),
    rollouts=RolloutLog(every_steps=1),
    checkpoint=Checkpoint(every_steps={EVERY}, keep=2),
)

if __name__ == "__main__":
    experiment.main()
"""
)


def online_recipe(policy: Path, environment: str) -> str:
    """A run that samples episodes.

    Args:
        policy: A run of `POLICY`, from which it starts.
        environment: The name of one in `COMMON`.
    """
    return ONLINE.replace("POLICY", str(policy)).replace("ENVIRONMENT", environment)
