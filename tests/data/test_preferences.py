"""Preference pairs: every form of a row, the border of prompt and completion, truncation, refused rows."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from nnxdsl import BadRows, Data, DataError
from nnxdsl.data import BytesTokenizer, Pairs, load
from nnxdsl.data.summary import summarize
from nnxdsl.data.tokenizers.chat_template import ALL_OF_A_TURN
from nnxdsl.data.tokenizers.huggingface import HFTokenizer

USER = {"role": "user", "content": "Hi"}
GOOD = {"role": "assistant", "content": "Hello"}
RUDE = {"role": "assistant", "content": "Go"}
RESULT = {"role": "tool", "content": "4"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
TURN = "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
CHAT = (TURN, "Hello<end_of_turn>", "Go<end_of_turn>")

ABA = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"


def shown(tokenizer: Any, dataset: Any, row: int = 0) -> tuple[str, ...]:
    """A row's parts as text, markers included."""
    return tuple(tokenizer.decode(ids.tolist(), skip_special=False) for ids in dataset.row(row).values())


def message(data: Data, tokenizer: Any, **options: Any) -> str:
    with pytest.raises(DataError) as error:
        load(data, tokenizer, **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Q: ", "chosen": "yes", "rejected": "no"}, ("<bos>Q: ", "yes<eos>", "no<eos>")),
        ({"prompt": "<bos>Q: ", "chosen": "yes<eos>", "rejected": "no"}, ("<bos>Q: ", "yes<eos>", "no<eos>")),
        ({"chosen": "Q: yes", "rejected": "Q: no"}, ("<bos>Q: ", "yes<eos>", "no<eos>")),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [RUDE]}, CHAT),
        ({"prompt": [USER], "chosen": "Hello", "rejected": "Go"}, CHAT),
        ({"prompt": "Hi", "chosen": [GOOD], "rejected": [RUDE]}, CHAT),
        ({"prompt": "Hi", "chosen": [USER, GOOD], "rejected": [USER, RUDE]}, CHAT),
        ({"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, RUDE]}, CHAT),
        ({"chosen": [USER, GOOD], "rejected": [USER, RUDE]}, CHAT),
        (
            {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, USER, RUDE]},
            (TURN + "Hello<end_of_turn>\n" + TURN.removeprefix("<bos>"), *CHAT[1:]),
        ),
        ({"prompt_ids": [5], "chosen_ids": [1, 2], "rejected_ids": [3]}, ("\x05", "\x01\x02", "\x03")),
    ],
)
def test_every_form_of_a_row(write, tokens: BytesTokenizer, row: dict, expected: tuple[str, ...]) -> None:
    dataset = load(Data.Preferences(write(row)), tokens)
    assert shown(tokens, dataset) == expected
    assert dataset.is_chat == (expected[0].startswith("<bos><start"))


