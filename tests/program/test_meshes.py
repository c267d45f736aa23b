"""Eight virtual devices in a process of their own: meshes change nothing but where arrays live."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("argv", "devices"),
    [
        pytest.param((), [1, 8, 8, 1, 8], marks=pytest.mark.slow),
        pytest.param(("dora", "lora"), [1, 8, 8, 1, 8], marks=pytest.mark.slow),
        pytest.param(("muon",), [1, 8], marks=pytest.mark.slow),
        pytest.param(("adafactor",), [1, 8], marks=pytest.mark.slow),
    ],
    ids=["quick", "adapters", "muon", "adafactor"],
)
def test_meshes_and_one_device_agree(
    argv: tuple[str, ...], devices: list[int], on_eight_devices: Callable[..., Any]
) -> None:
    report = on_eight_devices("program/on_meshes.py", *argv)
    assert [entry["devices"] for entry in report.values()] == devices
    for name, entry in report.items():
        alone = report[f"{name.split()[0]} one"]
        assert entry["misplaced"] == []
        assert entry["same draw"], name
        for metrics in (entry["evaluated"], entry["metrics"][0]):
            assert metrics["rewards/margins"] == metrics["rewards/chosen"] == metrics["rewards/rejected"] == 0.0, name
            assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-7)
        for actual, expected in zip(entry["metrics"], alone["metrics"], strict=True):
            for key, value in expected.items():
                atol = 2e-6 if key.startswith("rewards/") else 1e-7
                assert actual[key] == pytest.approx(value, rel=5e-6, abs=atol), (name, key)
        # Two steps of AdamW move a parameter by 2e-3; a gradient near zero may differ in its rounding.
        assert entry["difference"] == pytest.approx(0, abs=2e-5), name
