"""Random rows: all of their text is trained on, or a count or an error names what is not."""

from __future__ import annotations

import copy
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nnxdsl import BadRows, Data, DataError
from nnxdsl.data import BytesTokenizer, Dataset, Prompts, load

MUTATIONS = 1_000

TRIMMING = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)
CALLING = (  # as Qwen's: content, calls and tools are written, names of tools are not
    "{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{% if m.content %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{% set f = call.function or call %}"
    '\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}{% endfor %}<end_of_turn>\n'
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m['role'] }}] {{ m['content'] }}</s>{% endfor %}"
)
TEMPLATES = (None, TRIMMING, CALLING, ALTERNATING)

READS = {
    Data.Preferences: {"prompt", "chosen", "rejected", "prompt_ids", "chosen_ids", "rejected_ids", "tools"},
    Data.Feedback: {
        "prompt", "completion", "label", "prompt_ids", "completion_ids", "chosen", "rejected", "chosen_ids",
        "rejected_ids", "tools",
    },
    Data.Conversations: {"messages", "conversations", "prompt", "completion", "tools"},
    Data.Text: {"text"},
    Data.Prompts: {"prompt", "tools"},
}  # fmt: skip
NOT_TEXT = {"role", "from", "id", "tool_call_id", "type", "index"}
KNOWN = sorted(set().union(*READS.values()))

Row = dict[str, Any]
_last = {"word": 0}


def word() -> str:
    """A word that stands nowhere else, so that it is found where it was put, or nowhere."""
    _last["word"] += 1
    return f"w{_last['word']}x"


def said(role: str) -> Row:
    return {"role": role, "content": f"{word()} {word()}"}


def shared(*roles: str) -> list[Row]:
    return [said(role) for role in roles]


def call() -> Row:
    function = {"name": word(), "arguments": {word(): word(), "n": 3}}
    return {"id": word(), "type": "function", "function": function}


def with_prompt(text: str, *sides: str) -> list[str]:
    return [f"{text} {side}" for side in sides]


def chat_pair() -> Row:
    context = shared("user")
    return {"chosen": [*context, said("assistant")], "rejected": [*context, said("assistant")]}


def ids(draw: random.Random) -> list[int]:
    return [draw.randrange(320) for _ in range(draw.randrange(1, 9))]


def calling() -> Row:
    asked = {"role": "assistant", "content": None, "tool_calls": [call()]}
    answer = {"role": "tool", "tool_call_id": word(), "content": word()}
    tools = [{"type": "function", "function": {"name": word(), "description": word()}}]
    return {"messages": [said("user"), asked, answer, said("assistant")], "tools": tools}


FORMS: list[tuple[type[Data], Callable[[random.Random], Row]]] = [
    (Data.Preferences, lambda _: {"prompt": word(), "chosen": word(), "rejected": word()}),
    (Data.Preferences, lambda _: dict(zip(("chosen", "rejected"), with_prompt(word(), word(), word()), strict=True))),
    (Data.Preferences, lambda _: {"prompt": shared("user"), "chosen": shared("assistant"),
                                  "rejected": shared("assistant")}),
    (Data.Preferences, lambda _: chat_pair()),
    (Data.Preferences, lambda draw: {f"{name}_ids": ids(draw) for name in ("prompt", "chosen", "rejected")}),
    (Data.Feedback, lambda draw: {"prompt": word(), "completion": word(), "label": draw.random() < 0.5}),
    (Data.Feedback, lambda draw: {"prompt": shared("system", "user"), "completion": shared("assistant"),
                                  "label": draw.random() < 0.5}),
    (Data.Feedback, lambda draw: {"prompt_ids": ids(draw), "completion_ids": ids(draw), "label": True}),
    (Data.Feedback, lambda _: chat_pair()),
    (Data.Conversations, lambda _: {"messages": shared("user", "assistant", "user", "assistant")}),
    (Data.Conversations, lambda _: calling()),
    (Data.Conversations, lambda _: {"conversations": [{"from": "human", "value": word()},
                                                      {"from": "gpt", "value": word()}]}),
    (Data.Conversations, lambda _: {"prompt": word(), "completion": word()}),
    (Data.Conversations, lambda _: {"prompt": shared("user"), "completion": shared("assistant")}),
    (Data.Prompts, lambda _: {"prompt": word(), "answer": word(), "level": 2}),
    (Data.Prompts, lambda _: {"prompt": shared("system", "user"), "answer": [word()]}),
    (Data.Text, lambda _: {"text": f"{word()} {word()}"}),
]  # fmt: skip

