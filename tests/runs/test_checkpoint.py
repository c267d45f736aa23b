"""Checkpoints: a committed step survives kills of the writer; damage is detected."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from nnxdsl.errors import RunError
from nnxdsl.runs.checkpoint_format import ArrayInfo, CheckpointError, find
from nnxdsl.runs.checkpoint_reader import CheckpointReader, LatestGood
from nnxdsl.runs.checkpointer import Checkpoints
from nnxdsl.runs.completeness import check_complete
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


def groups(step: int) -> dict[str, dict[str, jax.Array]]:
    return {
        "trainable": {
            "layers.blocks.0.q_lora_a": jnp.arange(12.0).reshape(3, 4) / 7 + step,
            "norm": jnp.full(4, step, jnp.bfloat16),
        },
        "optimizer": {"mu/layers": jnp.full((3, 4), -step, jnp.float32), "count": jnp.int32(step)},
        "frozen": {},
    }


def targets(values: dict[str, dict[str, jax.Array]]) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    return {
        group: {name: jax.ShapeDtypeStruct(one.shape, one.dtype) for name, one in arrays.items()}
        for group, arrays in values.items()
    }


def bits(array: jax.Array) -> bytes:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


def check_step(checkpoints: Checkpoints, step: int) -> None:
    wanted = groups(step)
    result = checkpoints.restore(step, targets(wanted))
    assert {group: list(arrays) for group, arrays in result.items()} == {g: list(a) for g, a in wanted.items()}
    for group, arrays in wanted.items():
        for name, array in arrays.items():
            assert result[group][name].dtype == array.dtype
            assert bits(result[group][name]) == bits(array), (group, name)


def saved(directory: Path, *steps: int, keep: int | None = None) -> Checkpoints:
    checkpoints = Checkpoints(directory, keep=keep)
    for step in steps:
        assert checkpoints.save(step, groups(step), {"step": step, "data": {"position": step}})
    checkpoints.wait()
    return checkpoints


def child(code: str, *argv: str, devices: int = 1) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {os.environ.get('XLA_FLAGS', '')}",
    }
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *argv],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def output(process: subprocess.Popen[str]) -> str:
    said, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]
    return said


def snapshot(directory: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in sorted(directory.rglob("*"))
    }


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path / "checkpoints", 5, 10)
    assert checkpoints.steps() == [5, 10]
    assert checkpoints.latest_good() == LatestGood(10)
    for step in (5, 10):
        check_step(checkpoints, step)
        assert checkpoints.meta(step) == {"step": step, "data": {"position": step}}
    assert checkpoints.contents(5)["optimizer"] == {
        "mu/layers": ArrayInfo((3, 4), "float32"),
        "count": ArrayInfo((), "int32"),
    }
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["00000005", "00000010"]


ODD_NAMES = (
    *("runs [v1]", "[ab]", "[", "**", "a*b?", "a\\b", "{a,b}", "~", "-v", "file:x", os.fsdecode(b"runs\xff")),
    "läufe 実行 😀 !~'\"$#%20&; \n\t|<>()`:@,=+",
)


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_a_path_of_any_name_holds_checkpoints(name: str, tmp_path: Path) -> None:
    value = {"trainable": {"x [0]": jnp.arange(3.0)}}
    with Checkpoints(tmp_path / name / "checkpoints") as checkpoints:
        checkpoints.save(1, value, {})
    with Checkpoints(tmp_path / name / "checkpoints") as checkpoints:
        assert checkpoints.latest_good() == LatestGood(1)
        assert bits(checkpoints.restore(1, targets(value))["trainable"]["x [0]"]) == bits(value["trainable"]["x [0]"])
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_parts_of_a_sibling_that_the_path_matches_are_not_taken(tmp_path: Path) -> None:
    """A path such as `runs*`, read as a pattern, also matches a save to `runs1` at the same time."""
    other = saved(tmp_path / "other", 1)
    part = "arrays.orbax-checkpoint-tmp/trainable.orbax-checkpoint-tmp/ocdbt.process_0"
    shutil.copytree(
        other.directory / "00000001" / "arrays" / "trainable" / "ocdbt.process_0",
        tmp_path / "runs1" / ".writing" / "00000002" / part,
    )
    checkpoints = saved(tmp_path / "runs*", 2)
    check_step(checkpoints, 2)


def test_a_step_that_lacks_an_array_is_never_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever orbax leaves out: here it is given one array less, and parts that it did not merge."""
    values = groups(1)
    with Checkpoints(tmp_path) as checkpoints:
        write = ocp.args.PyTreeSave
        monkeypatch.setattr(ocp.args, "PyTreeSave", lambda tree: write({k: v for k, v in tree.items() if k != "norm"}))
        checkpoints.save(1, values, {})
        with pytest.raises(CheckpointError, match=r"without all of trainable\.norm; there is no earlier checkpoint"):
            checkpoints.wait()
        monkeypatch.undo()
        assert checkpoints.steps() == []
        checkpoints.save(1, values, {})
        assert checkpoints.wait() == 1
    arrays = tmp_path / "00000001" / "arrays"
    check_complete(arrays, values)
    (arrays / "optimizer" / "manifest.ocdbt").unlink()
    with pytest.raises(OSError, match=r"without all of optimizer\.mu/layers \(and 1 more\)"):
        check_complete(arrays, values)


