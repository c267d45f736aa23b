"""Students and policies on eight devices take the steps that they take on one, and a policy says the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_meshes_and_parts_change_nothing(on_eight_devices: Callable[..., Any]) -> None:
    report = on_eight_devices("program/on_policies.py")
    for kind in ("distill", "taught once", "grpo"):
        alone, actual = report[f"{kind} one"], report[f"{kind} fsdp2-tensor2-context2"]
        assert actual["said"] == alone["said"]
        for ours, theirs in zip(actual["steps"], alone["steps"], strict=True):
            assert ours == pytest.approx(theirs, rel=2e-5, abs=2e-6)
