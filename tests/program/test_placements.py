"""Eight virtual devices in another process: real arrays lie where the layout says, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def check(report: dict[str, dict[str, Any]]) -> None:
    for name, entry in report.items():
        alone = report[f"{name.split(':')[0]}: one"]
        assert entry["misplaced"] == [], name
        # Read off the arrays themselves, of every part, before and after two steps.
        assert entry["after init"] == entry["dump"], name
        assert entry["after steps"] == entry["dump"], name
        assert len(entry["metrics"]) == 2
        for result, expected in zip(entry["metrics"], alone["metrics"], strict=True):
            assert set(result) == set(expected)
            for key, value in expected.items():
                # A reward is the difference of two sums of log-probabilities of about 100, times beta.
                atol = 5e-6 if key.startswith("rewards/") else 1e-7
                assert result[key] == pytest.approx(value, rel=5e-6, abs=atol), (name, key)


def lines(entry: dict[str, Any], ending: str) -> list[str]:
    return [line for line in entry["dump"].splitlines() if line.split()[1].endswith(ending)]


@pytest.mark.slow
def test_full_fine_tuning_with_a_reference(on_eight_devices: Callable[..., Any]) -> None:
    report = on_eight_devices("program/on_placements.py", "full")
    check(report)
    assert [entry["devices"] for entry in report.values()] == [1, 8, 8, 8, 8]
    # The rows are not empty of what they are for: all parts are there, copies over data are cut, parts are on the host.
    up = "layers.blocks.0.mlp.up.kernel"
    assert lines(report["full: data2-fsdp2-tensor2"], up) == [
        f"trainable {up} 2x16x32 float32 (None, 'fsdp', 'tensor') 1024",
        f"reference {up} 2x16x32 float32 (None, 'fsdp', 'tensor') 1024",
        f"optimizer 1.0.mu.{up} 2x16x32 float32 (None, 'fsdp', ('tensor', 'data')) 512",
        f"optimizer 1.0.nu.{up} 2x16x32 float32 (None, 'fsdp', ('tensor', 'data')) 512",
    ]
    assert lines(report["full: data2-fsdp2-context2"], up)[0].endswith("(None, ('fsdp', 'context'), None) 1024")
    assert lines(report["full: fsdp4-stage2"], up)[0].endswith("('stage', 'fsdp', None) 512")
    for line in report["full: offload"]["dump"].splitlines():
        assert line.endswith(" host") != line.startswith("trainable"), line


@pytest.mark.slow
def test_adapters_on_four_bits(on_eight_devices: Callable[..., Any]) -> None:
    report = on_eight_devices("program/on_placements.py", "qlora")
    check(report)
    up = "layers.blocks.0.mlp.up.kernel"
    dumped = report["qlora: data2-fsdp2-tensor2"]["dump"].splitlines()
    assert [line for line in dumped if up in line] == [
        f"frozen {up}.array.qvalue 2x16x32 uint4 (None, 'fsdp', 'tensor') 128",
        f"frozen {up}.array.scale 2x2x32 float32 (None, None, 'tensor') 256",
        f"trainable {up}_lora_a 2x16x2 float32 (None, 'fsdp', None) 128",
        f"trainable {up}_lora_b 2x2x32 float32 (None, None, 'tensor') 256",
        f"optimizer 1.0.mu.{up}_lora_a 2x16x2 float32 (None, ('fsdp', 'data'), None) 64",
        f"optimizer 1.0.mu.{up}_lora_b 2x2x32 float32 (None, None, ('tensor', 'data')) 128",
        f"optimizer 1.0.nu.{up}_lora_a 2x16x2 float32 (None, ('fsdp', 'data'), None) 64",
        f"optimizer 1.0.nu.{up}_lora_b 2x2x32 float32 (None, None, ('tensor', 'data')) 128",
    ]


def frozen_on_the_host(report: dict[str, dict[str, Any]]) -> None:
    check(report)
    for name, entry in report.items():
        for line in entry["dump"].splitlines():
            assert line.endswith(" host") == (line.startswith("frozen") and not name.endswith(": one")), line


@pytest.mark.slow
def test_frozen_weights_on_the_host(on_eight_devices: Callable[..., Any]) -> None:
    frozen_on_the_host(on_eight_devices("program/on_placements.py", "frozen lora"))


@pytest.mark.slow
def test_frozen_weights_of_four_bits_on_the_host(on_eight_devices: Callable[..., Any]) -> None:
    frozen_on_the_host(on_eight_devices("program/on_placements.py", "frozen qlora"))


@pytest.mark.slow
def test_dimensions_that_do_not_divide_are_copied(on_eight_devices: Callable[..., Any]) -> None:
    report = on_eight_devices("program/on_placements.py", "odd")
    check(report)
    up = "layers.blocks.0.mlp.up.kernel"
    assert lines(report["odd: replicate"], f"{up}")[0] == f"trainable {up} 1x16x30 float32 (None, 'fsdp', None) 960"


@pytest.mark.slow
def test_more_placements_of_four_bits_on_the_host(on_eight_devices: Callable[..., Any]) -> None:
    check(on_eight_devices("program/on_placements.py", "slow frozen qlora"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slow full", "slow qlora"])
def test_more_placements(on_eight_devices: Callable[..., Any], name: str) -> None:
    check(on_eight_devices("program/on_placements.py", name))
