"""What is compiled and what is read shows itself as phases of the display."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from flax import nnx

from nnxdsl.formats.mapped_arrays import MappedArray
from nnxdsl.models.params import ParamSpec
from nnxdsl.program.init import ArrayLike, ReferenceSource
from nnxdsl.terminal.display import Display
from nnxdsl.terminal.events import Listener, Phase
from nnxdsl.weights.progress import reading_weights

ROOT = Path(__file__).parents[2]
COMPILE = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from nnxdsl.runtime.compile_cache import compile_cache
from nnxdsl.runtime.compile_progress import compile_progress
from nnxdsl.terminal.display import Display
def guarded_step(x):
    return jax.jit(jnp.sin)(x) * 3.25
x = jnp.ones(3)
with Display() as display, compile_cache(Path(sys.argv[1]), display.say), compile_progress(display):
    display.stage("training")
    jax.jit(guarded_step)(x)
"""


class Ended(Listener):
    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.done: list[int] = []

    def on_progress(self, phase: Phase) -> None:
        self.done.append(phase.done)

    def on_phase_end(self, phase: Phase) -> None:
        self.phases.append(phase)


def test_a_compilation_says_what_was_compiled_and_whether_it_came_from_the_cache(tmp_path: Path) -> None:
    def lines(**environment: str) -> list[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
        return subprocess.run(
            [sys.executable, "-c", COMPILE, str(tmp_path)],
            env={**clean, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **environment},
            capture_output=True,
            text=True,
            check=True,
        ).stderr.splitlines()

    begin = "training ..."
    assert lines() == [begin, "compiling the training step (not in the cache): 0:01"]  # however short it was
    assert lines() == [begin, "reading the training step from the compilation cache: 0:01"]
    off = lines(JAX_ENABLE_COMPILATION_CACHE="false")
    assert off == [begin, "compiling the training step (without a cache): 0:01"]


def test_weights_are_counted_as_they_are_read() -> None:
    stacked = MappedArray((4, 8, 2), np.dtype(np.float16), (lambda: np.ones((8, 2), np.float16),) * 4, leading=1)

    class Files:
        def leaf(self, path: str) -> ArrayLike:
            return stacked if path == "stacked" else np.ones((2, 2), np.float32)

    def spec(*shape: int) -> ParamSpec:
        return ParamSpec(shape, np.dtype(np.float32), (None,) * len(shape), nnx.Param)

    base = {"stacked": spec(4, 8, 2), "small": spec(2, 2)}
    source, ended = ReferenceSource(Files(), Files()), Ended()
    display = Display(quiet=True, listeners=[ended])
    with reading_weights(display, "reading weights", source, base, base) as counted:
        np.asarray(counted.leaf("small"))
        mapped = counted.leaf("stacked")
        assert isinstance(mapped, MappedArray)
        assert ended.done == [16]  # nothing else has been read
        mapped.read((slice(0, 2), slice(0, 8), slice(0, 2)))
        assert ended.done == [16, 16 + 64, 16 + 128]
        mapped.layers(2, 4).read()
        assert isinstance(counted, ReferenceSource)
        for path in base:
            np.asarray(counted.reference.leaf(path))
    (phase,) = ended.phases
    assert (phase.name, phase.unit) == ("reading weights", "bytes")
    assert phase.done == phase.total == 2 * 4 * sum(math.prod(leaf.shape) for leaf in base.values())
