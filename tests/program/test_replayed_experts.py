"""Replayed experts of rows that are split over devices, and of groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


@pytest.mark.extended
def test_devices_replay_the_same(on_eight_devices: Callable[..., Any]) -> None:
    """Of each device's rows, or of tokens in the order in which they are dealt out; and the rows of groups."""
    report = on_eight_devices("program/on_replayed_experts.py")
    one, logps = np.array(report.pop("one")), {name: np.array(each) for name, each in report.items()}
    assert set(logps) == {"groups", "fsdp", "context", "anew"}
    assert np.abs(logps.pop("anew") - one).max() > 1e-2
    for each in logps.values():
        np.testing.assert_allclose(each, one, atol=1e-5)
