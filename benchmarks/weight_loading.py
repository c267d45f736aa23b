"""What loading weights takes: time beside that of reading the files, host memory beside their size.

`python benchmarks/weight_loading.py [--size 1b] [--rounds 3] [--cold] [--json FILE]` writes a random Gemma 3 in the
Hub's format, bfloat16 in shards of at most 1 GiB, and then reads it in processes of their own that take turns: its
bytes through a small buffer, its bytes into memory where they stay (the least that any reader does), as `nnxdsl.load`
does, and as a LoRA run does, on one device and on eight virtual ones. Memory is the largest resident set above that
after the imports; on CPUs it holds the arrays themselves, so 1.0 is the least. Each process first uses and frees as
much memory as it will need: what a virtual machine's host gives out for the first time takes it seconds a GiB. With
`--cold` the system forgets the files before each process, so that they are read from the disk. Exit code 1 beyond the
aim.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

AIM = 1.3
SIDES = ("bytes", "kept bytes", "load", "LoRA", "LoRA on 8")
FIGURES = "  {:<12} {:>10} {:>10} {:>12} {:>12}"


def resident() -> int:
    """Bytes of this process in memory, files that it has mapped among them."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The largest resident set within a block, above that at its beginning."""

    def __enter__(self) -> Peak:
        self.before = self.most = resident()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(0.002):
            self.most = max(self.most, resident())

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.grown = max(self.most, resident()) - self.before


def read_bytes(directory: Path) -> None:
    """Every byte of the weights once, in pieces."""
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb", buffering=0) as stream:
            piece = bytearray(2**24)
            while stream.readinto(piece):
                pass


def keep_bytes(directory: Path) -> list[np.ndarray]:
    """Every byte of the weights, in memory."""
    return [np.fromfile(file, np.uint8) for file in sorted(directory.glob("*.safetensors"))]


def forget(directory: Path) -> None:
    """Has the system drop what it keeps of the files in memory."""
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def used(size: int) -> None:
    """Has the machine give out so much memory and takes it back."""
    np.ones(int(1.3 * size), np.uint8)


def one(side: str, directory: Path, model: str) -> dict[str, float]:
    """Loads once, in this process."""
    kept: Any
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    if side.endswith("bytes"):
        used(size)
        with Peak() as peak:
            began = time.perf_counter()
            kept = (read_bytes if side == "bytes" else keep_bytes)(directory)
            took = time.perf_counter() - began
        return {"seconds": took, "grown": peak.grown}
    import jax  # noqa: PLC0415 - the first side does without
    import jax.numpy as jnp  # noqa: PLC0415

    import nnxdsl  # noqa: PLC0415
    from nnxdsl import (  # noqa: PLC0415
        Adapter,
        Data,
        Experiment,
        Mesh,
        Model,
        Objective,
        Optimizer,
        Precision,
        Schedule,
        Weights,
    )

    jnp.zeros(1).block_until_ready()
    if side == "load":
        used(size)
        load = nnxdsl.load  # what it is made of is imported here
        with Peak() as peak:
            began = time.perf_counter()
            kept = load(directory, dtype=jnp.bfloat16)
            jax.block_until_ready(kept.leaves)
            took = time.perf_counter() - began
    else:
        program = nnxdsl.compile(
            Experiment(
                name="loading",
                model=Model.Gemma3(model, weights=Weights.HF(str(directory))),  # pyright: ignore[reportArgumentType]
                adapter=Adapter.LoRA(rank=8),
                objective=Objective.DPO(),
                data=Data.Preferences("none.jsonl"),
                optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-4)),
                precision=Precision(compute="bfloat16"),
                mesh=Mesh(fsdp=8) if side.endswith("8") else Mesh(),
                batch_size=8,
                steps=1,
            )
        )
        used(size)
        with Peak() as peak:
            began = time.perf_counter()
            kept = program.init()
            jax.block_until_ready(kept.frozen)
            took = time.perf_counter() - began
    return {"seconds": took, "grown": peak.grown}


def write(directory: Path, size: str) -> int:
    """A random model of a published size; the bytes that its weights take."""
    import ml_dtypes  # noqa: PLC0415
    from flax import nnx  # noqa: PLC0415

    from nnxdsl.formats import hf  # noqa: PLC0415
    from nnxdsl.models.decoder import Decoder  # noqa: PLC0415
    from nnxdsl.models.families.gemma3 import GEMMA3  # noqa: PLC0415
    from nnxdsl.models.params import abstract  # noqa: PLC0415

    config, kind = GEMMA3[size], ml_dtypes.bfloat16
    leaves = abstract(lambda: Decoder(config, rngs=nnx.Rngs(0), param_dtype=kind)).variables
    draw = np.random.default_rng(0)

    def value(path: str) -> np.ndarray:
        bits = draw.integers(0x3C00, 0x3E00, leaves[path].shape, dtype=np.uint16)  # 0.008 to 0.125
        return bits.view(kind)

    hf.write(directory, config, leaves, value=value, max_shard_bytes=2**30)  # pyright: ignore[reportArgumentType]
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="1b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="read from the disk, not from the system's memory")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(one(asked.one, asked.directory, asked.size)))
        return 0
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as compiled:
        cache = {"JAX_COMPILATION_CACHE_DIR": compiled, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # as runs do
        size = write(Path(place), asked.size)
        result: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for _ in range(asked.rounds):
            for side, runs in result.items():
                flags = "--xla_force_host_platform_device_count=8" if side.endswith("8") else ""
                command = [sys.executable, __file__, "--one", side, "--directory", place, "--size", asked.size]
                environment = {**os.environ, **cache, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
                if asked.cold:
                    forget(Path(place))
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                runs.append(json.loads(done.stdout))
    print(f"Gemma 3 {asked.size}, {size / 2**30:.2f} GiB of bfloat16; aim: at most {AIM} of that in host memory\n")
    print(FIGURES.format("", "min s", "median s", "of kept", "of the size"))
    floor = min(run["seconds"] for run in result["kept bytes"])
    worst = 0.0
    for side, runs in result.items():
        seconds = sorted(run["seconds"] for run in runs)
        grown = max(run["grown"] for run in runs) / size
        worst = max(worst, grown)
        middle = seconds[len(seconds) // 2]
        print(FIGURES.format(side, f"{seconds[0]:.2f}", f"{middle:.2f}", f"{seconds[0] / floor:.1f}", f"{grown:.2f}"))
    if asked.json:
        asked.json.write_text(json.dumps({"size": size, "runs": result}, indent=2) + "\n")
    return int(worst > AIM)


if __name__ == "__main__":
    raise SystemExit(main())
