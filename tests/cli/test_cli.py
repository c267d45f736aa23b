"""The verbs that show, compare and list; resuming by name and by path; a file and `nnxdsl` are one command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from nnxdsl import cli, from_json
from nnxdsl.runs.run_dir import RunDirectory


@pytest.fixture
def place(lab: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(lab.place)
    return lab.place


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_show_says_where_each_value_comes_from(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("objective.beta=0.5", "adapter=None", "mesh.fsdp=2", 'notes="a # b"')
    lines = said(capsys, "show", "dpo.py", *argv).splitlines()
    assert [line for line in lines if "    # command line" in line] == [
        "objective.beta = 0.5    # command line; in the file: 0.2",
        "adapter = None    # command line; not in the file",
        "mesh.fsdp = 2    # command line; in the file: 1",
        'notes = "a # b"    # command line; in the file: ""',
    ]
    assert {'name = "dpo"', "optimizer.schedule.lr = 0.002", "optimizer.b1 = 0.9    # default"} < set(lines)
    assert lines[0] == 'type = "Experiment"'
    assert lines[-1] == f"# id: {cli.override(cli.load('dpo.py', Path('runs')), argv).id}"
    plain = said(capsys, "show", "dpo.py").splitlines()
    assert {line.partition("    # ")[2] for line in plain if "    # " in line} == {"default"}


def test_show_says_what_a_derived_value_follows_from(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "short.py").write_text(
        "from nnxdsl import *\n"
        "experiment = Experiment(name='short', model=Model('google/gemma-3-1b-it'), objective=Objective.SFT(),\n"
        "                        data=Data.Conversations('chats.jsonl'), adapter=Adapter.LoRA())\n"
    )
    rate = "optimizer.schedule.peak_lr"
    lines = said(capsys, "show", "short.py").splitlines()
    assert f"{rate} = 0.0002    # by objective and adapter" in lines
    assert 'model.weights.path = "google/gemma-3-1b-it"    # by path' in lines
    assert {"epochs = 1.0    # by steps", "batch_size = 8    # default", 'adapter.type = "LoRA"'} < set(lines)
    lines = said(capsys, "show", "short.py", "adapter=None", "steps=10").splitlines()
    assert f"{rate} = 2e-05    # by objective and adapter; in the file: 0.0002" in lines
    assert "steps = 10    # command line; in the file: None" in lines
    assert f"{rate} = 0.001    # command line; in the file: 0.0002" in said(capsys, "show", "short.py", f"{rate}=1e-3")


def test_show_as_json_and_as_python_go_round(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = cli.override(cli.load("dpo.py", Path("runs")), ["steps=7", "quantization=Quantization.Int8()"])
    text = said(capsys, "show", "dpo.py", "steps=7", "quantization=Quantization.Int8()", "--json")
    assert from_json(text) == changed
    (place / "again.json").write_text(text)
    (place / "again.py").write_text(
        said(capsys, "show", "dpo.py", "steps=7", "quantization=Quantization.Int8()", "--python")
    )
    assert cli.load("again.json", Path("runs")) == cli.load("again.py", Path("runs")) == changed


def test_diff_of_files_and_runs(place: Path, finished: Any, capsys: pytest.CaptureFixture[str]) -> None:
    home, run = str(finished.lab.place / "runs"), finished.run("dpo")
    assert said(capsys, "diff", "dpo.py", run.name, "--home", home) == f"# no differences; the same run: {run.name}\n"
    assert said(capsys, "diff", "dpo.py", str(run), "microbatch_size=2") == (
        f"microbatch_size: 2 -> None\n# 1 difference; the same run: {run.name}\n"
    )
    other = cli.override(cli.load("dpo.py", Path("runs")), ["objective.beta=0.3", "steps=9"]).id
    assert said(capsys, "diff", "dpo.py", str(run), "objective.beta=0.3", "steps=9") == (
        f"objective.beta: 0.3 -> 0.2\nsteps: 9 -> 40\n# 2 differences; different runs: {other}, {run.name}\n"
    )
    assert json.loads(said(capsys, "diff", "dpo.py", str(run), "steps=9", "--json")) == {
        "same_run": False,
        "changes": {"steps": {"left": "9", "right": "40"}},
    }


def test_runs_lists_all_and_what_is_damaged(place: Path, finished: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "runs") == "no runs in runs\n"
    assert json.loads(said(capsys, "runs", "--json")) == []
    shutil.copytree(finished.run("sft"), place / "runs" / finished.run("sft").name)
    shutil.copytree(finished.run("sft"), place / "runs" / "damaged-00000000")
    (place / "runs" / "damaged-00000000" / "status.json").write_text("{")
    (place / "runs" / "notes").mkdir()
    by_id = {row["id"]: row for row in json.loads(said(capsys, "runs", "--json"))}
    sft = by_id.pop(finished.run("sft").name)
    assert (sft["state"], sft["step"], sft["total"], sft["problem"]) == ("finished", 60, 60, None)
    damaged = by_id.pop("damaged-00000000")
    assert damaged["state"] is None
    assert "status.json" in damaged["problem"]
    assert by_id == {}
    lines = {line.split()[0]: line for line in said(capsys, "runs").splitlines()}
    assert lines[sft["id"]].split()[1:3] == ["finished", "60/60"]
    assert lines["damaged-00000000"].split()[1] == "damaged"


@pytest.mark.extended
def test_a_file_and_nnxdsl_are_one_command_line(lab: Any) -> None:
    for verb in ("show", "plan"):
        ours = lab.python("dpo.py", verb, "steps=5", "--json")
        assert ours == lab.cli(verb, "dpo.py", "steps=5", "--json")
        assert ours[0] == 0
        assert json.loads(ours[1])
        assert ours[2] == ""
    assert lab.python("dpo.py", "diff", "sft.py") == lab.cli("diff", "dpo.py", "sft.py")
    code, out, _ = lab.python("dpo.py", "--help")
    assert code == 0
    assert out.startswith(
        "usage: dpo.py [run|show|plan|diff OTHER] [path=value ...] [flags]\n\nThe experiment 'dpo'.\n"
    )
    assert max(map(len, out.splitlines())) <= 100
    assert not (lab.place / "runs").exists()


def test_nothing_but_help_without_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: nnxdsl VERB [FILE-or-RUN] [path=value ...] [flags]\n")


@pytest.fixture
def broken_off(lab: Any, finished: Any) -> tuple[Any, Path]:
    """A lab with the second stage at its checkpoint of step 36."""
    for name in ("sft", "dpo"):
        shutil.copytree(finished.run(name), lab.place / "runs" / finished.run(name).name)
    run = lab.place / "runs" / finished.run("dpo").name
    shutil.rmtree(run / "checkpoints" / "00000040")
    record = json.loads((run / "attempts.jsonl").read_text())
    (run / "attempts.jsonl").write_text(json.dumps({**record, "cwd": str(lab.place)}) + "\n")
    RunDirectory(run).write_status(state="running", pid=1, pid_started=1)
    return lab, run


@pytest.mark.slow
def test_resume_from_elsewhere_with_another_placement(broken_off: tuple[Any, Path], tmp_path: Path) -> None:
    lab, run = broken_off
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code, out, err = lab.cli("resume", f"../runs/{run.name}", "microbatch_size=4", "--json", "--quiet", cwd=elsewhere)
    assert (code, err) == (0, "")
    assert json.loads(out)["state"] == "finished"
    directory = RunDirectory(run)
    assert [row["step"] for row in directory.metrics()] == list(range(40))
    second = directory.attempts()[1]
    assert (second["start"], second["experiment"]["microbatch_size"]) == (36, 4)
    assert list(elsewhere.iterdir()) == []


def test_resume_refuses_what_makes_it_another_run(
    broken_off: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lab, run = broken_off
    monkeypatch.chdir(lab.place)
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    assert cli.main(["resume", run.name, "objective.beta=0.5", "steps=50", "microbatch_size=2"]) == 2
    message = (
        f"would make it another run than {run.name}; on a resume only batching, checkpoint, evaluation, memory, "
        f"mesh, microbatch_size, notes, rollouts, tracking may change"
    )
    assert capsys.readouterr().err == (
        f"SpecError: 2 problems in Experiment 'dpo'\n  objective.beta: {message}\n  steps: {message}\n"
    )
    assert cli.main(["resume", f"{run.name}0"]) == 2
    assert capsys.readouterr().err == (
        f"RunError: {run.name}0: no such file or run (relative to {lab.place}; runs are searched in runs); "
        f"did you mean '{run.name}'?\n"
    )
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    run.rename(run.with_name("dpo-renamed"))
    assert cli.main(["resume", "dpo-renamed"]) == 2
    assert capsys.readouterr().err == (
        f"RunError: runs/dpo-renamed contains the run {run.name}; rename the directory to that id to resume it\n"
    )
