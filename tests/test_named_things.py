"""Files and names that docstrings and messages of the library speak of exist."""

from __future__ import annotations

import ast
import functools
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = sorted([*(ROOT / "nnxdsl").rglob("*.py"), *(ROOT / "app").rglob("*.py")])
PATHS = [
    path.relative_to(ROOT).as_posix()
    for place in ("nnxdsl", "app", "docs", "experiments", "benchmarks", "tests")
    for path in sorted((ROOT / place).rglob("*.py"))
]
OF_USERS = ("my_data.py", "data.py", "rewards.py", "reward.py")
"""Names for files of a reader's own."""


def texts(path: Path) -> Iterator[str]:
    """The texts of a file, docstrings among them; what a formatted one inserts is NAME."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "NAME" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


@functools.cache
def identifiers() -> frozenset[str]:
    """All names in code, without what stands in backticks."""
    sources = (re.sub(r"`[^`\n]*`", "", path.read_text(encoding="utf-8")) for path in FILES)
    return frozenset(word for source in sources for word in re.findall(r"\w+", source))


def missing(text: str) -> Iterator[str]:
    """Yields the files and private names of a text that are nowhere, and names to import that are not there."""
    for word in re.findall(r"`([\w/.]+\.py)`|\b(nnxdsl/[\w/]+\.py)", text):
        name = "".join(word)
        if name not in OF_USERS and not any(path == name or path.endswith(f"/{name}") for path in PATHS):
            yield name
    yield from (name for name in re.findall(r"`(_[A-Za-z]\w*)`", text) if name not in identifiers())
    for module, names in re.findall(r"^ *from (nnxdsl[\w.]*) import ([\w, ]+)$", text, re.M):
        for name in names.split(", "):
            yield from (f"{module}.{used}" for used in dotted(name, text) if not exists(module, used))


def dotted(name: str, text: str) -> list[str]:
    """A name, and what a text takes from it."""
    return [name, *re.findall(rf"\b{name}(?:\.\w+)+", text)]


def exists(module: str, name: str) -> bool:
    try:
        pkgutil.resolve_name(f"{module}.{name}")
    except (ImportError, AttributeError):
        return False
    return True


def test_what_texts_speak_of_exists() -> None:
    actual = {
        (path.relative_to(ROOT).as_posix(), name) for path in FILES for text in texts(path) for name in missing(text)
    }
    assert actual == set()


def test_what_is_nowhere_is_found() -> None:
    text = (
        "See `gone.py`, `_Gone`, nnxdsl/gone/x.py\n  from nnxdsl import losses\n  losses.Terms(losses.build.register)"
    )
    assert list(missing(text)) == ["gone.py", "nnxdsl/gone/x.py", "_Gone", "nnxdsl.losses.Terms"]
