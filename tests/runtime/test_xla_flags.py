"""XLA flags: unknown ones are left out, known ones set, the user's unchanged; tried in a real process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nnxdsl.runtime import xla_flags
from nnxdsl.runtime.xla_flags import platform, prepare, supported

KNOWN, UNKNOWN = "--xla_cpu_enable_fast_math=false", "--xla_cpu_enable_time_travel=true"


def test_an_unknown_flag_ends_a_process_and_is_found_out(tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "flags.json"
    environment = {**os.environ, "XLA_FLAGS": UNKNOWN}
    probe = "from jaxlib import xla_client; xla_client.make_cpu_client()"
    done = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "Unknown flag" in done.stderr
    assert supported("XLA_FLAGS", [UNKNOWN, KNOWN], kept) == [KNOWN]
    (verdicts,) = json.loads(kept.read_text()).values()
    assert verdicts == {UNKNOWN: False, KNOWN: True}


def test_what_was_found_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "flags.json"
    assert supported("XLA_FLAGS", [KNOWN], kept) == [KNOWN]
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert supported("XLA_FLAGS", [KNOWN], kept) == [KNOWN]
    assert supported("XLA_FLAGS", [KNOWN], tmp_path / "other.json") == []  # and what cannot be asked is not set


def test_a_damaged_or_unwritable_record_stops_nothing(tmp_path: Path) -> None:
    damaged, blocked = tmp_path / "damaged.json", tmp_path / "file" / "flags.json"
    damaged.write_text("{")
    blocked.parent.write_text("no directory")
    assert supported("XLA_FLAGS", [KNOWN], damaged) == [KNOWN]
    assert supported("XLA_FLAGS", [KNOWN], blocked) == [KNOWN]


def test_on_a_cpu_nothing_is_set_for_the_compiler(tmp_path: Path) -> None:
    environment = {"JAX_PLATFORMS": "cpu"}
    prepare(tmp_path / "runs", 8, environment)
    assert environment.keys() == {"JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL"}
    assert not (tmp_path / "runs").exists()


def test_several_gpus_have_all_flags_and_the_users_stay(tmp_path: Path) -> None:
    mine = "--xla_gpu_enable_latency_hiding_scheduler=false"
    environment = {"JAX_PLATFORMS": "cuda", "XLA_FLAGS": mine}
    prepare(tmp_path, 8, environment)
    flags = environment["XLA_FLAGS"].split()
    assert flags[0] == mine
    assert {flag.partition("=")[0] for flag in flags} == {flag.partition("=")[0] for flag in xla_flags._GPU}
    assert len(flags) == len(xla_flags._GPU)
    assert environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] == str(xla_flags.GPU_MEMORY_FRACTION)


def test_one_gpu_has_none_and_its_memory_is_the_users_to_divide(tmp_path: Path) -> None:
    environment = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    prepare(tmp_path, 1, environment)
    assert environment.keys() == {"JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE"}


@pytest.mark.parametrize(("text", "actual"), [("cpu", "cpu"), ("cuda,cpu", "gpu"), ("tpu", "tpu"), ("metal", "cpu")])
def test_what_jax_is_told_decides(text: str, actual: str) -> None:
    assert platform({"JAX_PLATFORMS": text}) == actual
