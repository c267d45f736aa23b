"""No request reaches a directory that is no run of the home, and no answer tells whether there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from app.page import Action, Ask
from app.pages import PAGES
from app.settings import Settings
from app.state import Site
from app.store.index import Index
from app.store.run_paths import FILES, run_path
from nnxdsl import NnxdslError, RunError
from tests.app.forged import SECRET, Outside
from tests.app.many import experiment, write_run


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    return Outside.under(tmp_path)


@pytest.fixture
def site(outside: Outside, tmp_path: Path) -> Iterator[Site]:
    site = Site.of(Settings(home=outside.home, project=tmp_path / "project"))
    yield site
    site.close()


def answered(site: Site, page: str, action: str, query: dict[str, str], payload: dict[str, object]) -> str:
    """All that a browser would be shown."""
    found = next(one for one in PAGES if one.name == page).actions[action]
    try:
        answer = (found.function if isinstance(found, Action) else found)(site, Ask(query, payload))
    except NnxdslError as error:
        return str(error)
    told = (answer.notice, answer.goto, answer.query, answer.copy)
    return "\n".join([*map(str, answer.regions.values()), *map(str, told)])


def test_no_question_reaches_beyond_the_home(site: Site, outside: Outside) -> None:
    before, listed = outside.snapshot(), sorted(path.name for path in outside.home.iterdir() if path.name[0] != ".")
    for run in outside.hostile():
        for page, action, query, payload in outside.questions(run):
            text = answered(site, page, action, query, payload)
            assert SECRET not in text, (page, action, query)
            assert "root:" not in text, (page, action, query)
    assert outside.snapshot() == before
    # Those with linked files may be put away, which moves the link; nothing else is gone, and nothing was started.
    left = sorted(path.name for path in outside.home.iterdir() if path.name[0] != ".")
    assert set(left) <= set(listed)
    assert {outside.inside, "link-there", "link-gone"} <= set(left)
    assert not list((outside.home / ".app").glob("launches/*"))


def test_no_answer_tells_whether_something_is_there(site: Site, outside: Outside) -> None:
    for there, gone in outside.ids():
        for one, other in zip(outside.questions(there), outside.questions(gone), strict=True):
            assert _without(answered(site, *one), there) == _without(answered(site, *other), gone), (one, gone)


def _without(text: str, run: str) -> str:
    """An answer with an id left out, however it is written there."""
    for form in (run, repr(run)[1:-1], quote(run), quote_plus(run), run[:100]):
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
