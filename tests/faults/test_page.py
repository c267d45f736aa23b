"""docs/design/reliability.md: the tests that it names are there, and so are the guards that were taken out."""

from __future__ import annotations

import re
from pathlib import Path

from without import GUARDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "design" / "reliability.md").read_text(encoding="utf-8")


def test_every_test_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)) | {
        tuple(guard.test.partition("[")[0].split("::")) for guard in GUARDS
    }
    assert len(named) > 40
    assert [name for name in named if f"def {name[1]}(" not in (ROOT / name[0]).read_text(encoding="utf-8")] == []


def test_every_row_of_the_matrix_has_its_line() -> None:
    rows = [cell for line in re.findall(r"^\| ([\d, ]+) \|", PAGE, re.MULTILINE) for cell in line.split(", ")]
    assert [int(row) for row in rows if row != "0"][-30:] == list(range(1, 31))


def test_every_guard_that_is_taken_out_is_there() -> None:
    """What `without.py` would replace stands in the code once."""
    actual = {
        guard.what: (ROOT / "nnxdsl" / guard.file).read_text(encoding="utf-8").count(guard.old) for guard in GUARDS
    }
    assert {what: count for what, count in actual.items() if count != 1} == {}
