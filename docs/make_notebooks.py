"""Notebooks of docs/tutorials: `python docs/make_notebooks.py [DIRECTORY]` writes them, and the site has them.

A block with a title becomes a cell that writes the file, `python` a cell, each command of a `console` block a cell of
its own; the outputs that a page shows are those of the cells. All else is text.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode, v4

TUTORIALS = Path(__file__).parent / "tutorials"
FENCE = re.compile(r"```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)```\n", re.DOTALL)
SETUP = """\
import os, tempfile

os.chdir(tempfile.mkdtemp())  # the empty directory of this tutorial
os.environ["TTY_COMPATIBLE"] = "0"  # commands print lines, no bars"""


def notebook(page: str) -> NotebookNode:
    """The notebook of a page."""
    cells: list[NotebookNode] = []
    before = 0
    for block in FENCE.finditer(page):
        _add_text(cells, page[before : block.start()])
        before = block.end()
        language, title, text = block.groups()
        if title is not None and language != "text":
            _add_code(cells, f"%%writefile {title}\n{text}")
        elif language == "python":
            _add_code(cells, text)
        elif language == "console":
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, _, shown = part.partition("\n")
                _add_code(cells, f"%%sh --no-raise-error\n{command}", shown)
        elif language == "text" and cells[-1].cell_type == "code" and not cells[-1].outputs:
            cells[-1].outputs = _printed(text)
        else:
            _add_text(cells, block[0])
    _add_text(cells, page[before:])
    cells.insert(1, v4.new_code_cell(SETUP))
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"  # those of nbformat are random
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return v4.new_notebook(cells=cells, metadata=metadata)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Writes the notebook of a tutorial beside its page of the site, with a link to it; called by mkdocs."""
    if not page.file.src_uri.startswith("tutorials/"):
        return markdown
    file = Path(config.site_dir) / page.file.dest_uri
    file = file.with_name(f"{Path(page.file.src_uri).stem}.ipynb")
    file.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook(markdown), file)
    title, _, rest = markdown.partition("\n")
    return f'{title}\n\n<a href="{file.name}" download>This page as a notebook</a>\n{rest}'


def _add_text(cells: list[NotebookNode], text: str) -> None:
    if text.strip():  # pages of docs/ are not where the notebook is: their titles stay
        cells.append(v4.new_markdown_cell(re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", text.strip())))


def _add_code(cells: list[NotebookNode], source: str, shown: str = "") -> None:
    cells.append(v4.new_code_cell(source.strip(), outputs=_printed(shown)))


def _printed(text: str) -> list[NotebookNode]:
    return [v4.new_output("stream", name="stdout", text=text)] if text else []


if __name__ == "__main__":
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "notebooks")
    directory.mkdir(exist_ok=True)
    for tutorial in sorted(TUTORIALS.glob("*.md")):
        nbformat.write(notebook(tutorial.read_text(encoding="utf-8")), directory / f"{tutorial.stem}.ipynb")
