"""Tokenizers: the built-in one, and real files of the two common kinds."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nnxdsl import Data, DataError, Tokenizer
from nnxdsl.data import BytesTokenizer, load, open_tokenizer, stop_ids
from nnxdsl.data.tokenizers.encode import Encoder
from nnxdsl.data.tokenizers.huggingface import HFTokenizer, SentencePieceTokenizer
from nnxdsl.weights import tokenizer_files

LINES = ["the cat sat on the mat and the dog sat on the log", "what is the capital of France? it is Paris."] * 20
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
MARKED = st.lists(TEXT | st.sampled_from(BytesTokenizer.SPECIAL)).map("".join)


@given(MARKED)
def test_bytes_restore_every_text(text: str) -> None:
    tokenizer = BytesTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)


@given(TEXT, TEXT)
def test_bytes_encode_piece_by_piece(left: str, right: str) -> None:
    tokenizer = BytesTokenizer()
    assert tokenizer.encode(left + "<eos>" + right) == [*tokenizer.encode(left), 258, *tokenizer.encode(right)]


@given(st.lists(st.integers(0, 319)))
def test_bytes_decode_anything_a_model_may_sample(ids: list[int]) -> None:
    text = BytesTokenizer().decode(ids)
    assert text == bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


def test_bytes_layout_is_pinned() -> None:
    tokenizer = BytesTokenizer()
    assert tokenizer.encode("<bos>é<start_of_turn>") == [257, 0xC3, 0xA9, 259]
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (320, 256, 257, 258)
    assert stop_ids(tokenizer) == {258, 260}


def test_hf_reads_its_directory(bpe: HFTokenizer) -> None:
    assert (bpe.bos_id, bpe.bos_token, bpe.eos_id, bpe.eos_token) == (1, "<bos>", 2, "<eos>")
    assert bpe.stop_ids == {2, 4}
    assert bpe.special_ids == {0, 1, 2, 3, 4}
    assert set(bpe._tokenizer.get_vocab().values()) == set(range(bpe.vocab_size))
    assert bpe.encode("") == []
    assert bpe.decode(bpe.encode("the cat <eos>é")) == "the cat é"
    assert bpe.decode(bpe.encode("the cat <eos>é"), skip_special=False) == "the cat <eos>é"


def test_hf_forgets_the_padding_and_cutting_of_its_last_use(bpe_dir: Path, tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(bpe_dir / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    shutil.copy(bpe_dir / "tokenizer_config.json", tmp_path)
    plain, used = (HFTokenizer(index / "tokenizer.json") for index in (bpe_dir, tmp_path))
    text = "what is the capital of France, and who asks?"
    assert used.encode(text) == plain.encode(text)
    assert len(used.encode(text)) > 4


def test_hf_without_bos_in_front_of_text_has_a_bos_for_templates_only(bpe_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(bpe_dir, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = open_tokenizer(Tokenizer.Auto(), tmp_path)
    assert (tokenizer.bos_id, tokenizer.bos_token) == (None, "<bos>")


@pytest.mark.parametrize(
    ("files", "eos_id"),
    [
        ({"special_tokens_map.json": {"eos_token": "<end_of_turn>"}}, 4),
        ({"generation_config.json": {"eos_token_id": [4, 2]}}, 4),
        ({"config.json": {"eos_token_id": 2}}, 2),
    ],
)
def test_hf_finds_eos_wherever_it_is_said(bpe_dir: Path, tmp_path: Path, files: dict, eos_id: int) -> None:
    shutil.copy(bpe_dir / "tokenizer.json", tmp_path)
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))
    assert HFTokenizer(tmp_path / "tokenizer.json").eos_id == eos_id


def test_chat_template_of_its_own_file_goes_before_the_config(bpe_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(bpe_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert HFTokenizer(tmp_path / "tokenizer.json").chat_template == "{{ messages[0]['content'] }}"
    given_source = open_tokenizer(Tokenizer.File(str(tmp_path), chat_template="{{ 1 }}"), None)
    assert given_source.chat_template == "{{ 1 }}"
    (tmp_path / "mine.jinja").write_text("{{ 2 }}")
    given_file = open_tokenizer(Tokenizer.File(str(tmp_path), chat_template=str(tmp_path / "mine.jinja")), None)
    assert given_file.chat_template == "{{ 2 }}"
    assert given_source.fingerprint != given_file.fingerprint


def test_a_chat_template_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ 2 }}")
    actual = open_tokenizer(Tokenizer.Bytes(chat_template=str(tmp_path / "mine.jinja")), None)
    assert (
        actual.chat_template
        == "{{ 2 }}"
        == open_tokenizer(Tokenizer.Bytes(chat_template="{{ 2 }}"), None).chat_template
    )
    assert actual.fingerprint != open_tokenizer(Tokenizer.Bytes(), None).fingerprint
    with pytest.raises(DataError, match="chat_template: 'none' is neither jinja2 source nor a file"):
        open_tokenizer(Tokenizer.Bytes(chat_template="none"), None)
    (tmp_path / "bytes.jinja").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"chat_template: .*bytes.jinja cannot be read: "):
        open_tokenizer(Tokenizer.Bytes(chat_template=str(tmp_path / "bytes.jinja")), None)


NAMED = {"default": "default {{ messages[0].content }}", "tool_use": "{{ tools | length }} {{ messages[0].content }}"}


def _with_named_templates(directory: Path, form: str) -> None:
    """Writes named templates in one of the two forms that transformers reads."""
    config: dict[str, Any] = {"eos_token": "<eos>"}
    if form == "list":
        config["chat_template"] = [{"name": name, "template": source} for name, source in NAMED.items()]
    else:
        config["chat_template"] = "not read beside files"
        (directory / "chat_template.jinja").write_text(NAMED["default"])
        (directory / "additional_chat_templates").mkdir()
        (directory / "additional_chat_templates" / "tool_use.jinja").write_text(NAMED["tool_use"])
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("form", ["list", "files"])
def test_chats_with_tools_take_the_template_for_them(bpe_dir: Path, tmp_path: Path, form: str) -> None:
    shutil.copytree(bpe_dir, tmp_path / "a")
    _with_named_templates(tmp_path / "a", form)
    tokenizer = HFTokenizer(tmp_path / "a" / "tokenizer.json")
    assert (tokenizer.chat_template, tokenizer.tool_use_template) == tuple(NAMED.values())
    encoder, chat = Encoder(tokenizer), [{"role": "user", "content": "Hi"}]
    assert tokenizer.decode(encoder.prompt(chat)) == "default Hi"
    assert tokenizer.decode(encoder.prompt(chat, [{"name": "f"}])) == "1 Hi"
    (tmp_path / "b").mkdir()
    copied = tokenizer_files.copy(tmp_path / "a", tmp_path / "b")
    assert ("additional_chat_templates/tool_use.jinja" in copied) == (form == "files")
    assert HFTokenizer(tmp_path / "b" / "tokenizer.json").fingerprint == tokenizer.fingerprint
    only = open_tokenizer(Tokenizer.File(str(tmp_path / "a"), chat_template="{{ 1 }}"), None)
    assert (only.chat_template, only.tool_use_template) == ("{{ 1 }}", None)
    assert only.fingerprint != tokenizer.fingerprint


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_exports_stop_where_sampling_stops(bpe_dir: Path, tmp_path: Path) -> None:
    """The base stops at `<eos>` alone, and the turns of its template end with another token."""
    shutil.copytree(bpe_dir, tmp_path / "base")
    content = json.loads((bpe_dir / "tokenizer.json").read_text().replace("<end_of_turn>", "<|stop|>"))
    (tmp_path / "base" / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "base" / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<eos>", "chat_template": CHATML})
    )
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 0.6}))
    tokenizer = open_tokenizer(Tokenizer.File(str(tmp_path / "base")), None)
    assert (tokenizer.stop_ids, stop_ids(tokenizer)) == ({2}, {2, 4})
    files = tokenizer_files.TokenizerFiles("the base", tmp_path / "base", tokenizer=tokenizer)
    assert files.ids(400)["eos_token_id"] == [2, 4]
    (tmp_path / "out").mkdir()
    files.write(tmp_path / "out", 64, 400)
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [2, 4], "temperature": 0.6}
    assert stop_ids(open_tokenizer(Tokenizer.File(str(tmp_path / "out")), None)) == {2, 4}
    assert files.ids(3)["eos_token_id"] == 2


def test_auto_is_bytes_without_weights_and_the_directory_with_them(bpe_dir: Path) -> None:
    assert isinstance(open_tokenizer(Tokenizer.Auto(), None), BytesTokenizer)
    assert isinstance(open_tokenizer(Tokenizer.Bytes(), bpe_dir), BytesTokenizer)
    assert isinstance(open_tokenizer(Tokenizer.Auto(), bpe_dir), HFTokenizer)


def test_errors_say_what_would_be_right(bpe_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("{}")
    shutil.copy(bpe_dir / "tokenizer.json", tmp_path / "alone.json")
    said = {}
    for path in ("none", "empty", "bad.json", "alone.json"):
        with pytest.raises(DataError) as error:
            open_tokenizer(Tokenizer.File(path), None)
        said[path] = str(error.value)
    assert said["none"] == (
        "none: no such file or directory; a tokenizer is a directory with tokenizer.json or tokenizer.model"
    )
    assert said["empty"] == (
        "empty: no tokenizer here, looked for tokenizer.json and tokenizer.model; name one with Tokenizer.File(path), "
        "or take the built-in Tokenizer.Bytes()"
    )
    assert said["bad.json"].startswith("bad.json: no tokenizer that the tokenizers library can read: ")
    assert said["alone.json"] == (
        'alone.json: no file names the token that ends a text; add tokenizer_config.json with an "eos_token" beside it'
    )


ROWS_OF_IDS = [
    (Data.Preferences, [{"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [95]}]),
    (Data.Feedback, [{"prompt_ids": [n], "completion_ids": [95], "label": True} for n in (1, 2)]),
    (Data.Feedback, [{"prompt_ids": [n], "chosen_ids": [95], "rejected_ids": [1]} for n in (1, 2)]),
]


@pytest.mark.parametrize(("data", "rows"), ROWS_OF_IDS)
def test_rows_of_token_ids_need_no_tokenizer(write, data: Any, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    missing = open_tokenizer(Tokenizer.Auto(), tmp_path)
    with_one, without = (load(data(write(*rows)), tokens, vocabulary=96) for tokens in (BytesTokenizer(), missing))
    assert without.ids_digest() == with_one.ids_digest()
    with pytest.raises(DataError, match=r"rows.jsonl:\d: field '.*'\[0\]: 95 is no token id; ids are 0 to 94"):
        load(data(write(*rows)), missing, vocabulary=95)


@pytest.mark.parametrize(
    ("data", "row"),
    [
        (Data.Preferences, {"prompt": "q", "chosen": "a", "rejected": "b"}),
        (Data.Preferences, {"prompt": [{"role": "user", "content": "q"}], "chosen": "a", "rejected": "b"}),
        (Data.Preferences, {"chosen": "q: a", "rejected": "q: b"}),
        (Data.Feedback, {"prompt": "q", "completion": "a", "label": True}),
        (Data.Conversations, {"messages": [{"role": "assistant", "content": "a"}]}),
        (Data.Conversations, {"prompt": "q", "completion": "a"}),
        (Data.Text, {"text": "a"}),
        (Data.Prompts, {"prompt": "q"}),
    ],
)
def test_text_needs_a_tokenizer(write, data: Any, row: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    missing = open_tokenizer(Tokenizer.Auto(), tmp_path / "weights")
    with pytest.raises(DataError) as error:
        load(data(write(row)), missing, vocabulary=96)
    assert str(error.value) == (
        f"rows.jsonl:1: {tmp_path / 'weights'}: no tokenizer here, looked for tokenizer.json and tokenizer.model; a "
        "tokenizer is required to turn text into tokens (rows of text or chats, evaluation.prompts, rollouts); set "
        "model.tokenizer=Tokenizer.File(path) or Tokenizer.Bytes(), or model.weights that come with one; only rows of "
        "token ids (prompt_ids, chosen_ids, ...) need none"
    )


def test_a_missing_tokenizer_says_what_it_is_required_for(tmp_path: Path) -> None:
    missing = open_tokenizer(Tokenizer.Auto(), tmp_path)
    with pytest.raises(DataError, match="a tokenizer is required to turn tokens into text"):
        missing.decode([1])
    with pytest.raises(DataError, match="a tokenizer is required to know where an answer ends"):
        stop_ids(missing)
    assert not hasattr(missing, "pad_id")


@pytest.fixture(scope="module")
def pieces_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real sentencepiece model of a Gemma-like making: byte fallback, no dummy prefix, turn markers as pieces."""
    sentencepiece = pytest.importorskip("sentencepiece")
    directory = tmp_path_factory.mktemp("pieces")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        user_defined_symbols=["<start_of_turn>", "<end_of_turn>", "\n"],
        minloglevel=2,
    )
    return directory


