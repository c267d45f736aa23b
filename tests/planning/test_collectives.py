"""Collectives read from what XLA compiles: programs on 8 virtual devices, and lines as compilers of GPUs write them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from nnxdsl.errors import RunError
from nnxdsl.planning.aot_process import find_compiler
from nnxdsl.planning.collectives import Traffic, collectives

PROGRAMS = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))

def nested(a):                         # [8, 16] float32 on each device: 512 bytes
    def inner(c, _):
        return c + jax.lax.psum(2 * c, "x"), None
    def outer(c, _):
        c, _ = jax.lax.scan(inner, c, None, length=3)
        gathered = jax.lax.all_gather(c, "y", tiled=True)
        c = c + jax.lax.psum_scatter(gathered, "y", tiled=True)
        return jax.lax.ppermute(c, "x", [(i, (i + 1) % 4) for i in range(4)]), None
    return jax.lax.scan(outer, a, None, length=5)[0]

def plain(a):
    return jax.lax.all_to_all(jax.lax.psum(a.astype(jnp.bfloat16).astype(jnp.int8), "y"), "x", 0, 0, tiled=True)

def branch(a):
    return jax.lax.cond(a.sum() > 0, lambda a: jax.lax.psum(a, ("x", "y")), lambda a: a, a)

def forever(a):                        # how often it turns depends on the data
    return jax.lax.while_loop(lambda a: a.sum() < 9, lambda a: jax.lax.psum(a, "y"), a)

texts = {}
for run in (nested, plain, branch, forever):
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P(("x", "y")), out_specs=P(("x", "y")), check_vma=False)
    texts[run.__name__] = jax.jit(mapped).lower(jax.ShapeDtypeStruct((64, 16), jnp.float32)).compile().as_text()
json.dump(texts, sys.stdout)
"""


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    done = subprocess.run([sys.executable, "-c", PROGRAMS], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_loops_are_multiplied_even_inside_each_other(texts: dict[str, str]) -> None:
    assert collectives(texts["nested"]) == [
        Traffic("all-reduce", 4, True, False, count=15, bytes=15 * 512),
        Traffic("all-gather", 2, True, False, count=5, bytes=5 * 1024),
        Traffic("collective-permute", 0, True, False, count=5, bytes=5 * 512),
        Traffic("reduce-scatter", 2, True, False, count=5, bytes=5 * 512),
    ]


def test_outside_of_loops_and_in_other_formats(texts: dict[str, str]) -> None:
    actual = {one.kind: one for one in collectives(texts["plain"])}
    assert actual["all-to-all"] == Traffic(
        "all-to-all", 4, False, False, count=1, bytes=128
    )  # a tuple of 4 int8 [2, 16]
    # XLA:CPU may sum int8 in another format; the number of sums is the same.
    assert actual["all-reduce"].count == 1
    assert actual["all-reduce"].group == 2
    assert set(actual) == {"all-to-all", "all-reduce"}


def test_a_branch_says_that_it_may_not_be_taken(texts: dict[str, str]) -> None:
    assert [one for one in collectives(texts["branch"]) if one.conditional] == [
        Traffic("all-reduce", 8, False, True, count=1, bytes=512)
    ]


def test_a_loop_of_unknown_length_counts_once(texts: dict[str, str]) -> None:
    assert [one for one in collectives(texts["forever"]) if one.bytes == 512] == [
        Traffic("all-reduce", 2, True, False, count=1, bytes=512)
    ]


# ruff: noqa: E501 - lines as the compiler writes them
GPU = """HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %add.1 = f32[] add(%x, %y)
}

%async_computation (p: f32[64,4]) -> f32[8,4] {
  %p = f32[64,4]{1,0} parameter(0)
  ROOT %reduce-scatter.1 = f32[8,4]{1,0} reduce-scatter(%p), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %all-gather-start = (bf16[8,4]{1,0}, bf16[64,4]{1,0}) all-gather-start(%a), replica_groups=mesh['a'=2,'b'=8] {'b'}
  %all-gather-done = bf16[64,4]{1,0} all-gather-done(%all-gather-start)
  ROOT %tuple = (s32[], f32[8]{0}) tuple(%i, %s)
}

%cond (state: (s32[], f32[8])) -> pred[] {
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%one (p: f32[8]) -> f32[8] {
  %collective-permute-start = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1}}
  ROOT %collective-permute-done = f32[8]{0} collective-permute-done(%collective-permute-start)
}

%other (p: f32[8]) -> f32[8] {
  ROOT %p.2 = f32[8]{0} parameter(0)
}

ENTRY %main (a: bf16[8,4]) -> f32[8] {
  %all-gather-start.1 = ((f32[1]{0}, s4[8]{0}), (f32[8]{0}, s4[64]{0})) all-gather-start(%a, %b), replica_groups={{0,1,2,3,4,5,6,7}}
  %all-reduce-start = (f32[8]{0}, pred[8]{0:T(8,128)}) all-reduce-start(%a, %b), replica_groups=mesh['a'=2,'b'=8] {'a','b':(2)4}, to_apply=%add
  %all-reduce-done = (f32[8]{0}, pred[8]{0:T(8,128)}) all-reduce-done(%all-reduce-start)
  %rs-start = ((f32[64,4]{1,0}), f32[8,4]{1,0}) async-start(%c), calls=%async_computation
  %rs-done = f32[8,4]{1,0} async-done(%rs-start), calls=%async_computation
  %while = (s32[], /*index=1*/f32[8]{0}) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  %either = f32[8]{0} conditional(%p, %x, %x), true_computation=%one, false_computation=%other
  ROOT %gte = f32[8]{0} get-tuple-element(%while), index=1
}
"""


def test_started_forms_count_their_results_once() -> None:
    assert collectives(GPU) == [
        Traffic("all-gather", 8, True, False, count=7, bytes=7 * 512),
        Traffic("reduce-scatter", 8, False, False, count=1, bytes=128),
        Traffic("all-gather", 8, False, False, count=1, bytes=32 + 32),
        Traffic("all-reduce", 8, False, False, count=1, bytes=32 + 8),
        Traffic("collective-permute", 0, False, True, count=1, bytes=32),
    ]


TPU = """HloModule jit_f, is_scheduled=true

%scattered (p: bf16[8,1,64]) -> bf16[1,64] {
  ROOT %copy.9 = bf16[1,64]{1,0:T(8,128)(2,1)} copy(%p)
}

%start (p: bf16[1,8]) -> (bf16[1,8], bf16[8,8], u32[]) {
  %all-gather.1 = bf16[8,8]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), channel_id=8, replica_groups=mesh['a'=8] {'a'}
  ROOT %custom-call.1 = (bf16[1,8]{1,0}, bf16[8,8]{1,0}, u32[]{:S(2)}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.2 (p: bf16[1,8], q: bf16[8,8]) -> (bf16[4], bf16[8,8]) {
  %all-gather.2 = bf16[8,8]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), channel_id=8, replica_groups=mesh['a'=8] {'a'}
  ROOT %tuple.2 = (bf16[4]{0}, bf16[8,8]{1,0}) tuple(%work, %all-gather.2)
}

%end (p: bf16[1,8], q: bf16[8,8]) -> bf16[8,8] {
  %all-gather.3 = bf16[8,8]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=8, replica_groups=mesh['a'=8] {'a'}
  ROOT %custom-call.3 = bf16[8,8]{1,0} custom-call(%p, %q, %all-gather.3), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.4 (p: bf16[8,64]) -> bf16[1,64] {
  %all-reduce.4 = bf16[8,64]{1,0:T(8,128)(2,1)} all-reduce(%p), channel_id=6, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %fusion.4 = bf16[1,64]{1,0:T(8,128)(2,1)} fusion(%all-reduce.4), kind=kLoop, calls=%scattered
}

%body (state: (s32[], bf16[1,8])) -> (s32[], bf16[1,8]) {
  %begun = (bf16[1,8]{1,0}, bf16[8,8]{1,0}, u32[]{:S(2)}) fusion(%a), kind=kCustom, calls=%start
  %between = (bf16[4]{0}, bf16[8,8]{1,0}) fusion(%a, %b), kind=kOutput, calls=%async_collective_fusion.2
  %ended = bf16[8,8]{1,0} fusion(%a, %b), kind=kCustom, calls=%end
  %summed = bf16[1,64]{1,0} fusion(%c), kind=kCustom, calls=%all-reduce-scatter.4
  ROOT %tuple.5 = (s32[]{:T(128)}, bf16[1,8]{1,0}) tuple(%i, %d)
}

%condition (state: (s32[], bf16[1,8])) -> pred[] {
  %constant.6 = s32[]{:T(128)} constant(12)
  %state = (s32[]{:T(128)}, bf16[1,8]{1,0}) parameter(0)
  %get-tuple-element.6 = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %lt.6 = pred[]{:T(512)} compare(%get-tuple-element.6, %constant.6), direction=LT
}

ENTRY %main (a: bf16[1,8]) -> bf16[1,8] {
  %constant.7 = s32[]{:T(128)} constant(2)
  %copy.7 = s32[]{:T(128)S(6)} copy(%constant.7)
  %tuple.7 = (s32[]{:T(128)}, bf16[1,8]{1,0}) tuple(%copy.7, %a)
  %while.7 = (s32[]{:T(128)}, bf16[1,8]{1,0}) while(%tuple.7), condition=%condition, body=%body
  ROOT %get-tuple-element.7 = bf16[1,8]{1,0} get-tuple-element(%while.7), index=1
}
"""


def test_a_tpus_collectives_in_pieces_and_loops_that_count() -> None:
    assert collectives(TPU) == [
        Traffic("all-gather", 8, True, False, count=10, bytes=10 * 128),
        Traffic("reduce-scatter", 8, True, False, count=10, bytes=10 * 128),
    ]


ON_TPUS = """
import sys
sys.path += sys.argv[1:]
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def gradient(weights, x):
    def loss(weights):
        y, _ = jax.lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, weights)
        return (y.astype(jnp.float32) ** 2).sum()
    return jax.grad(loss)(weights)

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
mesh = Mesh(np.array(devices), ("x",))
split = NamedSharding(mesh, P(None, "x"))
weights = jax.ShapeDtypeStruct((12, 2048, 2048), jnp.bfloat16, sharding=split)
x = jax.ShapeDtypeStruct((4096, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))
sys.stdout.write("TEXT" + jax.jit(gradient, out_shardings=split).lower(weights, x).compile().as_text())
"""


@pytest.mark.slow
def test_twelve_layers_on_tpus_are_gathered_twice_and_their_gradients_scattered() -> None:
    try:
        directory = find_compiler("tpu").directory
    except RunError as error:
        pytest.skip(str(error))
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    command = [sys.executable, "-c", ON_TPUS, *([str(directory)] if directory else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    layer = 2 * 2048 * 2048
    assert collectives(done.stdout.partition("TEXT")[2]) == [
        Traffic("all-gather", 8, True, False, count=24, bytes=24 * layer),
        Traffic("reduce-scatter", 8, True, False, count=12, bytes=12 * layer // 8),
    ]


def test_a_program_of_one_device_has_none() -> None:
    assert collectives("ENTRY %main (a: f32[8]) -> f32[8] {\n  ROOT %a = f32[8]{0} parameter(0)\n}\n") == []
