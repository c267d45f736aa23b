"""Masks of the assistant's tokens: by `{% generation %}` blocks, and derived by rendering where there are none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from nnxdsl import Data, DataError
from nnxdsl.data import BytesTokenizer, Encoder, load
from nnxdsl.data.tokenizers.huggingface import HFTokenizer

CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "what is the capital of France?"},
    {"role": "assistant", "content": "it is Paris. 🙂"},
    {"role": "user", "content": "And Köln?"},
    {"role": "assistant", "content": "a cat and a dog"},
]
TURN = "<start_of_turn>{{ m.role }}\n"
OPEN = "{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
BLOCK = "{% if m.role == 'assistant' %}{% generation %}ANSWER{% endgeneration %}{% else %}{{ m.content }}"
END = "<end_of_turn>"

TEMPLATES = {
    # The block ends with the end token, as in training templates of TRL.
    "end inside": "{{ bos_token }}{% for m in messages %}"
    + TURN
    + BLOCK.replace("ANSWER", "{{ m.content }}" + END)
    + END
    + "{% endif %}{{ '\\n' }}{% endfor %}"
    + OPEN,
    # A macro and a captured text, which are rendered before the text around them.
    "macro": "{% macro turn(m) %}"
    + TURN
    + BLOCK.replace("ANSWER", "{{ m.content }}" + END)
    + END
    + "{% endif %}{{ '\\n' }}{% endmacro %}{{ bos_token }}{% for m in messages %}"
    + "{% set text %}{{ turn(m) }}{% endset %}{{ text }}{% endfor %}"
    + OPEN,
    # SmolLM3's form: the tag is on a line of its own, the content is set before it.
    "lines": "{{ bos_token }}{% for m in messages %}{%- set content = m.content -%}\n"
    "{{- '<start_of_turn>' ~ m.role ~ '\\n' -}}\n"
    "{%- if m.role == 'assistant' -%}\n{% generation %}\n{{- content ~ '<end_of_turn>' -}}\n{%- endgeneration %}\n"
    "{%- else -%}\n{{- content ~ '<end_of_turn>' -}}\n{%- endif -%}\n{{- '\\n' -}}\n{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{- '<start_of_turn>assistant\\n' -}}{%- endif -%}",
}
THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}" + TURN + "{% if m.role == 'assistant' %}"
    "{% generation %}{% if loop.index0 > ns.last %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}"
    "{{ m.content }}<end_of_turn>{% endgeneration %}{% else %}{{ m.content }}<end_of_turn>{% endif %}{{ '\\n' }}"
    "{% endfor %}" + OPEN
)
"""Qwen3's form: the reasoning of answers before the last user message is left out."""


def without_blocks(source: str) -> str:
    return re.sub(r"{%(-?) (?:end)?generation (-?)%}", r"{%\1 if true \2%}{% endif %}", source)


