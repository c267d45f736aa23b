"""Every page in a real browser by the rules of axe-core: no serious and no critical fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.pages import PAGES
from tests.app.many import experiment, write_run

pytestmark = pytest.mark.browser
Open = Callable[..., Any]
FAULTS = """async () => {
  const found = await axe.run(document, { resultTypes: ["violations"] });
  return found.violations
    .filter((one) => ["serious", "critical"].includes(one.impact))
    .map((one) => [one.id, one.nodes.map((node) => node.html.slice(0, 200) + " | " + node.any.map((a) => a.message))]);
}"""


@pytest.fixture(scope="module")
def axe() -> str:
    """The script of axe-core, as its Python package brings it."""
    package = pytest.importorskip("axe_playwright_python", reason="needs axe-core: pip install 'nnxdsl[browser]'")
    return Path(package.__file__).with_name("axe.min.js").read_text(encoding="utf-8")


@pytest.fixture
def app(emptied_app: Any) -> Any:
    return emptied_app


def faults(shown: Any, axe: str) -> list[Any]:
    """Serious and critical faults of a page: rules, and elements with what is wrong with them."""
    shown.wait_for_selector("h1")
    shown.wait_for_timeout(1_500)  # components are added after the heading
    shown.wait_for_function("!document.querySelector('[aria-label=\"Empty value\"]')")  # and filled later
    shown.evaluate(axe)
    return shown.evaluate(FAULTS)


@pytest.mark.parametrize(
    "dark", [pytest.param(False, id="light"), pytest.param(True, id="dark", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_no_serious_fault(app: Any, open_page: Open, axe: str, page: Any, dark: bool) -> None:
    runs = [write_run(app.home, experiment(number), "finished", 30) for number in range(2)]
    queries = {"run": f"?id={runs[0].name}", "compare": f"?ids={runs[0].name},{runs[1].name}", "runs": ""}
    queries |= {"outputs": f"?run={runs[0].name}", "data": f"?of=run:{runs[0].name}"}
    shown = open_page(app.url(f"{page.path}{queries.get(page.name, '')}"), dark=dark)
    assert faults(shown, axe) == []
