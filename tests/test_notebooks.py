"""docs/tutorials as notebooks: each is executed in a real kernel, as a user would, and prints what its page shows."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

from tests.doc_pages import ROOT, TOLERANCE, same_output
from tests.waiting import HANG_SECONDS

PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_notebook_of_a_tutorial_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    if page.stem == "lora_to_export":
        pytest.importorskip("transformers", reason="the page loads the export in transformers")
    command = tmp_path / "nnxdsl"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nnxdsl "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("COLUMNS", "100")
    notebook = runpy.run_path(str(ROOT / "docs" / "make_notebooks.py"))["notebook"](page.read_text(encoding="utf-8"))
    shown = ["".join(output.text for output in cell.get("outputs", ())) for cell in notebook.cells]
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=int(HANG_SECONDS), resources=place).execute()
    compared = 0
    for cell, text in zip(notebook.cells, shown, strict=True):
        outputs = [output for output in cell.get("outputs", ()) if output.output_type == "stream"]
        printed = "".join(output.text for output in outputs)
        assert "Traceback" not in printed, f"{cell.source}\n{printed}"
        if not cell.source.startswith("%%"):  # libraries warn on stderr
            stdout = "".join(output.text for output in outputs if output.name == "stdout")
            assert not text or same_output(text, stdout, TOLERANCE), f"{cell.source}\n{printed}"
        elif cell.source.startswith("%%sh"):  # the order of stdout and stderr is another in a notebook
            for line in text.splitlines():
                is_there = any(same_output(line, one, TOLERANCE) for one in printed.splitlines())
                assert is_there or "..." in line, f"{cell.source}\nshown: {line}\nprinted:\n{printed}"
                compared += is_there
    assert compared
