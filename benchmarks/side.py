"""One side of a comparison of steps: the job that every side reads, and a process that takes steps when it is told to.

Numpy and the standard library alone, since each side runs in an environment of its own. A side reads a line for each
thing that is asked of it and answers with one line of JSON: `go N` takes N steps and tells their seconds (of the
clock, and of all cores together), `measure`
begins to watch the memory anew, `end` tells the losses of all steps and what memory they took.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MODEL, PAIRS, ADAPTER, NUMBERS = "model", "pairs.jsonl", "adapter.npz", "job.json"


class Job:
    """A directory: a model of the Hub's format, pairs as token ids, first values of adapters, numbers.

    Attributes:
        model: The model's directory.
        pairs: Each a dict of `prompt_ids`, `chosen_ids` and `rejected_ids`.
        adapter: [in, rank] float32 values of A by the Hub's name of the module; empty for full fine-tuning. B is zero.
        numbers: `batch`, `prompt`, `response`, `beta`, `learning_rate`, `rank`, `alpha`, `lora`, `spread`, `seed`.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.model = self.directory / MODEL
        self.numbers: dict[str, Any] = json.loads((self.directory / NUMBERS).read_text())
        self.pairs = [json.loads(line) for line in (self.directory / PAIRS).read_text().splitlines()]
        with np.load(self.directory / ADAPTER) as file:
            self.adapter = {name: file[name] for name in file.files}

    @property
    def is_lora(self) -> bool:
        """Whether adapters are trained, and not all weights."""
        return bool(self.adapter)

    def batch(self, step: int) -> list[dict[str, list[int]]]:
        """The pairs of a step: batches follow each other in the file's order, and begin again at its end."""
        size = self.numbers["batch"]
        start = step * size % len(self.pairs)
        return self.pairs[start : start + size]

    def padded(self, step: int) -> dict[str, np.ndarray]:
        """A step's pairs at the job's lengths: `prompt` [B, P] padded on the left, completions [B, R] on the right.

        Each comes with its bool mask, named `..._mask`.
        """
        rows = self.batch(step)
        result: dict[str, np.ndarray] = {}
        for name, width in (("prompt", "prompt"), ("chosen", "response"), ("rejected", "response")):
            ids = np.zeros((len(rows), self.numbers[width]), np.int32)
            mask = np.zeros(ids.shape, bool)
            for row, pair in enumerate(rows):
                tokens = pair[f"{name}_ids"]
                where = slice(-len(tokens), None) if name == "prompt" else slice(None, len(tokens))
                ids[row, where], mask[row, where] = tokens, True
            result |= {name: ids, f"{name}_mask": mask}
        return result


class Turns:
    """What a side is told, and what it tells; made after the imports and before the model.

    Attributes:
        losses: Append the loss of each step to it.
        about: What else is told at the end, such as versions.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.about: dict[str, Any] = {}
        # Libraries print: the answers keep the real standard output, and all else goes to the log.
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._left, self._seconds, self._busy, self._is_asked = 0, [], [], False
        self._began = (0.0, 0.0)
        self._memory = {"after_import": resident()}

    def wait(self) -> bool:
        """Waits until a step is to be taken; False if there are to be no more, and `close` follows."""
        while self._left == 0:
            if self._is_asked:
                self._tell({"seconds": self._seconds, "busy": self._busy})
            self._is_asked = False
            match sys.stdin.readline().split():
                case ["go", count]:
                    self._left, self._seconds, self._busy, self._is_asked = int(count), [], [], True
                case ["measure"]:
                    self._memory["before_steps"] = watch_peak()
                    self._tell({})
                case _:
                    self._memory["peak"] = peak()
                    return False
        return True

    def start(self) -> None:
        """The step begins: its data is there."""
        self._began = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        """The step is over: the new weights are there."""
        wall, busy = self._began
        self._seconds.append(time.perf_counter() - wall)
        self._busy.append(time.process_time() - busy)
        self._left -= 1

    def close(self) -> None:
        """Tells what is told at the end."""
        self._tell({"losses": self.losses, "memory": self._memory, **self.about})

    def _tell(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()


def steps(turns: Turns, one: Callable[[int], float]) -> None:
    """Takes steps with a function from the step's number to its loss, which returns when the step is over."""
    number = 0
    while turns.wait():
        turns.start()
        loss = one(number)
        turns.stop()
        turns.losses.append(loss)
        number += 1


def resident() -> int:
    """Bytes of this process that are in memory."""
    return _status("VmRSS")


def peak() -> int:
    """The largest of `resident` since `watch_peak`, or ever where that cannot be asked for."""
    return _status("VmHWM")


def watch_peak() -> int:
    """Begins to watch the peak anew, after what is not used has been given back; `resident` at that time."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # see proc(5): resets the peak
    return resident()


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
