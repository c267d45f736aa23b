"""Batched generation: completions of prompts from one or several models, at once or as a stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import attrs
import jax
import numpy as np

from nnxdsl.generate.decode_loop import DecodeLoop, Fill, Prefilled, Slots, unstacked
from nnxdsl.generate.sampling import Sampling, Selection, numbers_of
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.params import AbstractModel
from nnxdsl.program import xla_options
from nnxdsl.program.forward import Leaves

ROUND_TO = 16
"""Prompts are padded to a multiple of this, so that prompts of similar length share a compiled program."""

CHECK_EVERY = 8
"""Passes between two looks at which slots have ended, and tokens of a row between two pieces of a stream."""

SLOTS = {"cpu": 16}
"""Most completions at one time, by platform: on a CPU a row more costs as much as the one before."""

MOST_SLOTS = 256
"""Most completions at one time on other platforms."""

LEAST_ROOM = 128
"""Fewest tokens of a cache, unless no completion can have so many; it grows in powers of two."""


class Completion(NamedTuple):
    """A completion of a prompt.

    Attributes:
        ids: Token ids, the stop token included where there is one.
        logps: Log-probability of each at the sampling temperature (at 1 if greedy), among all tokens, float32.
        log_mass: Of each the log of the probability mass of the tokens that top-k, top-p and min-p leave, float32:
            `logps - log_mass` is the log-probability with which it was drawn.
        passes: Passes of the model that yielded the tokens after the first: one a token without drafts.
    """

    ids: list[int]
    logps: np.ndarray
    log_mass: np.ndarray
    passes: int


class _Progress(NamedTuple):
    """The slots between two calls of the loop.

    Attributes:
        rows: The row of each slot, -1 for none `[B]`.
        length: Tokens of each completion `[M, B]`.
        done: Whether it has ended `[M, B]`.
        read: Reads tokens, log-probs, log kept mass `[M, B, new]` and passes `[M, B]`.
    """

    rows: np.ndarray
    length: np.ndarray
    done: np.ndarray
    read: Callable[[], list[np.ndarray]]


class Sampler:
    """Generates with models of one structure; the jitted functions are cached between calls.

    Prompts that are equal are computed once. At most `slots` completions are decoded at one time; once one has ended
    the next takes its place. A completion depends on the prompt, the weights, the settings, and on how often the prompt
    came before, and up to the rounding of logits on nothing else: neither on the other rows nor on their order.

    Args:
        template: The abstract model.
        config: Configuration of the decoder.
        dtype: Dtype of activations and KV cache.
        stop_ids: Token ids that end a completion.
        row_sharding: The sharding of an array with so many rows; None leaves it to jax.
        whole: Output sharding, replicated where several processes read the completions; None leaves it to jax.
        slots: Most completions at one time; None for a number that suits the platform.
    """

    def __init__(
        self,
        template: AbstractModel,
        config: DecoderConfig,
        dtype: Any,
        stop_ids: Collection[int],
        row_sharding: Callable[[int], jax.sharding.NamedSharding] | None = None,
        whole: jax.sharding.Sharding | None = None,
        slots: int | None = None,
    ) -> None:
        self._config, self._stops = config, frozenset(stop_ids)
        self._slots = slots or SLOTS.get(jax.default_backend(), MOST_SLOTS)
        loop, jit = DecodeLoop(template, config, dtype, tuple(sorted(stop_ids)), row_sharding), xla_options.jit
        self._loop, self._unstacked = loop, jit(unstacked)
        self._prefill = jit(loop.prefill, static_argnames=("drafts",))
        self._empty = jit(loop.empty, static_argnames=("models", "slots", "room", "new_tokens", "drafts"))
        self._grown = jit(loop.grown, static_argnames=("room", "models"))
        self._advance = jit(
            loop.advance,
            static_argnames=("models", "is_greedy", "top_k"),
            donate_argnames="slots",  # each call updates the caches in place
            out_shardings=(None, whole),
        )
        self._read = jit(lambda slots: (slots.out, slots.logps, slots.log_mass, slots.passes), out_shardings=whole)

    def __call__(self, leaves: Leaves, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """Generate completions without the stop token.

        Args:
            leaves: The model's arrays.
            prompts: Token ids of each prompt. Prompts that are too long are truncated on the left.
            sampling: Sampling settings.

        Returns:
            New token ids for each prompt.

        Raises:
            ValueError: `max_new_tokens` leaves no position for a prompt, `top_k` exceeds the vocabulary size, or the
                model cannot draft `num_speculative_tokens`.
        """
        (answers,) = self.sample_models([leaves], prompts, sampling)
        return answers

    def complete(
        self,
        leaves: Leaves,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        prompt_length: int | None = None,
        limits: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Generate completions with their log-probabilities.

        Args:
            leaves: The model's arrays.
            prompts: See `__call__`.
            sampling: Sampling settings.
            prompt_length: Minimum padded prompt length; a constant value avoids recompilation between calls.
            limits: Most tokens of each completion, at most `max_new_tokens`; None for `max_new_tokens`.

        Raises:
            ValueError: see `__call__`; a limit is out of range.
        """
        (found,) = self._complete([leaves], prompts, sampling, prompt_length, limits)
        return found

    def stream(
        self, leaves: Leaves, prompts: Sequence[Sequence[int]], sampling: Sampling, every: int = CHECK_EVERY
    ) -> Iterator[list[list[int]]]:
        """Generate completions as `complete` does, and yield their tokens as they are decoded, in one process.

        What is yielded for a row, joined, is its completion in `complete`, token for token.

        Args:
            leaves: The model's arrays.
            prompts: See `__call__`.
            sampling: Sampling settings.
            every: Passes between two yields, each of which yields a token of a row, more with drafts; at least 1.

        Yields:
            The tokens that each prompt's completion got since the last time, the stop token included; an empty list for
            one that has ended or has not begun.

        Raises:
            ValueError: see `__call__`; `every` is less than 1.
        """
        if every < 1:
            raise ValueError(f"every: expected at least 1, got {every}")
        seen = np.zeros(len(prompts), np.int64)
        for now in self._decode([leaves], prompts, sampling, None, None, every):
            added: list[list[int]] = [[] for _ in prompts]
            out = now.read()[0][0]
            for slot in np.flatnonzero(now.rows >= 0):
                row, length = now.rows[slot], now.length[0, slot]
                added[row], seen[row] = out[slot, seen[row] : length].tolist(), length
            yield added

    def sample_models(
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
            [one.ids[:-1] if one.ids[-1] in self._stops else one.ids for one in each]
            for each in self._complete(models, prompts, sampling)
        ]

    def _complete(
        self,
        models: Sequence[Leaves],
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        prompt_length: int | None = None,
        limits: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """Completions of each model and prompt."""
        found: dict[tuple[int, int], Completion] = {}
        for now in self._decode(models, prompts, sampling, prompt_length, limits, CHECK_EVERY):
            ended = np.flatnonzero((now.rows >= 0) & now.done.all(axis=0))
            if not len(ended):
                continue
            out, logps, log_mass, passes = now.read()
            for model in range(len(models)):
                for slot in ended:
                    end, at = now.length[model, slot], (model, slot)
                    found[model, now.rows[slot]] = Completion(
                        out[at][:end].tolist(), logps[at][:end], log_mass[at][:end], int(passes[at])
                    )
        return [[found[model, row] for row in range(len(prompts))] for model in range(len(models))]

    def _decode(
        self,
        models: Sequence[Leaves],
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        prompt_length: int | None,
        limits: Sequence[int] | None,
        every: int,
    ) -> Iterator[_Progress]:
        """Decodes all rows, and yields each time after `every` passes."""
        queue = self._queue(prompts, sampling, prompt_length, limits)
        if not prompts:
            return
        first, *others = models
        shared = {path: leaf for path, leaf in first.items() if all(leaf is other[path] for other in others)}
        own = [{path: leaf for path, leaf in model.items() if path not in shared} for model in models]
        weights, selection = self._unstacked(shared, own), Selection.of(sampling)
        drafts, count, settings = (
            sampling.num_speculative_tokens,
            min(len(prompts), self._slots),
            {"models": len(models)},
        )
        rows, length, prompt = np.full(count, -1), np.zeros((len(models), count), np.int64), queue.tokens.shape[1]
        most, room = prompt + sampling.max_new_tokens - 1 + drafts, 0
        slots: Slots | None = None
        prefilled: Prefilled | None = None
        block: int | None = None
        chosen = {"is_greedy": sampling.temperature == 0.0, "top_k": sampling.top_k}
        while queue.waiting or (rows >= 0).any():
            free = np.flatnonzero(rows < 0)
            if queue.waiting and len(free) and queue.block_of(queue.waiting[0], count) != block:
                block = queue.block_of(queue.waiting[0], count)
                prefilled = self._prefill(shared, own, *queue.block(block, count), drafts=drafts)
            fill = queue.take(free, block, count)
            rows[free[: len(queue.taken)]] = queue.taken
            needed = prompt + int(length.max()) + every * (1 + drafts) + drafts
            if needed > room and room < most:
                room = min(most, max(LEAST_ROOM, 1 << (needed - 1).bit_length()))
                shape = {"slots": count, "new_tokens": sampling.max_new_tokens, "drafts": drafts, **settings}
                slots = self._grown(slots, room=room, **settings) if slots else self._empty(room=room, **shape)
            slots, flags = self._advance(
                weights, selection, slots, prefilled, fill, np.int32(every), **chosen, **settings
            )
            length, done = (np.array(part).reshape(len(models), count) for part in flags)
            length[:, rows < 0] = 0
            assert slots is not None
            yield _Progress(rows.copy(), length, done, partial(self._arrays, slots, len(models)))
            ended = done.all(axis=0)
            rows[ended], length[:, ended] = -1, 0

    def _arrays(self, slots: Slots, models: int) -> list[np.ndarray]:
        found = map(np.asarray, self._read(slots))
        return [part if models > 1 else part[None] for part in found]

    def _queue(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        prompt_length: int | None,
        limits: Sequence[int] | None,
    ) -> _Queue:
        """The rows to decode.

        Raises:
            ValueError: see `complete`.
        """
        room = self._config.max_length - sampling.max_new_tokens
        if room < 1:
            raise ValueError(
                f"max_new_tokens={sampling.max_new_tokens} must be less than max_length={self._config.max_length}"
            )
        if sampling.top_k is not None and sampling.top_k > self._config.vocab_size:
            raise ValueError(f"top_k={sampling.top_k} exceeds the vocabulary size {self._config.vocab_size}")
        if sampling.num_speculative_tokens and (problem := self._config.speculative_problem):
            raise ValueError(f"num_speculative_tokens: {problem}; set 0")
        limits = [sampling.max_new_tokens] * len(prompts) if limits is None else limits
        if len(limits) != len(prompts) or not all(1 <= one <= sampling.max_new_tokens for one in limits):
            raise ValueError(f"limits: expected one of 1 to {sampling.max_new_tokens} for each prompt")
        truncated = [tuple(prompt)[-room:] for prompt in prompts]
        for prompt in dict.fromkeys(truncated):
            if problem := self._config.generation_problem(len(prompt), sampling.max_new_tokens):
                raise ValueError(f"max_new_tokens: {problem}; lower it, or shorten or lengthen the prompt")
        longest = max(map(len, truncated), default=1)
        length = min(room, -(-max(longest, prompt_length or 1) // ROUND_TO) * ROUND_TO)
        return _Queue.of(truncated, length, limits)


@attrs.define
class _Queue:
    """Rows to decode, those of equal prompts one after another.

    Attributes:
        tokens: Different prompts `[U, P]`, padded on the left.
        lengths: Their tokens `[U]`.
        prompt: The prompt of each row.
        numbers: RNG stream numbers of each row, from `numbers_of`.
        limits: Most tokens of each row's completion.
        waiting: The rows that are not taken yet, in their order.
        taken: The rows that were taken last.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    prompt: list[int]
    numbers: np.ndarray
    limits: np.ndarray
    waiting: deque[int]
    taken: list[int] = attrs.field(factory=list)

    @classmethod
    def of(cls, prompts: Sequence[tuple[int, ...]], length: int, limits: Sequence[int]) -> _Queue:
        """The rows of these prompts."""
        place = {prompt: index for index, prompt in enumerate(dict.fromkeys(prompts))}
        tokens = np.zeros((len(place), length), np.int32)
        for prompt, row in zip(place, tokens, strict=True):
            row[length - len(prompt) :] = prompt
        lengths, prompt = np.array([len(one) for one in place], np.int32), [place[one] for one in prompts]
        order = sorted(range(len(prompts)), key=lambda row: prompt[row])
        return cls(tokens, lengths, prompt, numbers_of(prompts), np.array(limits, np.int32), deque(order))

    def block_of(self, row: int, size: int) -> int:
        """The block of prompts, of `size` each, that a row's prompt is in."""
        return self.prompt[row] // size

    def block(self, block: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Prompts that are computed together, `[size, P]`, or all of them where they are fewer, and their lengths."""
        rows = np.arange(block * size, block * size + min(size, len(self.tokens))) % len(self.tokens)
        return self.tokens[rows], self.lengths[rows]

    def take(self, free: np.ndarray, block: int | None, size: int) -> Fill:
        """Takes rows of one block for slots that are free."""
        self.taken = []
        while self.waiting and len(self.taken) < len(free) and self.block_of(self.waiting[0], size) == block:
            self.taken.append(self.waiting.popleft())
        rows = np.zeros(size, np.int64)
        rows[: len(self.taken)] = self.taken
        slot, prompt = np.zeros(size, np.int32), np.array(self.prompt)[rows]
        slot[: len(self.taken)] = free[: len(self.taken)]
        count, place = np.int32(len(self.taken)), (prompt % size).astype(np.int32)
        return Fill(count, slot, place, self.lengths[prompt], self.numbers[rows], self.limits[rows])
