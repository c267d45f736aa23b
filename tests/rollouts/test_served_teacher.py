"""On-policy distillation from a teacher behind a server: the figures of a teacher in the step, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

import nnxdsl
from nnxdsl import (
    Checkpoint,
    Data,
    Distance,
    Evaluation,
    Experiment,
    Model,
    Objective,
    Optimizer,
    Reward,
    RunError,
    Schedule,
    SpecError,
    TeacherServer,
    Tokenizer,
    Weights,
    reward,
)
from nnxdsl.rollouts.client import Client
from nnxdsl.rollouts.served_teacher import ServedTeacher
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.hooks.base import Hook
from nnxdsl.trainer.run import run
from nnxdsl.trainer.trainer import Trainer
from nnxdsl.weights.export import export
from tests.fixtures.serving import KEY, serving


@reward("letters of a student")
def letters(completion: str) -> float:
    return float(len(completion))


class Place:
    """A teacher in the Hub's format, and experiments of a student of another family with the same tokenizer."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.model, self.url = directory, directory / "teacher", "http://localhost:1"
        (directory / "texts.jsonl").write_text('{"text": "a word and another word, and one more"}\n' * 4)
        for name, numbers in (("prompts", range(6)), ("held_out", range(6, 9))):
            rows = [json.dumps({"prompt": f"Say {number}: "}) + "\n" for number in numbers]
            (directory / f"{name}.jsonl").write_text("".join(rows))
        sft = Experiment(
            name="teacher",
            model=Model.Qwen3("tiny"),
            objective=Objective.SFT(loss_on="all"),
            data=Data.Text(str(directory / "texts.jsonl"), max_length=48),
            optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-2)),
            batch_size=4,
            steps=8,
        )
        export(run(sft, directory / "sft", Display(quiet=True)).directory, self.model)

    def prompts(self, name: str) -> Data:
        return Data.Prompts(str(self.directory / f"{name}.jsonl"), max_prompt_length=32, max_completion_length=8)

    def experiment(self, **objective: Any) -> Experiment:
        given = {"distance": Distance.SampledReverseKL(), "rewards": (Reward("letters of a student"),)}
        if "teacher" not in objective:
            given["teacher_server"] = TeacherServer(self.url, timeout=60)
        return Experiment(
            name="student",
            model=Model.Llama3("tiny", tokenizer=Tokenizer.File(str(self.model))),
            objective=Objective.OnPolicyDistill(num_generations=2, **{**given, **objective}),
            data=self.prompts("prompts"),
            evaluation=Evaluation(every_steps=2, data=self.prompts("held_out")),
            optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.05), max_grad_norm=None),
            checkpoint=Checkpoint(every_steps=2),
            batch_size=4,
            steps=4,
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def served(place: Place) -> Iterator[Place]:
    with pytest.MonkeyPatch.context() as patch, serving(place.model, "--name", "tiny") as url:
        patch.setenv("NNXDSL_API_KEY", KEY)
        place.url = url.removesuffix("/v1")
        yield place


class Dies(Hook):
    """Ends a run in the middle of its last step."""

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.step == 3:
            raise RuntimeError("as if killed")


def rows_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.extended
def test_a_run_has_the_figures_of_a_teacher_in_the_step_and_resumes_from_what_was_recorded(served: Place) -> None:
    home = served.directory / "runs"
    teacher = Model.HF(str(served.model), weights=Weights.HF(str(served.model)))
    in_step = run(served.experiment(teacher=teacher), home, Display(quiet=True))
    asked = served.experiment()
    with pytest.raises(RuntimeError, match="as if killed"):
        run(asked, home, Display(quiet=True), hooks=[Dies()])
    # The completions of the steps that are computed again were recorded with the teacher's log-probabilities.
    gone = attrs.evolve(
        asked, objective=attrs.evolve(asked.objective, teacher_server=TeacherServer("http://localhost:1"))
    )
    assert gone.id == asked.id
    recorded = home / asked.id / "sampled" / "step-00000003.json"
    assert all(
        len(one["teacher_logps"]) == len(one["ids"]) for one in json.loads(recorded.read_text())["rollout"]["episodes"]
    )
    # Held-out completions are not recorded.
    with pytest.raises(
        RunError, match=r"step 2, evaluating: objective.teacher_server: the server at .*:1 does not answer"
    ):
        run(gone, home, Display(quiet=True))
    before = recorded.read_bytes()
    resumed = run(asked, home, Display(quiet=True))
    assert (resumed.state, resumed.step) == ("finished", 4)
    assert recorded.read_bytes() == before
    expected, found = (
        rows_of(in_step.directory),
        {row["step"]: row for row in rows_of(resumed.directory) if "loss" in row},
    )
    losses = [row for row in expected if "loss" in row]
    assert len(losses) == 4
    for row in losses:
        assert found[row["step"]]["loss"] == pytest.approx(row["loss"], rel=1e-5, abs=1e-6)
        assert found[row["step"]]["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-5)
    trained = nnxdsl.load(in_step.directory).leaves
    for path, leaf in nnxdsl.load(resumed.directory).leaves.items():
        np.testing.assert_allclose(leaf, trained[path], rtol=0, atol=1e-5, err_msg=path)
    held_out = [
        {r["step"]: r["eval/loss"] for r in rows_of(one.directory) if "eval/loss" in r} for one in (in_step, resumed)
    ]
    assert len(held_out[0]) >= 2
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-5)


