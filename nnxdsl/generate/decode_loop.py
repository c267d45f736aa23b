"""The decoding loop: a batch of slots, each with a completion of its own, and the prefill of prompts that fills them.

A slot's completion has its own length, limit and random numbers, so that one that has ended makes room for the next
while the others go on. Each pass chooses tokens from the hidden states of the pass before, and computes the next ones:

    choose from `hidden`  ->  append to the completion  ->  forward pass of the chosen token  ->  `hidden`

Keys and values of a prompt are stored once for all of its completions, see `Prefixes`. A slot is filled with the
states, windows and last hidden state of the prompt, and its first token is chosen as all others are. With speculative
decoding (see `speculative`) a pass has some drafts beside the token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import attrs
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from nnxdsl.config.precision import KVCacheDtype
from nnxdsl.generate.sampling import Draws, Selection, select
from nnxdsl.generate.speculative import accept, draft
from nnxdsl.models.attention.kv_cache import (
    KV,
    Cache,
    CacheUpdate,
    IndexedKV,
    Prefixes,
    append,
    empty_prefixes,
    init_cache,
    mtp_cache,
    rewind,
)
from nnxdsl.models.attention.positions import PrefixRows, TokenPositions, positions_left_padded
from nnxdsl.models.attention.row_layout import AttentionMethod, sequence
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.moe.router import ROUTED_EXPERTS
from nnxdsl.models.params import AbstractModel, is_stacked
from nnxdsl.program.forward import Leaves

TreeT = TypeVar("TreeT")


class Weights(NamedTuple):
    """Arrays of M models.

    Attributes:
        shared: Those shared by all models.
        per_model: Those of each model, stacked along a leading axis if there is more than one.
    """

    shared: dict[str, Any]
    per_model: dict[str, Any]


class Prefilled(NamedTuple):
    """Prompts `[U]` that were computed.

    Attributes:
        cache: Their keys, values and states.
        mtp_cache: Those of the MTP layer; None without drafts.
        hidden: Hidden states of their last tokens `[U, D]`.
        routed_experts: Of their tokens, see `DecoderOutput`, `[U, P, layers, k]`; None where they are not returned.
    """

    cache: Cache
    mtp_cache: Cache | None
    hidden: jax.Array
    routed_experts: jax.Array | None


class Fill(NamedTuple):
    """New completions of slots, `[B]` each, of which the first `size` are to begin, and their prefixes.

    Attributes:
        size: Scalar.
        slot: The slot.
        prompt: Its prompt's row among those prefilled.
        length: Tokens of the prompt.
        numbers: RNG stream numbers `[B, 2]`, from `numbers_of`.
        limit: Most tokens of the completion.
        prefixes: Number of new prefixes, scalar.
        prefix: The place of each new prefix `[U]`.
        prefix_prompt: Its prompt's row among those prefilled `[U]`.
        rows: The slots of each prefix, see `PrefixRows`, `[U, G]`.
        place: The place of each slot in `rows`, `[B]`.
    """

    size: ArrayLike
    slot: ArrayLike
    prompt: ArrayLike
    length: ArrayLike
    numbers: ArrayLike
    limit: ArrayLike
    prefixes: ArrayLike
    prefix: ArrayLike
    prefix_prompt: ArrayLike
    rows: ArrayLike
    place: ArrayLike


class Slots(NamedTuple):
    """The state of the loop between two passes; with several models each array has a leading axis of models.

    Attributes:
        cache: KV cache of the tokens before those of `hidden`, padding included, and the prefixes of prompts.
        update: What the cache takes of the tokens of `hidden`. It is appended before the next pass reads the cache: XLA
            copies a cache that a pass reads first and then writes.
        mtp_cache: That of the MTP layer; None without drafts.
        hidden: Hidden states that the next tokens are chosen from `[B, 1 + k, D]`, of k drafts.
        drafts: Tokens that the states after the first are of `[B, k]`; -1 for none.
        padding: Padding before the prompt `[B]`.
        numbers: RNG stream numbers `[B, 2]`.
        limit: Most tokens of the completion `[B]`.
        length: Tokens of the completion so far `[B]`, a stop token included.
        done: Whether the completion has ended, or the slot is empty `[B]`.
        out: The completion `[B, new_tokens]`.
        logps: See `Draws`, `[B, new_tokens]`.
        log_mass: See `Draws`, `[B, new_tokens]`.
        passes: Passes so far, the choice of the first token not counted `[B]`.
        routed_experts: Of the completion's tokens, see `DecoderOutput`, `[B, new_tokens, layers, k]`; None where they
            are not returned.
    """

    cache: Cache
    update: CacheUpdate
    mtp_cache: Cache | None
    hidden: jax.Array
    drafts: jax.Array
    padding: jax.Array
    numbers: jax.Array
    limit: jax.Array
    length: jax.Array
    done: jax.Array
    out: jax.Array
    logps: jax.Array
    log_mass: jax.Array
    passes: jax.Array
    routed_experts: jax.Array | None = None


@attrs.frozen
class DecodeLoop:
    """The functions of the loop of one model structure, to be jitted; arrays are arguments."""

    template: AbstractModel
    config: DecoderConfig
    dtype: Any
    stop_ids: tuple[int, ...]
    row_sharding: Callable[[int], jax.sharding.NamedSharding] | None = None
    kv_cache_dtype: KVCacheDtype | None = None
    returns_experts: bool = False

    @property
    def _of_kv(self) -> dict[str, Any]:
        return {"kv_cache_dtype": self.kv_cache_dtype}

    def prefill(
        self, shared: Leaves, per_model: list[Leaves], tokens: jax.Array, lengths: jax.Array, *, drafts: int
    ) -> Prefilled:
        """Computes prompts.

        Args:
            shared: Arrays shared by all models.
            per_model: Arrays of each model.
            tokens: Prompts `[U, P]`, padded on the left.
            lengths: Their tokens `[U]`.
            drafts: Drafts of a pass.
        """
        axes = {path: int(is_stacked(path)) for path in per_model[0]}
        joined = per_model[0]
        if len(per_model) > 1:  # after the axis of the scanned layers, so that the scan needs no transpose
            joined = {path: jnp.stack([leaves[path] for leaves in per_model], axis) for path, axis in axes.items()}
        prefilled = self._each(
            len(per_model), axes, partial(self._prefill, tokens, lengths, drafts), Weights(shared, joined)
        )
        return self._sharded(prefilled, len(per_model))

    def _prefill(self, tokens: jax.Array, lengths: jax.Array, drafts: int, decoder: Decoder) -> Prefilled:
        rows, size = tokens.shape
        positions = positions_left_padded(lengths, size)
        method, of_kv = AttentionMethod("chunked", sequence(size)), self._of_kv
        options = {"return_kv": self.kv_cache_dtype or True, "dtype": self.dtype, "method": method}
        with ROUTED_EXPERTS.recording(self.returns_experts):
            out = decoder(tokens, positions, **options)
        assert out.cache_update is not None  # return_kv
        cache = append(init_cache(self.config, rows, size, self.dtype, spare=drafts, **of_kv), out.cache_update)
        if not drafts:
            return Prefilled(cache, None, out.hidden[:, -1], out.routed_experts)
        # Of the last token the following one is not chosen yet: the slots replace its keys and values.
        following = jnp.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1)
        _, _, update = decoder.mtp_states(out.hidden, following, positions, **options)
        assert update is not None
        ahead = append(mtp_cache(self.config, rows, size, self.dtype, **of_kv), update)
        return Prefilled(cache, ahead, out.hidden[:, -1], out.routed_experts)

    def empty(
        self, *, models: int, slots: int, room: int, new_tokens: int, drafts: int, prefixes: tuple[int, int, int]
    ) -> Slots:
        """Empty slots.

        Args:
            models: Number of models.
            slots: Number of slots.
            room: Tokens of a slot's cache, prompt and padding included.
            new_tokens: Most tokens of a completion.
            drafts: Drafts of a pass.
            prefixes: Number of prefixes, most slots of each, and its tokens.
        """
        none, floats = jnp.zeros(slots, jnp.int32), jnp.zeros((slots, new_tokens), jnp.float32)
        (count, places, size), of_kv = prefixes, self._of_kv
        shared = empty_prefixes(self.config, count, places, slots, size, self.dtype, **of_kv)
        cache = init_cache(self.config, slots, room, self.dtype, drafts, shared, **of_kv)._replace(length=none)
        ahead = mtp_cache(self.config, slots, room, self.dtype, **of_kv)._replace(length=none) if drafts else None
        hidden = jnp.zeros((slots, 1 + drafts, self.config.embed_dim), self.dtype)
        update = init_cache(self.config, slots, 1 + drafts, self.dtype, **of_kv)
        empty_slots = Slots(
            cache,
            CacheUpdate(update.layers, update.positions),
            ahead,
            hidden,
            jnp.zeros((slots, drafts), jnp.int32),
            none,
            jnp.zeros((slots, 2), jnp.uint32),
            none,
            none,
            none == 0,
            floats.astype(jnp.int32),
            floats,
            floats,
            none,
            routed_experts(self.config, slots, new_tokens) if self.returns_experts else None,
        )
        return self._sharded(
            empty_slots if models == 1 else jax.tree.map(lambda part: jnp.stack([part] * models), empty_slots), models
        )

    def grown(self, state: Slots, *, models: int, slots: int, room: int, prefixes: tuple[int, int, int]) -> Slots:
        """The state with more slots, which are empty, or with larger caches; other arguments as of `empty`."""

        def pad(part: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
            sizes = zip(part.shape[-wanted.ndim :], wanted.shape, strict=True)
            before = ((0, 0),) * (part.ndim - wanted.ndim)
            return jnp.pad(part, (*before, *((0, new - old) for old, new in sizes)))

        sizes = {"room": room, "new_tokens": state.out.shape[-1], "drafts": state.drafts.shape[-1], "slots": slots}
        padded = jax.tree.map(pad, state, jax.eval_shape(partial(self.empty, **sizes, models=1, prefixes=prefixes)))
        return padded._replace(done=padded.done | (jnp.arange(slots) >= state.done.shape[-1]))

    def shrunk(self, slots: Slots, rows: jax.Array, prefixes: jax.Array, *, models: int) -> Slots:
        """The slots of these numbers with the prefixes of these numbers; the next fill says whose they are."""
        axis, shared = int(models > 1), slots.cache.prefixes

        def take(tree: TreeT, numbers: jax.Array) -> TreeT:
            return jax.tree.map(lambda part: jnp.take(part, numbers, axis), tree)

        fewer_slots = take(slots._replace(cache=slots.cache._replace(prefixes=None)), rows)
        if shared is not None:
            taken = take(shared._replace(members=shared.members._replace(place=rows)), prefixes)
            members = taken.members._replace(place=take(shared.members.place, rows))
            fewer_slots = fewer_slots._replace(
                cache=fewer_slots.cache._replace(prefixes=taken._replace(members=members))
            )
        return self._sharded(fewer_slots, models)

    def advance(
        self,
        weights: Weights,
        selection: Selection,
        slots: Slots,
        prompts: Prefilled,
        fill: Fill,
        passes: ArrayLike,
        *,
        models: int,
        is_greedy: bool,
        top_k: int | None,
    ) -> tuple[Slots, tuple[jax.Array, jax.Array]]:
        """Fills slots, and runs some passes, fewer if no slot has anything to do.

        Args:
            weights: Arrays of the models, with the stacked ones taken apart, see `unstacked`.
            selection: How tokens are chosen.
            slots: The state, without the new completions.
            prompts: The prompts of the new completions.
            fill: The new completions.
            passes: The number of passes, scalar.
            models: Number of models.
            is_greedy: Whether to take the argmax instead of sampling.
            top_k: See `Sampling`.

        Returns:
            The state, and of each slot the length of its completion and whether it has ended.
        """
        fill = jax.tree.map(jnp.asarray, fill)
        each = (lambda function: jax.vmap(function, (0, 0, None))) if models > 1 else lambda function: function

        def put(index: jax.Array, slots: Slots) -> Slots:
            names = ("slot", "prompt", "length", "numbers", "limit")
            return each(_filled)(slots, prompts, fill._replace(**{name: getattr(fill, name)[index] for name in names}))

        slots = each(_with_prefixes)(slots, prompts, fill)
        slots = jax.lax.fori_loop(0, fill.size, put, slots)
        axes, choose = dict.fromkeys(weights.per_model, 0), partial(select, selection, top_k, is_greedy=is_greedy)

        def step(turn: tuple[jax.Array, Slots]) -> tuple[jax.Array, Slots]:
            return turn[0] + 1, self._each(models, axes, partial(self._pass, choose), weights, turn[1])

        def goes_on(turn: tuple[jax.Array, Slots]) -> jax.Array:
            return (turn[0] < passes) & jnp.any(~turn[1].done)

        _, slots = jax.lax.while_loop(goes_on, step, (jnp.zeros((), jnp.int32), slots))
        return self._sharded(slots, models), (slots.length, slots.done)

    def _pass(self, choose: Callable[..., Draws], decoder: Decoder, slots: Slots) -> Slots:
        """Chooses from the hidden states, and computes the next ones."""
        drafts = slots.drafts.shape[-1]
        steps, base = jnp.arange(1 + drafts), slots.cache.length
        positions = slots.length[:, None] + steps  # [B, 1 + k] the positions of the chosen tokens in their completions
        chosen = choose(slots.numbers, decoder.logits(slots.hidden), positions)
        accepted = accept(chosen.ids, slots.drafts, ~slots.done, positions < slots.limit[:, None], self.stop_ids)
        row, column = jnp.arange(len(base))[:, None], jnp.where(accepted.is_in, positions, slots.out.shape[-1])
        out, logps, log_mass = (
            old.at[row, column].set(new, mode="drop")  # out of bounds: dropped
            for old, new in zip((slots.out, slots.logps, slots.log_mass), chosen, strict=True)
        )
        length = slots.length + accepted.added
        cache = rewind(append(slots.cache, slots.update), base + accepted.added)
        slots = slots._replace(
            cache=cache,
            length=length,
            done=slots.done | accepted.has_stopped | (length >= slots.limit),
            out=out,
            logps=logps,
            log_mass=log_mass,
            passes=slots.passes + (accepted.added > 0),
        )
        tokens = accepted.last[:, None]
        if slots.mtp_cache is not None:
            places = partial(_places, slots.padding)
            new, ahead = draft(
                decoder, partial(choose, slots.numbers), places, slots.hidden, chosen.ids, accepted, slots.mtp_cache,
                length, self.dtype, self.kv_cache_dtype or True,
            )  # fmt: skip
            slots, tokens = slots._replace(drafts=new, mtp_cache=ahead), jnp.concatenate([tokens, new], axis=1)
        places = _places(slots.padding, cache.length[:, None] + steps)
        with ROUTED_EXPERTS.recording(self.returns_experts):
            result = decoder(tokens, places, cache=cache, return_kv=self.kv_cache_dtype or True, dtype=self.dtype)
        if slots.routed_experts is not None and result.routed_experts is not None:
            # Of a slot without a new token nothing is written; drafts that are not accepted are written over.
            column = jnp.where(accepted.added[:, None] > 0, length[:, None] - 1 + steps, slots.out.shape[-1])
            experts = slots.routed_experts.at[row, column].set(result.routed_experts, mode="drop")
            slots = slots._replace(routed_experts=experts)
        assert result.cache_update is not None  # return_kv
        # How many of these tokens stay is known when the next ones are chosen.
        update = jax.tree.map(lambda new, old: new.astype(old.dtype), result.cache_update, slots.update)
        return slots._replace(update=update, hidden=result.hidden)

    def _sharded(self, arrays: TreeT, models: int) -> TreeT:
        """Arrays of rows, with each row on the devices of `row_sharding`."""
        if self.row_sharding is None:
            return arrays
        rows_of, before = self.row_sharding, () if models == 1 else (None,)

        def constrain(part: jax.Array) -> jax.Array:
            if part.ndim == len(before):  # no rows
                return part
            sharding = rows_of(part.shape[len(before)])
            spec = (*before, *sharding.spec, *(PartitionSpec.UNCONSTRAINED for _ in part.shape))[: part.ndim]
            return jax.lax.with_sharding_constraint(part, NamedSharding(sharding.mesh, PartitionSpec(*spec)))

        return jax.tree.map(constrain, arrays)

    def _each(
        self, models: int, axes: dict[str, int], function: Callable[..., TreeT], weights: Weights, *carried: Any
    ) -> TreeT:
        """What a function of a decoder and of a state gives for each model."""

        def one(per_model: dict[str, Any], *carried: Any) -> TreeT:
            decoder = self.template.merge({**weights.shared, **per_model})
            assert isinstance(decoder, Decoder)
            return function(decoder, *carried)

        if models == 1:
            return one(weights.per_model, *carried)
        return jax.vmap(one, (axes, *(0 for _ in carried)), axis_size=models)(weights.per_model, *carried)


def routed_experts(config: DecoderConfig, rows: int, tokens: int) -> jax.Array:
    """Experts of tokens that are not computed yet, `[rows, tokens, layers, k]`."""
    assert config.moe is not None  # the sampler refuses others
    shape = (rows, tokens, config.layers.num_layers, config.moe.num_experts_per_tok)
    return jnp.full(shape, -1, jnp.int16)


def unstacked(shared: Leaves, per_model: list[Leaves]) -> Weights:
    """Arrays for `DecodeLoop.advance`: of stacks of layers a tuple with an array for each, so that a pass copies none.

    Args:
        shared: Arrays shared by all models.
        per_model: Arrays of each model.
    """

    def per_period(path: str, leaf: jax.Array) -> Any:
        return tuple(leaf[index] for index in range(len(leaf))) if is_stacked(path) else leaf

    each = [{path: per_period(path, leaf) for path, leaf in leaves.items()} for leaves in per_model]
    joined = each[0] if len(each) == 1 else jax.tree.map(lambda *parts: jnp.stack(parts), *each)
    return Weights({path: per_period(path, leaf) for path, leaf in shared.items()}, joined)


def _with_prefixes(slots: Slots, prompts: Prefilled, fill: Fill) -> Slots:
    """The slots with new prefixes, and with the rows of all of them."""
    prefixes = slots.cache.prefixes
    if prefixes is None:
        return slots
    # The last token of a prompt is with each row's own.
    tokens = prompts.cache.positions.segment_ids.at[:, -1].set(0) > 0
    layers = tuple(None if old is None else new for old, new in zip(prefixes.layers, prompts.cache.layers, strict=True))

    def put(index: jax.Array, old: Any) -> Any:
        def one(old: jax.Array, new: jax.Array) -> jax.Array:
            row = jax.lax.dynamic_index_in_dim(new, jnp.asarray(fill.prefix_prompt)[index], 0)
            return jax.lax.dynamic_update_slice_in_dim(old, row.astype(old.dtype), jnp.asarray(fill.prefix)[index], 0)

        return jax.tree.map(one, old, (layers, tokens))

    updated = jax.lax.fori_loop(0, fill.prefixes, put, (prefixes.layers, prefixes.members.is_token))
    members = PrefixRows(jnp.asarray(fill.rows), jnp.asarray(fill.place), updated[1])
    return slots._replace(cache=slots.cache._replace(prefixes=Prefixes(updated[0], members)))


def _filled(slots: Slots, prompts: Prefilled, fill: Fill) -> Slots:
    """The slots with one new completion; its arrays in `fill` are scalars, `numbers` `[2]`."""
    size = prompts.cache.positions.positions.shape[1]

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_index_in_dim(new, fill.prompt, 0).astype(old.dtype)
        return jax.lax.dynamic_update_slice(old, row, (fill.slot, *(0 for _ in old.shape[1:])))

    def put_cache(old: Cache, new: Cache) -> Cache:
        spare = old.positions.positions.shape[1] - size
        positions = (jnp.pad(part, ((0, 0), (0, spare))) for part in new.positions)  # clears what was in the slot
        # The last token is one whose state the next token is chosen from.
        length = old.length.at[fill.slot].set(size - 1)
        prefixes = old.prefixes.layers if old.prefixes else (None,) * len(old.layers)
        layers = tuple(
            jax.tree.map(put, old, new) if prefix is None else old
            for old, new, prefix in zip(old.layers, new.layers, prefixes, strict=True)
        )
        return Cache(layers, TokenPositions(*map(put, old.positions, positions)), length, old.prefixes)

    def last(old: Any, new: Any) -> Any:
        """Of a layer the update that has the last token of a prompt alone, or the state after it."""
        if not isinstance(old, KV | IndexedKV):
            return new

        def keep(old: jax.Array, new: jax.Array) -> jax.Array:
            width = old.shape[2]
            if width < slots.hidden.shape[1]:  # a window that is shorter than the tokens of a pass
                return jnp.zeros((len(new), *old.shape[1:]), old.dtype)
            last_slot = (size - 1) % new.shape[2]
            return jnp.pad(new[:, :, last_slot : last_slot + 1], ((0, 0), (0, 0), (0, width - 1), (0, 0)))

        return jax.tree.map(keep, old, new)

    pairs = zip(slots.update.layers, prompts.cache.layers, strict=True)
    layers = jax.tree.map(put, slots.update.layers, tuple(last(old, new) for old, new in pairs))
    spare = slots.hidden.shape[1] - 1
    ends = TokenPositions(*(jnp.pad(part[:, -1:], ((0, 0), (0, spare))) for part in prompts.cache.positions))
    return slots._replace(
        cache=put_cache(slots.cache, prompts.cache),
        update=CacheUpdate(layers, TokenPositions(*map(put, slots.update.positions, ends))),
        mtp_cache=slots.mtp_cache and prompts.mtp_cache and put_cache(slots.mtp_cache, prompts.mtp_cache),
        hidden=put(slots.hidden, prompts.hidden[:, None]),
        drafts=slots.drafts.at[fill.slot].set(-1),
        padding=slots.padding.at[fill.slot].set(size - fill.length),
        numbers=slots.numbers.at[fill.slot].set(fill.numbers),
        limit=slots.limit.at[fill.slot].set(fill.limit),
        length=slots.length.at[fill.slot].set(0),
        done=slots.done.at[fill.slot].set(False),
        passes=slots.passes.at[fill.slot].set(-1),
    )


def _places(padding: jax.Array, slots: jax.Array) -> TokenPositions:
    """Positions of tokens in the slots `[B, T]` of caches that begin with padding `[B]`."""
    return TokenPositions(slots - padding[:, None], jnp.ones_like(slots), jnp.zeros_like(slots))
