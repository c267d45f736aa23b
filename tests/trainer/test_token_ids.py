"""Rows of token ids and weights without a tokenizer: a run needs none; messages where one is required."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnxdsl
from nnxdsl import Adapter, Data, Evaluation, Experiment, Model, Objective, Optimizer, PlanError, Schedule
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.run import run
from nnxdsl.weights.export import export

WEIGHTS = Path(__file__).parent.parent / "reference" / "families" / "gemma2"  # 96 ids
NEEDED = f"{WEIGHTS}: no tokenizer here, looked for tokenizer.json and tokenizer.model; a tokenizer is required to "
CURE = (
    "; set model.tokenizer=Tokenizer.File(path) or Tokenizer.Bytes(), or model.weights that come with one; only rows "
    "of token ids (prompt_ids, chosen_ids, ...) need none"
)
INTO_TOKENS = NEEDED + "turn text into tokens (rows of text or chats, evaluation.prompts, rollouts)" + CURE

PAIRS = [{"prompt_ids": [2, n], "chosen_ids": [n + 1, 95], "rejected_ids": [n, n]} for n in range(3, 9)]
LENGTHS: dict[str, Any] = {"max_prompt_length": 16, "max_completion_length": 16}


def experiment(place: Path, rows: list[dict[str, Any]], **fields: Any) -> Experiment:
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings: dict[str, Any] = {
        "model": Model.HF(str(WEIGHTS)),
        "adapter": Adapter.LoRA(rank=2),
        "objective": Objective.DPO(beta=0.1),
        "data": Data.Preferences(str(place / "rows.jsonl"), **LENGTHS),
        "optimizer": Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-3)),
    }
    return Experiment(name="ids", batch_size=2, steps=2, **(settings | fields))


@pytest.mark.slow
def test_a_run_on_token_ids_needs_no_tokenizer(tmp_path: Path) -> None:
    asked = experiment(tmp_path, PAIRS)
    outcome = run(asked, tmp_path / "runs", Display(quiet=True))
    assert outcome.state == "finished"
    exported = export(tmp_path / "runs" / asked.id, tmp_path / "exported")
    assert exported.tokenizer == "none, since the run's weights have no tokenizer"
    assert nnxdsl.load(tmp_path / "exported")(np.array([[2, 3]])).shape == (1, 2, 96)


def test_prompts_of_an_evaluation_need_a_tokenizer(tmp_path: Path) -> None:
    asked = experiment(tmp_path, PAIRS, evaluation=Evaluation(every_steps=1, prompts=("Hi",), max_new_tokens=4))
    with pytest.raises(PlanError) as error:
        run(asked, tmp_path / "runs", Display(quiet=True))
    assert str(error.value) == f"1 problem in Experiment 'ids'\n  evaluation.prompts.0: {INTO_TOKENS}"
    assert not (tmp_path / "runs").exists()