class OtherTokenizer:
    """Splits texts otherwise than the server's."""

    bos_id = 1

    def encode(self, text: str) -> list[int]:
        return [1, *(ord(letter) for letter in text[::-1])]


@pytest.mark.extended
def test_what_a_teacher_answers_is_checked(served: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = nnxdsl.load(served.model).tokenizer
    prompts, completions = [[5, 6, 7], [9]], [[8], [10, 11, 12]]
    logps = ServedTeacher(TeacherServer(served.url), tokenizer).logps(prompts, completions)
    model = nnxdsl.load(served.model)
    for found, prompt, completion in zip(logps, prompts, completions, strict=True):
        expected = model.token_logps([*prompt, *completion]).logps[-len(completion) :]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    other: Any = OtherTokenizer()
    with pytest.raises(RunError, match=r"objective.teacher_server: the server at .* has another tokenizer: it splits"):
        ServedTeacher(TeacherServer(served.url), other).logps(prompts, completions)
    with pytest.raises(RunError, match=r"answers 404: .*nobody"):
        ServedTeacher(TeacherServer(served.url, model="nobody"), tokenizer).logps(prompts, completions)
    monkeypatch.setenv("NNXDSL_API_KEY", "another key")
    with pytest.raises(RunError, match="answers 401: the key is not that of the server"):
        ServedTeacher(TeacherServer(served.url), tokenizer).logps(prompts, completions)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": []},
        {"choices": [{"logprobs": None}]},
        {"choices": [{"logprobs": {"token_logprobs": [None, -1.0]}}]},
        {"choices": [{"logprobs": {"token_logprobs": [None, -1.0, None]}}]},
        {"choices": [{"logprobs": {"token_logprobs": [None, -1.0, float("nan")]}}]},
    ],
    ids=str,
)
def test_an_answer_without_log_probabilities(answer: dict[str, Any]) -> None:
    tokenizer: Any = OtherTokenizer()
    teacher = ServedTeacher(TeacherServer("http://localhost:1"), tokenizer)
    with pytest.raises(
        RunError, match="answers without a log-probability of each token of the prompt; expected nnxdsl"
    ):
        teacher._read(answer, 3, 2)


def test_requests_end_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = OtherTokenizer()
    teacher = ServedTeacher(TeacherServer("http://localhost:1"), tokenizer)
    teacher.close()
    with pytest.raises(RunError, match="is no longer needed: the run ends"):
        teacher.logps([[5]], [[6]])
    assert isinstance(teacher._client, Client)


SERVER = TeacherServer("http://localhost:8000")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"teacher_server": None}, "teacher: there is none; give teacher=Model... or teacher_server="),
        ({"teacher": Model.Qwen3("tiny"), "teacher_server": SERVER}, "teacher: there are two; give"),
        (
            {"distance": Distance.ReverseKL()},
            "distance: a server gives log-probabilities of tokens, and Distance.ReverseKL",
        ),
        (
            {"temperature": 0.7},
            "temperature: a server gives log-probabilities at temperature 1, and this is 0.7; leave",
        ),
        ({"top_k": 5}, "top_k: tokens that are never sampled bias SampledReverseKL"),
        (
            {"teacher_server": "http://localhost:8000"},
            "teacher_server: expected TeacherServer, got 'http://localhost:8000'",
        ),
    ],
    ids=str,
)
def test_experiments_that_no_server_teaches(fields: dict[str, Any], message: str) -> None:
    given = {"distance": Distance.SampledReverseKL(), "teacher_server": SERVER}
    with pytest.raises(SpecError) as error:
        Objective.OnPolicyDistill(**{**given, **fields})
    assert message in str(error.value)
    with pytest.raises(SpecError, match="url: expected a URL without /v1, as http://localhost:8000"):
        TeacherServer("http://localhost:8000/v1")
