"""Distillation: a tiny Gemma 2 learns, from random weights, what the tiny Gemma 3 of `sft_gemma.py` holds likely."""

from sft_gemma import experiment as sft

from nnxdsl import Data, Distance, Evaluation, Experiment, Model, Objective, Optimizer, Schedule, Weights

experiment = Experiment(
    name="distill-gemma2-tiny",
    model=Model.Gemma2("tiny"),
    objective=Objective.Distill(
        teacher=Model.Gemma3("tiny", weights=Weights.From(sft)), distance=Distance.ForwardKL(), hard_weight=0.1
    ),
    data=Data.Conversations("experiments/data/instructions.jsonl", max_length=256),
    optimizer=Optimizer.AdamW(schedule=Schedule.WarmupCosine(peak_lr=3e-3, warmup_ratio=0.1), weight_decay=0.01),
    batch_size=32,
    steps=200,
    evaluation=Evaluation(
        every_steps=100,
        data=Data.Conversations("experiments/data/instructions_held_out.jsonl", max_length=256),
        prompts=("What is the capital of Germany?", "What sound does a cow make?"),
        max_new_tokens=64,
    ),
)

if __name__ == "__main__":
    experiment.main()
