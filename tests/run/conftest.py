"""Two small recipes (SFT from random weights, then DPO with LoRA) on data made here, and processes that run them."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from tests import waiting
from tests.waiting import HANG_SECONDS

ROOT = Path(__file__).parents[2]
SFT_STEPS, DPO_STEPS = 60, 40

SFT = f"""
from nnxdsl import *

experiment = Experiment(
    name="sft",
    model=Model.Gemma3("tiny"),
    objective=Objective.SFT(),
    data=Data.Conversations("chats.jsonl", max_length=64),
    optimizer=Optimizer.AdamW(schedule=Schedule.WarmupCosine(peak_lr=3e-3, warmup_ratio=0.1)),
    batch_size=4,
    steps={SFT_STEPS},
    evaluation=Evaluation(
        every_steps=30,
        data=Data.Conversations("chats_held_out.jsonl", max_length=64),
        prompts=("Hi 1",),
        max_new_tokens=6,
    ),
    checkpoint=Checkpoint(every_steps=9, keep=2),
)

if __name__ == "__main__":
    experiment.main()
"""

DPO = f"""
from sft import experiment as sft

from nnxdsl import *


experiment = Experiment(
    name="dpo",
    model=Model.Gemma3("tiny", weights=Weights.From(sft)),
    adapter=Adapter.LoRA(rank=4, alpha=8.0),
    objective=Objective.DPO(beta=0.2),
    data=Data.Preferences("pairs.jsonl", max_prompt_length=48, max_completion_length=16),
    optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=2e-3)),
    batch_size=4,
    steps={DPO_STEPS},
    evaluation=Evaluation(
        every_steps=20,
        data=Data.Preferences("pairs_held_out.jsonl", max_prompt_length=48, max_completion_length=16),
        prompts=("Hi 1", "Hi 2, how are you?"),
        max_new_tokens=6,
    ),
    checkpoint=Checkpoint(every_steps=6, keep=2),
)

if __name__ == "__main__":
    experiment.main()
"""


def write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_recipes(place: Path) -> Path:
    """The recipes and their data in `place`."""

    def chat(number: int, answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"Hi {number}"}, {"role": "assistant", "content": answer}]

    def pair(number: int) -> dict[str, object]:
        return {
            "prompt": f"Say {number}: ",
            "chosen": "good " + "x" * (number % 4),
            "rejected": "bad " + "y" * (number % 3),
        }

    chats = [{"messages": chat(n, "good" if n % 2 else "bad")} for n in range(50)]
    write_rows(place / "chats.jsonl", chats[:-7])
    write_rows(place / "chats_held_out.jsonl", chats[-7:])  # 7 rows: the last batch of 4 is not full
    pairs = [pair(n) for n in range(50)]
    write_rows(place / "pairs.jsonl", pairs[:-10])
    write_rows(place / "pairs_held_out.jsonl", pairs[-10:])
    (place / "sft.py").write_text(SFT, encoding="utf-8")
    (place / "dpo.py").write_text(DPO, encoding="utf-8")
    return place


@attrs.frozen
class Lab:
    """A directory with the recipes, and the environment of the processes that run there."""

    place: Path
    environment: dict[str, str]

    def start(self, *words: str, cwd: Path | None = None) -> subprocess.Popen[str]:
        """`python WORDS`."""
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=cwd or self.place,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def python(self, *words: str, cwd: Path | None = None) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of `python WORDS`."""
        child = self.start(*words, cwd=cwd)
        out, err = child.communicate(timeout=HANG_SECONDS)
        return child.returncode, out, err

    def cli(self, *words: str, cwd: Path | None = None) -> tuple[int, str, str]:
        """The same of `nnxdsl WORDS`."""
        return self.python("-m", "nnxdsl", *words, cwd=cwd)


def environment() -> dict[str, str]:
    """Of processes: they share what XLA compiled, as the tests do."""
    packages = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {"JAX_PLATFORMS": "cpu", **os.environ, "PYTHONPATH": packages, "COLUMNS": "100"}


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(write_recipes(tmp_path), environment())


@attrs.frozen
class Finished:
    """Both recipes run to their end by one command, without a break."""

    lab: Lab
    code: int
    out: str
    err: str

    def run(self, name: str) -> Path:
        """The directory of one of them."""
        (found,) = (self.lab.place / "runs").glob(f"{name}-*")
        return found


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Made by the first worker that asks; the others wait for it."""
    place = shared(tmp_path_factory) / "finished"
    with (place.with_suffix(".lock")).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lab, said = Lab(place, environment()), place / "said.json"
        if not said.exists():
            place.mkdir()
            said.write_text(json.dumps(Lab(write_recipes(place), environment()).python("dpo.py")))
    return Finished(lab, *json.loads(said.read_text()))


def shared(factory: pytest.TempPathFactory) -> Path:
    """A directory that all workers of one test run have in common."""
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., None]:
    def wait(is_so: Callable[[], bool], child: subprocess.Popen[str]) -> None:
        """Waits until something is so, as long as the process lives."""

        def is_so_or_ended() -> bool:
            if is_so():
                return True
            if child.poll() is not None:
                raise AssertionError(f"ended with {child.returncode}: {child.communicate()[1][-3000:]}")
            return False

        waiting.wait_until(is_so_or_ended, every_seconds=0.005)

    return wait
