"""Episodes of several turns: their tokens and masks, log-probs in every turn, what ends them, and what fails."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

import nnxdsl
from nnxdsl import (
    Data,
    DataError,
    Environment,
    Experiment,
    Model,
    Objective,
    Optimizer,
    PlanError,
    Reward,
    RunError,
    Schedule,
    compile,
    environment,
    reward,
)
from nnxdsl.config.objectives.environment import environments
from nnxdsl.data import BytesTokenizer, Prompts, load
from nnxdsl.data.loaders.build import load_of
from nnxdsl.data.tokenizers.encode import Encoder
from nnxdsl.generate.sampler import Completion
from nnxdsl.rollouts.engine import OwnEngine
from nnxdsl.rollouts.environments import Environments
from nnxdsl.rollouts.log import group_rows
from nnxdsl.rollouts.rollouts import Rollouts
from nnxdsl.rollouts.turns import Trajectory, Turn, Turns

sys.path.insert(0, str(Path(__file__).parents[1] / "packages"))

from small_lab.model import Small

TOKENIZER = BytesTokenizer()
ENCODER = Encoder(TOKENIZER)
STOPS = frozenset({TOKENIZER.end_of_turn_id, TOKENIZER.eos_id})


@environment("counts down")
class CountsDown:
    """Says how often it will go on; each turn is worth its number."""

    def reset(self, count: int = 3) -> None:
        self.left, self.turn = count, 0

    def step(self, text: str) -> tuple[str, float, bool]:
        self.left, self.turn = self.left - 1, self.turn + 1
        return f"{self.left} left after {text[:3]!r}", float(self.turn), self.left == 0


@environment("says ok")
class SaysOk(CountsDown):
    """The same in few words."""

    def step(self, text: str) -> tuple[str, float, bool]:
        _, reward, done = super().step(text)
        return "ok", reward, done


@reward("episodes")
def episodes_reward(completion: str, environment_reward: float, turns: list[dict[str, str]]) -> float:
    assert turns[-1] == {"role": "assistant", "content": completion}
    return environment_reward


def playing(spec: Environment) -> Any:
    """An objective with an environment."""
    return Objective.GRPO(rewards=(Reward("episodes"),), environment=spec)


def prompts_of(place: Path, rows: Sequence[dict[str, Any]], tokens: int = 64) -> Prompts:
    path = place / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = load(Data.Prompts(str(path), max_prompt_length=96, max_completion_length=tokens), TOKENIZER)
    assert isinstance(result, Prompts)
    return result


def said(text: str, *, ends: bool = True) -> Completion:
    ids = [*TOKENIZER.encode(text), *([TOKENIZER.end_of_turn_id] if ends else [])]
    return Completion(ids, np.full(len(ids), -2.0, np.float32), np.full(len(ids), -0.5, np.float32), len(ids))


def played(prompts: Prompts, script: Sequence[Completion], max_turns: int = 8) -> tuple[Trajectory, list[Turn]]:
    """An episode of the first prompt, in which the policy says what is written."""
    asked: list[Turn] = []

    def sample(turn: Turn) -> list[Completion]:
        asked.append(turn)
        return [script[turn.number]]

    turns = Turns(ENCODER, STOPS, Environments(playing(Environment("counts down")), ENCODER), max_turns)
    (result,) = turns.play(prompts, [0], sample)
    return result, asked


CHAT = [{"role": "user", "content": "count"}]


def test_an_episode_has_turns(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, [{"prompt": CHAT, "count": 3}], tokens=200)
    actual, asked = played(prompts, [said("one"), said("two"), said("three"), said("four")])
    prompt = prompts.row(0)["prompt"].tolist()
    chat = [
        *CHAT,
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "2 left after 'one'"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "1 left after 'two'"},
        {"role": "assistant", "content": "three"},
    ]
    assert actual.turns == chat[1:]
    # What the chat template gives for the whole chat, up to the end token of the last answer.
    whole = ENCODER.rendered(ENCODER.template().render(chat))
    assert [*prompt, *actual.ids] == whole[: len(prompt) + len(actual.ids)]
    assert actual.ids[-1] == TOKENIZER.end_of_turn_id
    sampled = [token for token, is_sampled in zip(actual.ids, actual.is_sampled, strict=True) if is_sampled]
    assert sampled == [*said("one").ids, *said("two").ids, *said("three").ids]
    assert actual.logps == [-2.0 if is_sampled else 0.0 for is_sampled in actual.is_sampled]
    assert (actual.reward, actual.is_truncated, actual.text) == (1 + 2 + 3, False, "three")
    for turn, before in zip(asked, (0, 1, 2), strict=True):
        end = [i for i, token in enumerate(actual.ids) if token == TOKENIZER.end_of_turn_id and actual.is_sampled[i]]
        start = next(i for i in range(end[before - 1] + 1, len(actual.ids)) if actual.is_sampled[i]) if before else 0
        assert turn.prompts == [[*prompt, *actual.ids[:start]]]
        assert turn.limits == [200 - start]


def test_what_ends_an_episode(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, [{"prompt": CHAT}], tokens=200)
    actual, asked = played(prompts, [said("one"), said("two")], max_turns=2)
    assert (len(asked), actual.reward, actual.is_truncated) == (2, 3.0, False)
    actual, asked = played(prompts, [said("one"), said("tw", ends=False)])
    assert (len(asked), actual.reward, actual.is_truncated) == (2, 1.0, True)  # no answer to what has no end
    # The observation after the first turn leaves no room for a token.
    longest = len(played(prompts, [said("one"), said("two")], max_turns=2)[0].ids) - len(said("two").ids)
    for room, turns in ((longest, 1), (longest + 1, 2)):
        short = prompts_of(tmp_path, [{"prompt": CHAT}], tokens=room)
        actual, asked = played(short, [said("one"), said("t", ends=False)])
        assert (len(asked), actual.is_truncated) == (turns, True)
        assert len(actual.ids) <= room or turns == 2
        assert actual.is_sampled[-1]


def test_text_goes_on_as_text(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, [{"prompt": "count: "}], tokens=200)
    actual, _ = played(prompts, [said("one"), said("two"), said("three")])
    text = TOKENIZER.decode(actual.ids, skip_special=False)
    assert text == "one<end_of_turn>2 left after 'one'two<end_of_turn>1 left after 'two'three<end_of_turn>"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Prompts]:
    """A program, and its prompts: each asks for another number of turns."""
    rows = [{"prompt": f"count {n}", "count": 1 + n % 3} for n in range(4)]
    prompts = prompts_of(tmp_path_factory.mktemp("rows"), rows, tokens=24)
    made = Experiment(
        name="turns",
        model=Small(layers=1, pattern=1, vocab_size=320),
        objective=Objective.GRPO(
            rewards=(Reward("episodes"),),
            num_generations=2,
            num_iterations=2,
            beta=0.0,
            environment=Environment("says ok", max_turns=3),
        ),
        data=Data.Prompts(prompts.report.source, max_prompt_length=16, max_completion_length=24),
        optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
        batch_size=4,
        steps=4,
    )
    return compile(made), prompts


def rollouts_of(program: Any, prompts: Prompts) -> Rollouts:
    """Rollouts of an untrained model, in which every fourth token ends a completion."""
    result, stops = Rollouts.of(program, prompts, TOKENIZER), frozenset(range(0, 320, 4))
    turns = attrs.evolve(result._episodes.turns, stop_ids=stops)
    result._episodes = attrs.evolve(result._episodes, engine=OwnEngine(program, stops), turns=turns)
    return result


def test_log_probs_of_all_turns_are_those_of_the_whole_row(trained: tuple[Any, Prompts]) -> None:
    program, prompts = trained
    state, made = program.init(), rollouts_of(program, prompts)
    rollout = made.rollout_at(0, state)
    assert rollout.episodes is not None
    batch = rollout.batch
    assert {len(one.turns) for one in rollout.episodes} > {1}
    for index, one in enumerate(rollout.episodes):
        length = len(one.ids)
        assert batch.completion_length[index] == length
        assert batch.completion_ids[index, :length].tolist() == one.ids
        assert batch.loss_mask[index, :length].tolist() == one.is_sampled
        assert not batch.loss_mask[index, length:].any()
        # The sampler decoded turn by turn; the trainer has read the whole row in one pass.
        mask = np.asarray(one.is_sampled)
        np.testing.assert_allclose(batch.old_logps[index, :length][mask], one.logps[mask], rtol=0, atol=2e-5)
    assert rollout.metrics["environment/mean_turns"] == np.mean(
        [sum(message["role"] == "assistant" for message in one.turns) for one in rollout.episodes]
    )
    assert rollout.metrics["completions/mean_length"] == np.mean([sum(one.is_sampled) for one in rollout.episodes])
    (first, *_) = group_rows(made, rollout, 1)
    assert first["completions"][0]["turns"] == [dict(one) for one in rollout.episodes[0].turns]
    _, metrics = program.step(state, made.train_batch(batch))
    differences = [float(metrics[f"sampling/sampling_logp_difference/{name}"]) for name in ("mean", "max")]
    assert 0 <= differences[0] <= differences[1] <= 2e-5
    mask = batch.loss_mask
    expected = -np.mean((batch.advantages * mask).sum(axis=1) / mask.sum(axis=1))
    assert float(metrics["loss"]) == pytest.approx(expected, abs=1e-6)
    # The same in a row for each completion, and again after a restart.
    _, single = program.step(program.init(), batch)
    assert float(single["grad_norm"]) == pytest.approx(float(metrics["grad_norm"]), rel=1e-5)
    resumed = rollouts_of(program, prompts)
    assert resumed.check(made.state(2)) == 2
    environments["says ok"] = CountsDown
    try:
        other = rollouts_of(program, prompts)
    finally:
        environments["says ok"] = SaysOk
    with pytest.raises(
        RunError, match=r"the source of environment 'says ok' has changed since the checkpoint of step 2"
    ):
        other.check(made.state(2))
    again = rollouts_of(program, prompts).rollout_at(0, program.init())
    assert all(np.array_equal(one, two) for one, two in zip(again.batch, batch, strict=True))
    held = made.evaluate(program.init(), prompts, np.arange(len(prompts)))
    assert held is not None
    assert held["environment/mean_turns"] >= 1


class Broken:
    def __init__(self) -> None:
        self.turn = 0

    def reset(self, mode: str) -> None:
        self.mode = mode
        if mode == "reset":
            raise ValueError("no board")

    def step(self, text: str) -> Any:
        if self.mode == "hangs":
            time.sleep(600)
        if self.mode == "raises":
            raise KeyError("x")
        values = {"two": ("a", 1.0), "number": (3, 1.0, False), "nan": ("a", float("nan"), False)}
        return values.get(self.mode, ("<end_of_turn>", 0.0, False))


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("reset", r":1: environment 'broken' failed with ValueError: no board"),
        ("raises", r":1, turn 1: environment 'broken' failed with KeyError: 'x'"),
        ("hangs", r":1, turn 1: environment 'broken' has not returned within timeout=0\.2 s"),
        ("two", r":1, turn 1: environment 'broken' returned \('a', 1\.0\), not \(observation, reward, done\)"),
        ("number", r"returned the observation 3, which is no text"),
        ("nan", r"returned the reward nan, not a finite number"),
        ("special", r":1: the observation '<end_of_turn>' cannot follow: .*special token"),
    ],
)
def test_what_fails_is_named(tmp_path: Path, mode: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(environments, "broken", Broken)
    prompts = prompts_of(tmp_path, [{"prompt": CHAT, "mode": mode}], tokens=200)
    turns = Turns(ENCODER, STOPS, Environments(playing(Environment("broken", timeout=0.2)), ENCODER), 3)
    with pytest.raises(RunError, match=message):
        turns.play(prompts, [0], lambda turn: [said("one")])


class Observes(Broken):
    """Says at the beginning what is to be done."""

    opened: ClassVar[list[Any]] = []

    def reset(self, prompt: Any, mode: str = "works") -> str | None:
        self.opened.append(prompt)
        self.mode = mode
        modes = {"nothing": None, "number": 3, "special": "<end_of_turn>", "another": f" {len(self.opened)}"}
        return modes.get(mode, " to three")

    def step(self, text: str) -> tuple[str, float, bool]:
        return "go on", 0.0, False


def observed(place: Path, rows: Sequence[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> tuple[Prompts, Turns]:
    """Rows as an experiment with `Observes` reads them, and episodes of it."""
    monkeypatch.setitem(environments, "observes", Observes)
    path = place / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    objective = playing(Environment("observes"))
    data = Data.Prompts(str(path), max_prompt_length=96, max_completion_length=200)
    experiment = Experiment(name="observes", model=Model.Gemma3("tiny"), objective=objective, data=data)
    prompts = load_of(experiment, data, TOKENIZER, max_position=None, vocabulary=320)
    assert isinstance(prompts, Prompts)
    return prompts, Turns(ENCODER, STOPS, Environments(objective, ENCODER), 3)


def test_what_reset_returns_ends_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Observes, "opened", [])
    system = {"role": "system", "content": "s"}
    rows = [{"prompt": [system, *CHAT]}, {"prompt": "count"}, {"prompt": CHAT, "mode": "nothing"}]
    prompts, turns = observed(tmp_path, rows, monkeypatch)
    extended = [system, {"role": "user", "content": "count to three"}]
    assert [row["prompt"] for row in prompts.columns] == [extended, "count to three", CHAT]
    assert [row["observation"] for row in prompts.columns] == [" to three", " to three", ""]
    assert prompts.row(0)["prompt"].tolist() == ENCODER.prompt(extended)
    played = turns.play(prompts, [0, 1, 2], lambda turn: [said("one", ends=turn.number == 0)] * len(turn.prompts))
    # Each object is given the row as it is in the file.
    assert Observes.opened == [row["prompt"] for row in rows] * 2
    chat = [*extended, {"role": "assistant", "content": "one"}, *played[0].turns[1:2], played[0].turns[2]]
    whole = ENCODER.rendered(ENCODER.template().render(chat))
    ids = [*prompts.row(0)["prompt"].tolist(), *played[0].ids]
    assert ids == whole[: len(ids)]


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        (
            {"prompt": "a", "mode": "number"},
            DataError,
            r":1: environment 'observes' returned 3 from reset, which is",
        ),
        ({"prompt": "a", "mode": "special"}, DataError, r":1: .*observation.*special token"),
        (
            {"prompt": "a", "observation": "b"},
            DataError,
            r":1: the column 'observation' has the name of what reset",
        ),
        (
            {"prompt": [*CHAT, {"role": "user", "content": "b"}, {"role": "tool", "content": "c"}]},
            DataError,
            r"message 3: the observation of reset is added to the last message, which has to be text of a user",
        ),
        (
            {"prompt": "a", "mode": "another"},
            RunError,
            r":1: environment 'observes' returned another observation",
        ),
    ],
)
def test_an_observation_that_cannot_be_is_refused(
    row: dict[str, Any], error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Observes, "opened", [])

    def play() -> None:
        prompts, turns = observed(tmp_path, [row], monkeypatch)
        turns.play(prompts, [0], lambda turn: [said("one")])

    with pytest.raises(error, match=message):
        play()


@pytest.mark.parametrize("mode", ["two", "works"])
def test_an_environment_is_closed_once_its_episode_is_over(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = list[int]()

    class Closes(Broken):
        def close(self) -> None:
            assert self.mode == mode
            closed.append(self.turn)

        def step(self, text: str) -> Any:
            self.turn += 1
            return super().step(text) if mode == "two" else ("a", 1.0, self.turn == 2)

    monkeypatch.setitem(environments, "closes", Closes)
    prompts = prompts_of(tmp_path, [{"prompt": CHAT, "mode": mode}] * 2, tokens=200)
    turns = Turns(ENCODER, STOPS, Environments(playing(Environment("closes")), ENCODER), 3)

    def play() -> list[Trajectory]:
        return turns.play(prompts, [0, 1], lambda turn: [said("one")] * len(turn.prompts))

    if mode == "two":
        with pytest.raises(RunError, match=r"returned \('a', 1\.0\)"):
            play()
    else:
        assert [one.reward for one in play()] == [2.0, 2.0]
    assert closed == ([1] if mode == "two" else [2, 2])


def test_what_cannot_be_is_refused_before_anything_is_sampled(
    trained: tuple[Any, Prompts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PlanError, match=r"no environment 'count down' is registered; did you mean 'counts down'\?"):
        Environments(playing(Environment("count down")), ENCODER)
    monkeypatch.setitem(environments, "no step", type("NoStep", (), {"reset": lambda self: None}))
    with pytest.raises(PlanError, match="the class of 'no step' has neither a method 'step' nor one that is a tool"):
        Environments(playing(Environment("no step")), ENCODER)
    monkeypatch.setitem(environments, "broken", Broken)
    with pytest.raises(DataError, match=r"^a:1: environment 'broken' reads 'mode', which the row does not have"):
        Environments(playing(Environment("broken")), ENCODER).check([{"p": 1}], ["a:1"])
    with pytest.raises(DataError, match=r"a:1: the column 'turns' has the name of what environments give; rename it"):
        Environments(playing(Environment("broken")), ENCODER).check([{"mode": "x", "turns": 1}], ["a:1"])
    program, _ = trained
    most = program.blueprint.config.max_length
    long = prompts_of(tmp_path, [{"prompt": "x" * 20}], tokens=most // 2)
    with pytest.raises(DataError, match=rf"twice data\.max_completion_length must fit .* {most:,} positions, and are"):
        Rollouts.of(program, long, TOKENIZER)
    with pytest.raises(nnxdsl.SpecError, match="max_turns"):
        Environment("x", max_turns=1)
