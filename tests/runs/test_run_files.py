"""Edited, damaged and foreign files of runs: one message, no traceback."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from nnxdsl import cli
from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.runs.run_dir import RunDirectory

STEPS, SAVED = 4, 2
CASES, FIRST, TRAINED = 300, 20, 24

RECIPE = f"""
from nnxdsl import *

experiment = Experiment(
    name="small",
    model=Model.Gemma3("tiny"),
    objective=Objective.SFT(loss_on="all"),
    data=Data.Text("texts.jsonl", max_length=16),
    optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=1e-2)),
    batch_size=2,
    steps={STEPS},
    evaluation=Evaluation(every_steps=2, prompts=("Hi",), max_new_tokens=2),
    checkpoint=Checkpoint(every_steps={SAVED}, keep=2),
)
"""

FILES = (
    "status.json",
    "metrics.jsonl",
    "events.jsonl",
    "samples.jsonl",
    "attempts.jsonl",
    "run.json",
    "experiment.json",
    "layout.json",
    "log.txt",
    "lock",
    "control",
    "checkpoints",
    f"checkpoints/{SAVED:08d}/manifest.json",
    f"checkpoints/{STEPS:08d}/manifest.json",
)
WRONG: tuple[Any, ...] = (
    None, True, -1, 0, 1, 3, 10**30, float("nan"), float("inf"), 0.5, "", "x", "\ud800", "a\0b", "\x1b[31m", "y" * 5000,
    [], {}, [[1]], {"a": {}}, "finished", "running", "queued",
)  # fmt: skip
BYTES = (b"", b"{", b"\xff\xfe\n", b"\0" * 999, b"[" * 100_000, b"9" * 10_000, b"null\n", b"[]\n", b"{}\n", b'"a"\n')


@attrs.frozen
class Bases:
    """Homes with one run each: one that came to its end, one that was killed after its first checkpoint."""

    finished: Path
    killed: Path
    rows: dict[str, list[str]]


def run_of(home: Path) -> Path:
    (result,) = home.glob("small-*")
    return result


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    place = tmp_path_factory.mktemp("bases")
    (place / "small.py").write_text(RECIPE)
    (place / "texts.jsonl").write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(6)))
    before = Path.cwd()
    os.chdir(place)
    try:
        assert cli.main(["run", "small.py", "--home", "finished", "--quiet"]) == 0
    finally:
        os.chdir(before)
    shutil.copytree(place / "finished", place / "killed")
    run = run_of(place / "killed")
    shutil.rmtree(run / "checkpoints" / f"{STEPS:08d}")
    status = json.loads((run / "status.json").read_text())
    status.update(state="running", step=3, checkpoint=SAVED, exit_code=None, pid_started=1)
    (run / "status.json").write_text(json.dumps(status))
    rows = {name: _stepped(run_of(place / "finished") / name) for name in ("metrics.jsonl", "samples.jsonl")}
    return Bases(place / "finished", place / "killed", rows)


def _stepped(path: Path) -> list[str]:
    """Which rows there are."""
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    return [f"{row['step']} {row.get('kind')} {row.get('prompt')}" for row in rows]


def changed(value: Any, seeded: random.Random) -> Any:
    """A JSON value in which one thing is another."""
    if isinstance(value, dict) and value and seeded.random() < 0.9:
        name = seeded.choice(sorted(value))
        if seeded.random() < 0.15:
            return {other: held for other, held in value.items() if other != name}
        return {**value, name: changed(value[name], seeded)}
    if isinstance(value, list) and value and seeded.random() < 0.7:
        place = seeded.randrange(len(value))
        return [*value[:place], changed(value[place], seeded), *value[place + 1 :]]
    return seeded.choice(WRONG)


def put_in_place(path: Path, seeded: random.Random) -> None:
    """Something that is no file, or leads elsewhere."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    outside = path.parents[2] / "outside.txt"
    links = ("/dev/zero", "/dev/null", "/nowhere", path.name, str(outside), "/proc/self/environ")
    match seeded.randrange(4):
        case 0:
            path.mkdir()
        case 1:
            os.mkfifo(path)
        case 2:
            path.symlink_to(seeded.choice(links))
        case _:
            pass


