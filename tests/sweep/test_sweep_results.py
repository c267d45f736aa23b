"""Results of sweeps: ranking, the table, the plot, hostile names."""

from __future__ import annotations

import io
import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console

from nnxdsl import (
    Data,
    Evaluation,
    Experiment,
    Model,
    NnxdslError,
    Objective,
    Optimizer,
    Pruner,
    Range,
    RunError,
    Schedule,
    Search,
    Sweep,
    cli,
    evolve,
    product,
)
from nnxdsl.config.core.run_id import canonical
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runs.run_list import last_metrics
from nnxdsl.sweep.plot import plot
from nnxdsl.sweep.results import Row, default_direction, differing_paths, evaluation_values, rank_rows, show_rows
from nnxdsl.sweep.spec_file import read_spec
from nnxdsl.sweep.sweep import SweepDirectory, sort_order

HOSTILE = "</text><script>alert(1)</script>\x1b[31m&\u202e"


@pytest.fixture
def base() -> Experiment:
    return Experiment(
        name="tiny",
        model=Model.Gemma3("tiny"),
        objective=Objective.SFT(loss_on="all"),
        data=Data.Text("none.jsonl", max_length=16),
        optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
        batch_size=2,
        steps=2,
    )


def rows(*values: float | None) -> list[Row]:
    return [
        Row(n, f"tiny-{n:08x}", {"seed": n, "notes": HOSTILE, "steps": 10 ** (n % 3)}, "finished", 2, value)
        for n, value in enumerate(values)
    ]


def test_the_best_stand_first_and_those_without_a_figure_last() -> None:
    inputs = rows(0.5, None, math.nan, 0.1, math.inf, 0.1)
    assert [row.point for row in rank_rows(inputs, "minimize")] == [3, 5, 0, 4, 1, 2]
    assert [row.point for row in rank_rows(inputs, "maximize")] == [4, 0, 3, 5, 1, 2]


@pytest.mark.parametrize(
    ("metric", "direction"),
    [("eval/loss", "minimize"), ("eval/rewards/accuracies", "maximize"), ("eval/kl", "minimize"), ("x", "maximize")],
)
def test_the_direction_of_a_figure_is_that_of_its_name(metric: str, direction: str) -> None:
    assert default_direction(metric) == direction


def test_columns_are_what_differs() -> None:
    assert differing_paths(rows(0.1, 0.2)) == ["seed", "steps"]
    assert differing_paths(rows(0.1)) == ["seed", "notes", "steps"]
    shown = io.StringIO()
    console = Console(width=100, file=shown)
    show_rows(rank_rows(rows(0.25, None, 0.125), "minimize"), "eval/loss", console)
    text = [line.split() for line in shown.getvalue().splitlines()]
    assert text[0] == ["#", "seed", "steps", "eval/loss", "state", "step", "run"]
    assert text[2] == ["2", "2", "100", "0.125", "finished", "2", "tiny-00000002"]
    assert text[4] == ["1", "1", "10", "finished", "2", "tiny-00000001"]


def test_a_plot_is_xml_whatever_the_names_are() -> None:
    svg = plot(
        [*rows(0.5, 0.4, None, 0.1), Row(9, HOSTILE, {"seed": HOSTILE, HOSTILE: 1}, "finished", 1, 0.3)],
        HOSTILE,
        "minimize",
        HOSTILE,
    )
    tree = ET.fromstring(svg)
    assert not [node for node in tree.iter() if "script" in node.tag]
    circles = [node for node in tree.iter() if node.tag.endswith("circle")]
    panels = [node for node in tree.iter() if node.tag.endswith("}g")]
    assert len(panels) == 5  # the order, and each of four paths
    assert len(circles) == 4 * len(panels)  # one row has no figure
    assert sum(node.get("class") == "best" for node in circles) == len(panels)
    assert all(0 < float(node.get("cx", "nan")) < 340 and 0 < float(node.get("cy", "nan")) < 250 for node in circles)
    ET.fromstring(plot([], "loss", "minimize", "none"))
    ET.fromstring(plot(rows(0.5), "loss", "maximize", "one"))


def finished(home: Path, one: Experiment, loss: float) -> None:
    run = RunDirectory.create(home / one.id, identity=canonical(one), experiment_json={}, experiment_py="")
    run.append_metrics({"step": 0, "loss": 9.0})
    run.append_evaluation({"step": 1, "attempt": 1, "eval/loss": loss + 1, "eval/note": "text"})
    run.append_evaluation({"step": 2, "attempt": 1, "eval/loss": loss})
    run.write_status(state="finished", step=2)
    run.close()


