"""What is written a million times stays quick to add to, to go on from and to look at the end of; and is bounded."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from nnxdsl.errors import RunError
from nnxdsl.runs.log import Log
from nnxdsl.runs.repair import Key, repair
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.storage import failpoints
from nnxdsl.storage.failpoints import POINTS, VARIABLE
from nnxdsl.storage.jsonl import JsonLines
from tests.work import calls

NNXDSL = Path(__file__).parents[2] / "nnxdsl"


def make(home: Path) -> RunDirectory:
    return RunDirectory.create(home / "run", identity="one", experiment_json={}, experiment_py="")


@pytest.mark.parametrize("seed", range(20))
def test_rows_read_from_the_end_are_those_read_from_the_beginning(tmp_path: Path, seed: int) -> None:
    seeded = random.Random(seed)
    path = tmp_path / "rows.jsonl"
    sizes = [seeded.choice([0, 1, 10, 65_000, 65_536, 200_000]) for _ in range(seeded.randint(0, 8))]
    rows = [{"step": step, "text": "é" * size} for step, size in enumerate(sizes)]
    torn = seeded.choice([b"", b"{", b"x" * 70_000])
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows) + torn)
    lines = JsonLines(path)
    assert lines.read() == rows
    for count in range(len(rows) + 2):
        assert lines.last(count) == rows[len(rows) - min(count, len(rows)) :]
    kept = seeded.randint(0, 8)
    repaired = repair(lines, lambda row: Key(row["step"], 0), kept, [0])
    assert repaired.problems == []
    assert [step for step, _ in repaired.rows] == [row["step"] for row in rows[:kept]]
    assert lines.read() == rows[:kept]
    lines.append({"step": 99})
    assert lines.read() == [*rows[:kept], {"step": 99}]


def test_rows_that_stand_between_those_of_later_steps_stay(tmp_path: Path) -> None:
    run = make(tmp_path)
    for step in (1, 2, 3, 4, 5):
        run.append_metrics({"step": step})
    for step in (4, 5):
        run.append_evaluation({"step": step})
    assert run.repair_rows(5) == [
        "metrics.jsonl: rows were not sorted by step; they are now",
        "metrics.jsonl: there are no metrics of step 0",
    ]
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4]
    assert [row["step"] for row in run.evaluations()] == [4]
    assert [row["step"] for row in run.last_metrics(2)] == [4, 4]


def test_the_end_of_a_file_is_looked_at_alone(tmp_path: Path) -> None:
    run = make(tmp_path)
    for step in range(100):
        run.append_metrics({"step": step})
    path = run.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'{"step": 3}', b'{"step": ?}'))
    assert run.last_metrics(1) == [{"step": 99}]
    with pytest.raises(RunError, match=r"metrics.jsonl:4: not JSON"):
        run.metrics()


@pytest.mark.extended
def test_a_hundred_thousand_rows_are_looked_at_with_a_few_calls_each(tmp_path: Path) -> None:
    run = make(tmp_path)
    row = {f"metric {number}": number / 7 for number in range(20)}
    path = run.path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "attempt": 1, **row}) + "\n" for step in range(100_000)))
    repaired: list[object] = []
    repairing = calls(lambda: repaired.extend(run.repair_rows(90_000)))
    assert (repaired, repairing < 100 * 100_000) == ([], True)
    assert run.last_metrics(1)[0]["step"] == 89_999


def test_half_written_files_of_killed_writers_are_swept(tmp_path: Path) -> None:
    run = make(tmp_path)
    (run.path / ".metrics.jsonl.123.tmp").write_text("half")
    run.clear_requests()
    assert list(run.path.glob(".*")) == []


def test_a_log_has_an_end(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    for attempt in range(3):
        with Log(path, max_bytes=2_000) as log:
            for number in range(50):
                log.write(f"attempt {attempt}, line {number}")
    older = tmp_path / "log.1.txt"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["log.1.txt", "log.txt"]
    assert path.stat().st_size <= 2_000
    assert 1_900 < older.stat().st_size <= 2_000
    lines = [line.partition("  ")[2] for file in (older, path) for line in file.read_text().splitlines()]
    said = [f"attempt {attempt}, line {number}" for attempt in range(3) for number in range(50)]
    assert lines == said[-len(lines) :]


def test_points_are_those_that_the_code_comes_to() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in NNXDSL.rglob("*.py"))
    assert [point for point in POINTS if text.count(f'hit_failpoint("{point}")') != 1] == []
    assert text.count('hit_failpoint("') == len(POINTS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("commit-rename", "there is no failpoint 'commit-rename'; did you mean 'commit-renamed'?"),
        ("commit-renamed@0", "expected a failpoint, optionally followed by '@3' or ':pause', got 'commit-renamed@0'"),
        ("lock-taken:stop", "expected a failpoint, optionally followed by '@3' or ':pause', got 'lock-taken:stop'"),
    ],
)
def test_a_point_that_is_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.setattr("nnxdsl.storage.failpoints._from_environment", failpoints._from_environment.__wrapped__)
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(RunError) as raised:
        make(tmp_path)
    assert str(raised.value) == f"{VARIABLE}: {message}"
    assert list(tmp_path.iterdir()) == []
