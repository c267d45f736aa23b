"""Fixtures of the tests of adapters."""

from __future__ import annotations

from tests.fixtures.programs import experiment, on_eight_devices, pairs, sequences, trained, with_b

__all__ = ["experiment", "on_eight_devices", "pairs", "sequences", "trained", "with_b"]
