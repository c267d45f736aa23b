"""Batched generation: completions of prompts from one or several models, at once or as a stream."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from nnxdsl.generate.decode_loop import DecodeLoop, Inputs
from nnxdsl.generate.sampling import Sampling, numbers_of
from nnxdsl.generate.speculative import SpeculativeLoop
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.params import AbstractModel
from nnxdsl.program import xla_options
from nnxdsl.program.forward import Leaves

ROUND_TO = 16
"""Prompts are padded to a multiple of this, so that prompts of similar length share a compiled program."""

STREAM_EVERY = 8
"""Tokens of a row between two pieces of a stream."""


class Sampler:
    """Generates with models of one structure; the jitted loop is cached between calls.

    Args:
        template: The abstract model.
        config: Configuration of the decoder.
        dtype: Dtype of activations and KV cache.
        stop_ids: Token ids that end a completion.
        place: Shards arrays with a leading batch axis; by default jax places them.
        whole: Output sharding, replicated where several processes read the completions; None leaves it to jax.
    """

    def __init__(
        self,
        template: AbstractModel,
        config: DecoderConfig,
        dtype: Any,
        stop_ids: Collection[int],
        place: Callable[[Any], Any] = lambda rows: rows,
        whole: jax.sharding.Sharding | None = None,
    ) -> None:
        self._config, self._place = config, place
        given = template, config, dtype, tuple(sorted(stop_ids))
        self._loop, static = DecodeLoop(*given), ("new_tokens", "is_greedy", "top_k")
        self._generate = xla_options.jit(self._loop.run, static_argnames=static, out_shardings=whole)
        speculative = SpeculativeLoop(*given)
        self._speculate = xla_options.jit(speculative.run, static_argnames=(*static, "drafts"), out_shardings=whole)
        # Each piece of a loop updates the cache in its carry in place.
        pieces = {"static_argnames": static[1:], "donate_argnames": "carry"}
        begin = xla_options.jit(self._loop.begin, static_argnames=static)
        self._pieces = begin, xla_options.jit(self._loop.advance, **pieces)
        pieces["static_argnames"] = (*static[1:], "drafts")
        begin = xla_options.jit(speculative.begin, static_argnames=(*static, "drafts"))
        self._speculative_pieces = begin, xla_options.jit(speculative.advance, **pieces)

    def __call__(self, leaves: Leaves, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """Generate completions, without their stop tokens.

        Args:
            leaves: The model's arrays.
            prompts: Token ids, at least one per prompt; prompts that are too long are truncated on the left.
            sampling: Sampling settings.

        Returns:
            New token ids for each prompt.

        Raises:
            ValueError: `max_new_tokens` leaves no position for a prompt, `top_k` exceeds the vocabulary size, or the
                model cannot draft `num_speculative_tokens`.
        """
        (answers,) = self.together([leaves], prompts, sampling)
        return answers

    def drawn(
        self, leaves: Leaves, prompts: Sequence[Sequence[int]], sampling: Sampling, length: int | None = None
    ) -> list[list[int]]:
        """Generate completions that include the stop token, where there is one.

        Args:
            leaves: The model's arrays.
            prompts: See `__call__`.
            sampling: Sampling settings.
            length: Minimum padded prompt length; a constant value avoids recompilation between calls.
        """
        return _with_stop_tokens(*self._sample([leaves], prompts, sampling, length))

    def stream(
        self, leaves: Leaves, prompts: Sequence[Sequence[int]], sampling: Sampling, every: int = STREAM_EVERY
    ) -> Iterator[list[list[int]]]:
        """Generate completions as `drawn` does, and yield their tokens as they are decoded, in one process.

        The same loop runs in pieces with the same random keys: what is yielded for a row, joined, is its completion in
        `drawn`, token for token.

        Args:
            leaves: The model's arrays.
            prompts: See `__call__`.
            sampling: Sampling settings.
            every: Tokens of each row between two yields; at least 1.

        Yields:
            The tokens that each prompt's completion got since the last time, the stop token included; an empty list for
            one that has ended.

        Raises:
            ValueError: see `__call__`; `every` is less than 1.
        """
        if every < 1:
            raise ValueError(f"every: expected at least 1, got {every}")
        if not prompts:
            return
        inputs, static = self._inputs([leaves], prompts, sampling, None)
        begin, advance = self._speculative_pieces if sampling.num_speculative_tokens else self._pieces
        carry = begin(inputs, **static)
        del static["new_tokens"]
        seen = np.zeros(len(prompts), np.int64)
        until = 0
        while until < sampling.max_new_tokens:
            until = min(until + every, sampling.max_new_tokens)
            carry = advance(inputs, carry, np.int32(until), **static)
            out, counts, done = (np.asarray(part)[0] for part in (carry.out, carry.counts, carry.done))
            ends = counts + done  # with the stop token
            yield [row[begin:end].tolist() for row, begin, end in zip(out, seen, ends, strict=True)]
            seen = ends
            if (done | (counts == sampling.max_new_tokens)).all():
                return

    def drawn_in_passes(
        self, leaves: Leaves, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> tuple[list[list[int]], list[int]]:
        """Generate completions as `drawn` does, and count the passes of the model after the prompt's for each.

        Returns:
            Completions, and of each the passes that yielded its tokens after the first: one a token without drafts.
        """
        if not sampling.num_speculative_tokens or not prompts:
            found = self.drawn(leaves, prompts, sampling)
            return found, [len(row) - 1 for row in found]
        inputs, static = self._inputs([leaves], prompts, sampling, None)
        out, counts, passes = map(np.asarray, self._speculate(inputs, **static))
        return _with_stop_tokens(out, counts), passes.tolist()

    def together(
        self, models: Sequence[Leaves], prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[list[int]]]:
        """Generate from several models in one batch, with the same prompts and random keys.

        Arrays shared by all models are not batched: one matrix product covers the rows of all models, so a policy with
        adapters and its reference cost little more than one model. Arrays that differ are stacked, which copies them;
        use this for adapters rather than for full models.

        Args:
            models: Arrays of each model; an array is shared if it is the same object in all of them.
            prompts: See `__call__`.
            sampling: Sampling settings.

        Returns:
            New token ids for each model and prompt.

        Raises:
            ValueError: see `__call__`.
        """
        return [
            [row[:count].tolist() for row, count in zip(rows, ends, strict=True)]
            for rows, ends in zip(*self._sample(models, prompts, sampling), strict=True)
        ]

    def _sample(
        self,
        models: Sequence[Leaves],
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        at_least: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """New tokens `[M, B, new]` of M models, and their number before the stop token `[M, B]`."""
        if not prompts:
            return np.zeros((len(models), 0, 0), np.int32), np.zeros((len(models), 0), np.int32)
        if sampling.num_speculative_tokens:  # rows of several models have passes of their own
            found = []
            for model in models:
                inputs, static = self._inputs([model], prompts, sampling, at_least)
                found.append(self._speculate(inputs, **static)[:2])
            outs, counts = zip(*found, strict=True)
            return np.concatenate(outs), np.concatenate(counts)
        inputs, static = self._inputs(models, prompts, sampling, at_least)
        out, counts = self._generate(inputs, **static)
        return np.asarray(out), np.asarray(counts)

    def _inputs(
        self, models: Sequence[Leaves], prompts: Sequence[Sequence[int]], sampling: Sampling, at_least: int | None
    ) -> tuple[Inputs, dict[str, Any]]:
        """Arrays and static arguments of the loop.

        Raises:
            ValueError: see `__call__`.
        """
        room = self._config.max_length - sampling.max_new_tokens
        if room < 1:
            raise ValueError(
                f"max_new_tokens={sampling.max_new_tokens} must be less than max_length={self._config.max_length}"
            )
        if sampling.top_k is not None and sampling.top_k > self._config.vocab_size:
            raise ValueError(f"top_k={sampling.top_k} exceeds the vocabulary size {self._config.vocab_size}")
        drafts = {"drafts": sampling.num_speculative_tokens} if sampling.num_speculative_tokens else {}
        if drafts and (problem := self._config.speculative_problem):
            raise ValueError(f"num_speculative_tokens: {problem}; set 0")
        truncated = [list(prompt)[-room:] for prompt in prompts]
        for prompt in truncated:
            if problem := self._config.generation_problem(len(prompt), sampling.max_new_tokens):
                raise ValueError(f"max_new_tokens: {problem}; lower it, or shorten or lengthen the prompt")
        length = min(room, -(-max(*map(len, truncated), at_least or 1) // ROUND_TO) * ROUND_TO)
        tokens = np.zeros((len(truncated), length), np.int32)
        for row, prompt in enumerate(truncated):
            tokens[row, length - len(prompt) :] = prompt
        first, *others = models
        shared = {path for path, leaf in first.items() if all(leaf is other[path] for other in others)}
        rows = tokens, np.array([len(prompt) for prompt in truncated], np.int32), numbers_of(truncated)
        tokens, lengths, numbers = self._place(rows)
        inputs = Inputs(
            {path: leaf for path, leaf in first.items() if path in shared},
            [{path: leaf for path, leaf in model.items() if path not in shared} for model in models],
            tokens,
            lengths,
            numbers,
            # Host arrays are not committed to a device.
            np.asarray(jax.random.key_data(jax.random.key(sampling.seed))),
            np.float32(sampling.temperature),
            None if sampling.top_p is None else np.float32(sampling.top_p),
        )
        return inputs, {
            "new_tokens": sampling.max_new_tokens,
            "is_greedy": sampling.temperature == 0.0,
            "top_k": sampling.top_k,
            **drafts,
        }


def _with_stop_tokens(out: np.ndarray, counts: np.ndarray) -> list[list[int]]:
    """Completions of one model, from `[1, B, new]` and `[1, B]`."""
    return [row[: count + 1].tolist() for row, count in zip(out[0], counts[0], strict=True)]
