"""On-policy distillation from a teacher behind a server: the figures of a teacher in the step, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import nnxdsl
from nnxdsl import (
    Checkpoint,
    Data,
    DataError,
    Distance,
    Evaluation,
    Experiment,
    Model,
    Objective,
    Optimizer,
    PlanError,
    Reward,
    RunError,
    Schedule,
    SpecError,
    TeacherServer,
    Tokenizer,
    Weights,
    compile,
    reward,
)
from nnxdsl.data.batch import RolloutBatch
from nnxdsl.data.loaders.build import load
from nnxdsl.data.prompts import Prompts
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.program.compile import Program
from nnxdsl.program.memory import memory
from nnxdsl.rollouts.client import Client
from nnxdsl.rollouts.rollouts import Rollouts
from nnxdsl.rollouts.served_teacher import ServedTeacher, ServedTeachers
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.hooks.base import Hook
from nnxdsl.trainer.run import run
from nnxdsl.trainer.trainer import Trainer
from nnxdsl.weights.export import export
from tests.fixtures.serving import KEY, serving


@reward("letters of a student")
def letters(completion: str) -> float:
    return float(len(completion))


TEACHERS = "math", "code"


class Place:
    """A teacher in the Hub's format, and experiments of a student of another family with the same tokenizer."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.model, self.url = directory, directory / "teacher", "http://localhost:1"
        self.urls = dict[str, str]()
        (directory / "texts.jsonl").write_text('{"text": "a word and another word, and one more"}\n' * 4)
        for name, numbers in (("prompts", range(6)), ("held_out", range(6, 9))):
            rows = [json.dumps({"prompt": f"Say {n}: ", "teacher_id": TEACHERS[n % 2]}) + "\n" for n in numbers]
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
        fields = {"distance": Distance.SampledReverseKL(), "rewards": (Reward("letters of a student"),)}
        if not objective.keys() & {"teacher", "teacher_servers"}:
            fields["teacher_server"] = TeacherServer(self.url, timeout=60)
        return Experiment(
            name="student",
            model=Model.Llama3("tiny", tokenizer=Tokenizer.File(str(self.model))),
            objective=Objective.OnPolicyDistill(num_generations=2, **{**fields, **objective}),
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


@pytest.fixture(scope="module")
def two(served: Place) -> Iterator[dict[str, Path]]:
    """Two teachers of different weights, by name, each behind a server of its own."""
    other = served.directory / "other"
    shutil.copytree(served.model, other)
    for file in other.glob("*.safetensors"):
        weights = safetensors.numpy.load_file(file)
        noise = np.random.default_rng(0)
        moved = {k: (w + 0.05 * noise.standard_normal(w.shape)).astype(w.dtype) for k, w in weights.items()}
        safetensors.numpy.save_file(moved, file, {"format": "pt"})
    with serving(other) as url:
        served.urls = {"math": served.url, "code": url.removesuffix("/v1")}
        yield {"math": served.model, "code": other}


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
    expected, actual = (
        rows_of(in_step.directory),
        {row["step"]: row for row in rows_of(resumed.directory) if "loss" in row},
    )
    losses = [row for row in expected if "loss" in row]
    assert len(losses) == 4
    for row in losses:
        assert actual[row["step"]]["loss"] == pytest.approx(row["loss"], rel=1e-5, abs=1e-6)
        assert actual[row["step"]]["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-5)
    trained = nnxdsl.load(in_step.directory).leaves
    for path, leaf in nnxdsl.load(resumed.directory).leaves.items():
        np.testing.assert_allclose(leaf, trained[path], rtol=0, atol=1e-5, err_msg=path)
    held_out = [
        {r["step"]: r["eval/loss"] for r in rows_of(one.directory) if "eval/loss" in r} for one in (in_step, resumed)
    ]
    assert len(held_out[0]) >= 2
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-5)


class Step(NamedTuple):
    """The first step of a run, and what its loss is made of."""

    program: Program
    batch: RolloutBatch
    named: list[str]
    metrics: dict[str, float]
    trainable: Any
    student: Callable[[Any], Any]
    """Whole distributions of trained leaves."""
    teachers: dict[str, np.ndarray]
    """Those of each teacher, which is loaded by itself."""


def first_step(served: Place, two: dict[str, Path], **objective: Any) -> Step:
    servers = {name: TeacherServer(url, timeout=60) for name, url in served.urls.items()}
    experiment = served.experiment(teacher_servers=servers, **objective)
    program, tokenizer = compile(experiment), nnxdsl.load(served.model).tokenizer
    assert tokenizer is not None
    prompts = load(experiment.data, tokenizer)
    assert isinstance(prompts, Prompts)
    state, made = program.init(), Rollouts.of(program, prompts, tokenizer, served.directory / "runs")
    rollout = made.rollout_at(0, state)
    template, leaves = program.policy(state)
    leaves, trainable = jax.tree.map(np.asarray, (dict(leaves), dict(state.trainable)))
    assert program.blueprint.num_generations == 2
    metrics = {name: float(value) for name, value in program.step(state, made.train_batch(rollout.batch))[1].items()}
    made.close()
    named = [prompts.columns[row]["teacher_id"] for row in rollout.rows]
    assert set(named) == set(two)
    loaded = {name: nnxdsl.load(path) for name, path in two.items()}
    whole = {name: token_logps(model._template, model.leaves, rollout.batch) for name, model in loaded.items()}
    return Step(
        program,
        rollout.batch,
        named,
        metrics,
        trainable,
        lambda trained: token_logps(template, {**leaves, **trained}, rollout.batch),
        {name: np.asarray(logps, np.float64) for name, logps in whole.items()},
    )


def token_logps(template: Any, leaves: Any, batch: RolloutBatch) -> Any:
    """Log-probabilities `[B, R, V]` of whole distributions that predict the tokens of completions."""
    model, width = template.merge(dict(leaves)), batch.completion_ids.shape[1]
    places = positions_right_padded(batch.length, batch.tokens.shape[1])
    each = jax.nn.log_softmax(model.logits(model(batch.tokens, places, dtype=np.float32).hidden))
    source = (batch.length - batch.completion_length)[:, None] - 1 + np.arange(width)
    return jnp.take_along_axis(each, np.minimum(source, each.shape[1] - 1)[..., None], axis=1)


def require_metrics(step: Step, distances: np.ndarray) -> None:
    """Requires the loss and the metrics that are means of a divergence at each token."""
    mask = step.batch.loss_mask
    assert step.metrics["loss"] == pytest.approx(distances[mask].mean(), rel=2e-5, abs=1e-5)
    for name in step.teachers:
        is_of_teacher = mask & np.array([each == name for each in step.named])[:, None]
        assert step.metrics[f"teacher_jsd/{name}"] == pytest.approx(distances[is_of_teacher].mean(), rel=2e-5, abs=1e-5)
        assert step.metrics[f"teacher_token_frac/{name}"] == pytest.approx(is_of_teacher.sum() / mask.sum())


def test_each_row_has_the_teacher_that_it_names(served: Place, two: dict[str, Path]) -> None:
    """Loss and metrics from the log-probabilities of two models that are loaded one by one."""
    step = first_step(served, two)
    ours, ids = np.asarray(step.student(step.trainable), np.float64), step.batch.completion_ids[..., None]
    apart = {name: np.take_along_axis(ours - theirs, ids, axis=2)[..., 0] for name, theirs in step.teachers.items()}
    swapped = [TEACHERS[1 - TEACHERS.index(name)] for name in step.named]
    actual, others = (np.array([apart[name][row] for row, name in enumerate(ns)]) for ns in (step.named, swapped))
    require_metrics(step, actual)
    assert abs(step.metrics["loss"] - others[step.batch.loss_mask].mean()) > 1e-3


@pytest.mark.default_variants(1)
@pytest.mark.parametrize(
    ("distance", "of_token"),
    [
        (Distance.ReverseKL(), lambda p, q: jnp.exp(q) * (q - p)),
        (Distance.ForwardKL(), lambda p, q: jnp.exp(p) * (p - q)),
        (
            Distance.JSD(beta=0.3),
            lambda p, q: (
                0.3 * jnp.exp(p) * (p - jnp.log(0.3 * jnp.exp(p) + 0.7 * jnp.exp(q)))
                + 0.7 * jnp.exp(q) * (q - jnp.log(0.3 * jnp.exp(p) + 0.7 * jnp.exp(q)))
            ),
        ),
    ],
    ids=["reverse", "forward", "jsd"],
)
def test_distances_over_the_top_k_of_servers(
    served: Place, two: dict[str, Path], distance: Distance, of_token: Callable[[Any, Any], Any]
) -> None:
    """Loss, metrics and gradient norm from the whole distributions of models that are loaded one by one."""
    k = 5
    step = first_step(served, two, distance=distance, teacher_top_k=k)
    theirs = np.array([step.teachers[name][row] for row, name in enumerate(step.named)])
    best = np.argsort(-theirs, axis=-1, kind="stable")[..., :k]

    def classes(logps: Any) -> Any:
        top = jnp.take_along_axis(logps, best, axis=-1)
        rest = jnp.put_along_axis(logps, best, -jnp.inf, axis=-1, inplace=False)
        return jnp.concatenate([top, jax.nn.logsumexp(rest, axis=-1, keepdims=True)], axis=-1)

    def divergence(trained: Any) -> Any:
        return jnp.sum(of_token(classes(jnp.asarray(theirs, jnp.float32)), classes(step.student(trained))), axis=-1)

    require_metrics(step, np.asarray(divergence(step.trainable)))
    mask = step.batch.loss_mask
    gradient = jax.grad(lambda trained: jnp.sum(divergence(trained) * mask) / mask.sum())(step.trainable)
    norm = np.sqrt(sum(float(jnp.sum(jnp.square(each))) for each in jax.tree.leaves(gradient)))
    assert step.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.extended
def test_a_run_with_several_teachers_resumes_from_what_was_recorded(served: Place, two: dict[str, Path]) -> None:
    home = served.directory / "several"
    asked = served.experiment(teacher_servers={name: TeacherServer(url) for name, url in served.urls.items()})
    with pytest.raises(RuntimeError, match="as if killed"):
        run(asked, home, Display(quiet=True), hooks=[Dies()])
    recorded = json.loads((home / asked.id / "sampled" / "step-00000003.json").read_text())["rollout"]["episodes"]
    assert {one["teacher_id"] for one in recorded} == {"math", "code"}
    gone = served.experiment(teacher_servers=dict.fromkeys(TEACHERS, TeacherServer("http://localhost:1")))
    assert gone.id == asked.id
    with pytest.raises(RunError, match=r"objective.teacher_servers\['(math|code)'\]: the server at .* does not answer"):
        run(gone, home, Display(quiet=True))  # held-out completions are not recorded
    resumed = run(asked, home, Display(quiet=True))
    assert (resumed.state, resumed.step) == ("finished", 4)
    for row in rows_of(resumed.directory):
        shares = [row.get(f"teacher_token_frac/{name}", 0.0) for name in TEACHERS]
        assert "loss" not in row or sum(shares) == pytest.approx(1)
        held_out = [row.get(f"eval/teacher_jsd/{name}") for name in TEACHERS]
        assert ("eval/loss" in row) == (None not in held_out)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a"},
            "row 7: field 'teacher_id' is missing, which names one of objective.teacher_servers ('math', ",
        ),
        ({"teacher_id": "mat"}, "field 'teacher_id': 'mat' is none of objective.teacher_servers ('math', 'code'); did"),
        ({"teacher_id": ["math"]}, "field 'teacher_id': ['math'] is none of objective.teacher_servers"),
    ],
    ids=["missing", "unknown", "list"],
)
def test_rows_that_name_no_teacher(row: dict[str, Any], message: str) -> None:
    tokenizer: Any = OtherTokenizer()
    distance = Distance.SampledReverseKL()
    several = Objective.OnPolicyDistill(teacher_servers=dict.fromkeys(TEACHERS, SERVER), distance=distance)
    teachers, good = ServedTeachers.of(several, tokenizer, 320), {"teacher_id": "code"}
    teachers.check([good, good], ["row 1", "row 2"])
    with pytest.raises(DataError) as error:
        teachers.check([good, row, row], ["row 1", "row 7", "row 8"])
    assert message in str(error.value)
    assert "(2 of 3 rows name no teacher)" in str(error.value)
    one = Objective.OnPolicyDistill(teacher_server=SERVER, distance=distance)
    ServedTeachers.of(one, tokenizer, 320).check([row], ["row 1"])