def test_a_sweep_s_directory_tells_what_each_point_came_to(base: Experiment, tmp_path: Path) -> None:
    sweep = Sweep(base, product({"seed": [0, 1, 2]}))
    finished(tmp_path, sweep.experiments[0], 0.5)
    finished(tmp_path, sweep.experiments[2], 0.25)
    assert last_metrics(tmp_path / sweep.experiments[0].id) == {"loss": 9.0, "eval/loss": 0.5}
    assert evaluation_values(tmp_path / sweep.experiments[0].id, "eval/loss") == [(1, 1.5), (2, 0.5)]
    directory = SweepDirectory.open(sweep, tmp_path)
    assert directory.path == tmp_path / "sweeps" / f"tiny-{sweep.digest[:8]}"
    points = [(number, one, sweep.points[number]) for number, one in enumerate(sweep)]
    metric, direction = sort_order(sweep, None, [tmp_path / one.id for one in sweep])
    assert (metric, direction) == ("eval/loss", "minimize")
    directory.write_results(directory.rows(points, metric), metric, direction)
    reported = json.loads((directory.path / "results.json").read_text())
    assert reported["best"] == sweep.experiments[2].id
    assert [(row["point"], row["state"], row["value"]) for row in reported["rows"]] == [
        (2, "finished", 0.25),
        (0, "finished", 0.5),
        (1, "not run", None),
    ]
    assert ET.fromstring((directory.path / "results.svg").read_text()).tag.endswith("svg")
    asked = json.loads((directory.path / "sweep.json").read_text())
    assert [point["changes"] for point in asked["points"]] == [{"seed": "0"}, {"seed": "1"}, {"seed": "2"}]
    # The figure that was asked for has the direction that was asked for, others that of their names.
    other = Sweep(base, product({"seed": [0]}), metric="eval/loss", direction="maximize")
    assert sort_order(other, None, []) == ("eval/loss", "maximize")
    assert sort_order(other, "loss", []) == ("loss", "minimize")


def test_another_sweep_s_directory_is_left_alone(base: Experiment, tmp_path: Path) -> None:
    sweep = Sweep(base, product({"seed": [0]}))
    path = SweepDirectory.open(sweep, tmp_path).path
    (path / "sweep.json").write_text('{"digest": "other"}')
    with pytest.raises(RunError, match="holds another sweep; move it away"):
        SweepDirectory.open(sweep, tmp_path)


def test_a_sweep_is_read_back_from_its_directory(base: Experiment, tmp_path: Path) -> None:
    rates = {"optimizer": [Optimizer.SGD(schedule=Schedule.Constant(lr=lr)) for lr in (0.1, 1e-3)]}
    sweep = Sweep(base, product({**rates, "notes": ["a,b", "None"], "test_size": [None, 0.1]}), metric="loss")
    assert read_spec(SweepDirectory.open(sweep, tmp_path).path) == sweep
    search = Search(
        evolve(base, {"test_size": 0.1, "evaluation": Evaluation(every_steps=1)}),
        {"optimizer.schedule.lr": Range.Log(1e-4, 1.0), "seed": Range.Int(0, 8, step=2), "notes": ["x", "(1, 2)"]},
        trials=7,
        metric="eval/loss",
        direction="minimize",
        sampler="random",
        pruner=Pruner.Median(startup_trials=3),
        seed=5,
    )
    assert read_spec(SweepDirectory.open(search, tmp_path).path) == search


def test_a_directory_that_describes_no_sweep_is_refused(base: Experiment, tmp_path: Path) -> None:
    file = SweepDirectory.open(Sweep(base, product({"seed": [0, 1]})), tmp_path).path / "sweep.json"
    whole = json.loads(file.read_text())
    changed = [{"run": "x", "changes": {"seed": "7"}}]
    objective = "Objective.GRPO(rewards=(Reward('os:system'),))"
    reward = {"objective": objective, "data": "Data.Prompts('p.jsonl')", "batch_size": "8"}
    for change, message in (
        ({"points": changed}, "its digest does not match"),
        ({"points": 3}, "is damaged"),
        ({"points": [{"run": "x", "changes": {"steps": "'many'"}}]}, "steps"),
        ({"base": {**whole["base"], "objective": {"type": "os:Objective"}}}, "os"),
        ({"points": [{"run": "x", "changes": reward}]}, "os:system"),
        ({"kind": None}, "is damaged"),
    ):
        file.write_text(json.dumps({**whole, **change}))
        with pytest.raises(NnxdslError, match=message):
            read_spec(file.parent)
    file.write_text("[]")
    with pytest.raises(RunError, match="is damaged"):
        read_spec(file.parent)


def test_the_command_takes_the_directory_of_a_sweep(
    base: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = Sweep(base, product({"seed": [0, 1]}))
    for number, one in enumerate(sweep):
        finished(tmp_path, one, 0.5 - number / 4)
    path, home = str(SweepDirectory.open(sweep, tmp_path).path), ("--home", str(tmp_path))
    assert cli.main(["sweep", path, "--json", "--quiet", *home]) == 0
    assert json.loads(capsys.readouterr().out)["best"] == sweep.experiments[1].id
    for argv, message in (
        ([path, "seed=3", *home], "change its Python file"),
        ([path], "is not in runs/sweeps"),
        ([str(tmp_path), *home], "neither a Python file"),
    ):
        assert cli.main(["sweep", *argv]) == 2
        assert message in capsys.readouterr().err
