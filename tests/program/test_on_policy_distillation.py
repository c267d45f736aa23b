"""On-policy distillation against TRL's trainer; tests/reference/make_on_policy_distillation.py makes the figures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from small_lab.model import Small

from nnxdsl import (
    Adapter,
    Checkpoint,
    Data,
    Distance,
    Evaluation,
    Experiment,
    Mesh,
    Objective,
    PlanError,
    Precision,
    Quantization,
    Reward,
    RunError,
    SpecError,
    Tokenizer,
    Weights,
    compile,
)
from nnxdsl.config.objectives.reward import functions
from nnxdsl.data.batch import PER_COMPLETION, GroupBatch, RolloutBatch
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.planning.flops import work
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.run import run
from tests.fixtures.trl import adamw

REFERENCE = Path(__file__).parents[1] / "reference"
STORED = REFERENCE / "on_policy_distillation"
FIGURES: dict[str, Any] = json.loads((STORED / "figures.json").read_text())
ROWS = [json.loads(line) for line in (REFERENCE / "replay" / "pairs.jsonl").read_text().splitlines()]
PROMPT, RESPONSE = 16, 16
STUDENT = Small(weights=Weights.HF(str(REFERENCE / "replay" / "model")), tokenizer=Tokenizer.Bytes(allow_mismatch=True))
TEACHER = attrs.evolve(STUDENT, weights=Weights.HF(str(STORED / "teacher")))
ADAMW = adamw(FIGURES["settings"])
DISTANCES = {
    "reverse": {},
    "forward": {"distance": Distance.ForwardKL()},
    "jsd": {"distance": Distance.JSD(beta=0.3)},
    "warm": {"temperature": 1.7},
    "parts": {},
}


def asked(**fields: Any) -> Experiment:
    """An experiment as TRL ran it."""
    of_objective = {"teacher": TEACHER, **{name: fields.pop(name) for name in OBJECTIVE & fields.keys()}}
    options = {
        "name": "distilled",
        "model": STUDENT,
        "objective": Objective.OnPolicyDistill(**of_objective),
        "data": Data.Prompts("none.jsonl", max_prompt_length=PROMPT, max_completion_length=RESPONSE),
        "optimizer": ADAMW,
        "batch_size": FIGURES["batch"],
        "steps": len(FIGURES["runs"]["reverse"]),
        "precision": Precision(compute="float32"),
    }
    return Experiment(**{**options, **fields})


RECORDED = ["reward", "reward_std", "rewards/short/mean", "rewards/short/std"]
OBJECTIVE = {field.name for field in attrs.fields(Objective.OnPolicyDistill)}


def completions(rows: list[dict[str, list[int]]]) -> RolloutBatch:
    """Prompts of the stored rows with the completions that the trainer took for sampled ones."""
    count = len(rows)
    tokens, ids = np.zeros((count, PROMPT + RESPONSE), np.int32), np.zeros((count, RESPONSE), np.int32)
    length = np.array([len(row["prompt_ids"]) + len(row["chosen_ids"]) for row in rows], np.int32)
    ours = np.array([len(row["chosen_ids"]) for row in rows], np.int32)
    for index, row in enumerate(rows):
        tokens[index, : length[index]] = row["prompt_ids"] + row["chosen_ids"]
        ids[index, : ours[index]] = row["chosen_ids"]
    mask = np.arange(RESPONSE) < ours[:, None]
    ones, zeros = np.ones(count, np.float32), np.zeros(mask.shape, np.float32)
    return RolloutBatch(tokens, length, ids, ours, mask, ones, zeros, ones * RESPONSE)


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("name", DISTANCES)
def test_each_step_equals_that_of_trl(name: str) -> None:
    size = FIGURES["batch"]
    program = compile(asked(**DISTANCES[name], microbatch_size=2 if name == "parts" else None))
    state = program.init()
    for step, figures in enumerate(FIGURES["runs"][name]):
        state, metrics = program.step(state, completions(ROWS[step * size : (step + 1) * size]))
        for key, value in figures.items():
            if name == "parts" and key == "entropy":  # TRL's is a mean of the means of micro-batches, ours is exact
                value = FIGURES["runs"]["reverse"][step][key]
            # TRL is in float32 as well; gradients of a step go through those before.
            assert float(metrics[key]) == pytest.approx(value, rel=1e-4, abs=2e-6), (step, key)


def logps(template: Any, leaves: Any, batch: RolloutBatch, temperature: float) -> Any:
    """Log-probabilities of completions' tokens, from whole logits."""
    places = positions_right_padded(batch.length, batch.tokens.shape[1])

    @jax.jit
    def computed(leaves: Any) -> Any:
        model = template.merge(leaves)
        logits = model.logits(model(batch.tokens, places, dtype=np.float32).hidden) / temperature
        each = jax.nn.log_softmax(logits[:, :-1])
        return jnp.take_along_axis(each, batch.tokens[:, 1:, None], axis=2)[..., 0]  # by the token's place, less one

    return computed(dict(leaves))


