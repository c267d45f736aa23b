"""Inference with a pretrained model from a Hugging Face Hub directory: logits and text, without an experiment."""

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
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.tokenizers.base import TokenizerBase, mismatch, open_tokenizer
from nnxdsl.data.tokenizers.encode import Encoder, stop_ids
from nnxdsl.errors import DataError, WeightsError
from nnxdsl.formats.hf import HubReader
from nnxdsl.formats.hf_download import locate
from nnxdsl.generate.sampler import Sampler
from nnxdsl.generate.sampling import Sampling
from nnxdsl.models.attention.positions import TokenPositions
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.params import AbstractModel, abstract
from nnxdsl.program import xla_options
from nnxdsl.program.init import place

Prompt = str | Sequence[Mapping[str, str]]
"""A text to continue, or chat messages `{"role": ..., "content": ...}` to answer."""


class Pretrained:
    """A decoder with its weights and tokenizer; created by `load`.

    Attributes:
        config: configuration of the decoder.
        leaves: arrays by dotted path, named as in a run's layout.
        dtype: dtype of activations and arrays.
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
        self._logits = xla_options.jit(self._forward)

    @property
    def tokenizer(self) -> TokenizerBase:
        """Tokenizer, opened on first use, so that a directory without one can still compute logits.

        Raises:
            DataError: the tokenizer is missing or cannot be read, or is not that of the weights.
        """
        if self._tokenizer is None:
            tokenizer = open_tokenizer(self._spec, self._directory)
            if message := mismatch(self._spec, tokenizer, self._directory, self.config.vocab_size):
                raise DataError(f"{self._directory}: {message}")
            self._tokenizer = tokenizer
        return self._tokenizer

    def __call__(self, tokens: ArrayLike, attention_mask: ArrayLike | None = None) -> jax.Array:
        """Compute next-token logits at each position.

        Args:
            tokens: token ids `[B, T]`.
            attention_mask: `[B, T]`, 1 for tokens and 0 for padding, on the left or on the right; None for no padding.

        Returns:
            Logits `[B, T, V]`, float32; undefined at padding.

        Raises:
            ValueError: mismatched shapes, ids outside the vocabulary, or rows longer than the model's `max_length`.
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
            raise ValueError(f"tokens: {real.sum(1).max()} tokens in a row exceed max_length={self.config.max_length}")
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
        num_speculative_tokens: int = 0,
        template_args: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Generate completions of texts and chats in one batch.

        Args:
            prompts: texts, or lists of chat messages, which are formatted with the tokenizer's chat template; a last
                message of the assistant is continued.
            max_new_tokens: maximum number of new tokens; generation ends earlier at a stop token.
            temperature: sampling temperature; 0 for greedy decoding.
            top_k: sample from the k most likely tokens only.
            top_p: sample from the smallest set of most likely tokens whose probabilities sum to at least `top_p`.
            seed: random seed.
            num_speculative_tokens: tokens that the multi-token-prediction (MTP) layer drafts for each pass of the
                model: fewer passes for the same completions. It needs `load(..., mtp=True)`; 0 for none.
            template_args: further arguments of the chat template, as `{"enable_thinking": False}`.

        Returns:
            One completion per prompt.

        Raises:
            DataError: no tokenizer, no chat template, or a prompt that cannot be tokenized.
            ValueError: a setting is out of range.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts: expected a list of prompts, got one text; write [text]")
        encoder = Encoder(self.tokenizer, template_args=template_args)
        ids = [_encode(encoder, index, prompt) for index, prompt in enumerate(prompts)]
        if self._sampler is None:
            self._sampler = Sampler(self._template, self.config, self.dtype, stop_ids(self.tokenizer))
        sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed, num_speculative_tokens)
        return [self.tokenizer.decode(answer) for answer in self._sampler(self.leaves, ids, sampling)]

    def _forward(self, leaves: dict[str, jax.Array], tokens: jax.Array, places: TokenPositions) -> jax.Array:
        decoder: Any = self._template.merge(leaves)
        return decoder.logits(decoder(tokens, places, dtype=self.dtype).hidden)


def _encode(encoder: Encoder, index: int, prompt: Prompt) -> list[int]:
    try:
        return encoder.prompt(prompt if isinstance(prompt, str) else [dict(turn) for turn in prompt])
    except RowError as error:
        raise DataError(f"prompts.{index}: {error}") from error


def load(
    directory: str | Path,
    *,
    dtype: DTypeLike = jnp.float32,
    tokenizer: Tokenizer | None = None,
    allow_non_finite: bool = False,
    mtp: bool = False,
) -> Pretrained:
    """Load a model from a directory in the Hub's format, or from a repository on the Hub.

    >>> model = nnxdsl.load("google/gemma-3-1b-it")                             # doctest: +SKIP
    >>> model.generate([[{"role": "user", "content": "What is DPO?"}]])         # doctest: +SKIP

    Args:
        directory: directory with `config.json` and safetensors (as `nnxdsl export` writes), or a Hub repository name.
        dtype: dtype of arrays and activations.
        tokenizer: tokenizer to use; None for the one beside the weights.
        allow_non_finite: load weights that contain NaN or infinity instead of raising.
        mtp: also load the multi-token-prediction (MTP) layer, for `num_speculative_tokens` of `generate`.

    Returns:
        The model, with its arrays on the default device. Tensors are read one at a time, so host memory never has a
        second copy of the weights.

    Raises:
        WeightsError: a file is missing, damaged or unsupported, or tensors do not match the model or contain NaN or
            infinity; lists all of these tensors.
    """
    found = locate(str(directory))
    reader = HubReader(found, allow_non_finite=allow_non_finite)
    if mtp and not reader.config.mtp_layers:
        raise WeightsError(f"{found}: there is no multi-token-prediction (MTP) layer that can be loaded; leave mtp out")
    config = reader.config if mtp else attrs.evolve(reader.config, mtp_layers=0)
    template = abstract(lambda: Decoder(config, rngs=nnx.Rngs(0), param_dtype=dtype))
    if problems := reader.check(template):
        raise WeightsError("\n  ".join([f"{found}: {len(problems)} tensors do not fit:", *map(str, problems)]))
    here = jnp.zeros(()).sharding
    leaves = {path: place(reader.mapped(path), dtype, here) for path in template.variables}
    return Pretrained(template, config, leaves, dtype, found, tokenizer or Auto())
