"""Versions of docs/reference/versions.md, constraints/ and the changelog, against pyproject.toml and each other."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from nnxdsl import Model
from nnxdsl.config.core.base import members
from tests.doc_pages import ROOT, UPDATE

FILES = sorted((ROOT / "constraints").iterdir())


@pytest.fixture(scope="module")
def script() -> dict:
    return runpy.run_path(str(ROOT / "docs" / "make_versions.py"))


def test_the_page_is_that_of_pyproject_and_constraints(script: dict) -> None:
    if UPDATE:
        script["PAGE"].write_text(script["page"](), encoding="utf-8")
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](), "run `python docs/make_versions.py`"
    assert [file.name for file in FILES] == [f"python{python}.txt" for python in script["PYTHONS"]]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_constraints_are_names_and_versions_that_pyproject_allows(file: Path, script: dict) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines == sorted(set(lines))
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==\d+(\.\w+)+", line)] == []
    versions = dict(line.split("==") for line in lines)
    assert [name for name in versions if canonicalize_name(name) != name] == []
    needed = script["requirements"]()
    assert [name for name in needed if name in versions and versions[name] not in needed[name][0].specifier] == []
    assert [
        name for name, (_, extras) in needed.items() if {"", "app", "test"} & {*extras} and name not in versions
    ] == []


def test_the_changelog_begins_with_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first = changelog.split("\n## ")[1]
    assert first.startswith(f"{version} ")
    assert f"Text of the tag `v{version}`:\n\n> nnxdsl {version}" in first
    families = len(members(Model)) - 1  # without `HF`, which reads which of them a directory is
    assert f"distillation of {families} families" in first