@pytest.mark.extended
def test_the_sampled_distance_is_the_policy_gradient_of_log_ratios() -> None:
    """Loss and gradient are those of `-A log q` with `A = log p - log q` of whole logits."""
    temperature = 1.3
    program = compile(asked(distance=Distance.SampledReverseKL(), temperature=temperature, microbatch_size=2))
    state, batch = program.init(), completions(ROWS[:4])
    batch = batch._replace(weight=np.array([1, 0, 1, 1], np.float32))
    assert program.blueprint.teacher is not None
    place = np.arange(batch.tokens.shape[1] - 1) + 1
    mask = (place >= (batch.length - batch.completion_length)[:, None]) & (place < batch.length[:, None])
    mask = mask & (batch.weight > 0)[:, None]
    theirs = logps(program.blueprint.teacher.template, state.reference, batch, temperature)
    template, leaves = program.policy(state)

    def surrogate(trainable: Any) -> Any:
        ours = logps(template, {**leaves, **trainable}, batch, temperature)
        return -jnp.sum(jax.lax.stop_gradient(theirs - ours) * ours * mask) / mask.sum()

    expected = jax.jit(jax.grad(surrogate))(dict(state.trainable))
    ours = np.asarray(logps(template, leaves, batch, temperature), np.float64)
    actual, terms = jax.jit(program.policy_loss.grads)(
        state.trainable, state.frozen, state.reference, program.shard_batch(batch)
    )
    assert float(terms.loss.count) == mask.sum()
    apart = np.sum((ours - np.asarray(theirs, np.float64)) * mask)
    assert float(terms.loss.total) == pytest.approx(apart, rel=2e-5, abs=2e-5)  # a sum of both signs
    for path, gradient in actual.items():
        wanted = np.asarray(expected[path])
        np.testing.assert_allclose(
            gradient / mask.sum(), wanted, rtol=1e-4, atol=4e-6 * np.abs(wanted).max(), err_msg=path
        )


@pytest.mark.extended
@pytest.mark.parametrize("distance", [Distance.ReverseKL(), Distance.SampledReverseKL()], ids=str)
@pytest.mark.parametrize(
    "fields",
    [
        {"adapter": Adapter.LoRA(rank=2)},
        {"adapter": Adapter.LoRA(rank=2), "quantization": Quantization.NF4(block_size=8), "microbatch_size": 4},
    ],
    ids=["lora", "nf4 in parts"],
)
def test_completions_that_share_their_prompt_take_the_same_step(distance: Distance, fields: dict[str, Any]) -> None:
    rows = [{**ROWS[group], "chosen_ids": ROWS[place]["chosen_ids"]} for group in (0, 5) for place in range(4)]
    alone = completions(rows)
    left = np.zeros((2, PROMPT), np.int32)
    for group in (0, 1):
        ids = rows[4 * group]["prompt_ids"]
        left[group, PROMPT - len(ids) :] = ids
    arrays = [name for name in PER_COMPLETION if getattr(alone, name) is not None]
    joined = GroupBatch(
        left,
        (alone.length - alone.completion_length)[::4],
        **{name: getattr(alone, name).reshape(2, 4, *getattr(alone, name).shape[1:]) for name in arrays},
    )
    program = compile(asked(num_generations=4, batch_size=8, distance=distance, **fields))
    assert program.blueprint.num_generations == 4
    steps = []
    for batch in (alone, joined):
        state, first = program.step(program.init(), batch)
        second = program.step(state, batch)[1]
        steps.append(
            [{key: float(metrics[key]) for key in ("loss", "grad_norm", "entropy")} for metrics in (first, second)]
        )
    for one, other in zip(*steps, strict=True):
        assert other == pytest.approx(one, rel=2e-5)


