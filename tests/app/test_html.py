"""Nothing that a run supplied becomes markup."""

from __future__ import annotations

import doctest
from pathlib import Path
from types import ModuleType

import pytest

from app import html, words
from app.html import Html, join, link, tag
from app.page import Ask
from app.pages.run.page import opened as run_opened
from app.pages.runs import opened as runs_opened
from app.settings import Settings
from app.state import Site
from nnxdsl.runs.run_dir import RunDirectory
from tests.app.many import experiment, write_run

EVIL = '<img src=x onerror="alert(1)">${alert(2)}{{alert(3)}}'


@pytest.fixture
def site(tmp_path: Path):
    site = Site.of(Settings(home=tmp_path / "runs", project=tmp_path, read_only=True))
    yield site
    site.close()


@pytest.mark.parametrize("module", [html, words])
def test_examples_hold(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


def test_text_is_escaped_everywhere() -> None:
    assert "<img" not in tag("p", EVIL, [EVIL, (EVIL,)], title=EVIL, data_x={"a": EVIL})
    assert "<img" not in join(EVIL, EVIL, sep=EVIL)
    assert '"' not in link("/run", id=EVIL)
    assert tag("p", tag("b", "x")) == "<p><b>x</b></p>"
    assert isinstance(join("a"), Html)


@pytest.mark.parametrize("tab", ["", "log", "config", "samples", "environment", "events"])
def test_a_runs_own_words_are_text_on_every_page(site: Site, tab: str) -> None:
    path = write_run(site.settings.home, experiment(0, notes=EVIL), "failed", 5, error=EVIL, stage=EVIL)
    run = RunDirectory(path)
    run.append_sample({"step": 4, "prompt": EVIL, "policy": EVIL, "reference": EVIL})
    run.append_event({"event": EVIL, EVIL: EVIL})
    run.append_attempt({"time": EVIL, "argv": [EVIL], "cwd": EVIL, "devices": [EVIL], "git": {"commit": EVIL}})
    run.log.write_text(f"2026-01-01T00:00:00+00:00  {EVIL}\nValueError: {EVIL}\n")
    run.append_metrics({"step": 9, EVIL: 1.0})
    shown = "".join(run_opened(site, Ask({"id": path.name, "tab": tab, "all": "1"})).regions.values())
    assert "onerror" in shown
    assert "<img" not in shown
    assert "<img" not in "".join(runs_opened(site, Ask({"q": EVIL})).regions.values())


@pytest.mark.parametrize("query", [{"id": EVIL}, {"id": "../etc"}, {"id": ".app"}, {"id": "x/../y"}, {}])
def test_names_that_are_none_lead_nowhere(site: Site, query: dict[str, str]) -> None:
    shown = "".join(run_opened(site, Ask(query)).regions.values())
    assert "<img" not in shown
    assert "Choose one" in shown or "There is no run" in shown
