"""Rollouts: the same from the same seed, step and weights; stored across resumes; rewards."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from nnxdsl import (
    Data,
    Experiment,
    ImportanceSampling,
    Objective,
    Optimizer,
    Reward,
    RunError,
    Schedule,
    compile,
    evolve,
    reward,
)
from nnxdsl.config.objectives.reward import functions
from nnxdsl.data import BytesTokenizer, Prompts, load
from nnxdsl.program.compile import Program
from nnxdsl.rollouts.engine import Requests
from nnxdsl.rollouts.rollouts import Rollouts

sys.path.insert(0, str(Path(__file__).parents[1] / "packages"))

from small_lab.model import Small

ROWS = 6


@reward("vowels")
def vowels(completion: str) -> float:
    return sum(letter in "aeiou" for letter in completion) / 8


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    path = tmp_path_factory.mktemp("rows") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say {n}: ", "answer": str(n)}) + "\n" for n in range(ROWS)))
    result = load(Data.Prompts(str(path), max_completion_length=8), BytesTokenizer())
    assert isinstance(result, Prompts)
    return result


@pytest.fixture(scope="module")
def program(prompts: Prompts) -> Program:
    return compile(
        Experiment(
            name="grpo",
            model=Small(layers=1, pattern=1, vocab_size=320),
            objective=Objective.GRPO(rewards=(Reward("vowels"),), num_generations=2, num_iterations=2, beta=0.0),
            data=Data.Prompts(prompts.report.source, max_prompt_length=32, max_completion_length=8),
            optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
            batch_size=4,
            steps=4,
        )
    )


COMPILED: list[Any] = []


def rollouts(program: Program, prompts: Prompts) -> Rollouts:
    """As after a restart, but for what is compiled."""
    result = Rollouts.of(program, prompts, BytesTokenizer())
    if not COMPILED:
        result.evaluate(program.init(), prompts, np.arange(len(prompts)))
        COMPILED.append(result._episodes.engine._sampler)
    result._episodes.engine._sampler = COMPILED[0]
    return result


def equal(one: Any, other: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one.batch, other.batch, strict=True))


@pytest.mark.extended
def test_answers_are_a_function_of_seed_step_and_weights(program: Program, prompts: Prompts) -> None:
    state = program.init()
    first = rollouts(program, prompts)
    actual = first.rollout_at(0, state)
    assert actual.batch.tokens.shape == (4, 16)
    assert actual.batch.completion_ids.shape == actual.batch.old_logps.shape == (4, 8)
    assert not np.array_equal(*actual.batch.completion_ids[:2])  # two answers to one prompt
    assert first.row_ids(0) == first.row_ids(1) != first.row_ids(2)
    assert first.rollout_at(1, state) is actual  # the second update learns from the same
    assert first.state(2)["rollout"] is None
    kept = json.loads(json.dumps(first.state(1)))

    again = rollouts(program, prompts)
    assert equal(again.rollout_at(0, state), actual)
    assert not equal(again.rollout_at(2, state), actual)

    resumed = rollouts(program, prompts)
    with pytest.raises(RunError, match="step 1 trains on the completions of step 0, which were not saved"):
        resumed.rollout_at(1, state)
    assert resumed.check(kept) == 1
    assert equal(resumed.rollout_at(1, state), actual)
    assert resumed.rollout_at(1, state).metrics == actual.metrics

    held = first.evaluate(state, prompts, np.arange(len(prompts)))
    assert held is not None
    assert held == first.evaluate(state, prompts, np.arange(len(prompts)))
    assert held["reward"] == held["rewards/vowels/mean"]

    functions["vowels"] = lambda completion: float("nan")
    broken = rollouts(program, prompts)
    functions["vowels"] = vowels
    with pytest.raises(RunError, match=r"^step 2: .*prompts.jsonl:\d: reward 'vowels' returned nan, not a finite"):
        broken.rollout_at(2, state)
    with pytest.raises(RunError, match=r"the source of a reward .vowels. has changed since the checkpoint of step 1"):
        broken.check(kept)


@pytest.mark.extended
def test_ratios_to_the_sampler_are_one_on_policy_though_tokens_are_left_out(program: Program, prompts: Prompts) -> None:
    # Where the sampler's log-probs are of the tokens that top-p leaves, the mean ratio is their mass: 0.9 in TRL 1.16.
    fields = {"top_p": 0.6, "num_iterations": 1, "importance_sampling": ImportanceSampling(max_ratio=1.01)}
    settings = {f"objective.{name}": value for name, value in fields.items()}
    correcting = compile(evolve(program.experiment, settings))
    state, made = correcting.init(), Rollouts.of(correcting, prompts, BytesTokenizer())
    batch = made.rollout_at(0, state).batch
    engine = made._episodes.engine
    requests = Requests([[5, 6]], [8], 1, batch_size=1, prompt_length=8, max_completion_length=8)
    samples = engine.sample(engine.weights(state), requests)
    assert np.exp(samples[0].log_mass).max() < 0.7
    _, metrics = correcting.step(state, made.train_batch(batch))
    actual = {name.removeprefix("sampling/"): float(value) for name, value in metrics.items()}
    assert actual["importance_sampling_ratio/raw_mean"] == pytest.approx(1.0, abs=1e-5)
    assert actual["importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    assert actual["importance_sampling_ratio/clip_mean"] == 0.0
    assert 0 < actual["sampling_logp_difference/mean"] <= actual["sampling_logp_difference/max"] < 1e-5
    # A sampler of other weights is corrected, up to the bounds.
    _, metrics = correcting.step(
        correcting.init(), made.train_batch(batch._replace(sampler_logps=batch.sampler_logps - 0.5))
    )
    assert float(metrics["sampling/importance_sampling_ratio/raw_mean"]) == pytest.approx(np.exp(0.5), rel=1e-5)
    assert float(metrics["sampling/importance_sampling_ratio/mean"]) == pytest.approx(1.01, rel=1e-6)
    assert float(metrics["loss"]) == pytest.approx(1.01 * actual["loss"], rel=1e-5, abs=1e-7)


@pytest.mark.extended
def test_what_a_cache_in_8_bits_rounds_is_measured_and_corrected(program: Program, prompts: Prompts) -> None:
    fields = {"kv_cache_dtype": "int8", "num_iterations": 1, "importance_sampling": ImportanceSampling()}
    rounding = compile(evolve(program.experiment, {f"objective.{name}": value for name, value in fields.items()}))
    state, made = rounding.init(), Rollouts.of(rounding, prompts, BytesTokenizer())
    batch = made.rollout_at(0, state).batch
    differences = np.asarray(rounding.score(state, made.train_batch(batch)).token_stats.logp)
    differences = (differences.reshape(batch.loss_mask.shape) - batch.sampler_logps)[batch.loss_mask]
    _, metrics = rounding.step(state, made.train_batch(batch))
    actual = {name.removeprefix("sampling/"): float(value) for name, value in metrics.items()}
    assert 1e-5 < actual["sampling_logp_difference/max"] < 0.05
    assert actual["sampling_logp_difference/max"] == pytest.approx(np.abs(differences).max(), rel=1e-2)
    assert actual["importance_sampling_ratio/raw_mean"] == pytest.approx(np.exp(differences).mean(), rel=1e-5)


@pytest.mark.extended
def test_tokens_of_high_entropy_are_chosen_among_those_that_count(program: Program, prompts: Prompts) -> None:
    fields = {"top_entropy_quantile": 0.25, "entropy_coef": 0.1, "num_iterations": 1}
    asked = evolve(program.experiment, {f"objective.{name}": value for name, value in fields.items()})
    choosing = compile(asked)
    state, made = choosing.init(), Rollouts.of(choosing, prompts, BytesTokenizer())
    batch = made.rollout_at(0, state).batch
    assert batch.old_logps is None
    stats = choosing.score(state, made.train_batch(batch)).token_stats
    entropy = np.asarray(stats.entropy).reshape(batch.loss_mask.shape)
    assert batch.entropy_mask.sum() == np.ceil(0.25 * batch.loss_mask.sum())
    assert entropy[batch.entropy_mask].min() > entropy[batch.loss_mask & ~batch.entropy_mask].max()
    again = Rollouts.of(choosing, prompts, BytesTokenizer())
    again.check(json.loads(json.dumps(made.state(0))))
    _, metrics = choosing.step(state, made.train_batch(batch))
    expected = float(metrics["policy_loss"]) - 0.1 * entropy[batch.entropy_mask].mean()
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["entropy_bonus"]) == pytest.approx(entropy[batch.entropy_mask].mean(), rel=1e-5)


@pytest.mark.extended
def test_truncated_completions_can_be_left_out(program: Program, prompts: Prompts) -> None:
    state = program.init()
    last_ids = rollouts(program, prompts).rollout_at(0, state).batch.completion_ids[:, -1].tolist()
    fields = {"objective.mask_truncated_completions": True, "objective.num_iterations": 1}
    masking = rollouts(attrs.evolve(program, experiment=evolve(program.experiment, fields)), prompts)
    turns = masking._episodes.turns
    stopping = attrs.evolve(turns, stop_ids=turns.stop_ids | {last_ids[1]})  # so that a completion has ended
    masking._episodes = attrs.evolve(masking._episodes, turns=stopping)
    batch = masking.rollout_at(0, state).batch
    assert batch.weight.tolist() == [float(last == last_ids[1]) for last in last_ids]
    assert 0 < batch.weight.sum() < len(last_ids)
    _, metrics = program.step(state, batch)
    kept = batch.advantages[batch.weight > 0]
    assert float(metrics["loss"]) == pytest.approx(-kept.mean(), abs=1e-6)


@pytest.mark.extended
@pytest.mark.parametrize("cls", [Objective.RLOO, Objective.ReinforcePlusPlus])
def test_the_divergence_is_in_the_reward(cls: Any, program: Program, prompts: Prompts) -> None:
    objective = cls(rewards=(Reward("vowels"),), num_generations=2, beta=0.5)
    ours = compile(evolve(program.experiment, {"objective": objective}))
    initial, state = ours.init(), ours.init()
    made = rollouts(ours, prompts)
    for step in range(2):
        state, _ = ours.step(state, made.rollout_at(step, state).batch)
    batch = made.rollout_at(2, state).batch
    assert batch.old_logps is None  # the next update learns from others
    mask = batch.loss_mask
    now, first = (np.asarray(ours.score(each, batch).token_stats.logp, np.float64) for each in (state, initial))
    np.testing.assert_allclose(batch.ref_logps, first, rtol=1e-5, atol=1e-6)
    kl = 0.5 * (now - first) * mask
    assert np.abs(kl).max() > 1e-3
    episodes = made.rollout_at(2, state).episodes
    assert episodes is not None
    rewards = np.array([one.rewards[0] for one in episodes])
    if cls is Objective.RLOO:
        totals = (rewards - kl.sum(axis=1)).reshape(-1, 2)
        expected = (totals - totals[:, ::-1]).reshape(-1, 1) * mask
    else:
        returns = rewards[:, None] - np.cumsum(kl[:, ::-1], axis=1)[:, ::-1]
        expected = (returns - returns[mask].mean()) / (returns[mask].std(ddof=1) + 1e-4) * mask
    np.testing.assert_allclose(batch.advantages, expected, rtol=1e-4, atol=1e-5)
    _, metrics = ours.step(state, batch)
    assert float(metrics["kl"]) == pytest.approx((now - first)[mask].mean(), rel=1e-4, abs=1e-6)


@pytest.mark.gpu
@pytest.mark.slow
def test_log_probabilities_of_answers_are_those_of_whole_sequences(program: Program, prompts: Prompts) -> None:
    # What was kept of the policy that drew is what the step computes, so the first update has ratios of 1.
    state = program.init()
    made = rollouts(program, prompts)
    rollout = made.rollout_at(0, state)
    now = np.asarray(program.score(state, made.train_batch(rollout.batch)).token_stats.logp)
    np.testing.assert_array_equal(now, rollout.batch.old_logps)
    assert np.all(now[rollout.batch.loss_mask] < 0)
    assert np.all(now[~rollout.batch.loss_mask] == 0)
    _, metrics = program.step(state, made.train_batch(rollout.batch))
    advantages, mask = rollout.batch.advantages, rollout.batch.loss_mask
    expected = -np.mean((advantages * mask).sum(axis=1) / mask.sum(axis=1))
    assert float(metrics["loss"]) == pytest.approx(expected, abs=1e-6)
    assert float(metrics["clip_ratio/region_mean"]) == 0


ASKS_AGAIN = 'environment=Environment("asks again", max_turns=2)'

PAID = """Objective.GRPO(
        rewards=(Reward("contains_answer"),), num_generations=4, num_iterations=3, beta=0.01, kl_estimator="k1",
        SETTING
    )"""
CORRECTED = """Objective.OnPolicyDistill(
        teacher=Model.Llama3("tiny", weights=Weights.From(sft)), rewards=(Reward("contains_answer"),),
        num_generations=4, environment=Environment("asks again", max_turns=2),
    )"""

GRPO = """
from sft import experiment as sft

