"""What answers a completion: messages that the policy reads next, a reward, whether the episode is over."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from nnxdsl.data.tokenizers.messages import Message
from nnxdsl.errors import RunError


class Reply(NamedTuple):
    """What an environment returns for a completion.

    Attributes:
        messages: What the policy reads next.
        reward: What the completion is worth.
        done: Whether the episode is over.
        calls: How many tools it has called.
        failures: How many of them failed.
        completion: Fields of the completion's message, where it is more than its text.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    calls: int = 0
    failures: int = 0
    completion: Mapping[str, Any] | None = None


class Contract(Protocol):
    """What the objects of a class can be asked."""

    def reply(self, environment: Any, text: str) -> Reply:
        """What an object returns for a completion."""
        ...


class Stepped:
    """Objects with `step(text) -> (observation, reward, done)`."""

    def reply(self, environment: Any, text: str) -> Reply:
        """See `Contract.reply`.

        Raises:
            RunError: `step` returned something else.
        """
        result = environment.step(text)
        if not isinstance(result, tuple | list) or len(result) != 3:
            raise RunError(f"returned {result!r:.80}, not (observation, reward, done)")
        observation, reward, done = result
        if not isinstance(observation, str | None):
            raise RunError(f"returned the observation {observation!r:.80}, which is no text")
        return Reply([{"role": "user", "content": observation or ""}], finite(reward), bool(done))


def finite(reward: Any) -> float:
    """A reward as a number.

    Raises:
        RunError: It is none.
    """
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise RunError(f"returned the reward {reward!r:.80}, not a finite number")
    return float(reward)
