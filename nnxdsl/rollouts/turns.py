"""Trajectories in tokens: a completion, or completions and an environment's observations in turns.

What the policy sampled stays in tokens: an observation is encoded and put behind it, and nothing is tokenized again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np

from nnxdsl.data.loaders.fields import read_text_or_chat
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.prompts import Prompts
from nnxdsl.data.tokenizers.encode import Encoder
from nnxdsl.data.tokenizers.messages import Message, read_tools
from nnxdsl.errors import RunError
from nnxdsl.generate.sampler import Completion
from nnxdsl.rollouts.environments import Environments
from nnxdsl.rollouts.reply import Reply
from nnxdsl.runtime import distributed


@attrs.define
class Trajectory:
    """What follows a prompt.

    Attributes:
        ids: Token ids, stop tokens included.
        is_sampled: Which of them the policy sampled; the others are of observations.
        logps: Log-probability of each under the sampler, at the temperature and among all tokens; 0 of observations.
        turns: The completions and observations as messages.
        reward: The sum of an environment's rewards.
        calls: How many tools the completions have called.
        failures: How many of these calls failed.
        is_truncated: Whether it reached the maximal length before its end.
        routed_experts: The experts of the tokens of the prompt and of these, each where it was first computed; empty
            without.
    """

    ids: list[int] = attrs.field(factory=list)
    is_sampled: list[bool] = attrs.field(factory=list)
    logps: list[float] = attrs.field(factory=list)
    turns: list[Message] = attrs.field(factory=list)
    reward: float = 0.0
    calls: int = 0
    failures: int = 0
    is_truncated: bool = False
    routed_experts: list[np.ndarray] = attrs.field(factory=list)

    @property
    def text(self) -> str:
        """The policy's last completion, without the token that ends it."""
        return next(message["content"] for message in reversed(self.turns) if message["role"] == "assistant")

    def add_completion(self, completion: Completion, text: str, stop_ids: Collection[int]) -> None:
        """Adds a turn of the policy."""
        self.ids += completion.ids
        self.is_sampled += [True] * len(completion.ids)
        self.logps += completion.logps.tolist()
        self.turns.append({"role": "assistant", "content": text})
        self.is_truncated = completion.ids[-1] not in stop_ids
        if completion.routed_experts is not None:
            self.routed_experts.append(completion.routed_experts[sum(map(len, self.routed_experts)) :])

    def add_reply(self, ids: Sequence[int], reply: Reply) -> None:
        """Adds what answers the last completion, up to where the policy's next turn begins."""
        self.ids += ids
        self.is_sampled += [False] * len(ids)
        self.logps += [0.0] * len(ids)
        self.turns[-1] |= reply.completion or {}
        self.turns += reply.messages


class Turn(NamedTuple):
    """What is sampled in one turn.

    Attributes:
        number: The turn, from 0.
        prompts: Token ids before each completion.
        limits: Most tokens of each.
    """

    number: int
    prompts: list[list[int]]
    limits: list[int]


Sample = Callable[[Turn], Sequence[Completion]]
"""Samples the completions of a turn."""


