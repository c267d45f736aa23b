"""Arguments of chat templates and system prompts of the data: rows, samples, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from nnxdsl import Data, DataError, SpecError
from nnxdsl.data import BytesTokenizer, Encoder, load
from nnxdsl.data.loaders.token_cache import TokenCache

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
OTHER = {"role": "assistant", "content": "Go"}
KEPT = {"role": "system", "content": "Be brief."}

THINKING = (
    "{% if effort is not defined %}{% set effort = 'low' %}{% endif %}{{ bos_token }}{{ effort }}|"
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n"
    "{% if m.role == 'assistant' and thinking is defined and not thinking %}<think></think>{% endif %}"
    "{{ m.content }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>assistant\n"
    "{% if thinking is defined and not thinking %}<think></think>{% endif %}{% endif %}"
)
"""With a switch as that of Qwen3, and a variable with a default as those of SmolLM3."""

ROWS: list[tuple[Any, dict[str, Any]]] = [
    (Data.Conversations, {"messages": [USER, ANSWER]}),
    (Data.Preferences, {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]}),
    (Data.Preferences, {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]}),
    (Data.Feedback, {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]}),
    (Data.Prompts, {"prompt": [USER]}),
]
PLAIN: list[tuple[Any, dict[str, Any]]] = [
    (Data.Conversations, {"prompt": "a", "completion": "b"}),
    (Data.Preferences, {"prompt": "a", "chosen": "b", "rejected": "c"}),
    (Data.Preferences, {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}),
    (Data.Feedback, {"prompt": "a", "completion": "b", "label": True}),
    (Data.Feedback, {"prompt_ids": [1], "completion_ids": [2], "label": True}),
    (Data.Prompts, {"prompt": "a"}),
]


def text(tokenizer: BytesTokenizer, data: Data, **options: Any) -> str:
    """The prompt and the first completion of the first row."""
    dataset = load(data, tokenizer, **options)
    row = dataset.row(0)
    ids = [*row["tokens"]] if "tokens" in row else [*row["prompt"], *row.get("chosen", [])]
    return tokenizer.decode(ids, skip_special=False)


def only(write: Any, data: Any, row: dict[str, Any]) -> str:
    """A file with the row, and for feedback with a second one, since all prompts must not be the same."""
    others = [{**row, "prompt": [{"role": "user", "content": "Hm"}]}] if data is Data.Feedback else []
    return write(row, *others)


@pytest.mark.parametrize(("data", "row"), ROWS)
def test_rows_are_rendered_with_the_arguments(write, data: Any, row: dict[str, Any]) -> None:
    tokenizer, path = BytesTokenizer(THINKING), only(write, data, row)
    prompt = "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>assistant\n"
    end = "" if data is Data.Prompts else "Hello<end_of_turn>"
    assert text(tokenizer, data(path)) == f"<bos>low|{prompt}{end}"
    spec = data(path, template_args={"thinking": False, "effort": "high"})
    assert text(tokenizer, spec) == f"<bos>high|{prompt}<think></think>{end}"
    # The switch belongs to the generation prompt, so it is no target.
    assert Encoder.of(tokenizer, spec).split_chat([USER], [ANSWER]).completions == [[*b"Hello", 260]]


@pytest.mark.parametrize(("data", "row"), ROWS)
def test_chats_without_a_system_message_get_that_of_the_data(write, data: Any, row: dict[str, Any]) -> None:
    tokenizer, path = BytesTokenizer(), only(write, data, row)
    plain = text(tokenizer, data(path))
    assert text(tokenizer, data(path, system="Be kind.")) == plain.replace(
        "<bos>", "<bos><start_of_turn>system\nBe kind.<end_of_turn>\n"
    )
    has_one = {n: [KEPT, *part] if part[0] == USER else part for n, part in row.items() if isinstance(part, list)}
    path = only(write, data, {**row, **has_one})
    assert text(tokenizer, data(path, system="Be kind.")) == text(tokenizer, data(path))


def test_a_system_message_moves_no_target(write) -> None:
    data = Data.Conversations(write({"prompt": [USER, OTHER, USER], "completion": [ANSWER]}), system="Be kind.")
    for loss_on in ("assistant", "last_assistant"):
        row = load(data, BytesTokenizer(), loss_on=loss_on).row(0)
        assert bytes(row["tokens"][row["target"] == 1][:-1].tolist()) == b"Hello"


def test_prompts_of_samples_are_rendered_as_the_rows(write) -> None:
    tokenizer = BytesTokenizer(THINKING)
    data = Data.Conversations("rows.jsonl", system="Be kind.", template_args={"thinking": False})
    prompt = tokenizer.decode(Encoder.of(tokenizer, data).prompt([USER]), skip_special=False)
    assert prompt == (
        "<bos>low|<start_of_turn>system\nBe kind.<end_of_turn>\n<start_of_turn>user\nHi<end_of_turn>\n"
        "<start_of_turn>assistant\n<think></think>"
    )
    assert Encoder.of(tokenizer, data).prompt("Hi") == [256 + 1, *b"Hi"]
    mixture = Data.Mixture({data: 1.0, Data.Conversations("more.jsonl"): 1.0})
    assert Encoder.of(tokenizer, mixture).prompt([USER]) == Encoder.of(tokenizer, data).prompt([USER])


@pytest.mark.parametrize(
    "arguments", [{}, {"thinking": False}, {"thinking": True, "effort": None}, {"effort": [1, {}]}]
)
def test_arguments_are_given_as_transformers_does(arguments: dict[str, Any]) -> None:
    rendering = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [KEPT, USER, ANSWER, USER]
    expected = rendering.render_jinja_template(
        [messages], chat_template=THINKING, add_generation_prompt=True, bos_token="<bos>", **arguments
    )[0][0]
    data = Data.Conversations("rows.jsonl", template_args=arguments)
    tokenizer = BytesTokenizer(THINKING)
    assert tokenizer.decode(Encoder.of(tokenizer, data).prompt(messages), skip_special=False) == expected


@pytest.mark.parametrize("settings", [{"system": "Be kind."}, {"template_args": {"thinking": True}}])
@pytest.mark.parametrize(("data", "row"), PLAIN)
def test_rows_that_are_no_chats_are_refused(write, data: Any, row: dict[str, Any], settings: dict[str, Any]) -> None:
    with pytest.raises(DataError) as error:
        load(data(write(row), **settings), BytesTokenizer(THINKING))
    assert str(error.value).splitlines()[1] == (
        f"  rows.jsonl:1: the row is no chat, so {next(iter(settings))} of its data has no effect; take it out"
    )


NO_SYSTEM = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
SILENT = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}"
REMEDY = (
    "put the text into the messages of users, or give a template that does with Tokenizer.File(path, chat_template=...)"
)


@pytest.mark.parametrize(
    ("source", "settings", "what"),
    [
        (THINKING, {"template_args": {"thinkin": False}},
         "template_args: the chat template does not read 'thinkin'; it reads effort, thinking"),
        (THINKING, {"template_args": {"strftime_now": "2024"}},
         "template_args: the chat template does not read 'strftime_now'; it reads effort, thinking"),
        (None, {"template_args": {"thinking": False}},
         "template_args: the chat template does not read 'thinking'; it reads no further arguments"),
        (NO_SYSTEM + "{% endif %}{{ m.content }}{% endfor %}", {"system": "Be kind."},
         "system: the chat template renders no system message: the chat template cannot render this chat: System role "
         f"not supported; {REMEDY}"),
        (SILENT, {"system": "Be kind."},
         f"system: the chat template renders no system message; it leaves the text out; {REMEDY}"),
    ],
)  # fmt: skip
def test_settings_that_the_template_does_not_read(write, source: str | None, settings: Any, what: str) -> None:
    path = write({"messages": [USER, ANSWER]})
    with pytest.raises(DataError) as error:
        load(Data.Conversations(path, **settings), BytesTokenizer(source))
    assert str(error.value) == f"rows.jsonl: {what}"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"])
def test_arguments_that_every_template_is_given(name: str) -> None:
    with pytest.raises(SpecError, match=f"template_args: '{name}' comes from the rows or the tokenizer; take it out"):
        Data.Prompts("rows.jsonl", template_args={name: "a"})


@pytest.mark.extended
def test_tokens_are_stored_for_each_setting(write, tmp_path: Any) -> None:
    path, tokenizer = write({"messages": [USER, ANSWER]}), BytesTokenizer(THINKING)
    cache = TokenCache(tmp_path / "home", workers=2, min_bytes=0)
    for settings in ({}, {"template_args": {"thinking": False}}, {"template_args": {"thinking": 0}}, {"system": "a"}):
        data = Data.Conversations(path, **settings)
        assert text(tokenizer, data, cache=cache) == text(tokenizer, data)
    assert sum(item.is_dir() for item in (tmp_path / "home").iterdir()) == 4
