"""The interface of a kind of batch: its rows for the model, its loss inputs, and its lengths.

A kind is a numpy class of batch (`data/batch.py`) and a `BatchKind` in a file of this package, registered for it.
`program/forward.py` and `planning/flops.py` name no kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding

from nnxdsl.config.data import Data
from nnxdsl.data.batch import Batch
from nnxdsl.data.packing import Size
from nnxdsl.errors import NotRegisteredError
from nnxdsl.losses.base import WeightedMean
from nnxdsl.losses.lm_head.teacher_top_k import TeacherTopK
from nnxdsl.losses.lm_head.token_stats import TokenStats
from nnxdsl.models.attention.positions import TokenPositions
from nnxdsl.models.attention.row_layout import RowLayout

BatchT = TypeVar("BatchT", bound=Any)

LossInputs = Any
"""Inputs of a loss from one model, a NamedTuple of arrays as a head gives it: `PairLogps`, `TokenStats`, ..."""


@attrs.frozen
class Lengths:
    """Tokens of a row of a batch; zero for a third party's data of unknown lengths.

    Attributes:
        trunk: Tokens of one row that go through the layers.
        head: Tokens of one row that need a log-probability.
    """

    trunk: int
    head: int


class Rows(NamedTuple):
    """A batch as rows of tokens.

    Attributes:
        tokens: `[B, T]` int32.
        positions: Positions and segments of the tokens.
        layout: The layout that all rows have in common.
        routed_experts: Experts that routers replay, `[B, T, layers, k]`, see `Decoder`; None for none.
    """

    tokens: jax.Array
    positions: TokenPositions
    layout: RowLayout
    routed_experts: jax.Array | None = None


class Targets(NamedTuple):
    """Tokens that need a log-probability.

    Attributes:
        hidden: The final hidden states that predict them, `[B, N, D]`.
        ids: Token ids, `[B, N]`.
        mask: Which of them count, `[B, N]`.
    """

    hidden: jax.Array
    ids: jax.Array
    mask: jax.Array


@attrs.frozen
class PairOptions:
    """Options of the log-probabilities of completions.

    Attributes:
        ld_alpha: LD-DPO's weight of tokens beyond the length of the shorter completion.
        wpo_logps: Computes WPO's log-weight of each target `[B, N]`; None where no loss reads it.
    """

    ld_alpha: float = 1.0
    wpo_logps: Callable[[], jax.Array] | None = None


@attrs.frozen
class BatchLengths:
    """Numbers of tokens of a batch, without rows of weight 0.

    Attributes:
        shared: [B] tokens of a row that all its branches see: the prompt of a pair.
        branches: [B] each, tokens of a row's branches, which do not see each other: both completions of a pair.
        targets: Tokens of all rows that need a log-probability.
        has_reference_logps: Whether the batch carries the reference's log-probabilities.
    """

    shared: npt.NDArray[np.int64]
    branches: tuple[npt.NDArray[np.int64], ...]
    targets: int
    has_reference_logps: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of all rows that go through the layers."""
        return int(sum(np.sum(lengths) for lengths in (self.shared, *self.branches)))

    @property
    def mtp_targets(self) -> int:
        """About the number of targets of multi-token prediction: for pairs, those of the first branch."""
        return self.targets if len(self.branches) == 1 else int(np.sum(self.branches[0]))

    def attended_pairs(self, window: int | None, *, is_chunked: bool = False) -> int:
        """Pairs (token, token that it attends to) of all rows, in a layer with this window, or these chunks."""
        count = functools.partial(attended_pairs, window=window, is_chunked=is_chunked)
        total = sum(np.sum(count(self.shared + branch)) for branch in self.branches)
        return int(total - (len(self.branches) - 1) * np.sum(count(self.shared)))


