"""Fixtures of the tests of generate."""

from __future__ import annotations

from tests.fixtures.recipes import finished

__all__ = ["finished"]
