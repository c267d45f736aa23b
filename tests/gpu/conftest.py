"""Tests that run on a GPU alone; `pytest -m gpu` runs them with those of the other directories that have the mark."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "program" / "packages"))


@pytest.fixture(scope="session", autouse=True)
def _on_a_gpu() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")
