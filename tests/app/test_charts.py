"""Curves: what is no number is seen, the legend has the last value, and an error leads to the field to change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from app.components.plots import Chart, Line, figure
from app.pages.run import page as run_page
from app.pages.run.head import field_to_blame
from app.settings import Settings
from app.state import Site
from app.store.series import Series
from nnxdsl.config.core.serialization import flatten
from nnxdsl.storage.jsonl import JsonLines
from tests.app import native
from tests.app.many import experiment, rows, write_run
from tests.work import calls

NON_FINITE = (
    "RunError: step 3: loss is nan, grad_norm nan; its rows begin with pairs.jsonl:2; saved at step 3; lower the "
    "learning rate, look at those rows, or skip such steps with guard=Guard.Skip()"
)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(Settings(home=tmp_path / "runs", project=tmp_path, read_only=True))
    yield site
    site.close()


def test_a_gap_stands_where_a_value_is_not_finite() -> None:
    values, steps = np.array([3.0, 2.0, np.nan, 1.5, 1.25]), np.arange(5.0)
    finite = np.isfinite(values)
    line = Line("loss", steps[finite], values[finite], missing=steps[~finite])
    curve, mark = figure([Chart("Loss", [line])], "step", 1).data
    assert np.array_equal(curve.y, values, equal_nan=True)
    assert not curve.connectgaps
    assert (list(mark.x), list(mark.y), mark.name) == ([2.0], [3.0], "loss: NaN or infinite")
    (alone,) = figure([Chart("Loss", [Line("loss", steps[:2], values[:2])])], "step", 1).data
    assert list(alone.y) == [3.0, 2.0]


def test_curves_of_one_name_are_once_in_the_legend() -> None:
    line = Line("beta=0.1", np.arange(3.0), np.arange(3.0))
    charts = [Chart("Loss", [line, line]), Chart("Reward", [line])]
    assert [one.showlegend for one in figure(charts, "step", 2).data] == [True, False, False]
    assert [one.showlegend for one in figure(charts, "step", 2, own_legends=True).data] == [True] * 3


def test_the_legend_of_a_long_run_has_its_last_loss(site: Site) -> None:
    path = write_run(site.settings.home, experiment(1, steps=20_000), "finished", 0)
    written = rows(20_000)
    written[-1]["loss"] = 0.33891
    written[-2]["loss"] = 0.9
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    plot = native.Built(run_page.Run, site).shown(id=path.name)["Plot"]
    (loss,) = [trace for trace in plot.data if trace.name.startswith("loss")]
    assert loss.name == "loss 0.3389"
    assert 300 < len(loss.x) <= 500
    smooth = native.Built(run_page.Run, site).shown(id=path.name, smooth="0.9")["Plot"]
    faint, rendered = [trace for trace in smooth.data if trace.name.startswith("loss")]
    assert (rendered.name, faint.opacity, faint.showlegend) == ("loss 0.3389", 0.35, False)


def test_controls_have_what_the_query_says(site: Site) -> None:
    path = write_run(site.settings.home, experiment(1, steps=20), "finished", 0)
    page = native.Built(run_page.Run, site)
    first, chosen = page.shown(id=path.name), page.shown(id=path.name, smooth="0.9", log="1", lines="error", pause="1")
    assert [first[label] for label in ("Smoothing", "X axis", "Show")] == ["0", "step", ""]
    assert [chosen[label] for label in ("Smoothing", "X axis", "Show")] == ["0.9", "step", "error"]
    boxes = [[value for key, value in each.items() if key.startswith("Checkbox")] for each in (first, chosen)]
    assert [sum(each) for each in boxes] == [0, 2]
    assert page.shown(id=path.name, smooth="2")["Smoothing"] == "0"  # no choice


@pytest.mark.parametrize("smooth", ["", "0.9"])
def test_nan_in_the_file_of_a_run_is_marked(site: Site, smooth: str) -> None:
    path = write_run(site.settings.home, experiment(1), "failed", 0, error=NON_FINITE)
    written = rows(30)
    written[12]["loss"] = float("nan")
    written[29]["loss"] = float("inf")
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    shown = native.Built(run_page.Run, site).shown(id=path.name, smooth=smooth)
    assert "- **!** Loss: 2 values are NaN or infinite, the first at step 12." in shown.values()
    assert shown["Code"] == NON_FINITE
    assert "The field to change: optimizer.schedule.lr." in shown.values()
    traces = {trace.name: trace for trace in shown["Plot"].data if "loss" in trace.name}
    assert "loss not finite" in traces
    assert traces["loss not finite: NaN or infinite"].x.tolist() == [12, 29]
    assert np.isnan(traces["loss not finite"].y).sum() == 2


def test_restarts_and_checkpoints_are_marked(site: Site) -> None:
    path = write_run(site.settings.home, experiment(1), "stopped", 0)
    written = [{**row, "attempt": 1 if row["step"] < 20 else 2} for row in rows(30)]
    written[25]["eval/loss"] = 0.25
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    (path / "checkpoints" / "00000010").mkdir()
    built = native.Built(run_page.Run, site)
    plot = built.shown(id=path.name)["Plot"]
    marks = next(trace for trace in plot.data if trace.text is not None)
    assert dict(zip(marks.text, marks.x, strict=True)) == {
        "attempt 2 started at step 20": 20,
        "checkpoint of step 10": 10,
    }
    assert {shape.x0 for shape in plot.layout.shapes} == {10, 20}
    held_out = next(trace for trace in plot.data if trace.name == "held out 0.25")
    assert (held_out.legend, held_out.xaxis, held_out.line.dash) == ("legend", "x", "dash")
    tokens = built.shown(id=path.name, x="tokens", log="1")["Plot"]
    assert (tokens.layout.yaxis.type, tokens.layout.yaxis2.type) == ("log", "linear")
    assert {shape.x0 for shape in tokens.layout.shapes} == {400.0 * 11, 400.0 * 21}


def test_a_run_without_steps_says_so(site: Site) -> None:
    path = write_run(site.settings.home, experiment(1), "queued", 0)
    shown = native.Built(run_page.Run, site).shown(id=path.name)
    assert any(str(text).startswith("No step has finished yet") for text in shown.values())
    assert shown["Plot"] is None


def test_a_hundred_thousand_steps_are_drawn_with_about_the_work_of_a_thousand(site: Site) -> None:
    short = write_run(site.settings.home, experiment(0, steps=1_000), "finished", 1_000)
    path = write_run(site.settings.home, experiment(1, steps=100_000), "finished", 0)
    lines = [json.dumps(row) + "\n" for row in rows(1_000)]
    (path / "metrics.jsonl").write_text("".join(lines) * 100)
    for step in range(40):
        (path / "checkpoints" / f"{step:08d}").mkdir()
    built = native.Built(run_page.Run, site)
    site.series.of(path / "metrics.jsonl")  # what that takes is counted in test_runs
    usual = calls(lambda: built.shown(id=short.name))
    assert calls(lambda: built.shown(id=path.name)) < 4 * usual
    plot = built.shown(id=path.name)["Plot"]
    assert max(len(trace.x) for trace in plot.data) <= 500


def test_names_of_metrics_are_text(site: Site) -> None:
    path = write_run(site.settings.home, experiment(1), "finished", 0)
    JsonLines(path / "metrics.jsonl").append({"step": 1, "attempt": 1, "<b>x</b>": 1.0})
    plot = native.Built(run_page.Run, site).shown(id=path.name, all="1")["Plot"]
    assert [note.text for note in plot.layout.annotations] == ["&lt;b&gt;x&lt; b&gt;"]
    assert plot.data[0].name == "&lt;b&gt;x&lt;/b&gt; 1"


@pytest.mark.parametrize(
    ("error", "path"),
    [
        (NON_FINITE, "optimizer.schedule.lr"),
        ("SpecError: steps: expected a value > 0", "steps"),
        ("RunError: batch_size=3 is too small for the mesh", "batch_size"),
        ("DataError: data.path: no such file", "data.path"),
        ("RunError: 3 steps were skipped by step 9, look at the data and the seed", None),
    ],
)
def test_an_error_leads_to_the_field_to_change(error: str, path: str | None) -> None:
    assert field_to_blame(list(flatten(experiment(1))), error) == path


def test_a_file_in_the_place_of_another_is_read_from_its_beginning(tmp_path: Path) -> None:
    path, cache = tmp_path / "metrics.jsonl", Series()
    path.write_text('{"step": 0, "loss": 1.0}\n{"step": 1, "loss": 2.0}\n')
    assert list(cache.of(path).columns["loss"].values) == [1.0, 2.0]
    path.write_text('{"step": 0, "loss": 1.0}\n{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 4.0}\n')  # the same inode
    assert list(cache.of(path).columns["loss"].values) == [1.0, 3.0, 4.0]
