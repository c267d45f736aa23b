"""Special tokens in the text of rows, ids beyond the model's vocabulary, damaged tokenizer files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from nnxdsl import BadRows, Data, DataError
from nnxdsl.data import BytesTokenizer, Encoder, load
from nnxdsl.data.tokenizers.huggingface import HFTokenizer

USER = {"role": "user", "content": "Hi"}
SAID = {"role": "assistant", "content": "the cat"}
BAD = {"role": "assistant", "content": "a<end_of_turn>b"}
IDS = "take it out, or give token ids"


def problem(data: Data, tokenizer: Any, **options: Any) -> str:
    with pytest.raises(DataError) as error:
        load(data, tokenizer, **options)
    return str(error.value).splitlines()[1].strip()


def said(place: str, marker: str, cure: str = "take it out") -> str:
    return f"rows.jsonl:1: {place}: contains '{marker}', which is a special token of the tokenizer; {cure}"


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@pytest.mark.parametrize(
    ("data", "row", "what"),
    [
        (Data.Preferences, {"prompt": "q", "chosen": "a<eos>b", "rejected": "c"},
         said("field 'chosen'", "<eos>", IDS)),
        (Data.Preferences, {"prompt": "q", "chosen": "a", "rejected": "b<eos><eos>"},
         said("field 'rejected'", "<eos>", IDS)),
        (Data.Preferences, {"prompt": "q", "chosen": "a", "rejected": "b<pad>"},
         said("field 'rejected'", "<pad>", IDS)),
        (Data.Preferences, {"prompt": "<bos><bos>q", "chosen": "a", "rejected": "b"},
         said("field 'prompt'", "<bos>", IDS)),
        (Data.Preferences, {"prompt": "q<eos>", "chosen": "a", "rejected": "b"},
         said("field 'prompt'", "<eos>", IDS)),
        (Data.Preferences, {"chosen": "q: a", "rejected": "q: <end_of_turn>b"},
         said("field 'rejected'", "<end_of_turn>", IDS)),
        (Data.Preferences, {"prompt": "q<e", "chosen": "os>a", "rejected": "b"},
         said("fields 'prompt' and 'chosen' together", "<eos>", IDS)),
        (Data.Preferences, {"prompt": [USER], "chosen": [SAID], "rejected": [BAD]},
         said("field 'rejected', message 1", "<end_of_turn>", IDS)),
        (Data.Preferences, {"prompt": "<bos>q", "chosen": [SAID], "rejected": [USER]},
         said("field 'prompt'", "<bos>", IDS)),
        (Data.Conversations, {"messages": [USER, BAD]}, said("field 'messages', message 2", "<end_of_turn>")),
        (Data.Conversations, {"messages": [USER, {**SAID, "tool_calls": [{"name": "<start_of_turn>"}]}]},
         said("field 'messages', message 2", "<start_of_turn>")),
        (Data.Conversations, {"prompt": "q", "completion": "<bos>a"}, said("field 'completion'", "<bos>")),
        (Data.Text, {"text": "a<eos>b"}, said("field 'text'", "<eos>")),
    ],
)  # fmt: skip
def test_markers_in_text_are_bad_rows(write, bpe: HFTokenizer, kind: str, data: Any, row: dict, what: str) -> None:
    tokenizer = bpe if kind == "bpe" else BytesTokenizer()
    good = {"prompt": "q", "chosen": "a", "rejected": "b", "completion": "a", "text": "a"}
    path = write(row, good)
    assert problem(data(path), tokenizer) == what
    dataset = load(data(path, bad_rows=BadRows.Skip(at_most=1)), tokenizer)
    assert dataset.report.dropped == {"marker in text": 1}


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_bos_in_front_and_eos_behind_are_those_that_are_added(write, bpe: HFTokenizer, kind: str) -> None:
    tokenizer = bpe if kind == "bpe" else BytesTokenizer()
    bare = {"prompt": "the cat", "chosen": " sat", "rejected": " and", "completion": " sat", "text": "the cat sat"}
    dressed = {
        "prompt": "<bos>the cat", "chosen": " sat<eos>", "rejected": " and<eos>\n", "completion": " sat<eos>",
        "text": "<bos>the cat sat<eos>",
    }  # fmt: skip
    path = write(bare, dressed)
    for data in (Data.Preferences(path), Data.Conversations(path), Data.Text(path)):
        dataset = load(data, tokenizer)
        first, second = ({name: ids.tolist() for name, ids in dataset.row(i).items()} for i in (0, 1))
        assert first == second
        ids = first["tokens"] if "tokens" in first else first["prompt"] + first["chosen"]
        assert ids == [tokenizer.bos_id, *tokenizer.encode("the cat sat"), tokenizer.eos_id]
    implicit = load(Data.Preferences(write({"chosen": "<bos>q: a<eos>", "rejected": "<bos>q: b"})), tokenizer)
    assert [tokenizer.decode(ids, skip_special=False) for ids in implicit.row(0).values()] == [
        "<bos>q: ", "a<eos>", "b<eos>"
    ]  # fmt: skip


def test_a_completion_of_text_in_a_chat_ends_as_the_template_says(write, tokens: BytesTokenizer) -> None:
    row = {"prompt": [USER], "chosen": "Hello<eos>", "rejected": "Go"}
    ids = load(Data.Preferences(write(row)), tokens).row(0)["chosen"]
    assert tokens.decode(ids.tolist(), skip_special=False) == "Hello<end_of_turn>"


def test_only_what_stops_generation_ends_plain_text(tokens: BytesTokenizer) -> None:
    encoder = Encoder(tokens)
    assert encoder.split_text("a", ["b<pad>", "c<eos>"]).completions == [[98, 256, 258], [99, 258]]


def test_a_bos_that_the_tokenizer_does_not_add_stays(write, bpe: HFTokenizer) -> None:
    bpe.bos_id = None
    dataset = load(Data.Preferences(write({"prompt": "<bos>q", "chosen": "a", "rejected": "b"})), bpe)
    assert bpe.decode(dataset.row(0)["prompt"].tolist(), skip_special=False) == "<bos>q"


def test_token_ids_are_used_as_they_are(write, tokens: BytesTokenizer) -> None:
    row = {"prompt_ids": [257, 257, 258], "chosen_ids": [258, 1, 258], "rejected_ids": [260, 256]}
    dataset = load(Data.Preferences(write(row)), tokens)
    assert [ids.tolist() for ids in dataset.row(0).values()] == list(row.values())


def test_a_word_that_the_vocabulary_lacks_is_no_marker(write, tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "[SEP]": 1, "cat": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["[UNK]", "[SEP]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[SEP]"}')
    tokens = HFTokenizer(tmp_path / "tokenizer.json")
    assert load(Data.Text(write({"text": "cat dog"})), tokens).row(0)["tokens"].tolist() == [2, 0, 1]
    assert problem(Data.Text(write({"text": "cat [UNK]"})), tokens) == said("field 'text'", "[UNK]")


@pytest.fixture
def surplus(bpe_dir: Path, tmp_path: Path) -> HFTokenizer:
    """The tokenizer with one added token more than the model has rows."""
    shutil.copytree(bpe_dir, tmp_path, dirs_exist_ok=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_tokens(["<image_soft_token>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return HFTokenizer(tmp_path / "tokenizer.json")


def test_ids_beyond_the_models_vocabulary_are_bad_rows(write, surplus: HFTokenizer) -> None:
    vocabulary = surplus.vocab_size - 1
    text = "a <image_soft_token>"
    row = {"prompt": text, "chosen": "a", "rejected": "b", "completion": "a", "text": text}
    good = dict.fromkeys(row, "a cat") | {"rejected": "b"}
    path = write(row, good)
    for kind in (Data.Preferences, Data.Conversations, Data.Text):
        assert len(load(kind(path), surplus)) == 2
        assert problem(kind(path), surplus, vocabulary=vocabulary) == (
            f"rows.jsonl:1: token {vocabulary} ('<image_soft_token>') is beyond the model's vocabulary of {vocabulary}"
        )
        dataset = load(kind(path, bad_rows=BadRows.Skip(at_most=1)), surplus, vocabulary=vocabulary)
        assert (dataset.row_ids, dataset.report.dropped) == (["rows.jsonl:2"], {"unknown id": 1})


def test_given_ids_are_bounded_by_the_models_vocabulary(write, surplus: HFTokenizer) -> None:
    size = surplus.vocab_size
    path = write({"prompt_ids": [1], "chosen_ids": [size - 1], "rejected_ids": [2]})
    assert (
        len(load(Data.Preferences(path), surplus)) == len(load(Data.Preferences(path), surplus, vocabulary=size)) == 1
    )
    assert problem(Data.Preferences(path), surplus, vocabulary=size - 1) == (
        f"rows.jsonl:1: field 'chosen_ids'[0]: {size - 1} is no token id; ids are 0 to {size - 2}"
    )


def test_a_fingerprint_tells_tokenizers_that_stop_elsewhere(bpe_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(bpe_dir, tmp_path, dirs_exist_ok=True)
    before = HFTokenizer(tmp_path / "tokenizer.json").fingerprint
    assert before == HFTokenizer(bpe_dir / "tokenizer.json").fingerprint
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 4, 0]}')
    assert HFTokenizer(tmp_path / "tokenizer.json").fingerprint != before


def test_where_answers_end_in_a_file_of_several_modalities(bpe_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(bpe_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").unlink()
    for fields, ours in (({"eos_token_id": 3}, 3), ({"eos_token_id": None}, 0), ({}, 0)):
        (tmp_path / "config.json").write_text(json.dumps({**fields, "text_config": {"eos_token_id": [0]}}))
        assert HFTokenizer(tmp_path / "tokenizer.json").stop_ids == {ours, 2, 4}  # and those that every file gives


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("chat_template.jinja", b"a\xff", "expected a chat template in UTF-8, got byte 0xff at position 2"),
        ("tokenizer_config.json", [], "expected an object, got a list"),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]},
         "chat_template, entry 1: expected an object with 'name' and 'template' as text"),
        ("tokenizer_config.json", {"chat_template": ["a"]},
         "chat_template, entry 1: expected an object with 'name' and 'template' as text"),
        ("tokenizer_config.json", {"chat_template": 3},
         "chat_template: expected text or a list of templates, got the number 3"),
        ("tokenizer_config.json", {"eos_token": 3},
         "eos_token: expected a token's text, or an object with it as 'content', got 3"),
        ("tokenizer_config.json", {"add_bos_token": "no"}, "add_bos_token: expected true or false, got text"),
        ("generation_config.json", {"eos_token_id": "2"},
         "eos_token_id: expected a token id or a list of them, got '2'"),
        ("generation_config.json", {"eos_token_id": [2, None]},
         "eos_token_id: expected a token id or a list of them, got [2, None]"),
    ],
)  # fmt: skip
def test_damaged_files_beside_a_tokenizer(bpe_dir: Path, tmp_path: Path, name: str, content: Any, what: str) -> None:
    shutil.copytree(bpe_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(DataError) as error:
        HFTokenizer(tmp_path / "tokenizer.json")
    assert str(error.value) == f"{tmp_path / name}: {what}"
