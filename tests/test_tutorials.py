"""docs/tutorials: every page is run from top to bottom in an empty directory and prints what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doc_pages import ROOT, run_page, same_output

SLOW = {"first_dpo_run", "grpo_with_a_reward", "lora_to_export", "plan_for_many_devices"}
PAGES = [
    pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if page.stem in SLOW else [])
    for page in sorted((ROOT / "docs" / "tutorials").glob("*.md"))
]


@pytest.mark.extended
@pytest.mark.parametrize("page", PAGES)
def test_a_tutorial_prints_what_it_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.stem == "lora_to_export":
        pytest.importorskip("transformers", reason="the page loads the export in transformers")
    run_page(page, tmp_path, monkeypatch)


def test_outputs_are_compared() -> None:
    assert same_output("loss 0.6931  step 3\n", "loss  0.6930 step 3", 0.05)
    assert same_output("first ... last\n", "first\nline\nlast")
    assert not same_output("loss 0.6931", "loss 0.6930")
    assert not same_output("step 3", "step 4")
