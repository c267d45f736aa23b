"""An objective that is not of the core: it trains like any other, and a forgotten registration says what to write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import attrs
import jax
import numpy as np
import pytest
from small_lab.model import Small
from small_lab.simpo import SimPO
from small_lab.tiny_family import PICO, Pico

from nnxdsl import (
    Experiment,
    Memory,
    Model,
    Objective,
    Optimizer,
    Schedule,
    Weights,
    compile,
    evolve,
    from_json,
    to_json,
)
from nnxdsl.data.batch import PairBatch
from nnxdsl.formats import hf
from nnxdsl.models.families.registry import from_hf, to_hf
from nnxdsl.planning.plan import Lengths, memory, plan
from nnxdsl.program.architecture import architecture
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.program.compile import TrainState

SHALLOW = Small(layers=2, pattern=1)


def test_simpo_trains(
    experiment: Callable[..., Experiment], pairs: Callable[..., PairBatch], trained: Callable[..., TrainState]
) -> None:
    asked = experiment(objective=SimPO(beta=1.5, gamma=0.5), model=SHALLOW)
    program = compile(asked)
    state = trained(program)
    assert state.reference == {}
    assert program.reference(state) is None
    assert plan(asked)["reference"] == "none: the objective compares with nothing"
    batch = pairs(4)
    found = []
    for _ in range(5):
        state, metrics = program.step(state, batch)
        found.append({name: float(value) for name, value in metrics.items()})
    assert found[-1]["loss"] < found[0]["loss"]
    assert found[-1]["rewards/margins"] > found[0]["rewards/margins"]

    # The first step by the paper's formula, from log-probabilities that the DPO metrics report for single pairs.
    losses = []
    state = trained(program)
    for row in range(4):
        one = program.evaluate(state, jax.tree.map(lambda part, row=row: part[row : row + 1], batch))
        chosen = float(one["logps/chosen"].total) / batch.chosen_length[row]
        rejected = float(one["logps/rejected"].total) / batch.rejected_length[row]
        losses.append(np.log1p(np.exp(-(1.5 * (chosen - rejected) - 0.5))))
    assert found[0]["loss"] == pytest.approx(float(np.mean(losses)), rel=1e-5)


def test_a_family_of_one_file_trains_is_exported_and_read_again(
    experiment: Callable[..., Experiment],
    pairs: Callable[..., PairBatch],
    trained: Callable[..., TrainState],
    tmp_path: Path,
) -> None:
    """The file registers a spec class, a size, `config.json` and tensor names; the core names none of them."""
    config = PICO["tiny"]
    assert architecture(Pico("tiny")) == config
    fields = to_hf(config, like="pico")
    assert (fields["model_type"], fields["architectures"]) == ("pico", ["PicoForCausalLM"])
    assert from_hf(fields) == config
    assert from_json(to_json(experiment(model=Pico("tiny")))) == experiment(model=Pico("tiny"))

    program = compile(experiment(model=Pico("tiny")))
    state = trained(program)
    _, metrics = program.step(state, pairs(4))
    assert np.isfinite(float(metrics["loss"]))

    leaves = {path: np.asarray(leaf) for path, leaf in trained(program).trainable.items()}
    hf.write(tmp_path, config, leaves, like="pico")
    reader = hf.HubReader(tmp_path)
    assert reader.config == config
    for path, leaf in leaves.items():
        np.testing.assert_array_equal(reader.leaf(path), leaf)
    loaded = evolve(experiment(model=Pico("tiny")), {"model.weights": Weights.HF(str(tmp_path))})
    assert architecture(loaded.model) == config


@attrs.frozen(kw_only=True)
class Forgotten(Objective):
    """An objective whose loss was not registered."""

    batch_kind: ClassVar[str] = "pairs"


@attrs.frozen(kw_only=True)
class Unknown(Model):
    """A model whose network was not registered."""


@attrs.frozen(kw_only=True)
class Odd(Optimizer):
    """An optimizer whose update rule was not registered."""


@attrs.frozen(kw_only=True)
class Strange(Schedule):
    """A schedule whose curve was not registered."""


CONSTANT = Schedule.Constant(lr=0.1)
FORGOTTEN = {
    "objective": (
        {"objective": Forgotten()},
        "no loss is registered for Forgotten; write\n"
        "  from nnxdsl import losses\n"
        "  @losses.build.register(Forgotten)\n"
        "  def _(objective): return lambda policy, reference, weight: losses.Terms(...)",
    ),
    "model": (
        {"model": Unknown()},
        "no network is registered for Unknown; write\n"
        "  from nnxdsl.program import blueprint\n"
        "  @blueprint.architecture.register(Unknown)\n"
        "  def _(model): return DecoderConfig(...)",
    ),
    "optimizer": (
        {"optimizer": Odd(schedule=CONSTANT)},
        "no update rule is registered for Odd; write\n"
        "  from nnxdsl.optim import optimizers\n"
        "  @optimizer.build.register(Odd)\n"
        "  def _(spec, curve, roles): return optax.GradientTransformation(...)",
    ),
    "schedule": (
        {"optimizer": Optimizer.SGD(schedule=Strange())},
        "no learning rate is registered for Strange; write\n"
        "  from nnxdsl.optim import optimizers\n"
        "  @optimizer.learning_rate.register(Strange)\n"
        "  def _(schedule, steps): return lambda step: ...",
    ),
}


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_forgotten_registration_says_what_to_write(name: str, experiment: Callable[..., Experiment]) -> None:
    fields, message = FORGOTTEN[name]
    with pytest.raises(NotImplementedError) as caught:
        compile(experiment(**fields))
    assert str(caught.value) == message


@pytest.mark.slow
def test_memory_of_the_compiled_step(
    experiment: Callable[..., Experiment], pairs: Callable[..., PairBatch], trained: Callable[..., TrainState]
) -> None:
    """XLA's own figures: arguments are the layout's arrays and the batch; less is kept where it is computed again."""
    model = Small(layers=4, pattern=1, embed_dim=64, mlp_dim=256)
    temporaries = {}
    for remat in ("none", "full"):
        program = compile(experiment(model=model, memory=Memory(remat=remat), batch_size=16))
        batch = pairs(16, prompt=24, response=16)
        report = program.memory_compiled(batch)
        held = sum(program.layout.device_bytes().values())
        bytes_of_batch = sum(part.nbytes for part in jax.tree.leaves(batch))
        assert report.argument_size_in_bytes == pytest.approx(held + bytes_of_batch, rel=0.01)
        temporaries[remat] = report.temp_size_in_bytes
        parts = memory(program.blueprint, Lengths(24 + 2 * 16, 2 * 16))
        estimated = sum(part.bytes for part in parts if part.tag == "estimated")
        assert estimated == pytest.approx(report.temp_size_in_bytes, rel=0.3)
    assert temporaries["full"] < 0.7 * temporaries["none"]


def test_the_plan_needs_no_more_than_the_blueprint(experiment: Callable[..., Experiment]) -> None:
    found = plan(experiment(model=Small(layers=3)))
    blueprint = build_blueprint(experiment(model=Small(layers=3)))
    assert (
        found["parameters"]["total"]
        == found["parameters"]["trainable"]
        == sum(int(np.prod(leaf.shape)) for leaf in blueprint.base.values())
    )
    parts = {part["name"]: part["bytes"] for part in found["memory"]}
    assert parts["trainable weights"] == parts["reference copy"] == 4 * found["parameters"]["total"]
    assert found["reference"] == "online: a frozen copy of the first weights, asked at every step"
    assert found["tokens_at_most"] == 10 * 4 * (16 + 2 * 16)
    assert found["bytes_per_device"] == sum(parts.values())