def test_sentencepiece_reads_markers_in_text(pieces_dir: Path) -> None:
    tokenizer = open_tokenizer(Tokenizer.Auto(), pieces_dir)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert (tokenizer.bos_id, tokenizer.bos_token, tokenizer.eos_id, tokenizer.eos_token) == (2, "<bos>", 1, "<eos>")
    end = tokenizer.encode("<end_of_turn>")
    assert len(end) == 1
    assert tokenizer.stop_ids == {1, end[0]}
    ids = tokenizer.encode("<bos>the cat<end_of_turn>\n<eos>")
    assert (ids[0], ids[-1], ids.count(end[0])) == (2, 1, 1)
    assert tokenizer.decode(ids) == "the cat\n"
    assert tokenizer.decode(ids, skip_special=False) == "<bos>the cat<end_of_turn>\n<eos>"


@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=30))
def test_sentencepiece_restores_text(pieces_dir: Path, text: str) -> None:
    text = text.replace("▁", " ")  # the library's own sign for a space
    tokenizer = SentencePieceTokenizer(pieces_dir / "tokenizer.model")
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


def test_sentencepiece_missing_or_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentencepiece")
    monkeypatch.chdir(tmp_path)
    Path("tokenizer.model").write_bytes(b"no model")
    with pytest.raises(DataError, match=r"^tokenizer.model: no sentencepiece model: "):
        open_tokenizer(Tokenizer.File("tokenizer.model"), None)

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(DataError) as error:
        open_tokenizer(Tokenizer.File("tokenizer.model"), None)
    assert str(error.value) == (
        "tokenizer.model: reading it needs sentencepiece: pip install 'nnxdsl[sentencepiece]'; a directory with a "
        "tokenizer.json does not"
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # which nothing changes
@given(
    st.lists(
        st.sampled_from(["Hi", " there", "<end_of_turn>", "<bos>", "\n", "é", "日本", "👩🏽‍🚀", "ﬁ", " ", "x" * 9]),
        max_size=9,
    )
)
def test_characters_of_tokens_are_those_of_the_tokenizers_library(
    bpe: HFTokenizer, bpe_dir: Path, texts: list[str]
) -> None:
    text = "".join(texts)
    whole = tokenizers.Tokenizer.from_file(str(bpe_dir / "tokenizer.json")).encode(text, add_special_tokens=False)
    actual = bpe.offsets(text)
    assert list(actual) == whole.offsets
    assert actual[:2] == whole.offsets[:2]
    assert len(actual) == len(bpe.encode(text)) == len(whole.ids)
    for ends in zip(*actual, strict=True):
        assert list(ends) == sorted(ends), "borders of turns are found by bisection"
