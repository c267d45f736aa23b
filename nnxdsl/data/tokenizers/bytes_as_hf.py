"""The built-in byte tokenizer as the files that `tokenizers` and `transformers` read; touches no file itself."""

from __future__ import annotations

from typing import Any

from nnxdsl.data.tokenizers.base import BytesTokenizer


def byte_files(tokenizer: BytesTokenizer, max_length: int) -> dict[str, Any]:
    """Files that give the same ids for the same texts, by name: objects for JSON, or text.

    Bytes are written with the stand-ins of byte-level BPE (Radford et al. 2019, GPT-2), of which no two are merged.

    Args:
        tokenizer: gives the markers and the chat template.
        max_length: positions of the model.

    Returns:
        `tokenizer.json`, `tokenizer_config.json` and, where there is a template, `chat_template.jinja`.
    """
    markers = {token: 256 + number for number, token in enumerate(tokenizer.SPECIAL)}
    whole_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    bos = {"id": tokenizer.bos_token, "ids": [markers[tokenizer.bos_token]], "tokens": [tokenizer.bos_token]}
    first = {"SpecialToken": {"id": tokenizer.bos_token, "type_id": 0}}
    files: dict[str, Any] = {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": number,
                    "content": token,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
                for token, number in markers.items()
            ],
            "normalizer": None,
            "pre_tokenizer": whole_bytes,
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {tokenizer.bos_token: bos},
            },
            "decoder": whole_bytes,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": _stand_ins(),
                "merges": [],
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.SPECIAL[0],
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
        },
    }
    if tokenizer.chat_template is not None:
        files["chat_template.jinja"] = tokenizer.chat_template
    return files


def _stand_ins() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte: itself where it prints, else one from U+0100 on."""
    prints = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in prints]
    written = {byte: chr(byte) for byte in prints} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return {written[byte]: byte for byte in range(256)}
