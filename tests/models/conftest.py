"""Fixtures of the tests of models."""

from __future__ import annotations

from tests.fixtures.decoder import config, forward, leaves, template

__all__ = ["config", "forward", "leaves", "template"]
