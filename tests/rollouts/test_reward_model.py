"""Reward models as rewards: what they give is what their own training computes, for text, chats and episodes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnxdsl
from nnxdsl import (
    Data,
    Experiment,
    Objective,
    Optimizer,
    Order,
    PlanError,
    Reward,
    RolloutLog,
    Schedule,
    SpecError,
    Weights,
)
from nnxdsl.errors import DataError, RunError, WeightsError
from nnxdsl.generate.model_pair import ModelPair
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.run import run
from nnxdsl.weights.export import export

sys.path.insert(0, str(Path(__file__).parents[1] / "packages"))

from small_lab.model import Small

CHATS = [
    {
        "prompt": [{"role": "user", "content": f"Say {n}"}],
        "chosen": [{"role": "assistant", "content": "good"}],
        "rejected": [{"role": "assistant", "content": f"bad {n}"}],
    }
    for n in range(6)
]
TEXTS = [{"prompt": f"Say {n}: ", "chosen": "good", "rejected": f"bad {n}"} for n in range(6)]
FIELDS: dict[str, Any] = {
    "model": Small(vocab_size=320, layers=2),
    "optimizer": Optimizer.AdamW(schedule=Schedule.Constant(lr=0.01)),
    "seed": 3,
}


def trained(rows: list[dict[str, Any]], place: Path, steps: int = 6) -> tuple[Experiment, Path]:
    """An experiment and the directory of its run."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data.Preferences(
        str(place / "pairs.jsonl"), max_prompt_length=32, max_completion_length=16, order=Order.AsInFile()
    )
    asked = Experiment(name="reward", objective=Objective.Reward(), data=data, batch_size=6, steps=steps, **FIELDS)
    return asked, run(asked, place / "runs", Display(quiet=True)).directory


@pytest.mark.extended
@pytest.mark.default_variants(1)
@pytest.mark.parametrize("rows", [CHATS, TEXTS], ids=["chats", "texts"])
def test_rewards_are_those_of_training(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """The mean margin of the next step's batch, before it is learnt from, and of the export."""
    asked, directory = trained(rows, tmp_path)
    longer = run(nnxdsl.evolve(asked, {"steps": 7}), tmp_path / "longer", Display(quiet=True)).directory
    last = json.loads((longer / "metrics.jsonl").read_text().splitlines()[-1])
    start = nnxdsl.evolve(asked, {"steps": 1, "model.weights": Weights.Checkpoint(str(directory))})
    again = run(start, tmp_path / "again", Display(quiet=True)).directory
    (first,) = map(json.loads, (again / "metrics.jsonl").read_text().splitlines())
    assert first["rewards/margins"] == pytest.approx(last["rewards/margins"], rel=1e-5)  # its head goes on as well
    for place in (directory, export(directory, tmp_path / "model").directory):
        model = nnxdsl.load(place)
        actual = {
            side: model.rewards([row["prompt"] for row in rows], [row[side] for row in rows], batch_size=4)
            for side in ("chosen", "rejected")
        }
        assert actual["chosen"].shape == (6,)
        for side, values in actual.items():
            assert float(values.mean()) == pytest.approx(last[f"rewards/{side}"], rel=1e-4, abs=1e-5)
    assert last["rewards/accuracies"] == 1.0
    if rows is CHATS:  # an answer in text is the assistant's
        answers = model.rewards([row["prompt"] for row in rows], ["good"] * 6)
        np.testing.assert_allclose(answers, actual["chosen"], rtol=0, atol=1e-6)


@pytest.mark.extended
def test_a_run_is_the_reward_of_sampled_completions(tmp_path: Path) -> None:
    reward, directory = trained(CHATS, tmp_path)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in CHATS))
    rated = Reward.Model(Weights.From(reward))
    rough = Reward.Model(Weights.Checkpoint(str(directory)), name="rough", weight=0.5, dtype="bfloat16")
    asked = Experiment(
        name="online",
        objective=Objective.GRPO(rewards=(rated, rough), num_generations=2),
        data=Data.Prompts(str(tmp_path / "prompts.jsonl"), max_prompt_length=32, max_completion_length=4),
        batch_size=4,
        steps=2,
        rollouts=RolloutLog(every_steps=1, prompts=2),
        **FIELDS,
    )
    online = run(asked, tmp_path / "runs", Display(quiet=True)).directory
    model = nnxdsl.load(directory)
    actual = [json.loads(line) for line in (online / "rollouts.jsonl").read_text().splitlines()]
    compared = 0
    for group in actual:
        row = CHATS[int(group["row"].rsplit(":", 1)[1]) - 1]
        for one in group["completions"]:
            expected = float(model.rewards([row["prompt"]], [one["text"]])[0])
            assert one["rewards"]["reward_model"] == pytest.approx(expected, rel=1e-5, abs=1e-6)
            assert 0 < abs(one["rewards"]["rough"] - expected) < 0.05
            total = one["rewards"]["reward_model"] + 0.5 * one["rewards"]["rough"]
            assert one["reward"] == pytest.approx(total, rel=1e-6)
            compared += 1
    assert compared >= 8


@pytest.mark.extended
def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"weights: Weights\.Random is no reward model; use Weights\.HF, "):
        Reward.Model(Weights.Random())
    _, directory = trained(TEXTS, tmp_path, steps=1)
    model = nnxdsl.load(directory)
    with pytest.raises(WeightsError, match="gives scores of labels and no tokens"):
        model.generate(["Why?"])
    with pytest.raises(RunError, match=r"is a reward model, which writes no text; see nnxdsl\.load"):
        ModelPair.open(directory, 1)
    with pytest.raises(DataError, match=r"completions\.0: .* of the model's 64"):
        model.rewards(["Why?"], ["x" * 80])
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "Why?"}) + "\n")
    online = Experiment(
        name="online",
        objective=Objective.GRPO(rewards=(Reward.Model(Weights.HF(str(tmp_path))),), num_generations=2),
        data=Data.Prompts(str(tmp_path / "prompts.jsonl"), max_prompt_length=32, max_completion_length=4),
        batch_size=2,
        steps=1,
        **FIELDS,
    )
    with pytest.raises(PlanError, match=r"objective\.rewards\.0\.weights: .*config\.json"):
        run(online, tmp_path / "runs", Display(quiet=True))
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "a text"}) + "\n")
    text = Data.Text(str(tmp_path / "texts.jsonl"), max_length=16)
    sft = Experiment(name="sft", objective=Objective.SFT(loss_on="all"), data=text, batch_size=2, steps=1, **FIELDS)
    with pytest.raises(SpecError, match=r"weights\.experiment\.objective: Objective\.SFT trains no reward model"):
        Reward.Model(Weights.From(sft))
    policy = run(sft, tmp_path / "runs", Display(quiet=True)).directory
    refused = nnxdsl.evolve(online, {"objective.rewards.0.weights.path": str(policy)})
    with pytest.raises(PlanError, match=r"rewards\.0\.weights: .*no reward model: expected a model for"):
        run(refused, tmp_path / "runs", Display(quiet=True))
