"""Held-out metrics are means over all rows, however these are split."""

from __future__ import annotations

import json
from typing import Any

import attrs
import jax
import numpy as np
import pytest

from nnxdsl import Evaluation, Experiment, Order, PlanError, Program, Weights, compile, evolve, from_json
from nnxdsl.data.loaders.build import load
from nnxdsl.data.sampler import permutation
from nnxdsl.data.tokenizers.base import BytesTokenizer
from nnxdsl.generate.sampler import Sampler
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.trainer.evaluation import Evaluator


@pytest.fixture(scope="module")
def program(finished: Any) -> Program:
    """The first stage's program, whose batch takes all 7 held-out rows at once."""
    result = from_json((finished.run("sft") / "experiment.json").read_text(encoding="utf-8"), Experiment)
    held_out = str(finished.lab.place / "chats_held_out.jsonl")
    return compile(evolve(result, {"batch_size": 7, "evaluation.data.path": held_out}))


@pytest.fixture(scope="module")
def evaluator(program: Program) -> Evaluator:
    evaluation = program.experiment.evaluation
    assert evaluation is not None
    assert evaluation.data is not None
    tokenizer = BytesTokenizer()
    return Evaluator(program, evaluation, load(evaluation.data, tokenizer, max_position=1024), tokenizer, is_chat=True)


@pytest.mark.extended
def test_batches_with_a_partial_last_one_equal_one_batch(finished: Any, program: Program, evaluator: Evaluator) -> None:
    dataset = evaluator.dataset
    assert dataset is not None
    state = program.init()
    ratios = jax.device_get(program.evaluate(state, dataset.batch(np.arange(7), 7)))
    at_once = {f"eval/{name}": float(ratio.total) / float(ratio.count) for name, ratio in ratios.items()}
    (first, *_) = RunDirectory(finished.run("sft")).evaluations()  # by batches of 4 and 3
    assert {name: first[name] for name in at_once} == pytest.approx(at_once, rel=1e-6)
    assert evaluator.metrics(state) == pytest.approx(at_once, rel=1e-6)


@pytest.mark.default_variants(1)
@pytest.mark.parametrize("order", [Order.AsInFile(), Order.Shuffled()])
def test_rows_come_as_their_data_order_them(
    program: Program, evaluator: Evaluator, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, asked, seen = evaluator.dataset, evolve(evaluator.evaluation, {"data.order": order}), []
    assert dataset is not None
    ordered = Evaluator(program, asked, dataset, BytesTokenizer(), is_chat=True)
    evaluate = Program.evaluate

    def recorded(self: Program, state: Any, batch: Any) -> Any:
        seen.append(batch)
        return evaluate(self, state, batch)

    monkeypatch.setattr(Program, "evaluate", recorded)
    state = program.init()
    assert ordered.metrics(state) == pytest.approx(evaluator.metrics(state), rel=1e-6)  # each row once, in any order
    rows = permutation(order, len(dataset), program.experiment.seed, 0)
    np.testing.assert_array_equal(seen[0].tokens, dataset.batch(rows, 7).tokens)
    assert (rows.tolist() == list(range(7))) == isinstance(order, Order.AsInFile)


def test_asked_to_end_it_gives_nothing(program: Program, evaluator: Evaluator) -> None:
    assert evaluator.metrics(program.init(), lambda: True) is None


@pytest.mark.slow
def test_meshes_that_do_not_divide_the_last_batch(finished: Any, lab: Any) -> None:
    lab.environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    code, out, err = lab.python("sft.py", "run", "steps=1", "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "--json")
    assert code == 0, err
    (first, *_) = RunDirectory(finished.run("sft")).evaluations()
    actual = json.loads(out)["evaluations"]["0"]
    assert actual == pytest.approx({name: first[name] for name in actual}, rel=1e-5)
    (sample, *_) = RunDirectory(finished.run("sft")).samples()
    (mine, *_) = RunDirectory(next((lab.place / "runs").glob("sft-*"))).samples()
    assert mine["policy"] == sample["policy"]


@pytest.mark.slow
def test_policy_and_reference_are_asked_together_and_before_any_step_once(
    finished: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    actual = from_json((finished.run("dpo") / "experiment.json").read_text(encoding="utf-8"), Experiment)
    asked = Evaluation(every_steps=1, prompts=("Hi 1", "Hi 2, how are you?"), max_new_tokens=4)
    dpo = compile(attrs.evolve(evolve(actual, {"model.weights": Weights.Random()}), evaluation=asked))
    evaluator = Evaluator(dpo, asked, None, BytesTokenizer(), is_chat=False)
    calls: list[int] = []
    joined = Sampler.sample_models

    def counted(sampler: Sampler, models: Any, *args: Any) -> Any:
        calls.append(len(models))
        return joined(sampler, models, *args)

    monkeypatch.setattr(Sampler, "sample_models", counted)
    state = dpo.init()
    evaluator.prepare(state)
    assert not calls  # the reference is the base, which stays
    first = evaluator.samples(state)
    assert all(sample.policy == sample.reference for sample in first)
    rng = np.random.default_rng(0)
    learnt = {path: leaf + rng.normal(size=leaf.shape).astype(np.float32) for path, leaf in state.trainable.items()}
    later = state._replace(step=state.step + 3, trainable=learnt)
    resumed = attrs.evolve(evaluator)  # which knows nothing yet
    actual, again = resumed.samples(later), resumed.samples(later)
    assert calls == [1, 2, 1]
    assert actual == again
    assert [sample.reference for sample in actual] == [sample.policy for sample in first]
    assert all(sample.policy != sample.reference for sample in actual)


def test_prompts_that_the_model_cannot_read(evaluator: Evaluator) -> None:
    prompts = ("short", "x" * 2000)
    with pytest.raises(PlanError) as raised:
        attrs.evolve(evaluator, evaluation=evolve(evaluator.evaluation, {"prompts": prompts}))
    assert str(raised.value) == (
        "1 problem in Experiment 'sft'\n"
        "  evaluation.prompts.1: 2,016 tokens and 6 new ones are more than the model's 1,024 positions; "
        "shorten it, or lower evaluation.max_new_tokens"
    )
    changes = {"prompts": ("short",), "temperature": 1.0, "top_k": 10_000}
    with pytest.raises(PlanError) as raised:
        attrs.evolve(evaluator, evaluation=evolve(evaluator.evaluation, changes))
    assert "  evaluation.top_k: 10,000 has no effect on a vocabulary of " in str(raised.value)


def test_prompts_are_rendered_with_the_settings_of_the_data(program: Program) -> None:
    experiment = evolve(program.experiment, {"data.system": "Be kind.", "evaluation.prompts": ("Hi",)})
    evaluation = experiment.evaluation
    assert evaluation is not None
    evaluator = Evaluator(compile(experiment), evaluation, None, BytesTokenizer(), is_chat=True)
    (prompt,) = evaluator._prompts
    assert BytesTokenizer().decode(prompt, skip_special=False) == (
        "<bos><start_of_turn>system\nBe kind.<end_of_turn>\n<start_of_turn>user\nHi<end_of_turn>\n"
        "<start_of_turn>model\n"
    )
