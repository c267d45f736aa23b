"""The kinds of a decoder's layers, and the order in which they follow each other; no jax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, get_args

import attrs

from nnxdsl.models.config.checks import require_above_zero, require_choices

EntryT = TypeVar("EntryT")
LayerKind = Literal["local", "global", "shared_index", "linear", "nope", "none"]
"""A layer's token mixer: attention within a sliding window, to all tokens before, to those that the indexer of the last
global layer has selected (IndexShare), linear attention, attention to all tokens before without rotary positions
(NoPE), or none: a layer that is a feed-forward alone."""
Sublayers = Literal["both", "one"]


def local_then_global(layers: int) -> tuple[LayerKind, ...]:
    """A period of `layers` layers, of which only the last is global."""
    local: tuple[LayerKind, ...] = ("local",) * (layers - 1)
    return (*local, "global")


def period_of(layers: Sequence[EntryT]) -> tuple[EntryT, ...]:
    """The shortest period of these layers; its last repetition may be incomplete."""
    for length in range(1, len(layers)):
        if all(layer == layers[number % length] for number, layer in enumerate(layers)):
            return tuple(layers[:length])
    return tuple(layers)


def with_tail(layers: Sequence[EntryT]) -> tuple[tuple[EntryT, ...], tuple[EntryT, ...]]:
    """The period that these layers begin with, and the last layers, which do not go on with it.

    Of all such splits, it selects the one that compiles the fewest layers.

    Returns:
        `pattern` and `tail_pattern` of LayerPattern.
    """
    splits = [(len(layers), len(layers), 1)]  # (layers that are compiled, length of the period, whole periods)
    for length in range(1, len(layers) // 2 + 1):
        others = (layer for layer, kind in enumerate(layers) if kind != layers[layer % length])
        repeats = next(others, len(layers)) // length
        if repeats > 1:
            splits.append((length + len(layers) - repeats * length, length, repeats))
    _, length, repeats = min(splits)
    pattern, tail = tuple(layers[:length]), tuple(layers[repeats * length :])
    return pattern, () if tail == pattern[: len(tail)] else tail


def dense_fields(kinds: Sequence[LayerKind], dense: Sequence[bool]) -> dict[str, Any]:
    """The fields of DecoderConfig for layers with experts among layers without.

    Of all splits into leading layers and a repeated period, it selects the one that compiles the fewest layers. All
    leading layers are dense ones of the first kinds of the period, but where layers share a selection of tokens: there
    a period begins with the layer that selects, and what is before the first one leads.

    Args:
        kinds: of every layer.
        dense: whether each layer has the gated MLP; at least one has experts.

    Returns:
        `dense_layers`, `lead_pattern`, `pattern` and `dense_pattern` of LayerPattern, by their paths.
    """
    layers = list(zip(kinds, dense, strict=True))
    first, shares_index = list(dense).index(False), "shared_index" in kinds
    splits: list[tuple[int, int, tuple[tuple[LayerKind, bool], ...]]] = []
    for lead in range(len(layers) if shares_index else first + 1):
        period = period_of(layers[lead:])
        may_lead = kinds[lead] != "shared_index" and not any(dense[first:lead]) and not all(dense[lead:])
        if may_lead if shares_index else _begins(period, kinds[:lead]):
            splits.append((lead + len(period) + (len(layers) - lead) % len(period), lead, period))
    _, lead, period = min(splits, key=lambda split: split[:2])
    flags = tuple(is_dense for _, is_dense in period)
    return {
        "layers.dense_layers": min(lead, first),
        "layers.lead_pattern": () if lead <= first and _begins(period, kinds[:lead]) else tuple(kinds[:lead]),
        "layers.pattern": tuple(kind for kind, _ in period),
        "layers.dense_pattern": flags if any(flags) else (),
    }


def _begins(period: Sequence[tuple[LayerKind, bool]], kinds: Sequence[LayerKind]) -> bool:
    """Whether layers are of the kinds that a period begins with."""
    return all(kind == period[layer % len(period)][0] for layer, kind in enumerate(kinds))


@attrs.frozen(kw_only=True)
class LayerPattern:
    """The kinds of all layers.

    The first `dense_layers`, or those of `lead_pattern`, are the prefix. The layers after them repeat `pattern`; those
    of an incomplete last period are the suffix.

    Attributes:
        num_layers: all layers: prefix, whole periods, suffix, and those that share keys and values.
        pattern: the kinds of the layers of one period.
        lead_pattern: the kinds of the prefix, where these are not the first `dense_layers` of the pattern; empty where
            they are. Of its layers the first `dense_layers` are dense.
        tail_pattern: the kinds of the last layers, where these do not go on with the pattern; empty where they do.
        dense_layers: so many layers at the beginning have the gated MLP in place of experts; they are of the first
            kinds of `lead_pattern`, or of `pattern`.
        dense_pattern: for each layer of `pattern`, whether it has the gated MLP in place of experts; empty where none
            has.
        num_kv_shared_layers: the last layers, which read the keys and values of the last layer of their kind before
            them (Gemma 4 E2B): they have queries and an output projection alone.
        sublayers: "both": a layer is a token mixer and a feed-forward, each added to the residual stream; "one": it is
            one of them: a feed-forward in layers of the kind "none", a mixer in all others (Nemotron-H,
            arXiv:2504.03624).
    """

    num_layers: int
    pattern: tuple[LayerKind, ...] = ("global",)
    lead_pattern: tuple[LayerKind, ...] = ()
    tail_pattern: tuple[LayerKind, ...] = ()
    dense_layers: int = 0
    dense_pattern: tuple[bool, ...] = ()
    num_kv_shared_layers: int = 0
    sublayers: Sublayers = "both"

    def __attrs_post_init__(self) -> None:
        require_above_zero(self, "layers.", "num_layers")
        require_choices(self, "layers.", {"sublayers": get_args(Sublayers)})
        kinds = self.all_patterns
        if not self.pattern or not set(kinds) <= set(get_args(LayerKind)):
            raise ValueError(f"layers.pattern: expected one or more of {get_args(LayerKind)}, got {kinds!r}")
        if "none" in kinds and self.sublayers == "both":
            raise ValueError(f"layers.pattern={kinds}: layers without a mixer need sublayers='one'")
        if not 0 <= self.dense_layers <= self.num_layers:
            raise ValueError(f"layers.dense_layers={self.dense_layers}: expected from 0 to {self.num_layers} layers")
        if not 0 <= self.num_kv_shared_layers < self.num_layers:
            raise ValueError(
                f"layers.num_kv_shared_layers={self.num_kv_shared_layers}: expected less than {self.num_layers} layers"
            )
        flags = self.dense_pattern
        if flags and (len(flags) != self.period or set(flags) != {True, False}):
            raise ValueError(
                f"layers.dense_pattern={flags}: expected True or False for each layer of pattern={self.pattern}, "
                "at least one of each; or () where no layer of the pattern is dense"
            )
        if self.tail_pattern and (self.dense_pattern or self.num_kv_shared_layers):
            raise ValueError("layers.tail_pattern: not with dense_pattern or num_kv_shared_layers")
        if self.lead_pattern and (len(self.lead_pattern) < self.dense_layers or self.num_kv_shared_layers):
            raise ValueError(
                "layers.lead_pattern: expected a kind for each of dense_layers, and no num_kv_shared_layers"
            )
        rest = self.num_layers - len(self.prefix)
        if rest < 0:
            raise ValueError(f"layers.lead_pattern: expected at most {self.num_layers} layers")
        if len(self.tail_pattern) > rest:
            raise ValueError(f"layers.tail_pattern: expected at most {rest} layers")
        groups = (self.prefix, self.pattern, self.suffix)
        if any(group[:1] == ("shared_index",) for group in groups):
            raise ValueError(
                f"layers.pattern: expected that prefix, period and suffix begin with a global layer, whose selection "
                f"shared_index layers share; got {groups}"
            )
        if lacking := set(self.kv_shared) - set(self.kinds[: self.own_layers]):
            raise ValueError(
                f"layers.num_kv_shared_layers: no layer before the sharing ones is of the kinds {sorted(lacking)}"
            )

    @property
    def all_patterns(self) -> tuple[LayerKind, ...]:
        """The kinds of all patterns, also of layers that are beyond `num_layers`."""
        return self.lead_pattern + self.pattern + self.tail_pattern

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer."""
        return self.prefix + self.pattern * self.periods + self.suffix + self.kv_shared

    @property
    def dense(self) -> tuple[bool, ...]:
        """Whether each layer has the gated MLP in place of experts."""
        flags = self.dense_pattern or (False,) * self.period
        first = len(self.prefix)
        later = tuple(flags[layer % self.period] for layer in range(self.num_layers - first))
        return (True,) * self.dense_layers + (False,) * (first - self.dense_layers) + later

    @property
    def prefix(self) -> tuple[LayerKind, ...]:
        """The kinds of the prefix layers."""
        return self.lead_pattern or tuple(self.pattern[layer % self.period] for layer in range(self.dense_layers))

    @property
    def period(self) -> int:
        """Layers of one period."""
        return len(self.pattern)

    @property
    def periods(self) -> int:
        """Whole periods: the length of the scan over layers."""
        return (self.own_layers - len(self.prefix) - len(self.tail_pattern)) // self.period

    @property
    def suffix(self) -> tuple[LayerKind, ...]:
        """The kinds of the suffix layers."""
        later = self.own_layers - len(self.prefix) - len(self.tail_pattern)
        return self.pattern[: later % self.period] + self.tail_pattern

    @property
    def own_layers(self) -> int:
        """The number of layers with keys and values of their own, which come first."""
        return self.num_layers - self.num_kv_shared_layers

    @property
    def kv_shared(self) -> tuple[LayerKind, ...]:
        """The kinds of the layers that share keys and values; they go on with the pattern."""
        later = range(self.own_layers - self.dense_layers, self.num_layers - self.dense_layers)
        return tuple(self.pattern[layer % self.period] for layer in later)

    @property
    def kv_shared_pattern(self) -> tuple[LayerKind, ...]:
        """The shortest period that `kv_shared` repeats whole; empty without such layers."""
        layers = self.kv_shared
        lengths = (length for length in range(1, len(layers) + 1) if len(layers) % length == 0)
        return next((layers[:n] for n in lengths if layers[:n] * (len(layers) // n) == layers), ())

    @property
    def kv_shared_periods(self) -> int:
        """How often it repeats it: the length of the scan over these layers."""
        return len(self.kv_shared) // max(len(self.kv_shared_pattern), 1)

    def path(self, layer: int) -> tuple[str, int | None]:
        """The path of a layer's block, and its position in the stack; None outside of the stack."""
        later, sharing = layer - len(self.prefix), layer - self.own_layers
        if sharing >= 0:
            period = len(self.kv_shared_pattern)
            return f"kv_sharing.blocks.{sharing % period}", sharing // period
        if later < 0:
            return f"lead.blocks.{layer}", None
        if later < self.periods * self.period:
            return f"layers.blocks.{later % self.period}", later // self.period
        return f"tail.blocks.{later - self.periods * self.period}", None
