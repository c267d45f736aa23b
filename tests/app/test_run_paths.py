"""No request reaches a directory that is no run of the home, and no answer tells whether there is one."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

from app import site as site_module
from app.markup import plain
from app.pages import system
from app.processes import usage
from app.settings import Settings
from app.state import Site
from app.store.index import Index
from app.store.run_paths import FILES, run_path
from nnxdsl import RunError
from tests.app import native
from tests.app.forged import SECRET, Outside
from tests.app.many import experiment, write_run


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    return Outside.under(tmp_path)


@pytest.fixture
def site(outside: Outside, tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "project").mkdir()
    site = Site(Settings(home=outside.home, project=tmp_path / "project"))
    yield site
    site.close()


@pytest.fixture
def blocks(site: Site) -> Any:
    """The whole app."""

    async def build() -> Any:  # without a running loop gradio makes several, and closes none
        return site_module.build(site)

    return asyncio.run(build())


@pytest.mark.parametrize(
    "step", [60, pytest.param(5, marks=pytest.mark.extended), pytest.param(1, marks=pytest.mark.slow)]
)
def test_no_request_reaches_beyond_the_home(site: Site, outside: Outside, blocks: Any, step: int) -> None:
    before = outside.snapshot()
    asked = 0
    for run in outside.hostile()[::step]:
        for query, writes in outside.queries(run):
            for name, text in native.answers(blocks, query, run, writes=writes):
                asked += 1
                assert SECRET not in text, (name, query)
                assert "root:" not in text, (name, query)
                assert "Internal error" not in text, (name, query, text)
    assert asked > 3_000 / step
    assert outside.snapshot() == before
    assert {outside.inside, "link-there", "link-gone"} <= {path.name for path in outside.home.iterdir()}
    assert not list((outside.home / ".app").glob("launches/*"))


@pytest.mark.extended
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_no_answer_tells_whether_something_is_there(
    site: Site, outside: Outside, blocks: Any, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    for name in ("SECONDS", "BACKGROUND_SECONDS"):
        monkeypatch.setattr(usage, name, 1e9)  # the machine is measured once
    monkeypatch.setattr(system, "disk", functools.cache(usage.disk))
    for _ in range(2):
        site.jobs._slots.acquire()  # no child process gets on, so that the same is told of the run of the home
    for existing, gone in outside.ids()[::step]:
        for (query, writes), (other, _) in zip(outside.queries(existing), outside.queries(gone), strict=True):
            actual = native.answers(blocks, query, existing, writes=writes, text="one")
            for (name, text), (_, expected) in zip(
                actual, native.answers(blocks, other, gone, writes=writes, text="one"), strict=True
            ):
                assert _without(text, existing) == _without(expected, gone), (name, query)


def _without(text: str, run: str) -> str:
    """An answer with an id left out, however it is written there."""
    forms = (run, repr(run)[1:-1], quote(run), quote_plus(run), run[:100], plain(run), plain(run[:100]), escape(run))
    for form in (*forms, plain(repr(run)[1:-1]), escape(repr(run))[6:-6], str(Path(run)), json.dumps(run)[1:-1]):
        text = text.replace(form, "RUN")
    return re.sub(r"foreign-[0-9a-f]*", "NAME", text)  # where an id is cut


def test_an_id_is_a_directory_of_the_home_itself(outside: Outside) -> None:
    assert run_path(outside.home, outside.inside) == outside.home / outside.inside
    assert run_path(outside.home, "not-made-yet") == outside.home / "not-made-yet"
    for run in outside.hostile():
        with pytest.raises(RunError):
            run_path(outside.home, run)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_run_whose_files_are_links_is_shown_as_damaged_and_not_read(tmp_path: Path, name: str) -> None:
    path = write_run(tmp_path / "runs", experiment(0), "finished", 3)
    index = Index(tmp_path / "runs")
    if (path / name).is_dir():
        (path / name).rmdir()
    elif (path / name).exists():
        (path / name).unlink()
    (path / name).symlink_to(tmp_path / "elsewhere")
    (row,) = index.rows()
    problem = f"{row.id}: {name} is a link, which the app does not follow; put the file itself there"
    assert (row.state, row.problem) == ("damaged", problem)
