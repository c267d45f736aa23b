"""Row 8, further: whatever the system refuses, and when, a run ends with one message, and with it goes on later."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fault_lab import Lab, Whole, environment

pytestmark = pytest.mark.faults

SPACES = tuple(mib * 2**20 for mib in (64, 100, 200, 300, 400, 600, 900, 1200, 1600, 2000))


def one_message(said: str) -> str:
    """The only error that it wrote."""
    assert "Traceback" not in said, said[-4000:]
    assert "Exception ignored" not in said, said[-4000:]
    assert "never awaited" not in said, said[-4000:]
    errors = re.findall(r"^\w+Error: .*", said, re.MULTILINE)
    assert len(errors) == 1, said[-4000:]
    assert said.rstrip().endswith(errors[0]), said[-4000:]
    return errors[0]


@pytest.mark.parametrize("size", [3_000, 4_000, 9_000, 15_000, 21_000])
def test_a_file_that_may_not_grow(lab: Lab, whole: Whole, size: int) -> None:
    child = lab.start(point="save-begun@2:pause", file_bytes=10**9)
    child.until(child.is_stopped)
    resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (size, 10**9))
    child.send(signal.SIGCONT)
    assert child.wait() == 1, child.said()
    one_message(child.said())
    assert whole.check_saved(lab.run) in (3, 6)
    lab.finish()
    whole.check_ended(lab.run)


@pytest.mark.parametrize("point", ["save-begun@2:pause", "metrics-appended@2:pause"])
@pytest.mark.parametrize("free", [0, 1, 2, 5, 12, 30, 63, 64, 80])
def test_too_few_file_descriptors(lab: Lab, whole: Whole, free: int, point: str) -> None:
    child = lab.start(point=point)
    child.until(child.is_stopped)
    used = max(int(name) for name in os.listdir(f"/proc/{child.pid}/fd")) + 1
    resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (used + free, used + free))
    child.send(signal.SIGCONT)
    code = child.wait()
    assert code in (0, 1), child.said()
    if code:
        assert re.search("descriptors|Too many open files", one_message(child.said()))
        assert whole.check_saved(lab.run) in (0, 3, 6, 9)
        lab.finish()
    whole.check_ended(lab.run)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("verb", ["run", "plan"])
def test_too_little_address_space(lab: Lab, space: int, verb: str) -> None:
    recipe = (lab.place / "tiny.py").read_text()
    recipe = recipe.replace("from small_lab.model import Small\n", "")
    recipe = re.sub(r"Small\(.*\)", 'Model.Gemma3("tiny")', recipe)
    (lab.place / "tiny.py").write_text(recipe)
    done = subprocess.run(
        ["sh", "-c", f'ulimit -v {space // 1024}; exec "$0" "$@"', sys.executable, "-m", "nnxdsl", verb, "tiny.py"],
        cwd=lab.place, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (1, 2), done.stderr
    one_message(done.stderr)
    assert not Path(lab.place / "runs").exists()


@pytest.mark.parametrize("blocks", [0, 1, 4, 16])
def test_files_that_may_not_grow_from_the_beginning(lab: Lab, whole: Whole, blocks: int) -> None:
    """With what it prints in a pipe, which may."""
    done = subprocess.run(
        ["sh", "-c", f'ulimit -f {blocks}; exec "$0" "$@"', sys.executable, "tiny.py", "run"],
        cwd=lab.place, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (1, 2), done.stderr
    one_message(done.stderr)
    lab.finish()
    whole.check_ended(lab.run)