def mutate(run: Path, name: str, seeded: random.Random) -> None:
    """Changes one file of a run."""
    path = run / name
    if not path.is_file() or seeded.random() < 0.2:
        put_in_place(path, seeded)
        return
    data = path.read_bytes()
    path.unlink()  # it may be a link to that of another run
    if seeded.random() < 0.15:
        path.write_bytes(seeded.choice(BYTES))
    elif seeded.random() < 0.15:
        path.write_bytes(data[: seeded.randrange(len(data) + 1)])
    elif name.endswith(".json"):
        path.write_text(json.dumps(changed(json.loads(data), seeded)))
    elif name.endswith(".jsonl"):
        path.write_bytes(b"".join(_mutated_lines(data.splitlines(keepends=True), seeded)))
    else:
        path.write_bytes(seeded.choice(BYTES))


def _mutated_lines(lines: list[bytes], seeded: random.Random) -> list[bytes]:
    place, other = seeded.randrange(len(lines)), seeded.randrange(len(lines))
    match seeded.randrange(5):
        case 0:
            lines.insert(other, lines[place])
        case 1:
            lines.pop(place)
        case 2:
            lines.insert(place, seeded.choice(BYTES[1:]).rstrip() + b"\n")
        case 3:
            lines.insert(other, lines.pop(place))
        case _:
            lines[place] = json.dumps(changed(json.loads(lines[place]), seeded)).encode() + b"\n"
    return lines


def copied(home: Path, to: Path) -> Path:
    """A home like another; files of checkpoints, which nothing writes to, are shared."""
    shutil.copytree(home, to, copy_function=lambda a, b: os.link(a, b) if "checkpoints" in a else shutil.copy2(a, b))
    return to


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """`nnxdsl WORDS`, in this process: its exit code, and what it printed; it must not have left a traceback."""
    monkeypatch.chdir(".")  # goes back to it at the end

    def call(*argv: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = cli.main(argv)
        out, err = capfd.readouterr()
        assert code in (0, 1, 2), (argv, code, err)
        assert "Traceback" not in err + out, err
        if code:
            assert len(re.findall(r"^\w+Error: ", err, re.MULTILINE)) == 1, err
        return code, out, err

    return call


def check(case: int, base: str, bases: Bases, place: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    seeded = random.Random(f"{base} {case}")
    home = copied(getattr(bases, base), place / "home" / str(case))
    outside = place / "home" / "outside.txt"
    outside.write_text('{"theirs": 1}\n')
    run = run_of(home)
    where = place / "elsewhere"  # no data there: what would train is refused after its files have been read
    where.mkdir(exist_ok=True)
    os.chdir(where)
    attempts = run / "attempts.jsonl"
    attempts.write_text(json.dumps({**json.loads(attempts.read_text()), "cwd": str(where)}) + "\n")
    names = seeded.sample(FILES, seeded.choice((1, 1, 2)))
    for name in names:
        if (run / name).parent.is_dir():
            mutate(run, name, seeded)
    before = sorted(entry.name for entry in home.iterdir())

    code, out, _ = command("runs", "--home", str(home))
    assert (code, len(out.splitlines())) == (0, 1), (names, out)
    is_complete = (run / "checkpoints" / f"{STEPS:08d}" / "manifest.json").is_file()
    command("show", run.name, "--home", str(home))
    code, _, err = command("resume", run.name, "--home", str(home), "--quiet", f"notes='{case}'")
    assert code in (0, 2), (names, err)
    if code == 0 or "finished" in out.split():  # nothing can have trained
        has_figures = "metrics.jsonl" not in names and base == "finished"
        assert is_complete or (has_figures and not list(run.glob("checkpoints/*/manifest.json"))), (names, out, err)
    assert sorted(entry.name for entry in home.iterdir() if not entry.name.startswith(".")) == before, names
    assert outside.read_text() == '{"theirs": 1}\n'
    os.chdir(place)
    shutil.rmtree(home)


@pytest.mark.extended
@pytest.mark.parametrize("base", ["finished", "killed"])
@pytest.mark.parametrize(
    "cases", [range(FIRST), pytest.param(range(FIRST, CASES // 2), marks=pytest.mark.slow)], ids=["first", "rest"]
)
def test_changed_files_end_in_a_message(base: str, cases: range, bases: Bases, tmp_path: Path, command: Any) -> None:
    for case in cases:
        check(case, base, bases, tmp_path, command)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(TRAINED))
def test_a_run_whose_files_were_changed_goes_on_or_says_why_not(
    case: int, bases: Bases, tmp_path: Path, command: Any
) -> None:
    """Where it goes on, it has each step once, and has named those that are not there."""
    seeded = random.Random(f"trained {case}")
    home = copied(bases.killed, tmp_path / "home")
    run = run_of(home)
    name = FILES[case % (len(FILES) - 1)]  # the last one is not there
    mutate(run, name, seeded)
    code, _, err = command("resume", run.name, "--home", str(home))
    assert code in (0, 2), (name, err)
    assert [entry.name for entry in home.iterdir() if not entry.name.startswith(".")] == [run.name]
    if code == 2:
        return
    figures = _stepped(run / "metrics.jsonl")
    whole = bases.rows["metrics.jsonl"]
    assert figures == [row for row in whole if row in figures], (name, err)
    for step in range(STEPS):
        assert f"{step} None None" in figures or "there are no metrics of step" in err, (name, err)
    samples = _stepped(run / "samples.jsonl")
    assert len(samples) == len(set(samples))
    with CheckpointReader(run / "checkpoints") as checkpoints:
        assert checkpoints.latest_good().step == STEPS


def rows_twice(run: Path) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[1].replace(b'"attempt": 1', b'"attempt": 8'), b"\xff\n", *lines[2:]]))


def claim(run: Path) -> None:
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "state": "finished", "step": STEPS, "checkpoint": STEPS}))


