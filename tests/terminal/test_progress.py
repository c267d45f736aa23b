"""Compilation and reading of weights appear as phases of the display."""

from __future__ import annotations

import http.server
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
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
import threading
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


@pytest.mark.extended
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


FILES = {"config.json": b"{}", "model.safetensors": bytes(3_000_000)}


class _Hub(http.server.BaseHTTPRequestHandler):
    """A Hub with the repository lab/tiny, of two files."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name, commit = self.path.rpartition("/")[2].partition("?")[0], "0123456789" * 4
        if "/resolve/" in self.path:
            body = FILES.get(name, b"")
        elif "/tree/" in self.path:
            entries = [{"type": "file", "path": n, "size": len(b), "oid": f"{n:40}"} for n, b in FILES.items()]
            body = json.dumps(entries).encode()
        else:
            siblings = [{"rfilename": n, "size": len(b)} for n, b in FILES.items()]
            body = json.dumps({"id": "lab/tiny", "sha": commit, "siblings": siblings}).encode()
        self.send_response(200 if body else 404)
        for header in {"ETag": f'"{name}"', "X-Repo-Commit": commit, "Content-Length": str(len(body))}.items():
            self.send_header(*header)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


DOWNLOAD = """
from nnxdsl.formats.hf_download import locate
seen = []
found = locate("lab/tiny", report=lambda *both: seen.append(both))
assert locate("lab/tiny") == found
assert locate("lab/tiny", configs_only=True) == found
print(sorted(path.name for path in found.iterdir()), max(seen))
"""


def test_a_download_reports_its_bytes_and_is_not_drawn(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": address, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", DOWNLOAD], env=environment, capture_output=True, text=True)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout == "['config.json', 'model.safetensors'] (3000002, 3000002)\n"
