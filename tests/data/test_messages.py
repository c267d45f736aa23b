"""Messages of chats: tool calls, tools, other fields and forms, and their warnings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nnxdsl import BadRows, Data, DataError, SpecError
from nnxdsl.data import BytesTokenizer, load

USER = {"role": "user", "content": "Hi"}
GOOD = {"role": "assistant", "content": "Hello"}
RUDE = {"role": "assistant", "content": "Go"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "days": 3}}}
TEXT_CALL = {"function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
OBJECT_CALL = {"function": {"name": "weather", "arguments": {"city": "Köln"}}}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}}}}}]

CALLING = (
    "{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{% if m.content is defined and m.content is not none %}"
    "{{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}{% set f = call.function or call %}"
    '\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}{% endfor %}<end_of_turn>\n'
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)


def calling(*calls: Any, **message: Any) -> dict[str, Any]:
    return {"role": "assistant", **message, "tool_calls": list(calls)}


def problem(data: Data, tokenizer: BytesTokenizer, **options: Any) -> str:
    with pytest.raises(DataError) as error:
        load(data, tokenizer, **options)
    return str(error.value).splitlines()[1].removeprefix("  rows.jsonl:1: ")


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(
    "asked",
    [
        calling(CALL),
        calling(CALL, content=None),
        calling(CALL, TEXT_CALL, content="Let me look."),
        calling(CALL["function"]),
    ],
)
def test_tool_calls_are_rendered_as_transformers_does(write, asked: dict[str, Any], tools: Any) -> None:
    rendering = pytest.importorskip("transformers.utils.chat_template_utils")
    messages, tokenizer = [USER, asked, TOOL, GOOD], BytesTokenizer(CALLING)
    dataset = load(Data.Conversations(write({"messages": messages, "tools": tools})), tokenizer)
    calls = [OBJECT_CALL if call is TEXT_CALL else call for call in asked["tool_calls"]]
    messages[1] = {**asked, "tool_calls": calls}  # templates read an object, and transformers decodes no text
    expected = rendering.render_jinja_template(
        [messages], tools=tools, chat_template=CALLING, bos_token="<bos>", eos_token="<eos>"
    )[0][0]
    row = dataset.row(0)
    assert tokenizer.decode(row["tokens"].tolist(), skip_special=False) == expected.removesuffix("\n")
    learnt = tokenizer.decode(row["tokens"][row["target"] == 1].tolist(), skip_special=False)
    assert "weather" in learnt
    assert "rain" not in learnt
    assert dataset.report.odd == {}


AS_IT_IS = CALLING.replace("{{ f.arguments | tojson }}", "{{ f.arguments }}")
ADDED = CALLING.replace("{{ f.arguments | tojson }}", "{{ '' + f.arguments }}")
ITEMS = CALLING.replace(
    "{{ f.arguments | tojson }}", "{% for k, v in f.arguments.items() %}{{ k }}={{ v }} {% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "written"),
    [(CALLING, '{"city": "Köln"}'), (AS_IT_IS, '{"city": "Köln"}'), (ADDED, '{"city": "Köln"}'), (ITEMS, "city=Köln ")],
)
@pytest.mark.parametrize("arguments", [{"city": "Köln"}, '{"city":"Köln"}'])
def test_arguments_are_written_once_whichever_form_rows_and_templates_have(
    write, template: str, written: str, arguments: Any
) -> None:
    call = calling({"function": {"name": "weather", "arguments": arguments}})
    tokenizer = BytesTokenizer(template)
    dataset = load(Data.Conversations(write({"messages": [USER, call]})), tokenizer)
    text = tokenizer.decode(dataset.row(0)["tokens"].tolist(), skip_special=False)
    assert text.endswith(f'"arguments": {written}}}<end_of_turn>')
    assert dataset.report.odd == {}


def test_calls_and_results_of_sharegpt_are_those_of_openai(write) -> None:
    tokenizer, call = BytesTokenizer(CALLING), {"name": "weather", "arguments": {"city": "Köln"}}
    expected = [USER, calling({"function": call}), {"role": "tool", "content": "rain"}, GOOD]
    rain = {"from": "observation", "value": "rain"}
    ends = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}
    forms = [
        {"messages": expected},
        {"conversations": [ends[0], {"from": "function_call", "value": json.dumps(call)}, rain, ends[1]]},
        {"conversations": [ends[0], {"from": "function_call", "value": [call]}, {**rain, "from": "tool"}, ends[1]]},
        {"messages": [USER, {"role": "function_call", "content": json.dumps([call])}, expected[2], GOOD]},
        {"conversations": [ends[0], {"from": "bot", "value": json.dumps(call)}, {**rain, "from": "api"}, ends[1]]},
    ]
    roles = {"bot": "function_call", "api": "tool"}
    dataset = load(Data.Conversations(write(*forms), roles=roles), tokenizer)
    assert [dataset.row(n)["tokens"].tolist() for n in range(5)] == [dataset.row(0)["tokens"].tolist()] * 5
    assert [dataset.row(n)["target"].tolist() for n in range(5)] == [dataset.row(0)["target"].tolist()] * 5
    answer = {"role": "api", "content": "rain"}
    prompts = [{"prompt": [*expected[:2], one]} for one in (expected[2], answer)]
    one, other = (load(Data.Prompts(write(row), roles=roles), tokenizer).row(0)["prompt"].tolist() for row in prompts)
    assert one == other
    row = {"conversations": [ends[0], {"from": "function_call", "value": "weather()"}]}
    assert f"message 2: expected the JSON text of {SHAPE} or a list" in problem(
        Data.Conversations(write(row)), tokenizer
    )


def test_roles_are_mapped_to_those_of_chats() -> None:
    with pytest.raises(SpecError) as error:
        Data.Conversations("chats.jsonl", roles={"bot": "asistant", "api": "x"})
    assert "roles: 'bot' as 'asistant': no role of chats; did you mean 'assistant'?" in str(error.value)
    assert "roles: 'api' as 'x': no role of chats; use system, developer, user" in str(error.value)


def test_arguments_that_are_no_json_object_are_counted(write) -> None:
    rows = [calling({"function": {"name": "f", "arguments": text}}) for text in ("{broken", "[1]", "", "{}")]
    path = write(*({"messages": [{**USER, "content": str(n)}, row]} for n, row in enumerate(rows)))
    report = load(Data.Conversations(path), BytesTokenizer(CALLING)).report
    assert report.odd == {"tool arguments that are no JSON object": 2}


BLOCKS = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<end_of_turn>{% endgeneration %}{% else %}{{ m.content }}<end_of_turn>{% endif %}"
    "\n{% endfor %}"
)
WEIGHED = [USER, {**GOOD, "weight": 0}, {**USER, "content": "And?"}, {**RUDE, "weight": 1}]


@pytest.mark.parametrize("template", [None, BLOCKS])
@pytest.mark.parametrize(
    ("loss_on", "row", "learnt"),
    [
        ("assistant", {"messages": WEIGHED}, "Go<end_of_turn>"),
        ("last_assistant", {"messages": WEIGHED}, "Go<end_of_turn>"),
        ("assistant", {"messages": [{**USER, "weight": 0}, GOOD, *WEIGHED[2:]]}, "Hello<end_of_turn>Go<end_of_turn>"),
        ("assistant", {"messages": [*WEIGHED[:3], GOOD, USER, {**RUDE, "weight": 0}]}, "Hello<end_of_turn>"),
        ("completion", {"prompt": [USER], "completion": [GOOD, *WEIGHED, GOOD]}, None),
        ("all", {"messages": [*WEIGHED[:3], GOOD]}, None),
    ],
)  # fmt: skip
def test_messages_of_weight_0_have_no_loss(
    write, template: str | None, loss_on: str, row: dict[str, Any], learnt: str | None
) -> None:
    tokenizer = BytesTokenizer(template)
    dataset = load(Data.Conversations(write(row)), tokenizer, loss_on=loss_on)
    ours = dataset.row(0)
    text = tokenizer.decode(ours["tokens"][ours["target"] == 1].tolist(), skip_special=False)
    if learnt is not None:
        assert text == learnt
    else:  # what the same chat has without the weights, but for the one answer
        plain = {name: [{k: v for k, v in m.items() if k != "weight"} for m in chat] for name, chat in row.items()}
        other = load(Data.Conversations(write(plain)), tokenizer, loss_on=loss_on).row(0)
        assert other["tokens"].tolist() == ours["tokens"].tolist()
        out = ours["tokens"][(other["target"] == 1) & (ours["target"] == 0)].tolist()
        assert tokenizer.decode(out, skip_special=False) == "Hello<end_of_turn>"
        assert not ((other["target"] == 0) & (ours["target"] == 1)).any()
    assert dataset.report.odd == {}


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"messages": [USER, {**GOOD, "weight": 0.5}]}, "'weight': expected 0 or 1, got 0.5"),
        ({"messages": [{**USER, "weight": 1}, GOOD]}, "'weight': only messages of the assistant have a loss"),
        ({"messages": [USER, {**GOOD, "weight": 0}]}, "no message of the assistant that the loss reads has a weight"),
        ({"prompt": [USER], "chosen": [{**GOOD, "weight": 0}], "rejected": [RUDE]}, "chosen: its message has weight 0"),
    ],
)
def test_weights_that_leave_nothing_are_refused(write, tokens: BytesTokenizer, row: dict[str, Any], what: str) -> None:
    data = Data.Preferences(write(row)) if "chosen" in row else Data.Conversations(write(row))
    assert what in problem(data, tokens)


def test_an_answer_may_be_a_tool_call(write) -> None:
    tokenizer = BytesTokenizer(CALLING)
    for row in (
        {"prompt": [USER], "chosen": [calling(CALL)], "rejected": [RUDE], "tools": TOOLS},
        {"chosen": [USER, calling(CALL)], "rejected": [USER, RUDE], "tools": TOOLS},
    ):
        parts = load(Data.Preferences(write(row)), tokenizer).row(0)
        prompt, chosen, _ = (tokenizer.decode(ids.tolist(), skip_special=False) for ids in parts.values())
        assert prompt.startswith('<bos>{"type": "function"')
        assert chosen == '{"name": "weather", "arguments": {"city": "Köln", "days": 3}}<end_of_turn>'


def test_an_empty_list_of_calls_is_no_call(write, tokens: BytesTokenizer) -> None:
    one, other = (
        load(Data.Conversations(write({"messages": [USER, answer]})), tokens).ids_digest()
        for answer in (GOOD, {**GOOD, "tool_calls": []})
    )
    assert one == other


FROM = (
    "expected one of human, gpt, observation, system, developer, user, assistant, tool, function_call; or map it with "
    "roles"
)
SHAPE = '{"type": "function", "function": {"name": ..., "arguments": {...}}}'


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ({**GOOD, "tool_calls": 3}, f"'tool_calls': expected a list of {SHAPE}, got the number 3"),
        ({**GOOD, "tool_calls": "weather()"}, f"'tool_calls': expected a list of {SHAPE}, got text"),
        ({**GOOD, "tool_calls": {"name": "f"}}, f"'tool_calls': expected a list of {SHAPE}, got an object"),
        (calling("weather()"), f"'tool_calls'[0]: expected {SHAPE}, got text"),
        (calling(CALL, {"function": "f"}), f"'tool_calls'[1]: expected {SHAPE}, got text"),
        (calling({"function": {"arguments": {}}}), f"'tool_calls'[0]: expected {SHAPE}, but its name is null"),
        (calling({"name": "f", "arguments": [1]}),
         "'tool_calls'[0]: 'arguments': expected an object or its JSON text, got a list"),
        ({**USER, "tool_calls": [CALL]}, "only messages of the assistant may have 'tool_calls'"),
        ({"role": "assistant"}, "'content' is missing; this message has: role"),
        ({"from": ["gpt"], "value": "a"}, f"'from' is a list; {FROM}"),
        ({"from": {"a": 1}, "value": "a"}, f"'from' is an object; {FROM}"),
        ({"from": "gpt", "value": "a", "content": "b"}, "has both from/value and role/content; keep one of them"),
        ({"role": ["assistant"], "content": "a"}, "'role': expected text, got a list"),
        ({"role": "assistant", "content": [{"type": "image", "url": "u"}]},
         "'content': a part of type 'image': no model reads image input yet, and the text alone would mean something "
         "else; leave such rows out"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "u"}}]},
         "'content': a part of type 'input_audio': no model reads audio input yet, and the text alone would mean "
         "something else; leave such rows out"),
        ({"role": "user", "content": [{"image_url": "u"}]},
         "'content': a part of type 'image': no model reads image input yet, and the text alone would mean something "
         "else; leave such rows out"),
        ({"role": "user", "content": "a", "images": ["u"]},
         "field 'images': no model reads image input yet, and the text alone would mean something else; leave such "
         "rows out"),
        ({"role": "assistant", "content": [{"type": "text", "text": "a", "note": "n"}]},
         "'content': a text part has fields that are not read: note"),
    ],
)  # fmt: skip
def test_messages_that_cannot_be_read(write, message: dict[str, Any], what: str) -> None:
    path = write({"messages": [USER, message]})
    assert problem(Data.Conversations(path), BytesTokenizer(CALLING)) == f"field 'messages', message 2: {what}"


@pytest.mark.parametrize("name", ["image", "images", "videos", "audio"])
@pytest.mark.parametrize(
    ("data", "row"),
    [
        (Data.Conversations, {"messages": [USER, GOOD]}),
        (Data.Preferences, {"prompt": "a", "chosen": "b", "rejected": "c"}),
        (Data.Feedback, {"prompt": [USER], "completion": [GOOD], "label": True}),
        (Data.Prompts, {"prompt": [USER]}),
    ],
)
def test_images_beside_text_are_refused(write, tokens: BytesTokenizer, data: Any, row: Any, name: str) -> None:
    medium = name.removesuffix("s")
    cause = f"no model reads {medium} input yet, and the text alone would mean something else; leave such rows out"
    assert problem(data(write({**row, name: ["cat.png"]})), tokens) == f"field '{name}': {cause}"
    other = {"prompt": [GOOD], "completion": [RUDE], "label": True} if data is Data.Feedback else row
    assert load(data(write({**row, name: []}, {**other, name: None})), tokens).report.accepted == 2


CURE = "set one that does with Tokenizer.File(path, chat_template=...), or remove it from the row"


@pytest.mark.parametrize(
    ("source", "row", "what"),
    [
        (None, {"messages": [USER, calling(CALL, content="a"), TOOL, GOOD]},
         "message 2 of the chat (assistant), 'tool_calls': the chat template does not render it; " + CURE),
        (None, {"messages": [USER, GOOD], "tools": TOOLS},
         "field 'tools': the chat template does not render it; " + CURE),
        (CALLING.replace("{{ f.name }}", "f"), {"messages": [USER, calling(CALL), TOOL, GOOD]},
         "message 2 of the chat (assistant), 'tool_calls': the chat template does not render it; " + CURE),
        (CALLING.replace("f.arguments", "{}"), {"messages": [USER, calling(CALL), TOOL, GOOD]},
         "message 2 of the chat (assistant), 'tool_calls': the chat template does not render it; " + CURE),
        # A system message that is left out, though its text stands in another message.
        (CALLING.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"),
         {"messages": [{"role": "system", "content": "Hi"}, USER, GOOD]},
         "message 1 of the chat (system), 'content': the chat template does not render it; " + CURE),
    ],
)  # fmt: skip
def test_what_a_template_leaves_out_is_a_bad_row(write, source: str | None, row: dict[str, Any], what: str) -> None:
    path, tokenizer = write(row, {"messages": [USER, RUDE]}), BytesTokenizer(source)
    assert problem(Data.Conversations(path), tokenizer) == what
    dataset = load(Data.Conversations(path, bad_rows=BadRows.Skip(at_most=1)), tokenizer)
    assert dataset.report.dropped == {"not rendered": 1}


def test_tools_are_a_list_of_schemas_or_its_json_text(write) -> None:
    tokenizer, text = BytesTokenizer(CALLING), '[{"type": "function", "function": {"name": "f"}}]'
    one, other = (
        load(Data.Conversations(write({"messages": [USER, GOOD], "tools": tools})), tokenizer).ids_digest()
        for tools in (text, [{"type": "function", "function": {"name": "f"}}])
    )
    assert one == other
    for tools in ("f(x)", 3, ["f"], {"name": "f"}, '["f"]'):
        path = write({"messages": [USER, GOOD], "tools": tools})
        assert problem(Data.Conversations(path), tokenizer).startswith("field 'tools': expected "), tools
    path = write({"messages": [USER, GOOD], "tools": [{"name": "<end_of_turn>"}]})
    assert problem(Data.Conversations(path), tokenizer).startswith("field 'tools': contains '<end_of_turn>'")


THINKING = "{% for m in messages %}[{{ m.content.split('</think>')[-1] }}]{% endfor %}"
IDS = {"prompt_ids": [1], "chosen_ids": [2], "rejected_ids": [3]}
PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("data", "row", "odd"),
    [
        (Data.Preferences, PAIR, {}),
        (Data.Preferences, {**PAIR, "rejected": "a \n"}, {"differ by blanks alone": 1}),
        (Data.Preferences, {"prompt": [USER], "chosen": "a\n b", "rejected": "a b"}, {"differ by blanks alone": 1}),
        (Data.Preferences, {**PAIR, **IDS},
         {"two forms (prompt_ids/chosen_ids/rejected_ids is read, prompt, chosen, rejected is not)": 1}),
        (Data.Preferences, {**PAIR, "tools": TOOLS}, {"two forms (plain text is read, tools is not)": 1}),
        (Data.Preferences, {**PAIR, "prompt": "q\0"}, {"nul character": 1}),
        (Data.Feedback, {**PAIR, "completion": "c", "label": True},
         {"two forms (chosen/rejected is read, completion, label is not)": 1}),
        (Data.Conversations, {"messages": [USER, GOOD], "prompt": "Hi"},
         {"two forms (messages is read, prompt is not)": 1}),
        (Data.Conversations, {"messages": [USER, GOOD], "conversations": [USER, RUDE]},
         {"two forms (messages is read, conversations is not)": 1}),
        (Data.Conversations, {"messages": [GOOD, RUDE]}, {"only assistant messages": 1}),
        (Data.Conversations, {"messages": [{"role": "system", "content": " "}, USER, GOOD]}, {"blank message": 1}),
        (Data.Conversations, {"messages": [{**USER, "name": "Ada"}, {**GOOD, "mood": "kind"}]},
         {"message field ignored by the chat template": 1}),
        (Data.Conversations, {"messages": [{**USER, "id": "7"}, GOOD]}, {}),
        (Data.Conversations, {"prompt": " ", "completion": "a"}, {"blank prompt": 1}),
        (Data.Prompts, {"prompt": [GOOD]}, {"only assistant messages": 1}),
    ],
)  # fmt: skip
def test_odd_rows_are_counted_and_kept(write, tokens: BytesTokenizer, data: Any, row: Any, odd: dict[str, int]) -> None:
    others = [{"prompt": "other", "chosen": "x", "rejected": "y"}] if data is Data.Feedback else []
    assert load(data(write(row, *others)), tokens).report.odd == odd


def test_text_that_a_template_cuts_is_counted(write) -> None:
    row = {"prompt": [{"role": "user", "content": "<think>no</think>Hi"}], "chosen": "a", "rejected": "b"}
    report = load(Data.Preferences(write(row)), BytesTokenizer(THINKING)).report
    assert report.odd == {"text changed by the chat template": 1}


def test_columns_that_are_not_read_are_counted(write, tokens: BytesTokenizer) -> None:
    report = load(
        Data.Preferences(write({**PAIR, "id": 1, "score": 2}, {**PAIR, "prompt": "r", "id": 2})), tokens
    ).report
    assert report.unread == {"id": 2, "score": 1}
    assert report.lines()[-1] == "columns not read: id (2), score (1)"
    assert load(Data.Prompts(write({"prompt": "q", "id": 1})), tokens).report.unread == {}  # rewards may read all
    many = load(Data.Text(write({"text": "a", **{f"column {n}": n for n in range(99)}})), tokens).report.unread
    assert len(many) == 50


def test_loss_on_completion_reads_the_completion_beside_messages(write, tokens: BytesTokenizer) -> None:
    row = {"messages": [USER, GOOD], "prompt": "Q: ", "completion": "yes"}
    dataset = load(Data.Conversations(write(row)), tokens, loss_on="completion")
    assert tokens.decode(dataset.row(0)["tokens"].tolist(), skip_special=False) == "<bos>Q: yes<eos>"
    assert dataset.report.odd == {"two forms (prompt/completion is read, messages is not)": 1}
