"""A first run, in less than a minute: a tiny Gemma 3 learns, from random weights, to answer short questions."""

from nnxdsl import Data, Evaluation, Experiment, Model, Objective, Optimizer, Schedule

experiment = Experiment(
    name="quickstart",
    model=Model.Gemma3("tiny"),
    objective=Objective.SFT(),
    data=Data.Conversations("experiments/data/quickstart.jsonl", max_length=128),
    optimizer=Optimizer.AdamW(schedule=Schedule.WarmupCosine(peak_lr=3e-3)),
    steps=250,
    evaluation=Evaluation(
        every_steps=125,
        data=Data.Conversations("experiments/data/quickstart_held_out.jsonl", max_length=128),
        prompts=("What is the capital of France?", "What is the opposite of hot?", "What is the colour of grass?"),
    ),
)

if __name__ == "__main__":
    experiment.main()
