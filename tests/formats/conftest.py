"""Fixtures of the tests of formats."""

from __future__ import annotations

from tests.fixtures.decoder import config, leaves, template

__all__ = ["config", "leaves", "template"]
