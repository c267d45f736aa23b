"""Runs next to each other, without a browser: what is fair, what is best, what is exported."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.pages.compare import runs as compare_runs
from app.pages.compare.config import brief, differing, flat, unfair
from app.pages.compare.runs import grouped
from app.pages.compare.tables import to_csv, to_html, to_markdown
from app.settings import Settings
from app.state import Site
from nnxdsl import Data, Objective
from nnxdsl.storage.jsonl import JsonLines
from tests.app.many import experiment, write_run
from tests.app.on_pages import EVIL

gr = pytest.importorskip("gradio")
compare_page = pytest.importorskip("app.pages.compare.page")
runs_page = pytest.importorskip("app.pages.runs")
native = pytest.importorskip("tests.app.native")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(Settings(home=tmp_path / "runs", project=tmp_path, read_only=True))
    yield site
    site.close()


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


def shown(site: Site, **query: str) -> dict[str, Any]:
    return native.Built(compare_page.Compare, site).shown(**query)


def test_runs_are_compared(site: Site) -> None:
    paths = [
        write_run(site.settings.home, experiment(0), "finished", 30),
        write_run(site.settings.home, experiment(0, objective=Objective.IPO(tau=0.3)), "running", 20),
    ]
    ids = ",".join(path.name for path in paths)
    values = shown(site, ids=ids)
    assert values["Runs"] == [path.name for path in paths]
    assert values["Baseline"] == paths[0].name
    assert len(values["Plot"].data) == 16  # two runs in each of eight charts
    assert "! objective" in values["Markdown"]
    assert "! seed" not in values["Markdown"]
    fields = values["Dataframe 1"].set_index("field")
    assert fields.loc["objective.tau"].tolist() == ["≠", "-", "0.3"]
    assert "batch_size" not in fields.index
    assert "batch_size" in shown(site, ids=ids, config="all")["Dataframe 1"]["field"].tolist()
    other = shown(site, ids=ids, base=paths[1].name)
    assert other["Baseline"] == paths[1].name
    assert list(other["Dataframe"]) == ["metric", "better", paths[0].name, f"{paths[1].name} (baseline)"]
    smooth = shown(site, ids=ids, smooth="0.9", log="1", x="tokens")["Plot"]
    assert not np.array_equal(smooth.data[0].y, values["Plot"].data[0].y)
    assert smooth.layout.yaxis.type == "log"
    assert shown(site, ids=ids, _width="390")["Plot"].layout.xaxis2.domain == (0.0, 1.0)


def test_values_that_did_not_change_are_not_sent_again(site: Site) -> None:
    ids = ",".join(write_run(site.settings.home, experiment(number), "finished", 5).name for number in range(2))
    built = native.Built(compare_page.Compare, site)
    load, tick = built.handler("load"), built.handler("tick")
    every = json.dumps({"name": "*"})
    *_, sent = load.fn("{}", f"?ids={ids}", "{}")
    *again, same = tick.fn(every, f"?ids={ids}", sent)
    assert same == sent
    assert all(value == gr.skip() for value in again)
    JsonLines(site.settings.home / ids.split(",")[0] / "metrics.jsonl").append({"step": 6, "loss": 0.1})
    changed = [value for value in tick.fn(every, f"?ids={ids}", sent)[:-1] if value != gr.skip()]
    assert len(changed) == 2  # the table of metrics, and the plot


def test_equal_settings_are_a_fair_comparison(site: Site) -> None:
    paths = [
        write_run(site.settings.home, experiment(0, **changes), "finished", 5)
        for changes in ({}, {"steps": 50}, {"name": "again", "steps": 70})
    ]
    values = shown(site, ids=",".join(path.name for path in paths))
    assert "metrics are directly comparable" in values["Markdown"]
    assert values["Dataframe 1"]["field"].tolist() == ["steps"]
    same = [write_run(site.settings.home, experiment(3, name=name), "finished", 5) for name in ("one", "two")]
    values = shown(site, ids=",".join(path.name for path in same))
    assert values["Dataframe 1"].empty


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
    table = shown(site, ids=",".join(path.name for path in paths))["Dataframe"].set_index("metric")
    assert "★" in "".join(table.loc["rewards/accuracies"])
    assert ("★" in "".join(table.loc["rewards/margins"])) == is_starred
    assert ("not comparable" in table.loc["rewards/margins"]["better"]) != is_starred


def test_metrics_of_different_data_are_not_ranked(site: Site) -> None:
    paths = []
    for number, file in enumerate(("pairs.jsonl", "others.jsonl")):
        made = experiment(number, data=Data.Preferences(file))
        paths.append(write_run(site.settings.home, made, "finished", 0))
        row = {"step": 0, "loss": 1.0 + number, "eval/loss": 1.0 + number, "tokens/s": 1.0 + number}
        JsonLines(paths[-1] / "metrics.jsonl").append(row)
    table = shown(site, ids=",".join(path.name for path in paths))["Dataframe"].set_index("metric")
    assert table.loc["loss", "better"] == "not comparable: data differ"
    starred = [name for name in table.index if "★" in "".join(table.loc[name])]
    assert sorted(starred) == ["eval/loss", "tokens/s"]  # held-out rows are the same


def test_a_run_that_ends_in_nan_is_not_the_best(site: Site) -> None:
    paths = [write_run(site.settings.home, experiment(number), "finished", 0) for number in range(2)]
    for path, loss in zip(paths, (float("nan"), 0.5), strict=True):
        for step, value in enumerate((0.1, loss)):
            JsonLines(path / "metrics.jsonl").append({"step": step, "loss": value})
    values = shown(site, ids=",".join(path.name for path in paths))
    text = values["Dataframe"].to_string()
    assert "not finite" in text
    assert "★" not in text
    assert [trace.x.tolist() for trace in values["Plot"].data if trace.mode == "markers"] == [[1.0]]


def test_exports_hold_the_figures_and_no_formulas(site: Site) -> None:
    runs = [
        write_run(site.settings.home, experiment(number, data=Data.Preferences(name)), "finished", 10)
        for number, name in enumerate(["=cmd()|a.jsonl", "b.jsonl"])
    ]
    actual, _ = compare_runs.compared(site, {"ids": ",".join(path.name for path in runs)})
    groups = grouped(actual, "")
    table = {line[0]: line[1:] for line in csv.reader(io.StringIO(to_csv(groups)))}
    assert table[""] == [path.name for path in runs]
    last = json.loads((runs[0] / "metrics.jsonl").read_text().splitlines()[-1])
    assert float(table["last loss"][0]) == last["loss"]
    assert table["data.path"] == ["'=cmd()|a.jsonl", "b.jsonl"]
    assert "| data.path | =cmd()\\|a.jsonl | b.jsonl |" in to_markdown(groups)


def test_two_runs_are_needed(site: Site) -> None:
    assert "There are fewer than two runs" in shown(site)["Markdown"]
    runs = [write_run(site.settings.home, experiment(number), "finished", 3).name for number in range(8)]
    assert "Choose two to six runs" in shown(site)["Markdown"]
    values = shown(site, ids=f"{runs[0]},gone,{runs[0]}")
    assert "Not in" in values["Markdown"]
    assert "Choose at least one more" in values["Markdown"]
    assert values["Plot"] is None
    assert shown(site, ids=",".join(runs))["Runs"] == runs[:6]


def test_what_runs_say_is_shown_as_it_is(site: Site) -> None:
    paths = [
        write_run(site.settings.home, experiment(number, notes=EVIL, data=Data.Preferences(EVIL)), "failed", 3)
        for number in range(2)
    ]
    JsonLines(paths[0] / "metrics.jsonl").append({"step": 4, "attempt": 1, EVIL: 1.0})
    query = {"ids": ",".join(path.name for path in paths), "base": EVIL, "x": EVIL, "smooth": EVIL, "all": "1"}
    for more in ({}, {"config": "all"}, {"ids": f"{EVIL},a"}):
        values = shown(site, **{**query, **more})
        assert "<img" not in values["Markdown"]
        assert values["Plot"] is None or "<img" not in values["Plot"].to_json()


@pytest.fixture
def reported(site: Site) -> str:
    """A report of two runs, one of which has a hostile text in its settings."""
    hostile = experiment(0, data=Data.Preferences(f"{EVIL}</script>.jsonl"))
    paths = [
        write_run(site.settings.home, hostile, "finished", 30),
        write_run(site.settings.home, experiment(0, objective=Objective.IPO(tau=0.3)), "running", 20),
    ]
    runs, _ = compare_runs.compared(site, {"ids": ",".join(path.name for path in paths)})
    return to_html(grouped(runs, ""), {})


def test_a_report_has_metrics_and_settings_as_text(site: Site, reported: str) -> None:
    without_scripts = re.sub(r"<script.*?</script>", "", reported, flags=re.DOTALL)
    assert EVIL not in reported
    assert "&lt;img" in without_scripts
    assert not re.findall(r"""(?:src|href)=["']?\w+:""", without_scripts)
    names = [path.name for path in site.settings.home.glob("*-*")]
    assert len(names) == 2
    for word in (*names, "last loss", "objective.tau", "0.3"):
        assert word in without_scripts, word


