"""The README's quickstart is a recipe, the Python of the first pages runs, and files and links that they name exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.doc_pages import ROOT, run_python, texts


def test_the_quickstart_is_the_recipe() -> None:
    recipe = (ROOT / "experiments" / "quickstart.py").read_text(encoding="utf-8")
    assert recipe.partition('"""\n\n')[2] == texts("README.md", "python")[0]
    short = run_python("README.md")["experiment"]
    assert (short.batch_size, short.epochs, short.optimizer.schedule.peak_lr) == (8, 1.0, 2e-4)


@pytest.mark.slow
def test_the_python_of_the_quickstart_page_runs() -> None:
    space = run_python("docs/quickstart.md")
    assert len(space["sweep"]) == 8
    assert set(space["state"].trainable) == set(space["program"].blueprint.trainable)


def run_quickstart(home: Path, *settings: str) -> list[dict[str, Any]]:
    """The rows of samples.jsonl of a run of the quickstart."""
    command = [sys.executable, "experiments/quickstart.py", "run", *settings, "--home", str(home), "--quiet"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return [json.loads(line) for line in next(home.glob("quickstart-*/samples.jsonl")).read_text().splitlines()]


@pytest.mark.extended
def test_the_quickstart_trains_and_answers(tmp_path: Path) -> None:
    rows = run_quickstart(tmp_path, "steps=4", "evaluation.every_steps=4")
    assert [row["step"] for row in rows if row["prompt"] == "What is the capital of France?"] == [0, 4]


@pytest.mark.slow
def test_the_quickstart_learns_the_answers_that_the_pages_show(tmp_path: Path) -> None:
    held_out = (ROOT / "experiments" / "data" / "quickstart_held_out.jsonl").read_text(encoding="utf-8").splitlines()
    answers = {
        question["content"]: answer["content"] for question, answer in (json.loads(row)["messages"] for row in held_out)
    }
    last = {row["prompt"]: row["policy"] for row in run_quickstart(tmp_path) if row["step"] == 250}
    assert len(last) == 3
    assert last == {prompt: answers[prompt] for prompt in last}
    for page in ("README.md", "docs/quickstart.md"):
        shown = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert all(answer.split()[-1] in shown for answer in last.values())


def test_the_error_that_it_shows_is_the_error_that_comes() -> None:
    shown = next(block for block in texts("docs/reference/command_line.md", "text") if block.startswith("$ python "))
    command, _, expected = shown.partition("\n")
    argv = command.removeprefix("$ python ").split()
    ended = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == expected


def test_every_file_that_the_architecture_names_is_there() -> None:
    tree = texts("docs/design/architecture.md", "text")[0]
    room = ""
    for line in tree.splitlines()[1:]:
        if match := re.match(r"  (\w+)/ ", line):
            room = match[1]
        for name in re.findall(r"\b\w+\.py\b", line):
            places = [ROOT / "nnxdsl" / name, ROOT / "experiments" / name, *(ROOT / "nnxdsl" / room).rglob(name)]
            assert any(place.is_file() for place in places), name
    page = (ROOT / "docs" / "design" / "architecture.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", page):
        assert (ROOT / "nnxdsl" / name).exists() or (ROOT / name).exists(), name


def _links() -> list[tuple[str, str]]:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"]
    return [
        (str(page.relative_to(ROOT)), link)
        for page in [*pages, *sorted((ROOT / "docs").rglob("*.md"))]
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
        if not re.match(r"https?:|mailto:", link)
    ]


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize(("page", "link"), _links())
def test_no_link_is_dead(page: str, link: str) -> None:
    path, _, anchor = link.partition("#")
    target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
    assert target.exists(), f"{page}: {link}"
    if anchor and target.suffix == ".md":
        assert anchor in _anchors(target), f"{page}: {link}"


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
