"""Repair of JSON-lines files: repeated, lost, moved and foreign rows; each step once after a resume."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from nnxdsl.runs.repair import missing_steps
from nnxdsl.runs.run_dir import RunDirectory

STEPS = 20
RESUMED = 12
STARTS = (0, 4, 9)
PROMPTS = ("a", "b", "a")


def attempt_of(step: int) -> int:
    return max(number for number, start in enumerate(STARTS, 1) if start <= step)


def write(run: RunDirectory) -> None:
    """What three attempts wrote, the last one killed after step 19 with a checkpoint of step 12."""
    for start in STARTS:
        run.append_attempt({"start": start})
    for step in range(STEPS):
        common = {"step": step, "attempt": attempt_of(step)}
        if step % 4 == 0:
            run.append_evaluation({**common, "eval/loss": 1.0 / (step + 1)})
            for prompt in PROMPTS:
                run.append_sample({**common, "prompt": prompt, "policy": "x" * step, "reference": None})
        run.append_metrics({**common, "loss": 1.0 / (step + 1)})
        if step % 2 == 0:
            for group in range(2):
                run.append_rollout({**common, "group": group, "row": "a:1", "prompt": "a", "completions": []})
    run.close()


def rows(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.mark.parametrize("seed", range(60))
def test_whatever_was_done_to_rows_each_step_stands_once_or_is_named(tmp_path: Path, seed: int) -> None:
    """Lines are repeated, deleted, moved, garbled, edited to be another attempt's, or replaced by no rows at all."""
    run = RunDirectory.create(tmp_path / "run", identity="", experiment_json={}, experiment_py="")
    write(run)
    seeded = random.Random(seed)
    whole = {name: rows(run.path / name) for name in ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl")}
    for name, kept in whole.items():
        lines = (run.path / name).read_bytes().splitlines()
        for _ in range(seeded.randint(1, 4)):
            place, other = seeded.randrange(len(lines)), seeded.randrange(len(lines))
            row = json.loads(lines[place]) if lines[place][:1] == b"{" else {}
            match seeded.randrange(7):
                case 0:
                    lines.insert(other, lines[place])
                case 1:
                    lines.pop(place)
                case 2:
                    lines.insert(other, lines.pop(place))
                case 3:
                    lines[place] = lines[place][: len(lines[place]) // 2]
                case 4:
                    lines.insert(place, b"\xff\xfe" + lines[place])
                case 5:  # a row of an attempt that went back behind it
                    lines.insert(other, json.dumps({**row, "attempt": 99, "loss": 7.0, "policy": "other"}).encode())
                case _:
                    lines.insert(
                        place, seeded.choice([b"[]", b"{}", b'{"step": -1}', b'{"step": "1"}', b'{"step": 1.0}'])
                    )
        (run.path / name).write_bytes(b"".join(line + b"\n" for line in lines))
        assert kept
    said = run.repair_rows(RESUMED, PROMPTS)
    expected = [row for row in whole["metrics.jsonl"] if row["step"] < RESUMED]
    actual = rows(run.path / "metrics.jsonl")
    assert [row for row in actual if row not in expected] == [] or any(row.get("loss") == 7.0 for row in actual)
    keys = [(row.get("kind"), row["step"]) for row in actual]
    assert len(keys) == len(set(keys))
    assert keys == [key for key in ((row.get("kind"), row["step"]) for row in expected) if key in set(keys)]
    gone = sorted({row["step"] for row in expected if "kind" not in row} - {s for k, s in keys if k is None})
    assert [line for line in said if "no metrics" in line] == (
        [f"metrics.jsonl: there are no metrics of {missing_steps(set(range(RESUMED)) - set(gone), RESUMED)}"]
        if gone
        else []
    )
    samples = [(row["step"], row["prompt"]) for row in rows(run.path / "samples.jsonl")]
    for key in samples:
        assert samples.count(key) <= PROMPTS.count(key[1])
    assert max(step for step, _ in samples) < RESUMED
    groups = [(row["step"], row["group"]) for row in rows(run.path / "rollouts.jsonl")]
    assert groups == sorted(set(groups))
    assert max(groups) < (RESUMED, 0)
    assert run.repair_rows(RESUMED, PROMPTS) == [line for line in said if "no metrics" in line]  # it is done once


def test_of_several_rows_the_one_of_the_right_attempt_stays(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", identity="", experiment_json={}, experiment_py="")
    write(run)
    path = run.path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    foreign = [json.dumps({"step": step, "attempt": 1, "loss": 7.0}).encode() + b"\n" for step in (5, 6, 10)]
    path.write_bytes(b"".join([*foreign, *lines]))
    before = [json.loads(line) for line in lines]
    assert run.repair_rows(STEPS, PROMPTS) == [
        "metrics.jsonl: lines 1, 2, 3 repeated rows of other lines and were dropped"
    ]
    assert rows(path) == before


def test_a_file_that_is_as_it_should_be_is_not_written(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", identity="", experiment_json={}, experiment_py="")
    write(run)
    names = ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl")
    before = [(run.path / name).stat() for name in names]
    assert run.repair_rows(STEPS, PROMPTS) == []
    assert [(run.path / name).stat() for name in names] == before


@pytest.mark.parametrize(
    ("steps", "start", "said"),
    [
        ([], 0, ""),
        ([0, 1, 2], 3, ""),
        ([1, 2], 3, "step 0"),
        ([0, 2, 4, 8], 9, "steps 1, 3, 5-7"),
        ([], 4, "steps 0-3"),
        (range(1, 40, 2), 40, "steps 0, 2, 4, 6, 8, 10, 12, 14 and 12 more gaps"),
    ],
)
def test_missing_steps_are_named(steps: Any, start: int, said: str) -> None:
    assert missing_steps(steps, start) == said