def test_a_directory_without_steps_has_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "new")
    assert checkpoints.latest_good() == LatestGood(None)
    assert checkpoints.steps() == []
    assert checkpoints.wait() is None
    with pytest.raises(CheckpointError) as raised:
        checkpoints.meta(3)
    assert str(raised.value) == f"{tmp_path / 'new'} has no checkpoint of step 3; there are: none"
    assert isinstance(raised.value, RunError)


def test_nothing_is_saved_before_it_is_said(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.poll() is None
        checkpoints.save(1, groups(1), {})
        assert checkpoints.wait() == 1
        assert (tmp_path / "00000001" / "manifest.json").exists()
        assert checkpoints.poll() == 1
        checkpoints.save(2, groups(2), {})
        wait_until(lambda: checkpoints.poll() == 2)
        assert checkpoints.steps() == [1, 2]  # committed without a call to wait


def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path: Path) -> None:
    spoil = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    array = jax.random.normal(jax.random.key(0), (1024, 1024))
    wanted = np.array(array, copy=True)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"trainable": {"x": array}}, {})
    array = spoil(array)
    assert float(array[0, 0]) == -1
    checkpoints.wait()
    target = {"trainable": {"x": jax.ShapeDtypeStruct(wanted.shape, wanted.dtype)}}
    assert np.array_equal(np.asarray(checkpoints.restore(1, target)["trainable"]["x"]), wanted)


DTYPES = [
    *("bool", "int2", "int4", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32"),
    *("complex64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn"),
]


def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path) -> None:
    values = jnp.arange(32).reshape(4, 8) % 2
    arrays = {dtype: values.astype(dtype) for dtype in DTYPES}
    arrays["nan"] = jnp.array([jnp.nan, -jnp.inf, -0.0, 1e-45])
    arrays["key"] = jax.random.key(3)
    arrays["keys"] = jax.random.split(jax.random.key(4), 5)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"all": arrays}, {})
    checkpoints.wait()
    actual = checkpoints.restore(1, targets({"all": arrays}))["all"]
    for name, array in arrays.items():
        assert actual[name].dtype == array.dtype
        assert actual[name].shape == array.shape
        assert bits(actual[name]) == bits(array), name


def test_arrays_that_cannot_be_stored_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    before = snapshot(tmp_path)
    weights = {f"layers.{i}.qvalue": jnp.zeros((8, 8), jnp.uint4) for i in range(7)}
    with pytest.raises(CheckpointError) as raised:
        checkpoints.save(2, {"frozen": weights, "trainable": {"x": jnp.zeros(3), "empty": jnp.zeros((0, 3))}}, {})
    assert str(raised.value) == (
        "checkpoint step 2 cannot be saved: orbax cannot store 8 arrays\n"
        "  frozen.layers.0.qvalue: uint4[8, 8]\n"
        "  frozen.layers.1.qvalue: uint4[8, 8]\n"
        "  frozen.layers.2.qvalue: uint4[8, 8]\n"
        "  frozen.layers.3.qvalue: uint4[8, 8]\n"
        "  frozen.layers.4.qvalue: uint4[8, 8]\n"
        "  ... and 3 more\n"
        "arrays need at least one element, and a dtype other than uint2 and uint4 and the rarer float8: "
        "convert them, or leave them out and recompute them"
    )
    assert snapshot(tmp_path) == before
    with pytest.raises(ValueError, match="group 'a/b': expected a-z, 0-9 and '_', a letter first"):
        checkpoints.save(2, {"a/b": {"x": jnp.zeros(3)}}, {})


