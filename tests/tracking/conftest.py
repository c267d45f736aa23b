"""Third-party packages, and a run directory that a test writes instead of a trainer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

for packages in (Path(__file__).parent / "packages", Path(__file__).parents[1] / "packages"):
    sys.path.insert(0, str(packages))

from line_files.written import Written  # noqa: E402


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """A run without any row."""
    return Written.make(tmp_path / "runs" / "written-00000000")
