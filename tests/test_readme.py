"""The README's quickstart is a recipe, the Python of the first pages runs, and files and links that they name exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def run(page: str) -> dict[str, Any]:
    """The names that the Python of a page defines."""
    space: dict[str, Any] = {"__name__": "page"}
    for source in blocks(page, "python"):
        exec(compile(source, page, "exec"), space)
    return space


def test_the_quickstart_is_the_recipe() -> None:
    recipe = (ROOT / "experiments" / "quickstart.py").read_text(encoding="utf-8")
    assert recipe.partition('"""\n\n')[2] == blocks("README.md", "python")[0]
    assert run("README.md")["experiment"].name == "quickstart"


def test_the_python_of_the_quickstart_page_runs() -> None:
    space = run("docs/quickstart.md")
    assert len(space["sweep"]) == 8
    assert set(space["state"].trainable) == set(space["program"].blueprint.trainable)


def test_an_objective_of_ones_own_trains(tmp_path: Path) -> None:
    objective, experiment = blocks("docs/tutorials/your_own_objective.md", "python")
    (tmp_path / "dpop.py").write_text(objective, encoding="utf-8")
    file = tmp_path / "train.py"
    file.write_text(f"{experiment}\nif __name__ == '__main__':\n    experiment.main()\n", encoding="utf-8")
    words = [sys.executable, str(file), "run", "steps=2", "--home", str(tmp_path / "runs"), "--quiet"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert len(next((tmp_path / "runs").glob("dpop-*/metrics.jsonl")).read_text().splitlines()) == 2


def test_the_quickstart_trains_and_answers(tmp_path: Path) -> None:
    words = [sys.executable, "experiments/quickstart.py", "run", "steps=4", "evaluation.every_steps=4"]
    ended = subprocess.run(
        [*words, "--home", str(tmp_path), "--quiet"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "What is the capital of Germany?" in next(tmp_path.glob("quickstart-*/samples.jsonl")).read_text()


def test_the_error_that_it_shows_is_the_error_that_comes() -> None:
    shown = next(block for block in blocks("docs/reference/command_line.md", "text") if block.startswith("$ python "))
    command, _, expected = shown.partition("\n")
    words = command.removeprefix("$ python ").split()
    ended = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == expected


def test_every_file_that_the_architecture_names_is_there() -> None:
    tree = blocks("docs/design/architecture.md", "text")[0]
    room = ""
    for line in tree.splitlines()[1:]:
        if found := re.match(r"  (\w+)/ ", line):
            room = found[1]
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
