"""Teachers with privileged context against TRL; tests/reference/make_privileged_context.py makes the figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import jax
import numpy as np
import pytest
from small_lab.model import Small

from nnxdsl import (
    Adapter,
    Data,
    DataError,
    Distance,
    Evaluation,
    Experiment,
    Objective,
    Order,
    Precision,
    Quantization,
    Reward,
    SpecError,
    TeacherServer,
    Tokenizer,
    Weights,
    compile,
)
from nnxdsl.data import BytesTokenizer
from nnxdsl.data.batch import RolloutBatch
from nnxdsl.data.loaders.build import load
from nnxdsl.data.prompts import Prompts
from nnxdsl.planning.flops import work
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.program.memory import memory
from nnxdsl.rollouts.served_teacher import ServedTeacher
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.run import run
from tests.fixtures.trl import adamw

REFERENCE = Path(__file__).parents[1] / "reference"
FIGURES: dict[str, Any] = json.loads((REFERENCE / "privileged_context" / "figures.json").read_text())
COMPLETION = FIGURES["completion"]
ROWS = [json.loads(line) for line in (REFERENCE / "replay" / "pairs.jsonl").read_text().splitlines()]
ROWS = [row for row in ROWS if len(row["chosen_ids"]) >= COMPLETION]
MODEL = Small(weights=Weights.HF(str(REFERENCE / "replay" / "model")), tokenizer=Tokenizer.Bytes(allow_mismatch=True))
DISTANCES = {
    "reverse": Distance.ReverseKL(),
    "forward": Distance.ForwardKL(),
    "jsd": Distance.JSD(beta=0.3),
    "sampled": Distance.SampledReverseKL(),
}


def prompts(path: str = "none.jsonl", **fields: Any) -> Data.Prompts:
    options = {"max_prompt_length": 24, "max_completion_length": 8, "privileged_context": "answer"}
    return Data.Prompts(path, **{**options, **fields})


def experiment(data: Data | None = None, **fields: Any) -> Experiment:
    options = {
        "name": "self-distilled",
        "model": MODEL,
        "objective": Objective.OnPolicyDistill(teacher=MODEL),
        "data": data or prompts(),
        "optimizer": adamw(FIGURES["settings"]),
        "batch_size": FIGURES["batch"],
        "steps": len(FIGURES["runs"]["reverse"]),
        "precision": Precision(compute="float32"),
    }
    return Experiment(**{**options, **fields})


def completions(first: int, count: int) -> RolloutBatch:
    """Rows whose teacher sees some tokens more before the prompt, as the trainer read them."""
    sizes, arrays = (24, 32), []
    for width, has_context in zip(sizes, (False, True), strict=True):
        tokens, length = np.zeros((count, width), np.int32), np.zeros(count, np.int32)
        for index, row in enumerate(ROWS[first : first + count]):
            context = row["rejected_ids"][: 2 + (first + index) % 3] if has_context else []
            ids = [*context, *row["prompt_ids"], *row["chosen_ids"][:COMPLETION]]
            tokens[index, : len(ids)], length[index] = ids, len(ids)
        arrays.append((tokens, length))
    ids = np.array([row["chosen_ids"][:COMPLETION] for row in ROWS[first : first + count]], np.int32)
    ones, zeros = np.ones(count, np.float32), np.zeros(ids.shape, np.float32)
    lengths = np.full(count, COMPLETION, np.int32)
    return RolloutBatch(
        *arrays[0],
        ids,
        lengths,
        np.ones(ids.shape, bool),
        ones,
        zeros,
        ones,
        teacher_tokens=arrays[1][0],
        teacher_length=arrays[1][1],
    )


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("name", DISTANCES)
def test_each_step_equals_that_of_trl(name: str) -> None:
    objective = Objective.OnPolicyDistill(teacher=MODEL, distance=DISTANCES[name])
    program, size = compile(experiment(objective=objective)), FIGURES["batch"]
    state = program.init()
    for step, figures in enumerate(FIGURES["runs"][name]):
        state, metrics = program.step(state, completions(step * size, size))
        for key, value in figures.items():
            # Early gradients of a teacher that is the student are small; those of a step go through all before.
            assert float(metrics[key]) == pytest.approx(value, rel=2e-4, abs=2e-6), (step, key)


def test_a_teacher_that_is_the_model_has_the_frozen_weights_of_an_adapter() -> None:
    path = REFERENCE / "replay" / ".." / "replay" / "model"  # the same weights, and another model
    steps, adapter = [], Adapter.LoRA(rank=2)
    for teacher in (MODEL, attrs.evolve(MODEL, weights=Weights.HF(str(path)))):
        program = compile(experiment(objective=Objective.OnPolicyDistill(teacher=teacher), adapter=adapter))
        state = program.init()
        assert (not state.reference) == (teacher is MODEL)
        assert any(part.name == "teacher" for part in memory(program.blueprint)) == (teacher is not MODEL)
        state, first = program.step(state, completions(0, 4))
        _, second = program.step(state, completions(4, 4))
        steps.append([float(one[key]) for one in (first, second) for key in ("loss", "grad_norm", "entropy")])
    assert steps[0][0] > 0
    assert steps[0] == pytest.approx(steps[1], rel=1e-6)
    full, quantized = experiment(), experiment(adapter=adapter, quantization=Quantization.NF4(block_size=8))
    for one in (full, quantized):  # weights that are trained, or not those of the model
        teacher = build_blueprint(one).teacher
        assert teacher is not None
        assert teacher.arrays


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
TEXTS = [{"prompt": f"Say {n}: ", "answer": "it is " + "x" * n} for n in range(1, 5)]


def loaded(data: Data.Prompts, tokenizer: BytesTokenizer | None = None) -> Prompts:
    result = load(data, tokenizer or BytesTokenizer())
    assert isinstance(result, Prompts)
    return result


def test_teachers_read_completions_after_prompts_of_their_own(tmp_path: Path) -> None:
    data = prompts(write(tmp_path / "rows.jsonl", *TEXTS), teacher_prompt_template="{privileged_context}; {prompt}")
    actual, tokenizer = loaded(data), BytesTokenizer()
    batch = actual.rollout_batch([3, 0], [[70, 71, 72], [73]], size=3)
    for place, row in enumerate((3, 0)):
        completion = batch.completion_ids[place, : batch.completion_length[place]].tolist()
        expected = [*(tokenizer.encode(f"{TEXTS[row]['answer']}; {TEXTS[row]['prompt']}")), *completion]
        whole = batch.teacher_tokens[place, : batch.teacher_length[place]].tolist()
        assert whole == expected or whole == [tokenizer.bos_id, *expected]
        assert not batch.teacher_tokens[place, batch.teacher_length[place] :].any()
    served = actual.rollout_batch([3], [[70]], teacher_logps=[np.zeros(1)])
    assert served.teacher_tokens is None  # the server has read them


def test_the_last_message_of_a_chat_has_the_context_and_long_prompts_are_cut(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "How {much}?"}]
    rows = [{"prompt": chat, "answer": "{42}"}, {"prompt": chat, "answer": "y" * 80}]
    tokenizer = BytesTokenizer(TEMPLATE)
    actual = loaded(prompts(write(tmp_path / "rows.jsonl", *rows), max_prompt_length=64), tokenizer)
    text = tokenizer.decode(actual.row(0)["teacher_prompt"].tolist(), skip_special=True)
    assert text == "<system>Be short.<user>How {much}?\n\n{42}>"
    assert len(actual.row(1)["teacher_prompt"]) == 64
    assert actual.report.cut == {"teacher_prompt": 1}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "Say"},
            "field 'answer' is missing; this row has: prompt; data.privileged_context names the column",
        ),
        ({"prompt": "Say", "answer": 42}, "field 'answer': expected text"),
        (
            {"prompt": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}], "answer": "c"},
            "message 2: privileged context is added to the last message, which has to be text of a user",
        ),
    ],
    ids=["missing", "number", "tool"],
)
def test_rows_without_context_are_bad(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as error:
        loaded(prompts(write(tmp_path / "rows.jsonl", row)), BytesTokenizer(TEMPLATE))
    assert message in str(error.value)


def shapes(batch: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, np.dtype(x.dtype)), batch)


@pytest.mark.parametrize("distance", [Distance.ReverseKL(), Distance.SampledReverseKL()], ids=str)
def test_completions_that_share_both_prompts_take_the_same_step(tmp_path: Path, distance: Distance) -> None:
    actual = loaded(prompts(write(tmp_path / "rows.jsonl", *TEXTS), max_prompt_length=24))
    ids = [[70, 71, 72], [73], [74, 75], [76, 77, 78, 79]]
    alone = actual.rollout_batch([3, 3, 0, 0], ids, logps=[np.zeros(len(one)) for one in ids])
    joined = actual.grouped(alone, 2)
    objective = Objective.OnPolicyDistill(teacher=MODEL, num_generations=2, distance=distance)
    program = compile(experiment(objective=objective))
    assert program.blueprint.num_generations == 2
    figures = []
    for batch in (alone, joined):
        metrics = program.step(program.init(), batch)[1]
        figures.append({key: float(metrics[key]) for key in ("loss", "grad_norm", "entropy")})
    assert figures[1] == pytest.approx(figures[0], rel=2e-5)
    same = alone._replace(teacher_tokens=None, teacher_length=None)
    assert abs(float(program.step(program.init(), same)[1]["loss"])) < 1e-5 < abs(figures[0]["loss"])
    wide = joined._replace(prompt=np.zeros((2, 24), np.int32), teacher_prompt=np.zeros((2, 24), np.int32))
    assert shapes(program.lower().args_info[0][3]) == shapes(wide)


def test_what_the_teacher_reads_is_planned() -> None:
    batch, blueprint = completions(0, 4), build_blueprint(experiment())
    ours, longer = work(blueprint, batch._replace(teacher_tokens=None, teacher_length=None)), work(blueprint, batch)
    assert ours.model_flops < longer.model_flops
    assert ours.executed < longer.executed


@pytest.mark.extended
def test_a_run_learns_what_its_teacher_is_told(tmp_path: Path) -> None:
    rows = [{"prompt": f"Say {n}: ", "answer": "ab"} for n in range(12)]
    data = prompts(write(tmp_path / "rows.jsonl", *rows))
    held_out = prompts(write(tmp_path / "held.jsonl", *rows[:4]), order=Order.AsInFile())
    asked = experiment(
        data,
        objective=Objective.OnPolicyDistill(teacher=MODEL, num_generations=2),
        evaluation=Evaluation(every_steps=6, data=held_out),
        steps=12,
    )
    outcome = run(asked, tmp_path / "runs", Display(quiet=True))
    lines = [json.loads(line) for line in (outcome.directory / "metrics.jsonl").read_text().splitlines()]
    held = [line["eval/loss"] for line in lines if "eval/loss" in line]
    assert 0 < held[-1] < held[0]


@pytest.mark.extended
def test_a_server_is_sent_the_prompts_of_the_teacher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def scores(self: ServedTeacher, before: list[list[int]], completions: list[list[int]]) -> list[list[float]]:
        seen.extend(self.tokenizer.decode(ids, skip_special=True) for ids in before)
        return [[-1.0] * len(ids) for ids in completions]

    monkeypatch.setattr(ServedTeacher, "scores", scores)
    server, distance = TeacherServer("http://localhost:1"), Distance.SampledReverseKL()
    objective = Objective.OnPolicyDistill(teacher_server=server, distance=distance)
    asked = experiment(prompts(write(tmp_path / "rows.jsonl", *TEXTS)), objective=objective, steps=1)
    run(asked, tmp_path / "runs", Display(quiet=True))
    assert sorted(seen) == [f"{row['prompt']}\n\n{row['answer']}" for row in TEXTS]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"privileged_context": None, "teacher_prompt_template": "{privileged_context}"}, "has no effect without"),
        ({"teacher_prompt_template": "{prompt}"}, "teacher_prompt_template: has no {privileged_context}"),
        (
            {"teacher_prompt_template": "{prompt} {privileged_context} {hint}"},
            "teacher_prompt_template: expected {prompt} and {privileged_context} alone, got {hint}; write {{ and }}",
        ),
        (
            {"teacher_prompt_template": "{prompt:{hint}} {privileged_context}"},
            "teacher_prompt_template: expected {prompt} and {privileged_context} alone, got {prompt:{hint}}; write",
        ),
        ({"teacher_prompt_template": "{privileged_context} }"}, "write {{ and }} for braces in the text"),
    ],
    ids=["no column", "no context", "another field", "a field in a format", "a brace"],
)
def test_templates_that_make_no_prompt(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as error:
        prompts(**fields)
    assert message in str(error.value)


def test_experiments_without_such_a_teacher() -> None:
    with pytest.raises(SpecError, match=r"data.privileged_context: has no effect with Objective.GRPO; leave it out"):
        experiment(objective=Objective.GRPO(rewards=(Reward("none"),), num_generations=4))
    plain = prompts(privileged_context=None)
    with pytest.raises(SpecError, match=r"evaluation.data.privileged_context: other data .* has privileged_context"):
        experiment(evaluation=Evaluation(every_steps=2, data=plain))
    with pytest.raises(SpecError, match=r"evaluation.data.privileged_context: .* has no privileged_context; leave"):
        experiment(plain, evaluation=Evaluation(every_steps=2, data=prompts()))
    with pytest.raises(SpecError, match=r"data.sources.1.0.privileged_context: other data .* name its column here too"):
        experiment(Data.Mixture({prompts(): 1, plain: 1}))