ODD_VALUES: list[Callable[[], Any]] = [
    lambda: None, lambda: 3, lambda: -1.5, lambda: True, lambda: "", lambda: "  \n\t ", list, dict,
    lambda: word(), lambda: [word()], lambda: {word(): word()}, lambda: [[word()]], lambda: f"  {word()} \n",
    lambda: f"{word()}\0{word()}", lambda: f"{word()} é\u2028\"\\ <b>&", lambda: shared("assistant"),
    lambda: shared("user", "assistant"), lambda: [{"type": "text", "text": word()}, {"type": "text", "text": word()}],
    lambda: [{"type": "image", "image": word()}], lambda: [call()], lambda: [{"name": word()}], lambda: call(),
    lambda: [{"function": {"name": word(), "arguments": json.dumps({word(): word()})}}], lambda: f"<eos>{word()}",
    lambda: [1, 2, 3], lambda: [1, "2"], lambda: [400], lambda: float("nan"), lambda: float("inf"), lambda: "\ud800",
    lambda: json.loads("[" * 70 + "]" * 70), lambda: "<think>" + word() + "</think>" + word(),
]  # fmt: skip
FIELDS = [
    *KNOWN, "from", "value", "role", "content", "tool_calls", "name", "reasoning_content", "function_call", "weight",
    "system", "text",
]  # fmt: skip


