"""Notebook output: HTML of experiments, plans, layouts and progress; runs and interrupts in a real kernel."""

from __future__ import annotations

import os
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

import nnxdsl
from nnxdsl import Adapter, Data, Experiment, Mesh, Model, Objective
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.terminal.curve import MAX_POINTS, curve
from nnxdsl.terminal.display import Display
from nnxdsl.terminal.notebook import NotebookProgress, in_notebook
from tests.waiting import HANG_SECONDS

HOSTILE = "</pre><script>alert(1)</script>&"

CELL = """
import nnxdsl
from nnxdsl import *

experiment = Experiment(
    name="tiny",
    model=Model.Gemma3("tiny"),
    objective=Objective.SFT(loss_on="all"),
    data=Data.Text("texts.jsonl", max_length=32),
    optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=1e-2)),
    batch_size=2,
    steps=3,
)
"""


@pytest.fixture
def experiment() -> Experiment:
    return Experiment(
        name="tiny",
        model=Model.Gemma3("tiny"),
        objective=Objective.DPO(beta=0.3),
        data=Data.Preferences("none.jsonl", max_prompt_length=8, max_completion_length=8),
        adapter=Adapter.LoRA(rank=4),
        batch_size=2,
        steps=2,
        mesh=Mesh(fsdp=2),
        notes=HOSTILE,
    )


def elements(page: str) -> list[ET.Element]:
    """The elements of a page whose tags are all closed."""
    return list(ET.fromstring(page.replace("<details open>", "<details>")).iter())


def test_an_experiment_is_a_tree_with_what_differs_first(experiment: Experiment) -> None:
    page = experiment._repr_html_()
    bold = ["".join(one.itertext()) for one in elements(page) if one.tag == "b"]
    top = ["name", "model", "data", "objective", "steps", "batch_size", "adapter", "mesh", "notes"]
    assert [name for name in bold if name in top] == top
    assert {"beta", "rank", "fsdp"} <= set(bold)
    assert not {"optimizer", "seed", "alpha"} & set(bold)  # the optimizer follows from objective and adapter
    assert "<summary>Experiment &#x27;tiny&#x27;</summary>" in page
    assert "<div><b>beta</b> = 0.3</div>" in page
    assert page.index("<b>notes</b>") < page.index("seed = 0")
    assert "script" not in {one.tag for one in elements(page)}


@pytest.mark.slow
def test_a_plan_and_a_layout_show_themselves(experiment: Experiment) -> None:
    plan = nnxdsl.plan(experiment, device="h200")
    assert plan["steps"] == 2
    page = plan._repr_html_()
    for actual in ("parameters", "lora_a", "fits: ", "fsdp=2"):
        assert actual in page
        assert actual in repr(plan)
    layout = build_blueprint(experiment, "cpu").layout
    assert re.fullmatch(r"Layout\(\d+ arrays on fsdp=2 \(2 devices\), [\d.]+ MiB per device\)", repr(layout))
    rows = [[cell.text for cell in row] for row in elements(f"<p>{layout._repr_html_()}</p>") if row.tag == "tr"]
    assert rows[0][:3] == ["part", "path", "shape"]
    assert len({tuple(row) for row in rows}) == len(rows)
    assert sum(int(row[6] or 0) for row in rows[1:]) == len(list(layout))


def test_curves_are_svg_with_a_bounded_number_of_points() -> None:
    line = [(step, 1 / (step + 1)) for step in range(10_000)]
    (tree,) = [ET.fromstring(curve(HOSTILE, [*line, (10_000, float("nan"))], [(5, 0.5)]))]
    (rendered,) = [one for one in tree.iter() if one.tag == "polyline"]
    points = [tuple(map(float, point.split(","))) for point in rendered.get("points", "").split()]
    assert MAX_POINTS / 2 < len(points) <= MAX_POINTS + 1
    assert points == sorted(points)  # the loss falls: y grows downwards
    assert sum(one.tag == "circle" for one in tree.iter()) == 1
    assert curve("loss", [(1, float("inf"))]) == ""
    ET.fromstring(curve("loss", [(1, 2.0)]))


def test_progress_is_a_page_of_bars_curves_and_messages(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("IPython")
    progress = NotebookProgress()
    display = Display(quiet=True, listeners=[progress])
    display.say(HOSTILE)
    display.stage(f"training {HOSTILE}", 4)
    for step in range(1, 4):
        display.metrics({"step": step, "loss": 1 / step, "reward": None})
        display.step(step, 4, {"loss": 1 / step}, {})
    display.metrics({"step": 3, "eval/loss": 0.5})
    page = progress.page()
    bar, line, dot = ([one for one in elements(page) if one.tag == tag] for tag in ("progress", "polyline", "circle"))
    assert [(one.get("value"), one.get("max")) for one in bar] == [("3", "4")]
    assert len(line[0].get("points", "").split()) == 3
    assert len(dot) == 1
    assert "script" not in {one.tag for one in elements(page)}
    assert capsys.readouterr().out.count("text/html") == 1  # outside a kernel IPython prints; at most every half second
    display.close()
    (last,) = capsys.readouterr().out.splitlines()
    assert "<polyline" in last
    assert "<progress" not in last


def test_there_is_no_notebook_here() -> None:
    assert not in_notebook()


def notebook(tmp_path: Path, *cells: str) -> Any:
    """A notebook, and a client with a real kernel in a directory with data."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    (tmp_path / "texts.jsonl").write_text('{"text": "one two three"}\n{"text": "four five"}\n')
    page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    place = {"metadata": {"path": str(tmp_path)}}
    return page, nbclient.NotebookClient(page, timeout=int(HANG_SECONDS), resources=place)


def outputs(cell: Any, kind: str) -> list[str]:
    return [output["data"].get(kind, "") for output in cell.outputs if "data" in output]


@pytest.mark.slow
def test_a_run_in_a_notebook_and_its_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    interrupting = """
import os, signal, threading, time
from pathlib import Path


def interrupt(name, count):
    while not list(Path("runs").glob(name + "-*/metrics.jsonl")): time.sleep(0.02)
    for _ in range(count):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)

def run(name, count, **changes):
    threading.Thread(target=interrupt, args=(name, count)).start()
    return evolve(experiment, {"name": name, "steps": 10**6, **changes}).run()
"""
    page, client = notebook(
        tmp_path,
        CELL + "experiment",
        "result = experiment.run()\nresult",
        interrupting + "stopped = run('stopped', 1)\nprint(stopped.state, stopped.checkpoints == [stopped.step])",
        "nnxdsl.list_runs()",
        "try:\n    run('left', 2, **{'batch_size': 512})\nexcept KeyboardInterrupt:\n    print('interrupted')",
        "print('alive', nnxdsl.list_runs().state.tolist())",
    )
    client.execute()
    assert "<b>name</b>" in outputs(page.cells[0], "text/html")[0]
    progress, table = outputs(page.cells[1], "text/html")
    assert "<polyline" in progress
    assert "finished at step 3" in table
    assert outputs(page.cells[1], "text/plain")[1].startswith("Result(")
    assert "stopping after this step" in outputs(page.cells[2], "text/html")[0]
    assert page.cells[2].outputs[-1]["text"] == "stopped True\n"
    assert "<th>state</th>" in outputs(page.cells[3], "text/html")[0]
    assert page.cells[4].outputs[-1]["text"] == "interrupted\n"
    assert page.cells[5].outputs[-1]["text"].startswith("alive")  # the kernel
    (run,) = (tmp_path / "runs").glob("stopped-*")
    assert RunDirectory(run).status().get("state") == "stopped"
