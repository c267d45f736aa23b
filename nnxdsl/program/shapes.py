"""The longest batches that an experiment's data may yield, before a row of it is read."""

from __future__ import annotations

from typing import Any

import attrs
import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from nnxdsl.data.batch import PairBatch, SequenceBatch
from nnxdsl.spec.data import Conversations, Data, Preferences, Text
from nnxdsl.spec.errors import NotRegisteredError


@attrs.frozen
class Lengths:
    """Longest row of the data in tokens; zero where nothing is known of a third party's data.

    Attributes:
        trunk: Tokens of one row that go through the layers.
        head: Tokens of one row that need a log-probability.
    """

    trunk: int
    head: int


def lengths(data: Data) -> Lengths:
    """The longest rows that an experiment's data may yield."""
    match data:
        case Preferences():
            return Lengths(data.max_prompt_length + 2 * data.max_response_length, 2 * data.max_response_length)
        case Conversations() | Text():
            return Lengths(data.max_length, data.max_length - 1)
        case _:
            return Lengths(0, 0)


def abstract_batch(data: Data, rows: int, sharding: Sharding | None = None) -> PairBatch | SequenceBatch:
    """The largest batch of an experiment's data, without its arrays.

    Args:
        data: Where rows come from.
        rows: Of the batch.
        sharding: Of all its arrays.

    Raises:
        NotRegisteredError: nothing is known of this data's lengths.
    """

    def array(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=sharding)

    weight = array(dtype=jnp.float32)
    match data:
        case Preferences(max_prompt_length=prompt, max_response_length=response):
            tokens = (array(prompt), array(response), array(response))
            return PairBatch(*tokens, array(), array(), array(), weight)
        case Conversations(max_length=length) | Text(max_length=length):
            return SequenceBatch(array(length), array(), array(length, dtype=jnp.bool_), weight)
        case _:
            raise NotRegisteredError(
                f"{type(data).__qualname__} says nothing of its lengths, so its program cannot be compiled ahead"
            )
