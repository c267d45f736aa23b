"""Rewards that need no code: answers in mathematics, formats, repetition, lengths, and those of environments.

`data/rewards/library.py` computes them.
"""

# pyright: reportIncompatibleVariableOverride=false
# (a field of a member replaces the family's default)

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

import attrs

from nnxdsl.config.core.base import gather
from nnxdsl.config.core.validators import Limit, filled, positive
from nnxdsl.config.objectives.reward import Reward
from nnxdsl.config.weights import HF, Checkpoint, From, Weights
from nnxdsl.errors import Problem


@attrs.frozen(kw_only=True)
class OfMath(Reward):
    """What compares the final answer with the row's column `answer`, by math-verify; needs `nnxdsl[math]`."""

    is_base: ClassVar[bool] = True

    after: str | None = attrs.field(default=None, validator=filled)
    answer_timeout: float = attrs.field(default=5.0, validator=positive)


@attrs.frozen(kw_only=True)
class MathAccuracy(OfMath):
    r"""1 for a right answer in mathematics and 0 for another, compared by math-verify as in TRL's `accuracy_reward`.

    The answer is LaTeX, such as `\boxed{\frac{1}{3}}`; equal expressions are equal answers. It does not apply to rows
    whose `answer` cannot be parsed. It needs `nnxdsl[math]`.

    Attributes:
        after: The final answer stands after the last occurrence of this text, without which a completion gets 0, as
            in TRL's `reasoning_accuracy_reward`; None for anywhere.
        answer_timeout: Seconds that an answer may take to be parsed and compared; one that takes longer gets 0.
    """

    name: str = attrs.field(default="math_accuracy", validator=filled)


@attrs.frozen(kw_only=True)
class CosineLength(OfMath):
    """Right answers are worth more if they are short, wrong ones if they are long, along a cosine.

    From the value at length 0 to that at `max_length`, for right answers and for wrong ones: `end + (start - end)
    (1 + cos(pi n / max_length)) / 2`, `n` the tokens of the completion, at most `max_length` (Yeo et al. 2025,
    arXiv:2502.03373, appendix C.1). The defaults are TRL's. Answers are compared as by `Reward.MathAccuracy`.

    Attributes:
        after: See `Reward.MathAccuracy`.
        answer_timeout: See `Reward.MathAccuracy`.
        max_length: Tokens at which the value is that of the longest; None for `max_completion_length` of the data.
        right_short: Value of a right answer of length 0.
        right_long: Value of a right answer of `max_length`.
        wrong_short: Value of a wrong answer of length 0.
        wrong_long: Value of a wrong answer of `max_length`.
        exceeded: Value of an answer of `max_length` or more tokens, right or wrong (the paper's r_e); None for the
            values above.
    """

    name: str = attrs.field(default="cosine_length", validator=filled)
    max_length: int | None = attrs.field(default=None, validator=positive)
    right_short: float = 1.0
    right_long: float = 0.5
    wrong_short: float = -1.0
    wrong_long: float = -0.5
    exceeded: float | None = None


@attrs.frozen(kw_only=True)
class ThinkFormat(Reward):
    """1 if the completion begins with reasoning between `start` and `end`, else 0; as TRL's `think_format_reward`.

    Attributes:
        start: Text before the reasoning, which must stand there once; empty if the prompt ends with it.
        end: Text after the reasoning.
        needs_answer: Whether something must follow the reasoning; TRL accepts completions that end with it.
    """

    name: str = attrs.field(default="think_format", validator=filled)
    start: str = "<think>"
    end: str = attrs.field(default="</think>", validator=filled)
    needs_answer: bool = False


@attrs.frozen(kw_only=True)
class RepetitionPenalty(Reward):
    """`max_penalty (1 - d / n)` for a completion with `n` n-grams of tokens, `d` of them different.

    Yeo et al. 2025 (arXiv:2502.03373), appendix C.2, in the form of TRL's `get_repetition_penalty_reward`. A completion
    of fewer than `ngram_size` tokens gets 0.

    Attributes:
        ngram_size: Tokens of an n-gram.
        max_penalty: The value that endless repetition comes to.
    """

    name: str = attrs.field(default="repetition_penalty", validator=filled)
    ngram_size: int = attrs.field(default=3, validator=positive)
    max_penalty: float = attrs.field(default=-1.0, validator=Limit(below=0))


@attrs.frozen(kw_only=True)
class SoftOverlong(Reward):
    """0 for completions of up to `max_length - cache` tokens, from there linear to -1 at `max_length`, then -1.

    Equation 13 of DAPO (Yu et al. 2025, arXiv:2503.14476), in tokens, end tokens included.

    Attributes:
        max_length: Tokens at which the value is -1; None for `max_completion_length` of the data.
        cache: Tokens before that in which the value falls.
    """

    name: str = attrs.field(default="soft_overlong", validator=filled)
    max_length: int | None = attrs.field(default=None, validator=positive)
    cache: int = attrs.field(validator=positive)

    def problems(self) -> Iterable[Problem]:
        """The value falls within the length."""
        return gather(self._check_cache)

    def _check_cache(self) -> Iterable[Problem]:
        if self.max_length is not None and self.cache > self.max_length:
            yield Problem("cache", f"{self.cache:,} tokens are more than max_length={self.max_length:,}")


@attrs.frozen(kw_only=True)
class Environment(Reward):
    """What the objective's environment gives for the whole episode: the sum of its rewards, or that of `get_reward`."""

    name: str = attrs.field(default="environment", validator=filled)


@attrs.frozen(kw_only=True)
class Model(Reward):
    """The reward of a reward model, such as `Objective.Reward` trains, for the prompt with its completion.

    The model has its own tokenizer and chat template: a completion is read as text, or as messages where there is an
    environment. It is computed on the first device of the first process.

    Attributes:
        weights: A model for sequence classification with one label: `Weights.HF`, `Weights.Checkpoint`, or
            `Weights.From` an experiment with `Objective.Reward`, which is run first unless it has finished before.
        dtype: Of the reward model's weights and activations.
        batch_size: Completions that are computed at one time.
    """

    outside_identity: ClassVar[frozenset[str]] = frozenset({"batch_size"})

    weights: Weights = attrs.field(kw_only=False)
    name: str = attrs.field(default="reward_model", validator=filled)
    dtype: Literal["float32", "bfloat16"] = "float32"
    batch_size: int = attrs.field(default=16, validator=positive)

    def problems(self) -> Iterable[Problem]:
        """The weights are those of one model that has been trained."""
        return gather(self._check_weights)

    def _check_weights(self) -> Iterable[Problem]:
        if not isinstance(self.weights, HF | Checkpoint | From):
            kind = type(self.weights).__qualname__
            yield Problem("weights", f"{kind} is no reward model; use Weights.HF, Weights.Checkpoint or Weights.From")
        elif isinstance(self.weights, From) and self.weights.experiment.objective.reads_logps:
            kind = type(self.weights.experiment.objective).__qualname__
            yield Problem("weights.experiment.objective", f"{kind} trains no reward model; expected Objective.Reward")
