"""What is computed is what was recorded: three cases by default, all of them under `slow`; see record.py."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.regression import results
from tests.waiting import HANG_SECONDS

HERE = Path(__file__).parent
QUICK = ("sft-packed-microbatch", "convert-deepseek-v3", "plan-deepseek-tiny-tensor")
"""Packed and microbatched SFT, a file and a plan."""


def record(*argv: str) -> None:
    """Runs record.py in a process of its own: it compiles with other flags, on eight devices."""
    command = [sys.executable, str(HERE / "record.py"), *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_SECONDS * 6)
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]


@pytest.mark.extended
def test_a_few_cases() -> None:
    record(*QUICK, "--jobs", "1")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_all_cases() -> None:
    record()


RECORDED: dict[str, Any] = {
    "series": {"loss": [2.0, 1.0, 0.5], "rewards/margins": [0.0, 1e-3], "logps/chosen": [-40.0, -41.0], "zero": [0.0]},
    "sums": {"trained arrays": [0.5, 900.0]},
    "exact": {"greedy": ["a b"]},
    "here": {"memory": "1"},
    "bits": {"checkpoint": "2"},
    "names": {"checkpoint": "3"},
}


def changed(part: str, name: str, value: Any) -> dict[str, Any]:
    return {**RECORDED, part: {**RECORDED[part], name: value}}


@pytest.mark.parametrize(
    ("actual", "same", "elsewhere"),
    [
        (RECORDED, "", ""),
        (changed("series", "loss", [2.0, 1.0, 0.5 + 1e-7]), "", ""),
        (changed("series", "loss", [2.0, 1.0, 0.5 + 4e-7]), "loss differs by 2.0e-07, more than 1e-07", ""),
        (changed("series", "loss", [2.0, 1.0, 0.5 + 4e-5]), "loss differs by 2.0e-05", "loss differs by 2.0e-05"),
        (changed("series", "loss", [2.0, 1.0, float("nan")]), "loss differs by inf", "loss differs by inf"),
        (changed("series", "loss", [2.0, 1.0]), "loss differs by inf", "loss differs by inf"),
        (changed("series", "zero", [1e-9]), "zero differs by inf", "zero differs by inf"),
        (changed("series", "new", [1.0]), "new ['new']", "new ['new']"),
        (changed("series", "rewards/margins", [0.0, 1.1e-3]), "rewards/margins differs by 1.0e-01", ""),
        (changed("sums", "trained arrays", [0.5 + 1e-7, 900.0]), "trained arrays differs by 2.0e-07", ""),
        (changed("sums", "trained arrays", [0.5]), "trained arrays differs by inf", "trained arrays differs by inf"),
        (changed("exact", "greedy", ["a c"]), "exact: greedy", "exact: greedy"),
        (changed("here", "memory", "0"), "here: memory", ""),
        (changed("bits", "checkpoint", "0"), "", ""),
        (changed("names", "checkpoint", "0"), "names: checkpoint", "names: checkpoint"),
    ],
)
def test_what_is_a_difference(actual: dict[str, Any], same: str, elsewhere: str) -> None:
    for wanted, is_same in ((same, True), (elsewhere, False)):
        failures = results.compare(actual, RECORDED, is_same=is_same).failures
        assert bool(failures) == bool(wanted), failures
        assert wanted in " ".join(failures)


def test_cases_that_round_have_a_bound_of_their_own_on_other_machines() -> None:
    actual = changed("series", "loss", [2.0, 1.0, 0.5 + 1e-3])
    for case, is_same, fails in (("grpo", False, False), ("grpo", True, True), ("sft", False, True)):
        assert bool(results.compare(actual, RECORDED, case=case, is_same=is_same).failures) == fails


def test_chaotic_cases_are_compared_by_their_first_steps_on_other_machines() -> None:
    (case, steps), *_ = results.CHAOTIC.items()
    recorded = {**RECORDED, "series": {"loss": [2.0] * 10}}
    for step, away, is_same, fails in (
        (steps - 1, 1e-3, False, False),
        (steps - 1, 0.1, False, True),
        (steps, 0.1, False, False),
        (steps, 0.1, True, True),
    ):
        loss = [2.0 + away * (index == step) for index in range(10)]
        actual = {**recorded, "series": {"loss": loss}}
        assert bool(results.compare(actual, recorded, case=case, is_same=is_same).failures) == fails
    actual = {**recorded, "sums": {"trained arrays": [0.6, 900.0]}}
    for name, is_same, fails in ((case, False, False), (case, True, True), ("sft", False, True)):
        assert bool(results.compare(actual, recorded, case=name, is_same=is_same).failures) == fails


def test_every_case_with_a_bound_of_its_own_is_recorded() -> None:
    cases = json.loads((HERE / "training.json").read_text(encoding="utf-8"))["cases"]
    assert results.CHAOTIC.keys() <= cases.keys()
    assert all(any(case.startswith(name) for case in cases) for name in results.ROUNDING)


def test_other_bits_are_noted_and_refused_where_that_is_asked_for() -> None:
    actual = changed("bits", "checkpoint", "0")
    assert results.compare(actual, RECORDED, is_same=True).notes == ("bits: checkpoint",)
    assert results.compare(actual, RECORDED, is_same=True, exact=True).failures == ("bits: checkpoint",)


def test_a_renamed_metric_is_compared_under_its_new_name(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = {**RECORDED, "series": {"cost" if name == "loss" else name: x for name, x in RECORDED["series"].items()}}
    monkeypatch.setattr(results, "RENAMED", {"loss": "cost"})
    assert results.compare(actual, RECORDED, is_same=True).failures == ()


def test_multisets_of_arrays_know_neither_order_nor_names() -> None:
    digest: Callable[[Any], str] = results.of_arrays
    assert digest([[1.0, 2.0], [3]]) == digest([[3], [1.0, 2.0]])
    assert digest([[1.0], [1.0]]) != digest([[1.0]])
    assert digest([[1.0, 2.0]]) != digest([[[1.0], [2.0]]])


def test_recorded_files_are_small_and_say_where_they_come_from() -> None:
    files = sorted(HERE.glob("*.json"))
    assert [file.stem for file in files] == ["files", "models", "plans", "training"]
    assert sum(file.stat().st_size for file in files) < 300_000
    environments = [json.loads(file.read_text(encoding="utf-8"))["environment"] for file in files]
    assert all(environment.keys() == {"jax", "jaxlib", "cpu", "cores", "xla_flags"} for environment in environments)
