"""A run of seconds in a directory of its own, processes that run it, and what must be true of it after any fault."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import jax

from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.runs.checkpointer import Checkpoints
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.storage import process_info
from tests.waiting import HANG_SECONDS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = HERE.parent / "packages"

STEPS, EVERY = 12, 3

RECIPE = f"""
from small_lab.model import Small

from nnxdsl import *

experiment = Experiment(
    name="tiny",
    model=Small(layers=1, pattern=1, vocab_size=512, tokenizer=Tokenizer.Bytes()),
    objective=Objective.SFT(loss_on="all"),
    data=Data.Text("texts.jsonl", max_length=32),
    optimizer=Optimizer.AdamW(schedule=Schedule.WarmupCosine(peak_lr=1e-2, warmup_ratio=0.25)),
    batch_size=4,
    steps={STEPS},
    seed=3,
    evaluation=Evaluation(
        every_steps=6,
        data=Data.Text("held_out.jsonl", max_length=32),
        prompts=("row 1",),
        max_new_tokens=4,
        temperature=1.0,
    ),
    checkpoint=Checkpoint(every_steps={EVERY}, keep=2),
)

if __name__ == "__main__":
    experiment.main()
"""

TIMES = {"attempt", "tokens/s", "samples/s", "pairs/s", "model_tflops/s", "mfu", "hfu", "peak_memory_gib"}
"""What differs from one attempt to the next."""


def environment() -> dict[str, str]:
    """Of processes that run it: what XLA compiled is shared, down to the smallest program."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(PACKAGES)]),
        "COLUMNS": "100",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OPENBLAS_NUM_THREADS": "1",  # a fork keeps but the thread that forks
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


@attrs.frozen
class Child:
    """A process that was started."""

    nursery: Nursery
    pid: int
    out: Path
    err: Path

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = HANG_SECONDS) -> int:
        """Its exit code, negative for a signal."""
        code = self.nursery.ask({"wait": self.pid, "seconds": seconds})["code"]
        if code is None:
            os.kill(self.pid, signal.SIGKILL)
            raise AssertionError(f"still there after {seconds} s: {self.said()[-3000:]}")
        return code

    def kill(self) -> int:
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def said(self) -> str:
        """What it wrote to stderr."""
        return self.err.read_text(encoding="utf-8", errors="replace")

    def is_there(self) -> bool:
        """Whether it has not ended."""
        return process_info.is_alive(self.pid, None)

    def is_stopped(self) -> bool:
        """Whether it waits for SIGCONT, at a failpoint."""
        text = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text[text.rindex(")") + 1 :].split()[0] in ("T", "t")

    def until(self, is_so: Callable[[], bool], seconds: float = HANG_SECONDS) -> None:
        """Waits until something is so, as long as the process lives."""
        end = time.monotonic() + seconds
        while not is_so():
            code = self.nursery.ask({"wait": self.pid, "seconds": 0})["code"]
            assert code is None, f"ended with {code}: {self.said()[-3000:]}"
            assert time.monotonic() < end, self.said()[-3000:]
            time.sleep(0.005)


class Nursery:
    """The process from which runs are forked; see nursery.py."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._count = 0
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "nursery.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        self._read()

    def start(
        self, place: Path, *argv: str, environment: Mapping[str, str] | None = None, file_bytes: int | None = None
    ) -> Child:
        """`python WORDS` in `place`.

        Args:
            place: Its working directory.
            argv: A file and its arguments, or "-m" and a module.
            environment: Variables beside those of the nursery.
            file_bytes: The largest file that it may write; writes beyond fail.
        """
        self._count += 1
        out, err = (self.place / f"{self._count}.{name}" for name in ("out", "err"))
        asked = {"words": argv, "cwd": str(place), "environment": dict(environment or {}), "file_bytes": file_bytes}
        pid = self.ask({**asked, "out": str(out), "err": str(err)})["pid"]
        return Child(self, pid, out, err)

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the nursery ended with {self._process.wait()}"
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate()


@attrs.frozen
class Lab:
    """A directory with the recipe, its data and its runs."""

    place: Path
    nursery: Nursery

    @property
    def run(self) -> Path:
        """The directory of the run."""
        (result,) = (path for path in (self.place / "runs").glob("tiny-*"))
        return result

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.run)

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"

    def start(self, *argv: str, point: str | None = None, **settings: Any) -> Child:
        """`python tiny.py WORDS`, killed at a failpoint."""
        environment = {**settings.pop("environment", {}), **({} if point is None else {"NNXDSL_FAILPOINT": point})}
        return self.nursery.start(self.place, "tiny.py", "run", *argv, environment=environment, **settings)

    def finish(self, *argv: str, **settings: Any) -> Child:
        """The same to its end, which must be a good one."""
        child = self.start(*argv, **settings)
        code = child.wait()
        assert code == 0, child.said()
        return child

    def refused(self, *argv: str, code: int = 2, **settings: Any) -> str:
        """The last line that it says when it refuses to run; of several, as for a SpecError, all from the error on."""
        child = self.start(*argv, **settings)
        result, said = child.wait(), child.said()
        assert result == code, (result, said)
        lines = said.splitlines()
        starts = [number for number, line in enumerate(lines) if "Error: " in line.split(" ")[0] + " "]
        return "\n".join(lines[starts[-1] :]) if starts else said


def make(place: Path, nursery: Nursery, recipe: str = RECIPE) -> Lab:
    """A lab in a new directory; its recipe's experiment has the name "tiny"."""
    place.mkdir(parents=True, exist_ok=True)
    for name, count in (("texts", 23), ("held_out", 5)):
        rows = [{"text": f"{name} row {number}: {'ab' * (number % 7)}"} for number in range(count)]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (place / "tiny.py").write_text(recipe, encoding="utf-8")
    return Lab(place, nursery)


