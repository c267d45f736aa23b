"""The Export page: a run's model is written by a child process, read back, and shown; what cannot be is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from app.pages import export as export_page
from app.settings import Settings
from app.state import Site
from tests.app import native
from tests.app.conftest import write_project
from tests.app.many import experiment, write_run
from tests.waiting import HANG_SECONDS, wait_until


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(Settings(home=tmp_path / "project" / "runs", project=tmp_path / "project"))
    yield site
    site.close()


def after(built: Any, **query: str) -> dict[str, Any]:
    """The page when its child process has ended."""
    wait_until(lambda: "so far" not in built.shown(**query)["Markdown"], every_seconds=0.2)
    return built.shown(**query)


def test_what_cannot_be_exported_is_refused(site: Site) -> None:
    built = native.Built(export_page.Export, site)
    assert "No run has saved a checkpoint yet" in built.shown()["Markdown"]
    run = write_run(site.settings.home, experiment(0), "finished", 5)
    assert "has no checkpoint yet" in built.shown(run=run.name)["Markdown"]
    (run / "checkpoints" / "00000005").mkdir()
    (run / "checkpoints" / "00000005" / "manifest.json").write_text("{}")
    assert "expected one of float32" in built.shown(run=run.name, dtype="int8")["Markdown"]
    assert "not a run id" in built.shown(run="../x")["Markdown"]
    assert "exports/" in built.shown(run=run.name)["Markdown"]
    built.pressed("Export", {"run": run.name})
    assert "checkpoint" in after(built, run=run.name)["Markdown"]  # why it failed
    assert not list((site.settings.project / "exports").iterdir())
    (site.settings.project / "exports" / f"{run.name}-5-float32").mkdir()
    (site.settings.project / "exports" / f"{run.name}-5-float32" / "mine").write_text("")
    with pytest.warns(UserWarning, match="is not empty"):
        built.pressed("Export", {"run": run.name})
    read_only = Site(Settings(home=site.settings.home, project=site.settings.project, read_only=True))
    assert native.Built(export_page.Export, read_only).buttons == []
    read_only.close()


@pytest.mark.browser  # not for a browser, but for the minute that training and exporting take
def test_a_run_is_exported(site: Site, environment: dict[str, str]) -> None:
    write_project(site.settings.project)
    argv = [sys.executable, "experiments/tiny.py", "--quiet"]
    subprocess.run(argv, cwd=site.settings.project, env=environment, check=True, timeout=HANG_SECONDS)
    (run,) = [row.id for row in site.index.rows()]
    built = native.Built(export_page.Export, site)
    built.pressed("Export", {})
    values = after(built)
    place = site.settings.project / "exports" / f"{run}-12-float32"
    assert place.name in values["Markdown"].replace("\\", "")
    assert json.loads((place / "config.json").read_text())["model_type"] == "gemma3_text"
    with safe_open(place / "model.safetensors", "numpy") as file:
        assert "model.embed_tokens.weight" in file.keys()  # noqa: SIM118 - not a mapping
    assert "model.safetensors" in values["Dataframe"]["file"].tolist()
    built.pressed("Export", {"what": "adapter", "dtype": "bfloat16"})
    assert "adapter" in after(built, what="adapter", dtype="bfloat16")["Markdown"]
    assert (site.settings.project / "exports" / f"{run}-12-adapter-bfloat16" / "adapter_config.json").is_file()
