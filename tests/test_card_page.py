"""docs/guides/which_card.md: its tables are what docs/make_cards.py makes of `plan` and of what was measured."""

from __future__ import annotations

import re
import runpy
from typing import Any

import pytest

from tests.doc_pages import ROOT, UPDATE

PAGE = ROOT / "docs" / "guides" / "which_card.md"
ROWS = re.findall(r"^\| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "make_cards.py"))


@pytest.mark.extended
def test_a_row_is_what_plan_says(script: dict[str, Any]) -> None:
    assert script["card_row"]("Llama 3 1B", "LoRA").strip("| ") in ROWS


def test_what_was_measured_is_what_the_benchmarks_say(script: dict[str, Any]) -> None:
    recorded = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    shown = {row.split(" | ")[0]: row.split(" | ") for row in ROWS}
    ratios = []
    for job, name in script["JOBS"].items():
        _, planned, measured, estimated, seconds = shown[name]
        assert f"| `{job}` | {seconds} s |" in recorded
        assert re.search(rf"^\| `{job}` \|.* and {re.escape(measured)} GiB ", recorded, re.MULTILINE)
        ratios.append((float(measured) / float(planned), float(seconds) / float(estimated)))
    memory, time = zip(*ratios, strict=True)
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"between {1 - min(memory):.0%} below and {max(memory) - 1:.0%} above".replace("%", " %") in text
    assert f"took {min(time):.2f} to {max(time):.1f} times the estimate" in text


@pytest.mark.extended
def test_the_tables_are_those_that_the_script_makes(script: dict[str, Any]) -> None:
    if UPDATE:
        PAGE.write_text(script["page"](), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == script["page"](), "run `python docs/make_cards.py`"
