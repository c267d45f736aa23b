"""Inference with a model of a run or of the Hugging Face Hub, without an experiment: logits, text, and rewards."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.typing import ArrayLike, DTypeLike

from nnxdsl.adapters import lora_math
from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.config.precision import KVCacheDtype
from nnxdsl.config.tokenizer import Auto, Tokenizer
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.tokenizers.base import TokenizerBase, mismatch, open_tokenizer
from nnxdsl.data.tokenizers.encode import Encoder, stop_ids
from nnxdsl.errors import DataError, WeightsError
from nnxdsl.formats import peft
from nnxdsl.formats.finite import require_finite
from nnxdsl.formats.hf import HubReader, read_fields
from nnxdsl.formats.hf_download import locate
from nnxdsl.generate.sampler import Sampler
from nnxdsl.generate.sampling import Sampling
from nnxdsl.models.attention.positions import TokenPositions, positions_right_padded
from nnxdsl.models.attention.row_layout import AttentionMethod, sequence
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.families.registry import text_fields
from nnxdsl.models.params import AbstractModel
from nnxdsl.models.slots import power_of_two
from nnxdsl.program import xla_options
from nnxdsl.program.architecture import model_type
from nnxdsl.program.init import place
from nnxdsl.runs.saved_experiment import is_run
from nnxdsl.weights.run_weights import RunWeights
from nnxdsl.weights.sources import tokenizer_directory, tokenizer_owner

LEAST_WIDTH = 16
"""Fewest tokens of a row with its padding."""

Prompt = str | Sequence[Mapping[str, str]]
"""A text to continue, or chat messages `{"role": ..., "content": ...}` to answer."""


class TokenLogps(NamedTuple):
    """Log-probabilities of tokens, each given those before it; float32.

    Attributes:
        logps: Of the tokens themselves `[T - 1]`.
        top_ids: The most likely tokens at each place `[T - 1, k]`.
        top_logps: Their log-probabilities `[T - 1, k]`.
    """

    logps: npt.NDArray[np.float32] | jax.Array
    top_ids: npt.NDArray[np.int32] | jax.Array
    top_logps: npt.NDArray[np.float32] | jax.Array


class Pretrained:
    """A decoder with its weights and tokenizer; created by `load`.

    Attributes:
        config: configuration of the decoder.
        leaves: arrays by dotted path, named as in a run's layout.
        dtype: dtype of activations and arrays.
        kv_cache_dtype: dtype of keys and values in the cache, see `Sampler`.
    """

    def __init__(
        self,
        template: AbstractModel,
        config: DecoderConfig,
        leaves: Mapping[str, jax.Array],
        dtype: DTypeLike,
        directory: Path,
        tokenizer: Tokenizer,
        tokenizer_directory: Path | None,
        model_type: str | None,
        kv_cache_dtype: KVCacheDtype | None = None,
    ) -> None:
        self.config = config
        self.kv_cache_dtype: KVCacheDtype | None = kv_cache_dtype
        self.leaves = dict(leaves)
        self.dtype = jnp.dtype(dtype)
        self._template, self._directory, self._model_type = template, directory, model_type
        self._spec, self._tokenizer_directory = tokenizer, tokenizer_directory
        self._tokenizer: TokenizerBase | None = None
        self._sampler: Sampler | None = None
        self._logits, self._rewards = xla_options.jit(self._forward), xla_options.jit(self._forward_rewards)
        self._token_logps = xla_options.jit(self._forward_logps, static_argnums=4)

    @property
    def tokenizer(self) -> TokenizerBase:
        """Tokenizer, opened on first use, so that a directory without one can still compute logits.

        Raises:
            DataError: the tokenizer is missing or cannot be read, or is not that of the weights.
        """
        if self._tokenizer is None:
            tokenizer = open_tokenizer(self._spec, self._tokenizer_directory)
            if message := mismatch(self._spec, tokenizer, self._tokenizer_directory, self.config.vocab_size):
                raise DataError(f"{self._directory}: {message}")
            self._tokenizer = tokenizer
        return self._tokenizer

    def reload(self, directory: Path) -> None:
        """Take the weights of a directory with the same architecture; what is computed already goes on with the old.

        Args:
            directory: in the Hub's format.

        Raises:
            WeightsError: see `load`; or the architecture is another.
        """
        other = load(directory, dtype=self.dtype)
        if other.config != self.config:
            raise WeightsError(f"{directory}: is of another architecture than {self._directory}")
        self.leaves = other.leaves

    def with_adapter(self, directory: Path) -> Pretrained:
        """Return the model with an adapter merged; arrays that it does not change, and what is compiled, are shared.

        Args:
            directory: in PEFT's format.

        Raises:
            WeightsError: a file is missing or damaged, or the adapter is of another architecture or not supported.
        """
        read = peft.read(directory, self.config, self._template.variables, self._model_type)
        if read.is_pissa:
            raise WeightsError(f"{directory}: init_lora_weights='pissa' changes the base; merge the adapter into it")
        changed = {path: jnp.asarray(weight, self.dtype) for path, weight in read.whole.items()}
        for path in {lora_math.kernel_of(path) for path in read.leaves}:
            weight = lora_math.merged(read.adapter, path, self.leaves[path], read.leaves.__getitem__)
            changed[path] = weight.astype(self.dtype)
        other = copy.copy(self)
        other._sampler = None if self.config.head.num_labels else self.sampler
        other.leaves = {**self.leaves, **changed}
        return other

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

    def rewards(
        self, prompts: Sequence[Prompt], completions: Sequence[Prompt], *, batch_size: int = 16
    ) -> npt.NDArray[np.float32]:
        """Compute the rewards of completions, of a reward model: a model with a head of one label.

        Prompts and completions become tokens as in the rows of `Data.Preferences`: each completion has one end token,
        and the reward is read from the state of its last token.

        Args:
            prompts: texts, or lists of chat messages.
            completions: of the prompts: texts, of chats the assistant's answer, or chat messages.
            batch_size: completions that are computed at one time.

        Returns:
            `[N]`, float32.

        Raises:
            WeightsError: the model is no reward model.
            DataError: no tokenizer, no chat template, or a text that cannot be tokenized or is too long.
        """
        if self.config.head.num_labels != 1:
            raise WeightsError(f"{self._directory}: {NOT_A_REWARD_MODEL}")
        encoder, pairs = Encoder(self.tokenizer), zip(prompts, completions, strict=True)
        rows = [self._encoded(encoder, index, *pair) for index, pair in enumerate(pairs)]
        rewards = np.zeros(len(rows), np.float32)
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))  # rows of a batch are about as long
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            width = max(LEAST_WIDTH, power_of_two(len(rows[chosen[-1]])))  # few widths, each of which is compiled
            tokens, lengths = np.zeros((batch_size, width), np.int32), np.ones(batch_size, np.int32)
            for line, index in enumerate(chosen):
                tokens[line, : len(rows[index])], lengths[line] = rows[index], len(rows[index])
            rewards[chosen] = self._rewards(self.leaves, jnp.asarray(tokens), jnp.asarray(lengths))[: len(chosen)]
        return rewards

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
        sampling = Sampling(max_new_tokens, temperature, top_k, top_p, seed, num_speculative_tokens)
        return [self.tokenizer.decode(answer) for answer in self.sampler(self.leaves, ids, sampling)]

    @property
    def sampler(self) -> Sampler:
        """Samples token ids; made on first use.

        Raises:
            DataError: see `tokenizer`.
            WeightsError: the model has a head of labels.
        """
        if self._sampler is None:
            arrays = self._template, self.config, self.dtype, stop_ids(self.tokenizer)
            self._sampler = Sampler(*arrays, kv_cache_dtype=self.kv_cache_dtype)
        return self._sampler

    def token_logps(self, ids: Sequence[int], top: int = 0, temperature: float = 1.0) -> TokenLogps:
        """Compute log-probabilities of each token but the first, given those before it, and of the most likely ones.

        Args:
            ids: token ids.
            top: number of the most likely tokens.
            temperature: what logits are divided by.
        """
        width = min(self.config.max_length, max(LEAST_WIDTH, power_of_two(len(ids))))  # few, each of which is compiled
        tokens = np.zeros((1, width), np.int32)
        tokens[0, : len(ids)] = ids
        options = np.array([len(ids)], np.int32), np.float32(temperature), max(top, 1)
        by_option = (np.asarray(part)[: len(ids) - 1] for part in self._token_logps(self.leaves, tokens, *options))
        logps, top_ids, top_logps = by_option
        return TokenLogps(logps, top_ids[:, :top], top_logps[:, :top])

    def _encoded(self, encoder: Encoder, index: int, prompt: Prompt, completion: Prompt) -> list[int]:
        try:
            ids = encoder.whole(
                *(each if isinstance(each, str) else list(map(dict, each)) for each in (prompt, completion))
            )
        except RowError as error:
            raise DataError(f"completions.{index}: {error}") from error
        if len(ids) > self.config.max_length:
            most = self.config.max_length
            raise DataError(f"completions.{index}: {len(ids):,} tokens with the prompt, of the model's {most:,}")
        return ids

    def _forward_rewards(self, leaves: dict[str, jax.Array], tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        decoder: Any = self._template.merge(leaves)
        hidden = self._hidden(decoder, tokens, lengths)
        last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
        return decoder.logits(last)[:, 0, 0]

    def _forward_logps(
        self, leaves: dict[str, jax.Array], tokens: jax.Array, lengths: jax.Array, temperature: jax.Array, top: int
    ) -> TokenLogps:
        decoder: Any = self._template.merge(leaves)
        hidden = self._hidden(decoder, tokens, lengths)[0, :-1]

        def of(place: tuple[jax.Array, jax.Array]) -> TokenLogps:
            state, token = place
            logps = jax.nn.log_softmax(decoder.logits(state[None, None])[0, 0].astype(jnp.float32) / temperature)
            most, ids = jax.lax.top_k(logps, top)
            return TokenLogps(logps[token], ids, most)

        return jax.lax.map(of, (hidden, tokens[0, 1:]), batch_size=64)  # logits of all places may not fit

    def _hidden(self, decoder: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """The states of right-padded rows; attention is in blocks, so that long rows fit."""
        size = tokens.shape[1]
        method = AttentionMethod("chunked", sequence(size))
        return decoder(tokens, positions_right_padded(lengths, size), dtype=self.dtype, method=method).hidden

    def _forward(self, leaves: dict[str, jax.Array], tokens: jax.Array, places: TokenPositions) -> jax.Array:
        decoder: Any = self._template.merge(leaves)
        return decoder.logits(decoder(tokens, places, dtype=self.dtype).hidden)


def _encode(encoder: Encoder, index: int, prompt: Prompt) -> list[int]:
    try:
        return encoder.prompt(prompt if isinstance(prompt, str) else [dict(turn) for turn in prompt])
    except RowError as error:
        raise DataError(f"prompts.{index}: {error}") from error


NOT_A_REWARD_MODEL = (
    "no reward model: expected a model for sequence classification with one label, as Objective.Reward trains"
)


def load(
    directory: str | Path,
    *,
    dtype: DTypeLike = jnp.float32,
    tokenizer: Tokenizer | None = None,
    allow_non_finite: bool = False,
    mtp: bool = False,
    kv_cache_dtype: KVCacheDtype | None = None,
) -> Pretrained:
    """Load a model from a run, a directory in the Hub's format, or a repository on the Hub.

    >>> model = nnxdsl.load("google/gemma-3-1b-it")                             # doctest: +SKIP
    >>> model.generate([[{"role": "user", "content": "What is DPO?"}]])         # doctest: +SKIP

    Args:
        directory: run directory, or one step of it, whose adapter is merged; directory with `config.json` and
            safetensors (as `nnxdsl export` writes); or a Hub repository name.
        dtype: dtype of arrays and activations.
        tokenizer: tokenizer to use; None for the one beside the weights.
        allow_non_finite: load weights that contain NaN or infinity instead of raising.
        mtp: also load the multi-token-prediction (MTP) layer, for `num_speculative_tokens` of `generate`.
        kv_cache_dtype: dtype of keys and values in the cache, "int8" with a scale for each token and head: about half
            the memory of bfloat16, and nearly the same log-probabilities. None for `dtype`.

    Returns:
        The model, with its arrays on the default device. Tensors are read one at a time, so host memory never has a
        second copy of the weights.

    Raises:
        WeightsError: a file is missing, damaged or unsupported, or tensors do not match the model or contain NaN or
            infinity; lists all of these tensors. Or `kv_cache_dtype` has no effect.
    """
    settings: dict[str, Any] = {"mtp": mtp, "kv_cache_dtype": kv_cache_dtype}
    if (run := Path(directory).expanduser()).is_dir() and is_run(run):
        return _of_run(run, dtype, tokenizer, allow_non_finite=allow_non_finite, **settings)
    resolved = locate(str(directory))
    reader = HubReader(resolved, allow_non_finite=allow_non_finite)
    config, template = _template(reader.config, dtype, resolved, **settings)
    if problems := reader.check(template):
        raise WeightsError("\n  ".join([f"{resolved}: {len(problems)} tensors do not fit:", *map(str, problems)]))
    here = jnp.zeros(()).sharding
    leaves = {path: place(reader.mapped(path), dtype, here) for path in template.variables}
    kind = text_fields(read_fields(resolved)).get("model_type")
    return Pretrained(template, config, leaves, dtype, resolved, tokenizer or Auto(), resolved, kind, kv_cache_dtype)


def _of_run(
    path: Path,
    dtype: DTypeLike,
    tokenizer: Tokenizer | None,
    *,
    allow_non_finite: bool,
    mtp: bool,
    kv_cache_dtype: KVCacheDtype | None,
) -> Pretrained:
    """The newest undamaged checkpoint of a run, or one step of it; its tokenizer is that of the run."""
    saved = RunWeights.open(path)
    config, template = _template(saved.config, dtype, path, mtp=mtp, kv_cache_dtype=kv_cache_dtype)
    here = jnp.zeros(()).sharding

    def leaf(name: str) -> np.ndarray:
        leaf = saved.merged(name)
        if not allow_non_finite:
            require_finite({name: leaf}, path)
        return leaf

    leaves = {name: place(leaf(name), dtype, here) for name in template.variables}
    owner = tokenizer_owner(saved.experiment)
    directory = tokenizer_directory(owner, saved.directory.parent)
    tokenizer, kind = tokenizer or owner.model.tokenizer, model_type(saved.experiment)
    return Pretrained(template, config, leaves, dtype, path, tokenizer, directory, kind, kv_cache_dtype)


def _template(
    stored: DecoderConfig, dtype: DTypeLike, path: Path, *, mtp: bool, kv_cache_dtype: KVCacheDtype | None
) -> tuple[DecoderConfig, AbstractModel]:
    """The decoder, with its multi-token-prediction layer if that is asked for, and without arrays."""
    if mtp and not stored.mtp_layers:
        raise WeightsError(f"{path}: there is no multi-token-prediction (MTP) layer that can be loaded; leave mtp out")
    if kv_cache_dtype and (problem := stored.kv_cache_problem):
        raise WeightsError(f"{path}: kv_cache_dtype: {problem}; set None")
    config = stored if mtp else attrs.evolve(stored, mtp_layers=0)
    return config, abstract_decoder(config, dtype)
