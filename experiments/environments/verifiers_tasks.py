"""A taskset of verifiers: its tasks as rows, and its rewards as a reward.

    pip install verifiers
    python experiments/environments/verifiers_tasks.py

Any taskset is one in the same way whose tasks have one turn, and rewards that read the trace and need no runtime.
"""

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

from nnxdsl import Data, Experiment, Model, Objective, Optimizer, Reward, Schedule, reward, save_rows


class Sum(vf.TaskData):
    answer: int


class SumTask(vf.Task[Sum]):
    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.1)
    async def is_number(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.isdecimal())


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterable[SumTask]:
        return [SumTask(Sum(prompt=f"{a} + {b} = ?", answer=a + b)) for a in range(10) for b in range(10)]


def rows(taskset: vf.Taskset[Any, Any]) -> list[dict[str, Any]]:
    """Prompts with the task's data beside them, which its rewards read."""
    return [
        {"prompt": [{"role": "user", "content": task.data.prompt_text}], "task": task.data.model_dump(mode="json")}
        for task in taskset
    ]


@reward("verifiers")
async def score(completion: str, task: dict[str, Any]) -> float:
    """The weighted sum of the task's rewards, of a trace that is the prompt and the completion."""
    made = SumTask(Sum(**task))
    messages = [vf.UserMessage(content=made.data.prompt_text), vf.AssistantMessage(content=completion)]
    trace = vf.Trace(
        task=vf.TraceTask(type="SumTask", data=made.data),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[
            vf.MessageNode(message=messages[0]),
            vf.MessageNode(message=messages[1], parent=0, sampled=True),
        ],
    )
    await made.score(trace)
    return trace.reward


experiment = Experiment(
    name="verifiers-tasks",
    model=Model.Gemma3("tiny"),
    objective=Objective.GRPO(rewards=(Reward("verifiers"),), num_generations=8),
    data=Data.Prompts(save_rows(rows(Sums(vf.TasksetConfig()))), max_prompt_length=64, max_completion_length=16),
    optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-4)),
    batch_size=16,
    steps=100,
)

if __name__ == "__main__":
    experiment.main()