@attrs.frozen
class Turns:
    """Plays episodes.

    Attributes:
        encoder: Of observations.
        stop_ids: Token ids that end a completion.
        environments: What answers the policy; None: each episode is one completion.
        max_turns: Most completions of an episode.
    """

    encoder: Encoder
    stop_ids: frozenset[int]
    environments: Environments | None = None
    max_turns: int = 1

    def play(self, prompts: Prompts, rows: Sequence[int], sample: Sample) -> list[Trajectory]:
        """An episode of each row's prompt.

        Args:
            prompts: The prompts, and how many tokens an episode may have.
            rows: One for each episode.
            sample: The policy.

        Raises:
            RunError: An environment failed, or the chat template cannot render its observation; names row and turn.
        """
        opened: dict[int, Any] = {}  # in process 0, which alone calls environments
        try:
            return self._play(prompts, rows, sample, opened)
        finally:
            for index, environment in opened.items():
                assert self.environments is not None
                self.environments.close(environment, prompts.row_ids[rows[index]])

    def _play(self, prompts: Prompts, rows: Sequence[int], sample: Sample, opened: dict[int, Any]) -> list[Trajectory]:
        trajectories, active = [Trajectory() for _ in rows], list(range(len(rows)))
        for number in range(self.max_turns):
            before = [[*prompts.row(rows[index])["prompt"].tolist(), *trajectories[index].ids] for index in active]
            limits = [prompts.max_completion_length - len(trajectories[index].ids) for index in active]
            for index, completion in zip(active, sample(Turn(number, before, limits)), strict=True):
                trajectories[index].add_completion(completion, self.text(completion.ids), self.stop_ids)
            if self.environments is None:
                break
            active = [index for index in active if not trajectories[index].is_truncated]
            texts = {index: trajectories[index].text for index in active}
            replies = self._replies(prompts, rows, opened, texts, number)
            is_last = number + 1 == self.max_turns
            active = [
                index
                for index, reply in zip(active, replies, strict=True)
                if self._goes_on(trajectories[index], reply, prompts, rows[index], is_last=is_last)
            ]
            if not active:
                break
        self._add_final_rewards(prompts, rows, opened, trajectories)
        return trajectories

    def text(self, ids: Sequence[int]) -> str:
        """The text of a completion without the token that ends it; special tokens are left in where there are tools."""
        has_tools = self.environments is not None and bool(self.environments.tools)
        return self.encoder.tokenizer.decode(
            [token for token in ids if token not in self.stop_ids], skip_special=not has_tools
        )

    def _replies(
        self, prompts: Prompts, rows: Sequence[int], opened: dict[int, Any], texts: Mapping[int, str], turn: int
    ) -> list[Reply]:
        """What environments return for the texts of episodes."""
        environments = self.environments
        assert environments is not None

        def call(index: int, text: str) -> list[Any]:
            row_id = prompts.row_ids[rows[index]]
            return list(environments.reply(self._opened(prompts, rows, opened, index), text, row_id, turn))

        # Environments may return something else in each process.
        return [Reply(*one) for one in distributed.on_process_0(lambda: [call(*item) for item in texts.items()])]

    def _opened(self, prompts: Prompts, rows: Sequence[int], opened: dict[int, Any], index: int) -> Any:
        """The environment of an episode, which is made for its first call."""
        assert self.environments is not None
        if index not in opened:
            opened[index] = self.environments.new(prompts.columns[rows[index]], prompts.row_ids[rows[index]])
        return opened[index]

    def _add_final_rewards(
        self, prompts: Prompts, rows: Sequence[int], opened: dict[int, Any], trajectories: Sequence[Trajectory]
    ) -> None:
        """Adds what whole episodes are worth, those that were truncated too."""
        environments = self.environments
        if environments is None or not environments.has_final_reward:
            return

        def rewards() -> list[float]:
            made = [self._opened(prompts, rows, opened, index) for index in range(len(rows))]
            return [
                environments.final_reward(*one)
                for one in zip(made, (prompts.row_ids[row] for row in rows), strict=True)
            ]

        for one, reward in zip(trajectories, distributed.on_process_0(rewards), strict=True):
            one.reward += reward

    def _goes_on(self, one: Trajectory, reply: Reply, prompts: Prompts, row: int, *, is_last: bool) -> bool:
        """Adds a reply to an episode, if there is another turn and it has room for that."""
        one.reward += reply.reward
        one.calls += reply.calls
        one.failures += reply.failures
        if reply.done or is_last:
            return False
        try:
            ids = self._reply_ids(prompts.columns[row], one, reply)
        except RowError as error:
            message = f"the observation {reply.messages[0]['content'][:80]!r} cannot follow: {error}"
            raise RunError(f"{prompts.row_ids[row]}: {message}") from error
        if len(one.ids) + len(ids) >= prompts.max_completion_length:
            one.is_truncated = True
            return False
        one.add_reply(ids, reply)
        return True

    def _reply_ids(self, row: Mapping[str, Any], one: Trajectory, reply: Reply) -> list[int]:
        """Ids behind a completion: the rest of its turn, the reply, and the beginning of the next turn."""
        prompt, messages = read_text_or_chat(row, "prompt"), list(reply.messages)
        texts = [self.encoder.guard.text(message["content"], "observation") for message in messages]
        if isinstance(prompt, str):
            return self.encoder.tokenizer.encode("".join(texts))
        chat = self.encoder.guard.chat(prompt, "prompt", "user")
        last = {**one.turns[-1], **(reply.completion or {})}
        assert self.environments is not None
        tools = self.environments.tools or self.encoder.guard.tools(read_tools(row))
        ids = self.encoder.after_answer([*chat, *one.turns[:-1], last, *messages], tools)
        end = next((place for place, token in enumerate(ids) if token in self.stop_ids), -1)
        return ids[end + 1 :]  # the policy has ended its turn itself
