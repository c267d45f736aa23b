"""Completions sampled by a server: with the policy's weights, recorded before they are learned from."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

import nnxdsl
from nnxdsl import (
    Adapter,
    Checkpoint,
    Data,
    Engine,
    Experiment,
    ImportanceSampling,
    Model,
    Objective,
    Optimizer,
    Quantization,
    Reward,
    RolloutLog,
    RunError,
    Schedule,
    SpecError,
    Weights,
    compile,
    evolve,
    reward,
)
from nnxdsl.config.objectives.reward import functions
from nnxdsl.data import Prompts, load
from nnxdsl.errors import NotRegisteredError
from nnxdsl.generate.sampler import Completion
from nnxdsl.rollouts.engine import Requests, build
from nnxdsl.rollouts.recording import Recording
from nnxdsl.rollouts.rollouts import Rollouts
from nnxdsl.rollouts.server import ServerEngine
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.hooks.base import Hook
from nnxdsl.trainer.run import run
from nnxdsl.trainer.trainer import Trainer
from nnxdsl.weights.export import export
from nnxdsl.weights.sources import open_source, open_tokenizer_of
from tests.fixtures.serving import KEY, serving, start


@reward("vowels of a server")
def vowels(completion: str) -> float:
    return sum(letter in "aeiou" for letter in completion) / 8


@reward("codes of a server")
def codes(completion: str) -> float:
    return sum(map(ord, completion)) % 7 / 7


ADAPTER_ONLY = Engine.Server("http://localhost:1", adapter_only=True)


class Served:
    """A tiny model in the Hub's format, and experiments that are sampled by a server of it."""

    def __init__(self, place: Path) -> None:
        self.place, self.model, self.weights, self.url = place, place / "model", place / "weights", "http://localhost:1"
        self.weights.mkdir()
        (place / "texts.jsonl").write_text('{"text": "a word and another word, and one more"}\n' * 4)
        sft = Experiment(
            name="base",
            model=Model.Qwen3("tiny"),
            objective=Objective.SFT(loss_on="all"),
            data=Data.Text(str(place / "texts.jsonl"), max_length=48),
            batch_size=4,
            steps=1,
        )
        export(run(sft, place / "base", Display(quiet=True)).directory, self.model)
        rows = [json.dumps({"prompt": f"Say {number}: "}) + "\n" for number in range(6)]
        (place / "prompts.jsonl").write_text("".join(rows))

    def experiment(self, objective: dict[str, Any] | None = None, **fields: Any) -> Experiment:
        engine = Engine.Server(self.url, weights_directory=str(self.weights), timeout=60)
        options = {"rewards": (Reward("vowels of a server"),), "num_generations": 2, "engine": engine}
        defaults = {
            "model": Model.HF(str(self.model), weights=Weights.HF(str(self.model))),
            "adapter": Adapter.LoRA(rank=2),
            "data": Data.Prompts(str(self.place / "prompts.jsonl"), max_prompt_length=32, max_completion_length=8),
            "optimizer": Optimizer.SGD(schedule=Schedule.Constant(lr=2.0), max_grad_norm=None),
            "checkpoint": Checkpoint(every_steps=3),
            "batch_size": 4,
            "steps": 5,
        }
        return Experiment(
            name="served", objective=Objective.DAPO(**{**options, **(objective or {})}), **{**defaults, **fields}
        )

    def rollouts(self, experiment: Experiment) -> Rollouts:
        program = compile(experiment).with_steps(5)
        tokenizer = open_tokenizer_of(experiment, self.place / "runs", program.blueprint.config.vocab_size)
        prompts = load(experiment.data, tokenizer)
        assert isinstance(prompts, Prompts)
        return Rollouts.of(program, prompts, tokenizer, self.place / "runs")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def served(place: Served) -> Iterator[Served]:
    text = "--weights-directory", str(place.weights), "--name", "tiny"
    with pytest.MonkeyPatch.context() as patch, serving(place.model, *text) as url:
        patch.setenv("NNXDSL_API_KEY", KEY)
        place.url = url.removesuffix("/v1")
        yield place


def state_of(rollouts: Rollouts, experiment: Experiment, home: Path) -> Any:
    """The program's state with the weights of the experiment, of which an adapter has moved."""
    source = open_source(rollouts.program.blueprint, home)
    state = rollouts.program.init(source)
    moved = {path: leaf + 0.05 for path, leaf in state.trainable.items()}
    return state._replace(trainable=moved)