@attrs.frozen
class Whole:
    """What an undisturbed run did: all that a disturbed one must end with.

    Attributes:
        rows: Of metrics.jsonl, without what goes by the clock.
        samples: Of samples.jsonl, likewise.
        rollouts: Of rollouts.jsonl, likewise.
        arrays: Digests of all arrays, by step and name.
        metas: What was saved beside them.
    """

    rows: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    rollouts: list[dict[str, Any]]
    arrays: dict[int, dict[str, str]]
    metas: dict[int, Any]

    @classmethod
    def of(cls, run: Path) -> Whole:
        directory = RunDirectory(run)
        with CheckpointReader(run / "checkpoints") as checkpoints:
            steps = checkpoints.steps()
            arrays = {step: digests(checkpoints, step) for step in steps}
            metas = {step: checkpoints.meta(step) for step in steps}
        metrics, samples = without_times(rows(directory)), without_times(directory.samples())
        return cls(metrics, samples, without_times(directory.rollouts()), arrays, metas)

    def check_saved(self, run: Path, *, at_least: int = 0) -> int:
        """The newest step, which must be whole and what it should be, as must those before it.

        Args:
            run: A run's directory, whose writer was killed.
            at_least: The step that was said to be saved; 0 for none.
        """
        if not (run / "checkpoints").is_dir():
            assert at_least == 0
            return 0
        with CheckpointReader(run / "checkpoints") as checkpoints:
            good, steps = checkpoints.latest_good(), checkpoints.steps()
            assert good.damaged == ()
            newest = good.step or 0
            assert newest >= at_least
            assert newest == max(steps, default=0)
            for step in steps:
                assert digests(checkpoints, step) == self.arrays[step], step
                assert checkpoints.meta(step) == self.metas[step]
        return newest

    def check_ended(self, run: Path) -> None:
        """Figures, completions and weights are those of the undisturbed run, to the bit; none twice, none missing."""
        directory = RunDirectory(run)
        result = without_times(rows(directory))
        assert [key(row) for row in result] == [key(row) for row in self.rows]
        assert result == self.rows
        assert without_times(directory.samples()) == self.samples
        assert without_times(directory.rollouts()) == self.rollouts
        assert self.check_saved(run) == max(self.arrays)
        status = directory.status()
        assert (status.get("state"), status.get("step"), status.get("exit_code")) == ("finished", max(self.arrays), 0)
        left = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]
        assert left == []
        assert list(run.glob(".*")) == []


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row.get("kind"), row["step"]


def rows(directory: RunDirectory) -> list[dict[str, Any]]:
    """All rows of metrics.jsonl, those of evaluations too, as they stand there."""
    path = directory.path / "metrics.jsonl"
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def without_times(result: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in TIMES} for row in result]


def digests(checkpoints: Checkpoints, step: int) -> dict[str, str]:
    """A digest of each array of a step, as it is restored."""
    contents = checkpoints.contents(step)
    targets = {
        group: {name: jax.ShapeDtypeStruct(info.shape, info.dtype) for name, info in infos.items()}
        for group, infos in contents.items()
    }
    result = checkpoints.restore(step, targets)
    return {
        f"{group}.{name}": hashlib.sha256(f"{array.dtype}{array.shape}".encode() + array.tobytes()).hexdigest()
        for group, arrays in result.items()
        for name, array in jax.device_get(arrays).items()
    }


def steps_done(run: Path) -> int:
    """Rows of training steps in metrics.jsonl."""
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b'"loss"') if path.exists() else 0
