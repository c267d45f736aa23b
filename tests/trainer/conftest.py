"""Fixtures of the tests of trainer."""

from __future__ import annotations

from tests.fixtures.recipes import finished, lab, wait_until

__all__ = ["finished", "lab", "wait_until"]