def masked(
    tokenizer: Any, row: dict[str, Any], tmp_path: Path, **options: Any
) -> tuple[str, list[str], dict[str, int]]:
    """The text of a row, its runs of targets, and its warnings."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    dataset = load(Data.Conversations(str(path)), tokenizer, **options)
    tokens, target = (dataset.row(0)[name].tolist() for name in ("tokens", "target"))
    runs: list[list[int]] = []
    for before, here, token in zip([0, *target], target, tokens, strict=False):
        runs += [[]] if here and not before else []
        if here:
            runs[-1].append(token)
    decode = tokenizer.decode
    return decode(tokens, skip_special=False), [decode(run, skip_special=False) for run in runs], dataset.report.odd


def with_template(kind: str, bpe_dir: Path, source: str) -> Any:
    return BytesTokenizer(source) if kind == "bytes" else HFTokenizer(bpe_dir / "tokenizer.json", chat_template=source)


@pytest.mark.parametrize("first_target", [0, 3])
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_blocks_and_the_derived_mask_agree(bpe_dir: Path, name: str, kind: str, first_target: int) -> None:
    marked, derived = (
        Encoder(with_template(kind, bpe_dir, source)) for source in (TEMPLATES[name], without_blocks(TEMPLATES[name]))
    )
    assert marked.template().has_generation
    assert not derived.template().has_generation
    for messages in (CHAT, CHAT[1:3], [*CHAT, CHAT[1]], [CHAT[1], CHAT[2], CHAT[4]]):
        if any(message["role"] == "assistant" for message in messages[first_target:]):
            turns = range(first_target, len(messages))
            ids, mask, odd = marked.conversation(messages, turns)
            assert any(mask)
            assert (ids, mask, odd) == derived.conversation(messages, turns)


def test_a_template_that_drops_earlier_reasoning_is_masked_by_its_blocks(tmp_path: Path) -> None:
    answers = [{**CHAT[2], "reasoning_content": "hm"}, {**CHAT[4], "reasoning_content": "so"}]
    row = {"messages": [CHAT[1], answers[0], CHAT[3], answers[1]]}
    _, runs, _ = masked(BytesTokenizer(THINKING), row, tmp_path)
    assert runs == ["it is Paris. 🙂<end_of_turn>", "<think>\nso\n</think>\na cat and a dog<end_of_turn>"]
    for source in (THINKING, without_blocks(THINKING)):
        _, last, _ = masked(BytesTokenizer(source), row, tmp_path, loss_on="last_assistant")
        assert last == runs[1:]
    with pytest.raises(
        DataError, match=r"renders earlier text differently .*, one with {% generation %} blocks, or objective"
    ):
        masked(BytesTokenizer(without_blocks(THINKING)), row, tmp_path)


@pytest.mark.parametrize(
    ("block", "runs", "odd"),
    [
        # Where the block has less or more than the turn with its end token, the template decides.
        ("{% generation %}{{ m.content }}{% endgeneration %}<end_of_turn>\n", ["it is Paris. 🙂", "a cat and a dog"],
         {"generation block without the end of the turn": 1}),
        ("{% generation %}{{ m.content }}<end_of_turn>\n{% endgeneration %}{{ '' }}",
         ["it is Paris. 🙂<end_of_turn>\n", "a cat and a dog<end_of_turn>\n"], {}),
        ("{% generation %}{{ m.content[:2] }}{% endgeneration %}{{ m.content[2:] }}<end_of_turn>\n", ["it", "a "],
         {"generation block without the end of the turn": 1}),
        ("{% if loop.last %}{% generation %}{{ m.content }}<end_of_turn>{% endgeneration %}{% endif %}",
         ["a cat and a dog<end_of_turn>"], {}),
    ],
)  # fmt: skip
def test_the_template_decides_what_is_masked(tmp_path: Path, block: str, runs: list[str], odd: Any) -> None:
    source = "{% for m in messages %}" + TURN + "{% if m.role == 'assistant' %}" + block
    source += "{% else %}{{ m.content }}<end_of_turn>\n{% endif %}{% endfor %}" + OPEN
    chat = CHAT[3:] if "loop.last" in block else CHAT
    text, actual, warnings = masked(BytesTokenizer(source), {"messages": chat}, tmp_path)
    assert actual == runs
    assert warnings == odd
    assert text.endswith("a cat and a dog<end_of_turn>" + ("\n" if runs[-1].endswith("\n") else ""))


def test_blocks_of_a_prompt_are_no_targets(tmp_path: Path) -> None:
    row = {"prompt": CHAT[:4], "completion": CHAT[4:]}
    for source in (*TEMPLATES.values(), THINKING.replace("{{ m.reasoning_content }}", "hm")):
        _, runs, _ = masked(BytesTokenizer(source), row, tmp_path)
        assert [run.rpartition("\n")[2] for run in runs] == ["a cat and a dog<end_of_turn>"]


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("{% for m in messages %}{{ m.content }}{% if false %}{% generation %}a{% endgeneration %}{% endif %}"
         "{% endfor %}", "the chat template's {% generation %} blocks mark no text of this chat"),
        ("{% for m in messages %}{% set text %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}"
         "{{ text[:-1] }}{% endfor %}",
         "the chat template changes the text of its {% generation %} blocks afterwards"),
    ],
)  # fmt: skip
def test_blocks_that_mark_nothing(tmp_path: Path, source: str, what: str) -> None:
    with pytest.raises(DataError) as error:
        masked(BytesTokenizer(source), {"messages": CHAT}, tmp_path)
    assert str(error.value).splitlines()[1].endswith(f"rows.jsonl:1: {what}")


def test_blocks_of_no_row_are_found_where_a_message_quotes_them(tmp_path: Path) -> None:
    row = {"messages": [CHAT[1], {"role": "assistant", "content": "write {% generation %} \ufdd0generation<"}]}
    with pytest.raises(DataError, match="changes the text of its"):
        masked(BytesTokenizer(TEMPLATES["macro"]), row, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["end inside", "lines", "thinking"])  # it misplaces blocks inside macros
def test_masks_are_those_of_transformers(bpe_dir: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    source = TEMPLATES.get(name, THINKING.replace("{{ m.reasoning_content }}", "hm"))
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(bpe_dir / "tokenizer.json"), bos_token="<bos>", eos_token="<eos>", chat_template=source
    )
    ours = Encoder(HFTokenizer(bpe_dir / "tokenizer.json", chat_template=source))
    for messages in (CHAT[3:], CHAT[1:], CHAT, [*CHAT, CHAT[1]]):
        ids, mask, _ = ours.conversation(messages)
        expected = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert expected["input_ids"][: len(ids)] == ids
        assert expected["assistant_masks"] == [*map(int, mask), *[0] * (len(expected["input_ids"]) - len(ids))]
