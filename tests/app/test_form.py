"""The form: every experiment goes into texts and back, only known fields can be set, problems name their field."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from app.pages.new import form_texts
from nnxdsl import (
    Adapter,
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

gr = pytest.importorskip("gradio")
form = pytest.importorskip("app.pages.new.form")

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
    "mixture": experiment(
        7,
        adapter=None,
        objective=Objective.SFT(),
        data=Data.Mixture({Data.Conversations("a.jsonl"): 3.0, Data.Conversations("b.jsonl", max_length=9): 0.5}),
    ),
    "by name": experiment(
        8,
        adapter=Adapter.LoRA(rank=2, ranks={"*.mlp.*": 4, "query": 8}),
        data=Data.Preferences("a.jsonl", template_args={"thinking": True, "of": ["a", None]}),
    ),
    "all weights": experiment(4, adapter=None, objective=Objective.SFT(), data=Data.Conversations("c.jsonl")),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_texts_give_the_object_back(made: Experiment) -> None:
    texts = form_texts.texts_of(made)
    assert form_texts.read(texts) == (made, [])
    assert form_texts.completed(texts) == texts


def rendered(texts: dict[str, str], base: dict[str, str] | None = None, *, only_changed: bool = False) -> gr.Blocks:
    """The form of an experiment's texts."""

    async def build() -> gr.Blocks:
        with gr.Blocks() as blocks:
            form.draw(form.FormState(texts, base or texts, only_changed, gr.Textbox()), Experiment)
        return blocks

    return asyncio.run(build())


def kept(blocks: gr.Blocks) -> dict[str, Any]:
    """The components whose texts the browser keeps, by path."""
    result: dict[str, Any] = {}
    for one in blocks.fns.values():
        path = re.search(r'nnx.edit\("([^"]+)"', str(one.js))
        if path:
            result[path[1]] = blocks.blocks[one.targets[0][0]]
    return result


@pytest.mark.default_variants(6)
@pytest.mark.parametrize("name", members(Objective))
def test_another_objective_brings_its_own_fields(name: str) -> None:
    texts = {**form_texts.texts_of(MADE["plain"]), "objective.type": name}
    completed = form_texts.completed(texts)
    cls = members(Objective)[name]
    shown = {path.split(".")[1] for path in completed if path.startswith("objective.") and path != "objective.type"}
    assert shown >= set(declared(cls))
    assert kept(rendered(completed))["objective.type"].value == name


def _parents(texts: dict[str, str]) -> set[str]:
    return {path.rpartition(".")[0] for path in texts}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_every_field_has_a_component_with_a_label(made: Experiment) -> None:
    texts = form_texts.texts_of(made)
    blocks = rendered(texts)
    components = kept(blocks)
    classes = {path for path in texts if path.endswith("type")}  # some classes have no alternatives
    counts = {path for path, text in texts.items() if path.endswith("tracking") or f"{path}.0" in _parents(texts)}
    assert set(texts) - classes - counts <= set(components)
    for path, component in components.items():
        assert component.label, path
        assert component.elem_id == f"f-{path.removesuffix('.type')}"


def test_fields_become_components_by_type_with_default_range_and_doc() -> None:
    components = kept(rendered(form_texts.texts_of(MADE["all set"])))
    kinds = {path: type(component).__name__ for path, component in components.items()}
    assert kinds["steps"] == kinds["adapter.rank"] == "Number"
    assert kinds["adapter.alpha"] == kinds["name"] == "Textbox"
    assert kinds["model.size"] == kinds["objective.type"] == kinds["memory.offload"] == "Dropdown"
    assert field_docs(Experiment)["steps"] in components["steps"].info
    assert "> 0, default none" in components["steps"].info
    assert components["steps"].value == 100
    assert components["evaluation.top_k"].value == ""  # an empty gr.Number would show 0
    assert ("none", "") in components["quantization.type"].choices
    assert components["objective.type"].value == "DPO"
    assert components["name"].label == "name *"
    assert components["mesh.indivisible"].value == "error"
    assert kept(rendered(form_texts.texts_of(experiment(1, model=Model.Gemma3("tiny", weights=Weights.HF("x"))))))[
        "model.weights.allow_non_finite"
    ].value in (True, False)


def test_a_text_that_is_no_number_is_kept_as_it_is() -> None:
    texts = {**form_texts.texts_of(MADE["plain"]), "steps": "ten", "model.size": "900b"}
    components = kept(rendered(texts))
    assert (type(components["steps"]).__name__, components["steps"].value) == ("Textbox", "ten")
    assert components["model.size"].value == "900b"


def test_only_what_differs_is_shown_if_asked_for() -> None:
    base = form_texts.texts_of(MADE["plain"])
    texts = {**base, "steps": "7", "objective.beta": "0.3"}
    assert set(kept(rendered(texts, base, only_changed=True))) == {"steps", "objective.type", "objective.beta"}


