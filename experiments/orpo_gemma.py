"""Odds ratio preference optimisation with LoRA: the tiny Gemma 3 of `sft_gemma.py`, without a reference model."""

from sft_gemma import experiment as sft

from nnxdsl import Adapter, Data, Evaluation, Experiment, Model, Objective, Optimizer, Schedule, Weights

experiment = Experiment(
    name="orpo-gemma3-tiny",
    model=Model.Gemma3("tiny", weights=Weights.From(sft)),
    adapter=Adapter.LoRA(rank=16, alpha=32.0, targets=("attention", "mlp")),
    objective=Objective.ORPO(beta=0.1),
    data=Data.Preferences("experiments/data/preferences.jsonl", max_prompt_length=128, max_completion_length=128),
    optimizer=Optimizer.AdamW(schedule=Schedule.WarmupCosine(peak_lr=5e-4, warmup_ratio=0.1)),
    batch_size=16,
    steps=60,
    evaluation=Evaluation(
        every_steps=20,
        data=Data.Preferences(
            "experiments/data/preferences_held_out.jsonl", max_prompt_length=128, max_completion_length=128
        ),
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
