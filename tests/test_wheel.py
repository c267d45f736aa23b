"""The wheel with its extra `app`, in an environment of its own, away from the source: its command, a plan, the app."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.app.conftest import RunningApp, write_project
from tests.doc_pages import ROOT
from tests.waiting import HANG_SECONDS


def printed(*argv: str | Path, cwd: Path) -> str:
    """What a command prints outside of the source tree; its errors where it fails."""
    ended = subprocess.run(
        [str(word) for word in argv], cwd=cwd, env=environment(), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    return ended.stdout


def environment() -> dict[str, str]:
    """Without the source tree, of which tests are told by PYTHONPATH."""
    return {**{name: text for name, text in os.environ.items() if name != "PYTHONPATH"}, "JAX_PLATFORMS": "cpu"}


@pytest.mark.extended
def test_the_wheel_plans_and_serves_the_app(tmp_path: Path) -> None:
    pytest.importorskip("pip", reason="builds and installs with pip")
    printed(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path / "dist", ROOT, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("nnxdsl-*.whl")
    printed(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python, command = (tmp_path / "venv" / "bin" / name for name in ("python", "nnxdsl"))
    constraints = ROOT / "constraints" / f"python{sys.version_info.major}.{sys.version_info.minor}.txt"
    known = ["-c", constraints] if constraints.is_file() else []
    printed(python, "-m", "pip", "install", "-q", *known, f"{wheel}[app]", cwd=tmp_path)
    place = printed(python, "-c", "import nnxdsl; print(nnxdsl.__file__)", cwd=tmp_path)
    assert Path(place.strip()).is_relative_to(tmp_path / "venv")

    project = write_project(tmp_path / "project")
    verbs = printed(command, "--help", cwd=project)
    assert all(f"\n    {verb} " in verbs for verb in ("run", "plan", "export", "app"))
    assert "fits: " in printed(command, "plan", "experiments/tiny.py", "--device", "rtx4090", cwd=project)

    app = RunningApp(project, environment(), python=str(python))
    app.start()
    try:
        asked = urllib.request.Request(app.url(), headers={"Authorization": f"Bearer {app.token}"})
        with urllib.request.urlopen(asked, timeout=HANG_SECONDS) as answer:
            page = answer.read().decode()
        config = json.JSONDecoder().raw_decode(page.partition("window.gradio_config = ")[2])[0]
        assert config["title"] == "nnxdsl"
        assert len(config["components"]) > 10
    finally:
        app.end()