CALLED = '[[[{"function": {"name": "f", "arguments": {"x": 1}}}]<end_of_turn>]]\n<start_of_turn>tool\n'
ASSISTANT = "<start_of_turn>assistant\n"
ASKED = f"<start_of_turn>user\nHi<end_of_turn>\n{ASSISTANT}"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        pytest.param(
            {"prompt": [USER], "chosen": [GOOD, USER, GOOD], "rejected": [RUDE]},
            (ASKED, f"[[Hello<end_of_turn>]]\n{ASKED}[[Hello<end_of_turn>]]", "[[Go<end_of_turn>]]"),
            id="turns of users",
        ),
        pytest.param(
            {"prompt": [USER], "chosen": [CALL, RESULT, GOOD], "rejected": [USER, CALL, RESULT, RUDE]},
            (
                ASKED,
                f"{CALLED}4<end_of_turn>\n{ASSISTANT}[[Hello<end_of_turn>]]",
                f"{CALLED}4<end_of_turn>\n{ASSISTANT}[[Go<end_of_turn>]]",
            ),
            id="calls of tools and their results",
        ),
        pytest.param(
            {"prompt": [USER], "chosen": [{**GOOD, "weight": 0}, USER, GOOD], "rejected": [RUDE, USER]},
            (ASKED, f"Hello<end_of_turn>\n{ASKED}[[Hello<end_of_turn>]]", "[[Go<end_of_turn>]]"),
            id="an answer of weight 0, and a last turn that nobody answers",
        ),
        pytest.param(
            {"prompt": [USER, GOOD], "chosen": [GOOD, USER, GOOD], "rejected": [RUDE]},
            (f"{ASKED}Hello", f"[[Hello<end_of_turn>]]\n{ASKED}[[Hello<end_of_turn>]]", "[[Go<end_of_turn>]]"),
            id="a prompt that is continued",
        ),
        pytest.param(
            {
                "chosen": [USER, GOOD, {**USER, "content": "one"}, GOOD],
                "rejected": [USER, GOOD, {**USER, "content": "two"}, RUDE],
            },
            (
                f"{ASKED}Hello<end_of_turn>\n<start_of_turn>user\n",
                f"one<end_of_turn>\n{ASSISTANT}[[Hello<end_of_turn>]]",
                f"two<end_of_turn>\n{ASSISTANT}[[Go<end_of_turn>]]",
            ),
            id="no prompt: users who differ",
        ),
        pytest.param(
            {"chosen": [USER, GOOD, GOOD, USER, GOOD], "rejected": [USER, GOOD, RUDE]},
            (
                f"{ASKED}Hello<end_of_turn>\n{ASSISTANT}",
                f"[[Hello<end_of_turn>]]\n{ASKED}[[Hello<end_of_turn>]]",
                "[[Go<end_of_turn>]]",
            ),
            id="no prompt: assistants who differ after an answer that both share",
        ),
    ],
)
def test_of_several_turns_those_of_the_assistant_are_targets(write, row: dict, expected: tuple[str, ...]) -> None:
    tokenizer = BytesTokenizer(chat_template=ALL_OF_A_TURN)
    single = {"prompt": [USER], "chosen": [GOOD], "rejected": [RUDE]}
    dataset = load(Data.Preferences(write(row, single)), tokenizer)
    assert isinstance(dataset, Pairs)
    assert marked(tokenizer, dataset, 0) == expected
    assert marked(tokenizer, dataset, 1) == (ASKED, "[[Hello<end_of_turn>]]", "[[Go<end_of_turn>]]")
    targets = [[ids.sum() for ids in (dataset.mask(side, 0), dataset.mask(side, 1))] for side in ("chosen", "rejected")]
    assert [dataset.targets(side).tolist() for side in ("chosen", "rejected")] == targets
    alone = load(Data.Preferences(write(single)), tokenizer)
    assert list(alone.row(0)) == ["prompt", "chosen", "rejected"]  # without masks


def marked(tokenizer: BytesTokenizer, dataset: Pairs, row: int) -> tuple[str, ...]:
    """A row's parts as text, with targets in double brackets."""
    parts = dataset.row(row)
    result = [tokenizer.decode(parts["prompt"].tolist(), skip_special=False)]
    for side in ("chosen", "rejected"):
        runs = itertools.groupby(zip(parts[side].tolist(), dataset.mask(side, row), strict=True), key=lambda x: x[1])
        texts = [(on, tokenizer.decode([token for token, _ in run], skip_special=False)) for on, run in runs]
        result.append("".join(f"[[{text}]]" if on else text for on, text in texts))
    return tuple(result)


def test_completions_of_several_turns_that_are_cut(write) -> None:
    row = {"prompt": [USER], "chosen": [GOOD, USER, GOOD], "rejected": [RUDE, USER, GOOD]}
    path, tokenizer = write(row), BytesTokenizer(chat_template=ALL_OF_A_TURN)
    for longest, expected in (
        (6, ("[[Hello<end_of_turn>]]", "[[Go<end_of_turn>]]")),  # within a turn of a user: it ends before
        (3, ("[[Hel]]", "[[Go<end_of_turn>]]")),
        (31, (f"[[Hello<end_of_turn>]]\n{ASKED}[[Hel]]", f"[[Go<end_of_turn>]]\n{ASKED}[[Hello<end_of_turn>]]")),
    ):
        dataset = load(Data.Preferences(path, max_completion_length=longest), tokenizer)
        assert isinstance(dataset, Pairs)
        assert marked(tokenizer, dataset, 0)[1:] == expected
    row = {"prompt": [USER], "chosen": [{**GOOD, "weight": 0}, USER, GOOD], "rejected": [RUDE]}
    said = message(Data.Preferences(write(row), max_completion_length=6), tokenizer)
    assert "chosen: none of its first 6 tokens is the assistant's; raise data.max_completion_length" in said


