"""Every page at two widths and in both themes: it fits its window, and what it shows can be read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.pages import PAGES
from nnxdsl import Sweep, product
from nnxdsl.sweep.sweep import SweepDirectory
from tests.app.conftest import kill_runs
from tests.app.many import experiment, write_run
from tests.app.on_pages import cut_headers, dim_texts, faint_boxes, overflow

pytestmark = pytest.mark.browser
NAME = "a-distillation-of-a-model-with-a-name-as-long-as-names-may-be"
WAITS_FOR = {"layout": ".device-grid", "run": ".js-plotly-plot .main-svg", "data": ".token-runs"}
"""By name of a page: what it ends with, if it is not there at once."""
STILL_MILLISECONDS = 2_000


@pytest.fixture(scope="module")
def app(shared_app: Any) -> Any:
    """The shared app over some runs with long names, and a sweep."""
    kill_runs(shared_app.project)
    shutil.rmtree(shared_app.home, ignore_errors=True)
    for number, state in enumerate(("finished", "finished", "failed")):
        write_run(shared_app.home, experiment(number, name=f"{NAME}-{number}"), state, 30)
    sweep = Sweep(experiment(0, name="rates"), product({"objective.beta": [0.1, 0.2, 0.3]}))
    SweepDirectory.open(sweep, shared_app.home)
    for one in sweep.experiments:
        write_run(shared_app.home, one, "finished", 30)
    return shared_app


def queries(home: Path) -> dict[str, str]:
    """By name of a page: the query that it shows most with."""
    one, two, _ = (path.name for path in sorted(home.glob(f"{NAME}-*")))
    return {
        "run": f"?id={one}", "compare": f"?ids={one},{two}", "outputs": f"?run={one}", "data": "?of=exp:tiny",
        "layout": f"?run={one}&mesh=fsdp:2,tensor:2&device=h100", "export": f"?run={one}",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        pytest.param(390, False, id="390-light"),
        pytest.param(390, True, id="390-dark", marks=pytest.mark.slow),
        pytest.param(1400, False, id="1400-light", marks=pytest.mark.slow),
        pytest.param(1400, True, id="1400-dark"),
    ],
)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_fits_and_can_be_read(
    app: Any, open_page: Callable[..., Any], page: Any, width: int, dark: bool
) -> None:
    shown = open_page(app.url(page.path + queries(app.home).get(page.name, "")), width=width, dark=dark)
    shown.wait_for_selector(WAITS_FOR.get(page.name, "h1"))
    shown.wait_for_timeout(STILL_MILLISECONDS)
    faults = {"wider": overflow(shown), "dim": dim_texts(shown), "faint": faint_boxes(shown), "cut": cut_headers(shown)}
    assert faults == {"wider": 0, "dim": [], "faint": [], "cut": []}
