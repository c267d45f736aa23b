"""Trajectories in tokens: a completion, or completions and an environment's observations in turns.

What the policy sampled stays in tokens: an observation is encoded and put behind it, and nothing is tokenized again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import attrs

from nnxdsl.data.loaders.fields import read_text_or_chat
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.prompts import Prompts
from nnxdsl.data.tokenizers.encode import Encoder
from nnxdsl.data.tokenizers.messages import Message, read_tools
from nnxdsl.errors import RunError
from nnxdsl.generate.sampler import Completion
from nnxdsl.rollouts.environments import Environments, Reply
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
        is_truncated: Whether it reached the maximal length before its end.
    """

    ids: list[int] = attrs.field(factory=list)
    is_sampled: list[bool] = attrs.field(factory=list)
    logps: list[float] = attrs.field(factory=list)
    turns: list[Message] = attrs.field(factory=list)
    reward: float = 0.0
    is_truncated: bool = False

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

    def add_observation(self, ids: Sequence[int], text: str) -> None:
        """Adds a turn of the environment, up to where the policy's next turn begins."""
        self.ids += ids
        self.is_sampled += [False] * len(ids)
        self.logps += [0.0] * len(ids)
        self.turns.append({"role": "user", "content": text})


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
        found = [Trajectory() for _ in rows]
        opened: dict[int, Any] = {}  # in process 0, which alone calls environments
        active = list(range(len(rows)))
        for number in range(self.max_turns):
            before = [[*prompts.row(rows[index])["prompt"].tolist(), *found[index].ids] for index in active]
            limits = [prompts.max_completion_length - len(found[index].ids) for index in active]
            for index, completion in zip(active, sample(Turn(number, before, limits)), strict=True):
                found[index].add_completion(completion, self.text(completion.ids), self.stop_ids)
            if self.environments is None:
                break
            active = [index for index in active if not found[index].is_truncated]
            texts = {index: found[index].text for index in active}
            replies = self._replies(prompts, rows, opened, texts, number)
            is_last = number + 1 == self.max_turns
            active = [
                index
                for index, reply in zip(active, replies, strict=True)
                if self._goes_on(found[index], reply, prompts, rows[index], is_last=is_last)
            ]
            if not active:
                break
        return found

    def text(self, ids: Sequence[int]) -> str:
        """The text of a completion, without the token that ends it."""
        return self.encoder.tokenizer.decode([token for token in ids if token not in self.stop_ids])

    def _replies(
        self, prompts: Prompts, rows: Sequence[int], opened: dict[int, Any], texts: Mapping[int, str], turn: int
    ) -> list[Reply]:
        """What environments return for the texts of episodes."""
        environments = self.environments
        assert environments is not None

        def call(index: int, text: str) -> list[Any]:
            row, row_id = prompts.columns[rows[index]], prompts.row_ids[rows[index]]
            if index not in opened:
                opened[index] = environments.new(row, row_id)
            return list(environments.step(opened[index], text, row_id, turn))

        # Environments may return something else in each process.
        return [Reply(*one) for one in distributed.on_process_0(lambda: [call(*item) for item in texts.items()])]

    def _goes_on(self, one: Trajectory, reply: Reply, prompts: Prompts, row: int, *, is_last: bool) -> bool:
        """Adds an observation to an episode, if there is another turn and it has room for that."""
        one.reward += reply.reward
        if reply.done or is_last:
            return False
        try:
            ids = self._observation_ids(prompts.columns[row], one, reply.observation)
        except RowError as error:
            message = f"the observation {reply.observation[:80]!r} cannot follow: {error}"
            raise RunError(f"{prompts.row_ids[row]}: {message}") from error
        if len(one.ids) + len(ids) >= prompts.max_completion_length:
            one.is_truncated = True
            return False
        one.add_observation(ids, reply.observation)
        return True

    def _observation_ids(self, row: Mapping[str, Any], one: Trajectory, observation: str) -> list[int]:
        """Ids behind a completion: the rest of its turn, the observation, and the beginning of the next turn."""
        prompt = read_text_or_chat(row, "prompt")
        text = self.encoder.guard.text(observation, "observation")
        if isinstance(prompt, str):
            return self.encoder.tokenizer.encode(text)
        chat = self.encoder.guard.chat(prompt, "prompt", "user")
        messages = [*chat, *one.turns, {"role": "user", "content": text}]
        ids = self.encoder.after_answer(messages, self.encoder.guard.tools(read_tools(row)))
        return ids[1:] if ids[:1] == one.ids[-1:] else ids
