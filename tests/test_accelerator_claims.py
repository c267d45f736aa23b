"""What the pages say of accelerators is what the table of benchmarks/README.md records, no less and no more."""

from __future__ import annotations

import importlib.util
import re
import sys
from typing import Any

import pytest

from tests.doc_pages import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md")
DENIAL = re.compile(
    r"\b(?:GPUs?|H\d00s?|accelerators?|they) (?:is|are|was|were) not (?:yet )?(?:measured|run|timed|tried)"
    r"|\bno (?:accelerators?|GPUs?) (?:has|have|was|were)\b"
    r"|\bnot (?:been )?(?:run|measured) on (?:them|GPUs?|accelerators?|H\d00s?)\b",
    re.IGNORECASE,
)
"""Statements that nothing of all ran on GPUs; one about a single feature names that feature first."""


def text_of(page: Any) -> str:
    return re.sub(r"\s+", " ", page.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("gpu_jobs", ROOT / "benchmarks" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_jobs"] = module  # attrs looks the module of a class up
    spec.loader.exec_module(module)
    return module.JOBS


@pytest.fixture(scope="module")
def measured(jobs: dict[str, Any]) -> dict[str, str]:
    """The rows of the table that have a result, by job."""
    section = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").partition("## On one GPU")[2]
    table = section.partition("| a step |")[2].partition("\n\n")[0]
    rows = {
        name: row for name, row in re.findall(r"^\| `([^`]+)` \|(.*)$", table, re.MULTILINE) if "no result" not in row
    }
    assert rows
    assert {name.split()[0] for name in rows} <= set(jobs)
    return rows


def cells(row: str) -> tuple[str, str]:
    """What the support table of the README says of GPUs and TPUs."""
    line = re.search(rf"^\| {row} \|(.*)\|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert line is not None, row
    gpu, tpu = [cell.strip() for cell in line[1].split("|")][-2:]
    return gpu, tpu


def timed(values: set[str]) -> str:
    return f"{', '.join(sorted(values))} timed"


def test_the_support_table_says_what_was_timed(jobs: dict[str, Any], measured: dict[str, str]) -> None:
    ran = [jobs[name.split()[0]] for name in measured]
    assert cells("objectives")[0] == timed({one.kind.upper() for one in ran if one.kind != "decode"})
    families = {type(one.model).__name__ for one in ran}
    assert cells("models")[0] == timed({re.sub(r"(\d)", r" \1", family) for family in families})
    assert cells("adapters")[0] == timed({type(one.experiment.adapter).__name__ for one in ran if one.lora})
    formats = {type(one.quantization).__name__ for one in ran if one.quantization is not None}
    assert cells("quantization")[0] == timed(formats)
    assert cells("batching")[0] == timed({type(one.experiment.batching).__name__.lower() for one in ran})


def test_nothing_more_is_said_to_have_run(measured: dict[str, str]) -> None:
    for row in ("parallelism", "several hosts", "launchers"):
        assert "timed" not in cells(row)[0], f"{row}: the jobs ran in one process on one GPU"
    for row in ("objectives", "models", "adapters", "quantization", "batching", "parallelism", "several hosts"):
        assert "timed" not in cells(row)[1], f"{row}: no job ran on a TPU"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_denies_what_was_measured(page: Any, measured: dict[str, str]) -> None:
    actual = DENIAL.search(text_of(page))
    assert actual is None, f"{actual[0]!r}, but {len(measured)} jobs of benchmarks/README.md ran on a GPU"


def test_the_figure_of_the_readme_stands_in_the_table(measured: dict[str, str]) -> None:
    match = re.search(
        r"on one H100, .*LoRA DPO of Llama 3 8B.* reaches ([\d.]+) % of the measured peak", text_of(PAGES[0])
    )
    assert match is not None
    assert f"| {match[1]} % of " in f"|{measured['dpo-llama-8b']}"


def test_denials_are_found() -> None:
    for wrong in (
        "GPUs are not measured.",
        "no accelerator has run any of it",
        "GPUs are not measured yet",
        "but not run on them",
    ):
        assert DENIAL.search(wrong), wrong
    for right in ("no TPU has run any of it", "Draft layers were not measured on an accelerator.", "it needs no GPU"):
        assert not DENIAL.search(right), right
