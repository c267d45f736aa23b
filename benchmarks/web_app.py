"""What the web app costs: start, page switch, a list of 5,000 runs, an idle open page, 100,000 steps drawn.

    python benchmarks/web_app.py [--json FILE]

Serves directories that it makes in a temporary place and looks at them with Chromium, as a person would: a time ends
when what was asked for can be seen. Needs the extra `browser` and Chromium; nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.app.browser import launch
from tests.app.conftest import RunningApp, with_token, write_project
from tests.app.many import experiment, write_many, write_run

PAGES = ("New run", "Compare", "Layout", "Outputs", "About", "Runs")
ROWS = "#runs-table [role=gridcell]"
CURVE = ".js-plotly-plot .scatterlayer .trace"
IDLE_SECONDS = 60
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measures, and prints a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    asked = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        chromium = launch(playwright)
        for measure in (start, switches, many_runs, idle, long_run):
            app = RunningApp(write_project(Path(place) / measure.__name__), {**os.environ, "JAX_PLATFORMS": "cpu"})
            try:
                figures |= measure(app, chromium)
            finally:
                if app.child is not None:
                    app.end()
    for name, value in figures.items():
        print(f"{name:58} {value:8.3f}", flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps(figures, indent=2) + "\n")


def start(app: RunningApp, chromium: Any) -> dict[str, float]:
    """Seconds until the first page can be used: with nothing in the page cache where that may be emptied, and again."""
    result: dict[str, float] = {}
    for name in ("cold", "again"):
        is_cold = name == "cold" and _forget()
        began = time.perf_counter()
        app.start()
        answers = time.perf_counter() - began
        page = opened(chromium, app.url("/"))
        page.get_by_role("button", name="Start a tiny DPO run").wait_for()
        label = "start, page cache empty" if is_cold else f"start, {name}"
        result |= {f"{label}: it answers, s": answers, f"{label}: a page can be used, s": time.perf_counter() - began}
        page.context.close()
        app.end()
    return result


def _forget() -> bool:
    """Has the system forget the files that it has read; False where it may not be told to."""
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
    except OSError:
        return False
    return True


def switches(app: RunningApp, chromium: Any) -> dict[str, float]:
    """Seconds from a click on a page's name to its content, in a window that has not shown it yet, and in one that has.

    Of each page the median of five windows; the slowest page's is the figure. The app as a whole has shown each page
    once before, as one that stands open all day has.
    """
    write_many(app.home, 20)
    app.start()
    took: dict[str, list[list[float]]] = {"first": [], "again": []}
    for window in range(6):
        page = opened(chromium, app.url("/"))
        page.wait_for_selector(ROWS)
        for when in ("first", "again"):
            times = [_switch(page, name) for name in PAGES]
            if window > 0:
                took[when].append(times)
        page.context.close()
    result: dict[str, float] = {}
    for when, rounds in took.items():
        medians = dict(zip(PAGES, (statistics.median(times) for times in zip(*rounds, strict=True)), strict=True))
        slowest = max(medians, key=lambda name: medians[name])
        result[f"page switch, {when} (slowest: {slowest}), s"] = medians[slowest]
    return result


def _switch(page: Any, name: str) -> float:
    """Seconds until the page of that name is what is seen, with its heading."""
    link = page.locator("header.top nav").get_by_role("link", name=name, exact=True)
    shown = f"document.title.endsWith('{name} · nnxdsl') && document.querySelector('h1')?.checkVisibility()"
    return timed(lambda: (link.click(), page.wait_for_function(shown)))


def many_runs(app: RunningApp, chromium: Any) -> dict[str, float]:
    """Seconds until a list of 5,000 runs stands there: the first time, and when its files were read before."""
    write_many(app.home, 5_000)
    app.start()
    result: dict[str, float] = {}
    for when in ("first look", "in another window"):
        page = opened(chromium, app.url("/about"))
        page.wait_for_selector("h1")

        def wait_for_page(page: Any = page) -> None:
            page.get_by_role("link", name="Runs", exact=True).click()
            page.wait_for_function("document.querySelector('#runs-table [role=grid]')?.ariaRowCount === '51'")

        result[f"5,000 runs, {when}, s"] = timed(wait_for_page)
        page.context.close()
    return result


def idle(app: RunningApp, chromium: Any) -> dict[str, float]:
    """The share of a core that the app takes for one open page that nobody touches."""
    write_many(app.home, 20)
    path = write_run(app.home, experiment(99, steps=1_000), "finished", 1_000)
    app.start()
    result: dict[str, float] = {}
    for name, url in (("list of 20 runs", "/"), ("a finished run", f"/run?id={path.name}")):
        page = opened(chromium, app.url(url))
        page.wait_for_selector(ROWS if url == "/" else CURVE)
        time.sleep(5)
        before = cpu_seconds(app)
        time.sleep(IDLE_SECONDS)
        result[f"idle, {name}: share of a core, %"] = 100 * (cpu_seconds(app) - before) / IDLE_SECONDS
        page.context.close()
    return result


def long_run(app: RunningApp, chromium: Any) -> dict[str, float]:
    """Seconds until the curves of 100,000 logged steps are drawn."""
    first, second = (write_run(app.home, experiment(n, steps=100_000), "finished", 100_000) for n in (1, 2))
    app.start()
    page = opened(chromium, app.url("/about"))
    page.wait_for_selector("h1")

    def wait_for_page(run: Path) -> Callable[[], None]:
        def act() -> None:
            page.goto(app.url(f"/run?id={run.name}"))
            page.wait_for_selector(CURVE)

        return act

    size = (first / "metrics.jsonl").stat().st_size / 1e6
    return {
        f"100,000 steps ({size:.0f} MB), first look, s": timed(wait_for_page(first)),
        "100,000 steps, another run's, s": timed(wait_for_page(second)),
        "100,000 steps, again, s": timed(wait_for_page(first)),
    }


def timed(act: Callable[[], object]) -> float:
    """Seconds that something takes."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def opened(chromium: Any, url: str) -> Any:
    """A page in a context of its own."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(with_token(url))
    return page


def cpu_seconds(app: RunningApp) -> float:
    """CPU time of the app's process so far."""
    assert app.child is not None
    fields = Path(f"/proc/{app.child.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


if __name__ == "__main__":
    main()
