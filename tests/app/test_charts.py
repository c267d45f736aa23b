"""Curves: what is no number is seen, the legend has the last value, and an error leads to the field to change."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from app.components.charts import Line, chart
from app.page import Ask
from app.pages.run import page as run_page
from app.pages.run.head import field_to_blame
from app.settings import Settings
from app.state import Site
from nnxdsl.config.core.serialization import flatten
from tests.app.many import experiment, rows, write_run

NON_FINITE = (
    "RunError: step 3: loss is nan, grad_norm nan; its rows begin with pairs.jsonl:2; saved at step 3; lower the "
    "learning rate, look at those rows, or skip such steps with guard=Guard.Skip()"
)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site.of(Settings(home=tmp_path / "runs", project=tmp_path, read_only=True))
    yield site
    site.close()


def line(values: list[float]) -> Line:
    y, x = np.array(values), np.arange(float(len(values)))
    finite = np.isfinite(y)
    return Line("loss", x[finite], y[finite], missing=x[~finite])


def test_a_gap_stands_where_a_value_is_not_finite() -> None:
    drawn = chart("Loss", [line([3.0, 2.0, float("nan"), 1.5, 1.25])])
    assert "1 values are NaN or infinite, the first at 2" in drawn
    first, second = re.findall(r'<polyline points="([^"]+)"', drawn)
    assert (len(first.split()), len(second.split())) == (2, 2)
    assert "<b>1.25</b>" in drawn
    assert "NaN" not in chart("Loss", [line([3.0, 2.0])])


def test_a_curve_that_ends_in_nan_does_not_show_the_last_finite_value_as_its_last() -> None:
    drawn = chart("Loss", [line([3.0, 2.0, float("nan")])])
    assert "<b>not finite</b>" in drawn
    assert "not finite" in re.findall(r'aria-label="([^"]+)"', drawn)[0]
    assert "3 values are NaN or infinite" in chart("Loss", [line([float("nan")] * 3)])


def test_the_legend_of_a_long_run_has_its_last_loss(site: Site) -> None:
    path = write_run(site.settings.home, experiment(1, steps=20_000), "finished", 0)
    written = rows(20_000)
    written[-1]["loss"] = 0.33891
    written[-2]["loss"] = 0.9
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    body = run_page.opened(site, Ask({"id": path.name})).regions["body"]
    assert "loss <b>0.3389</b>" in body


@pytest.mark.parametrize("smooth", ["", "0.9"])
def test_nan_in_the_file_of_a_run_is_marked(site: Site, smooth: str) -> None:
    path = write_run(site.settings.home, experiment(1), "failed", 0, error=NON_FINITE)
    written = rows(30)
    written[12]["loss"] = float("nan")
    written[29]["loss"] = float("inf")
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    body = run_page.opened(site, Ask({"id": path.name, "smooth": smooth})).regions["body"]
    assert "2 values are NaN or infinite, the first at 12" in body
    assert "not finite" in body


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
