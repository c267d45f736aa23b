"""Row 8: a full disk is said, before a save where it can be known; the last step stays; with room it ends bit-equal."""

from __future__ import annotations

import contextlib
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_lab import Lab, Nursery, Whole, make

from nnxdsl.runs.checkpoint_reader import CheckpointReader, LatestGood

pytestmark = pytest.mark.faults


@contextlib.contextmanager
def small_disk(place: Path, size: int) -> Iterator[Path]:
    """A file system of so many bytes."""
    place.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill(place: Path, leave: int) -> Path:
    """Takes all but so many bytes."""
    path = place / "other people's"
    free = shutil.disk_usage(place).free - leave
    with path.open("wb") as file:
        for _ in range(free // 4096):
            file.write(b"x" * 4096)
    return path


def test_a_save_that_has_no_room_is_refused_before_it_is_written(lab: Lab, whole: Whole, nursery: Nursery) -> None:
    with small_disk(lab.place / "small", 8_000_000) as place:
        child = lab.start("--home", "small/runs", point="save-begun@3:pause")  # step 9 is about to be written
        child.until(child.is_stopped)
        (run,) = (place / "runs").glob("tiny-*")
        taken = fill(place, 20_000)
        child.send(signal.SIGCONT)
        code = child.wait()
        said = child.said()
        assert code == 1, said
        assert "TrainingError: " in said
        assert "could not be saved" in said
        assert "checkpoint step 6 is unchanged; free some space or name another directory, and run again" in said
        assert whole.check_saved(run, at_least=6) == 6
        assert not (run / "checkpoints" / ".writing").exists()
        # Before anything is written, where it begins or goes on:
        refused = lab.refused("--home", "small/runs")
        match = re.fullmatch(
            r"CheckpointError: checkpoint step 9 could not be saved in .*/small/runs/tiny-\w+/checkpoints: it needs "
            r"(\d+\.\d) KiB of disk space, and (\d+\.\d) KiB are free; checkpoint step 6 is unchanged; free some "
            r"space or name another directory, and run again",
            refused,
        )
        assert match is not None, refused
        needed = sum(path.stat().st_size for path in (run / "checkpoints" / "00000006").rglob("*") if path.is_file())
        assert 0.3 * needed < float(match[1]) * 1024 < 3 * needed
        # With room again it goes on.
        taken.unlink()
        lab.finish("--home", "small/runs")
        whole.check_ended(run)


def test_a_run_is_refused_whose_first_save_has_no_room(lab: Lab) -> None:
    with small_disk(lab.place / "small", 8_000_000) as place:
        fill(place, 60_000)
        said = lab.refused("--home", "small/runs")
        assert "CheckpointError: checkpoint step 3 could not be saved in " in said
        assert "; there is no earlier checkpoint; free some space" in said
        assert not list((place / "runs").glob("tiny-*"))


def test_a_write_that_fails_is_said_and_the_last_step_stays(killed: Lab, whole: Whole) -> None:
    """As a quota does, which no one sees before: no file may have more than so many bytes."""
    child = killed.start(point="save-begun:pause", file_bytes=10**9)
    child.until(child.is_stopped)
    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (15_000, 10**9))
    child.send(signal.SIGCONT)
    code, said = child.wait(), child.said()
    assert code == 1, said
    assert re.search(r"TrainingError: checkpoint step 12 could not be saved in .*File too large", said), said
    assert "checkpoint step 9 is unchanged; free some space or name another directory, and run again" in said
    assert killed.directory.status().get("state") == "failed"
    assert "could not be saved" in (killed.directory.status().get("error") or "")
    assert whole.check_saved(killed.run) == 9
    assert "checkpoint step 12 saved" not in (killed.run / "log.txt").read_text()
    killed.finish()
    whole.check_ended(killed.run)


def test_a_disk_that_is_full_in_the_middle_of_a_save(lab: Lab, whole: Whole) -> None:
    """The room was there when it was asked for, and is gone when it is written to."""
    with small_disk(lab.place / "small", 8_000_000) as place:
        child = lab.start("--home", "small/runs", point="save-begun@2:pause")
        child.until(child.is_stopped)
        (run,) = (place / "runs").glob("tiny-*")
        taken = fill(place, 0)
        child.send(signal.SIGCONT)
        assert child.wait() == 1, child.said()
        assert child.said().splitlines()[-1].startswith("TrainingError: ")
        with CheckpointReader(run / "checkpoints") as checkpoints:
            assert checkpoints.latest_good() == LatestGood(3)
        taken.unlink()
        lab.finish("--home", "small/runs")
        whole.check_ended(run)


def test_a_home_on_another_disk_is_as_good(lab: Lab, whole: Whole, nursery: Nursery, tmp_path: Path) -> None:
    with small_disk(tmp_path / "other", 30_000_000) as place:
        other = make(place / "lab", nursery)
        other.finish()
        whole.check_ended(other.run)
