"""The Data page: what `nnxdsl data` tells of recipes, runs and files, as text, and of nothing outside the project."""

from __future__ import annotations

import contextvars
import json
import re
import shutil
from typing import Any

import attrs
import pytest

from app.client import CLIENT
from app.pages import demo
from app.pages.data import page as data_page
from app.pages.data.facts import token_runs
from app.pages.new import form_texts
from app.processes.jobs import MOST_OF_A_CLIENT
from app.state import Site
from app.store.own_files import require_no_own_files
from app.store.sweeps import created
from app.view import EVERY
from nnxdsl import Data, Evaluation, RunError, Tokenizer, evolve, to_dict
from tests.app import native
from tests.app.conftest import ROOT
from tests.app.many import experiment, write_run
from tests.app.on_pages import EVIL
from tests.waiting import wait_until


def shown(site: Site, **query: str) -> dict[str, Any]:
    """The page when its child process has ended."""
    built = native.Built(data_page.Data, site)
    wait_until(lambda: "so far" not in built.shown(**query)["Markdown"], every_seconds=0.1)
    return built.shown(**query)


def test_the_rows_of_a_file_are_shown(site: Site) -> None:
    pairs = [
        {"prompt": "Say 1", "chosen": f"yes {EVIL}", "rejected": "no"},
        {"prompt": 1},
        {"prompt": "Say 2", "chosen": "same", "rejected": "same"},
    ]
    (site.settings.project / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    values = shown(site, file="pairs.jsonl")
    assert "**1 rows accepted** of pairs.jsonl" in values["Markdown"]
    assert values["Part"] == "data"
    by_timer = native.Built(data_page.Data, site).shown(json.dumps({"name": EVERY}), file="pairs.jsonl")
    assert by_timer["Part"] == "data"
    assert values["Dataframe"].to_dict("list") == {
        "what": ["read", "left out", "left out", "accepted"],
        "rows": [3, 1, 1, 1],
        "why": ["", "missing field", "identical", ""],
        "first": ["", "pairs.jsonl:2", "pairs.jsonl:3", ""],
    }
    assert values["Dataframe 1"].set_index("part").loc["chosen", "max"] == len(f"yes {EVIL}".encode()) + 1
    assert [trace.y for trace in values["Plot"].data] == [(1,)] * 4
    assert "<img" not in values["HTML"]
    assert "&lt;img" in values["HTML"]
    assert "chosen, loss" in values["HTML"]
    source = shown(site, file="pairs.jsonl", part="source")
    assert "in 2 rows, text" in source["Markdown"]
    assert source["Plot"] is None


def test_what_is_wrong_is_told(site: Site) -> None:
    assert "Shows what becomes of the rows" in shown(site)["Markdown"]
    gone = shown(site, file="gone.jsonl")
    assert "gone.jsonl" in gone["Markdown"]
    (site.settings.project / "out").symlink_to("/etc")
    for wrong in ("../x.jsonl", "/etc/passwd", "out/passwd", "--help"):
        assert "is outside of the project" in shown(site, file=wrong)["Markdown 1"], wrong
    for name in ("~/x.jsonl", "~root/x.jsonl"):  # the child process would expand it
        assert "is outside of the project" in shown(site, file=name)["Markdown 1"], name
    (site.settings.project / "linked.jsonl").symlink_to("/etc/passwd")
    assert "is outside of the project" in shown(site, file="link*.jsonl")["Markdown 1"]
    assert "cannot be read" in shown(site, file="a\0b")["Markdown 1"]
    assert "there is no run gone" in shown(site, of="run:gone")["Markdown 1"]
    assert "there is no" in shown(site, of="exp:gone")["Markdown 1"]


REFUSED = "is a file of the app itself"
NAMED = r"Whoever is signed in may name any file .* as data, tokenizer or model, and sees its rows"
OWN_FILES = r"own files in `HOME/\.app` are refused in all of these, by whatever path"


@pytest.fixture
def names(site: Site) -> list[str]:
    """Paths of files of the app itself, from the project: plain ones, by links, globs, folders, and absolute ones."""
    project, ours = site.settings.project, site.settings.app_directory
    ours.mkdir(parents=True, exist_ok=True)
    for name in ("session.key", "audit.jsonl"):
        (ours / name).write_text('{"text": "a secret"}\n')
    (project / "linked.jsonl").symlink_to(ours / "audit.jsonl")
    (project / "linked").symlink_to(ours)
    (project / "folder").mkdir()
    (project / "folder" / "rows.jsonl").symlink_to(ours / "audit.jsonl")
    (project / "saved").mkdir()
    (project / "saved" / "state.json").write_text('{"_data_files": [{"filename": "../runs/.app/audit.jsonl"}]}')
    plain = ["runs/.app", "runs/.app/session.key", "runs/.app/audit.jsonl", "./runs/../runs/.app/session.key"]
    links = ["linked.jsonl", "linked", "linked/audit.jsonl", "linked.*", "folder", "folder/*.jsonl", "saved"]
    return [*plain, *links, "runs/.app/*", "runs/.a*/*.jsonl", "**/.app/*.key", str(ours), str(ours / "session.key")]


def test_files_of_the_app_itself_are_not_read(site: Site, names: list[str]) -> None:
    for name in names:
        values = shown(site, file=name)
        assert REFUSED in values["Markdown 1"], name
        assert "secret" not in values["Markdown"], name
    assert REFUSED in shown(site, file="x.jsonl", tokenizer="runs/.app")["Markdown 1"]
    hub = shown(site, file="hf://runs/.app")  # datasets reads a directory of that name
    assert "hf://runs/.app: is a directory here" in hub["Markdown"]
    assert "secret" not in str(hub)


def test_no_experiment_names_a_file_of_the_app_itself(site: Site, names: list[str]) -> None:
    """As a draft shows its rows, and as a run or a sweep would train on them; the rows of the demo are no such file."""
    made = experiment(1)

    def refused(**changes: Any) -> None:
        changed = evolve(made, {name.replace("__", "."): value for name, value in changes.items()})
        draft = site.drafts.new(form_texts.texts_of(changed), to_dict(changed), "a draft")
        assert REFUSED in shown(site, of=f"draft:{draft.id}")["Markdown 1"], changes
        for start in (site.launcher.launch, site.launcher.enqueue):
            with pytest.raises(RunError, match=REFUSED):
                start(changed)

    for name in names:
        refused(data__path=name)
    key = "runs/.app/session.key"
    refused(data__path=("x.jsonl", key))
    refused(data=Data.Mixture({made.data: 1, attrs.evolve(made.data, path=key): 1}))
    refused(evaluation=Evaluation(data=attrs.evolve(made.data, path=key)))
    refused(model__tokenizer=Tokenizer.File("linked"))
    refused(model__tokenizer=Tokenizer.Bytes(chat_template="linked/audit.jsonl"))
    run = write_run(site.settings.home, evolve(made, {"data.path": "linked.jsonl"}), "finished", 3).name
    assert REFUSED in shown(Site(attrs.evolve(site.settings, read_only=True)), of=f"run:{run}")["Markdown 1"]
    with pytest.raises(RunError, match=REFUSED):
        created(site.settings, made, "data.path='x.jsonl', 'linked.jsonl'", zipped_values=False)
    assert not (site.settings.home / "sweeps").exists()
    assert list(site.launcher.launches()) == site.launcher.waiting() == []
    demo.written(site)
    require_no_own_files(site.settings, demo.experiment(site.settings.demo))


def test_an_experiment_is_no_file_of_rows(site: Site) -> None:
    """It would be imported, or name data outside of the project."""
    project, run = site.settings.project, write_run(site.settings.home, experiment(1), "finished", 3)
    (project / "own.py").write_text("raise SystemExit('executed')")
    (project / "own.json").write_text(json.dumps(to_dict(experiment(1))))
    for number, end in enumerate(("there", "gone")):
        (site.settings.home / end).symlink_to(write_run(project / "other", experiment(number), "finished", 3))
    shutil.rmtree((site.settings.home / "gone").resolve())
    for name in ("own.py", "own.json", f"runs/{run.name}", run.name, "there", "gone", "./there", f"{run.name}/../gone"):
        assert "has no rows, it is an experiment" in shown(site, file=name)["Markdown 1"], name


def test_a_read_only_app_shows_data_of_runs_and_recipes_alone(site: Site) -> None:
    (site.settings.project / "pairs.jsonl").write_text('{"text": "a secret"}\n')
    shared = Site(attrs.evolve(site.settings, read_only=True))
    assert "a read-only app shows the data of recipes and runs alone" in shown(shared, file="pairs.jsonl")["Markdown 1"]
    assert "Shows what becomes of the rows" in shown(shared, of="draft:x")["Markdown"]
    assert "there is no run gone" in shown(shared, of="run:gone")["Markdown 1"]
    shared.close()


def test_jobs_of_a_client_are_bounded(site: Site) -> None:
    """One client's jobs leave room for those of others."""
    for _ in range(2):
        site.jobs._slots.acquire()  # no child process gets on
    for number in range(MOST_OF_A_CLIENT):
        assert not site.jobs.start(f"{number}", ["-c", "print(1)"]).is_over
    with pytest.raises(RunError, match="8 computations of yours wait or run"):
        site.jobs.start("one more", ["-c", "print(1)"])
    assert site.jobs.start("0", ["-c", "print(1)"]).key == "0"  # what is there is shown
    for client in ("10.0.0.1", "10.0.0.2"):
        contextvars.copy_context().run(lambda one=client: (CLIENT.set(one), site.jobs.start(one, ["-c", "print(1)"])))
    site.jobs.cancel("0")
    site.jobs.start("one more", ["-c", "print(1)"])
    for _ in range(2):
        site.jobs._slots.release()


def test_the_guide_says_what_whoever_is_signed_in_may_name() -> None:
    text = " ".join(
        (ROOT / "docs" / "guides" / "app.md").read_text(encoding="utf-8").partition("Authentication\n")[2].split()
    )
    named, refused, limit = (
        re.search(pattern, text) for pattern in (NAMED, OWN_FILES, r"(\w+) computations \(plans, data\) of one")
    )
    assert named is not None
    assert refused is not None
    assert limit is not None
    assert limit[1] == {8: "Eight"}[MOST_OF_A_CLIENT]


def test_a_row_is_shown_as_text() -> None:
    run = {"part": EVIL, "text": f"{EVIL}\n" * 3000, "tokens": 1, "loss": True, "cut": False}
    html = token_runs([{"row": EVIL, "runs": [run, {**run, "cut": True}, {**run, "loss": False}]}])
    assert "<img" not in html
    assert "more characters" in html
    assert [html.count(f'<div class="{kind}">') for kind in ("loss", "truncated", "plain")] == [1, 1, 1]
