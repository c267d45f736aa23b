"""A model for people who want no training: a Hub directory as something that gives logits and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from nnxdsl.config.tokenizer import Auto, Tokenizer
from nnxdsl.data.tokenizers.base import TokenizerBase, open_tokenizer
from nnxdsl.data.tokenizers.encode import Encoder, stop_ids
from nnxdsl.errors import WeightsError
from nnxdsl.formats.hf import HubReader
from nnxdsl.formats.hf_download import locate
from nnxdsl.generate.sampler import Sampler
from nnxdsl.generate.sampling import Sampling
from nnxdsl.models.attention.positions import TokenPositions
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.params import AbstractModel, abstract
from nnxdsl.program.init import place

Prompt = str | Sequence[Mapping[str, str]]
"""A text to go on with, or a chat's messages `{"role": ..., "content": ...}` to answer."""


class Pretrained:
    """A decoder with its weights and its tokenizer; made by `load`.

    Attributes:
        config: the decoder's numbers.
        leaves: its arrays by dotted path, as in a run's layout.
        dtype: of activations, and of the arrays.
    """

    def __init__(
        self,
        template: AbstractModel,
        config: DecoderConfig,
        leaves: Mapping[str, jax.Array],
        dtype: DTypeLike,
        directory: Path,
        tokenizer: Tokenizer,
    ) -> None:
        self.config = config
        self.leaves = dict(leaves)
        self.dtype = jnp.dtype(dtype)
        self._template, self._directory, self._spec = template, directory, tokenizer
        self._tokenizer: TokenizerBase | None = None
        self._sampler: Sampler | None = None
        self._logits = jax.jit(self._forward)

    @property
    def tokenizer(self) -> TokenizerBase:
        """What turns text into ids; opened when it is first used, so that a directory without one still has logits.

        Raises:
            DataError: there is none, or it cannot be read.
        """
        if self._tokenizer is None:
            self._tokenizer = open_tokenizer(self._spec, self._directory)
        return self._tokenizer

    def __call__(self, tokens: ArrayLike, attention_mask: ArrayLike | None = None) -> jax.Array:
        """Logits of the token after each token.

        Args:
            tokens: ids `[B, T]`.
            attention_mask: `[B, T]`, 1 for tokens and 0 for padding, which may stand on either side; None for no
                padding.

        Returns:
            `[B, T, V]` float32; what stands at padding has no meaning.

        Raises:
            ValueError: shapes that do not fit, ids outside the vocabulary, or rows longer than the model reads.
        """
        ids = np.asarray(tokens)
        mask = np.ones_like(ids) if attention_mask is None else np.asarray(attention_mask)
        if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"tokens: expected integers [B, T], got {ids.dtype} of shape {ids.shape}")
        if mask.shape != ids.shape:
            raise ValueError(f"attention_mask: expected shape {ids.shape}, got {mask.shape}")
        real = mask.astype(bool)
        if real.any() and not (ids[real].min() >= 0 and ids[real].max() < self.config.vocab_size):
            raise ValueError(f"tokens: expected ids from 0 to {self.config.vocab_size - 1:,}")
        if real.sum(1).max(initial=0) > self.config.max_length:
            raise ValueError(f"tokens: {real.sum(1).max()} tokens in a row, this model reads {self.config.max_length}")
        position = np.maximum(np.cumsum(real, axis=1) - 1, 0).astype(np.int32)
        places = TokenPositions(*map(jnp.asarray, (position, real.astype(np.int32), np.zeros_like(position))))
        return self._logits(self.leaves, jnp.asarray(np.where(real, ids, 0), jnp.int32), places)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> list[str]:
        """Continuations of texts, and answers to chats, all in one batch.

        Args:
            prompts: each a text, or a chat's messages, which go through the tokenizer's chat template.
            max_new_tokens: the longest answer; it ends before that at a stop token.
            temperature: 0 for the likeliest token, else logits are divided by it.
            top_k: only so many of the likeliest tokens may be drawn.
            top_p: only the likeliest tokens whose probabilities sum to it may be drawn.
            seed: of the draws.

        Returns:
            A text for each prompt.

        Raises:
            DataError: no tokenizer, no chat template, or a prompt that cannot be put into tokens.
            ValueError: settings out of their range.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts: expected a list of prompts, got one text; write [text]")
        encoder = Encoder(self.tokenizer)
        ids = [encoder.prompt(each if isinstance(each, str) else [dict(turn) for turn in each]) for each in prompts]
        if self._sampler is None:
            self._sampler = Sampler(self._template, self.config, self.dtype, stop_ids(self.tokenizer))
        sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed)
        return [self.tokenizer.decode(answer) for answer in self._sampler(self.leaves, ids, sampling)]

    def _forward(self, leaves: dict[str, jax.Array], tokens: jax.Array, places: TokenPositions) -> jax.Array:
        decoder: Any = self._template.merge(leaves)
        return decoder.logits(decoder(tokens, places, dtype=self.dtype).hidden)


def load(
    directory: str | Path,
    *,
    dtype: DTypeLike = jnp.float32,
    tokenizer: Tokenizer | None = None,
    allow_non_finite: bool = False,
) -> Pretrained:
    """A model from a directory in the Hub's format, or by a repository's name on the Hub.

    >>> model = nnxdsl.load("google/gemma-3-1b-it")                             # doctest: +SKIP
    >>> model.generate([[{"role": "user", "content": "What is DPO?"}]])         # doctest: +SKIP

    Args:
        directory: holds `config.json` and safetensors, as `nnxdsl export` writes them and the Hub has them.
        dtype: of arrays and activations.
        tokenizer: what turns text into ids; None for the one beside the weights.
        allow_non_finite: whether weights that hold NaN or infinity are loaded as they are.

    Returns:
        The model, its arrays on the default device; one tensor at a time is read, so the host holds no second copy.

    Raises:
        WeightsError: a file that is missing, damaged or not understood, every tensor that does not fit, or those that
            hold NaN or infinity.
    """
    found = locate(str(directory))
    reader = HubReader(found, allow_non_finite=allow_non_finite)
    config = attrs.evolve(reader.config, mtp_layers=0)  # no answer needs it
    template = abstract(lambda: Decoder(config, rngs=nnx.Rngs(0), param_dtype=dtype))
    if problems := reader.check(template):
        raise WeightsError("\n  ".join([f"{found}: {len(problems)} tensors do not fit:", *map(str, problems)]))
    here = jnp.zeros(()).sharding
    leaves = {path: place(reader.mapped(path), dtype, here) for path in template.variables}
    return Pretrained(template, config, leaves, dtype, found, tokenizer or Auto())