@pytest.mark.browser
def test_a_report_opens_without_a_network(reported: str, chromium: Any, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(reported, encoding="utf-8")
    for width in (1400, 390):
        context = chromium.new_context(viewport={"width": width, "height": 900}, offline=True)
        page, problems = context.new_page(), []
        page.on("console", lambda message, actual=problems: actual.append(message.text))
        page.on(
            "request", lambda request, actual=problems: request.url.startswith("file:") or actual.append(request.url)
        )
        page.goto(file.as_uri())
        page.wait_for_selector(".js-plotly-plot .scatterlayer .trace")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert page.locator("details").count() == 2
        assert problems == []
        context.close()


def test_a_run_alone_has_a_report(site: Site) -> None:
    path = write_run(site.settings.home, experiment(0), "finished", 30)
    runs, _ = compare_runs.compared(site, {"ids": path.name})
    assert "<h2>Metrics</h2>" in to_html(grouped(runs, ""), {})


STEPS, SEEDS = 12, 3


@pytest.fixture
def seeds(site: Site) -> dict[tuple[float, int], Path]:
    """Runs of two betas with three seeds each, by beta and seed; the last one ended after half of its steps."""
    result: dict[tuple[float, int], Path] = {}
    for beta in (0.1, 0.5):
        for seed in range(SEEDS):
            made = experiment(0, name="seeds", objective=Objective.DPO(beta=beta), seed=seed, steps=STEPS)
            state = "stopped" if (beta, seed) == (0.5, 2) else "finished"
            path = result[beta, seed] = write_run(site.settings.home, made, state, 0)
            lines = JsonLines(path / "metrics.jsonl")
            for step in range(STEPS // 2 if state == "stopped" else STEPS):
                accuracy, tokens = 0.5 + 0.03 * seed + 0.01 * step, 10 * (seed + 2) * (step + 1)
                loss = float("nan") if (beta, seed, step) == (0.1, 1, 3) else 1.0 / (1 + step) + 0.1 * seed + beta
                row = {"loss": loss, "rewards/accuracies": accuracy, "num_tokens": tokens}
                lines.append({"step": step, "attempt": 1, **row})
    return result


def loss_of(beta: float) -> np.ndarray:
    """Losses `[3, 12]` as `seeds` wrote them; NaN where there is none."""
    steps, seed = np.arange(STEPS), np.arange(SEEDS)[:, None]
    values = 1.0 / (1 + steps) + 0.1 * seed + beta
    if beta == 0.1:
        values[1, 3] = np.nan
    else:
        values[2, STEPS // 2 :] = np.nan
    return values


def test_a_filter_chooses_runs(site: Site, seeds: dict[tuple[float, int], Path]) -> None:
    ids = [path.name for path in seeds.values()]
    other = write_run(site.settings.home, experiment(9, name="other"), "failed", 3).name
    site.tags.set(ids[0], ("baseline",))
    chosen = {
        "state:finished": set(ids[:-1]),
        "seeds": set(ids),
        "*": {*ids, other},
        "tag:baseline": {ids[0]},
        "state:failed seeds": set(),
        "tag:base": set(),
    }
    for text, expected in chosen.items():
        actual, missing = compare_runs.compared(site, {"filter": text})
        assert {run.row.id for run in actual} == expected, text
        assert missing == []
    both, _ = compare_runs.compared(site, {"ids": other, "filter": "state:finished"})
    assert both[0].row.id == other
    assert len(both) == 6
    assert "The filter finds 6 runs" in shown(site, filter="seeds")["Markdown"]
    assert "one run" in shown(site, filter="tag:baseline")["Markdown"]
    goto = native.Built(runs_page.Runs, site).pressed("Compare what is shown", {"q": "seeds", "state": "finished"})
    assert goto["goto"] == "/compare?filter=state%3Afinished+seeds"
    assert native.Built(runs_page.Runs, site).pressed("Compare what is shown", {})["goto"] == "/compare?filter=%2A"


def test_more_runs_than_are_compared_are_told(site: Site) -> None:
    for number in range(compare_runs.MOST_FOUND + 1):
        write_run(site.settings.home, experiment(number), "finished", 2)
    values = shown(site, filter="*")
    assert f"the newest {compare_runs.MOST_FOUND} are compared" in values["Markdown"]
    assert len(values["Dataframe"].columns) == 2 + compare_runs.MOST_FOUND


def test_seeds_are_averaged(site: Site, seeds: dict[tuple[float, int], Path]) -> None:
    first, second = "beta=0.1 (3 seeds)", "beta=0.5 (3 seeds)"
    query = {"filter": "seeds", "group": "seeds", "base": seeds[0.1, 0].name}
    values = shown(site, **query)
    assert "! seed" not in values["Markdown"]
    assert "! objective" in values["Markdown"]
    curves = {trace.name: trace for trace in values["Plot"].data if trace.xaxis == "x" and trace.mode == "lines"}
    for name, beta in ((first, 0.1), (second, 0.5)):
        losses, (area, mean) = loss_of(beta), [one for one in values["Plot"].data if one.name == name][:2]
        assert name in curves
        expected, deviation = np.nanmean(losses, axis=0), np.nanstd(losses, axis=0, ddof=1)
        rendered = np.isfinite(mean.y)
        np.testing.assert_array_equal(np.array(mean.x)[rendered], np.arange(STEPS))
        np.testing.assert_allclose(np.array(mean.y)[rendered], expected, rtol=1e-12)
        np.testing.assert_allclose(area.y[:STEPS], expected + deviation, rtol=1e-12)
        np.testing.assert_allclose(area.y[STEPS:][::-1], expected - deviation, rtol=1e-12)
        counts = np.isfinite(losses).sum(axis=0)
        texts = [text for text, is_drawn in zip(mean.text, rendered, strict=True) if is_drawn]
        assert [text[-4:-1] for text in texts] == [f"n={count}" for count in counts]
    edges = next(one for one in shown(site, **query, band="range")["Plot"].data if one.name == first)
    np.testing.assert_allclose(edges.y[:STEPS], np.nanmax(loss_of(0.1), axis=0), rtol=1e-12)
    np.testing.assert_allclose(edges.y[STEPS:][::-1], np.nanmin(loss_of(0.1), axis=0), rtol=1e-12)
    table = values["Dataframe"].set_index("metric")
    accuracies = 0.5 + 0.03 * np.arange(SEEDS) + 0.01 * (STEPS - 1)
    cell = table.loc["rewards/accuracies", f"{first} (baseline)"]
    assert cell.startswith(f"★ {accuracies.mean():.4g} ± {accuracies.std(ddof=1):.4g} (3) best ")
    short = accuracies - np.array([0, 0, 0.01 * STEPS / 2])
    cell = table.loc["rewards/accuracies", second]
    expected = f"{short.mean():.4g} ± {short.std(ddof=1):.4g} (3) (-{accuracies.mean() - short.mean():.4g})"
    assert cell.startswith(expected)
    fields = values["Dataframe 1"].set_index("field")
    assert sorted(fields.loc["objective.beta"].tolist()[1:]) == ["0.1", "0.5"]


def test_tokens_of_seeds_are_averaged_at_equal_tokens(site: Site, seeds: dict[tuple[float, int], Path]) -> None:
    values = shown(site, filter="seeds", group="seeds", x="tokens", all="1")
    chart = next(i for i, title in enumerate(values["Plot"].layout.annotations) if title.text == "Rewards accuracies")
    traces = [one for one in values["Plot"].data if one.xaxis == ("x" if not chart else f"x{chart + 1}")]
    mean = next(one for one in traces if one.name.startswith("beta=0.1") and one.text)
    tokens = [10.0 * (seed + 2) * np.arange(1, STEPS + 1) for seed in range(SEEDS)]
    index = np.unique(np.concatenate(tokens))
    accuracy = [0.5 + 0.03 * seed + 0.01 * np.arange(STEPS) for seed in range(SEEDS)]
    each = [np.interp(index, x, y, left=np.nan, right=np.nan) for x, y in zip(tokens, accuracy, strict=True)]
    np.testing.assert_array_equal(mean.x, index)
    np.testing.assert_allclose(mean.y, np.nanmean(each, axis=0), rtol=1e-12)


def test_runs_are_grouped_by_a_field(site: Site, seeds: dict[tuple[float, int], Path]) -> None:
    write_run(
        site.settings.home, experiment(0, name="seeds", steps=50, objective=Objective.DPO(beta=0.5)), "finished", 9
    )
    values = shown(site, filter="seeds", group="objective.beta")
    names = [name.removesuffix(" (baseline)") for name in values["Dataframe"].columns[2:]]
    assert sorted(names) == ["beta=0.1 (3 runs)", "beta=0.5 (4 runs)"]
    assert "Runs of one group differ in more than the seed: steps" in values["Markdown"]
    assert "no setting" in shown(site, filter="seeds", group="objective.gamma")["Markdown"]
    evil = shown(site, filter="seeds", group=EVIL)
    assert "<img" not in evil["Markdown"]
    assert len(evil["Dataframe"].columns) == 9


def test_reports_of_groups_have_means(site: Site, seeds: dict[tuple[float, int], Path]) -> None:
    actual, _ = compare_runs.compared(site, {"ids": ",".join(seeds[0.1, seed].name for seed in range(SEEDS))})
    groups = grouped(actual, "seeds")
    assert [group.name for group in groups] == [f"{seeds[0.1, 0].name} (3 seeds)"]
    table = {line[0]: line[1:] for line in csv.reader(io.StringIO(to_csv(groups)))}
    last = loss_of(0.1)[:, -1]
    assert float(table["mean of last loss"][0]) == pytest.approx(last.mean(), rel=1e-12)
    assert float(table["standard deviation of last loss"][0]) == pytest.approx(last.std(ddof=1), rel=1e-12)
    assert table["runs with last loss"] == ["3"]
    text = f"{last.mean():.4g} ± {last.std(ddof=1):.4g} (3)"
    assert f"| last loss | {text} |" in to_markdown(groups)
    report = to_html(groups, {"group": "seeds"})
    assert text in report
    assert "n=3" in report
