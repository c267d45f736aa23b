"""Whole runs with packed rows equal those with padded rows, and have the same id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def metrics(runs: Path, name: str) -> list[dict[str, Any]]:
    (directory,) = runs.glob(f"{name}-*")
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_both_stages_run_packed_as_they_run_padded(lab: Any) -> None:
    short = ("evaluation=None", "steps=4")
    earlier = [f"model.weights.experiment.{word}" for word in short]
    actual = {}
    for way in ("Padded", "Packed"):
        batching = [f"{path}batching=Batching.{way}()" for path in ("", "model.weights.experiment.")]
        code, _, err = lab.python("dpo.py", *short, *earlier, *batching, "--home", way)
        assert code == 0, err
        actual[way] = lab.place / way
    assert {path.name for path in actual["Padded"].iterdir()} == {path.name for path in actual["Packed"].iterdir()}
    for stage in ("sft", "dpo"):
        padded, packed = metrics(actual["Padded"], stage), metrics(actual["Packed"], stage)
        assert len(padded) == len(packed) == 4
        for one, other in zip(padded, packed, strict=True):
            assert one["num_tokens"] == other["num_tokens"]
            for name in ("loss", "grad_norm", "entropy"):
                assert other[name] == pytest.approx(one[name], rel=2e-4), (stage, name)
