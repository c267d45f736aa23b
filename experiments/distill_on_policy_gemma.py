"""On-policy distillation: the tiny Gemma 2 of `distill_gemma.py` writes, the model of `grpo_gemma.py` corrects it."""

from distill_gemma import experiment as student
from grpo_gemma import experiment as teacher

from nnxdsl import Data, Evaluation, Experiment, Model, Objective, Optimizer, Reward, Schedule, Weights

experiment = Experiment(
    name="distill-on-policy-gemma2-tiny",
    model=Model.Gemma2("tiny", weights=Weights.From(student)),
    objective=Objective.OnPolicyDistill(
        teacher=Model.Gemma3("tiny", weights=Weights.From(teacher)),
        rewards=(Reward("kind"), Reward("contains_answer")),  # they are logged, and not learned from
    ),
    data=Data.Prompts("experiments/data/prompts.jsonl", max_prompt_length=64, max_completion_length=64),
    optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-3)),
    batch_size=32,
    steps=100,
    evaluation=Evaluation(
        every_steps=50,
        data=Data.Prompts("experiments/data/prompts_held_out.jsonl", max_prompt_length=64, max_completion_length=64),
        prompts=("What is the capital of Germany?", "What sound does a cow make?"),
        max_new_tokens=64,
    ),
)

if __name__ == "__main__":
    experiment.main()