def test_masks_of_mixtures_feedback_and_the_data_page(write) -> None:
    turns = {"prompt": [USER], "chosen": [GOOD, USER, GOOD], "rejected": [RUDE]}
    other = {"prompt": [{**USER, "content": "Ho"}], "chosen": [GOOD], "rejected": [RUDE]}
    several, single = write(turns, name="several.jsonl"), write(other, name="single.jsonl")
    tokenizer = BytesTokenizer(chat_template=ALL_OF_A_TURN)
    mixed = Data.Mixture(tuple((Data.Preferences(path), 1.0) for path in (single, several)))
    dataset = load(mixed, tokenizer)
    assert isinstance(dataset, Pairs)
    assert [marked(tokenizer, dataset, row)[1] for row in (0, 1)] == [
        "[[Hello<end_of_turn>]]",
        f"[[Hello<end_of_turn>]]\n{ASKED}[[Hello<end_of_turn>]]",
    ]
    assert dataset.batch([0, 1], 2).chosen_mask.sum(axis=1).tolist() == [6, 12]
    unread = dataset.only([0]).batch([0, 1], 2)  # of a row of another process the number of targets is known
    assert unread.chosen_mask.sum(axis=1).tolist() == [6, 12]
    summary = summarize(load(Data.Preferences(several), tokenizer), Data.Preferences(several), tokenizer, 1)
    assert summary["tokens_with_loss"] == 6 + 6 + 3
    runs = [(run["part"], run["loss"], run["text"]) for run in summary["examples"][0]["runs"]]
    assert runs[1:] == [
        ("chosen", True, "Hello<end_of_turn>"),
        ("chosen", False, f"\n{ASKED}"),
        ("chosen", True, "Hello<end_of_turn>"),
        ("rejected", True, "Go<end_of_turn>"),
    ]
    # Of feedback, a mismatched completion has its own mask.
    labelled = {"prompt": [USER], "completion": turns["chosen"], "label": True}
    feedback = load(Data.Feedback(write(labelled, other)), tokenizer)
    assert isinstance(feedback, Pairs)
    assert feedback.targets("chosen").tolist() == [12, 6, 3]
    assert feedback.targets("rejected").tolist() == [6, 12, 12]
    batch = feedback.batch([0, 1, 2], 3)
    assert (batch.chosen_mask.sum(), batch.chosen_length.sum()) == (21, 34 + 6 + 3)


def test_parts_and_sharegpt_names_are_understood(write, tokens: BytesTokenizer) -> None:
    row = {
        "prompt": [{"from": "human", "value": "Hi"}],
        "chosen": [{"role": "assistant", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}],
        "rejected": [{"from": "gpt", "value": "Go"}],
    }
    assert shown(tokens, load(Data.Preferences(write(row)), tokens)) == CHAT


@pytest.mark.parametrize(
    ("source", "completion"),
    [
        (ABA, "[assistant]Hello<eos>"),  # ends no turn: EOS is added
        (ABA.replace("{% endfor %}", "<eos>{% endfor %}"), "[assistant]Hello<eos>"),
        (ABA.replace("{% endfor %}", "<end_of_turn>\n<eos>\n{% endfor %}"), "[assistant]Hello<end_of_turn>"),
        (ABA.replace("{% endfor %}", " {% endfor %}"), "[assistant]Hello <eos>"),
    ],
)
def test_a_completion_ends_exactly_once(write, source: str, completion: str) -> None:
    tokenizer = BytesTokenizer(chat_template=source)
    dataset = load(Data.Preferences(write({"prompt": [USER], "chosen": [GOOD], "rejected": [RUDE]})), tokenizer)
    assert shown(tokenizer, dataset)[1] == completion


