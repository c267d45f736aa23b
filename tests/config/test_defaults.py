"""Derived defaults: optimizers by objective and adapter; models by name."""

from __future__ import annotations

import attrs
import pytest

from app.store.experiments import read_python
from nnxdsl import (
    Adapter,
    Data,
    Evaluation,
    Experiment,
    Model,
    Objective,
    Optimizer,
    Reward,
    Schedule,
    SpecError,
    Weights,
    diff,
    evolve,
    from_dict,
    to_dict,
)
from nnxdsl.config.core.codegen import parse_value
from nnxdsl.config.core.run_id import canonical

CHATS, PAIRS = Data.Conversations("chats.jsonl"), Data.Preferences("pairs.jsonl")
LORA = Adapter.LoRA()


def short(objective: Objective, adapter: Adapter | None = None, **fields: object) -> Experiment:
    """An experiment that leaves out what it can."""
    data = CHATS if objective.batch_kind == "sequences" else PAIRS
    every = {"data": data, "steps": 10, "batch_size": 8, **fields}
    return Experiment(name="short", model=Model.Gemma3("tiny"), objective=objective, adapter=adapter, **every)  # type: ignore[arg-type]


def adamw(peak_lr: float) -> Optimizer:
    """AdamW with the default schedule."""
    return Optimizer.AdamW(schedule=Schedule.WarmupCosine(peak_lr=peak_lr, warmup_ratio=0.1), max_grad_norm=1.0)


@pytest.mark.parametrize(
    ("objective", "adapter", "peak_lr"),
    [
        (Objective.SFT(), None, 2e-5),
        (Objective.SFT(), LORA, 2e-4),
        (Objective.DPO(), None, 1e-6),
        (Objective.DPO(), Adapter.DoRA(), 1e-5),
        (Objective.ORPO(), LORA, 1e-5),
        (Objective.ChosenSFT(), None, 2e-5),
        (Objective.Reward(), None, 1e-5),
        (Objective.Reward(), LORA, 1e-4),
        (Objective.Sum(terms=(Objective.DPO(), Objective.ChosenSFT()), weights=(1.0, 1.0)), None, 1e-6),
    ],
)
def test_the_rate_goes_by_objective_and_adapter(objective: Objective, adapter: Adapter | None, peak_lr: float) -> None:
    made = short(objective, adapter)
    written = short(objective, adapter, optimizer=adamw(peak_lr))
    assert (made, made.id) == (written, written.id)
    tree = to_dict(made)
    assert tree.pop("optimizer")["schedule"]["peak_lr"] == peak_lr
    assert from_dict(tree, Experiment) == made


def test_it_follows_objective_and_adapter_unless_it_is_another() -> None:
    made = short(Objective.SFT())
    assert evolve(made, {"adapter": LORA}) == short(Objective.SFT(), LORA)
    assert evolve(made, {"objective": Objective.DPO(), "data": PAIRS}) == short(Objective.DPO())
    assert evolve(made, {"steps": 3}).optimizer == made.optimizer
    changed = evolve(made, {"adapter": LORA, "optimizer.schedule.peak_lr": 2e-5})
    assert changed.optimizer == made.optimizer
    assert evolve(made, diff(made, changed)) == changed
    ours = short(Objective.SFT(), optimizer=adamw(3e-5))
    assert evolve(ours, {"adapter": LORA}).optimizer == adamw(3e-5)
    assert attrs.evolve(made, adapter=LORA).optimizer == made.optimizer  # plain attrs replaces one field


def test_a_wrong_objective_is_reported_once() -> None:
    tree = {**to_dict(short(Objective.SFT())), "objective": "sft"}
    del tree["optimizer"]
    with pytest.raises(
        SpecError, match=r"^1 problem in Experiment 'short'\n  objective: expected Objective, got 'sft'"
    ):
        from_dict(tree, Experiment)


