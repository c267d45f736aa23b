"""docs/guides/sweeps_and_launching.md: its Python runs, and its commands print what it shows, in a directory with its
own file.
"""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import pytest

from nnxdsl import Search, Sweep
from nnxdsl.cli.dispatch import main
from nnxdsl.config.core.base import members, registry
from tests.doc_pages import check_page, texts

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "sweeps_and_launching.md"


def test_its_python_runs() -> None:
    space: dict[str, Any] = {"__name__": "scale"}
    for source in texts(PAGE, "python"):
        if not source.startswith(">>>"):
            exec(compile(source, str(PAGE), "exec"), space)
    assert isinstance(space["sweep"], Sweep)
    assert isinstance(space["search"], Search)
    actual = doctest.testfile(str(PAGE), module_relative=False, globs=space)
    assert actual.attempted >= 1
    assert not actual.failed


def test_its_commands_print_what_it_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    Path("sweep.py").write_text(texts(PAGE, "python")[0], encoding="utf-8")
    assert texts(PAGE, "console")
    check_page(PAGE)


def test_all_launchers_are_in_its_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"| `{name}(" in text for name in members(registry["Launcher"]))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["sweep", "none.py"], "RunError: none.py: no such Python file; a sweep is defined in"),
        (["sweep", "sweep.py", "stepz=3"], "stepz: Experiment has no field 'stepz'; did you mean 'steps'?"),
        (["sweep", "sweep.py", "--show", "--cancel"], "UsageError: --show and --cancel exclude each other"),
        (["sweep", "sweep.py", "--launcher", "Launcher.Local"], "--launcher: expected a launcher such as"),
        (["sweep", "sweep.py", "--parallel", "0"], "parallel: expected a value > 0, got 0"),
        (["sweep", "sweep.py", "--paralel", "2"], "--paralel: there is no such flag; did you mean '--parallel'?"),
        (["launch"], "UsageError: the following arguments are required: FILE-or-RUN; see nnxdsl launch --help"),
    ],
)
def test_what_is_refused(
    argv: list[str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sweep.py").write_text(texts(PAGE, "python")[0], encoding="utf-8")
    assert main(argv) == 2
    assert said in capsys.readouterr().err
