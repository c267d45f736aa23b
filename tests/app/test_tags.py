"""Tags of runs: what may be one, how they are kept, how runs are found by them."""

from __future__ import annotations

from pathlib import Path

import gradio as gr
import pytest

from app.pages import about as about_page
from app.pages import demo
from app.pages import runs as runs_page
from app.pages.run import page as run_page
from app.settings import Settings
from app.state import Site
from app.store.tags import Tags, parse_tags
from nnxdsl import RunError
from tests.app import native
from tests.app.many import experiment, write_run
from tests.app.on_native import built_buttons, click, updates


def test_texts_become_tags() -> None:
    assert parse_tags(" good, v2  good\nlr:1e-4 ") == ("good", "v2", "lr:1e-4")
    assert parse_tags(" ") == ()
    with pytest.raises(RunError, match="'<img' is not a valid tag"):
        parse_tags("a <img src=x>")
    with pytest.raises(RunError, match="13 tags"):
        parse_tags(" ".join(f"t{n}" for n in range(13)))


def test_tags_are_kept_by_any_app_of_a_home(tmp_path: Path) -> None:
    path = tmp_path / ".app" / "tags.jsonl"
    mine, other = Tags(path), Tags(path)
    mine.set("a-1", ("x", "y"))
    assert other.of("a-1") == ("x", "y")
    other.set("b-2", ("z",))
    other.set("a-1", ("y",))
    assert (mine.of("a-1"), mine.of("b-2"), mine.by_run()) == (("y",), ("z",), {"a-1": ("y",), "b-2": ("z",)})
    with path.open("a") as file:
        file.write('{"run": "a-1", "ta')  # an app was killed here
    assert Tags(path).of("a-1") == ("y",)


def test_runs_are_tagged_and_found_by_their_tags(site: Site) -> None:
    first, second = (write_run(site.settings.home, experiment(number), "finished", 3).name for number in (0, 1))
    both = {"ids": f"{first},{second}"}
    assert runs_page.retag(site, both, "night, lr:1e-4").notice == "Tagged 2 runs."
    runs_page.retag(site, {"ids": second}, "-night best")
    assert (site.tags.of(first), site.tags.of(second)) == (("night", "lr:1e-4"), ("lr:1e-4", "best"))
    built = native.Built(runs_page.Runs, site)
    for query, other in (({"tag": "night"}, [first]), ({"q": "BEST"}, [second]), ({"tag": "lr:1e-4"}, [first, second])):
        assert sorted(built.shown(**query)["Dataframe"]["Run"]) == other
    assert [value for _, value in updates(built)["Tag"]["choices"]] == ["", "best", "lr:1e-4", "night"]
    with pytest.raises(RunError, match="Tick runs"):
        runs_page.retag(site, {}, "x")
    run_page.retag(site, {"id": first}, "calm")
    assert site.tags.of(first) == ("calm",)
    shown = native.Built(run_page.Run, site).shown(id=first)
    assert "Tags: [calm](/?tag=calm)" in shown.values()
    with pytest.raises(RunError, match="not a valid tag"):
        run_page.retag(site, {"id": first}, "<b>")
    with pytest.raises(RunError, match="There is no run"):
        run_page.retag(site, {"id": "gone"}, "a")


def test_ticked_runs_are_put_away_together(site: Site) -> None:
    first, second = (write_run(site.settings.home, experiment(number), "stopped", 3).name for number in (0, 1))
    done = runs_page.delete(site, {"ids": f"{first},gone,{second}", "q": "dpo"})
    assert done.is_problem
    assert done.query == {"ids": f"gone,{second}"}
    assert "1 were deleted before it" in done.notice
    assert not (site.settings.home / first).exists()
    assert (site.settings.home / second).exists()
    done = runs_page.delete(site, {"ids": second})
    assert (done.is_problem, done.query) == (False, {"ids": ""})
    assert sorted(path.name.rpartition("-")[0] for path in (site.settings.home / ".trash").iterdir()) == [first, second]


def test_what_is_deleted_has_to_be_typed(site: Site) -> None:
    run = write_run(site.settings.home, experiment(0), "stopped", 3).name
    other = write_run(site.settings.home, experiment(1), "stopped", 3).name
    for page, query, name in (
        (runs_page.Runs, {"ids": f"{run},{other}"}, "2 runs"),
        (runs_page.Runs, {"ids": run}, run),
        (run_page.Run, {"id": other}, other),
    ):
        built = native.Built(page, site)
        with pytest.raises(gr.Error, match=f"Type {name} to confirm"):
            click(built, "Delete", "x", **query, confirm="delete")
        assert (site.settings.home / other).exists()
    click(built, "Delete", other, id=other, confirm="delete")
    assert (site.settings.home / run).exists()
    assert not (site.settings.home / other).exists()


def test_a_read_only_app_has_no_actions_that_write(tmp_path: Path) -> None:
    home = tmp_path / "runs"
    ids = {state: write_run(home, experiment(n), state, 3).name for n, state in enumerate(("stopped", "failed"))}
    names: dict[bool, set[str]] = {}
    for read_only in (False, True):
        site = Site(Settings(home=home, project=tmp_path, read_only=read_only))
        built = [native.Built(page, site) for page in (runs_page.Runs, run_page.Run, about_page.About)]
        names[read_only] = set().union(*map(built_buttons, built))
        assert native.Built(runs_page.Runs, site).shown()["Dataframe"].shape[0] == len(ids)
        site.close()
    writing = {
        "Stop and save",
        "Kill",
        "Delete",
        "Resume",
        "Start again",
        "Remove from the queue",
        "Tag",
        "Save",
        "Clone",
    }
    writing |= {"Edit", "Clone with a fix", "New run", "Clear drafts and plans", demo.START}
    assert writing <= names[False]
    assert not writing & names[True]
    assert {"Compare", "Layout", "Outputs", "Download"} <= names[True]