def test_at_most_one_bos(write) -> None:
    tokenizer = BytesTokenizer(chat_template="<bos>" + ABA)
    dataset = load(Data.Preferences(write({"prompt": [USER], "chosen": [GOOD], "rejected": [RUDE]})), tokenizer)
    assert shown(tokenizer, dataset)[0] == "<bos>[user]Hi"


def test_a_token_over_the_border_goes_to_the_completions_and_is_counted(write, bpe: HFTokenizer) -> None:
    whole, prompt = "the cat sat", "the c"
    alone, joined = bpe.encode(prompt), bpe.encode(whole)
    assert joined[: len(alone)] != alone  # "cat" or more is one token, so the prompt's last token is not there
    rows = (
        {"prompt": prompt, "chosen": "at sat", "rejected": "ow sat"},
        {"prompt": "a ", "chosen": "?", "rejected": "."},
    )
    dataset = load(Data.Preferences(write(*rows)), bpe)
    ids = {name: part.tolist() for name, part in dataset.row(0).items()}
    assert ids["prompt"] + ids["chosen"] == [1, *joined, 2]
    assert ids["prompt"] + ids["rejected"] == [1, *bpe.encode("the cow sat"), 2]
    assert ids["prompt"] == [1, *alone][: len(ids["prompt"])]
    assert 1 <= len(ids["prompt"]) < 1 + len(alone)
    assert dataset.report.odd == {"merged border": 1}
    assert "odd, kept: 1 merged border (first: rows.jsonl:1)" in dataset.report.lines()


def test_a_tokenizer_of_merges_says_the_same_text(write, bpe: HFTokenizer) -> None:
    dataset = load(Data.Preferences(write({"prompt": [USER], "chosen": [GOOD], "rejected": [RUDE]})), bpe)
    assert shown(bpe, dataset) == CHAT


def test_prompts_are_cut_on_their_left_after_bos_and_completions_on_their_right(write, tokens: BytesTokenizer) -> None:
    path = write(
        {"prompt": "abcdefgh", "chosen": "ABCDEFGH", "rejected": "xy"},
        {"prompt_ids": [1, 2, 3, 4, 5, 6, 7], "chosen_ids": [1] * 5, "rejected_ids": [2] * 6},
    )
    dataset = load(Data.Preferences(path, max_prompt_length=5, max_completion_length=4), tokens)
    assert shown(tokens, dataset) == ("<bos>efgh", "ABCD", "xy<eos>")
    assert [part.tolist() for part in dataset.row(1).values()] == [[3, 4, 5, 6, 7], [1] * 4, [2] * 4]
    assert dataset.report.cut == {"prompt": 2, "chosen": 2, "rejected": 1}
    assert dataset.report.lines() == [
        "rows.jsonl, rows:",
        "  read        2",
        "  trained on  2",
        "prompt: 10 tokens, 5.0 a row, longest 5; 2 cut",
        "chosen: 8 tokens, 4.0 a row, longest 4; 2 cut",
        "rejected: 7 tokens, 3.5 a row, longest 4; 1 cut",
    ]


def test_a_length_that_just_fits_is_not_cut(write, tokens: BytesTokenizer) -> None:
    path = write({"prompt": "abcd", "chosen": "ABC", "rejected": "xyz"})
    dataset = load(Data.Preferences(path, max_prompt_length=5, max_completion_length=4), tokens)
    assert shown(tokens, dataset) == ("<bos>abcd", "ABC<eos>", "xyz<eos>")
    assert dataset.report.cut == {}


