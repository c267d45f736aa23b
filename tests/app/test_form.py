"""The form: every experiment goes into texts and back, only known fields can be set, problems name their field."""

from __future__ import annotations

import re

import pytest

from app.pages.new import form, form_texts
from nnxdsl import (
    Checkpoint,
    Data,
    Evaluation,
    Experiment,
    Mesh,
    Model,
    Objective,
    Optimizer,
    Quantization,
    Reward,
    Schedule,
    Weights,
)
from nnxdsl.config.core.base import declared, members
from nnxdsl.config.core.docstrings import field_docs
from tests.app.many import experiment

MADE = {
    "plain": experiment(1),
    "nested": experiment(2, model=Model.Gemma3("tiny", weights=Weights.From(experiment(1))), notes="two\nlines"),
    "all set": experiment(
        3,
        quantization=Quantization.NF4(),
        mesh=Mesh(fsdp=2, rules=(("embed", ("fsdp", "tensor")), ("mlp", None))),
        microbatch_size=2,
        evaluation=Evaluation(every_steps=5, data=Data.Preferences("b.jsonl"), prompts=("Hi", "What\nnow?")),
        checkpoint=Checkpoint(every_steps=7, keep=1),
        optimizer=Optimizer.AdamW(schedule=Schedule.WarmupCosine(peak_lr=5e-6, warmup_ratio=0.1), b2=0.95),
    ),
    "rewards": experiment(
        5,
        objective=Objective.GRPO(rewards=(Reward("kind"), Reward("contains_answer", weight=2.0)), num_generations=4),
        data=Data.Prompts("d.jsonl"),
    ),
    "terms": experiment(
        6, objective=Objective.Sum(terms=(Objective.DPO(), Objective.IPO(tau=0.3)), weights=(1.0, 2.0))
    ),
    "files": experiment(5, adapter=None, objective=Objective.SFT(), data=Data.Conversations(("a.jsonl", "b c.jsonl"))),
    "a file in a tuple": experiment(6, adapter=None, objective=Objective.SFT(), data=Data.Conversations(("a.jsonl",))),
    "all weights": experiment(4, adapter=None, objective=Objective.SFT(), data=Data.Conversations("c.jsonl")),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_texts_give_the_object_back(made: Experiment) -> None:
    texts = form_texts.texts_of(made)
    assert form_texts.read(texts) == (made, [])
    assert form_texts.completed(texts) == texts


@pytest.mark.parametrize("name", members(Objective))
def test_another_objective_brings_its_own_fields(name: str) -> None:
    texts = {**form_texts.texts_of(MADE["plain"]), "objective.type": name}
    completed = form_texts.completed(texts)
    cls = members(Objective)[name]
    shown = {path.split(".")[1] for path in completed if path.startswith("objective.") and path != "objective.type"}
    assert shown >= set(declared(cls))
    assert re.search(rf'<option value="{name}" selected>', form.rendered(completed, texts, "new.change"))


def test_every_field_has_an_input_with_a_label_and_its_help() -> None:
    texts = form_texts.texts_of(MADE["all set"])
    html = form.rendered(texts, texts, "new.change")
    for path in texts:
        assert path == "type" or f'name="{path}"' in html, path
    labels, ids = set(re.findall(r'<label for="([^"]+)"', html)), set(re.findall(r' id="([^"]+)"', html))
    assert labels <= ids
    assert field_docs(Experiment)["steps"] in html
    assert "&gt; 0" in html


@pytest.mark.parametrize(
    ("path", "text", "told"),
    [
        ("steps", "0", "expected a value > 0, got 0"),
        ("steps", "", "needs steps or epochs"),
        ("epochs", "2", "are two lengths of one run"),
        ("steps", "ten", "expected int, got 'ten'"),
        ("steps", "__import__('os')", "expected int"),
        ("steps", "9" * 30_000, "characters; at most"),
        ("name", "A b", "expected 1 to 64"),
        ("objective.type", "Nothing", "there is no 'Nothing' here"),
        ("objective.beta", "1 + 1", "expected float"),
        ("model.size", "900b", "expected one of"),
        ("mesh.rules", "(('a',),)", ""),
        ("batch_size", "3", ""),
    ],
)
def test_what_is_wrong_is_said_at_its_field(path: str, text: str, told: str) -> None:
    made, problems = form_texts.read({**form_texts.texts_of(MADE["plain"]), path: text})
    if (path, text) == ("batch_size", "3"):
        assert made is not None
        assert made.batch_size == 3
        return
    assert made is None
    (found,) = [problem for problem in problems if path.removesuffix(".type") in problem.path]
    assert told in found.message


def test_fields_that_there_are_not_set_nothing() -> None:
    texts = {
        **form_texts.texts_of(MADE["plain"]),
        "bta": "1",
        "objective.nope": "2",
        "__class__": "3",
        "model.x.y": "4",
    }
    assert form_texts.read(texts) == (MADE["plain"], [])


def test_many_problems_are_said_at_once() -> None:
    texts = {**form_texts.texts_of(MADE["plain"]), "steps": "x", "adapter.rank": "-1", "batch_size": "0"}
    _, problems = form_texts.read(texts)
    assert {problem.path for problem in problems} == {"steps", "adapter.rank", "batch_size"}


def test_members_of_a_tuple_of_specs_are_edited_one_by_one() -> None:
    texts = form_texts.texts_of(MADE["rewards"])
    assert texts["objective.rewards"] == "2"
    assert form_texts.items_at(texts, "objective.rewards") is Reward
    assert form_texts.items_at(texts, "objective.beta") is None
    more = form_texts.with_item(texts, "objective.rewards", Reward)
    assert form_texts.completed(more) == more
    _, problems = form_texts.read(more)
    assert [problem.path for problem in problems] == ["objective.rewards.2.name"]
    more["objective.rewards.2.name"] = "exact_answer"
    made, problems = form_texts.read(form_texts.without_item(more, "objective.rewards", 0))
    assert problems == []
    assert made is not None
    assert made.objective.rewards == (Reward("contains_answer", weight=2.0), Reward("exact_answer"))  # type: ignore[attr-defined]


def test_members_of_a_family_are_chosen_and_have_their_fields() -> None:
    texts = {**form_texts.texts_of(MADE["plain"]), "objective.type": "Sum"}
    texts = form_texts.completed(texts)
    for _ in range(2):
        texts = form_texts.with_item(
            texts, "objective.terms", form_texts.items_at(texts, "objective.terms") or Objective
        )
    _, problems = form_texts.read(texts)
    assert {"objective.terms.0", "objective.terms.1"} <= {problem.path for problem in problems}
    texts |= {"objective.terms.0.type": "DPO", "objective.terms.1.type": "ChosenSFT", "objective.weights": "(1.0, 0.1)"}
    made, problems = form_texts.read(form_texts.completed(texts))
    assert problems == []
    assert made is not None
    assert made.objective == Objective.Sum(terms=(Objective.DPO(), Objective.ChosenSFT()), weights=(1.0, 0.1))


@pytest.mark.parametrize("text", ["-1", "²", "1e3", "1000", "(Reward('x'),)"])
def test_a_wrong_number_of_members_is_a_problem(text: str) -> None:
    _, problems = form_texts.read({**form_texts.texts_of(MADE["rewards"]), "objective.rewards": text})
    assert "expected a number of members" in next(one for one in problems if one.path == "objective.rewards").message
