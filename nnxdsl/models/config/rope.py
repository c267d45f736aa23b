"""Rotary positions of a decoder, and how they are scaled to longer contexts; no jax."""

from __future__ import annotations

import math
from typing import Literal, get_args

import attrs

from nnxdsl.models.config.checks import require_above_zero

PartialRotary = Literal["first", "proportional"]


@attrs.frozen(kw_only=True)
class Llama3RopeScaling:
    """RoPE scaling of Llama 3 (arXiv:2407.21783), transformers' rope_type "llama3": low frequencies are divided.

    A frequency is classified by rotations over `original_max_position_embeddings` positions. Below `low_freq_factor`
    rotations it is divided by `Rope.factor`, above `high_freq_factor` it is unchanged, and between the two it is
    interpolated linearly in the number of rotations. The two may be equal (Llama 4 Scout).

    Attributes:
        low_freq_factor: rotations below which a frequency is divided.
        high_freq_factor: rotations above which it is unchanged.
        original_max_position_embeddings: context length before the extension.
    """

    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __attrs_post_init__(self) -> None:
        low, high = ("low_freq_factor", self.low_freq_factor), ("high_freq_factor", self.high_freq_factor)
        if self.low_freq_factor != self.high_freq_factor or not self.low_freq_factor > 0:
            _check_scaling(low, high, self.original_max_position_embeddings)
        elif not self.original_max_position_embeddings > 0:
            raise ValueError(
                f"original_max_position_embeddings must be above 0, got {self.original_max_position_embeddings}"
            )


@attrs.frozen(kw_only=True)
class Yarn:
    """RoPE scaling of YaRN (Peng et al. 2023, arXiv:2309.00071), transformers' rope_type "yarn".

    As `Llama3RopeScaling`, but interpolated linearly in the frequency's index, not in its rotations.

    Attributes:
        beta_slow: rotations below which a frequency is divided.
        beta_fast: rotations above which it is unchanged.
        original_max_position_embeddings: context length before the extension.
        attention_factor: factor of sines and cosines, which sharpens attention.
        truncate: whether the first and last interpolated index are rounded.
    """

    beta_slow: float = 1.0
    beta_fast: float = 32.0
    original_max_position_embeddings: int
    attention_factor: float
    truncate: bool = True

    def __attrs_post_init__(self) -> None:
        if self.beta_slow != self.beta_fast:  # equal ones are a step between two frequencies (Kimi K2)
            _check_scaling(
                ("beta_slow", self.beta_slow), ("beta_fast", self.beta_fast), self.original_max_position_embeddings
            )
        if not self.attention_factor > 0:
            raise ValueError(f"attention_factor must be above 0, got {self.attention_factor}")


@attrs.frozen(kw_only=True)
class LongRope:
    """RoPE scaling of LongRoPE (Ding et al. 2024, arXiv:2402.13753), transformers' rope_type "longrope".

    Each frequency is divided by a factor of its own. Sequences of more than `original_max_position_embeddings` tokens
    have other factors than shorter ones; `Rope.factor` has no effect.

    Attributes:
        short_factor: of each frequency in a short sequence.
        long_factor: of each frequency in a long sequence.
        original_max_position_embeddings: context length before the extension.
        attention_factor: factor of sines and cosines in all sequences, which sharpens attention.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float

    def __attrs_post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):
            if not all(0 < value < math.inf for value in getattr(self, name)):
                raise ValueError(f"{name}: expected numbers above 0, got {getattr(self, name)}")
        if not self.original_max_position_embeddings > 1:
            raise ValueError(
                f"original_max_position_embeddings must be above 1, got {self.original_max_position_embeddings}"
            )
        if not self.attention_factor > 0:
            raise ValueError(f"attention_factor must be above 0, got {self.attention_factor}")


@attrs.frozen(kw_only=True)
class DynamicNTK:
    """RoPE scaling by a base that grows with the sequence's length, transformers' rope_type "dynamic".

    A sequence of L tokens, above the original length, has the base
    `theta * (factor * L / original - (factor - 1)) ** (d / (d - 2))`, where d is the rotary width of a head
    (bloc97 and emozilla, 2023; arXiv:2309.00071, section 3.3).

    Attributes:
        original_max_position_embeddings: up to this length the base is `Rope.theta`.
    """

    original_max_position_embeddings: int

    def __attrs_post_init__(self) -> None:
        if not self.original_max_position_embeddings > 0:
            raise ValueError(
                f"original_max_position_embeddings must be above 0, got {self.original_max_position_embeddings}"
            )


def _check_scaling(low: tuple[str, float], high: tuple[str, float], length: int) -> None:
    if not 0 < low[1] < high[1]:
        raise ValueError(f"expected 0 < {low[0]} < {high[0]}, got {low[0]}={low[1]} and {high[0]}={high[1]}")
    if not length > 0:
        raise ValueError(f"original_max_position_embeddings must be above 0, got {length}")


@attrs.frozen(kw_only=True)
class Rope:
    """Rotary position embeddings of one kind of layers (Su et al., arXiv:2104.09864), with transformers' names.

    Attributes:
        theta: base wavelength.
        factor: frequencies are divided by it.
        scaling: which frequencies `factor` applies to; None for all of them (linear scaling).
        partial_rotary_factor: fraction of a head's dimensions that is rotated; 0 for no rotary positions.
        partial: which those are: "first": the first, as if they were a head of their own; "proportional": the shortest
            wavelengths of the whole head, the others being infinite (Gemma 4).
        interleaved: whether pairs of neighbours are rotated (Llama 4); else the two halves. MLA has a field of its own.
    """

    theta: float
    factor: float = 1.0
    scaling: Llama3RopeScaling | Yarn | LongRope | DynamicNTK | None = None
    partial_rotary_factor: float = 1.0
    partial: PartialRotary = "first"
    interleaved: bool = False

    def __attrs_post_init__(self) -> None:
        require_above_zero(self, "rope: ", "theta", "factor")
        if not self.partial_rotary_factor >= 0:
            raise ValueError(f"rope: partial_rotary_factor must be 0 or above, got {self.partial_rotary_factor}")
        if self.partial not in get_args(PartialRotary):
            raise ValueError(f"rope: partial: expected one of {get_args(PartialRotary)}, got {self.partial!r}")

    def require_width(self, head_dim: int) -> None:
        """Checks that heads of this width can be rotated so.

        Raises:
            ValueError: their rotary width is odd, or does not suit the scaling.
        """
        width = head_dim * self.partial_rotary_factor
        if self.partial == "first" and width % 2:
            raise ValueError(
                f"head_dim={head_dim}: partial_rotary_factor={self.partial_rotary_factor} gives no even width"
            )
        if isinstance(self.scaling, DynamicNTK) and width <= 2:
            raise ValueError(f"head_dim={head_dim}: dynamic RoPE needs a rotary width above 2")
        if isinstance(self.scaling, LongRope):
            for name in ("short_factor", "long_factor"):
                if (count := len(getattr(self.scaling, name))) != int(width) // 2:
                    raise ValueError(f"{name}: expected {int(width) // 2} numbers, got {count}")
