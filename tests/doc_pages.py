"""Code blocks of documentation pages: extracted, run in order, and compared with the outputs that a page shows.

A page's fenced blocks mean:

- a block with `title="FILE"` is written to FILE;
- `python` runs in one namespace for the whole page; a `text` block right behind it shows what it prints;
- `console` holds commands (`$ ...`) and their output. `nnxdsl` and `python` run in this process, others in a shell;
- `sh` and other languages are not run.

In shown output, `...` stands for any text. Decimal numbers of training may differ by 5 %, as they do between machines.
`NNXDSL_UPDATE_DOCS=1` writes outputs that have no line `...` anew.
"""

from __future__ import annotations

import contextlib
import glob
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from nnxdsl import cli
from nnxdsl.config.objectives.reward import functions
from nnxdsl.terminal import display

ROOT = Path(__file__).parent.parent
UPDATE = bool(os.environ.get("NNXDSL_UPDATE_DOCS"))
FENCE = re.compile(r"```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?[^\n]*\n(?P<text>.*?)```", re.DOTALL)
TOLERANCE = 0.05
"""Of decimal numbers that training prints."""
DECIMAL = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


@attrs.frozen
class Block:
    """A fenced block: its language, its file's name or None, its text, and where the text is in the page."""

    language: str
    title: str | None
    text: str
    span: tuple[int, int]


def blocks(page: str | Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    result = FENCE.finditer((ROOT / page).read_text(encoding="utf-8"))
    return [Block(match["language"], match["title"], match["text"], match.span("text")) for match in result]


def texts(page: str | Path, language: str) -> list[str]:
    """The text of each block of one language."""
    return [block.text for block in blocks(page) if block.language == language]


def run_python(page: str | Path) -> dict[str, Any]:
    """The namespace after the `python` blocks of a page have run."""
    namespace: dict[str, Any] = {"__name__": "page"}
    for source in texts(page, "python"):
        exec(compile(source, str(page), "exec"), namespace)
    return namespace


def same_output(shown: str, printed: str, tolerance: float = 0.0) -> bool:
    """Whether an output is as shown, but for `...`, the lengths of blanks, and the tolerance of decimal numbers."""
    pattern, numbers = "", []
    for part in re.split(rf"(\.\.\.|\s+|{DECIMAL.pattern})", shown.strip()):
        if part == "...":
            pattern += ".*?"
        elif DECIMAL.fullmatch(part):
            pattern += f"({DECIMAL.pattern})"
            numbers.append(float(part))
        else:
            pattern += r"\s+" if part and not part.strip() else re.escape(part)
    match = re.fullmatch(pattern, printed.strip(), re.DOTALL)
    return match is not None and [float(number) for number in match.groups()] == pytest.approx(
        numbers, rel=tolerance, abs=0
    )


def check_page(page: Path) -> None:
    """Runs the `console` blocks of a page in this directory and compares outputs, numbers exactly."""
    text, shift = page.read_text(encoding="utf-8"), 0
    for block in blocks(page):
        if block.language == "console":
            shown = "".join(_console(block.text, page.name, 0.0))
            text, shift = _replaced(text, block, shown, shift)
    if UPDATE:
        page.write_text(text, encoding="utf-8")


def _replaced(text: str, block: Block, new: str, shift: int) -> tuple[str, int]:
    """A page with another text of one block, and by how much later blocks are moved."""
    start, end = (index + shift for index in block.span)
    return text[:start] + new + text[end:], shift + len(new) - len(block.text)


def run_page(page: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs every block of a page in a directory and compares outputs."""
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.setenv("COLUMNS", "100")
    rewards, modules = dict(functions), set(sys.modules)
    namespace: dict[str, Any] = {"__name__": "page"}
    printed, text, shift = "", page.read_text(encoding="utf-8"), 0
    try:
        for block in blocks(page):
            shown = block.text
            if block.title is not None:
                Path(block.title).write_text(block.text, encoding="utf-8")
            elif block.language == "python":
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile(block.text, str(page), "exec"), namespace)
                printed = out.getvalue()
            elif block.language == "text":
                shown = _checked(block.text, printed, page.name, TOLERANCE)
            elif block.language == "console":
                shown = "".join(_console(block.text, page.name, TOLERANCE))
            text, shift = _replaced(text, block, shown, shift)
    finally:
        functions.clear()
        functions.update(rewards)
        for name in set(sys.modules) - modules:
            if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(directory):
                del sys.modules[name]
    if UPDATE:
        page.write_text(text, encoding="utf-8")


def _console(text: str, context: str, tolerance: float) -> Iterator[str]:
    for part in re.split(r"^(?=\$ )", text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        printed = _printed(command.removeprefix("$ "))
        yield f"{command}\n{_checked(shown, printed, f'{context}: {command}', tolerance)}"


def _checked(shown: str, printed: str, context: str, tolerance: float) -> str:
    """What a page is to show of an output: what it shows, or under NNXDSL_UPDATE_DOCS what was printed."""
    if same_output(shown, printed, tolerance):
        return shown
    if not UPDATE or re.search(r"^\.\.\.$", shown, re.MULTILINE):
        pytest.fail(f"{context}\nshown:\n{shown}\nprinted:\n{printed}")
    return printed


def _printed(command: str) -> str:
    """What a command prints, with its errors."""
    program, *argv = shlex.split(command)
    args = [path for word in argv for path in (sorted(glob.glob(word)) if word.startswith("runs/") else [word])]
    if program not in ("nnxdsl", "python"):
        return subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout
    with _captured() as out, pytest.MonkeyPatch.context() as patched:
        patched.setattr(display, "LONG_SECONDS", 1000.0)  # which phases take long depends on the machine
        if program == "nnxdsl":
            cli.main(args)
        else:
            patched.setattr(sys, "argv", args)
            with contextlib.suppress(SystemExit):
                runpy.run_path(args[0], run_name="__main__")
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


@contextlib.contextmanager
def _captured() -> Iterator[io.StringIO]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        yield out
