"""The estimated time of a step: products by the formulas of the field and by XLA's count, and how all of it scales."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from small_lab.model import Small

from nnxdsl import Adapter, Experiment, Memory, Mesh, Objective, compile
from nnxdsl.planning.step_time import EFFICIENCY, HIDDEN, Work, cost, work
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.sharding import hardware

H200 = hardware.device("h200")
MODEL = Small(layers=2, pattern=2, embed_dim=64, mlp_dim=192, heads=4, head_dim=16, vocab_size=256)
RANK = 4
PROMPT = RESPONSE = 16
TRUNK, TARGETS = PROMPT + 2 * RESPONSE, 2 * RESPONSE
"""Tokens of a pair that go through the layers (the prompt once), and that need a log-probability."""

# Symbols as in the papers: N weights of the layers' products, VD of the head's, A the attention's own products.
N = MODEL.layers * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 192)
VD = 256 * 64
A = MODEL.layers * 4 * 4 * 16 * TRUNK * TRUNK
ADAPTERS = MODEL.layers * RANK * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 192))


@pytest.fixture
def asked(experiment: Callable[..., Experiment]) -> Callable[..., Experiment]:
    def make(**fields: Any) -> Experiment:
        return experiment(**{"model": MODEL, "batch_size": 4, **fields})

    return make


def of(experiment: Experiment) -> Work:
    return work(build_blueprint(experiment))


def test_a_full_step_by_the_formulas(asked: Callable[..., Experiment]) -> None:
    """Kaplan et al. 2020 (arXiv:2001.08361), section 2.1: forward 2N a token, backward twice that.

    The head computes its logits once more in the backward pass, so that they need not be kept; the reference is one
    more forward pass.
    """
    step = 3 * (2 * N * TRUNK + A) + 4 * 2 * VD * TARGETS
    reference = 2 * N * TRUNK + A + 2 * VD * TARGETS
    assert of(asked()).flops == 4 * (step + reference)
    again = 2 * N * TRUNK + A
    assert of(asked(memory=Memory(remat="full"))).flops == 4 * (step + reference + again)


def test_a_lora_step_by_the_formulas(asked: Callable[..., Experiment]) -> None:
    """Frozen weights have no gradient of their own: forward, and backward to the inputs; attention has no weights."""
    lora = asked(adapter=Adapter.LoRA(rank=RANK))
    step = 2 * 2 * N * TRUNK + 3 * A + 3 * 2 * ADAPTERS * TRUNK + 2 * 2 * VD * TARGETS
    reference = 2 * N * TRUNK + A + 2 * VD * TARGETS  # the base with its adapters off
    assert build_blueprint(lora).parameters["trainable"] == ADAPTERS
    assert of(lora).flops == 4 * (step + reference)
    again = 2 * N * TRUNK + A + 2 * ADAPTERS * TRUNK
    assert of(attrs.evolve(lora, memory=Memory(remat="full", reference="online"))).flops == 4 * (
        step + reference + again
    )


def test_without_a_reference_there_is_no_pass_of_it(asked: Callable[..., Experiment]) -> None:
    text = asked(objective=Objective.SFT(loss_on="all"))
    scores = MODEL.layers * 4 * 4 * 16 * 32 * 32
    assert of(text).flops == 4 * (3 * (2 * N * 32 + scores) + 4 * 2 * VD * 31)


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("adapter", [None, Adapter.LoRA(rank=RANK)], ids=["everything", "adapters"])
def test_xla_counts_as_many(asked: Callable[..., Experiment], adapter: Any, remat: Any) -> None:
    """To 10 %: XLA counts norms, softmax and the optimizer, too; and every loop once, so there is one period here."""
    wide = attrs.evolve(MODEL, embed_dim=128, mlp_dim=512, heads=4, head_dim=32)
    text = Objective.SFT(loss_on="all")
    one = asked(model=wide, objective=text, adapter=adapter, memory=Memory(remat=remat))
    counted = compile(one).lower().cost_analysis()
    assert counted is not None
    assert of(one).flops == pytest.approx(counted["flops"], rel=0.1)


def test_what_is_shared_and_what_is_not(asked: Callable[..., Experiment]) -> None:
    eight = asked(batch_size=8)
    whole = of(eight)
    assert of(asked(batch_size=16)).flops == 2 * whole.flops
    assert of(attrs.evolve(eight, microbatch_size=2)).flops == whole.flops
    for mesh in (Mesh(data=2), Mesh(fsdp=2), Mesh(context=2), Mesh(tensor=2), Mesh(expert=2)):
        assert of(attrs.evolve(eight, mesh=mesh)).flops == whole.flops / 2
    assert of(attrs.evolve(eight, mesh=Mesh(data=2, fsdp=2, tensor=2))).flops == whole.flops / 8
    # Weights are read once for each micro-batch, whatever its rows.
    assert of(attrs.evolve(eight, microbatch_size=1)).memory_bytes > whole.memory_bytes
    assert of(attrs.evolve(eight, memory=Memory(remat="full", reference="online"))).memory_bytes > whole.memory_bytes


def test_only_axes_that_are_there_have_transfers(asked: Callable[..., Experiment]) -> None:
    eight = asked(batch_size=8)
    assert set(of(eight).link_bytes.values()) == {0}
    for axis in ("data", "fsdp", "context", "tensor"):
        sent = of(attrs.evolve(eight, mesh=Mesh(**{axis: 2}))).link_bytes
        cut = {"fsdp"} if axis == "context" else set()  # weights lie on both
        assert {name for name, count in sent.items() if count} == {axis} | cut
    # Gradients pass between copies once for each micro-batch; of adapters, they are small.
    sent = {
        name: of(attrs.evolve(eight, mesh=Mesh(data=2), **fields)).link_bytes["data"]
        for name, fields in {
            "once": {},
            "twice": {"microbatch_size": 4},
            "adapters": {"adapter": Adapter.LoRA(rank=RANK)},
        }.items()
    }
    assert sent["twice"] == 2 * sent["once"]
    parameters = build_blueprint(eight).parameters["total"]
    assert sent["adapters"] == pytest.approx(sent["once"] * ADAPTERS / parameters)


def test_seconds_are_work_over_speeds(asked: Callable[..., Experiment]) -> None:
    one = asked(batch_size=16, mesh=Mesh(fsdp=8, data=2))
    done, actual = of(one), cost(build_blueprint(one), H200)
    assert H200.flops
    assert H200.bandwidth
    assert H200.link
    assert H200.slow_link
    assert actual.compute == done.flops / (H200.flops * EFFICIENCY)
    assert actual.memory == done.memory_bytes / H200.bandwidth
    # fsdp lies within a node of eight, data goes out of it.
    links = done.link_bytes["fsdp"] / H200.link + done.link_bytes["data"] / H200.slow_link
    assert actual.links == pytest.approx(links)
    assert actual.step == max(actual.compute, actual.memory) + (1 - HIDDEN) * actual.links


def test_an_axis_across_slices_is_slow(asked: Callable[..., Experiment]) -> None:
    pod = hardware.device("v5e")
    one = asked(batch_size=16, mesh=Mesh(data=4, slices=2))
    links = [cost(build_blueprint(attrs.evolve(one, mesh=mesh)), pod).links for mesh in (one.mesh, Mesh(data=4))]
    assert pod.link
    assert pod.slow_link
    assert links[0] / links[1] == pytest.approx(pod.link / pod.slow_link)
    assert math.isfinite(links[0])
