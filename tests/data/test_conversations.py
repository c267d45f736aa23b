"""Conversations and texts: which tokens are targets, and chat templates in their sandbox."""

from __future__ import annotations

from typing import Any

import pytest

from nnxdsl import BadRows, Data, DataError
from nnxdsl.data import BytesTokenizer, ChatTemplate, Encoder, load, stop_ids
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.tokenizers.huggingface import HFTokenizer

CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "the cat"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "the dog"},
]
WHOLE = (
    "<bos><start_of_turn>system\nBe kind.<end_of_turn>\n<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    "the cat<end_of_turn>\n<start_of_turn>user\nAnd?<end_of_turn>\n<start_of_turn>model\nthe dog<end_of_turn>"
)


def parts(tokenizer: Any, dataset: Any, row: int = 0) -> tuple[str, list[str]]:
    """A row's whole text, and its runs of targets as text."""
    tokens, target = dataset.row(row)["tokens"].tolist(), dataset.row(row)["target"].tolist()
    runs: list[list[int]] = []
    for before, here, token in zip([0, *target], target, tokens, strict=False):
        if here and not before:
            runs.append([])
        if here:
            runs[-1].append(token)
    return tokenizer.decode(tokens, skip_special=False), [tokenizer.decode(run, skip_special=False) for run in runs]


@pytest.mark.parametrize("name", ["messages", "conversations"])
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_targets_are_the_assistants_turns_with_their_ends(write, bpe: HFTokenizer, name: str, kind: str) -> None:
    tokenizer = bpe if kind == "bpe" else BytesTokenizer()
    dataset = load(Data.Conversations(write({name: CHAT})), tokenizer)
    assert parts(tokenizer, dataset) == (WHOLE, ["the cat<end_of_turn>", "the dog<end_of_turn>"])
    assert dataset.is_chat


def test_loss_on_all_has_every_token_but_the_first(write, tokens: BytesTokenizer) -> None:
    dataset = load(Data.Conversations(write({"messages": CHAT})), tokens, loss_on="all")
    assert parts(tokens, dataset) == (WHOLE, [WHOLE.removeprefix("<bos>")])


def test_loss_on_last_assistant_has_the_last_answer_alone(write, tokens: BytesTokenizer) -> None:
    blank = {"role": "assistant", "content": ""}
    path = write(
        {"messages": CHAT},
        {"messages": [*CHAT[:2], blank, *CHAT[3:], CHAT[1]]},
        {"prompt": CHAT[:2], "completion": CHAT[2:]},
        {"prompt": "Q: ", "completion": "yes"},
    )
    dataset = load(Data.Conversations(path), tokens, loss_on="last_assistant")
    runs = [parts(tokens, dataset, row)[1] for row in range(4)]
    assert runs == [["the dog<end_of_turn>"]] * 3 + [["yes<eos>"]]


def test_prompt_and_completion(write, tokens: BytesTokenizer) -> None:
    path = write(
        {"prompt": "Q: ", "completion": "yes"},
        {"prompt": CHAT[:4], "completion": CHAT[4:]},
        {"prompt": "Hi", "completion": [CHAT[2]]},
    )
    dataset = load(Data.Conversations(path), tokens)
    assert parts(tokens, dataset, 0) == ("<bos>Q: yes<eos>", ["yes<eos>"])
    assert parts(tokens, dataset, 1) == (WHOLE, ["the dog<end_of_turn>"])  # what stands in the prompt is context
    assert parts(tokens, dataset, 2)[1] == ["the cat<end_of_turn>"]


def test_loss_on_completion_has_all_that_follows_the_prompt(write, tokens: BytesTokenizer) -> None:
    tool = {"role": "tool", "content": "42"}
    path = write(
        {"prompt": "Q: ", "completion": "yes"},
        {"prompt": CHAT[:2], "completion": [CHAT[2], tool, CHAT[4]]},
        {"prompt": "Hi", "completion": [CHAT[2]]},
    )
    dataset = load(Data.Conversations(path), tokens, loss_on="completion")
    assert parts(tokens, dataset, 0)[1] == ["yes<eos>"]
    assert parts(tokens, dataset, 1)[1] == [
        "the cat<end_of_turn>\n<start_of_turn>tool\n42<end_of_turn>\n<start_of_turn>model\nthe dog<end_of_turn>"
    ]
    assert parts(tokens, dataset, 2)[1] == ["the cat<end_of_turn>"]
    answers = load(Data.Conversations(path), tokens)  # the assistant's own words alone
    assert parts(tokens, answers, 1)[1] == ["the cat<end_of_turn>", "the dog<end_of_turn>"]


def test_loss_on_completion_reads_rows_that_have_one(write, tokens: BytesTokenizer) -> None:
    with pytest.raises(DataError, match=r"'prompt' is missing.*use 'assistant' for whole conversations"):
        load(Data.Conversations(write({"messages": CHAT})), tokens, loss_on="completion")
    with pytest.raises(DataError, match="field 'completion': begins with a message of 'user', not the assistant's"):
        load(Data.Conversations(write({"prompt": CHAT[:3], "completion": CHAT[3:]})), tokens, loss_on="completion")


def test_a_conversation_that_the_user_ends(write, tokens: BytesTokenizer) -> None:
    whole, targets = parts(tokens, load(Data.Conversations(write({"messages": CHAT[:4]})), tokens))
    assert whole.endswith("And?<end_of_turn>\n")
    assert targets == ["the cat<end_of_turn>"]


