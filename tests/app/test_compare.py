"""Runs next to each other, without a browser: what is fair, what is best, what is exported."""

from __future__ import annotations

import csv
import io
import json
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.page import Ask
from app.pages.compare import page as compare_page
from app.pages.compare import runs as compare_runs
from app.pages.compare.config import brief, differing, flat, unfair
from app.settings import Settings
from app.state import Site
from nnxdsl import Data, Objective
from nnxdsl.storage.jsonl import JsonLines
from tests.app.many import experiment, write_run
from tests.app.on_pages import EVIL


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site.of(Settings(home=tmp_path / "runs", project=tmp_path, read_only=True))
    yield site
    site.close()


def ask(**query: str) -> Ask:
    return Ask(query)


def warned(left: object, right: object) -> list[str]:
    return [one.what for one in unfair([flat(left), flat(right)])]


def test_what_makes_a_comparison_unfair() -> None:
    tree = {"name": "a", "seed": 0, "data": {"path": "x"}, "model": {"size": "1b"}, "adapter": {"rank": 2}, "steps": 3}
    assert warned(tree, {**tree, "name": "b", "adapter": {"rank": 4}, "steps": 5}) == []
    assert warned(tree, {**tree, "seed": 1}) == ["seed"]
    assert warned(tree, {**tree, "data": {"path": "y"}, "model": {"size": "4b"}}) == ["data", "base model"]
    assert warned({**tree, "evaluation": None}, {**tree, "evaluation": {"data": {"path": "h"}}}) == ["held-out data"]
    assert differing([flat(tree), flat({**tree, "name": "b"})]) == ["name"]


def test_an_earlier_experiment_that_one_has_is_its_name() -> None:
    earlier = {"name": "sft", "steps": 3, "model": {"size": "1b"}}
    left, other, right = (
        flat({"steps": 1, "model": {"weights": weights}})
        for weights in (
            {"type": "From", "experiment": earlier},
            {"type": "From", "experiment": {**earlier, "steps": 4}},
            {"type": "Random"},
        )
    )
    kept = [path for path in differing([left, right]) if path in brief([left, right], differing([left, right]))]
    assert kept == ["model.weights.type", "model.weights.experiment.name"]
    assert brief([left, other], differing([left, other])) == ["model.weights.experiment.steps"]


def test_runs_are_compared(site: Site) -> None:
    paths = [
        write_run(site.settings.home, experiment(0), "finished", 30),
        write_run(site.settings.home, experiment(0, objective=Objective.IPO(tau=0.3)), "running", 20),
    ]
    ids = ",".join(path.name for path in paths)
    regions = compare_page.opened(site, ask(ids=ids)).regions
    assert regions["curves"].count("<polyline") == 16  # two runs in each of eight charts
    assert "objective: " in regions["warnings"]
    assert "seed: " not in regions["warnings"]
    assert "objective.tau" in regions["config"].replace("<wbr>", "")
    assert "batch_size" not in regions["config"]
    assert "batch_size" in compare_page.opened(site, ask(ids=ids, config="all")).regions["config"]
    other = compare_page.opened(site, ask(ids=ids, base=paths[1].name)).regions
    assert other["summary"] != regions["summary"]
    assert set(compare_page.ticked(site, ask(ids=ids)).regions) == {"summary", "curves"}


def test_equal_settings_are_a_fair_comparison(site: Site) -> None:
    paths = [
        write_run(site.settings.home, experiment(0, **changes), "finished", 5)
        for changes in ({}, {"steps": 50}, {"name": "again", "steps": 70})
    ]
    regions = compare_page.opened(site, ask(ids=",".join(path.name for path in paths))).regions
    assert "metrics are directly comparable" in regions["warnings"]
    assert "steps" in regions["config"]
    same = [write_run(site.settings.home, experiment(3, name=name), "finished", 5) for name in ("one", "two")]
    regions = compare_page.opened(site, ask(ids=",".join(path.name for path in same))).regions
    assert "The settings are equal" in regions["config"]


def test_the_best_and_the_last_of_a_figure(site: Site) -> None:
    path = write_run(site.settings.home, experiment(0), "finished", 0)
    rows = JsonLines(path / "metrics.jsonl")
    for step, (loss, accuracy) in enumerate([(0.9, 0.5), (0.2, float("nan")), (0.4, 0.75), (0.3, 0.5)]):
        rows.append({"step": step, "attempt": 1, "loss": loss, "rewards/accuracies": accuracy, "grad_norm": 1.0})
    columns = site.series.of(path / "metrics.jsonl").columns
    assert compare_runs.figure_of(columns["loss"], "loss") == compare_runs.Figure(0.3, 0.2, 1)
    assert compare_runs.figure_of(columns["rewards/accuracies"], "rewards/accuracies") == compare_runs.Figure(
        0.5, 0.75, 2
    )
    assert compare_runs.figure_of(columns["grad_norm"], "grad_norm") == compare_runs.Figure(1.0)
    assert compare_runs.figure_of(None, "loss") == compare_runs.Figure()


