"""Every page in a real browser: by its URL, quickly, in every state of a run, at two widths and in both themes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.pages import PAGES
from nnxdsl.runs.run_dir import RunDirectory
from tests.app.many import experiment, write_many, write_run
from tests.app.on_pages import EVIL, dim_texts, overflow

pytestmark = pytest.mark.browser
Open = Callable[..., Any]
NAVIGATION = [page.path for page in PAGES if page.in_navigation]
CURVE = ".js-plotly-plot .scatterlayer .trace"


@pytest.fixture
def app(emptied_app: Any) -> Any:
    return emptied_app


def test_the_app_never_loads_jax(app: Any) -> None:
    loaded = Path(f"/proc/{app.child.pid}/maps").read_text()
    assert "pydantic_core" in loaded
    assert "jaxlib" not in loaded
    assert app.end() == 0
    app.start()  # it is that of the other tests


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_opens_by_its_url(app: Any, open_page: Open, page: Any) -> None:
    shown = open_page(app.url(page.path))
    shown.wait_for_selector("h1")
    shown.wait_for_function(f"document.title.endsWith('{page.title} · nnxdsl')")
    current = shown.locator("header.top nav a[aria-current]").all_text_contents()
    assert current == ([page.title] if page.in_navigation else [])
    assert overflow(shown) == 0


def rows_shown(count: int) -> str:
    return f"document.querySelector('#runs-table [role=grid]')?.ariaRowCount === '{count + 1}'"


def test_the_navigation_leads_to_each_page_and_back(app: Any, open_page: Open) -> None:
    shown = open_page(app.url("/"))
    for path in NAVIGATION[1:]:
        link = shown.locator(f"header.top nav a[href='{path}']")
        title = link.text_content()
        link.click()
        shown.wait_for_url(app.url(path))
        shown.wait_for_function(f"document.title.endsWith('{title} · nnxdsl')")
    shown.go_back()
    shown.wait_for_url(app.url(NAVIGATION[-2]))
    shown.wait_for_selector("h1")


def test_a_thousand_runs_are_listed_and_searched(app: Any, open_page: Open) -> None:
    write_many(app.home, 1_000, steps=5)
    shown = open_page(app.url("/"))
    shown.wait_for_function(rows_shown(50))
    table = shown.locator("#runs-table").text_content()
    assert ("1,000 runs" in table, "page 1 of 20" in table) == (True, True)
    shown.get_by_label("Search runs").fill("dpo-0042")
    shown.wait_for_function(rows_shown(1))
    shown.reload()
    shown.wait_for_function(rows_shown(1))
    assert shown.get_by_label("Search runs").input_value() == "dpo-0042"
    shown.get_by_label("Search runs").fill("")
    shown.get_by_label("failed 200").check()
    shown.wait_for_function("document.querySelector('#runs-table').textContent.includes('page 1 of 4')")
    assert shown.url == app.url("/?state=failed")


def test_runs_are_opened_and_ticked_in_their_table_and_a_sorted_one_stays_so(app: Any, open_page: Open) -> None:
    first, second = (write_run(app.home, experiment(number), "stopped", steps) for number, steps in ((0, 5), (1, 50)))
    shown = open_page(app.url("/"))
    shown.wait_for_function(rows_shown(2))
    cells = shown.locator("#runs-table [role=gridcell]")
    loss = shown.locator("#runs-table [role=columnheader]:has-text('Loss')").locator("visible=true").first
    loss.hover()
    loss.get_by_label("Open cell menu").click()
    shown.get_by_text("Sort descending").click()
    shown.wait_for_function(
        f"document.querySelectorAll('[role=gridcell][data-col=\"1\"]')[0].innerText === '{first.name}'"
    )
    cells.locator("nth=0").click()
    shown.wait_for_url(f"**/?ids={first.name}")
    shown.wait_for_selector("#runs-table [role=gridcell]:has-text('☑')")
    assert shown.locator("[role=gridcell][data-col='0']").all_inner_texts() == ["☑", "☐"]
    cells.locator("nth=0").click()
    shown.wait_for_url(app.url("/"))
    shown.wait_for_selector("#runs-table [role=gridcell]:has-text('☑')", state="detached")
    shown.keyboard.press("ArrowDown")
    shown.keyboard.press("Enter")
    shown.wait_for_url(f"**/?ids={second.name}")
    shown.keyboard.press("ArrowRight")
    shown.keyboard.press("Enter")
    shown.wait_for_url(f"**/run?id={second.name}")


def test_of_a_hundred_thousand_steps_five_hundred_points_are_drawn(app: Any, open_page: Open) -> None:
    path = write_run(app.home, experiment(1, steps=100_000), "finished", 100_000)
    shown = open_page(app.url(f"/run?id={path.name}"))
    shown.wait_for_selector(CURVE)
    assert shown.locator(CURVE).count() >= 8
    rendered = shown.evaluate("document.querySelector('.js-plotly-plot')._fullData.map((one) => one._length)")
    assert 300 < max(rendered) <= 500


def test_an_idle_page_asks_seldom_and_is_sent_nothing_anew(app: Any, open_page: Open) -> None:
    write_many(app.home, 20, steps=50)
    shown = open_page(app.url("/"))
    shown.wait_for_function(rows_shown(20))
    shown.wait_for_timeout(1_000)
    shown.evaluate("document.querySelector('#runs-table [role=gridcell]').dataset.mark = 'the same'")
    answers: list[int] = []
    times: list[float] = []

    def check_status(answer: Any) -> None:
        answers.append(len(answer.body()))
        times.append(time.monotonic())

    shown.on("response", check_status)
    while len(answers) < 5:
        shown.wait_for_timeout(100)
    assert times[-1] - times[0] > 4 * 2.5  # more than that between two, though one may have been late
    assert max(answers) < 4_000  # the table has several times as much
    assert shown.locator("#runs-table [role=gridcell][data-mark]").count() == 1


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_fit_and_are_readable(app: Any, open_page: Open, width: int, dark: bool) -> None:
    paths = _all_states(app.home)
    urls = ["/", "/?state=failed", "/about", "/run?id=no-such-run"]
    urls += [f"/run?id={path.name}" for path in paths.values()]
    urls += [
        f"/run?id={paths['finished'].name}&tab={tab}" for tab in ("log", "config", "samples", "environment", "events")
    ]
    shown = open_page(app.url("/about"), width=width, dark=dark)
    for url in urls:
        shown.goto(app.url(url))
        shown.wait_for_selector("h1")
        shown.wait_for_timeout(1_200)
        assert overflow(shown) == 0, url
        assert dim_texts(shown) == [], url


def _all_states(home: Path) -> dict[str, Path]:
    made = {
        state: write_run(home, experiment(number, name=state), said, 30, **status)
        for number, (state, said, status) in enumerate(
            [
                ("finished", "finished", {}),
                ("stopped", "stopped", {"checkpoint": 20}),
                ("failed", "failed", {"error": "RunError: step 3: loss is nan; lower the learning rate"}),
                ("lost", "running", {"pid": 1, "pid_started": 1, "host": "elsewhere", "heartbeat": {"wall": 0}}),
                ("queued", "queued", {}),
            ]
        )
    }
    run = RunDirectory(made["finished"])
    run.append_sample({"step": 30, "prompt": "Hi", "policy": "hello", "reference": "bye"})
    run.append_attempt({"time": "2026-01-01T00:00:00+00:00", "argv": ["nnxdsl", "run"], "devices": ["cpu:cpu"]})
    run.append_event({"event": "finished", "step": 30})
    run.log.write_text("2026-01-01T00:00:00+00:00  starting\n2026-01-01T00:00:01+00:00  ValueError: x\n")
    run.close()
    return made


def test_a_runs_words_never_run(app: Any, open_page: Open) -> None:
    path = write_run(app.home, experiment(0, notes=EVIL), "failed", 5, error=EVIL)
    run = RunDirectory(path)
    run.append_sample({"step": 4, "prompt": EVIL, "policy": EVIL, "reference": EVIL})
    run.append_event({"event": EVIL})
    run.log.write_text(f"2026-01-01T00:00:00+00:00  {EVIL}\n")
    run.close()
    (app.project / "experiments" / f"{'<img src=x onerror=boom()>'}.py").write_text("Experiment(")
    shown = open_page(app.url("/"))
    for url in ["/"] + [f"/run?id={path.name}&tab={tab}" for tab in ("", "log", "config", "samples", "events")]:
        shown.goto(app.url(url))
        shown.wait_for_selector("h1")
        shown.wait_for_timeout(1_200)
        assert shown.evaluate("window.boomed") is None
        assert shown.locator("main img").count() == 0
    assert "${boom(2)}{{boom(3)}}" in shown.content()


def test_the_keyboard_reaches_everything(app: Any, open_page: Open) -> None:
    path = write_run(app.home, experiment(0), "stopped", 5)
    shown = open_page(app.url("/"))
    shown.wait_for_function(rows_shown(1))
    _tab_to(shown, "document.activeElement.textContent === 'About'")
    shown.keyboard.press("Enter")
    shown.wait_for_url(app.url("/about"))
    shown.goto(app.url(f"/run?id={path.name}"))
    shown.wait_for_selector(f"h1:has-text('{path.name}')")
    _tab_to(shown, "document.activeElement.textContent.trim() === 'Delete'")
    shown.keyboard.press("Enter")
    field = shown.get_by_label(f"Type {path.name} to confirm")
    field.wait_for()
    _tab_to(shown, "['INPUT', 'TEXTAREA'].includes(document.activeElement.tagName)", most=2)
    shown.keyboard.type("another")
    shown.keyboard.press("Enter")
    shown.get_by_text(f"Type {path.name} to confirm.").wait_for()  # a notice
    assert path.exists()
    field.fill(path.name)
    shown.keyboard.press("Enter")
    shown.wait_for_url(app.url("/"))
    assert not path.exists()


def _tab_to(shown: Any, wanted: str, most: int = 60) -> None:
    for _ in range(most):
        shown.keyboard.press("Tab")
        if shown.evaluate(wanted):
            return
    raise AssertionError(f"{most} tabs did not reach {wanted}")
