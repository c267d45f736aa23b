"""No request reaches a directory that is no run of the home, and no answer tells whether there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from app.components.markdown import plain
from app.page import GradioPage
from app.settings import Settings
from app.site import GRADIO_PAGES
from app.state import Site
from app.store.index import Index
from app.store.run_paths import FILES, run_path
from nnxdsl import RunError
from tests.app import native
from tests.app.forged import SECRET, Outside
from tests.app.many import experiment, write_run
from tests.app.on_native import everything

OF_RUNS = [page for page in GRADIO_PAGES if page.name in ("runs", "run", "compare", "about")]


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    return Outside.under(tmp_path)


@pytest.fixture
def site(outside: Outside, tmp_path: Path) -> Iterator[Site]:
    site = Site.of(Settings(home=outside.home, project=tmp_path / "project"))
    yield site
    site.close()


@pytest.mark.parametrize("page", OF_RUNS, ids=lambda page: page.name)
def test_no_function_of_a_page_reaches_beyond_the_home(site: Site, outside: Outside, page: GradioPage) -> None:
    before = outside.snapshot()
    built = native.Built(page, site)
    for run in outside.hostile():
        for query, acts in outside.queries(run):
            for text in everything(built, query, run, acts=acts):
                assert SECRET not in text, query
                assert "root:" not in text, query
    assert outside.snapshot() == before
    assert {outside.inside, "link-there", "link-gone"} <= {path.name for path in outside.home.iterdir()}
    assert not list((outside.home / ".app").glob("launches/*"))


@pytest.mark.parametrize("page", OF_RUNS, ids=lambda page: page.name)
def test_no_page_tells_whether_something_is_there(site: Site, outside: Outside, page: GradioPage) -> None:
    built = native.Built(page, site)
    for there, gone in outside.ids():
        for (one, acts), (other, _) in zip(outside.queries(there), outside.queries(gone), strict=True):
            texts = everything(built, one, "one", acts=acts), everything(built, other, "one", acts=acts)
            for text, same in zip(*texts, strict=True):
                assert _without(text, there) == _without(same, gone), (one, text)


def _without(text: str, run: str) -> str:
    """An answer with an id left out, however it is written there."""
    for form in (run, repr(run)[1:-1], quote(run), quote_plus(run), run[:100], plain(run), repr(plain(run))[1:-1]):
        text = text.replace(form, "RUN")
    return text


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
