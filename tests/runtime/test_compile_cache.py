"""The compilation cache: programs are reused by later processes, and its failures never stop a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax._src import compilation_cache

from nnxdsl.runs.run_list import list_runs
from nnxdsl.runtime.compile_cache import compile_cache

ROOT = Path(__file__).parents[2]
WORK = """
import json, sys
from pathlib import Path
from nnxdsl.runtime import xla_flags
xla_flags.prepare(Path(sys.argv[1]), 1)
import jax, jax.numpy as jnp
from nnxdsl.runtime.compile_cache import compile_cache
counts = {"hits": 0, "misses": 0}
def count(event, **_):
    name = event.rpartition("_")[2]
    if event.startswith("/jax/compilation_cache/cache_") and name in counts:
        counts[name] += 1
jax.monitoring.register_event_listener(count)
told = []
with compile_cache(Path(sys.argv[1]), told.append):
    value = jax.jit(lambda x: jnp.sin(x @ x.T).sum())(jnp.arange(12.0).reshape(3, 4))
print(json.dumps({"value": float(value).hex(), "told": told, **counts}))
"""


def work(home: Path, **environment: str) -> tuple[dict[str, object], str]:
    """What a process of its own says, and its stderr."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "TF_CPP"))}
    done = subprocess.run(
        [sys.executable, "-c", WORK, str(home)],
        env={**clean, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout), done.stderr


def entries(home: Path) -> list[Path]:
    return sorted((home / ".cache").rglob("*-cache"))


def test_the_next_process_compiles_nothing(tmp_path: Path) -> None:
    first, said = work(tmp_path)
    assert (first["hits"], first["told"], said) == (0, [], "")
    assert first["misses"] == len(entries(tmp_path)) > 0
    second, said = work(tmp_path)
    assert second == {**first, "hits": first["misses"], "misses": 0}  # the same bits, too
    assert said == ""
    assert list_runs(tmp_path) == []
    # Killed while it wrote: found, dropped and written anew. Compiled with a taste that is no feature of this machine,
    # as compilers for some CPUs say of their own programs: used without a word.
    torn, strange = entries(tmp_path)[:2]
    torn.write_bytes(torn.read_bytes()[:-7])
    program = compilation_cache.decompress_executable(strange.read_bytes())
    if b"+sse2," in program:
        altered = program.replace(b"+sse2,", b"+tast,")
        strange.write_bytes(compilation_cache.compress_executable(altered))
    third, said = work(tmp_path)
    assert third == {**first, "hits": first["misses"] - 1, "misses": 1}  # pyright: ignore[reportOperatorIssue]
    assert said == ""


@pytest.mark.extended
def test_the_users_own_place_and_refusal_are_heeded(tmp_path: Path) -> None:
    path = tmp_path / "own"
    work(tmp_path, JAX_COMPILATION_CACHE_DIR=str(path), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
    assert list(path.glob("*-cache"))
    work(tmp_path, JAX_ENABLE_COMPILATION_CACHE="false")
    assert not (tmp_path / ".cache").exists()


def test_a_place_that_will_not_do_is_told_once_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / ".cache").write_text("a file")
    said, errors = work(tmp_path)
    assert said["told"] == [f"compilation cache is off: {tmp_path / '.cache'} is no directory"]
    assert errors == ""


def test_jax_is_left_as_it_was(tmp_path: Path) -> None:
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    if before[0] is not None:
        pytest.skip("whoever runs the tests has a place of their own")
    with compile_cache(tmp_path / "runs", lambda text: None):
        assert str(getattr(jax.config, names[0])).startswith(str(tmp_path))
    assert [getattr(jax.config, name) for name in names] == before
    assert not (tmp_path / "runs").exists()  # not before something is compiled


RUN = """
from nnxdsl import *

experiment = Experiment(
    name="tiny",
    model=Model.Gemma3("tiny"),
    objective=Objective.SFT(loss_on="all"),
    data=Data.Text("texts.jsonl", max_length=16),
    optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
    batch_size=2,
    steps=2,
)
"""


@pytest.mark.extended
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "compilation cache is off: HOME/.cache is no directory\n"),
        ({"JAX_ENABLE_COMPILATION_CACHE": "false"}, ""),
    ],
    ids=["unwritable", "disabled"],
)
def test_a_run_without_a_cache_trains_and_says_so(tmp_path: Path, variables: dict[str, str], message: str) -> None:
    (tmp_path / "tiny.py").write_text(RUN)
    (tmp_path / "texts.jsonl").write_text('{"text": "one two"}\n{"text": "three"}\n')
    (tmp_path / "runs").mkdir()
    if not variables:  # nobody, root included, can make a directory in a file
        (tmp_path / "runs" / ".cache").write_text("a file")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-m", "nnxdsl", "run", "tiny.py"],
        cwd=tmp_path,
        env={**clean, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("compilation cache is off") == bool(message)  # refused by the user: no news
    assert message.replace("HOME", str(tmp_path / "runs")) in done.stderr
    (run,) = list_runs(tmp_path / "runs")
    assert (run.state, run.step) == ("finished", 2)
