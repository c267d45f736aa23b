"""The Sweeps page: a sweep's points by a metric, its plots, and a request to stop."""

from __future__ import annotations

import json

import pytest

from app.pages.sweeps import page as sweeps_page
from app.settings import Settings
from app.state import Site
from nnxdsl import Objective, Search, Sweep
from nnxdsl.sweep.sweep import SweepDirectory
from tests.app import native
from tests.app.many import experiment, write_run
from tests.app.on_pages import EVIL

BETAS = (0.01, 0.1, 1.0)


@pytest.fixture
def sweep(site: Site) -> SweepDirectory:
    """A sweep over beta of which two of three points have run."""
    spec = Sweep(experiment(0, objective=Objective.DPO(beta=0.5)), [{"objective.beta": beta} for beta in BETAS])
    site.settings.home.mkdir(exist_ok=True)
    directory = SweepDirectory.open(spec, site.settings.home)
    for point, accuracy in zip(spec.experiments[:2], (0.6, 0.9), strict=True):
        path = write_run(site.settings.home, point, "finished", 100)
        held_out = {"kind": "evaluation", "step": 0, "eval/rewards/accuracies": accuracy, "eval/loss": 1 - accuracy}
        file = path / "metrics.jsonl"
        file.write_text(f"{json.dumps(held_out)}\n{file.read_text()}")
    return directory


def test_points_are_ranked_by_a_metric(site: Site, sweep: SweepDirectory) -> None:
    built = native.Built(sweeps_page.PAGE, site)
    values = built.shown()
    assert values["Sweep"] == sweep.path.name
    assert values["Metric"] == "eval/rewards/accuracies"
    assert values["Colour by"] == "objective.beta"
    table = values["Dataframe"]
    assert table["objective.beta"].tolist() == ["0.1", "0.01", "1.0"]
    assert table["state"].tolist() == ["finished", "finished", "not run"]
    _, best, _ = sweep.spec.experiments
    assert f"Best: [{best.id}]" in values["Markdown"].replace("\\", "")
    (coordinates,) = values["Plot"].data
    assert [axis.label for axis in coordinates.dimensions] == ["objective.beta (log)", "eval/rewards/accuracies"]
    assert list(coordinates.dimensions[0].values) == pytest.approx([-1, -2])
    assert list(values["Plot 1"].data[1].y) == [0.6, 0.9]
    assert {trace.name for trace in values["Plot 2"].data} == {"objective.beta=0.1", "objective.beta=0.01"}
    least = built.shown(metric="eval/loss")
    assert least["Dataframe"]["objective.beta"].tolist() == ["0.1", "0.01", "1.0"]
    assert list(least["Plot 1"].data[1].y) == pytest.approx([0.4, 0.1])


def test_a_search_shows_its_trials(site: Site) -> None:
    site.settings.home.mkdir(exist_ok=True)
    spec = Search(experiment(0), {"objective.beta": [0.01, 1.0]}, trials=3, metric="loss", direction="minimize")
    directory = SweepDirectory.open(spec, site.settings.home)
    run = write_run(site.settings.home, experiment(4), "finished", 5)
    rows = [{"point": 0, "run": run.name, "changes": {"objective.beta": EVIL}, "state": "finished"}]
    (directory.path / "results.json").write_text(json.dumps({"rows": rows}))
    values = native.Built(sweeps_page.PAGE, site).shown(of=directory.path.name)
    assert "1 trials" in values["Markdown"]
    assert "<img" not in values["Markdown"]
    assert values["Metric"] == "loss"


def test_what_is_not_there_is_told(site: Site) -> None:
    built = native.Built(sweeps_page.PAGE, site)
    assert "nnxdsl sweep FILE" in built.shown()["Markdown"]
    assert "there is no sweep" in built.shown(of="gone")["Markdown 1"]
    for wrong in ("../x", "/etc", EVIL):
        assert "**" in built.shown(of=wrong)["Markdown 1"], wrong


def test_a_sweep_is_asked_to_stop(site: Site, sweep: SweepDirectory) -> None:
    native.Built(sweeps_page.PAGE, site).pressed("Stop the sweep", {"of": sweep.path.name})
    assert (sweep.path / "stop").exists()
    read_only = Site.of(Settings(home=site.settings.home, project=site.settings.project, read_only=True))
    assert "Stop the sweep" not in native.Built(sweeps_page.PAGE, read_only).buttons
    read_only.close()
