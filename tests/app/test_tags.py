"""Tags of runs: what may be one, how they are kept, how runs are found by them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.page import Ask
from app.pages import runs as runs_page
from app.pages.run import page as run_page
from app.settings import Settings
from app.state import Site
from app.store.tags import Tags, words_of
from nnxdsl import RunError
from tests.app.many import experiment, write_run


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site.of(Settings(home=tmp_path / "runs", project=tmp_path))
    yield site
    site.close()


def test_texts_become_tags() -> None:
    assert words_of(" good, v2  good\nlr:1e-4 ") == ("good", "v2", "lr:1e-4")
    assert words_of(" ") == ()
    with pytest.raises(RunError, match="'<img' is not a valid tag"):
        words_of("a <img src=x>")
    with pytest.raises(RunError, match="13 tags"):
        words_of(" ".join(f"t{n}" for n in range(13)))


def test_tags_are_kept_by_any_app_of_a_home(tmp_path: Path) -> None:
    path = tmp_path / ".app" / "tags.jsonl"
    mine, other = Tags(path), Tags(path)
    mine.set("a-1", ("x", "y"))
    assert other.of("a-1") == ("x", "y")
    other.set("b-2", ("z",))
    other.set("a-1", ("y",))
    assert (mine.of("a-1"), mine.of("b-2"), mine.used(["a-1", "b-2", "c-3"])) == (("y",), ("z",), ["y", "z"])
    with path.open("a") as file:
        file.write('{"run": "a-1", "ta')  # an app was killed here
    assert Tags(path).of("a-1") == ("y",)


def test_runs_are_tagged_and_found_by_their_tags(site: Site) -> None:
    first, second = (write_run(site.settings.home, experiment(number), "finished", 3).name for number in (0, 1))
    ask = Ask({"ids": f"{first},{second}"}, {"fields": {"tags": "night, lr:1e-4"}})
    assert runs_page.retag(site, ask).notice == "Tagged 2 runs."
    runs_page.retag(site, Ask({"ids": second}, {"fields": {"tags": "-night best"}}))
    assert (site.tags.of(first), site.tags.of(second)) == (("night", "lr:1e-4"), ("lr:1e-4", "best"))
    for query, there in (({"tag": "night"}, [first]), ({"q": "BEST"}, [second]), ({"tag": "lr:1e-4"}, [first, second])):
        html = runs_page.opened(site, Ask(query)).regions["list"]
        assert [run for run in (first, second) if f">{run}</a>" in html] == there
    assert runs_page.retag(site, Ask({}, {"fields": {"tags": "x"}})).bad
    answer = run_page.retag(site, Ask({"id": first}, {"fields": {"tags": "calm"}}))
    assert site.tags.of(first) == ("calm",)
    assert '/?tag=calm"' in answer.regions["tags"]
    with pytest.raises(RunError, match="not a valid tag"):
        run_page.retag(site, Ask({"id": first}, {"fields": {"tags": "<b>"}}))


def test_ticked_runs_are_put_away_together(site: Site) -> None:
    first, second = (write_run(site.settings.home, experiment(number), "stopped", 3).name for number in (0, 1))
    answer = runs_page.delete(site, Ask({"ids": f"{first},gone,{second}", "q": "dpo"}))
    assert answer.bad
    assert answer.query is not None
    assert "ids=gone" in answer.query
    assert not (site.settings.home / first).exists()
    assert (site.settings.home / second).exists()
    assert not runs_page.delete(site, Ask({"ids": second})).bad
    assert sorted(path.name.rpartition("-")[0] for path in (site.settings.home / ".trash").iterdir()) == [first, second]
