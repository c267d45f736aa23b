"""Workers that train apart: the paper's algorithm by hand, meshes, what goes over `data`, resumes and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_lab.model import Small

from nnxdsl import (
    Adapter,
    Batching,
    Data,
    Experiment,
    Guard,
    Mesh,
    Model,
    Objective,
    Optimizer,
    Outer,
    PlanError,
    Reference,
    Reward,
    Schedule,
    SpecError,
    compile,
)
from nnxdsl.data.batch import Batch
from nnxdsl.optim import step_guard
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.program.checkpoint_views import checkpoint_arrays, checkpoint_targets, with_restored
from nnxdsl.program.compile import Program, TrainState
from nnxdsl.program.diloco import DiLoCoState
from nnxdsl.program.memory import memory

RATE, DECAY, EPS, CLIP = 1e-2, 0.1, 1e-3, 0.5
ADAMW = Optimizer.AdamW(schedule=Schedule.Constant(lr=RATE), weight_decay=DECAY, eps=EPS, max_grad_norm=CLIP)
DILOCO = Outer.DiLoCo(workers=2, every_steps=2, lr=0.6, momentum=0.8)
TEXT = {"objective": Objective.SFT(loss_on="all"), "model": Small(layers=1, pattern=1), "optimizer": ADAMW}


@pytest.fixture(scope="module")
def program(experiment: Callable[..., Experiment]) -> Program:
    """Two workers that meet after two steps and at the end, and skip what is not finite; in micro-batches."""
    return compile(experiment(**TEXT, outer=DILOCO, guard=Guard.Skip(), microbatch_size=2, steps=6))


def copied(state: Any) -> Any:
    """A state that a step may not take for its own."""
    return jax.tree.map(jnp.copy, state)


def same(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def poisoned(batch: Any) -> Any:
    """The batch with a token of its last row, the second worker's, that is in no vocabulary."""
    tokens = batch.tokens.copy()
    tokens[-1, 0] = 10_000
    return batch._replace(tokens=tokens)


class ByHand:
    """Douillard et al.'s algorithm 1 in float64 with AdamW and clipping within; gradients are those of one model."""

    def __init__(self, alone: Program, state: TrainState, outer: Any) -> None:
        self.alone, self.asked, self.taken = alone, outer, 0
        self.state, self.gradients = state, jax.jit(alone.policy_loss.grads)
        self.outer = {path: np.asarray(leaf, np.float64) for path, leaf in state.trainable.items()}
        self.velocity = {path: np.zeros(leaf.shape) for path, leaf in self.outer.items()}
        self.workers = [dict(self.outer) for _ in range(outer.workers)]
        self.means: list[dict[str, Any]] = [dict.fromkeys(self.outer, (0.0, 0.0)) for _ in self.workers]

    def step(self, batch: Batch) -> tuple[float, float]:
        """One step of each worker, on its own rows; the loss of all, and the root mean square of gradient norms."""
        self.taken += 1
        total = count = squares = 0.0
        rows = len(batch.weight) // len(self.workers)
        for number, worker in enumerate(self.workers):
            ours = jax.tree.map(lambda x, index=number * rows: x[index : index + rows], batch)
            weights = {path: jnp.asarray(leaf, jnp.float32) for path, leaf in worker.items()}
            summed, terms = self.gradients(weights, self.state.frozen, self.state.reference, ours)
            g = {path: np.asarray(leaf, np.float64) / float(terms.loss.count) for path, leaf in summed.items()}
            total, count = total + float(terms.loss.total), count + float(terms.loss.count)
            square = sum(float((leaf**2).sum()) for leaf in g.values())
            squares += square
            for path in worker:
                self.move(number, path, g[path] * min(1.0, CLIP / math.sqrt(square)))
        return total / count, math.sqrt(squares / len(self.workers))

    def move(self, number: int, path: str, g: np.ndarray) -> None:
        m, v = self.means[number][path]
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        self.means[number][path] = m, v
        direction = (m / (1 - 0.9**self.taken)) / (np.sqrt(v / (1 - 0.999**self.taken)) + EPS)
        before = self.workers[number][path]
        decay = 0.0 if path.endswith("norm.scale") else DECAY
        self.workers[number][path] = before - RATE * (direction + decay * before)

    def meet(self) -> None:
        for path, outer in self.outer.items():
            g = outer - sum(worker[path] for worker in self.workers) / len(self.workers)
            self.velocity[path] = self.asked.momentum * self.velocity[path] + g
            self.outer[path] = outer - self.asked.lr * (g + self.asked.momentum * self.velocity[path])
        self.workers = [dict(self.outer) for _ in self.workers]