@pytest.mark.parametrize(
    ("objectives", "is_starred"),
    [
        ((Objective.DPO(beta=0.1), Objective.DPO(beta=0.5)), False),
        ((Objective.DPO(beta=0.1), Objective.IPO(tau=0.1)), False),
        ((Objective.DPO(beta=0.1), Objective.DPO(beta=0.1)), True),
    ],
)
def test_rewards_of_different_betas_are_not_ranked(
    site: Site, objectives: tuple[Objective, Objective], is_starred: bool
) -> None:
    paths = []
    for number, objective in enumerate(objectives):
        path = write_run(site.settings.home, experiment(number, objective=objective), "finished", 0)
        row = {"step": 0, "rewards/margins": 1.0 + number, "rewards/accuracies": 0.5 + number / 4}
        JsonLines(path / "metrics.jsonl").append(row)
        paths.append(path)
    summary = compare_page.opened(site, ask(ids=",".join(path.name for path in paths))).regions["summary"]
    rows = {name: text for text in summary.split("<tr>")[1:] for name in row if f'scope="row">{name}<' in text}
    assert "★" in rows["rewards/accuracies"]
    assert ("★" in rows["rewards/margins"]) == is_starred
    assert ("not comparable" in rows["rewards/margins"]) != is_starred


def test_a_run_that_ends_in_nan_is_not_the_best(site: Site) -> None:
    paths = [write_run(site.settings.home, experiment(number), "finished", 0) for number in range(2)]
    for path, loss in zip(paths, (float("nan"), 0.5), strict=True):
        for step, value in enumerate((0.1, loss)):
            JsonLines(path / "metrics.jsonl").append({"step": step, "loss": value})
    summary = compare_page.opened(site, ask(ids=",".join(path.name for path in paths))).regions["summary"]
    assert "not finite" in summary
    assert "★" not in summary


def test_exports_hold_the_figures_and_no_formulas(site: Site) -> None:
    runs = [
        write_run(site.settings.home, experiment(number, data=Data.Preferences(name)), "finished", 10)
        for number, name in enumerate(["=cmd()|a.jsonl", "b.jsonl"])
    ]
    html = compare_page.opened(site, ask(ids=",".join(path.name for path in runs))).regions["summary"]
    links = [urllib.parse.unquote(part.split('"')[0]) for part in html.split('href="data:')[1:]]
    table = {line[0]: line[1:] for line in csv.reader(io.StringIO(links[0].partition(",")[2]))}
    assert table[""] == [path.name for path in runs]
    last = json.loads((runs[0] / "metrics.jsonl").read_text().splitlines()[-1])
    assert float(table["last loss"][0]) == last["loss"]
    assert table["data.path"] == ["'=cmd()|a.jsonl", "b.jsonl"]
    assert "| data.path | =cmd()\\|a.jsonl | b.jsonl |" in links[1]


def test_two_runs_are_needed(site: Site) -> None:
    assert "There are fewer than two runs" in compare_page.opened(site, ask()).regions["summary"]
    runs = [write_run(site.settings.home, experiment(number), "finished", 3).name for number in range(8)]
    assert "Choose two to six runs" in compare_page.opened(site, ask()).regions["summary"]
    answer = compare_page.opened(site, ask(ids=f"{runs[0]},gone,{runs[0]}"))
    assert "Not in" in answer.regions["head"]
    assert "Choose at least one more" in answer.regions["summary"]
    answer = compare_page.opened(site, ask(ids=runs[0], add=runs[1]))
    assert urllib.parse.parse_qs(answer.query) == {"ids": [f"{runs[0]},{runs[1]}"]}
    assert "<polyline" in answer.regions["curves"]
    assert compare_page.opened(site, ask(ids=",".join(runs))).regions["head"].count("Remove</a>") == 6


def test_what_runs_say_is_escaped(site: Site) -> None:
    paths = [
        write_run(site.settings.home, experiment(number, notes=EVIL, data=Data.Preferences(EVIL)), "failed", 3)
        for number in range(2)
    ]
    JsonLines(paths[0] / "metrics.jsonl").append({"step": 4, "attempt": 1, EVIL: 1.0})
    query = {"ids": ",".join(path.name for path in paths), "base": EVIL, "x": EVIL, "smooth": EVIL, "all": "1"}
    for more in ({}, {"config": "all"}, {"ids": f"{EVIL},a"}):
        for html in compare_page.opened(site, ask(**{**query, **more})).regions.values():
            assert "<img" not in html
