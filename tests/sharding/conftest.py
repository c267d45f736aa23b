"""Fixtures of the tests of sharding."""

from __future__ import annotations

from tests.fixtures.programs import experiment

__all__ = ["experiment"]