def agree(state: TrainState, expected: ByHand) -> None:
    joined = step_guard.inner(state.optimizer)
    assert isinstance(joined, DiLoCoState)
    for path, leaf in expected.outer.items():
        np.testing.assert_allclose(state.trainable[path], leaf, rtol=1e-5, atol=1e-5, err_msg=path)
        theirs = np.stack([worker[path] for worker in expected.workers])
        np.testing.assert_allclose(joined.workers.leaves[path], theirs, rtol=1e-5, atol=1e-5, err_msg=path)


@pytest.mark.extended
def test_the_algorithm_by_hand(
    program: Program,
    experiment: Callable[..., Experiment],
    sequences: Callable[..., Any],
    trained: Callable[..., TrainState],
) -> None:
    state = trained(program)
    expected = ByHand(compile(experiment(**TEXT, batch_size=2)), copied(state), DILOCO)
    first = copied(state.trainable)
    for step in range(6):
        batch = sequences(4, length=16, seed=step)
        before = copied(state)
        state, metrics = program.step(state, poisoned(batch) if step == 3 else batch)
        if step == 3:  # one worker's gradient is no number: none of them has moved, and they do not meet
            assert int(metrics[step_guard.SKIPPED]) == 1
            assert same((state.trainable, state.optimizer.inner), (before.trainable, before.optimizer.inner))
            continue
        loss, norm = expected.step(batch)
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
        assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
        if step in (1, 4, 5):  # after two steps, after four that were taken, and after the last one
            expected.meet()
        agree(state, expected)
        assert same(state.trainable, first) == (step == 0)


@pytest.mark.slow
def test_an_adapter_by_hand(
    experiment: Callable[..., Experiment], pairs: Callable[..., Any], trained: Callable[..., TrainState]
) -> None:
    fields = {"model": Small(layers=1, pattern=1), "optimizer": ADAMW, "adapter": Adapter.LoRA(rank=2)}
    several = compile(experiment(**fields, outer=DILOCO, microbatch_size=2))
    state = trained(several)
    expected = ByHand(compile(experiment(**fields, batch_size=2)), copied(state), DILOCO)
    for step in range(4):
        batch = pairs(4, seed=step)
        state, metrics = several.step(state, batch)
        loss, norm = expected.step(batch)
        if step % 2:
            expected.meet()
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
        assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
        agree(state, expected)


@pytest.mark.extended
def test_a_resume_between_two_meetings_is_bit_equal(program: Program, sequences: Callable[..., Any]) -> None:
    batches = [sequences(4, length=16, seed=seed) for seed in range(4)]
    state = program.init()
    for batch in batches[:3]:  # they have met once, and are apart
        state, _ = program.step(state, batch)
    saved = {
        part: {path: jnp.copy(x) for path, x in group.items()}
        for part, group in checkpoint_arrays(program, state).items()
    }
    assert {part: set(group) for part, group in saved.items()} == {
        part: set(group) for part, group in checkpoint_targets(program).items()
    }
    leaves = step_guard.inner(state.optimizer).workers.leaves
    assert any(not np.array_equal(leaf[0], leaf[1]) for leaf in leaves.values())
    resumed = with_restored(program, program.init(), int(state.step), saved)
    straight, _ = program.step(state, batches[3])
    resumed, _ = program.step(resumed, batches[3])
    assert same(resumed, straight)


@pytest.mark.slow
@pytest.mark.parametrize("every_steps", [1, 3])
def test_one_worker_at_full_rate_is_the_inner_optimizer(
    every_steps: int,
    experiment: Callable[..., Experiment],
    sequences: Callable[..., Any],
    trained: Callable[..., TrainState],
) -> None:
    plain = compile(experiment(**TEXT))
    one = compile(experiment(**TEXT, outer=Outer.DiLoCo(workers=1, every_steps=every_steps, lr=1.0, momentum=0.0)))
    assert not jax.tree.leaves(trained(one).optimizer.outer)  # no momentum, no velocity
    states = {"plain": trained(plain), "one": trained(one)}
    for step in range(3):
        batch, actual = sequences(4, length=16, seed=step), {}
        for name, each in (("plain", plain), ("one", one)):
            states[name], actual[name] = each.step(states[name], batch)
        assert float(actual["one"]["loss"]) == pytest.approx(float(actual["plain"]["loss"]), rel=2e-6)
        assert float(actual["one"]["grad_norm"]) == pytest.approx(float(actual["plain"]["grad_norm"]), rel=2e-6)
    for path, leaf in states["plain"].trainable.items():  # weights of about 1, in float32: outer - (outer - worker)
        np.testing.assert_allclose(states["one"].trainable[path], leaf, rtol=0, atol=1e-6, err_msg=path)