def containers(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from containers(item)


def mutated(row: Row, draw: random.Random) -> None:
    """Changes one thing in a row, in place."""
    place = draw.choice([value for value in containers(row) if value is row or value])
    keys = list(place) if isinstance(place, dict) else list(range(len(place)))
    key = draw.choice(keys) if keys else None
    match draw.randrange(6):
        case 0 | 1 if key is not None:
            place[key] = draw.choice(ODD_VALUES)()
        case 2 if key is not None:
            del place[key]
        case 3 if isinstance(place, dict) and key is not None:
            place[draw.choice(FIELDS)] = place.pop(key)
        case 4 if isinstance(place, dict):
            place[draw.choice(FIELDS)] = draw.choice(ODD_VALUES)()
        case _:
            texts = [
                (box, index)
                for box in containers(row)
                for index in (box if isinstance(box, dict) else range(len(box)))
                if isinstance(box[index], str)
            ]
            if texts:
                box, index = draw.choice(texts)
                box[index] = draw.choice(["", " ", box[index] + " ", box[index] + "\n", "\n" + box[index]])


def broken(line: bytes, draw: random.Random) -> bytes:
    """A line with what no JSON writer would write, or as other systems write it."""
    index = draw.randrange(len(line))
    match draw.randrange(8):
        case 0:
            return line[:index]
        case 1:
            return line[:index] + b"\xff" + line[index:]
        case 2:
            return line[:-1] + b', "prompt": "twice", "prompt": "twice"}'
        case 3:
            return line.replace(b'"content": ', b'"content": "twice", "content": ', 1)
        case 4:
            return b"\xef\xbb\xbf" + line
        case 5:
            return b"\r\n\n" + line + b"\r\n\r"
        case 6:
            return line + line
        case _:
            return b"[" + line + b"]"


def strict(line: bytes) -> Row | None:
    """The row of a line that every parser reads alike; None for other lines."""

    def no_key_twice(pairs: list[tuple[str, Any]]) -> Row:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    def nothing(_: str) -> None:
        raise AssertionError

    try:
        value = json.loads(line.decode(), object_pairs_hook=no_key_twice, parse_constant=nothing)
        json.dumps(value, ensure_ascii=False).encode()
    except (AssertionError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def text_words(value: Any) -> set[str]:
    """All words of a value, keys included, but for what is no text."""
    if isinstance(value, str):
        return set(re.findall(r"w\d+x", value))
    if isinstance(value, dict):
        return set().union(
            *(text_words(key) | text_words(part) for key, part in value.items() if key not in NOT_TEXT), set()
        )
    return set().union(*map(text_words, value), set()) if isinstance(value, list) else set()


def learnt(dataset: Dataset, number: int) -> str:
    """What the tokens of a line of the file say; an answer that feedback only compares with is not the line's."""
    rows = [row for row, where in enumerate(dataset.row_ids) if where == f"rows.jsonl:{number}"]
    sides = ("chosen",) if getattr(dataset, "desirable", None) is not None else ("chosen", "rejected")
    result: list[list[int]] = []
    for row in rows:
        part = {name: ids.tolist() for name, ids in dataset.row(row).items()}
        result += [part["prompt"] + part[side] for side in sides] if "chosen" in part else [part["tokens"]]
    return " ".join(BytesTokenizer().decode(ids, skip_special=False) for ids in result)


def unaccounted(row: Row, kind: type[Data], text: str, dataset: Dataset) -> set[str]:
    """Words of a kept row that are neither in its tokens nor counted by what the report says of it."""
    missing, odd = (
        {name: text_words(value) - text_words(text) for name, value in row.items()},
        " ".join(dataset.report.odd),
    )
    for name in missing:
        if name not in READS[kind] and dataset.report.unread.get(name) == 1:
            missing[name] = set()
        for forms in re.findall(r"two forms \(.*? is read, (.*?) is not\)", odd):
            if name in forms.split(", "):
                missing[name] = set()
    if "message field ignored by the chat template" in dataset.report.odd:
        read = {"content", "tool_calls"}
        ignored = [
            part
            for value in row.values()
            for message in (value if isinstance(value, list) else ())
            if isinstance(message, dict)
            for name, part in message.items()
            if name not in read and (name != "value" or "content" in message)
        ]
        missing = {name: result - text_words(ignored) for name, result in missing.items()}
    return set().union(*missing.values(), set())


def file_of(line: bytes, number: int, good: Callable[[random.Random], Row]) -> tuple[int, bytes]:
    """A file with the line between good ones, and the number that the row has in it."""
    others = [json.dumps(good(random.Random(number + place))).encode() for place in range(3)]
    before = [*others[:2], line] if number % 2 else [line]
    data = b"\n".join([*before, *others[len(before) - 1 :]])
    numbered = [
        index for index, one in enumerate(data.split(b"\n"), start=1) if one == line.strip(b"\r\n").split(b"\n")[-1]
    ]
    return (numbered or [0])[0], data


def loaded(data: Data, tokenizer: BytesTokenizer, case: str) -> Dataset | str:
    """The dataset, or the message of its refusal; anything else is a fault."""
    try:
        return load(data, tokenizer, vocabulary=320)
    except DataError as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"{case}\n{type(error).__name__}: {error}") from error


@pytest.mark.default_variants(2)
@pytest.mark.parametrize("seed", range(4))
def test_no_text_of_a_row_vanishes(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    draw, _last["word"] = random.Random(seed), 0
    outcomes: Counter[str] = Counter()
    for number in range(MUTATIONS // 4):
        kind, form = draw.choice(FORMS)
        row = copy.deepcopy(form(draw))
        for _ in range(draw.choice((0, 1, 1, 1, 2, 3))):
            mutated(row, draw)
        line = json.dumps(row, ensure_ascii=draw.random() < 0.5 or "\\ud800" in json.dumps(row)).encode()
        if draw.random() < 0.15:
            line = broken(line, draw)
        index, content = file_of(line, number, form)
        Path("rows.jsonl").write_bytes(content)
        data = kind("rows.jsonl", bad_rows=BadRows.Skip(at_most=9))  # type: ignore[call-arg]
        tokenizer = BytesTokenizer(draw.choice(TEMPLATES))
        case = f"seed {seed}, mutation {number}: {kind.__name__} {line!r}"
        dataset = loaded(data, tokenizer, case)
        if isinstance(dataset, str):  # the template cannot write the good rows either
            assert re.match(r"rows.jsonl: (no row is left|all rows have the same prompt)", dataset), (case, dataset)
            outcomes["refused"] += 1
            continue
        report, lines = dataset.report, sum(1 for one in content.split(b"\n") if one.strip() and one != b"\xef\xbb\xbf")
        assert report.rows == lines == report.accepted + sum(report.dropped.values()), case
        is_kept = f"rows.jsonl:{index}" in dataset.row_ids
        outcomes[f"kept {kind.__name__}" if is_kept else "counted"] += 1
        if not is_kept:
            continue
        parsed = strict(line.strip().removeprefix(b"\xef\xbb\xbf"))
        assert parsed is not None, case
        if isinstance(dataset, Prompts):
            prompt = dataset.row(dataset.row_ids.index(f"rows.jsonl:{index}"))["prompt"].tolist()
            text = tokenizer.decode(prompt, skip_special=False)
            assert not unaccounted({"prompt": parsed["prompt"]}, kind, text, dataset), (case, text, report)
            known = {name: value for name, value in parsed.items() if value is not None}
            assert dataset.columns[dataset.row_ids.index(f"rows.jsonl:{index}")] == known, case
            continue
        text = learnt(dataset, index)
        assert not unaccounted(parsed, kind, text, dataset), (case, text, report)
        rows = [row for row, where in enumerate(dataset.row_ids) if where == f"rows.jsonl:{index}"]
        taken = [ids.tolist() for row in rows for ids in dataset.row(row).values()]
        for name in READS[kind] & {name for name in parsed if name.endswith("_ids") and parsed[name] is not None}:
            assert parsed[name] in taken or name in str(report.odd), case
    assert len(outcomes) == 7, outcomes
    assert outcomes["counted"] > 50, outcomes
