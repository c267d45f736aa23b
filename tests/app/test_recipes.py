"""Every recipe of the project starts from the app as its own file, with what the form changed as arguments."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.pages.new import form_texts
from app.settings import Settings
from app.state import Site
from nnxdsl.errors import RunError
from nnxdsl.storage.jsonl import read_json
from tests.app.conftest import ROOT
from tests.waiting import wait_until

drafting = pytest.importorskip("app.pages.new.drafting")

RECIPES = sorted(path.stem for path in (ROOT / "experiments").glob("*.py") if "Experiment(" in path.read_text())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Iterator[Site]:
    """An app's state over a copy of the project's recipes; runs share their home and what XLA compiled."""
    project = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "experiments", project / "experiments")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        site = Site(Settings(home=project / "runs", project=project))
        yield site
        site.close()


def opened(site: Site, name: str) -> str:
    """The id of a new draft of a recipe."""
    wait_until(lambda: site.presets.job(name).is_over, every_seconds=0.2)
    done = drafting.begin(site, {"preset": name})
    assert done is not None, site.presets.job(name).error
    return done.query["draft"]


def form_of(site: Site, draft: str, changes: dict[str, str]) -> str:
    """A draft with changed fields as the browser has it."""
    return json.dumps({"draft": draft, "tab": "one", "texts": {**site.drafts.load(draft).texts, **changes}})


def launched(site: Site, draft: str, changes: dict[str, str]) -> Path:
    """Changes fields of a draft as the form does, and launches it; returns the run's directory."""
    done = drafting.launch(site, {"draft": draft}, form_of(site, draft, changes))
    assert done.goto is not None
    return site.settings.home / done.goto.partition("id=")[2]


def brief(texts: dict[str, str]) -> dict[str, str]:
    """Changes that make an experiment, and the ones that it starts from, as short as they can be."""
    steps = {path: "2" for path in texts if path == "steps" or path.endswith(".experiment.steps")}
    rows = {path: "16" for path in texts if path == "batch_size" or path.endswith(".experiment.batch_size")}
    parts = {path: "" for path in texts if path == "evaluation.type" or path.endswith(".experiment.evaluation.type")}
    return steps | rows | parts | {"seed": "1"}  # no run that is the earlier stage of another


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_to_its_end(site: Site, name: str) -> None:
    draft = opened(site, name)
    path = launched(site, draft, brief(site.drafts.load(draft).texts))
    launch = site.launcher.newest(path.name)
    assert launch is not None
    wait_until(lambda: not launch.is_alive, every_seconds=0.2)
    assert (path / "status.json").is_file(), launch.output()
    status = read_json(path / "status.json")
    assert (status["state"], status["step"]) == ("finished", 2), launch.output()
    argv = launch.record["argv"]
    assert argv[1] == f"experiments/{name}.py"
    assert "steps=2" in argv


def test_the_rewards_of_a_recipe_are_there_and_can_be_edited(site: Site) -> None:
    draft = opened(site, "grpo_gemma")
    texts = site.drafts.load(draft).texts
    assert texts["objective.rewards.0.name"] == "kind"
    drafting.answer(site, form_of(site, draft, {"objective.rewards.1.name": "exact_answer"}))
    experiment, problems = form_texts.read(site.drafts.load(draft).texts)
    assert problems == []
    command = drafting.command(site, site.drafts.load(draft), experiment)
    assert command.startswith("python experiments/grpo_gemma.py 'objective.rewards.1.name=")


def test_a_queued_recipe_and_a_resumed_one_start_as_its_file(site: Site) -> None:
    draft = site.drafts.load(opened(site, "grpo_gemma"))
    drafting.enqueue(site, {"draft": draft.id}, form_of(site, draft.id, {"seed": "5"}))
    waiting = site.launcher.waiting()
    assert [one.recipe for one in waiting] == ["grpo_gemma"] or not waiting  # the queue may have started it by now
    run = form_texts.read(site.drafts.load(draft.id).texts)[0]
    assert run is not None
    wait_until(lambda: site.launcher.newest(run.id) is not None, every_seconds=0.2)
    launch = site.launcher.newest(run.id)
    assert launch is not None
    site.launcher.kill(run.id)
    assert launch.record["argv"][1:3] == ["experiments/grpo_gemma.py", "seed=5"]
    assert site.launcher.recipe_of(run.id) == "grpo_gemma"


def test_a_recipe_that_is_gone_is_refused_with_what_to_do(site: Site) -> None:
    (site.presets.place / "soon_gone.py").write_text((ROOT / "experiments" / "quickstart.py").read_text())
    draft = opened(site, "soon_gone")
    (site.presets.place / "soon_gone.py").unlink()
    with pytest.raises(RunError, match=r"soon_gone\.py does not exist"):
        launched(site, draft, {"steps": "2"})