@attrs.frozen
class AbstractArrays:
    """Arrays of an abstract batch: shapes and dtypes without values, for plans and ahead-of-time compilation.

    Attributes:
        count: Rows of a batch, or blocks of a packed one: the first dimension of all its arrays.
        sharding: Of all its arrays; None for none.
        has_ref_logps: Whether the batch carries the reference's log-probabilities.
        has_old_logps: Whether rollouts carry the log-probabilities of sampling.
        num_generations: Completions of a row of a batch of groups.
        teacher_top_k: How many of a teacher's most likely tokens the batch has for each target; None for none.
        has_entropy_mask: Whether rollouts say which tokens have the highest entropy.
        served_teachers: How many teachers behind servers give log-probabilities that they carry.
        routed_experts: Numbers of layers and of experts of a token, where rollouts have these; else None.
    """

    count: int
    sharding: Sharding | None = None
    has_ref_logps: bool = False
    has_old_logps: bool = False
    num_generations: int = 1
    teacher_top_k: int | None = None
    has_entropy_mask: bool = False
    served_teachers: int = 0
    routed_experts: tuple[int, int] | None = None

    def array(self, *shape: int, dtype: Any = jnp.int32) -> Any:
        """An array `[count, *shape]` without values."""
        return jax.ShapeDtypeStruct((self.count, *shape), dtype, sharding=self.sharding)

    def experts(self, tokens: int) -> Any:
        """Experts of so many tokens a row, without values; None where there are none."""
        return None if self.routed_experts is None else self.array(tokens, *self.routed_experts, dtype=jnp.int16)

    def has_teacher_prompts(self, data: Data) -> bool:
        """Whether batches of such data have prompts of their own for a teacher; one behind a server has read them."""
        return data.has_teacher_prompts and not self.served_teachers

    def top_k(self, targets: int) -> tuple[Any, ...]:
        """A teacher's top-k token ids and log-probabilities of so many targets a row; () without a teacher."""
        if self.teacher_top_k is None:
            return ()
        k = self.teacher_top_k
        return self.array(targets, k), self.array(targets, k + 1, dtype=jnp.float32)


class BatchKind(Generic[BatchT]):
    """One kind of batch; methods for what a kind does not have keep the default."""

    def rows(self, batch: BatchT) -> Rows:
        """The tokens as rows for the model."""
        raise NotImplementedError

    def targets(self, hidden: jax.Array, batch: BatchT) -> Targets:
        """The targets and the states that predict them, of final hidden states `[B, T, D]`."""
        raise NotImplementedError

    def last_states(self, hidden: jax.Array, batch: BatchT) -> jax.Array:
        """The final hidden states of the last token of both completions of each pair, `[B, 2, D]`.

        Raises:
            NotImplementedError: the rows are no pairs.
        """
        raise NotImplementedError

    def mtp_positions(self, positions: TokenPositions) -> TokenPositions:
        """The positions of the rows for the MTP layer, whose state depends on the next token."""
        return positions

    def mtp_targets(self, hidden: jax.Array, batch: BatchT) -> Targets | None:
        """The targets of multi-token prediction (MTP) and the states that predict them; None where there are none."""
        return None

    def loss_inputs(self, stats: TokenStats, batch: BatchT, options: PairOptions) -> tuple[LossInputs, TokenStats]:
        """The inputs of the loss, and the statistics of which token metrics are means."""
        raise NotImplementedError

    def logp_metrics(self, inputs: LossInputs, weight: jax.Array) -> dict[str, WeightedMean]:
        """Metrics of log-probabilities, from the policy's loss inputs and the weight of each row."""
        return {}

    def target_mask(self, batch: BatchT) -> jax.Array:
        """Which targets count, `[B, N]`."""
        raise NotImplementedError

    def mtp_mask(self, batch: BatchT) -> jax.Array:
        """Which targets of `mtp_targets` count: those with two tokens before them, in rows of nonzero weight."""
        raise NotImplementedError

    def reference_logps(self, batch: BatchT) -> LossInputs | None:
        """The reference's log-probabilities in the batch; None without."""
        return None

    def with_reference_logps(self, batch: BatchT, reference: LossInputs) -> BatchT:
        """The batch with the reference's log-probabilities.

        Raises:
            ValueError: this kind of batch cannot hold them.
        """
        raise ValueError("reference log-probs can only be cached for preference pairs")

    def teacher_top_k(self, batch: BatchT) -> TeacherTopK | None:
        """The teacher's top-k of each target in the batch; None without."""
        return None

    def with_teacher_top_k(self, batch: BatchT, top_k: TeacherTopK) -> BatchT:
        """The batch with the teacher's top-k.

        Raises:
            ValueError: this kind of batch cannot hold it.
        """
        raise ValueError("a teacher's top-k can only be cached for sequences")

    def for_teacher(self, batch: BatchT) -> BatchT:
        """The batch with the teacher's prompts in place of the policy's, where it has such prompts; same targets."""
        return batch

    def without_cached(self, batch: BatchT) -> BatchT:
        """The batch without reference log-probabilities and teacher's top-k, so that one program serves both."""
        return batch

    def lengths(self, batch: BatchT) -> BatchLengths:
        """Numbers of tokens of a batch in numpy."""
        raise NotImplementedError

    def padded(self, batch: BatchT) -> tuple[int, Lengths]:
        """Rows of a batch and the tokens of each, padding included."""
        raise NotImplementedError

    def abstract(self, data: Data, arrays: AbstractArrays, size: Size | None = None) -> BatchT:
        """The largest batch of such data, without values.

        Args:
            data: Source of the rows; `data.max_lengths()` bounds them.
            arrays: Makes the arrays.
            size: Of a packed batch.
        """
        raise NotImplementedError


