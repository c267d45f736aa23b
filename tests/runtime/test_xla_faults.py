"""Workarounds for XLA crashes are set in every process that imports nnxdsl; the user's flags are unchanged."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nnxdsl.runtime.xla_faults import set_flags

YNN = "xla_cpu_experimental_ynn_fusion_type"


@pytest.mark.parametrize(
    ("version", "is_set"), [("0.10.1", False), ("0.10.2", True), ("0.11.0", True), ("0.12", False)]
)
def test_an_option_is_set_for_versions_with_the_fault_alone(version: str, is_set: bool) -> None:
    environment: dict[str, str] = {}
    set_flags(environment, version)
    assert environment == ({"XLA_FLAGS": f"--{YNN}="} if is_set else {})


def test_what_the_user_has_set_stays() -> None:
    theirs = f"--xla_cpu_enable_fast_math=false --{YNN}=LIBRARY_FUSION_TYPE_DOT"
    environment = {"XLA_FLAGS": theirs}
    set_flags(environment, "0.10.2")
    assert environment["XLA_FLAGS"] == theirs
    environment = {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}
    set_flags(environment, "0.10.2")
    set_flags(environment, "0.10.2")
    assert environment["XLA_FLAGS"] == f"--xla_cpu_enable_fast_math=false --{YNN}="


@pytest.mark.parametrize("order", ["before", "after"])
def test_the_product_that_ends_a_process_does_not_where_nnxdsl_is_imported(order: str) -> None:
    """Before jax looks for devices by the flag, later by the option (https://github.com/jax-ml/jax/issues/40412)."""
    if order == "before":
        code = "import nnxdsl\nimport jax, jax.numpy as jnp\nf = jax.jit(lambda a, b: jnp.sum(a * b, axis=3))\n"
    else:
        code = (
            "import jax, jax.numpy as jnp\njax.devices()\nfrom nnxdsl.program import xla_options\n"
            "f = xla_options.jit(lambda a, b: jnp.sum(a * b, axis=3))\n"
        )
    code += "x = jnp.ones((3, 1, 2, 2, 8, 8, 8))\nassert f(x, x).sum() == 3 * 2 * 2 * 8 * 8 * 8\n"
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**environment, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