def test_epochs_in_place_of_steps() -> None:
    made = short(Objective.SFT(), steps=None)
    assert (made.steps, made.epochs) == (None, 1.0)
    fields = {"name": "short", "model": Model.Gemma3("tiny"), "objective": Objective.SFT(), "data": CHATS}
    assert Experiment(**fields) == evolve(made, {"batch_size": 8})  # type: ignore[arg-type]
    assert evolve(made, {"steps": 10}) == short(Objective.SFT(), steps=10)
    assert evolve(short(Objective.SFT(), steps=10), {"steps": None}) == made
    assert made.id != evolve(made, {"epochs": 2}).id
    assert '"epochs"' not in canonical(short(Objective.SFT(), steps=10))
    with pytest.raises(SpecError, match=r"epochs: 2 and steps=10 are two lengths of one run; set one to None"):
        evolve(short(Objective.SFT(), steps=10), {"epochs": 2})
    with pytest.raises(SpecError, match="steps: how long the run is needs steps or epochs, and both are None"):
        short(Objective.SFT(), steps=None, epochs=None)
    with pytest.raises(SpecError, match="epochs: a mixture has no last row"):
        short(Objective.SFT(), steps=None, data=Data.Mixture({CHATS: 1.0}))


@pytest.mark.parametrize(
    ("epochs", "rows", "batch_size", "steps"),
    [(1.0, 220, 8, 28), (1.0, 224, 8, 28), (3.0, 220, 8, 83), (0.1, 1000, 10, 10), (0.7, 100, 10, 7), (0.01, 9, 8, 1)],
)
def test_steps_give_every_row_as_often_as_the_epochs_say(epochs: float, rows: int, batch_size: int, steps: int) -> None:
    made = short(Objective.SFT(), steps=None, epochs=epochs, batch_size=batch_size)
    assert made.steps_for(rows) == steps
    assert evolve(made, {"steps": 5, "epochs": None}).steps_for(rows) == 5


def test_steps_of_sampled_completions() -> None:
    """Each prompt has `num_generations` completions in a batch, each batch `num_iterations` steps."""
    reward = Reward(name="length")
    objective = Objective.GRPO(rewards=(reward,), num_generations=4, num_iterations=3)
    made = short(objective, steps=None, data=Data.Prompts("prompts.jsonl"), batch_size=8)
    assert made.steps_for(10) == 5 * 3


def test_held_out_rows_by_share() -> None:
    made = short(Objective.SFT(), test_size=0.1)
    assert made.evaluation == Evaluation()
    assert evolve(made, {"test_size": None}) == short(Objective.SFT())
    assert made.id != short(Objective.SFT()).id != evolve(made, {"test_size": 0.2}).id
    often = short(Objective.SFT(), test_size=0.1, evaluation=Evaluation(every_steps=2))
    assert often.id == made.id
    assert evolve(often, {"test_size": 0.2}).evaluation == Evaluation(every_steps=2)


REFUSED = {
    "its own rows": (CHATS, Evaluation(data=CHATS), Objective.SFT(), "leave out evaluation.data"),
    "no evaluation": (CHATS, None, Objective.SFT(), "holds out rows that evaluation=None does not read"),
    "a mixture": (Data.Mixture({CHATS: 1.0}), Evaluation(), Objective.SFT(), "a mixture has no row"),
    "KTO": (Data.Feedback("answers.jsonl"), Evaluation(), Objective.KTO(), "answers with those of other rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_shares_that_are_refused(name: str) -> None:
    data, evaluation, objective, message = REFUSED[name]
    with pytest.raises(SpecError, match=f"test_size: .*{message}"):
        short(objective, data=data, evaluation=evaluation, test_size=0.1)


def test_a_model_by_name() -> None:
    made = Model("google/gemma-3-1b-it")
    assert made == Model.HF("google/gemma-3-1b-it", weights=Weights.HF("google/gemma-3-1b-it"))
    assert Model(path="a", weights=Weights.Random()) == Model.HF("a", weights=Weights.Random())
    assert parse_value("Model('a')") == Model.HF("a")
    text = (
        "experiment = Experiment(name='a', model=Model('a'), objective=Objective.SFT(), data=Data.Conversations('c'))"
    )
    assert read_python(text.replace("))", "), steps=1, batch_size=1)")).model == Model.HF("a")
    with pytest.raises(SpecError, match=r"1 problem in Model\n  Model is a family; use one of its members: Model\."):
        Model()  # type: ignore[call-arg]
    with pytest.raises(SpecError, match="Objective is a family; use one of its members"):
        parse_value("Objective('a')")