_KINDS: dict[type, BatchKind[Any]] = {}
_KINDS_OF_DATA: dict[tuple[str, bool], BatchKind[Any]] = {}


def register(batch: type[BatchT], kind: BatchKind[BatchT], *batch_kinds: str, is_packed: bool = False) -> None:
    """Register a class of batch for training steps and plans.

    Args:
        batch: The class.
        kind: Its kind.
        batch_kinds: The `Data.batch_kind` of data whose batches are of this class.
        is_packed: Whether these are its packed batches, or those with a row of the data in each row.
    """
    _KINDS[batch] = kind
    _KINDS_OF_DATA.update({(name, is_packed): kind for name in batch_kinds})


def kind_of_data(data: Data, *, is_packed: bool = False) -> BatchKind[Any] | None:
    """The kind of the batches of such data; None where no kind is registered, or nothing bounds its rows."""
    return _KINDS_OF_DATA.get((data.batch_kind, is_packed)) if data.length_fields else None


def kind_of(batch: Batch) -> BatchKind[Any]:
    """The kind of a batch.

    Raises:
        NotRegisteredError: its class is not registered.
    """
    return kind_of_class(type(batch))


def kind_of_class(cls: type) -> BatchKind[Any]:
    """The kind of the batches of a class.

    Raises:
        NotRegisteredError: it is not registered.
    """
    kind = _KINDS.get(cls)
    if kind is None:
        name = cls.__qualname__
        raise NotRegisteredError(
            f"no kind of batch is registered for {name}; write\n"
            f"  from nnxdsl.program import batches\n"
            f"  batches.register({name}, MyKind())"
        )
    return kind


def gather_sources(hidden: jax.Array, tokens: jax.Array, source: jax.Array) -> jax.Array:
    """States `[G, C, D]` at the slots `source` `[G, C]` of blocks of packed rows `tokens` `[G, r, T]`."""
    hidden = hidden.reshape(len(tokens), -1, hidden.shape[-1])  # [G, r * T, D]
    return jnp.take_along_axis(hidden, source[:, :, None], axis=1)


def weighted_stats(stats: TokenStats, weight: jax.Array) -> TokenStats:
    """Statistics `[B, N]` whose mask leaves out rows of weight 0; `weight` is `[B]`."""
    return stats._replace(mask=stats.mask * weight[:, None])


def real_lengths(lengths: npt.NDArray[np.integer], weight: Any) -> npt.NDArray[np.int64]:
    """The lengths of rows whose weight is not 0."""
    return lengths[np.asarray(weight) > 0].astype(np.int64)


def attended_pairs(
    tokens: npt.NDArray[np.int64], window: int | None, *, is_chunked: bool = False
) -> npt.NDArray[np.int64]:
    """Pairs (token, token that it attends to) of causal sequences of so many tokens, in the window or in its chunks."""
    if is_chunked and window is not None:
        chunks, rest = tokens // window, tokens % window
        return chunks * (window * (window + 1) // 2) + rest * (rest + 1) // 2
    inside = tokens if window is None else np.minimum(tokens, window)
    return inside * (inside + 1) // 2 + (tokens - inside) * inside
