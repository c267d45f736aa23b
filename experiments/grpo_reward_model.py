"""Group relative policy optimisation: the tiny Gemma 3 of `sft_gemma.py` is paid by the model of `reward_gemma.py`."""

from reward_gemma import experiment as rated
from sft_gemma import experiment as sft

from nnxdsl import Data, Evaluation, Experiment, Model, Objective, Optimizer, Reward, Schedule, Weights

experiment = Experiment(
    name="grpo-reward-model",
    model=Model.Gemma3("tiny", weights=Weights.From(sft)),
    objective=Objective.GRPO(rewards=(Reward.Model(Weights.From(rated)), Reward("contains_answer")), num_generations=8),
    data=Data.Prompts("experiments/data/prompts.jsonl", max_prompt_length=64, max_completion_length=64),
    optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=2e-4)),
    batch_size=64,
    steps=40,
    evaluation=Evaluation(
        every_steps=20,
        data=Data.Prompts("experiments/data/prompts_held_out.jsonl", max_prompt_length=64, max_completion_length=64),
        prompts=(
            "What is the capital of Germany?",
            "What is the opposite of hot?",
            "What sound does a cow make?",
            "What comes after Thursday?",
        ),
        max_new_tokens=64,
    ),
)

if __name__ == "__main__":
    experiment.main()