def test_a_template_that_ends_no_turn_gets_eos_at_the_end(write) -> None:
    tokenizer = BytesTokenizer("{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}")
    whole, targets = parts(tokenizer, load(Data.Conversations(write({"messages": CHAT[1:]})), tokenizer))
    assert whole == "[user]Hi[assistant]the cat[user]And?[assistant]the dog<eos>"
    assert targets == ["[assistant]the cat", "[assistant]the dog<eos>"]


def test_long_conversations_are_cut_on_their_right_and_need_a_target(write, tokens: BytesTokenizer) -> None:
    path = write({"messages": CHAT}, {"prompt": "q" * 99, "completion": "a"})
    dataset = load(Data.Conversations(path, max_length=39, bad_rows=BadRows.Skip(at_most=1)), tokens)
    text, targets = parts(tokens, dataset)
    assert (text, targets) == (tokens.decode(tokens.encode(WHOLE)[:39], skip_special=False), ["the"])
    assert dataset.report.cut == {"tokens": 1}
    assert dataset.report.dropped == {"no target": 1}
    with pytest.raises(
        DataError, match=r"rows.jsonl:2: the row has no token to learn from in its first 39 tokens; raise"
    ):
        load(Data.Conversations(path, max_length=39), tokens)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (
            {"text": "a"},
            "field 'messages' is missing; this row has: text; Data.Conversations reads messages (or conversations), or "
            "prompt/completion (text or messages)",
        ),
        ({"messages": CHAT[:2]}, "no message is the assistant's, so there is nothing to learn"),
        ({"messages": [CHAT[1], {"role": "assistant", "content": ""}]}, "an assistant's message is empty"),
        ({"prompt": "q", "completion": ""}, "the completion is empty"),
        ({"messages": "Hi"}, "field 'messages': expected a list of messages, got text"),
        (
            {"conversations": [{"from": "bot", "value": "a"}]},
            "field 'conversations', message 1: 'from' is 'bot'; expected one of human, gpt, observation, "
            "system, developer, user, assistant, tool, function_call; or map it with roles",
        ),
    ],
)
def test_bad_conversations(write, tokens: BytesTokenizer, row: dict, what: str) -> None:
    with pytest.raises(DataError) as error:
        load(Data.Conversations(write(row)), tokens)
    assert str(error.value).splitlines()[1:] == [f"  rows.jsonl:1: {what}"]


def test_a_template_that_rewrites_earlier_turns_is_refused_by_row(write) -> None:
    # Some templates drop the reasoning of all answers but the last: what was learnt would not be what is generated.
    source = "{% for m in messages %}{{ m['content'] }}{% if loop.last %}(last){% endif %}<end_of_turn>{% endfor %}"
    with pytest.raises(
        DataError, match=r"rows.jsonl:1: the chat template renders earlier text differently once message 2 is"
    ):
        load(Data.Conversations(write({"messages": CHAT[1:]})), BytesTokenizer(source))


def test_text(write, tokens: BytesTokenizer) -> None:
    dataset = load(Data.Text(write({"body": "abc"}, {"body": "abcdefgh"}), field="body", max_length=6), tokens)
    assert parts(tokens, dataset) == ("<bos>abc<eos>", ["abc<eos>"])
    assert parts(tokens, dataset, 1) == ("<bos>abcde", ["abcde"])
    assert not dataset.is_chat
    with pytest.raises(DataError) as error:
        load(Data.Text(write({"body": "abc"})), tokens)
    assert str(error.value).splitlines()[1] == (
        "  rows.jsonl:1: field 'text' is missing; this row has: body; Data.Text reads 'text' (set by field=...)"
    )


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<bos>", eos_token="<eos>")


def test_templates_are_rendered_as_the_hub_means_them() -> None:
    source = "{% generation %}\n  {% if true %}\n  a\n  {% endif %}\n{% endgeneration %}\n"
    source += "{{ messages | tojson }}{{ eos_token }}"
    assert template(source).render([{"role": "user", "content": "<é>"}]) == (
        '  a\n[{"role": "user", "content": "<é>"}]<eos>'
    )
    assert template("{{ strftime_now('%Y-%m-%d') }}").render([]) == "2024-07-26"
    assert (
        template("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}").render([]) == "1"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0]['nothing']['there'] }}",
    ],
)
def test_the_sandbox_refuses(source: str) -> None:
    with pytest.raises(RowError, match=r"^the chat template cannot render this chat: ") as error:
        template(source).render([{"role": "user", "content": "Hi"}])
    assert error.value.kind == "template"


def test_a_templates_refusal_names_the_row(write) -> None:
    tokenizer = BytesTokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError) as error:
        load(Data.Conversations(write({"messages": CHAT})), tokenizer)
    assert str(error.value).splitlines()[1] == (
        "  rows.jsonl:1: the chat template cannot render this chat: roles must alternate"
    )


def test_a_broken_template_is_one_error_with_its_line() -> None:
    with pytest.raises(DataError, match=r"^chat template: no valid jinja2 in line 2: "):
        template("a\n{% if %}")


def test_prompts_for_samples_are_as_in_training(tokens: BytesTokenizer) -> None:
    encoder = Encoder(tokens)
    assert tokens.decode(encoder.prompt("Hi"), skip_special=False) == "<bos>Hi"
    chat = encoder.prompt([{"role": "user", "content": "Hi"}])
    assert (
        tokens.decode(chat, skip_special=False) == "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    )


def test_generation_stops_where_a_template_ends_its_turns(bpe: HFTokenizer) -> None:
    assert stop_ids(bpe) == {2, 4}
    bpe.chat_template = "{% for m in messages %}{{ m['content'] }}<pad>{% endfor %}"
    assert stop_ids(bpe) == {0, 2, 4}
