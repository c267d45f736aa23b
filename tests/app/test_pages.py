"""Every page in a real browser: by its URL, quickly, in every state of a run, at two widths and in both themes."""

from __future__ import annotations

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
    shown.wait_for_selector(f"#page-{page.name} .region")
    assert shown.title().endswith(f"{page.title} · nnxdsl")
    assert shown.locator(".nnx-page:visible").count() == 1
    assert overflow(shown) == 0


def requests_of(shown: Any) -> list[str]:
    """A list to which what the page asks for from now on is added, but for ticks."""
    found: list[str] = []

    def note(request: Any) -> None:
        if ".tick" not in (request.post_data or ""):
            found.append(request.url)

    shown.on("request", note)
    return found


def test_a_page_switch_costs_one_request_and_the_way_back_too(app: Any, open_page: Open) -> None:
    shown = open_page(app.url("/"))
    shown.wait_for_selector("#page-runs .region")
    asked = requests_of(shown)
    pages = [page for page in PAGES if page.in_navigation]
    for page in pages[1:]:
        asked.clear()
        shown.get_by_role("link", name=page.title, exact=True).click()
        shown.wait_for_selector(f"#page-{page.name} .region")
        assert shown.url == app.url(page.path)
        assert len(asked) == 1, asked
    for page in reversed(pages[:-1]):
        shown.go_back()
        shown.wait_for_selector(f"#page-{page.name}:visible")


def test_of_a_thousand_runs_a_hundred_are_drawn_and_all_are_searched(app: Any, open_page: Open) -> None:
    write_many(app.home, 1_000, steps=5)
    shown = open_page(app.url("/about"))
    shown.wait_for_selector("#page-about .region")
    shown.get_by_role("link", name="Runs", exact=True).click()
    shown.wait_for_selector("#page-runs tbody tr")
    assert shown.locator("#page-runs tbody tr").count() == 100
    assert "1,000 runs" in shown.locator("caption").first.text_content()
    shown.get_by_label("Search runs").fill("dpo-0042")
    shown.wait_for_function("document.querySelectorAll('#page-runs tbody tr').length === 1")
    shown.reload()
    shown.wait_for_selector("#page-runs tbody tr")
    assert shown.locator("#page-runs tbody tr").count() == 1
    assert shown.get_by_label("Search runs").input_value() == "dpo-0042"


def test_of_a_hundred_thousand_steps_five_hundred_points_are_drawn(app: Any, open_page: Open) -> None:
    path = write_run(app.home, experiment(1, steps=100_000), "finished", 100_000)
    shown = open_page(app.url("/about"))
    shown.wait_for_selector("#page-about .region")
    shown.evaluate(f"window.nnx.go('/run?id={path.name}')")
    shown.wait_for_selector("#page-run svg .series")
    points = "[...document.querySelectorAll('#page-run .series')].map((one) => one.points.numberOfItems)"
    assert 300 < max(shown.evaluate(points)) <= 500
    shown.locator("[data-chart]").first.hover()
    assert "step" in shown.locator(".reading").first.text_content()


def test_an_idle_page_asks_seldom_and_is_sent_nothing_anew(app: Any, open_page: Open) -> None:
    write_many(app.home, 20, steps=50)
    shown = open_page(app.url("/"))
    shown.wait_for_selector("#page-runs tbody tr")
    shown.wait_for_timeout(1_000)
    shown.evaluate("document.querySelector('#page-runs tbody tr').dataset.mark = 'the same'")
    answers: list[int] = []
    shown.on("response", lambda answer: answers.append(len(answer.body())))
    shown.wait_for_timeout(13_000)
    assert 2 <= len(answers) <= 4  # one in four seconds
    assert max(answers) < 2_000  # a row of the table has as much
    assert shown.locator("#page-runs tbody tr[data-mark]").count() == 1


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
    shown.wait_for_selector("#page-about .region")
    for url in urls:
        shown.evaluate(f"window.nnx.go({url!r})")
        shown.wait_for_timeout(450)
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
        shown.wait_for_selector(".nnx-page:visible .region h1, .nnx-page:visible .region table")
        shown.wait_for_timeout(300)
        assert shown.evaluate("window.boomed") is None
        assert shown.locator(".region img").count() == 0
    assert "${boom(2)}{{boom(3)}}" in shown.content()


def test_the_keyboard_reaches_everything(app: Any, open_page: Open) -> None:
    path = write_run(app.home, experiment(0), "stopped", 5)
    shown = open_page(app.url("/"))
    shown.wait_for_selector("#page-runs tbody tr")
    _tab_to(shown, "document.activeElement.textContent === 'About'")
    shown.keyboard.press("Enter")
    shown.wait_for_selector("#page-about .region")
    shown.wait_for_function("document.activeElement.tagName === 'H1'")
    shown.goto(app.url(f"/run?id={path.name}"))
    shown.wait_for_selector("#page-run h1")
    _tab_to(shown, "document.activeElement.textContent === 'Delete'")
    shown.keyboard.press("Enter")
    dialog = shown.get_by_role("dialog")
    assert dialog.get_by_role("button", name="Delete").is_disabled()
    shown.keyboard.press("Escape")
    shown.wait_for_function("document.activeElement.textContent === 'Delete'")
    shown.keyboard.press("Enter")
    shown.keyboard.type(path.name)
    shown.keyboard.press("Enter")
    shown.wait_for_selector("#page-runs:visible")
    assert not path.exists()


def _tab_to(shown: Any, wanted: str, most: int = 60) -> None:
    for _ in range(most):
        shown.keyboard.press("Tab")
        if shown.evaluate(wanted):
            return
    raise AssertionError(f"{most} tabs did not reach {wanted}")
