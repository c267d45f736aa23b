"""The README's Python runs, block after block in one namespace, and what it says of the command line is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_every_python_block_runs() -> None:
    space: dict[str, Any] = {"__name__": "readme"}
    for source in blocks("python"):
        exec(compile(source, "README.md", "exec"), space)
    assert len(space["sweep"]) == 8
    assert space["DPOP"](beta=3).beta == 3.0
    assert set(space["state"].trainable) == set(space["program"].blueprint.trainable)


def test_the_error_that_it_shows_is_the_error_that_comes() -> None:
    shown = next(block for block in blocks("text") if block.startswith("$ python "))
    command, _, expected = shown.partition("\n")
    words = command.removeprefix("$ python ").split()
    ended = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == expected


def test_every_file_that_it_names_is_there() -> None:
    tree = next(block for block in blocks("text") if block.startswith("nnxdsl/"))
    room = ""
    for line in tree.splitlines()[1:]:
        if found := re.match(r"  (\w+)/ ", line):
            room = found[1]
        for name in re.findall(r"\b\w+\.py\b", line):
            places = [ROOT / "nnxdsl" / name, ROOT / "experiments" / name, *(ROOT / "nnxdsl" / room).rglob(name)]
            assert any(place.is_file() for place in places), name
