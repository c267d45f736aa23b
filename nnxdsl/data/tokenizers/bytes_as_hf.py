"""The built-in byte tokenizer in the format of `tokenizers` and `transformers`."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from nnxdsl.data.tokenizers.base import BytesTokenizer


def byte_files(tokenizer: BytesTokenizer, max_length: int) -> dict[str, Any]:
    """Files that give the same ids for the same texts, by name: objects for JSON, or text.

    The model is byte-level BPE (Radford et al. 2019, GPT-2) without merges.

    Args:
        tokenizer: With the special tokens and the chat template.
        max_length: Positions of the model.

    Returns:
        `tokenizer.json`, `tokenizer_config.json` and, where there is a template, `chat_template.jinja`.
    """
    bos = tokenizer.bos_token
    bpe = Tokenizer(models.BPE(vocab=_byte_characters(), merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokenizer.SPECIAL])
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B:1", special_tokens=[(bos, bpe.token_to_id(bos))]
    )
    content = json.loads(bpe.to_str())
    content["decoder"] = content["pre_tokenizer"]
    files: dict[str, Any] = {
        "tokenizer.json": content,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.SPECIAL[0],
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
        },
    }
    if tokenizer.chat_template is not None:
        files["chat_template.jinja"] = tokenizer.chat_template
    return files


def _byte_characters() -> dict[str, int]:
    """The character of each byte in byte-level BPE: itself if it is printable, else one from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return {characters[byte]: byte for byte in range(256)}
