"""Fixtures of the tests of cli."""

from __future__ import annotations

from tests.fixtures.recipes import finished, lab

__all__ = ["finished", "lab"]
