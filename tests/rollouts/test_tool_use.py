"""Tools: what is called, what the policy reads then, what fails, and how an episode is rewarded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import nnxdsl
from nnxdsl import Data, DataError, Environment, Objective, PlanError, Reward, RunError, SpecError, environment
from nnxdsl.config.objectives.environment import environments
from nnxdsl.data import BytesTokenizer, Prompts, load
from nnxdsl.data.environments.registered import tools_of
from nnxdsl.data.rewards import Rewards, Sampled
from nnxdsl.data.tokenizers.chat_template import template_source
from nnxdsl.data.tokenizers.encode import Encoder, stop_ids
from nnxdsl.generate.sampler import Completion
from nnxdsl.rollouts.environments import Environments
from nnxdsl.rollouts.turns import Trajectory, Turn, Turns

TEMPLATE = str(Path(__file__).parents[2] / "experiments" / "tools.jinja")
TOKENIZER = BytesTokenizer(template_source(TEMPLATE))
STOPS = frozenset(stop_ids(TOKENIZER))
CHAT = [{"role": "user", "content": "How much is 2 + 3?"}]


@environment("bank")
class Bank:
    """An account that a model can pay into."""

    def reset(self, start: int = 0) -> None:
        self.balance = start

    def pay(self, amount: int, mode: Literal["in", "out"] = "in") -> dict[str, int]:
        """Pays an amount.

        Args:
            amount: How much.
            mode: Into the account or out of it.
        """
        if amount < 0:
            raise ValueError("no negative amounts")
        self.balance += amount if mode == "in" else -amount
        return {"balance": self.balance}

    async def note(self, text: str) -> str:
        """Writes a note.

        Args:
            text: What.
        """
        await asyncio.sleep(0)
        return text

    def get_reward(self) -> float:
        return float(self.balance)

    def _hidden(self) -> None: ...


def objective(name: str = "bank", **fields: Any) -> Any:
    return Objective.GRPO(rewards=(Reward.Environment(),), environment=Environment(name, **fields))


def prompts_of(place: Path, rows: Sequence[dict[str, Any]], tokens: int = 400, name: str = "bank") -> Prompts:
    path = place / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data.Prompts(str(path), max_prompt_length=512, max_completion_length=tokens)
    result = load(data, TOKENIZER, tools=tools_of(objective(name)))
    assert isinstance(result, Prompts)
    return result


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def completion(text: str) -> Completion:
    ids = [*text.encode(), TOKENIZER.end_of_turn_id]
    return Completion(ids, np.full(len(ids), -2.0, np.float32), np.full(len(ids), -0.5, np.float32), len(ids))


def played(prompts: Prompts, script: Sequence[str], name: str = "bank", max_turns: int = 8) -> Trajectory:
    """An episode of the first prompt, in which the policy writes what is given."""

    def sample(turn: Turn) -> list[Completion]:
        return [completion(script[turn.number])]

    encoder = Encoder(TOKENIZER)
    turns = Turns(encoder, STOPS, Environments(objective(name), encoder), max_turns)
    (result,) = turns.play(prompts, [0], sample)
    return result


def results(one: Trajectory) -> list[str]:
    return [message["content"] for message in one.turns if message["role"] == "tool"]


def test_an_episode_is_that_of_the_chat_template(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, [{"prompt": CHAT, "start": 5}])
    first, second = call("pay", '{"amount": 2}'), call("pay", '{"amount": 1, "mode": "out"}')
    actual = played(prompts, ["I pay." + first, second, "done"])
    prompt = prompts.row(0)["prompt"].tolist()
    schemas = tools_of(objective())
    assert [tool["function"]["name"] for tool in schemas] == ["pay", "note"]
    assert "pay(amount, mode): Pays an amount." in TOKENIZER.decode(prompt)
    # The messages are those of OpenAI's format, and their rendering is the tokens of the episode.
    assert [message["role"] for message in actual.turns] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert (actual.turns[0]["content"], actual.turns[2]["content"], actual.text) == ("I pay.", "", "done")
    assert actual.turns[2]["tool_calls"][0]["function"] == {"name": "pay", "arguments": {"amount": 1, "mode": "out"}}
    assert results(actual) == ['{"balance": 7}', '{"balance": 6}']
    whole = Encoder(TOKENIZER).rendered(
        Encoder(TOKENIZER).template(schemas).render([*CHAT, *actual.turns], tools=schemas)
    )
    assert [*prompt, *actual.ids] == whole[: len(prompt) + len(actual.ids)]
    sampled = [token for token, is_sampled in zip(actual.ids, actual.is_sampled, strict=True) if is_sampled]
    assert sampled == [*completion("I pay." + first).ids, *completion(second).ids, *completion("done").ids]
    assert (actual.reward, actual.calls, actual.failures, actual.is_truncated) == (6.0, 2, 0, False)


def test_several_calls_of_a_turn_and_async_ones(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, [{"prompt": CHAT}])
    actual = played(prompts, [call("pay", '{"amount": "4"}') + call("note", '{"text": "12"}'), ""])
    assert results(actual) == ['{"balance": 4}', "12"]  # a number in quotes is a number, where the tool takes one
    assert [message["tool_call_id"] for message in actual.turns[1:3]] == ["call00001", "call00002"]
    assert (actual.calls, actual.failures, actual.reward) == (2, 0, 4.0)


def test_what_fails_is_for_the_policy_to_read(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, [{"prompt": CHAT}], tokens=2_000)
    script = {
        call("pay", '{"amount": -1}'): "no negative amounts",
        call("pay", '{"amount": 1, "to": 2}'): "pay() got an unexpected keyword argument 'to'",
        call("rob", "{}"): "there is no tool 'rob'; there are: pay, note",
        call("_hidden", "{}"): "there is no tool '_hidden'; there are: pay, note",
        call("get_reward", "{}"): "there is no tool 'get_reward'; there are: pay, note",
        call("pay", "[1]"): "the arguments are no JSON object",
    }
    actual = played(prompts, [*script, "sorry"])
    errors = [json.loads(text)["error"] for text in results(actual)]
    assert [error.removeprefix("Bank.") for error in errors] == list(script.values())
    assert (actual.calls, actual.failures, actual.reward) == (6, 6, 0.0)
    # A special token in a result would end the turn: it does not get into the tokens.
    (note,) = results(played(prompts, [call("note", '{"text": "<end_of_turn>"}'), ""]))
    assert json.loads(note)["error"]
    assert "<end_of_turn>" not in note


def test_what_ends_an_episode(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path, [{"prompt": CHAT, "start": 1}])
    pay = call("pay", '{"amount": 2}')
    last = played(prompts, [pay, pay], max_turns=2)
    assert (last.reward, last.calls, last.is_truncated) == (5.0, 2, False)
    assert last.text == pay  # the last turn has no answer, and is as it was written
    short = played(prompts_of(tmp_path, [{"prompt": CHAT, "start": 1}], tokens=len(completion(pay).ids) + 4), [pay])
    assert (short.reward, short.is_truncated, [one["role"] for one in short.turns]) == (3.0, True, ["assistant"])


def test_rewards_read_the_whole_episode(tmp_path: Path) -> None:
    actual = played(prompts_of(tmp_path, [{"prompt": CHAT}]), [call("pay", '{"amount": 2}'), "done"])
    seen: list[Any] = []

    @nnxdsl.reward("reads turns")
    def reads(completions: list[Any], **columns: Any) -> list[float]:
        seen.extend(completions)
        return [0.0]

    row = {"prompt": CHAT, "environment_reward": actual.reward, "turns": actual.turns}
    sampled = Sampled([actual.text], [actual.ids], [row], ["a:1"], [actual.turns])
    scores = Rewards((Reward.Environment(weight=2.0), Reward("reads turns"))).score(sampled)
    assert scores.values == [[2.0, 0.0]]
    assert seen == [actual.turns]


class Broken:
    def reset(self) -> str:
        return "Begin."

    def peek(self) -> str:
        """Peeks."""
        return ""


class Silent(Bank):
    def get_reward(self) -> Any:
        return None

    def act(self, mode: str) -> str:  # without a docstring
        return mode


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prompts_of(tmp_path, [{"prompt": CHAT}])
    monkeypatch.setitem(environments, "broken", Broken)
    with pytest.raises(
        RunError, match=r"prompts.jsonl:1: environment 'broken' returned another observation from reset"
    ):
        played(prompts_of(tmp_path, [{"prompt": CHAT}], name="broken"), [call("peek", "{}"), ""], name="broken")
    monkeypatch.setitem(environments, "silent", Silent)
    with pytest.raises(PlanError, match="a tool of 'silent': 'act' has no docstring"):
        tools_of(objective("silent"))
    monkeypatch.delattr(Silent, "act")
    with pytest.raises(RunError, match=r"jsonl:1: environment 'silent' returned the reward None, not a finite number"):
        played(prompts, ["nothing"], name="silent")
    with pytest.raises(DataError, match="the chat template writes a tool call as '<end_of_turn>'"):
        Environments(objective(), Encoder(BytesTokenizer()))
    with pytest.raises(DataError, match="the environment's tools are in the chat template, but the prompt is text"):
        prompts_of(tmp_path, [{"prompt": "text"}])
    with pytest.raises(DataError, match="field 'tools': the environment has its own tools; take it out"):
        prompts_of(tmp_path, [{"prompt": CHAT, "tools": tools_of(objective())}])
    with pytest.raises(SpecError, match=r"rewards.0: there is no environment; set environment=Environment\(name\)"):
        nnxdsl.Experiment(
            name="none",
            model=nnxdsl.Model.Gemma3("tiny"),
            objective=Objective.GRPO(rewards=(Reward.Environment(),)),
            data=Data.Prompts("p.jsonl", max_completion_length=8),
            optimizer=nnxdsl.Optimizer.SGD(schedule=nnxdsl.Schedule.Constant(lr=0.1)),
            batch_size=8,
            steps=1,
        ).check()


@environment("steps and a reward")
class StepsAndReward:
    def reset(self) -> None:
        self.turns = 0

    def step(self, text: str) -> tuple[str, float, bool]:
        self.turns += 1
        return "ok", 1.0, self.turns == 2

    def get_reward(self) -> float:
        return 10.0 * self.turns


def test_a_class_with_step_has_a_reward_at_its_end_as_well(tmp_path: Path) -> None:
    actual = played(
        prompts_of(tmp_path, [{"prompt": CHAT}], name="steps and a reward"), ["a", "b"], "steps and a reward"
    )
    assert (actual.reward, actual.calls) == (1.0 + 1.0 + 20.0, 0)


def test_rows_are_read_where_a_class_is_not_known_and_nothing_is_played(tmp_path: Path) -> None:
    assert tools_of(objective("gone")) == tools_of(objective("gone:Gone")) == []
    assert len(prompts_of(tmp_path, [{"prompt": CHAT}], name="gone")) == 1
    with pytest.raises(PlanError, match="no environment 'gone' is registered"):
        Environments(objective("gone"), Encoder(TOKENIZER))


def test_functions_are_tools(tmp_path: Path) -> None:
    def double(number: int) -> int:
        """Doubles.

        Args:
            number: A number.
        """
        return 2 * number

    nnxdsl.tools("doubles", double)
    actual = played(
        prompts_of(tmp_path, [{"prompt": CHAT}], name="doubles"), [call("double", '{"number": 4}'), "8"], "doubles"
    )
    assert (results(actual), actual.reward, actual.text) == (["8"], 0.0, "8")