def test_a_part_is_restored_alone_and_damage_elsewhere_does_not_matter(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    for path in (tmp_path / "00000001" / "arrays" / "optimizer").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    wanted = {"trainable": {"norm": jax.ShapeDtypeStruct((4,), jnp.bfloat16)}}
    actual = checkpoints.restore(1, wanted)
    assert list(actual["trainable"]) == ["norm"]
    assert bits(actual["trainable"]["norm"]) == bits(groups(1)["trainable"]["norm"])
    with pytest.raises(CheckpointError, match="is damaged: arrays/optimizer/"):
        checkpoints.restore(1, targets(groups(1)))


def test_what_does_not_fit_is_named_all_at_once(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    wanted = {
        "trainable": {
            "layers.blocks.0.q_lora_a": jax.ShapeDtypeStruct((3, 8), jnp.float32),
            "norm": jax.ShapeDtypeStruct((4,), jnp.float32),
            **{f"new.{i}": jax.ShapeDtypeStruct((), jnp.int32) for i in range(4)},
        },
        "optimiser": {},
    }
    with pytest.raises(CheckpointError) as raised:
        checkpoints.restore(1, wanted)
    assert str(raised.value) == (
        f"checkpoint step 1 in {tmp_path} does not fit: 7 arrays\n"
        "  trainable.layers.blocks.0.q_lora_a: saved as float32[3, 4], expected float32[3, 8]\n"
        "  trainable.norm: saved as bfloat16[4], expected float32[4]\n"
        "  trainable.new.0: not in the checkpoint, expected int32[]\n"
        "  trainable.new.1: not in the checkpoint, expected int32[]\n"
        "  trainable.new.2: not in the checkpoint, expected int32[]\n"
        "  ... and 2 more\n"
        "it was saved from another model, adapter or optimizer; restore it with the experiment that wrote it"
    )


def test_a_committed_step_is_not_written_twice(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    before = snapshot(tmp_path)
    assert not checkpoints.save(1, groups(9), {})
    assert snapshot(tmp_path) == before


def test_retention_keeps_the_newest_and_the_protected(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(1, 7):
        checkpoints.save(step, groups(step), {}, protect={2} if step > 2 else ())
        checkpoints.wait()
    assert checkpoints.steps() == [2, 5, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000002", "00000005", "00000006"]
    with pytest.raises(ValueError, match="keep: expected at least 1, got 0"):
        Checkpoints(tmp_path, keep=0)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink], ids=["flip", "cut", "unlink"])
def test_damage_to_any_file_is_named_and_the_step_before_is_used(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    place = tmp_path / "00000002"
    files = sorted(path for path in place.rglob("*") if path.is_file() and path.stat().st_size)
    assert len(files) > 10
    for path in files:
        whole = path.read_bytes()
        damage(path)
        good = checkpoints.latest_good()
        assert good.step == 1
        (one,) = good.damaged
        assert one.step == 2
        assert str(one).startswith(f"checkpoint step 2 is damaged: {path.relative_to(place)} ")
        with pytest.raises(CheckpointError) as raised:
            checkpoints.restore(2, targets(groups(2)))
        assert str(
            raised.value
        ) == f"checkpoint step 2 in {tmp_path} is damaged: {one.reason}; use another step (1)" or (
            path.name == "manifest.json" and "manifest.json" in str(raised.value)
        )
        path.write_bytes(whole)
    check_step(checkpoints, 2)


def test_each_damage_has_its_words(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    place = tmp_path / "00000002"
    path = place / "arrays" / "trainable" / "manifest.ocdbt"
    whole, name, size = path.read_bytes(), "arrays/trainable/manifest.ocdbt", path.stat().st_size
    reasons: list[str] = []
    for damage in (flip, cut, Path.unlink):
        damage(path)
        reasons.append(checkpoints.latest_good().damaged[0].reason)
        path.write_bytes(whole)
    for damage in (flip, cut, Path.unlink):
        damage(place / "manifest.json")
        reasons.append(checkpoints.latest_good().damaged[0].reason)
        if (place / "manifest.json").exists():
            text = (tmp_path / "00000001" / "manifest.json").read_text()
            (place / "manifest.json").write_text(text)
    reasons.append(checkpoints.latest_good().damaged[0].reason)
    assert reasons[:3] == [
        f"{name} has changed since it was written (sha256 differs)",
        f"{name} has {size - 1} bytes, {size} were written",
        f"{name} is missing",
    ]
    changed = "manifest.json has changed since it was written (sha256 differs)"
    assert reasons[3] in ("manifest.json cannot be read", changed)
    assert reasons[4:] == ["manifest.json cannot be read", "manifest.json is missing", "manifest.json is missing"]
    assert checkpoints.steps() == [1]


def test_a_changed_meta_is_never_believed(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    path = tmp_path / "00000001" / "manifest.json"
    value = json.loads(path.read_text())
    value["body"]["meta"]["step"] = 7
    path.write_text(json.dumps(value))
    with pytest.raises(CheckpointError) as raised:
        checkpoints.meta(1)
    assert str(raised.value) == (
        f"checkpoint step 1 in {tmp_path} is damaged: manifest.json has changed since it was written (sha256 differs); "
        f"restore the file from a copy"
    )


def test_a_step_under_another_name_is_not_that_step(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    (tmp_path / "00000001").rename(tmp_path / "00000003")
    with pytest.raises(CheckpointError, match=re.escape("manifest.json is of step 1")):
        checkpoints.meta(3)


def test_if_all_are_damaged_it_stops(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    for step in (1, 2):
        (tmp_path / f"{step:08d}" / "manifest.json").unlink()
    with pytest.raises(CheckpointError) as raised:
        checkpoints.latest_good()
    assert str(raised.value) == (
        f"no checkpoint in {tmp_path} can be used:\n"
        f"  step 2: manifest.json is missing\n"
        f"  step 1: manifest.json is missing\n"
        f"restore the files, or move the directory away to start again from step 0"
    )


def test_a_damaged_step_is_replaced_and_never_pushes_out_a_good_one(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 10, 20, keep=2)
    flip(tmp_path / "00000020" / "arrays" / "trainable" / "manifest.ocdbt")
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest_good().step == 10
    checkpoints.save(15, groups(15), {})
    checkpoints.wait()
    assert checkpoints.steps() == [10, 15, 20]
    assert checkpoints.save(20, groups(20), {})
    checkpoints.wait()
    assert checkpoints.steps() == [15, 20]
    assert checkpoints.latest_good() == LatestGood(20)
    check_step(checkpoints, 20)


def test_reading_changes_nothing(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    for name in (".writing/00000003", ".trash/00000000"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x").write_text("x")
    flip(tmp_path / "00000002" / "arrays" / "trainable" / "manifest.ocdbt")
    before = snapshot(tmp_path)
    reader = CheckpointReader(tmp_path)
    assert reader.latest_good().step == 1
    check_step(reader, 1)
    reader.close()
    assert snapshot(tmp_path) == before
    with pytest.raises(CheckpointError, match="there is no such directory of checkpoints"):
        CheckpointReader(tmp_path / "none")
    Checkpoints(tmp_path)  # a writer sweeps
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000001", "00000002"]


def test_a_path_means_a_run_its_checkpoints_or_one_step(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "checkpoints"
    saved(directory, 1)
    assert find(tmp_path / "run") == (directory, None)
    assert find(directory) == (directory, None)
    assert find(directory / "00000001") == (directory, 1)
    with pytest.raises(CheckpointError) as raised:
        find(tmp_path)
    assert str(raised.value) == (
        f"{tmp_path} holds no checkpoints; expected a run directory, its 'checkpoints', or one step in there"
    )


FULL = """
import resource, signal, sys
from pathlib import Path
import jax.numpy as jnp
from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.runs.checkpointer import Checkpoints
from nnxdsl.runs.completeness import check_complete
from nnxdsl.errors import RunError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
checkpoints = Checkpoints(Path(sys.argv[1]), keep=1)
small, large = ({"trainable": {"x": jnp.arange(n, dtype=jnp.float32) ** 0.5}} for n in (8, 500_000))
checkpoints.save(1, small, {})
checkpoints.wait()
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
checkpoints.save(2, large, {})
try:
    checkpoints.wait()
except RunError as error:
    print(error)
print(checkpoints.wait(), checkpoints.steps(), checkpoints.latest_good())
print(sorted(path.name for path in Path(sys.argv[1]).iterdir()))
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
checkpoints.save(2, large, {})
print(checkpoints.wait(), checkpoints.latest_good())
"""


@pytest.mark.extended
def test_a_full_disk_is_said_and_the_last_step_stays(tmp_path: Path) -> None:
    process = child(FULL, str(tmp_path))
    said, errors = process.communicate()
    assert process.returncode == 0, errors
    assert errors == ""
    lines = said.splitlines()
    assert re.fullmatch(
        re.escape(f"checkpoint step 2 could not be saved in {tmp_path}: ")
        + r".*File too large.*; checkpoint step 1 is unchanged; "
        + r"free some space or name another directory, and run again",
        lines[0],
    )
    assert lines[1:] == [
        "1 [1] LatestGood(step=1, damaged=())",
        "['00000001']",
        "2 LatestGood(step=2, damaged=())",
    ]


SAVER = """
import sys
from pathlib import Path
import jax.numpy as jnp
from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.runs.checkpointer import Checkpoints
from nnxdsl.runs.completeness import check_complete
sys.path.insert(0, sys.argv[3])
from test_checkpoint import groups
step = int(sys.argv[2])
checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
while True:
    step += 1
    checkpoints.save(step, groups(step), {"step": step})
    if checkpoints.wait() == step:
        print(step, flush=True)
"""


@pytest.mark.slow
def test_a_kill_at_any_moment_loses_no_committed_step(tmp_path: Path) -> None:
    random_ = random.Random(0)
    step, left_overs = 0, 0
    for _ in range(10):
        process = child(SAVER, str(tmp_path), str(step), str(Path(__file__).parent))
        assert process.stdout is not None
        said = [int(process.stdout.readline())]  # it is warm, and in the middle of the next save
        time.sleep(random_.uniform(0.0, 0.3))
        process.send_signal(signal.SIGKILL)
        said += [int(line) for line in process.communicate()[0].split("\n")[:-1]]
        left_overs += (tmp_path / ".writing").exists() or (tmp_path / ".trash").exists()
        reader = CheckpointReader(tmp_path)
        good = reader.latest_good()
        assert good.damaged == ()
        assert good.step in (said[-1], said[-1] + 1)  # what was said is there; one more may have been committed unsaid
        check_step(reader, good.step)
        assert reader.meta(good.step) == {"step": good.step}
        assert len(reader.steps()) <= 3
        step = good.step
    assert step >= 10  # at least one more each time
    assert left_overs > 0  # some of the kills did come in the middle of a save


KILL_AT = """
import os, signal, sys
from pathlib import Path
from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.runs.checkpointer import Checkpoints
from nnxdsl.runs.completeness import check_complete
sys.path.insert(0, sys.argv[3])
from test_checkpoint import groups
left = int(sys.argv[2])
def counted(real):
    def call(*args, **kwargs):
        global left
        left -= "orbax" not in str(args[0])
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    return call
checkpoints = Checkpoints(Path(sys.argv[1]), keep=1)
value = groups(2)
os.rename, os.replace = map(counted, (os.rename, os.replace))
checkpoints.save(2, value, {})
print(checkpoints.wait())
"""


@pytest.mark.faults
def test_a_kill_before_each_rename_of_ours_leaves_a_whole_step(tmp_path: Path) -> None:
    actual: list[int | None] = []
    for calls in range(6):
        directory = tmp_path / str(calls)
        saved(directory, 1, keep=1)
        said = child(KILL_AT, str(directory), str(calls), str(Path(__file__).parent)).communicate()[0]
        reader = CheckpointReader(directory)
        good = reader.latest_good()
        assert good.damaged == ()
        assert good.step is not None
        check_step(reader, good.step)
        actual.append(good.step)
        writer = saved(directory, 3, keep=1)
        assert writer.steps() == [3]
        assert [path.name for path in directory.iterdir()] == ["00000003"]
        if said == "2\n":
            break
    else:
        pytest.fail("the save never came to its end")
    assert actual == [1, 1, 2, 2]  # killed before the manifest, the commit and the removal of step 1; not killed


MESHES = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.runs.checkpointer import Checkpoints
from nnxdsl.runs.completeness import check_complete
def mesh(*shape):
    return jax.sharding.Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), ("fsdp", "tensor"))
def place(shape):
    m = mesh(*shape)
    return {"w": NamedSharding(m, P("fsdp", "tensor")), "b": NamedSharding(m, P("tensor")), "s": NamedSharding(m, P()),
            "k": NamedSharding(m, P())}
values = {"w": jax.random.normal(jax.random.key(0), (16, 8)), "b": jnp.arange(8, dtype=jnp.bfloat16) / 3,
          "s": jnp.int32(7), "k": jax.random.key(5)}
plain = lambda x: np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
checkpoints = Checkpoints(Path(sys.argv[1]))
checkpoints.save(1, {"trainable": {n: jax.device_put(v, place((4, 2))[n]) for n, v in values.items()}}, {})
checkpoints.wait()
for shape in ((4, 2), (2, 4), (8, 1), (1, 2), (1, 1)):
    targets = {n: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=place(shape)[n]) for n, v in values.items()}
    found = checkpoints.restore(1, {"trainable": targets})["trainable"]
    for n, v in values.items():
        assert found[n].sharding.is_equivalent_to(targets[n].sharding, v.ndim), (shape, n)
        assert plain(found[n]).tobytes() == plain(v).tobytes(), (shape, n)
    print(shape, len(found["w"].addressable_shards))
"""


def test_a_checkpoint_comes_back_bit_for_bit_on_another_mesh(tmp_path: Path) -> None:
    said = output(child(MESHES, str(tmp_path), devices=8))
    assert said == "(4, 2) 8\n(2, 4) 8\n(8, 1) 8\n(1, 2) 2\n(1, 1) 1\n"
    reader = CheckpointReader(tmp_path)  # and on one device of another process
    assert reader.contents(1)["trainable"]["k"] == ArrayInfo((), "key<fry>")
    target = {"trainable": {"w": jax.ShapeDtypeStruct((16, 8), jnp.float32)}}
    actual = reader.restore(1, target)["trainable"]["w"]
    assert bits(actual) == bits(jax.random.normal(jax.random.key(0), (16, 8)))


RANK = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.runs.checkpointer import Checkpoints
from nnxdsl.runs.completeness import check_complete
rank, port, directory = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank)
sharding = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",)), P("fsdp"))
value = np.arange(32, dtype=np.float32).reshape(8, 4) / 3
checkpoints = Checkpoints(directory, keep=2)
for step in (1, 2, 3):
    array = jax.make_array_from_callback(value.shape, sharding, lambda index: value[index] * step)
    checkpoints.save(step, {"trainable": {"x": array}}, {"step": step})
    assert checkpoints.wait() == step
target = jax.ShapeDtypeStruct(value.shape, jnp.float32, sharding=sharding)
found = checkpoints.restore(checkpoints.latest_good().step, {"trainable": {"x": target}})["trainable"]["x"]
same = [np.array_equal(np.asarray(shard.data), (value * 3)[shard.index]) for shard in found.addressable_shards]
print("rank", rank, checkpoints.steps(), same)
"""


@pytest.mark.extended
def test_two_processes_save_one_checkpoint(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    home = tmp_path / "runs [v1]"
    ranks = [child(RANK, str(rank), port, str(home), devices=2) for rank in range(2)]
    said = [output(rank).splitlines() for rank in ranks]  # gloo speaks on stdout too
    assert [lines[-1] for lines in said] == [f"rank {rank} [2, 3] [True, True]" for rank in range(2)]
    reader = CheckpointReader(home)
    target = {"trainable": {"x": jax.ShapeDtypeStruct((8, 4), jnp.float32)}}
    wanted = np.arange(32, dtype=np.float32).reshape(8, 4) / 3 * 3
    assert np.array_equal(np.asarray(reader.restore(3, target)["trainable"]["x"]), wanted)
