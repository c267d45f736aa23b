"""Batched generation: completions of prompts from one or several models, at once or as a stream."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from nnxdsl.config.precision import KVCacheDtype
from nnxdsl.errors import WeightsError
from nnxdsl.generate.decode_loop import DecodeLoop, Prefilled, Slots, unstacked
from nnxdsl.generate.row_queue import NewRow, Queue, Table
from nnxdsl.generate.sampling import Sampling, Selection, numbers_of
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.params import AbstractModel
from nnxdsl.models.slots import group_size, most_prompts, most_slots, padded, power_of_two
from nnxdsl.program import xla_options
from nnxdsl.program.forward import Leaves

CHECK_EVERY = 8
"""Passes between two looks at which slots have ended, and tokens of a row between two pieces of a stream."""

LEAST_SLOTS = {"cpu": 8}
"""Once no completion waits, free slots are given up in powers of two, to this many at least, by platform; on others
never: there a pass takes as long with few rows as with many."""

LEAST_ROOM = 128
"""Fewest tokens of a cache after the prompt, unless no completion can have so many; it grows in powers of two."""


class Completion(NamedTuple):
    """A completion of a prompt.

    Attributes:
        ids: Token ids, the stop token included where there is one.
        logps: Log-probability of each at the sampling temperature (at 1 if greedy), among all tokens, float32.
        log_mass: Of each the log of the probability mass of the tokens that top-k, top-p and min-p leave, float32:
            `logps - log_mass` is the log-probability with which it was drawn.
        passes: Passes of the model that yielded the tokens after the first: one a token without drafts.
        routed_experts: The experts of the prompt's tokens and of these, `[tokens, layers, k]` int16, -1 in layers
            without experts; None from a sampler that does not return them.
    """

    ids: list[int]
    logps: np.ndarray
    log_mass: np.ndarray
    passes: int
    routed_experts: np.ndarray | None = None


class Piece(NamedTuple):
    """The tokens that a completion got since the last piece.

    Attributes:
        row: Of which prompt.
        ids: Token ids, the stop token included.
        logps: As of a `Completion`.
        is_done: Whether the completion has ended.
    """

    row: int
    ids: list[int]
    logps: np.ndarray
    is_done: bool


Join = Callable[[int], Sequence[NewRow]]
"""Returns the rows that join those that are decoded; called with the most tokens that their prompts may have."""


class _Progress(NamedTuple):
    """The slots between two calls of the loop.

    Attributes:
        rows: The row of each slot, -1 for none `[B]`.
        length: Tokens of each completion `[M, B]`.
        done: Whether it has ended `[M, B]`.
        read: Reads tokens, log-probs, log kept mass `[M, B, new]`, passes `[M, B]`, and experts if they are returned.
        drop: Ends rows whose tokens are wanted no longer.
        prompt_experts: Experts of the tokens of prompts, by row; empty unless they are returned.
    """

    rows: np.ndarray
    length: np.ndarray
    done: np.ndarray
    read: Callable[[], list[np.ndarray]]
    drop: Callable[[Collection[int]], None]
    prompt_experts: dict[int, np.ndarray]


class Sampler:
    """Generates with models of one structure; the jitted functions are cached between calls.

    Prompts that are equal are computed once. At most `slots` completions are decoded at one time; once one has ended
    the next takes its place. A completion depends on the prompt, the weights, the settings, and on how often the prompt
    came before, and up to the rounding of logits on nothing else: neither on the other rows nor on their order.

    Args:
        template: The abstract model.
        config: Configuration of the decoder.
        dtype: Dtype of activations, and of the KV cache.
        stop_ids: Token ids that end a completion.
        row_sharding: The sharding of an array with so many rows; None leaves it to jax.
        whole: Output sharding, replicated where several processes read the completions; None leaves it to jax.
        slots: Most completions at one time; None for a number that suits the platform.
        kv_cache_dtype: Dtype of keys and values in the cache, "int8" with a float32 scale for each token and head; None
            for `dtype`. Log-probabilities then differ from those of a forward pass without a cache; those returned are
            the ones that tokens were drawn with. A prompt's own tokens attend to each other in `dtype`. States of
            linear layers and keys of indexers stay as they are.
        returns_experts: Whether `complete` returns the experts of tokens; of one model at a time.

    Raises:
        WeightsError: The model has a head of labels.
        ValueError: `kv_cache_dtype` or `returns_experts` has no effect: there are no keys and values, or no experts.
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
        kv_cache_dtype: KVCacheDtype | None = None,
        returns_experts: bool = False,
    ) -> None:
        if config.head.num_labels is not None:
            raise WeightsError("the model's head gives scores of labels and no tokens, so it generates nothing")
        if kv_cache_dtype and (problem := config.kv_cache_problem):
            raise ValueError(f"kv_cache_dtype: {problem}; set None")
        if returns_experts and config.moe is None:
            raise ValueError("returns_experts: the model has no experts (MoE); set False")
        self._config, self._stops = config, frozenset(stop_ids)
        platform = jax.default_backend()
        self._slots = slots or most_slots(platform)
        self._least_slots = LEAST_SLOTS.get(platform, self._slots)
        self._prompts = most_prompts(platform, self._slots)
        of_rows = row_sharding, kv_cache_dtype, returns_experts
        loop = DecodeLoop(template, config, dtype, tuple(sorted(stop_ids)), *of_rows)
        jit = xla_options.jit
        self._loop, self._unstacked = loop, jit(unstacked)
        self._prefill = jit(loop.prefill, static_argnames=("drafts",))
        self._empty = jit(loop.empty, static_argnames=("models", "slots", "room", "new_tokens", "drafts", "prefixes"))
        self._grown = jit(loop.grown, static_argnames=("models", "slots", "room", "prefixes"))
        self._shrunk = jit(loop.shrunk, static_argnames=("models",))
        self._advance = jit(
            loop.advance,
            static_argnames=("models", "is_greedy", "top_k"),
            donate_argnames="slots",  # each call updates the caches in place
            out_shardings=(None, whole),
        )
        self._read = jit(_readable, out_shardings=whole)
        self._read_experts = jit(lambda prompts: prompts.routed_experts, out_shardings=whole)

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
        (completions,) = self._complete([leaves], prompts, sampling, prompt_length, limits)
        return completions

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
        for pieces in self.pieces(leaves, prompts, sampling, every):
            added: list[list[int]] = [[] for _ in prompts]
            for piece in pieces:
                added[piece.row] = piece.ids
            yield added

    def pieces(
        self,
        leaves: Leaves,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        every: int = CHECK_EVERY,
        *,
        prompt_length: int | None = None,
        limits: Sequence[int] | None = None,
        numbers: np.ndarray | None = None,
        is_unwanted: Callable[[int], bool] = lambda row: False,
        join: Join | None = None,
    ) -> Iterator[list[Piece]]:
        """Generate completions as `stream` does, with their log-probabilities.

        Args:
            leaves: The model's arrays.
            prompts: See `__call__`.
            sampling: Sampling settings.
            every: See `stream`.
            prompt_length: See `complete`.
            limits: See `complete`.
            numbers: RNG stream numbers of each row, `[B, 2]` uint32; None for those of `numbers_of`.
            is_unwanted: Called for each row after each yield: whether it is decoded no further.
            join: Called between two yields, for rows that have the next numbers after those of `prompts`. Numbers of
                slots and of prompts are powers of two then, as each is compiled once.

        Yields:
            Pieces of the rows that are in slots.

        Raises:
            ValueError: see `complete` and `stream`.
        """
        if every < 1:
            raise ValueError(f"every: expected at least 1, got {every}")
        seen = defaultdict[int, int](int)
        for now in self._decode([leaves], prompts, sampling, prompt_length, limits, every, numbers, join):
            out, logps, *_ = (part[0] for part in now.read())
            pieces = list[Piece]()
            for slot in np.flatnonzero(now.rows >= 0):
                row, length, is_done = int(now.rows[slot]), int(now.length[0, slot]), bool(now.done[0, slot])
                new, seen[row] = slice(seen[row], length), length
                pieces.append(Piece(row, out[slot, new].tolist(), logps[slot, new], is_done))
                if is_done:
                    del seen[row]
            yield pieces
            now.drop([piece.row for piece in pieces if is_unwanted(piece.row)])

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
        completions: dict[tuple[int, int], Completion] = {}
        for now in self._decode(models, prompts, sampling, prompt_length, limits, CHECK_EVERY):
            ended = np.flatnonzero((now.rows >= 0) & now.done.all(axis=0))
            if not len(ended):
                continue
            out, logps, log_mass, passes, *experts = now.read()
            for model in range(len(models)):
                for slot in ended:
                    end, key, row = now.length[model, slot], (model, slot), now.rows[slot]
                    of_prompt = now.prompt_experts.get(int(row))
                    completions[model, row] = Completion(
                        out[key][:end].tolist(),
                        logps[key][:end],
                        log_mass[key][:end],
                        int(passes[key]),
                        None if of_prompt is None else np.concatenate([of_prompt, experts[0][key][:end]]),
                    )
        return [[completions[model, row] for row in range(len(prompts))] for model in range(len(models))]

    def _decode(
        self,
        models: Sequence[Leaves],
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        prompt_length: int | None,
        limits: Sequence[int] | None,
        every: int,
        numbers: np.ndarray | None = None,
        join: Join | None = None,
    ) -> Iterator[_Progress]:
        """Decodes all rows, and yields each time after `every` passes."""
        queue = self._queue(prompts, sampling, prompt_length, limits, numbers, joins=join is not None)
        if not prompts:
            return
        first, *others = models
        shared = {path: leaf for path, leaf in first.items() if all(leaf is other[path] for other in others)}
        per_model = [{path: leaf for path, leaf in model.items() if path not in shared} for model in models]
        weights, selection = self._unstacked(shared, per_model), Selection.of(sampling)
        drafts, settings = sampling.num_speculative_tokens, {"models": len(models)}
        count = min(power_of_two(len(prompts)) if join else len(prompts), self._slots)
        table = Table.of(count, queue.group_size, None if join else len(queue.waiting), len(models))
        most, room, allocated = sampling.max_new_tokens + drafts, 0, (0, 0)
        slots: Slots | None = None
        prefilled: Prefilled | None = None
        chosen = {"is_greedy": sampling.temperature == 0.0, "top_k": sampling.top_k}
        prompt_experts: dict[int, np.ndarray] = {}
        while True:
            if join is not None:
                queue.add(join(queue.length))
                table.grow(min(power_of_two(table.busy + queue.rows_waiting), self._slots))
            if not queue.can_fill(table) and not table.is_busy:
                return
            if queue.can_fill(table) and queue.needs_prompts:
                prefilled = self._prefill(shared, per_model, *queue.take_prompts(), drafts=drafts)
                if self._loop.returns_experts:
                    prompt_experts |= queue.by_row(np.asarray(self._read_experts(prefilled)))
            fill = queue.take(table)
            needed = 1 + int(table.length.max()) + every * (1 + drafts) + drafts
            if needed > room and room < most:
                room = min(most, max(LEAST_ROOM, power_of_two(needed)))
            if allocated != (len(table.rows), room):
                allocated, prefixes = (len(table.rows), room), (*table.members.shape, queue.length)
                shape = {"slots": len(table.rows), "room": room + queue.length - 1, "prefixes": prefixes, **settings}
                new = {"new_tokens": sampling.max_new_tokens, "drafts": drafts}
                slots = self._grown(slots, **shape) if slots else self._empty(**shape, **new)
            passes = np.int32(0 if queue.can_fill(table) else every)  # first all free slots, of several prefills
            slots, flags = self._advance(weights, selection, slots, prefilled, fill, passes, **chosen, **settings)
            if not passes:
                continue
            length, done = (np.array(part).reshape(len(models), -1) for part in flags)
            table.length = np.where(table.rows < 0, 0, length)
            assert slots is not None
            read, dropped = partial(self._arrays, slots, len(models)), set[int]()
            now = table.rows.copy(), table.length.copy(), done, read, dropped.update
            yield _Progress(*now, prompt_experts)
            table.end(np.logical_and.reduce(done) | np.isin(table.rows, list(dropped)))
            wanted = max(self._least_slots, power_of_two(table.busy))
            if not queue.rows_waiting and wanted <= len(table.rows) // 2:
                slots = self._shrunk(slots, *table.shrink(wanted), **settings)
                allocated = wanted, room

    def _arrays(self, slots: Slots, models: int) -> list[np.ndarray]:
        arrays = map(np.asarray, self._read(slots))
        return [part if models > 1 else part[None] for part in arrays]

    def _queue(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        prompt_length: int | None,
        limits: Sequence[int] | None,
        numbers: np.ndarray | None,
        *,
        joins: bool,
    ) -> Queue:
        """The rows to decode.

        Raises:
            ValueError: see `complete`.
        """
        limits = [sampling.max_new_tokens] * len(prompts) if limits is None else limits
        if len(limits) != len(prompts) or not all(1 <= one <= sampling.max_new_tokens for one in limits):
            raise ValueError(f"limits: expected one of 1 to {sampling.max_new_tokens} for each prompt")
        most = max(limits, default=sampling.max_new_tokens)
        if most >= self._config.max_length:
            raise ValueError(f"max_new_tokens={most} must be less than max_length={self._config.max_length}")
        if sampling.top_k is not None and sampling.top_k > self._config.vocab_size:
            raise ValueError(f"top_k={sampling.top_k} exceeds the vocabulary size {self._config.vocab_size}")
        if sampling.num_speculative_tokens and (problem := self._config.speculative_problem):
            raise ValueError(f"num_speculative_tokens: {problem}; set 0")
        rooms = [self._config.max_length - limit for limit in limits]
        truncated = [tuple(prompt)[-room:] for prompt, room in zip(prompts, rooms, strict=True)]
        for length, limit in dict.fromkeys(zip(map(len, truncated), limits, strict=True)):
            if problem := self._config.generation_problem(length, limit):
                raise ValueError(f"max_new_tokens: {problem}; lower it, or shorten or lengthen the prompt")
        longest = max(map(len, truncated), default=1)
        length = min(max(rooms, default=1), padded(max(longest, prompt_length or 1)))
        numbers = numbers_of(truncated) if numbers is None else numbers
        different = len(set(truncated))
        prompts_at_once = min(self._prompts, self._slots if joins else min(len(prompts), different))
        queue = Queue(length, group_size(len(prompts), different or 1, self._slots), prompts_at_once, joins)
        queue.add([NewRow(*each) for each in zip(truncated, limits, numbers, strict=True)])
        return queue


def _readable(slots: Slots) -> tuple[jax.Array, ...]:
    """What is read of slots."""
    experts = () if slots.routed_experts is None else (slots.routed_experts,)
    return (slots.out, slots.logps, slots.log_mass, slots.passes, *experts)