def load_base(served: Served, rollouts: Rollouts) -> None:
    """Has the server load the weights that it began with, in place of a policy's."""
    base = served.weights / "base"
    shutil.copytree(served.model, base, dirs_exist_ok=True)
    call = {"method": "reload_weights", "kwargs": {"weights_path": str(base)}}
    engine = rollouts._episodes.engine
    assert isinstance(engine, ServerEngine)
    engine._client.post("/collective_rpc", call)


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("adapter_only", [False, True])
def test_it_samples_with_the_weights_of_each_step(served: Served, adapter_only: bool) -> None:
    engine = Engine.Server(served.url, weights_directory=str(served.weights), timeout=60, adapter_only=adapter_only)
    settings = {"temperature": 0.8, "top_p": 0.9, "importance_sampling": ImportanceSampling(), "engine": engine}
    experiment = served.experiment(settings)
    made = served.rollouts(experiment)
    load_base(served, made)
    state = state_of(made, experiment, served.place / "runs")
    batch = made.rollout_at(0, state).batch
    logps = np.asarray(made.program.score(state, made.train_batch(batch)).token_stats.logp).reshape(4, 8)
    mask = batch.loss_mask
    np.testing.assert_allclose(batch.sampler_logps[mask], logps[mask], rtol=0, atol=2e-5)
    assert not np.array_equal(*batch.completion_ids[:2])  # completions of one prompt
    # The same tokens again, as after a restart; log-probs up to rounding, as requests are batched as they come.
    second = served.rollouts(experiment)
    again = second.rollout_at(0, state).batch
    assert np.array_equal(again.tokens, batch.tokens)
    np.testing.assert_allclose(again.sampler_logps, batch.sampler_logps, rtol=0, atol=1e-5)
    assert [one.name for one in (served.weights / experiment.id).iterdir()] == ["step-00000000"]
    _, metrics = made.program.step(state, made.train_batch(batch))
    assert float(metrics["sampling/importance_sampling_ratio/raw_mean"]) == pytest.approx(1.0, abs=1e-5)
    second.close()