READS = "Data.Preferences reads prompt/chosen/rejected (text or messages) or prompt_ids/chosen_ids/rejected_ids"
PAIR = {"chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("row", "kind", "what"),
    [
        (
            {"prompt": "q", "choosen": "a", "rejected": "b"},
            "missing field",
            f"field 'chosen' is missing; this row has: prompt, choosen, rejected; {READS}",
        ),
        ({"prompt_ids": [1], "chosen_ids": [1]}, "missing field", "field 'rejected_ids' is missing; this row has: "
         f"prompt_ids, chosen_ids; {READS}"),
        ({"prompt": 3, **PAIR}, "wrong type", "field 'prompt': expected text or a list of messages, got the number 3"),
        ({"prompt_ids": [1], "chosen_ids": [1, 320], "rejected_ids": [2]}, "wrong type",
         "field 'chosen_ids'[1]: 320 is no token id; ids are 0 to 319"),
        ({"prompt_ids": [1], "chosen_ids": [True], "rejected_ids": [2]}, "wrong type",
         "field 'chosen_ids'[0]: expected a token id, got true"),
        ({"prompt": [], **PAIR}, "wrong type", "field 'prompt': expected a list of messages, got an empty list"),
        ({"prompt": [{"role": "user"}], **PAIR}, "missing field",
         "field 'prompt', message 1: 'content' is missing; this message has: role"),
        ({"prompt": [{"role": "user", "content": 1}], **PAIR}, "wrong type",
         "field 'prompt', message 1: 'content': expected text, got the number 1"),
        ({"prompt": ["Hi"], **PAIR}, "wrong type",
         "field 'prompt', message 1: expected an object with 'role' and 'content', got text"),
        ({"prompt": "", **PAIR}, "empty prompt", "the prompt is empty"),
        ({"prompt": "<bos> \n", **PAIR}, "empty prompt", "the prompt is empty"),
        ({"prompt": [{"role": "user", "content": " "}], **PAIR}, "empty prompt", "the prompt is empty"),
        ({"prompt_ids": [], "chosen_ids": [1], "rejected_ids": [2]}, "empty prompt", "the prompt is empty"),
        ({"prompt": "q", "chosen": " ", "rejected": "b"}, "empty completion", "chosen is empty"),
        ({"prompt": [USER], "chosen": "a", "rejected": ""}, "empty completion", "rejected is empty"),
        ({"prompt_ids": [1], "chosen_ids": [1], "rejected_ids": []}, "empty completion", "rejected_ids is empty"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "identical",
         "chosen and rejected are the same, so there is nothing to prefer"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "identical",
         "chosen and rejected are the same, so there is nothing to prefer"),
        ({"prompt": "q", "chosen": "a" * 600, "rejected": "a" * 700}, "identical after cutting",
         "chosen and rejected differ only after their first 512 tokens; raise data.max_completion_length"),
        ({"chosen": "yes", "rejected": "no"}, "nothing in common",
         "there is no 'prompt', and chosen and rejected share no beginning that could be one"),
        ({"chosen": " yes", "rejected": " no"}, "nothing in common",
         "there is no 'prompt', and chosen and rejected share no beginning that could be one"),
        ({"chosen": "Q: ", "rejected": "Q: no"}, "prefix of the other",
         "there is no 'prompt', and chosen (3 characters) is the beginning of rejected, so it would be an empty "
         "completion"),
        ({"chosen": [USER, GOOD], "rejected": [RUDE]}, "nothing in common",
         "there is no 'prompt', and chosen and rejected do not share their first message"),
        ({"chosen": "Q: yes", "rejected": "Q: yes and no"}, "prefix of the other",
         "there is no 'prompt', and chosen (6 characters) is the beginning of rejected, so it would be an empty "
         "completion"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "prefix of the other",
         "there is no 'prompt', and rejected (1 messages) is the beginning of chosen, so it would be an empty "
         "completion"),
        ({"prompt": "Ho", "chosen": [USER, GOOD], "rejected": [USER, RUDE]}, "nothing in common",
         "chosen and rejected are whole chats, but do not both begin with the text of 'prompt'"),
        ({"prompt": [USER], "chosen": [USER], "rejected": [RUDE]}, "no answer",
         "chosen: expected messages of the assistant after the prompt, got nothing"),
        ({"chosen": [USER, GOOD, USER], "rejected": [USER, GOOD, RESULT]}, "no answer",
         "chosen: expected messages of the assistant after the prompt, got user"),
        ({"prompt": [USER], "chosen": [{**GOOD, "content": ""}, USER, GOOD], "rejected": [RUDE]}, "empty completion",
         "chosen: an assistant's message is empty"),
        ({"prompt": [USER], "chosen": [{**GOOD, "weight": 0}, USER], "rejected": [RUDE]}, "no target",
         "chosen: no message of the assistant that the loss reads has a weight other than 0"),
        (b"{", "bad JSON", "bad JSON at column 2: Expecting property name enclosed in double quotes; JSONL wants one "
         "whole object on each line"),
    ],
)  # fmt: skip
def test_bad_rows_stop_or_are_skipped_and_counted(write, tokens, row: Any, kind: str, what: str) -> None:
    path = write(row, {"prompt": "q", "chosen": "a", "rejected": "b"})
    assert message(Data.Preferences(path), tokens) == (
        f"rows.jsonl: 1 of 2 rows is bad; fix them, or leave them out with bad_rows=BadRows.Skip(at_most=1)\n"
        f"  rows.jsonl:1: {what}"
    )
    dataset = load(Data.Preferences(path, bad_rows=BadRows.Skip(at_most=1)), tokens)
    assert dataset.row_ids == ["rows.jsonl:2"]
    assert (dataset.report.rows, dataset.report.accepted, dataset.report.dropped) == (2, 1, {kind: 1})
    assert f"  left out    1  {kind} (first: rows.jsonl:1)" in dataset.report.lines()