from nnxdsl import *

@environment("asks again")
class AsksAgain:
    def reset(self):
        self.turn = 0

    def step(self, text):
        self.turn += 1
        return f"You said {text!r}. Again?", 0.0, self.turn == 2


experiment = Experiment(
    name="grpo",
    model=Model.Llama3("tiny", weights=WEIGHTS),
    adapter=Adapter.LoRA(rank=4, alpha=8.0),
    objective=OBJECTIVE,
    data=Data.Prompts("prompts.jsonl", max_prompt_length=64, max_completion_length=ROOM),
    optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=3e-3)),
    batch_size=16,
    steps=24,
    evaluation=Evaluation(
        every_steps=12, data=Data.Prompts("prompts.jsonl", max_prompt_length=64, max_completion_length=ROOM)
    ),
    checkpoint=Checkpoint(every_steps=4, keep=3),
)

if __name__ == "__main__":
    experiment.main()
"""


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "objective",
    [*(PAID.replace("SETTING", setting) for setting in ("", "max_num_gen_batches=3", ASKS_AGAIN)), CORRECTED],
    ids=["plain", "dynamic sampling", "environment", "distilled in an environment"],
)
def test_a_run_learns_and_goes_on_bit_equal_between_updates(lab: Any, wait_until: Any, objective: str) -> None:
    chats = [[{"role": "user", "content": f"Hi {n}"}] for n in range(20)]
    rows = [json.dumps({"prompt": chat, "answer": "good"}) + "\n" for chat in chats]
    (lab.place / "prompts.jsonl").write_text("".join(rows))
    weights = "Weights.Random()" if objective == CORRECTED else "Weights.From(sft)"
    text = GRPO.replace("OBJECTIVE", objective).replace("WEIGHTS", weights)
    (lab.place / "grpo.py").write_text(text.replace("ROOM", "96" if "asks again" in objective else "8"))
    code, _, err = lab.python("grpo.py", "--home", "whole", "--quiet")
    assert code == 0, err
    (whole,) = (lab.place / "whole").glob("grpo-*")
    held = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines() if "eval/" in line]
    if objective == CORRECTED:
        assert held[-1]["eval/loss"] < held[0]["eval/loss"]
    else:
        assert held[-1]["eval/reward"] > held[0]["eval/reward"] + 0.2

    child = lab.start("grpo.py", "--home", "parts", "--quiet")
    (lab.place / "parts").mkdir(exist_ok=True)

    def is_there() -> bool:
        return any((lab.place / "parts").glob("grpo-*/checkpoints/00000004"))

    wait_until(is_there, child)
    child.kill()
    child.communicate()
    code, _, err = lab.python("grpo.py", "--home", "parts", "--quiet")
    assert code == 0, err
    (parts,) = (lab.place / "parts").glob("grpo-*")
    names = ("loss", "reward", "grad_norm", "kl", "completions/mean_length")
    for one, other in zip(rows_of(whole), rows_of(parts), strict=True):
        assert [one.get(name) for name in names] == [other.get(name) for name in names]
