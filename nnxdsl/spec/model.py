"""Which network is trained, and from what. The networks themselves are in `nnxdsl/models/`."""

# ruff: noqa: RUF009 - specs cannot change, so a default may be shared

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import attrs

from nnxdsl.spec.base import Spec
from nnxdsl.spec.tokenizer import Auto, Tokenizer
from nnxdsl.spec.weights import Random, Weights

if TYPE_CHECKING:
    from nnxdsl.spec import model as members


@attrs.frozen(kw_only=True)
class Model(Spec):
    """A language model: its architecture, its first weights and its tokenizer.

    Attributes:
        weights: Where the first parameters come from.
        tokenizer: What turns text into ids.
    """

    Gemma3: ClassVar[type[members.Gemma3]]
    Llama3: ClassVar[type[members.Llama3]]

    weights: Weights = Random()
    tokenizer: Tokenizer = Auto()


@attrs.frozen(kw_only=True)
class Gemma3(Model):
    """Gemma 3, text only (Gemma Team 2025, arXiv:2503.19786).

    Attributes:
        size: Published size, or "tiny": 6 layers, 1.2 million parameters, for a laptop.
        weights: Where the first parameters come from.
        tokenizer: What turns text into ids.
    """

    size: Literal["tiny", "270m", "1b", "4b", "12b", "27b"] = attrs.field(kw_only=False)


@attrs.frozen(kw_only=True)
class Llama3(Model):
    """Llama 3, text only (Llama Team 2024, arXiv:2407.21783): "1b" and "3b" are Llama 3.2, the larger ones Llama 3.1.

    Attributes:
        size: Published size, or "tiny": 5 layers, 1.1 million parameters, for a laptop.
        weights: Where the first parameters come from.
        tokenizer: What turns text into ids.
    """

    size: Literal["tiny", "1b", "3b", "8b", "70b", "405b"] = attrs.field(kw_only=False)
