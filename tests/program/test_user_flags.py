"""Families compiled as a user's run compiles them, in processes of their own: a death by signal names the case."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest

from nnxdsl.config.core.base import declared, members
from nnxdsl.config.model import Model

SCRIPT = Path(__file__).with_name("on_user_flags.py")
STEPS = ("sft", "dpo", "packed-sft", "packed-dpo")
FORWARD = tuple(f"{length}x{rows}" for length, rows in product((5, 17, 33, 48, 64, 65, 96), (1, 2, 3)))
RECURRENT = {"Qwen3Next": ("48x2",)}
"""Chunks of the gated delta rule."""
OTHERS = {
    "NemotronH": ("packed-sft",),
    "Qwen3Next": ("packed-sft",),
    "OlmoHybrid": ("64x2",),
    "Gemma3": ("65x3",),
    "DeepSeekV32": ("65x3",),
    "GPTOSS": ("33x2",),
}
"""Mamba-2 packed; the delta rule packed, and by heads; windows and groups; latent attention with an indexer; sinks."""
FAMILIES = tuple(name for name, member in members(Model).items() if "size" in declared(member))


LATE = (
    "import jax, runpy, sys; jax.devices(); sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""Runs a script where jax has read XLA's flags before nnxdsl is imported, as in many notebooks."""


def run(cases: Mapping[str, tuple[str, ...]], *, is_late: bool = False) -> None:
    """Runs the cases in one process without the suite's flags and cache; fails with the case that ended it."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    python = [sys.executable, *(("-c", LATE) if is_late else ())]
    command = [*python, str(SCRIPT), *(f"{family}={','.join(names)}" for family, names in cases.items())]
    done = subprocess.run(command, env={**environment, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    last = done.stdout.splitlines()[-1:] or ["the start"]
    mode = signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit code {done.returncode}"
    assert done.returncode == 0, f"{last[0]}: {mode}\n{done.stderr[-3000:]}"
    assert last == ["end"]


def test_a_recurrent_family_runs_as_users_compile_it() -> None:
    run(RECURRENT)


@pytest.mark.extended
def test_a_recurrent_family_runs_where_nnxdsl_is_imported_late() -> None:
    """Its programs have the options that the flags came too late for."""
    run(RECURRENT, is_late=True)


@pytest.mark.extended
def test_one_family_of_each_other_mixer_runs_as_users_compile_it() -> None:
    run(OTHERS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_shape_and_step_of_a_family_runs_as_users_compile_it(family: str) -> None:
    run({family: (*FORWARD, *STEPS, "generate")})
