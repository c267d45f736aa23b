"""One nursery for all tests, the undisturbed run that all are compared with, and a directory of its own for each."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

KEPT = "NNXDSL_FAULTS_KEPT"
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "packages")]

from fault_lab import Lab, Nursery, Whole, make  # noqa: E402


def once(place: Path, nursery: Nursery, run: Callable[[Lab], None]) -> Lab:
    """A lab in which something was run; `without.py` has it run by code that has all its guards, and kept."""
    kept = os.environ.get(KEPT)
    if kept is None:
        lab = make(place, nursery)
        run(lab)
        return lab
    source = Path(kept) / place.name
    if not source.is_dir():
        run(make(source, nursery))
    shutil.copytree(source, place, dirs_exist_ok=True)
    return Lab(place, nursery)


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("said"))
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A lab whose run was never disturbed, all of its steps kept."""

    def run(lab: Lab) -> None:
        lab.finish("checkpoint.keep=100", "checkpoint.every_steps=1")

    return once(tmp_path_factory.mktemp("whole"), nursery, run)


@pytest.fixture(scope="session")
def whole(undisturbed: Lab) -> Whole:
    return Whole.of(undisturbed.run)


@pytest.fixture
def lab(tmp_path: Path, nursery: Nursery) -> Lab:
    return make(tmp_path / "lab", nursery)


@pytest.fixture(scope="session")
def half_done(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A lab whose run was killed as it began to save step 12: steps 6 and 9 are there."""

    def run(lab: Lab) -> None:
        child = lab.start(point="save-begun@4")  # the one before has been waited for
        assert child.wait() == -9, child.said()

    return once(tmp_path_factory.mktemp("half"), nursery, run)


@pytest.fixture
def killed(half_done: Lab, tmp_path: Path) -> Lab:
    """A copy of it."""
    shutil.copytree(half_done.place, tmp_path / "killed")
    return Lab(tmp_path / "killed", half_done.nursery)
