"""Fixtures of the tests of weights."""

from __future__ import annotations

from tests.fixtures.recipes import finished, lab

__all__ = ["finished", "lab"]
