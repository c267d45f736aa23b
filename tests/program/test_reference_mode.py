"""A reference asked once gives the steps of one that is asked every time; without either, a step is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from small_lab.model import Small

from nnxdsl import Adapter, Experiment, Memory, Objective, Quantization, SpecError, compile
from nnxdsl.data.batch import PairBatch
from nnxdsl.program import precomputed
from nnxdsl.program.compile import TrainState

LORA = {"adapter": Adapter.LoRA(rank=2, alpha=4.0), "model": Small(layers=2, pattern=1)}
QUANTISED = {**LORA, "quantization": Quantization.NF4(block_size=8)}
WAYS: dict[str, dict[str, Any]] = {"full": {"model": Small(layers=2, pattern=1)}, "lora": LORA, "nf4": QUANTISED}


@pytest.mark.extended
@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.slow) if way != "lora" else way for way in WAYS])
def test_asked_once_or_at_every_step_the_steps_are_equal(
    way: str,
    experiment: Callable[..., Experiment],
    pairs: Callable[..., PairBatch],
    trained: Callable[..., TrainState],
) -> None:
    batch = pairs(4, fill=1)
    after = {}
    for mode in ("cached", "online"):
        program = compile(experiment(**WAYS[way], microbatch_size=2, memory=Memory(reference=mode)))
        state = trained(program)
        asked = precomputed.with_reference_logps(program, state, batch) if mode == "cached" else batch
        at_first = {name: float(x.total / x.count) for name, x in program.evaluate(state, asked).items()}
        assert at_first["rewards/margins"] == 0.0  # to the bit: one program scored both
        assert at_first["loss"] == pytest.approx(np.log(2), abs=1e-7)
        for _ in range(3):
            state, metrics = program.step(state, asked)
        after[mode] = jax.device_get((state.trainable, metrics, program.evaluate(state, asked)))
    (cached, one, judged), (online, other, compared) = after["cached"], after["online"]
    assert one["loss"] == pytest.approx(other["loss"], abs=2e-7)  # of log-probabilities in the tens, in float32
    assert one.keys() == other.keys()
    assert judged.keys() == compared.keys()
    for path, leaf in online.items():
        np.testing.assert_allclose(cached[path], leaf, rtol=1e-5, atol=1e-6, err_msg=path)
    for name, (total, count) in compared.items():
        np.testing.assert_allclose(judged[name].total, total, rtol=1e-5, atol=1e-5, err_msg=name)
        assert judged[name].count == count


@pytest.mark.extended
def test_asked_once_no_copy_is_held(experiment: Callable[..., Experiment]) -> None:
    once, always = (compile(experiment(memory=Memory(reference=mode))) for mode in ("cached", "online"))
    assert "reference" not in once.layout.arrays
    assert "reference" in always.layout.arrays
    state = once.init()
    assert not state.reference
    assert once.reference(state) is None


def test_a_step_without_any_reference_is_refused(
    experiment: Callable[..., Experiment], pairs: Callable[..., PairBatch]
) -> None:
    program = compile(experiment(memory=Memory(reference="cached")))
    state = program.init()
    with pytest.raises(ValueError, match=r"precomputed\.with_reference_logps\(program, state, batch\)") as caught:
        program.step(state, pairs(4))
    assert "memory.reference='online'" in str(caught.value)


def test_a_reference_is_kept_of_pairs_alone(experiment: Callable[..., Experiment]) -> None:
    with pytest.raises(SpecError) as caught:
        experiment(objective=Objective.SFT(loss_on="all"), memory=Memory(reference="cached"))
    assert "memory.reference: 'cached' has no effect: Objective.SFT has no reference" in str(caught.value)
    with pytest.raises(SpecError) as caught:
        experiment(memory=Memory(reference="cached", offload=("reference",)))
    assert "memory.offload.0: 'reference' has no effect: its log-probs are precomputed" in str(caught.value)
