"""The pictures in docs/pictures that scripts draw are what the scripts draw today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
SCRIPTS = sorted(PICTURES.glob("draw_*.py"))


@pytest.mark.extended
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_picture_is_what_its_script_draws(script: Path, tmp_path: Path) -> None:
    rendered = tmp_path / "drawn.svg"
    subprocess.run([sys.executable, str(script), str(rendered)], check=True)
    stored = script.with_name(f"{script.stem.removeprefix('draw_')}.svg").read_text(encoding="utf-8")
    assert rendered.read_text(encoding="utf-8") == stored, (
        f"run python docs/pictures/{script.name} and look at the picture"
    )
    assert ElementTree.fromstring(stored).find("{http://www.w3.org/2000/svg}title") is not None


def test_every_drawn_picture_has_a_script_and_a_reader() -> None:
    rendered = {path.stem for path in PICTURES.glob("*.svg")}
    assert rendered == {script.stem.removeprefix("draw_") for script in SCRIPTS}
    pages = "".join(page.read_text(encoding="utf-8") for page in PICTURES.parent.rglob("*.md"))
    assert {name for name in rendered if f"pictures/{name}.svg" not in pages} == set()
