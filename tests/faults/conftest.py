"""One nursery for all tests, the undisturbed run that all are compared with, and a directory of its own for each."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "program" / "packages")]

from fault_lab import Lab, Nursery, Whole, make  # noqa: E402


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("said"))
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A lab whose run was never disturbed, all of its steps kept."""
    lab = make(tmp_path_factory.mktemp("whole"), nursery)
    lab.finish("checkpoint.keep=100", "checkpoint.every_steps=1")
    return lab


@pytest.fixture(scope="session")
def whole(undisturbed: Lab) -> Whole:
    return Whole.of(undisturbed.run)


@pytest.fixture
def lab(tmp_path: Path, nursery: Nursery) -> Lab:
    return make(tmp_path / "lab", nursery)


@pytest.fixture(scope="session")
def half_done(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A lab whose run was killed as it began to save step 12: steps 6 and 9 are there."""
    lab = make(tmp_path_factory.mktemp("half"), nursery)
    child = lab.start(at="save-begun@4")  # the one before has been waited for
    assert child.wait() == -9, child.said()
    return lab


@pytest.fixture
def killed(half_done: Lab, tmp_path: Path) -> Lab:
    """A copy of it."""
    shutil.copytree(half_done.place, tmp_path / "killed")
    return Lab(tmp_path / "killed", half_done.nursery)