@pytest.mark.extended
@pytest.mark.parametrize("settings", [{}, {"num_iterations": 2, "max_num_gen_batches": 2}], ids=str)
def test_completions_are_sampled_ahead(served: Served, settings: dict[str, Any]) -> None:
    engine = Engine.Server(served.url, weights_directory=str(served.weights), max_staleness=1)
    correction = ImportanceSampling(level="sequence_mean")
    rewards = (Reward("codes of a server"),)
    objective = {"engine": engine, "importance_sampling": correction, "rewards": rewards, **settings}
    experiment = served.experiment(objective, optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=0.05)), steps=6)
    directory = run(experiment, served.place / "ahead", Display(quiet=True)).directory
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    stride = settings.get("num_iterations", 1)
    assert [row["sampling/staleness"] for row in rows[::stride]] == [0.0, *[1.0] * (6 // stride - 1)]
    # The first completions are of the weights that learn, later ones are of those before an update.
    name = "sampling/sampling_logp_difference/max"
    assert rows[0][name] < 1e-5
    assert all(row[name] > 1e-4 for row in rows[stride::stride])
    assert not (served.weights / experiment.id).exists()


def rows_of(directory: Path) -> list[dict[str, Any]]:
    """Rows of `rollouts.jsonl`, whichever attempt wrote them."""
    rows = map(json.loads, (directory / "rollouts.jsonl").read_text().splitlines())
    return [{name: value for name, value in row.items() if name != "attempt"} for row in rows]


class Dies(Hook):
    """Ends a run in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.step == self.step:
            raise RuntimeError("as if killed")


@pytest.mark.extended
def test_a_run_learns_from_what_was_recorded(served: Served) -> None:
    experiment, parts = served.experiment(rollouts=RolloutLog(every_steps=1)), served.place / "parts"
    whole = run(experiment, served.place / "runs", Display(quiet=True))
    with pytest.raises(RuntimeError, match="as if killed"):
        run(experiment, parts, Display(quiet=True), hooks=[Dies(4)])
    directory = parts / experiment.id
    before = rows_of(directory)
    assert [row["step"] for row in before] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert [path.name for path in (directory / "checkpoints").glob("0*")] == ["00000003"]
    recorded = sorted(path.name for path in (directory / "sampled").iterdir())
    assert recorded == ["step-00000003.json", "step-00000004.json"]
    # No server is needed until something is sampled that was not.
    gone = evolve(experiment, {"objective.engine.url": "http://localhost:1"})
    assert gone.id == experiment.id
    resumed = run(gone, parts, Display(quiet=True))
    assert (resumed.state, resumed.step) == ("finished", 5)
    # Steps that are computed again have their completions in rollouts.jsonl again.
    assert rows_of(directory) == before
    attempts = [json.loads(row)["attempt"] for row in (directory / "rollouts.jsonl").read_text().splitlines()]
    assert attempts == [1] * 6 + [2] * 4
    expected, actual = (nnxdsl.load(each.directory).leaves for each in (whole, resumed))
    for path, leaf in expected.items():
        np.testing.assert_array_equal(actual[path], leaf, err_msg=path)


class Kills(Hook):
    """Kills a process in the middle of a step."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.step == 2:
            self.process.kill()
            self.process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_a_run_ends_with_its_server_and_goes_on_with_the_next(
    place: Served, max_staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNXDSL_API_KEY", KEY)
    text = "--weights-directory", str(place.weights)
    process, url = start(place.model, "--port", "0", *text)
    engine = Engine.Server(url.removesuffix("/v1"), weights_directory=str(place.weights), max_staleness=max_staleness)
    experiment = place.experiment({"engine": engine, "importance_sampling": ImportanceSampling()})
    with pytest.raises(RunError, match=r"step [34]: objective.engine: the server at .* does not answer"):
        run(experiment, tmp_path, Display(quiet=True), hooks=[Kills(process)])
    recorded = (tmp_path / experiment.id / "sampled" / "step-00000002.json").read_bytes()
    process, _ = start(place.model, "--port", url.split(":")[2].removesuffix("/v1"), *text)
    try:
        actual = run(experiment, tmp_path, Display(quiet=True))
    finally:
        process.kill()
        process.communicate()
    assert (actual.state, actual.step) == ("finished", 5)
    rows = [json.loads(line) for line in (actual.directory / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [*range(5)]
    assert json.loads(recorded)["rollout"]["metrics"]["reward"] == rows[2]["reward"]


@pytest.mark.extended
def test_a_recording_of_other_rewards_or_rows_is_refused(served: Served) -> None:
    experiment, home = served.experiment(steps=2), served.place / "changed"
    with pytest.raises(RuntimeError, match="as if killed"):
        run(experiment, home, Display(quiet=True), hooks=[Dies(0)])
    assert not list((home / experiment.id / "checkpoints").glob("0*"))
    functions["vowels of a server"] = lambda completion: 1.0
    try:
        with pytest.raises(RunError, match=r"the source of a reward .vowels of a server. has changed"):
            run(experiment, home, Display(quiet=True))
    finally:
        functions["vowels of a server"] = vowels


def test_recordings_before_the_oldest_checkpoint_are_deleted(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "sampled", tmp_path / "checkpoints")
    for step in range(6):
        (tmp_path / "checkpoints" / f"{step:08}.orbax-checkpoint-tmp").mkdir(parents=True)
        if step in (2, 4):
            (tmp_path / "checkpoints" / f"{step:08}").mkdir()
        recording.write(step, {"step": step})
        assert recording.read(step) == {"step": step}
    assert [recording.read(step) is None for step in range(6)] == [True, True, False, False, False, False]


@pytest.mark.extended
def test_each_step_has_an_adapter_of_a_new_name(served: Served) -> None:
    engine = Engine.Server(served.url, weights_directory=str(served.weights), timeout=60, adapter_only=True)
    made = served.rollouts(experiment := served.experiment({"engine": engine}))
    load_base(served, made)
    state, client = state_of(made, experiment, served.place / "runs"), made._episodes.engine._client
    names = list[str]()
    for step in (0, 1):
        moved = {path: leaf + 0.02 * step for path, leaf in state.trainable.items()}
        now = state._replace(trainable=moved, step=state.step + step)
        batch = made.rollout_at(step, now).batch
        logps = np.asarray(made.program.score(now, made.train_batch(batch)).token_stats.logp).reshape(4, 8)
        np.testing.assert_allclose(batch.sampler_logps[batch.loss_mask], logps[batch.loss_mask], rtol=0, atol=2e-5)
        (name,) = set(client.models()) - {"tiny"}  # the one before is forgotten
        names.append(name)
    assert [name.partition("-step-")[2] for name in names] == ["00000000", "00000001"]
    made = served.rollouts(experiment)  # as after a kill
    assert np.array_equal(made.rollout_at(1, now).batch.tokens, batch.tokens)
    (name,) = set(client.models()) - {"tiny"}
    assert name not in names
    made.close()
    assert client.models() == ["tiny"]


@pytest.mark.extended
def test_another_model_is_refused_before_anything_is_learned(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = served.experiment({"engine": Engine.Server(served.url, weights_directory=str(served.weights))})
    made = served.rollouts(experiment)
    state = state_of(made, experiment, served.place / "runs")
    made.rollout_at(0, state)
    # What the server has is no longer what is trained.
    other = state._replace(trainable={path: leaf + 1.0 for path, leaf in state.trainable.items()})
    made = served.rollouts(experiment)
    monkeypatch.setattr(ServerEngine, "_load", lambda self, weights: setattr(self, "_model", "tiny"))
    with pytest.raises(
        RunError, match=r"^step 0: objective.engine: log-probabilities of its completions are [\d.]+ nats"
    ):
        made.rollout_at(0, other)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": "http://localhost:1"}, "does not answer: "),
        ({"weights_directory": "elsewhere"}, r"answers 403: .*elsewhere/.* is not below .*; set weights_directory"),
        ({"api_key_variable": "NO_KEY"}, "answers 401: the key is not that of the server"),
    ],
    ids=str,
)
def test_what_a_server_refuses(
    served: Served, fields: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(served.place)
    monkeypatch.setattr("nnxdsl.rollouts.client.TRIES", 1)
    engine = attrs.evolve(served.experiment().objective.engine, **fields)  # pyright: ignore[reportAttributeAccessIssue]
    made = served.rollouts(served.experiment({"engine": engine}))
    with pytest.raises(RunError, match=rf"^step 0: objective.engine: the server at {engine.url} {message}"):
        made.rollout_at(0, made.program.init(open_source(made.program.blueprint, served.place)))


def test_a_server_that_hangs(place: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nnxdsl.rollouts.client.TRIES", 1)
    with socket.create_server(("localhost", 0)) as silent:
        url = f"http://localhost:{silent.getsockname()[1]}"
        made = place.rollouts(place.experiment({"engine": Engine.Server(url, timeout=0.2)}))
        with pytest.raises(RunError, match=rf"{url} does not answer within timeout=0\.2 seconds"):
            made.rollout_at(0, made.program.init(open_source(made.program.blueprint, place.place)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"quantization": Quantization.NF4()},
            "objective.engine: a server gets merged weights, and those of Quantization.NF4 are not merged",
        ),
        (
            {"objective": {"num_speculative_tokens": 2}},
            "objective: num_speculative_tokens: has no effect with an engine, which has drafts of its own",
        ),
        (
            {"objective": {"kv_cache_dtype": "int8"}},
            "objective: kv_cache_dtype: has no effect with an engine, which has a cache of its own",
        ),
        (
            {"objective": {"engine": Engine.Server("http://localhost:8000", max_staleness=1)}},
            "engine.max_staleness: completions of earlier weights bias the loss; "
            "set importance_sampling=ImportanceSampling()",
        ),
        (
            {"objective": {"engine": "http://localhost:8000"}},
            "engine: expected Engine, got 'http://localhost:8000'; use one of its members: Engine.Server",
        ),
        (
            {"objective": {"engine": ADAPTER_ONLY}, "adapter": None},
            "objective.engine.adapter_only: has no effect without an adapter; set adapter=Adapter.LoRA()",
        ),
        (
            {"objective": {"engine": ADAPTER_ONLY}, "adapter": Adapter.DoRA()},
            "objective.engine.adapter_only: vLLM serves LoRA, and no Adapter.DoRA; leave it out",
        ),
        (
            {"objective": {"engine": ADAPTER_ONLY}, "adapter": Adapter.LoRA(ranks=(("mlp", 4),))},
            "objective.engine.adapter_only: vLLM has one rank and one alpha for all layers",
        ),
    ],
    ids=str,
)
def test_experiments_that_no_server_samples(place: Served, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as error:
        place.experiment(**fields)
    assert message.removeprefix("objective: ") in str(error.value)
    with pytest.raises(
        SpecError, match="url: expected a URL without /v1, as http://localhost:8000, got 'http://localhost:8000/v1'"
    ):
        Engine.Server("http://localhost:8000/v1")


def test_an_engine_of_another_package_is_one_file(place: Served) -> None:
    @attrs.frozen(kw_only=True)
    class Parrot(Engine):
        word: int = 65

    experiment = place.experiment({"engine": Parrot()})
    with pytest.raises(NotRegisteredError, match=r"no engine is registered for .*Parrot; write"):
        place.rollouts(experiment)

    @attrs.frozen
    class ParrotEngine:
        word: int
        max_logp_difference = None

        def weights(self, state: Any) -> None:
            return None

        def close(self) -> None:
            pass

        def sample(self, weights: None, requests: Requests) -> list[Completion]:
            nothing = np.zeros(2, np.float32)
            return [Completion([self.word] * 2, nothing, nothing, 2) for _ in requests.prompts]

    @build.register(Parrot)
    def _(engine: Any, program: Any, stop_ids: Any, home: Path) -> ParrotEngine:
        return ParrotEngine(engine.word)

    made = place.rollouts(experiment)
    batch = made.rollout_at(0, made.program.init(open_source(made.program.blueprint, place.place))).batch
    assert batch.completion_ids[:, :2].tolist() == [[65, 65]] * 4
    assert batch.sampler_logps.shape == (4, 8)