@pytest.mark.extended
@pytest.mark.parametrize("rewards", [(), (Reward("short"),)], ids=["none", "one"])
def test_a_run_learns_and_measures_the_distance_of_held_out_completions(
    tmp_path: Path, rewards: tuple[Reward, ...]
) -> None:
    """Rewards are logged alone, so that there may be none."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Say {n}: "}) + "\n" for n in range(12)))
    data = Data.Prompts(str(tmp_path / "prompts.jsonl"), max_prompt_length=PROMPT, max_completion_length=8)
    functions["short"] = lambda completion: -len(completion)
    experiment = asked(
        rewards=rewards, num_generations=2, data=data, test_size=0.25, evaluation=Evaluation(every_steps=4), steps=8
    )
    outcome = run(experiment, tmp_path / "runs", Display(quiet=True))
    lines = [json.loads(line) for line in (outcome.directory / "metrics.jsonl").read_text().splitlines()]
    held = [line["eval/loss"] for line in lines if "eval/loss" in line]
    assert held[-1] < held[0]
    step = next(line for line in lines if "loss" in line)
    assert [key for key in step if "reward" in key] == (RECORDED if rewards else [])
    rows = [json.loads(line) for line in (outcome.directory / "rollouts.jsonl").read_text().splitlines()]
    assert all(one["reward"] is None for one in rows[0]["completions"]) is not bool(rewards)


@pytest.mark.extended
def test_a_run_is_not_resumed_with_another_teacher(tmp_path: Path) -> None:
    """Also beside an adapter, where no other digest covers it."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Say {n}: "}) + "\n" for n in range(4)))
    shutil.copytree(STORED / "teacher", tmp_path / "teacher")
    calls: list[int] = []

    def ends(completions: list[str]) -> list[float]:
        calls.append(len(completions))
        if len(calls) == 4:
            raise ValueError("the fourth time")
        return [0.0] * len(completions)

    functions["ends"] = ends
    experiment = asked(
        teacher=attrs.evolve(TEACHER, weights=Weights.HF(str(tmp_path / "teacher"))),
        rewards=(Reward("ends"),),
        adapter=Adapter.LoRA(rank=2),
        data=Data.Prompts(str(tmp_path / "prompts.jsonl"), max_prompt_length=PROMPT, max_completion_length=4),
        checkpoint=Checkpoint(every_steps=2),
    )
    with pytest.raises(RunError, match="the fourth time"):
        run(experiment, tmp_path / "runs", Display(quiet=True))
    file = tmp_path / "teacher" / "model.safetensors"
    weights = safetensors.numpy.load_file(file)
    safetensors.numpy.save_file({name: array + 0.1 for name, array in weights.items()}, file, {"format": "pt"})
    with pytest.raises(RunError, match=r"cannot resume from step 2: the teacher has changed"):
        run(experiment, tmp_path / "runs", Display(quiet=True))


def test_the_teacher_is_planned() -> None:
    batch = completions(ROWS[:4])
    alone = Objective.GRPO(rewards=(Reward("none"),), num_generations=4, beta=0.0)
    taught, plain = (work(build_blueprint(one), batch) for one in (asked(), asked(objective=alone)))
    learning = work(build_blueprint(asked(objective=alone, model=TEACHER)), batch)
    assert taught.model_flops - plain.model_flops == pytest.approx(learning.model_flops / 3)
    sampled = work(build_blueprint(asked(distance=Distance.SampledReverseKL())), batch)
    assert plain.executed < sampled.executed < taught.executed  # one log-probability, not whole distributions
    blueprint = build_blueprint(asked(mesh=Mesh(fsdp=2)))
    assert blueprint.teacher is not None
    assert blueprint.layout.arrays["teacher"].keys() == blueprint.teacher.base.keys() != blueprint.base.keys()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(SpecError, match=r"distance: SampledReverseKL needs tokens that the model itself has sampled"):
        Objective.Distill(teacher=TEACHER, distance=Distance.SampledReverseKL())
    with pytest.raises(SpecError, match=r"top_p: tokens that are never sampled bias SampledReverseKL; leave it out"):
        asked(distance=Distance.SampledReverseKL(), top_p=0.9)
    with pytest.raises(SpecError, match=r"teacher.weights: Weights.PEFT is an adapter and no model"):
        asked(teacher=attrs.evolve(TEACHER, weights=Weights.PEFT("none")))
    with pytest.raises(SpecError, match=r"3 completions of a prompt do not divide batch_size=4"):
        asked(num_generations=3)
    with pytest.raises(SpecError, match=r"rewards.0: there is no environment; set environment=Environment"):
        asked(rewards=(Reward.Environment(),))
    with pytest.raises(SpecError, match=r"OnPolicyDistill reads prompts"):
        asked(data=Data.Preferences("none.jsonl"))
    with pytest.raises(PlanError, match=r"objective.teacher: teacher and student vocabularies differ"):
        build_blueprint(asked(teacher=Small(vocab_size=50)))
