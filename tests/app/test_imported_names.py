"""Nothing that a form, a paste, the queue or a run's file names is imported into the app, or launched."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.pages.new import form_texts
from app.store.experiments import from_text, from_tree, stored
from nnxdsl import Data, Experiment, Objective, Reward, SpecError, to_dict, to_python
from nnxdsl.config.core.base import declared
from nnxdsl.config.core.imports import VARIABLE
from tests.app.many import experiment

PACKAGES = Path(__file__).parents[1] / "config" / "packages"
HERS = {"type": "her_lab:Hers"}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """her_lab could be imported; nothing is allowed."""
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.syspath_prepend(str(PACKAGES))
    sys.modules.pop("her_lab", None)
    yield
    assert "her_lab" not in sys.modules
    assert "HER_LAB_WAS_IMPORTED" not in os.environ


def sampled(reward: str = "exact_answer") -> Experiment:
    """An experiment with a reward."""
    objective = Objective.GRPO(rewards=(Reward(reward),))
    return experiment(0, objective=objective, data=Data.Prompts("prompts.jsonl"), evaluation=None, batch_size=8)


def paths() -> Iterator[str]:
    """Every field of an experiment's form."""
    yield from form_texts.texts_of(sampled())
    yield from (f"objective.{name}" for name in declared(Objective.GRPO))


@pytest.mark.parametrize("path", sorted(set(paths())))
def test_no_field_of_a_form_imports(path: str) -> None:
    texts = form_texts.texts_of(sampled())
    for value in (HERS, [HERS], (HERS,), [{"type": "Reward", "name": "her_lab:longest"}]):
        form_texts.read({**texts, path: repr(value)})
        form_texts.read({**texts, path: json.dumps(value)})
    form_texts.read({**texts, path: "her_lab:Hers"})
    form_texts.read({**texts, path: "1", f"{path}.0.type": "her_lab:Hers"})


def test_a_form_with_foreign_code_is_refused_with_what_to_do() -> None:
    texts = form_texts.texts_of(sampled())
    for field, wrong in (("name", "--allow her_lab"), ("type", "there is no 'her_lab:longest' here")):
        actual, problems = form_texts.read({**texts, f"objective.rewards.0.{field}": "her_lab:longest"})
        assert actual is None
        assert any(wrong in str(problem) for problem in problems), problems


def test_a_pasted_reward_of_another_module_is_refused() -> None:
    evil = sampled("os:system")
    for text in (to_python(evil), json.dumps(to_dict(evil))):
        with pytest.raises(SpecError, match=r"objective\.rewards\.0\.name: 'os:system' would import the module 'os'"):
            from_text(text)


def test_a_file_of_the_queue_or_of_a_run_allows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = to_dict(sampled("her_lab:longest"))
    with pytest.raises(SpecError, match="--allow her_lab"):
        from_tree(tree)
    file = tmp_path / "experiment.json"
    file.write_text(json.dumps(tree))
    assert stored(file) is None
    monkeypatch.setenv(VARIABLE, "her_lab")  # whoever starts the app may allow it
    assert stored(file) == sampled("her_lab:longest")