def test_bad_rows_without_number_are_shown_by_the_first_five_and_counted(write, tokens: BytesTokenizer) -> None:
    same = {"prompt": "q", "chosen": "a", "rejected": "a"}
    path = write(*[same] * 4, *[{"prompt": "q", "chosen": "", "rejected": "a"}] * 3, {"prompt": "q", **PAIR})
    assert message(Data.Preferences(path), tokens) == (
        "rows.jsonl: 7 of 8 rows are bad; fix them, or leave them out with bad_rows=BadRows.Skip(at_most=7)\n"
        "  rows.jsonl:1: chosen and rejected are the same, so there is nothing to prefer\n"
        "  rows.jsonl:2: chosen and rejected are the same, so there is nothing to prefer\n"
        "  rows.jsonl:3: chosen and rejected are the same, so there is nothing to prefer\n"
        "  rows.jsonl:4: chosen and rejected are the same, so there is nothing to prefer\n"
        "  rows.jsonl:5: chosen is empty\n"
        "  and 2 more; all: 4 identical, 3 empty completion"
    )
    said = message(Data.Preferences(path, bad_rows=BadRows.Skip(at_most=2)), tokens)
    assert said.splitlines()[0] == ("rows.jsonl: more than 2 bad rows, the limit of bad_rows=BadRows.Skip(at_most=2)")
    assert len(load(Data.Preferences(path, bad_rows=BadRows.Skip(at_most=7)), tokens)) == 1


def test_no_row_left_is_an_error(write, tokens: BytesTokenizer) -> None:
    assert message(Data.Preferences(write(b"")), tokens) == "rows.jsonl: no row is left to learn from, of 0 read"


def test_duplicates_are_counted_and_kept(write, tokens: BytesTokenizer) -> None:
    row = {"prompt": "q", **PAIR}
    dataset = load(Data.Preferences(write(row, row, row)), tokens)
    assert (len(dataset), dataset.report.odd, dataset.report.first) == (
        3,
        {"duplicate": 2},
        {"duplicate": "rows.jsonl:2"},
    )


def test_a_row_beyond_the_positions_of_the_model_is_named(write, tokens: BytesTokenizer) -> None:
    path = write({"prompt": "q", **PAIR}, {"prompt": "q" * 5, "chosen": "ab", "rejected": "c"})
    assert isinstance(load(Data.Preferences(path), tokens, max_position=9), Pairs)
    assert message(Data.Preferences(path), tokens, max_position=8) == (
        "rows.jsonl:2: the row has 9 tokens, more than the model's 8 positions; lower data.max_prompt_length or "
        "data.max_completion_length"
    )


def test_chats_need_a_template(write, bpe_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((bpe_dir / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    path = write({"prompt": [USER], "chosen": [GOOD], "rejected": [RUDE]})
    assert message(Data.Preferences(path), HFTokenizer(tmp_path / "tokenizer.json")) == (
        "rows.jsonl:1: the rows are chats, but the tokenizer has no chat template; give one with "
        "Tokenizer.File(path, chat_template=...), or use rows of plain text"
    )
