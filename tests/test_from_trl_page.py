"""docs/guides/from_trl.md: its script is an experiment, and every setting on its right side is one that is read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import nnxdsl
from nnxdsl.cli.dispatch import main
from tests.doc_pages import ROOT, texts

PAGE = ROOT / "docs" / "guides" / "from_trl.md"
LOCAL = ROOT / "tests" / "reference" / "families" / "mixtral"
ROWS = re.findall(r"^\| `.*\| (`.*`) \|$", PAGE.read_text(encoding="utf-8"), re.M)
OTHER = re.compile(
    r"data=|objective=Objective\.(SFT|KTO|OnPolicyDistill|GRPO|DAPO|DrGRPO|SAPO|LUSPO|VESPO|CISPO|GSPO|RLOO)\b"
)
SETTINGS = [setting for row in ROWS for setting in re.findall(r"`([^`]+)`", row)]
OTHER_KINDS = [setting for setting in SETTINGS if OTHER.match(setting)]
"""Settings that go with other kinds of rows than the script's."""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's script, of a model that is here."""
    monkeypatch.chdir(tmp_path)
    (source,) = texts(PAGE, "python")
    assert "google/gemma-3-1b-it" in source
    path = Path("chat.py")
    path.write_text(source.replace("google/gemma-3-1b-it", str(LOCAL)), encoding="utf-8")
    return path


def test_its_scripts_say_the_same() -> None:
    (before,), (after,) = texts(PAGE, "py"), texts(PAGE, "python")
    compile(before, "before", "exec")
    for name, ours in (
        ("beta", "beta"),
        ("learning_rate", "peak_lr"),
        ("max_steps", "steps"),
        ("eval_steps", "every_steps"),
    ):
        (value,) = re.findall(rf"\b{name}=([\w.-]+)", before)
        assert f"{ours}={value}" in after
    each, times = re.findall(r"(?:batch_size|accumulation_steps)=(\d+)", before)
    assert f"batch_size={int(each) * int(times)}" in after
    assert f"microbatch_size={each}" in after


@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if setting not in OTHER_KINDS])
def test_a_setting_is_read_and_acts(setting: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = ["steps=None"] if setting.startswith("epochs") else []
    actual = []
    for argv in ([], [setting, *others]):
        assert main(["show", str(file), *argv, "--json"]) == 0, capsys.readouterr().err
        actual.append(json.loads(capsys.readouterr().out))
    assert actual[0] != actual[1]


@pytest.mark.parametrize("setting", OTHER_KINDS)
def test_an_objective_or_data_of_another_kind_is_built(setting: str) -> None:
    path, _, value = setting.partition("=")
    assert isinstance(eval(value, dict(vars(nnxdsl))), {"objective": nnxdsl.Objective, "data": nnxdsl.Data}[path])
