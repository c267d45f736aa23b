"""The examples in experiments/environments, where the libraries are installed that they are about."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnxdsl import Environment
from nnxdsl.config.objectives.environment import environments
from nnxdsl.config.objectives.reward import functions
from nnxdsl.data import BytesTokenizer, Encoder, Prompts, load
from nnxdsl.data.rewards import Rewards, Sampled
from nnxdsl.generate.sampler import Completion
from nnxdsl.rollouts.environments import Environments
from nnxdsl.rollouts.turns import Turns

TOKENIZER = BytesTokenizer()


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports an example as its user does, in a directory of its own."""
    monkeypatch.chdir(tmp_path)

    def imported(name: str) -> Any:
        path = Path(__file__).parents[2] / "experiments" / "environments" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    before = dict(environments), dict(functions)
    yield imported
    for registered, saved in zip((environments, functions), before, strict=True):
        registered.clear()
        registered.update(saved)


def test_a_game_of_gymnasium_is_won_and_lost(example: Any) -> None:
    pytest.importorskip("gymnasium")
    experiment = example("frozen_lake").experiment
    prompts, encoder = load(experiment.data, TOKENIZER), Encoder(TOKENIZER)
    assert isinstance(prompts, Prompts)
    assert experiment.objective.environment == Environment("frozen lake", max_turns=12)
    won = ("down", "down", "What?", " Right ", "down", "right", "right")
    for script, reward in ((won, 1.0), (("down", "right"), 0.0)):

        def sample(turn: Any, script: tuple[str, ...] = script) -> list[Completion]:
            ids = [*script[turn.number].encode(), TOKENIZER.end_of_turn_id]
            return [Completion(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.float32), len(ids))]

        stops = frozenset({TOKENIZER.end_of_turn_id})
        (found,) = Turns(encoder, stops, Environments(experiment.objective, encoder), 12).play(prompts, [0], sample)
        assert (found.reward, len(found.turns)) == (reward, 2 * len(script) - 1)
    assert [one["content"] for one in found.turns] == ["down", "You are at row 1, column 0.", "right"]


def test_tasks_of_reasoning_gym_score_their_answers(example: Any) -> None:
    pytest.importorskip("reasoning_gym")
    experiment = example("reasoning_tasks").experiment
    prompts = load(experiment.data, TOKENIZER)
    assert isinstance(prompts, Prompts)
    assert len(prompts) == 200
    rows = [prompts.columns[index] for index in (0, 0, 1)]
    texts = [f" {rows[0]['entry']['answer']}\n", "no number", rows[2]["entry"]["answer"]]
    scores = Rewards(experiment.objective.rewards).score(Sampled(texts, [[1]] * 3, rows, ["a:1", "a:1", "a:2"]))
    assert scores.values == [[1.0], [0.0], [1.0]]
