"""An objective that is not of the core: it trains like any other, and a forgotten registration says what to write."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import attrs
import jax
import numpy as np
import optax
import pytest
from small_lab.model import Small
from small_lab.scored_data import Scored
from small_lab.simpo import SimPO
from small_lab.tiny_family import PICO, Pico
from small_lab.weighted_sft import WeightedSFT

from nnxdsl import (
    Adapter,
    Data,
    Experiment,
    Memory,
    Model,
    Objective,
    Optimizer,
    Order,
    Schedule,
    Weights,
    compile,
    evolve,
    from_json,
    to_json,
)
from nnxdsl.config.quantization import InBlocks
from nnxdsl.data import BatchSampler, BytesTokenizer, load
from nnxdsl.data.batch import PairBatch, SequenceBatch
from nnxdsl.errors import SpecError
from nnxdsl.formats import hf
from nnxdsl.models.families.registry import from_hf, to_hf
from nnxdsl.optim import optimizers, schedules
from nnxdsl.optim.param_roles import Role
from nnxdsl.optim.schedules import Curve
from nnxdsl.planning.plan import plan
from nnxdsl.program.architecture import architecture
from nnxdsl.program.batches import Lengths
from nnxdsl.program.batches.abstract import lengths
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.program.compile import TrainState
from nnxdsl.program.memory import memory

SHALLOW = Small(layers=2, pattern=1)


@pytest.mark.extended
def test_simpo_trains(
    experiment: Callable[..., Experiment], pairs: Callable[..., PairBatch], trained: Callable[..., TrainState]
) -> None:
    asked = experiment(objective=SimPO(beta=1.5, gamma=0.5), model=SHALLOW)
    program = compile(asked)
    state = trained(program)
    assert state.reference == {}
    assert program.reference(state) is None
    assert plan(asked)["reference"] == "none: the objective has no reference"
    batch = pairs(4)
    actual = []
    for _ in range(5):
        state, metrics = program.step(state, batch)
        actual.append({name: float(value) for name, value in metrics.items()})
    assert actual[-1]["loss"] < actual[0]["loss"]
    assert actual[-1]["rewards/margins"] > actual[0]["rewards/margins"]

    # The first step by the paper's formula, from log-probabilities that the DPO metrics report for single pairs.
    losses = []
    state = trained(program)
    for row in range(4):
        one = program.evaluate(state, jax.tree.map(lambda part, row=row: part[row : row + 1], batch))
        chosen = float(one["logps/chosen"].total) / batch.chosen_length[row]
        rejected = float(one["logps/rejected"].total) / batch.rejected_length[row]
        losses.append(np.log1p(np.exp(-(1.5 * (chosen - rejected) - 0.5))))
    assert actual[0]["loss"] == pytest.approx(float(np.mean(losses)), rel=1e-5)


@pytest.mark.extended
def test_an_objective_over_other_data_trains_from_three_files(
    experiment: Callable[..., Experiment], trained: Callable[..., TrainState], tmp_path: Path
) -> None:
    """The data source, the kind of batch and the objective are files of their own; the core names none of them."""
    rows = [("one two three", 0.5), ("four five", -1.0), ("six", 2.0), ("seven eight nine ten", 0.0)]
    file = tmp_path / "scored.jsonl"
    file.write_text("".join(json.dumps({"text": text, "score": score}) + "\n" for text, score in rows))
    weighted = experiment(
        objective=WeightedSFT(temperature=2.0), data=Scored(str(file)), model=Model.Llama3("tiny"), microbatch_size=2
    )
    assert from_json(to_json(weighted)) == weighted
    with pytest.raises(SpecError, match="WeightedSFT reads scored, Data"):
        experiment(objective=WeightedSFT(), data=Data.Text("none.jsonl"))
    assert lengths(weighted.data) == Lengths(32, 31)
    assert plan(weighted)["tokens_at_most"] == weighted.steps * 4 * 32

    dataset = load(weighted.data, BytesTokenizer(), vocabulary=architecture(weighted.model).vocab_size)
    batch = BatchSampler(dataset, batch_size=4, seed=0, order=Order.AsInFile()).batch_at(0)
    program = compile(weighted)
    state = trained(program)
    # By hand, from the mean log-probability of a target that SFT reports for each text alone.
    sft = compile(experiment(objective=Objective.SFT(loss_on="all"), model=Model.Llama3("tiny")))
    expected = []
    for row, (_, score) in enumerate(rows):
        alone = SequenceBatch(*(part[row : row + 1] for part in batch[:4]))
        expected.append(np.exp(score / 2) * float(sft.evaluate(trained(sft), alone)["loss"].total))
    actual = []
    for _ in range(3):
        state, metrics = program.step(state, batch)
        actual.append(float(metrics["loss"]))
    assert actual[0] == pytest.approx(float(np.mean(expected)), rel=1e-5)
    assert actual[-1] < actual[0]
    assert float(metrics["score"]) == pytest.approx(0.375)


@attrs.frozen(kw_only=True)
class E5M2(InBlocks):
    """Eight-bit floats with five bits of exponent."""

    weight_dtype: ClassVar[str] = "float8_e5m2"


@pytest.mark.extended
def test_a_quantization_of_one_class_trains(
    experiment: Callable[..., Experiment], pairs: Callable[..., PairBatch], trained: Callable[..., TrainState]
) -> None:
    fields = {"model": SHALLOW, "adapter": Adapter.LoRA(rank=2)}
    quantized, plain = (compile(experiment(**fields, **more)) for more in ({"quantization": E5M2(block_size=8)}, {}))
    losses, states = [], [trained(program) for program in (quantized, plain)]
    assert {str(leaf.dtype) for leaf in states[0].frozen.values()} >= {"float8_e5m2"}
    for program, state in zip((quantized, plain), states, strict=True):
        _, metrics = program.step(state, pairs(4))
        losses.append(float(metrics["logps/chosen"]))
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.1)  # two bits of mantissa


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
class SignSGD(Optimizer):
    """The sign of the gradient (Bernstein et al. 2018, arXiv:1802.04434)."""


@attrs.frozen(kw_only=True)
class Halving(Schedule):
    """A learning rate that halves at every step."""

    lr: float = 0.25


@optimizers.build.register(SignSGD)
def _(optimizer: SignSGD, curve: Curve, roles: Mapping[str, Role]) -> optax.GradientTransformation:
    return optax.sign_sgd(curve)


@schedules.learning_rate.register(Halving)
def _(schedule: Halving, steps: int) -> Curve:
    return lambda step: schedule.lr * 0.5**step


@pytest.mark.extended
def test_an_optimizer_and_a_schedule_of_one_class_train(
    experiment: Callable[..., Experiment], pairs: Callable[..., PairBatch], trained: Callable[..., TrainState]
) -> None:
    program = compile(experiment(model=SHALLOW, optimizer=SignSGD(schedule=Halving(), max_grad_norm=None)))
    state = trained(program)
    for lr in (0.25, 0.125):
        before = {path: np.asarray(leaf) for path, leaf in state.trainable.items()}
        state, metrics = program.step(state, pairs(4))
        assert float(metrics["learning_rate"]) == lr
        steps = np.concatenate([np.ravel(np.abs(state.trainable[path] - leaf)) for path, leaf in before.items()])
        assert set(np.round(steps, 5)) <= {0.0, lr}
        assert np.mean(steps > 0) > 0.5


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
        "  def _(objective): return lambda policy, reference, weight: losses.LossTerms(...)",
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
        "  @optimizers.build.register(Odd)\n"
        "  def _(spec, curve, roles): return optax.GradientTransformation(...)",
    ),
    "schedule": (
        {"optimizer": Optimizer.SGD(schedule=Strange())},
        "no learning rate is registered for Strange; write\n"
        "  from nnxdsl.optim import schedules\n"
        "  @schedules.learning_rate.register(Strange)\n"
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
    data = Data.Preferences("none.jsonl", max_prompt_length=24, max_completion_length=16)
    temporaries = {}
    for remat in ("none", "full"):
        program = compile(experiment(model=model, data=data, memory=Memory(remat=remat), batch_size=16))
        batch = pairs(16, prompt=24, response=16)
        report = program.lower(batch).compile().memory_analysis()
        held = sum(program.layout.device_bytes().values())
        bytes_of_batch = sum(part.nbytes for part in jax.tree.leaves(batch))
        assert report.argument_size_in_bytes == pytest.approx(held + bytes_of_batch, rel=0.01)
        temporaries[remat] = report.temp_size_in_bytes
        parts = memory(program.blueprint)
        estimated = sum(part.bytes for part in parts if part.tag == "estimated")
        assert estimated == pytest.approx(report.temp_size_in_bytes, rel=0.3)
    assert temporaries["full"] < 0.7 * temporaries["none"]


@pytest.mark.extended
def test_the_plan_needs_no_more_than_the_blueprint(experiment: Callable[..., Experiment]) -> None:
    actual = plan(experiment(model=Small(layers=3)))
    blueprint = build_blueprint(experiment(model=Small(layers=3)))
    assert (
        actual["parameters"]["total"]
        == actual["parameters"]["trainable"]
        == sum(int(np.prod(leaf.shape)) for leaf in blueprint.base.values())
    )
    parts = {part["name"]: part["bytes"] for part in actual["memory"]}
    assert parts["trainable weights"] == parts["reference copy"] == 4 * actual["parameters"]["total"]
    assert actual["reference"] == "online: a frozen copy of the initial weights, run on every batch"
    assert actual["tokens_at_most"] == 10 * 4 * (16 + 2 * 16)
    assert actual["bytes_per_device"] == sum(parts.values())
