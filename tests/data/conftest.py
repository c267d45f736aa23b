"""Files of rows, and real tokenizers trained on a few lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from nnxdsl.data import BytesTokenizer
from nnxdsl.data.tokenizers.huggingface import HFTokenizer

Write = Callable[..., str]

LINES = [
    "the cat sat on the mat and the dog sat on the log",
    "what is the capital of France? it is Paris.",
    "a cat and a dog and a mat",
] * 20


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes rows (objects, or raw bytes for a line) as `rows.jsonl` in the current directory; gives its name."""
    monkeypatch.chdir(tmp_path)

    def write_rows(*rows: dict[str, Any] | bytes, name: str = "rows.jsonl") -> str:
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        (tmp_path / name).write_bytes(b"".join(line + b"\n" for line in lines))
        return name

    return write_rows


@pytest.fixture
def tokens() -> BytesTokenizer:
    return BytesTokenizer()


@pytest.fixture(scope="session")
def bpe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level BPE `tokenizer.json` whose merges cross spaces, BOS in front, Gemma's markers."""
    directory = tmp_path_factory.mktemp("bpe")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "chat_template": BytesTokenizer().chat_template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4]}))
    return directory


@pytest.fixture
def bpe(bpe_dir: Path) -> HFTokenizer:
    return HFTokenizer(bpe_dir / "tokenizer.json")
