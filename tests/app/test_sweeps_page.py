"""The Sweeps page: a sweep's points by a metric, its plots, and a request to stop."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from app.pages.sweeps import page as sweeps_page
from app.pages.sweeps.page import COMBINED
from app.processes.launch import SWEEPS
from app.settings import Settings
from app.state import Site
from app.store.sweeps import names, opened
from nnxdsl import Data, Experiment, Model, Objective, Optimizer, Schedule, Search, Sweep
from nnxdsl.sweep.sweep import SweepDirectory
from tests.app import native
from tests.app.many import experiment, write_run
from tests.app.on_pages import EVIL
from tests.waiting import wait_until

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
    built = native.Built(sweeps_page.Sweeps, site)
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
    assert coordinates.line.showscale
    assert [axis.label for axis in coordinates.dimensions] == ["objective.beta (log)", "eval/rewards/accuracies"]
    assert list(coordinates.dimensions[0].values) == pytest.approx([-1, -2])
    assert list(values["Plot 1"].data[1].y) == [0.6, 0.9]
    assert {trace.name for trace in values["Plot 3"].data} == {"objective.beta=0.1", "objective.beta=0.01"}
    least = built.shown(metric="eval/loss")
    assert least["Dataframe"]["objective.beta"].tolist() == ["0.1", "0.01", "1.0"]
    assert list(least["Plot 1"].data[1].y) == pytest.approx([0.4, 0.1])


def test_points_with_one_value_are_tied(site: Site, sweep: SweepDirectory) -> None:
    for file in site.settings.home.glob("*/metrics.jsonl"):
        file.write_text(
            re.sub(r'"eval/rewards/accuracies": [0-9.]+', '"eval/rewards/accuracies": 0.9', file.read_text())
        )
    values = native.Built(sweeps_page.Sweeps, site).shown()
    table, note = values["Dataframe"], values["Markdown"].replace("\\", "")
    assert table["rank"].tolist() == ["1 (tie)", "1 (tie)", ""]
    runs = [one.id for one in sweep.spec.experiments[:2]]
    assert "Best: 2 are tied" in note
    assert not values["Plot"].data[0].line.showscale  # of one colour
    assert all(f"[{run}](/run?id={run})" in note for run in runs)
    assert {one.replace("\\", "") for one in table["run"][:2]} == {f"[{run}](/run?id={run})" for run in runs}


def test_a_search_shows_its_trials(site: Site) -> None:
    site.settings.home.mkdir(exist_ok=True)
    spec = Search(experiment(0), {"objective.beta": [0.01, 1.0]}, trials=3, metric="loss", direction="minimize")
    directory = SweepDirectory.open(spec, site.settings.home)
    run = write_run(site.settings.home, experiment(4), "finished", 5)
    rows = [{"point": 0, "run": run.name, "changes": {"objective.beta": EVIL}, "state": "finished"}]
    (directory.path / "results.json").write_text(json.dumps({"rows": rows}))
    values = native.Built(sweeps_page.Sweeps, site).shown(of=directory.path.name)
    assert "1 trials" in values["Markdown"]
    assert "<img" not in values["Markdown"]
    assert values["Metric"] == "loss"


def test_what_is_not_there_is_told(site: Site) -> None:
    built = native.Built(sweeps_page.Sweeps, site)
    assert "nnxdsl sweep FILE" in built.shown()["Markdown"]
    assert "there is no sweep" in built.shown(of="gone")["Markdown 3"]
    for wrong in ("../x", "/etc", EVIL):
        assert "**" in built.shown(of=wrong)["Markdown 3"], wrong


def test_a_sweep_is_asked_to_stop(site: Site, sweep: SweepDirectory) -> None:
    native.Built(sweeps_page.Sweeps, site).pressed("Stop the sweep", {"of": sweep.path.name})
    assert (sweep.path / "stop").exists()
    read_only = Site(Settings(home=site.settings.home, project=site.settings.project, read_only=True))
    buttons = native.Built(sweeps_page.Sweeps, read_only).buttons
    assert not {"Stop the sweep", "Start the sweep", "Resume the sweep", "Retry failed runs"} & set(buttons)
    read_only.close()


def test_what_may_be_done_goes_by_the_runs_states(site: Site, sweep: SweepDirectory) -> None:
    built = native.Built(sweeps_page.Sweeps, site)

    def offered() -> tuple[bool, ...]:
        values = built.shown(of=sweep.path.name)
        return tuple(values[name]["visible"] for name in ("Button", "Button 1", "Button 2"))

    assert offered() == (False, True, False)  # one point has not run
    write_run(site.settings.home, sweep.spec.experiments[2], "failed", 3)
    assert offered() == (False, False, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one line"),
        ("objective.beta 0.1", "expected path=value"),
        ("seed=0\nseed=1", "each path once"),
        ("objective.gamma=0.1", "objective.gamma"),
        ("seed=" + ",".join(map(str, range(101))), "101 points; expected at most 100"),
        ("objective=Objective.GRPO(rewards=(Reward('os:system'),))", "GRPO"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(site: Site, sweep: SweepDirectory, text: str, message: str) -> None:
    before = sorted(site.settings.home.rglob("*"))
    run = sweep.spec.experiments[0].id
    with pytest.raises(Exception, match=message):
        native.Built(sweeps_page.Sweeps, site).pressed("Start the sweep", {}, run, text, COMBINED, 1)
    assert sorted(site.settings.home.rglob("*")) == before


@pytest.mark.slow
def test_a_sweep_is_started_from_a_run_and_its_failed_points_again(site: Site, tmp_path: Path) -> None:
    """Real processes: of two points one fails, as its data are not there, until they are."""
    (tmp_path / "texts.jsonl").write_text('{"text": "some words"}\n' * 4)
    base = Experiment(
        name="tiny",
        model=Model.Gemma3("tiny"),
        objective=Objective.SFT(loss_on="all"),
        data=Data.Text(str(tmp_path / "texts.jsonl"), max_length=16),
        optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=1e-2)),
        batch_size=2,
        steps=2,
    )
    site.settings.home.mkdir(exist_ok=True)
    run, later = write_run(site.settings.home, base, "finished", 2), tmp_path / "later.jsonl"
    built = native.Built(sweeps_page.Sweeps, site)
    fields = f"data.path={(tmp_path / 'texts.jsonl')!s}, {later!s}\nseed=1"
    built.pressed("Start the sweep", {}, run.name, fields, COMBINED, 1)
    (name,) = names(site.settings.home)
    assert _ended(site, name) == ["failed", "finished"]
    later.write_text('{"text": "other words"}\n' * 4)
    built.pressed("Retry failed runs", {"of": name}, 1)
    assert _ended(site, name) == ["finished", "finished"]


def _ended(site: Site, name: str) -> list[str]:
    """States of a sweep's points once the command that drives it has ended."""

    def has_ended() -> bool:
        start = site.launcher.newest(name, SWEEPS)
        return start is not None and not start.is_alive

    wait_until(has_ended, every_seconds=0.2)
    return sorted(point.state for point in opened(site.settings.home, site.index, site.series, name).points)