@pytest.mark.parametrize(
    ("path", "text", "message"),
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
def test_what_is_wrong_is_said_at_its_field(path: str, text: str, message: str) -> None:
    made, problems = form_texts.read({**form_texts.texts_of(MADE["plain"]), path: text})
    if (path, text) == ("batch_size", "3"):
        assert made is not None
        assert made.batch_size == 3
        return
    assert made is None
    (actual,) = [problem for problem in problems if path.removesuffix(".type") in problem.path]
    assert message in actual.message


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


def test_members_of_a_tuple_of_specs_have_fields_of_their_own() -> None:
    texts = form_texts.texts_of(MADE["rewards"])
    assert texts["objective.rewards"] == "2"
    more = form_texts.completed({**texts, "objective.rewards": "3"})
    assert more["objective.rewards.2.weight"] == "1.0"
    assert form_texts.completed(more) == more
    _, problems = form_texts.read(more)
    assert [problem.path for problem in problems] == ["objective.rewards.2.name"]
    made, problems = form_texts.read({**more, "objective.rewards.2.name": "exact_answer"})
    assert problems == []
    assert made is not None
    assert made.objective.rewards[2] == Reward("exact_answer")  # type: ignore[attr-defined]
    components = kept(rendered(more))
    assert components["objective.rewards.2.name"].value == ""
    scripts = [str(one.js) for one in rendered(more).fns.values()]
    assert sum('nnx.remove("objective.rewards"' in script for script in scripts) == 3
    assert sum('nnx.add("objective.rewards"' in script for script in scripts) == 1


def test_members_of_a_family_are_chosen_and_have_their_fields() -> None:
    texts = {**form_texts.texts_of(MADE["plain"]), "objective.type": "Sum", "objective.terms": "2"}
    texts = form_texts.completed(texts)
    _, problems = form_texts.read(texts)
    assert {"objective.terms.0", "objective.terms.1"} <= {problem.path for problem in problems}
    texts |= {"objective.terms.0.type": "DPO", "objective.terms.1.type": "ChosenSFT", "objective.weights": "(1.0, 0.1)"}
    made, problems = form_texts.read(form_texts.completed(texts))
    assert problems == []
    assert made is not None
    assert made.objective == Objective.Sum(terms=(Objective.DPO(), Objective.ChosenSFT()), weights=(1.0, 0.1))


def test_sources_of_a_mixture_have_weights() -> None:
    texts = {**form_texts.texts_of(MADE["all weights"]), "data.type": "Mixture", "data.sources": "2"}
    texts = form_texts.completed(texts)
    assert (texts["data.sources.0.0.type"], texts["data.sources.1.1"]) == ("", "1")
    _, problems = form_texts.read(texts)
    assert {"data.sources.0.0", "data.sources.1.0"} <= {problem.path for problem in problems}
    texts |= {"data.sources.0.0.type": "Conversations", "data.sources.1.0.type": "Conversations"}
    _, problems = form_texts.read(form_texts.completed(texts))  # sources without paths
    assert {problem.path for problem in problems} == {"data.sources.0.0.path", "data.sources.1.0.path"}
    texts |= {"data.sources.0.0.path": "a.jsonl", "data.sources.1.0.path": "b.jsonl", "data.sources.1.1": "-2"}
    _, problems = form_texts.read(form_texts.completed(texts))
    assert [problem.path for problem in problems] == ["data.sources.1.1"]
    made, problems = form_texts.read(form_texts.completed({**texts, "data.sources.1.1": "0.25"}))
    assert problems == []
    assert made is not None
    assert made.data == Data.Mixture({Data.Conversations("a.jsonl"): 1.0, Data.Conversations("b.jsonl"): 0.25})
    components = kept(rendered(form_texts.completed(texts)))
    assert components["data.sources.1.0.type"].label == "sources 2"
    assert components["data.sources.1.1"].label == "weight of sources 2 *"


def test_plain_values_by_name_are_lines() -> None:
    texts = form_texts.texts_of(MADE["by name"])
    assert texts["adapter.ranks"] == "*.mlp.*: 4\nquery: 8"
    assert texts["data.template_args"] == '{"of": ["a", null], "thinking": true}'
    for text in ("{'thinking': True, 'of': ['a', None]}", texts["data.template_args"]):
        assert form_texts.read({**texts, "data.template_args": text}) == (MADE["by name"], [])
    assert form_texts.read({**texts, "adapter.ranks": '(("*.mlp.*", 4), ("query", 8))'}) == (MADE["by name"], [])
    for wrong in ("query", "query: much", ": 4", "query:"):
        _, problems = form_texts.read({**texts, "adapter.ranks": wrong})
        assert [str(problem) for problem in problems] == ["adapter.ranks: expected lines `name: int`"], wrong


@pytest.mark.parametrize("text", ["-1", "²", "1e3", "1000", "(Reward('x'),)"])
def test_a_wrong_number_of_members_is_a_problem(text: str) -> None:
    _, problems = form_texts.read({**form_texts.texts_of(MADE["rewards"]), "objective.rewards": text})
    assert "expected a number of members" in next(one for one in problems if one.path == "objective.rewards").message
