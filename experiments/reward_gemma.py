"""A reward model: the tiny Gemma 3 of `sft_gemma.py` learns to rate answers by the manners that are liked."""

from sft_gemma import experiment as sft

from nnxdsl import Data, Evaluation, Experiment, Model, Objective, Optimizer, Schedule, Weights

experiment = Experiment(
    name="reward-gemma3-tiny",
    model=Model.Gemma3("tiny", weights=Weights.From(sft)),
    objective=Objective.Reward(center_rewards_coefficient=0.01),
    data=Data.Preferences("experiments/data/preferences.jsonl", max_prompt_length=128, max_completion_length=128),
    optimizer=Optimizer.AdamW(schedule=Schedule.WarmupCosine(peak_lr=1e-4, warmup_ratio=0.1)),
    batch_size=16,
    steps=60,
    evaluation=Evaluation(
        every_steps=20,
        data=Data.Preferences(
            "experiments/data/preferences_held_out.jsonl", max_prompt_length=128, max_completion_length=128
        ),
    ),
)

if __name__ == "__main__":
    experiment.main()
