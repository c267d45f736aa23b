"""Supervised fine-tuning: a tiny Gemma 3 learns, from random weights, to add: half by guessing, half by a tool."""

from nnxdsl import Data, Evaluation, Experiment, Model, Objective, Optimizer, Schedule, Tokenizer

experiment = Experiment(
    name="sft-calculator",
    model=Model.Gemma3("tiny", tokenizer=Tokenizer.Bytes(chat_template="experiments/tools.jinja")),
    objective=Objective.SFT(loss_on="assistant"),
    data=Data.Conversations("experiments/data/sums.jsonl", max_length=256),
    optimizer=Optimizer.AdamW(schedule=Schedule.WarmupCosine(peak_lr=3e-3, warmup_ratio=0.1), weight_decay=0.01),
    batch_size=32,
    steps=300,
    evaluation=Evaluation(
        every_steps=100,
        data=Data.Conversations("experiments/data/sums_held_out.jsonl", max_length=256),
    ),
)

if __name__ == "__main__":
    experiment.main()
