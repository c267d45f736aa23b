"""The log, the heartbeat and the digest of frozen weights."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxdsl.runs.array_digest import digest
from nnxdsl.runs.heartbeat import beating
from nnxdsl.runs.log import Log
from nnxdsl.runs.run_dir import RunDirectory
from tests.waiting import wait_until


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run", identity="", experiment_json={}, experiment_py="")


def test_a_log_has_times_and_no_secrets_and_no_control_characters(tmp_path: Path) -> None:
    with Log(tmp_path / "log.txt") as log:
        log.write("one\ntwo \x1b[31m")
        log.write("HF_TOKEN=hf_abcdefghijk")
        text = (tmp_path / "log.txt").read_text(encoding="utf-8")  # on its way already
    times = re.sub(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", "TIME", text, flags=re.MULTILINE)
    assert times == "TIME  one\n    two \\x1b[31m\nTIME  HF_TOKEN=***\n"
    with Log(tmp_path / "log.txt") as log:
        log.write("again")
    assert (tmp_path / "log.txt").read_text(encoding="utf-8").startswith(text)


def test_the_heart_beats_while_the_main_thread_is_busy(directory: RunDirectory) -> None:
    directory.take_over(state="compiling")
    before = directory.status().get("heartbeat")
    with beating(directory, every_seconds=0.02):
        wait_until(lambda: directory.status().get("heartbeat") != before)
        during = directory.status()
    assert during.get("state") == "compiling"
    assert not any(thread.name == "heartbeat" for thread in threading.enumerate())


def test_heartbeats_lose_no_field_that_is_written_meanwhile(directory: RunDirectory) -> None:
    with beating(directory, every_seconds=0.001):
        for step in range(100):
            directory.write_status(state="running", step=step)
            assert directory.status().get("step") == step


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "uint4"])
def test_a_digest_sees_each_value_and_its_place(dtype: str) -> None:
    values = jnp.asarray(np.random.default_rng(0).integers(0, 8, (2, 5, 3)), dtype)
    one = digest({"a": values, "b": values})
    assert one == digest({"b": values, "a": values + jnp.zeros((), dtype)})
    changed = [
        {"a": values.at[1, 4, 2].set(9), "b": values},
        {"a": values[::-1], "b": values},
        {"a": values[:, ::-1], "b": values},
        {"a": values[..., ::-1], "b": values},
        {"a": values.reshape(5, 2, 3), "b": values},
        {"c": values, "b": values},
        {"a": values.astype("float32" if dtype != "float32" else "int32"), "b": values},
    ]
    assert len({one, *map(digest, changed)}) == 1 + len(changed)


def test_a_digest_sees_one_bit() -> None:
    value = jnp.ones((4, 4), jnp.float32)
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
    digests = {
        digest({"a": jax.lax.bitcast_convert_type(bits.at[1, 2].set(bits[1, 2] ^ np.uint32(1 << bit)), jnp.float32)})
        for bit in range(32)
    }
    assert len(digests | {digest({"a": value})}) == 33


@pytest.mark.parametrize("shape", [(64, 128), (8, 16, 32), (4096,)])
def test_a_digest_sees_that_all_values_change_alike(shape: tuple[int, ...]) -> None:
    value = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    changed = (2 * value, value / 2, 4 * value, -value, value[::-1], jnp.roll(value, 1, -1))
    assert len({digest({"a": value}), *(digest({"a": other}) for other in changed)}) == 1 + len(changed)
