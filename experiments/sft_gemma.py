"""Supervised fine-tuning: a tiny Gemma 3 learns, from random weights, to answer short questions in two manners."""

from nnxdsl import Data, Evaluation, Experiment, Model, Objective, Optimizer, Schedule

experiment = Experiment(
    name="sft-gemma3-tiny",
    model=Model.Gemma3("tiny"),
    objective=Objective.SFT(loss_on="assistant"),
    data=Data.Conversations("experiments/data/instructions.jsonl", max_length=256),
    optimizer=Optimizer.AdamW(schedule=Schedule.WarmupCosine(peak_lr=3e-3, warmup_ratio=0.1), weight_decay=0.01),
    batch_size=32,
    steps=400,
    evaluation=Evaluation(
        every_steps=200,
        data=Data.Conversations("experiments/data/instructions_held_out.jsonl", max_length=256),
        prompts=("What is the capital of Germany?", "What sound does a cow make?"),
        max_new_tokens=64,
    ),
)

if __name__ == "__main__":
    experiment.main()
