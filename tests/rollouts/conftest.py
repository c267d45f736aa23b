"""Fixtures of the tests of rollouts."""

from __future__ import annotations

from tests.fixtures.recipes import lab, wait_until

__all__ = ["lab", "wait_until"]
