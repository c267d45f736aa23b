"""The documentation page on data: its rows can be read as it says, and its tables are complete."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from nnxdsl import Data
from nnxdsl.data import BytesTokenizer, load
from tests.data.test_messages import CALLING
from tests.doc_pages import ROOT, run_python, texts

PAGE_PATH = ROOT / "docs" / "guides" / "data.md"
PAGE = PAGE_PATH.read_text(encoding="utf-8")
BLOCKS = re.findall(r"```jsonl (\w+)( tools)?\n(.*?)```", PAGE, re.DOTALL)

BLOCK = "generation block without the end of the turn"
"""Tested in `test_generation_masks.py`."""


@pytest.mark.parametrize(("kind", "tools", "rows"), BLOCKS)
def test_the_rows_of_the_page(write, kind: str, tools: str, rows: str) -> None:
    path = write(*(line.encode() for line in rows.splitlines()))
    report = load(getattr(Data, kind)(path), BytesTokenizer(CALLING if tools else None)).report
    assert (report.accepted, report.unread) == (len(rows.splitlines()), {})
    assert set(report.odd) <= {"duplicate"}  # two forms of the same row


def test_the_code_of_the_page() -> None:
    assert len(texts(PAGE_PATH, "python")) >= 2
    assert isinstance(run_python(PAGE_PATH)["data"], Data)


def test_every_kind_of_bad_row_is_described() -> None:
    raised = set()
    for file in (ROOT / "nnxdsl" / "data").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == "RowError"
                and isinstance(node.args[0], ast.Constant)
            ):
                raised.add(node.args[0].value)
    table = PAGE.partition("## Bad rows")[2].partition("## Odd rows")[0]
    described = {kind for row in re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE) for kind in row.split(", ")}
    assert described - {"kind"} == raised


def test_every_kind_of_odd_row_is_described(write) -> None:
    table = PAGE.partition("## Odd rows")[2]
    described = set(re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)) - {"kind"}
    tested = (Path(__file__).parent / "test_messages.py").read_text(encoding="utf-8")
    for kind in described - {"duplicate", "merged border", BLOCK}:
        assert kind.partition(" (")[0] in tested, kind
    actual = set(
        re.findall(r'yield "([^"]+)"|"(merged border|blank prompt|differ by blanks alone|duplicate)"', _sources())
    )
    assert {one or other for one, other in actual} | {BLOCK} == {
        kind for kind in described if not kind.startswith("two forms")
    }


def _sources() -> str:
    loaders = ("loaders/convert", "loaders/tally", "loaders/preferences", "loaders/conversations")
    names = (*loaders, "tokenizers/messages", "tokenizers/template_check")
    files = [ROOT / "nnxdsl" / "data" / f"{name}.py" for name in names]
    return "".join(file.read_text(encoding="utf-8") for file in files)
