"""Fixtures of the tests of planning."""

from __future__ import annotations

from tests.fixtures.programs import experiment, pairs, sequences

__all__ = ["experiment", "pairs", "sequences"]
