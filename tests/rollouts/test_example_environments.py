"""The examples in experiments/environments, where the libraries are installed that they are about."""

from __future__ import annotations

import importlib.util
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
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
from nnxdsl.rollouts.turns import Trajectory, Turns

TOKENIZER = BytesTokenizer()
ENCODER = Encoder(TOKENIZER)


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


def played(experiment: Any, scripts: Sequence[tuple[str, ...]]) -> list[Trajectory]:
    """Episodes of the first prompt, at one time, in each of which the policy writes a script."""
    prompts, stops = load(experiment.data, TOKENIZER), frozenset({TOKENIZER.end_of_turn_id})
    assert isinstance(prompts, Prompts)

    def sample(turn: Any) -> list[Completion]:
        texts = [script[turn.number] for script in scripts if len(script) > turn.number]
        rows = [[*text.encode(), TOKENIZER.end_of_turn_id] for text in texts]
        return [
            Completion(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.float32), len(ids)) for ids in rows
        ]

    environments, most = Environments(experiment.objective, ENCODER), experiment.objective.environment.max_turns
    return Turns(ENCODER, stops, environments, most).play(prompts, [0] * len(scripts), sample)


def test_a_game_of_gymnasium_is_won_and_lost(example: Any) -> None:
    pytest.importorskip("gymnasium")
    experiment = example("frozen_lake").experiment
    assert experiment.objective.environment == Environment("frozen lake", max_turns=12)
    won = ("down", "down", "What?", " Right ", "down", "right", "right")
    for script, reward in ((won, 1.0), (("down", "right"), 0.0)):
        (actual,) = played(experiment, [script])
        assert (actual.reward, len(actual.turns)) == (reward, 2 * len(script) - 1)
    assert [one["content"] for one in actual.turns] == ["down", "You are at row 1, column 0.", "right"]


@pytest.fixture
def openenv_url(tmp_path: Path, wait_until: Any) -> Iterator[str]:
    """The server of OpenEnv's template, in a process of its own."""
    pytest.importorskip("openenv")
    subprocess.run([sys.executable, "-m", "openenv.cli", "init", "echo_env"], cwd=tmp_path, check=True)
    app = tmp_path / "echo_env" / "server" / "app.py"
    text, count = re.subn(r"max_concurrent_envs=1\b", "max_concurrent_envs=2", app.read_text())
    assert count == 1
    app.write_text(text)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [sys.executable, "-m", "server.app", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(argv, cwd=tmp_path / "echo_env") as server:
        try:
            wait_until(lambda: answers(port), server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_a_server_of_openenv_answers_episodes(example: Any, openenv_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_URL", openenv_url)
    experiment = example("openenv_echo").experiment
    for _ in range(2):  # sessions have ended, of which the server has two
        short, long = played(experiment, [("four", "seven77"), ("a long completion", "")])
        assert (short.reward, long.reward) == (pytest.approx(1.1), 1.0)
        assert [one["content"] for one in short.turns] == ["four", "4 characters", "seven77"]


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


def test_a_taskset_of_verifiers_scores_completions(example: Any) -> None:
    pytest.importorskip("verifiers")
    experiment = example("verifiers_tasks").experiment
    prompts = load(experiment.data, TOKENIZER)
    assert isinstance(prompts, Prompts)
    assert len(prompts) == 100
    row = prompts.columns[23]
    assert row["prompt"] == [{"role": "user", "content": "2 + 3 = ?"}]
    scores = Rewards(experiment.objective.rewards).score(
        Sampled([" 5\n", "6", "five"], [[1]] * 3, [row] * 3, ["a:24"] * 3)
    )
    assert [value for (value,) in scores.values] == pytest.approx([1.1, 0.1, 0.0])
