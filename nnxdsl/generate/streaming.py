"""Completions of one model of a pair as text, while they are being decoded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypedDict

import attrs

from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.data.tokenizers.encode import stop_ids
from nnxdsl.generate.model_pair import ModelPair
from nnxdsl.generate.sampling import Sampling
from nnxdsl.models.slots import padded


class Partial(TypedDict):
    """The samples of one model so far, as JSON.

    Attributes:
        texts: Text of each sample so far, without a character whose tokens are not all decoded yet.
        tokens: Tokens of each sample so far, its stop token included.
        done: Whether each sample has ended.
    """

    texts: list[str]
    tokens: list[int]
    done: list[bool]


class Tell(Protocol):
    """Progress callback of a request."""

    def __call__(self, stage: str, partial: Mapping[str, Partial] | None = None) -> object:
        """Report the current activity.

        Args:
            stage: The activity.
            partial: Completions so far, whole, of the models that were begun ("policy", "other"); None for no news.
        """
        ...


@attrs.define
class PartialText:
    """A growing completion; a character whose tokens are not all there yet is held back.

    All tokens are decoded again each time, since a token's text can depend on those before it.

    Attributes:
        tokenizer: Tokenizer of the completion.
        ids: Tokens so far.
        text: Their text so far; it never gets shorter.
    """

    tokenizer: TokenizerBase
    ids: list[int] = attrs.field(factory=list, init=False)
    text: str = attrs.field(default="", init=False)

    def add(self, ids: Sequence[int]) -> None:
        """Append tokens."""
        self.ids += ids
        # The bytes of an incomplete character decode to U+FFFD. A tokenizer with byte fallback gives it for a whole run
        # of byte tokens that does not end with a complete character, also for characters that were complete before.
        text = self.tokenizer.decode(self.ids).rstrip("\ufffd")
        if len(text) >= len(self.text):
            self.text = text


def stream(
    models: ModelPair, name: str, prompt: Sequence[int], sampling: Sampling, texts: Sequence[PartialText]
) -> Iterator[Partial]:
    """Sample completions of a prompt from one model.

    Args:
        models: Policy and comparison model.
        name: "policy" or "other".
        prompt: Token ids.
        sampling: Sampling settings.
        texts: Empty ones, which become the completions; their number is that of the samples.

    Yields:
        The state of all samples, every few tokens, and at the end.

    Raises:
        ValueError: see `Sampler.__call__`.
    """
    _, leaves = models.models()[name]
    stops = stop_ids(models.tokenizer)
    for added in models.sampler(name).stream(leaves, [prompt] * len(texts), sampling):
        for text, ids in zip(texts, added, strict=True):
            text.add(ids)
        yield {
            "texts": [text.text for text in texts],
            "tokens": [len(text.ids) for text in texts],
            "done": [len(text.ids) == sampling.max_new_tokens or text.ids[-1] in stops for text in texts],
        }


def warm_up(models: ModelPair, name: str, prompt: Sequence[int], sampling: Sampling, samples: int) -> None:
    """Compile what `stream` runs, by first tokens, so that timings exclude compilation; once for each structure."""
    sampler = models.sampler(name)
    kind = (sampler, padded(len(prompt)), sampling.max_new_tokens, sampling.top_k, sampling.top_p is None)
    kind = (*kind, sampling.temperature == 0, sampling.num_speculative_tokens, samples)
    if kind not in models.compiled:
        _, leaves = models.models()[name]
        next(sampler.stream(leaves, [prompt] * samples, sampling, every=1))
        models.compiled.add(kind)