class OtherTokenizer:
    """Splits texts otherwise than the server's."""

    bos_id = 1

    def encode(self, text: str) -> list[int]:
        return [1, *(ord(letter) for letter in text[::-1])]


@pytest.mark.extended
def test_what_a_teacher_answers_is_checked(served: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = nnxdsl.load(served.model).tokenizer
    prompts, completions = [[5, 6, 7], [9]], [[8], [10, 11, 12]]
    logps = ServedTeacher(TeacherServer(served.url), tokenizer).scores(prompts, completions)
    model = nnxdsl.load(served.model)
    for actual, prompt, completion in zip(logps, prompts, completions, strict=True):
        expected = model.token_logps([*prompt, *completion]).logps[-len(completion) :]
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
    settings = TeacherServer(served.url)
    found_top = ServedTeacher(settings, tokenizer, top_k=3, vocab_size=320).scores(prompts, completions)
    for (ids, logps), prompt, completion in zip(found_top, prompts, completions, strict=True):
        _, top_ids, top_logps = model.token_logps([*prompt, *completion], 3)
        np.testing.assert_array_equal(ids, top_ids[-len(completion) :])
        np.testing.assert_allclose(np.array(logps)[:, :3], top_logps[-len(completion) :], rtol=0, atol=1e-5)
        np.testing.assert_allclose(np.exp(logps).sum(axis=1), 1, rtol=0, atol=1e-6)
    with pytest.raises(RunError, match=r"objective.teacher_server: the server at .* has another vocabulary: token id "):
        ServedTeacher(settings, tokenizer, top_k=3, vocab_size=3).scores(prompts, completions)
    other: Any = OtherTokenizer()
    with pytest.raises(RunError, match=r"objective.teacher_server: the server at .* has another tokenizer: it splits"):
        ServedTeacher(TeacherServer(served.url), other).scores(prompts, completions)
    with pytest.raises(RunError, match=r"answers 404: .*nobody"):
        ServedTeacher(TeacherServer(served.url, model="nobody"), tokenizer).scores(prompts, completions)
    monkeypatch.setenv("NNXDSL_API_KEY", "another key")
    with pytest.raises(RunError, match="answers 401: the key is not that of the server"):
        ServedTeacher(TeacherServer(served.url), tokenizer).scores(prompts, completions)


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


LIKELY = {"4": {"logprob": -1.0}, "7": {"logprob": -2.0}, "5": {"logprob": -0.5}}


@pytest.mark.parametrize(
    "places",
    [
        None,
        [None, LIKELY],
        [None, LIKELY, None],
        [None, LIKELY, {"4": {"logprob": -1.0}}],
        [None, LIKELY, {**LIKELY, "5": {"logprob": None}}],
        [None, LIKELY, {**LIKELY, "5": {"logprob": float("nan")}}],
    ],
    ids=str,
)
def test_an_answer_without_the_top_k(places: Any) -> None:
    tokenizer: Any = OtherTokenizer()
    teacher = ServedTeacher(TeacherServer("http://localhost:1"), tokenizer, top_k=2, vocab_size=8)
    with pytest.raises(
        RunError, match="answers without prompt_logprobs=2 of each token of the prompt; expected nnxdsl"
    ):
        teacher._read_top({"choices": [{"prompt_logprobs": places}]}, 3, 2)


def test_the_top_k_of_an_answer() -> None:
    """The token that is there is left out where it is not among them; the others have a least probability."""
    tokenizer: Any = OtherTokenizer()
    teacher = ServedTeacher(TeacherServer("http://localhost:1"), tokenizer, top_k=2, vocab_size=8)
    sure = {"3": {"logprob": 0.0}, "2": {"logprob": -40.0}}
    ids, logps = teacher._read_top({"choices": [{"prompt_logprobs": [None, LIKELY, sure]}]}, 3, 2)
    assert ids == [[5, 4], [3, 2]]
    others = np.log([1 - np.exp(-0.5) - np.exp(-1), 1e-7])
    np.testing.assert_allclose(logps, [[-0.5, -1.0, others[0]], [0.0, -40.0, others[1]]], rtol=1e-12)


def test_a_top_k_of_the_whole_vocabulary(place: Place) -> None:
    experiment = place.experiment(distance=Distance.ReverseKL(), teacher_top_k=320)
    tokenizer: Any = OtherTokenizer()
    prompts: Any = None
    with pytest.raises(PlanError, match=r"objective.teacher_top_k: 320 leaves no others of vocab_size 320; use"):
        Rollouts.of(compile(experiment), prompts, tokenizer)


def test_a_top_k_is_planned(place: Place) -> None:
    experiment = place.experiment(distance=Distance.ReverseKL(), teacher_top_k=16)
    parts = {part.name: part.bytes for part in memory(build_blueprint(experiment))}
    assert parts["teacher top-k"] == experiment.batch_size * 8 * (16 * 8 + 4)
    assert "teacher" not in parts


def test_requests_end_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = OtherTokenizer()
    teacher = ServedTeacher(TeacherServer("http://localhost:1"), tokenizer)
    teacher.close()
    with pytest.raises(RunError, match="is no longer needed: the run ends"):
        teacher.scores([[5]], [[6]])
    assert isinstance(teacher._client, Client)


SERVER = TeacherServer("http://localhost:8000")
NONE: dict[str, Any] = {"teacher_server": None}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"teacher_server": None}, "teacher: there is none; give teacher=Model..., teacher_server="),
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
        ({"teacher_top_k": 5}, "teacher_top_k: has no effect with Distance.SampledReverseKL, which reads the sampled"),
        (
            {**NONE, "teacher": Model.Qwen3("tiny"), "teacher_top_k": 5},
            "teacher_top_k: has no effect: a teacher in the step gives whole distributions; leave it out",
        ),
        (
            {"teacher_server": "http://localhost:8000"},
            "teacher_server: expected TeacherServer, got 'http://localhost:8000'",
        ),
        (
            {"teacher": {"a": Model.Qwen3("tiny")}, "teacher_server": None},
            "; several teachers are behind servers: teacher_servers={'math': TeacherServer(url), ...}",
        ),
        ({"teacher_servers": {"a": SERVER, "b": SERVER}}, "teacher: there are two; give"),
        ({**NONE, "teacher_servers": {"a": SERVER}}, "teacher_servers: expected two teachers or more, got one; give"),
        ({**NONE, "teacher_servers": {"a": SERVER, " ": SERVER}}, "teacher_servers.1.0: expected the name of a"),
        ({**NONE, "teacher_servers": (("a", SERVER), ("a", SERVER))}, "teacher_servers.1.0: 'a' is listed twice"),
        ({**NONE, "teacher_servers": {"a": SERVER, "b": Model.Qwen3("tiny")}}, "expected TeacherServer, got Model"),
        (
            {**NONE, "teacher_servers": {"a": SERVER, "b": SERVER}, "distance": Distance.ReverseKL()},
            "distance: a server gives log-probabilities of tokens, and Distance.ReverseKL",
        ),
    ],
    ids=str,
)
def test_experiments_that_no_server_teaches(fields: dict[str, Any], message: str) -> None:
    options = {"distance": Distance.SampledReverseKL(), "teacher_server": SERVER}
    with pytest.raises(SpecError) as error:
        Objective.OnPolicyDistill(**{**options, **fields})
    assert message in str(error.value)
    with pytest.raises(SpecError, match="url: expected a URL without /v1, as http://localhost:8000"):
        TeacherServer("http://localhost:8000/v1")