def no_number(run: Path) -> None:
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "checkpoint": "two"}))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (rows_twice, ["line 4 could not be read and was dropped", "line 3 repeated rows of other lines"]),
        (
            claim,
            ["status.json says that it has finished, but the newest checkpoint is of step 2 of 4; resuming from there"],
        ),
        (no_number, []),
    ],
)
def test_a_changed_run_goes_on_and_each_step_is_there_once(
    change: Callable[[Path], None], said: list[str], bases: Bases, tmp_path: Path, command: Any
) -> None:
    home = copied(bases.killed, tmp_path / "home")
    run = run_of(home)
    change(run)
    assert RunDirectory.find(run, identity=RunDirectory(run).identity) is not None
    code, out, _ = command("runs", "--home", str(home))
    assert "finished" not in out.split()
    code, _, err = command("resume", run.name, "--home", str(home))
    assert code == 0, err
    for line in said:
        assert line in err
    assert {name: _stepped(run / name) for name in bases.rows} == bases.rows
    with CheckpointReader(run / "checkpoints") as checkpoints:
        assert checkpoints.latest_good().step == STEPS
    reported = [str(event.get("event")) for event in RunDirectory(run).events()]
    assert all(any(line.removesuffix("; resuming from there") in event for event in reported) for line in said)
    assert command("resume", run.name, "--home", str(home))[0] == 0


@pytest.mark.extended
def test_an_attempt_of_another_run_trains_nothing(bases: Bases, tmp_path: Path, command: Any) -> None:
    home = copied(bases.killed, tmp_path / "home")
    path = run_of(home) / "attempts.jsonl"
    row = json.loads(path.read_text())
    for edited, problem in (
        ({**row, "experiment": {**row["experiment"], "seed": 7}}, "and not of"),
        ({name: value for name, value in row.items() if name != "experiment"}, "has no experiment; remove its line"),
        ({**row, "experiment": {**row["experiment"], "steps": "x"}}, "steps: expected int, got 'x'"),
        ({**row, "experiment": "x"}, ":1: experiment: expected an object, got 'x'"),
    ):
        path.write_text(json.dumps(edited) + "\n")
        code, _, err = command("resume", run_of(home).name, "--home", str(home))
        assert code == 2
        assert "attempts.jsonl" in err
        assert problem in err
        assert [entry.name for entry in home.iterdir() if not entry.name.startswith(".")] == [run_of(home).name]
