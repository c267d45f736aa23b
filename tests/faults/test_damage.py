"""Rows 9 to 13: whatever is done to a file of a committed step is seen and said; so with the other files of a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_lab import Lab, Whole, digests, rows, without_times

from nnxdsl.runs.checkpoint_format import CheckpointError
from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.runs.run_list import list_runs

pytestmark = pytest.mark.faults


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path, place: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncate": truncate,
    "flip": flip,
    "flip the first": lambda path: flip(path, 0.0),
    "flip the last": lambda path: flip(path, 1.0),
    "delete": Path.unlink,
    "empty": empty,
    "lengthen": lengthen,
}


def test_any_damage_to_any_file_of_a_step_is_seen(killed: Lab, whole: Whole) -> None:
    """All files of the newest step, each damaged in each way: the step is passed over by name, and never restored."""
    place = killed.checkpoints / "00000009"
    files = sorted(path for path in place.rglob("*") if path.is_file())
    assert len(files) > 10
    tried = 0
    for path in files:
        data = path.read_bytes()
        for name, damage in DAMAGES.items():
            if not data and name != "delete" and name != "lengthen":
                continue  # there is nothing to damage
            damage(path)
            assert not path.exists() or path.read_bytes() != data, (path, name)
            with CheckpointReader(killed.checkpoints) as checkpoints:
                good = checkpoints.latest_good()
                assert (good.step, [one.step for one in good.damaged]) == (6, [9]), (path, name)
                assert path.name in good.damaged[0].reason
                with pytest.raises(CheckpointError, match=r"step 9 in .* is damaged: "):
                    digests(checkpoints, 9)
                assert digests(checkpoints, 6) == whole.arrays[6]
            path.write_bytes(data)
            tried += 1
    assert tried > 6 * 10
    assert whole.check_saved(killed.run) == 9  # and all is well again


def test_what_is_beside_the_files_of_a_step_changes_nothing(killed: Lab, whole: Whole) -> None:
    place = killed.checkpoints / "00000009"
    (place / "notes.txt").write_text("mine")
    (place / "arrays" / "trainable" / "d").mkdir(exist_ok=True)
    (place / "arrays" / "trainable" / "d" / "more").write_bytes(b"x" * 100)
    assert whole.check_saved(killed.run) == 9


@pytest.mark.parametrize("name", ["manifest.json", "arrays"])
def test_a_run_goes_back_one_step_says_so_and_ends_bit_equal(killed: Lab, whole: Whole, name: str) -> None:
    place = killed.checkpoints / "00000009"
    path = place / name
    if path.is_dir():
        path = max((path for path in path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    flip(path)
    child = killed.finish()
    said = child.said()
    assert f"checkpoint step 9 is damaged: {path.relative_to(place)} " in said
    assert "; going back to step 6\n" in said
    assert f"resuming runs/{killed.run.name} at step 6\n" in said
    assert any("going back to step 6" in event["event"] for event in killed.directory.events())
    whole.check_ended(killed.run)


def test_if_all_steps_are_damaged_it_stops_and_touches_nothing(killed: Lab) -> None:
    for step in (6, 9):
        (killed.checkpoints / f"{step:08d}" / "manifest.json").unlink()
    before = contents(killed)
    said = killed.refused()
    assert said.splitlines() == [
        f"CheckpointError: no checkpoint in {killed.checkpoints} can be used:",
        "  step 9: manifest.json is missing",
        "  step 6: manifest.json is missing",
        "restore the files, or move the directory away to start again from step 0",
    ]
    assert contents(killed) == before


def test_if_all_steps_are_gone_it_stops_and_touches_nothing(killed: Lab) -> None:
    """The status says that a step was saved: to begin again at 0 would throw away what it learnt, without a word."""
    killed.directory.write_status(checkpoint=9)
    for step in (6, 9):
        shutil.rmtree(killed.checkpoints / f"{step:08d}")
    before = contents(killed)
    assert killed.refused() == (
        f"RunError: runs/{killed.run.name}: step 9 was saved, and {killed.checkpoints} holds no step; "
        "restore it, or start again with --restart"
    )
    assert contents(killed) == before


def test_a_step_that_is_gone_is_said(killed: Lab, whole: Whole) -> None:
    killed.directory.write_status(checkpoint=9)
    shutil.rmtree(killed.checkpoints / "00000009")
    said = killed.finish().said()
    assert "checkpoint step 9 is missing; going back to step 6\n" in said
    whole.check_ended(killed.run)


def contents(lab: Lab) -> dict[Path, bytes]:
    """All files but the lock, and those that tell the story: that a lock was stale, what was refused."""
    return {
        path: path.read_bytes()
        for path in lab.run.rglob("*")
        if path.is_file() and path.name not in ("log.txt", "events.jsonl", "lock")
    }  # fmt: skip


@pytest.mark.parametrize("damage", ["truncate", "flip the first", "delete", "empty"])
def test_a_damaged_status_is_started_afresh(killed: Lab, whole: Whole, damage: str) -> None:
    DAMAGES[damage](killed.run / "status.json")
    (summary,) = list_runs(killed.place / "runs")
    assert "status.json" in (summary.problem or "")
    killed.finish()
    whole.check_ended(killed.run)


@pytest.mark.parametrize("damage", ["truncate", "flip the first", "empty", "flip"])
def test_a_damaged_record_of_the_run_is_named_and_nothing_is_touched(killed: Lab, damage: str) -> None:
    DAMAGES[damage](killed.run / "run.json")
    before = contents(killed)
    said = killed.refused()
    assert "run.json" in said or "holds another experiment" in said
    assert contents(killed) == before


def test_a_run_without_its_record_is_no_run(killed: Lab) -> None:
    (killed.run / "run.json").unlink()
    before = contents(killed)
    assert "is no run directory: it has no run.json" in killed.refused()
    assert contents(killed) == before


TORN: dict[str, bytes] = {
    "half a row": b'{"step": 12, "loss": 0.12',
    "zeros": b"\0" * 5000,
    "rubbish": b"\xff\xfe\n" + b"\0" * 10 + b"\n",
    "a row of no step": b"[1, 2]\n",
}


@pytest.mark.parametrize("tail", TORN)
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_rows_that_a_power_cut_left_torn_are_cut_off(killed: Lab, whole: Whole, name: str, tail: str) -> None:
    with (killed.run / name).open("ab") as file:
        file.write(TORN[tail])
    killed.finish()
    whole.check_ended(killed.run)


@pytest.mark.parametrize(("number", "kind"), [(2, "a step"), (7, "evaluation")])
def test_a_damaged_row_in_the_middle_is_dropped_by_line_and_the_run_goes_on(
    killed: Lab, whole: Whole, number: int, kind: str
) -> None:
    path = killed.run / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    assert (b'"evaluation"' in lines[number]) == (kind == "evaluation")
    lines[number] = lines[number][:40] + b"\x00" + lines[number][41:50]
    path.write_bytes(b"\n".join(lines))
    said = killed.finish().said()
    assert f"warning: metrics.jsonl: line {number + 1} could not be read and was dropped\n" in said
    step = whole.rows[number]["step"]
    assert (f"warning: metrics.jsonl: there are no metrics of step {step}\n" in said) == (kind == "a step")
    assert killed.directory.status().get("state") == "finished"
    whole.check_saved(killed.run, at_least=12)
    assert without_times(rows(killed.directory)) == [row for place, row in enumerate(whole.rows) if place != number]


def test_rows_that_are_gone_are_said(killed: Lab, whole: Whole) -> None:
    path = killed.run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] < 5]
    path.write_bytes(b"".join(kept))
    said = killed.finish().said()
    assert "warning: metrics.jsonl: there are no metrics of steps 5-8\n" in said
    assert any("no metrics of steps 5-8" in event["event"] for event in killed.directory.events())
    assert [row["step"] for row in rows(killed.directory) if "kind" not in row] == [0, 1, 2, 3, 4, 9, 10, 11]
    assert whole.check_saved(killed.run) == 12


@pytest.mark.parametrize("content", [b"", b"{", b"\xff" * 9000, b'{"pid": "x"}\n', b'{"pid": 1, "host": "elsewhere"}'])
def test_what_the_lock_says_does_not_matter(killed: Lab, whole: Whole, content: bytes) -> None:
    (killed.run / "lock").write_bytes(content)
    killed.finish()
    whole.check_ended(killed.run)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff"])
def test_a_request_that_a_killed_run_did_not_heed_is_forgotten(killed: Lab, whole: Whole, content: bytes) -> None:
    (killed.run / "control" / "stop").write_bytes(content)
    (killed.run / "control" / ".stop.1.tmp").write_bytes(content)
    killed.finish()
    whole.check_ended(killed.run)


@pytest.mark.parametrize("name", ["attempts.jsonl", "events.jsonl"])
def test_damage_to_the_story_of_a_run(killed: Lab, whole: Whole, name: str) -> None:
    """Attempts are read, to be numbered: refused, by line. Events are only added to."""
    path = killed.run / name
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([b"{", *lines]))
    if name == "attempts.jsonl":
        assert f"{path.relative_to(killed.place)}:1: not JSON" in killed.refused()
        path.write_bytes(b"\n".join(lines))
    killed.finish()
    whole.check_ended(killed.run)