@pytest.mark.slow
def test_meshes_agree_and_nothing_is_sent_between_meetings(on_eight_devices: Callable[..., Any]) -> None:
    report = on_eight_devices("program/on_workers.py")
    for name, entry in report.items():
        run, where = name.split()
        alone = report[f"{run} one"]
        assert entry["misplaced"] == []
        for actual, expected in zip(entry["metrics"], alone["metrics"], strict=True):
            for key, value in expected.items():
                assert actual[key] == pytest.approx(value, rel=1e-5, abs=2e-6), (name, key)
        assert entry["difference"] == pytest.approx(0, abs=5e-6), name
        if where.startswith("data2"):  # two workers, each on half of the mesh
            assert 0 < entry["always"] < 200, name  # sums of metrics, and the gradients' norm
            assert entry["together"] >= entry["weights"], name


def test_where_workers_lie_and_what_they_take(experiment: Callable[..., Experiment]) -> None:
    def program_of(mesh: Mesh, workers: int | None = 4) -> Any:
        outer = None if workers is None else Outer.DiLoCo(workers=workers)
        return build_blueprint(experiment(**TEXT, mesh=mesh, batch_size=32, outer=outer))

    alone, here, other = (program_of(mesh) for mesh in (Mesh(), Mesh(data=2, fsdp=2), Mesh(data=8)))
    path = "layers.blocks.0.mlp.up.kernel"
    actual = [each.layout.arrays["optimizer"][f"workers.leaves.{path}"] for each in (alone, here, other)]
    assert [placed.shape for placed in actual] == [(4, 1, 16, 32)] * 3
    assert tuple(actual[1].spec) == ("data", None, "fsdp", None)
    assert "data" not in tuple(actual[2].spec)[:1]  # eight groups of devices cannot have four workers
    assert [each.layout.workers_per_device for each in (alone, here, other)] == [4, 2, 4]
    for each in (alone, here):
        sizes = {path: placed.device_bytes for path, placed in each.layout.arrays["optimizer"].items()}
        copies = sum(size for path, size in sizes.items() if path.startswith("workers.leaves."))
        assert copies == each.layout.workers_per_device * each.layout.device_bytes()["trainable"]
        parts = {part.name: part.bytes for part in memory(each)}
        assert parts["optimizer"] == sum(sizes.values())
        assert parts["gradients"] == copies
    assert program_of(Mesh(), None).layout.workers_per_device == 1


def refused(**fields: Any) -> str:
    base: dict[str, Any] = {
        "name": "refused",
        "model": Model.Gemma3("tiny"),
        "objective": Objective.DPO(),
        "data": Data.Preferences("none.jsonl", max_prompt_length=16, max_completion_length=16),
        "optimizer": ADAMW,
        "outer": Outer.DiLoCo(),
        "batch_size": 8,
        "steps": 10,
    }
    with pytest.raises(SpecError) as caught:
        Experiment(**{**base, **fields})
    return str(caught.value).partition("\n")[2]


def answers() -> dict[str, Any]:
    data = Data.Prompts("none.jsonl", max_prompt_length=16, max_completion_length=16)
    return {"objective": Objective.GRPO(rewards=(Reward("length"),), num_generations=2), "data": data}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"outer": Outer.DiLoCo(workers=3)}, "batch_size: 8 rows cannot be shared by outer.workers=3; use a multiple"),
        ({"microbatch_size": 1}, "microbatch_size: 1 rows cannot be shared by outer.workers=2; use a multiple of it"),
        (
            {"mesh": Mesh(data=2, fsdp=4), "outer": Outer.DiLoCo(workers=4)},
            "batch_size: 2 rows of each of outer.workers=4 cannot be split over fsdp=4",
        ),
        (
            {"objective": Objective.AOT()},
            "outer: Objective.AOT compares all rows of a batch, and a worker has some",
        ),
        ({"reference": Reference.Synced()}, "reference: Reference.Synced follows the policy at every step, and outer"),
        ({"batching": Batching.Packed()}, "batching: Batching.Packed puts rows of several workers side by side; use B"),
        ({"mesh": Mesh(stage=2)}, "mesh.stage: stages of a pipeline compute one model, and there are 2 workers; use f"),
        (answers(), "outer: completions are sampled with the outer weights, and Objective.GRPO trains workers with o"),
    ],
    ids=["rows", "micro-batches", "mesh", "whole batches", "reference", "packed", "stages", "answers"],
)
def test_what_does_not_go_with_workers_is_refused(fields: dict[str, Any], message: str) -> None:
    assert f"  {message}" in refused(**fields)


def test_rows_of_workers_that_a_rule_cannot_split_are_refused_by_the_plan(
    experiment: Callable[..., Experiment],
) -> None:
    asked = experiment(**TEXT, mesh=Mesh(fsdp=4, rules=(("batch", "fsdp"),)), outer=Outer.DiLoCo())
    with pytest.raises(PlanError) as caught:
        build_blueprint(asked)
    assert "batch_size: of each worker 2 rows at a time cannot be split over fsdp=4" in str(caught.value)
