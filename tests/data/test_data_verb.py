"""`nnxdsl data`: statistics of an experiment's data, and of a file of rows."""

from __future__ import annotations

import gzip
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from nnxdsl import (
    BadRows,
    Batching,
    Data,
    Evaluation,
    Experiment,
    Model,
    Objective,
    Optimizer,
    Schedule,
    cli,
    evolve,
    to_json,
    to_python,
)
from nnxdsl.data import BytesTokenizer, load
from nnxdsl.data.summary import summarize
from nnxdsl.data.tokenizers.base import TokenizerBase
from nnxdsl.data.tokenizers.missing_tokenizer import MissingTokenizer
from nnxdsl.terminal.data_view import show_data
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.prepare import prepare

SHORT = {"prompt": "ab", "chosen": "good", "rejected": "bad!"}
LONG = {"prompt": "0123456789", "chosen": "abcdefgh", "rejected": "xy", "score": 1}


def experiment(data: Data, **fields: Any) -> Experiment:
    objective: Objective = Objective.DPO(beta=0.1)
    if data.batch_kind == "sequences":
        objective = Objective.SFT(loss_on="assistant" if isinstance(data, Data.Conversations) else "all")
    optimizer = Optimizer.SGD(schedule=Schedule.Constant(lr=0.1))
    values = {"objective": objective, "batch_size": 2, "steps": 4, "data": data, "optimizer": optimizer, **fields}
    return Experiment(name="seen", model=Model.Gemma3("tiny"), **values)


def file_of(experiment: Experiment) -> str:
    Path("seen.py").write_text(to_python(experiment))
    return "seen.py"


def shown(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert cli.main(["data", *argv]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return out


def as_json(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict[str, Any]:
    return json.loads(shown(capsys, *argv, "--json", code=code))


def runs(example: dict[str, Any]) -> list[tuple[str, str, int, str]]:
    state = {(True, False): "loss", (False, False): "no loss", (False, True): "truncated"}
    return [(r["part"], state[r["loss"], r["cut"]], r["tokens"], r["text"]) for r in example["runs"]]


def test_rows_of_pairs_are_counted_and_shown_as_tokens(write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(SHORT, LONG, {**SHORT, "rejected": "good"}, SHORT)
    data = Data.Preferences(path, max_prompt_length=5, max_completion_length=6)
    file = file_of(experiment(data, evaluation=Evaluation(every_steps=1, data=Data.Preferences(path))))
    actual = as_json(capsys, file, "data.bad_rows=BadRows.Skip()", "--rows", "2", code=2)
    assert list(actual) == ["id", "data", "evaluation.data"]
    train = actual["data"]
    assert train["report"] | {"lengths": 0} == {
        "source": "rows.jsonl",
        "rows": 4,
        "accepted": 3,
        "cut": {"prompt": 1, "chosen": 1},
        "dropped": {"identical": 1},
        "odd": {"duplicate": 1},
        "first": {"identical": "rows.jsonl:3", "duplicate": "rows.jsonl:4"},
        "lengths": 0,
        "unread": {"score": 1},
        "sources": [],
        "layout": "",
    }
    assert train["columns"] == ["prompt", "chosen", "rejected", "score"]
    # With BOS and EOS: prompts of 3, 5 (cut), 3; completions of 5, 6 (cut), 5 and 5, 3, 5.
    assert (train["tokens"], train["tokens_with_loss"], train["rows"]) == (11 + 16 + 13, 29, 3)
    total = train["lengths"]["prompt and longer completion"]
    assert {name: total[name] for name in ("min", "median", "p95", "max", "total")} == {
        "min": 8,
        "median": 8,
        "p95": 11,
        "max": 11,
        "total": 27,
    }
    assert total["histogram"] == {"start": 8, "width": 1, "counts": [2, 0, 0, 1]}
    # Four batches of two rows; a row has 8 + 8 + 8 slots.
    assert train["padding"] == {"share": pytest.approx(1 - 40 / 72, abs=0.05), "batch_size": 2} | {
        "batching": "Batching.Padded"
    }
    assert [example["row"] for example in train["examples"]] == ["rows.jsonl:1", "rows.jsonl:2"]
    assert runs(train["examples"][1]) == [
        ("prompt", "no loss", 1, "<bos>"),
        ("prompt", "truncated", 6, "012345"),
        ("prompt", "no loss", 4, "6789"),
        ("chosen", "loss", 6, "abcdef"),
        ("chosen", "truncated", 3, "gh<eos>"),
        ("rejected", "loss", 3, "xy<eos>"),
    ]
    held_out = actual["evaluation.data"]
    assert held_out["refused"].startswith("rows.jsonl: 1 of 4 rows is bad; fix them, or leave them out with")
    assert (held_out["report"]["accepted"], train["refused"], "padding" in held_out) == (3, "", False)


def test_the_text_names_what_colours_show(write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write({"messages": [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "\x1b[31mred"}]})
    data = Data.Conversations(path, max_length=25)
    lines = [line.rstrip() for line in shown(capsys, file_of(experiment(data))).splitlines()]
    assert lines[1:8] == [
        "",
        "data: Data.Conversations of rows.jsonl",
        "columns     messages",
        "read        1",
        "trained on  1",
        "truncated   tokens of 1 row",
        "tokens      25, 6 with loss (24.0%)",
    ]
    assert lines[lines.index("rows.jsonl:1") + 1 :] == [
        "tokens, no loss    19  <bos><start_of_turn>user↵",
        "                       a↵",
        "                       b<end_of_turn>↵",
        "                       <start_of_turn>model↵",
        "tokens, loss        6  \\x1b[31mr",
        "tokens, truncated   3  ed<end_of_turn>",
    ]
    summary = {**summarize(load(data, BytesTokenizer()), data, BytesTokenizer(), 1), "refused": ""}
    screens = [io.StringIO(), io.StringIO()]
    for screen, no_color in zip(screens, (False, True), strict=True):
        show_data("data", summary, Console(file=screen, force_terminal=True, no_color=no_color, width=100))
    assert "\x1b[32m" in screens[0].getvalue()
    assert "\x1b[32m" not in screens[1].getvalue()
    assert "tokens, loss" in screens[1].getvalue()


def test_a_mixture_is_shown_with_its_sources(write, capsys: pytest.CaptureFixture[str]) -> None:
    web, code = (Data.Text(write(*({"text": "x" * n} for n in range(1, most)), name=name)) for name, most in
                 (("web.jsonl", 9), ("code.jsonl", 3)))  # fmt: skip
    file = file_of(experiment(Data.Mixture({web: 3, code: 1}), batching=Batching.Packed()))
    actual = as_json(capsys, file)["data"]
    assert (actual["tokens"], actual["tokens_with_loss"], actual["unit"], actual["examples"]) == (59, 49, "rows", [])
    assert [(s["name"], s["share"], s["rows"], s["tokens"], s["epochs"]) for s in actual["sources"]] == [
        ("web", 0.75, 8, 52, 0.75),
        ("code", 0.25, 2, 7, 1.0),
    ]
    assert [runs(source["examples"][0]) for source in actual["sources"]] == [
        [("tokens", "no loss", 1, "<bos>"), ("tokens", "loss", 2, "x<eos>")]
    ] * 2
    assert 0 < actual["padding"]["share"] < 0.9
    text = shown(capsys, file)
    assert "web             75.0%     8      52               0.75\n" in text
    assert "data, source code: Data.Text of code.jsonl" in text


def test_labelled_answers_are_shown_each(write, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [SHORT, {"prompt": "cd", "completion": "fine", "label": True}]
    data = Data.Feedback(write(*rows), max_completion_length=3)
    actual = as_json(capsys, file_of(experiment(data, objective=Objective.KTO(beta=0.1))), "--rows", "9")["data"]
    assert (actual["rows"], actual["report"]["accepted"], actual["tokens"], actual["tokens_with_loss"]) == (3, 2, 18, 9)
    assert [runs(example)[1:] for example in actual["examples"]] == [
        [("completion", "loss", 3, text[:3]), ("completion", "truncated", 2, f"{text[3:]}<eos>")]
        for text in ("good", "bad!", "fine")
    ]


def test_a_file_is_described_without_jax(write, tmp_path: Path, bpe_dir: Path) -> None:
    rows = [{"instruction": "Hi", "input": "", "output": "Hello", "id": n} for n in range(3)]
    (tmp_path / "alpaca.jsonl.gz").write_bytes(
        gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    )
    argv = ["data", "alpaca.*", "--tokenizer", str(bpe_dir), "--json", "--rows", "1"]
    code = "import sys; from nnxdsl import cli; assert cli.main(sys.argv[1:]) == 0; assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    actual = json.loads(done.stdout)
    assert actual["source"] == {
        "source": "alpaca.*",
        "rows": 3,
        "bad": {},
        "first": {},
        "columns": [
            {"name": "instruction", "rows": 3, "characters": 6, "kinds": ["text"]},
            {"name": "input", "rows": 3, "characters": 0, "kinds": ["text"]},
            {"name": "output", "rows": 3, "characters": 15, "kinds": ["text"]},
            {"name": "id", "rows": 3, "characters": 0, "kinds": ["number"]},
        ],
        "kind": "Data.Conversations",
        "layout": "Alpaca (instruction, input, output)",
        "refused": "",
    }
    assert actual["data"]["report"]["odd"] == {"duplicate": 2}
    assert actual["data"]["examples"][0]["runs"][-1] == {
        "part": "tokens",
        "loss": True,
        "cut": False,
        "tokens": 6,
        "text": "Hello<end_of_turn>",
    }


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "Data.Preferences"),
        ({"prompt_ids": [1], "chosen_ids": [1], "rejected_ids": [2]}, "Data.Preferences"),
        ({"prompt": "a", "completion": "b", "label": True}, "Data.Feedback"),
        ({"prompt": "a", "completion": "b"}, "Data.Conversations"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "Data.Conversations"),
        ({"text": "a", "id": 1}, "Data.Text"),
        ({"prompt": "a", "answer": "b"}, "Data.Prompts"),
        ({"question": "a", "answer": "b"}, None),
    ],
)
def test_the_kind_of_data_is_that_of_its_columns(
    write, capsys: pytest.CaptureFixture[str], row: Any, kind: str | None
) -> None:
    code = 2 if kind == "Data.Feedback" else 0  # its prompts must not all be the same
    actual = as_json(capsys, write(row, b"{"), code=code)["source"]
    assert (actual["kind"], actual["rows"], actual["bad"]) == (kind, 2, {"bad JSON": 1})
    text = " ".join(shown(capsys, "rows.jsonl", code=code).split())
    assert f"read as {kind or 'not recognised; name the columns with columns='}" in text
    assert "unreadable 1 bad JSON: rows.jsonl:2: bad JSON at column 2" in text


def test_settings_of_a_file_are_those_of_its_data(write, bpe_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write({"question": "a cat", "answer": "0123456789"})
    columns = 'columns={"question": "prompt", "answer": "completion"}'
    actual = as_json(capsys, path, columns, "max_length=8", "--tokenizer", str(bpe_dir))
    assert (actual["source"]["kind"], actual["source"]["layout"]) == (
        "Data.Conversations",
        "question as prompt, answer as completion",
    )
    assert actual["data"]["report"]["cut"] == {"tokens": 1}


@pytest.mark.parametrize(
    ("rows", "columns", "refused"),
    [
        ([], "columns={}", "rows.jsonl: there are no rows"),
        ([{"q": "a"}], 'columns={"p": "prompt"}', "data.columns: rows.jsonl has no column 'p'; there are: q"),
    ],
)
def test_no_rows_and_columns_that_are_not_there_are_refused(
    write, capsys: pytest.CaptureFixture[str], rows: list[Any], columns: str, refused: str
) -> None:
    assert as_json(capsys, write(*rows), columns, code=2)["source"]["refused"] == refused
    assert refused in shown(capsys, "rows.jsonl", columns, code=2)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["none"], "RunError: none: no such file or run (relative to {place}; runs are searched in runs)"),
        (["row.jsonl"], "DataError: row.jsonl: no such file (looked in the current directory, {place}); did you mean "
         "'rows.jsonl'?"),
        (["*.gz"], "DataError: *.gz: no file matches (looked in the current directory, {place})"),
        (["rows.jsonl", "split=train"], "SpecError: 1 problem in Data.Prompts\n  split: has no effect: rows.jsonl is "
         "no folder; datasets of the Hub (hf://...) and folders that save_to_disk wrote have splits"),
        (["rows.jsonl", "max_len=4"], "SpecError: 1 problem in Data.Text\n  max_len: Text has no field 'max_len'; did "
         "you mean 'max_length'?"),
        (["seen.py", "--tokenizer", "x"], "UsageError: --tokenizer has no effect on an experiment, which has its own; "
         "set model.tokenizer=..."),
        (["rows.jsonl", "--rows", "-1"], "UsageError: argument --rows: expected a value > -1, got -1; see nnxdsl data "
         "--help"),
    ],
)  # fmt: skip
def test_what_is_refused(
    write, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    file_of(experiment(Data.Text(write({"text": "a"}))))
    assert cli.main(["data", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", message.format(place=tmp_path) + "\n")


def test_rows_of_a_small_file_are_shown_as_bytes(
    write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    image = {"role": "user", "content": [{"type": "image", "image": "a.png"}]}
    path = write({"messages": messages, "tools": tools}, {"messages": [image, {"role": "assistant", "content": "b"}]})
    actual = as_json(capsys, path)
    assert actual["data"]["report"]["dropped"] == {"not text": 1}
    assert actual["data"]["lengths"]["total"]["histogram"]["counts"] == [1]
    (example,) = actual["data"]["examples"]
    assert runs(example)[0][3].startswith('[{"type": "function", "function": {"name": "f"}}]\n<start_of_turn>user\na')
    assert runs(example)[1][1:] == ("loss", 73, f"[{json.dumps(call)}]<end_of_turn>")
    assert "tokenizer  bytes; --tokenizer DIR shows the tokens of a model" in shown(capsys, path)
    refused = as_json(capsys, write({"messages": [image]}, name="images.jsonl"), code=2)
    assert "no model reads image input yet" in refused["source"]["refused"]
    monkeypatch.setattr("nnxdsl.cli.verbs.data.MAX_BYTES_SHOWN", 0)
    assert list(as_json(capsys, path)) == ["source"]
    assert "not shown as bytes: more than 0 characters" in shown(capsys, path)


def test_rows_of_token_ids_are_shown_as_ids(write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write({"prompt_ids": [7, 70], "chosen_ids": [100, 5], "rejected_ids": [33]})
    actual = as_json(capsys, path)["data"]
    assert [run[3] for run in runs(actual["examples"][0])] == ["7 70", "100 5", "33"]
    assert actual["tokenizer"] == "none: rows of token ids"
    tokenizer = cast("TokenizerBase", MissingTokenizer(Path("weights"), ()))
    data = Data.Preferences(path, max_completion_length=1)
    (example,) = summarize(load(data, tokenizer, vocabulary=101), data, tokenizer, 1)["examples"]
    assert runs(example)[1:3] == [("chosen", "loss", 1, "100"), ("chosen", "truncated", 1, "5")]


def test_rows_that_fit_two_layouts_are_refused_with_both(write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write({"question": "a", "prompt": "a", "chosen": "b", "rejected": "c"})
    refused = as_json(capsys, path, code=2)["source"]["refused"]
    assert refused == (
        "rows.jsonl: the rows fit 2 layouts: prompt, chosen, rejected and Orca pairs (system, question, chosen, "
        'rejected); say which columns are read with columns={"theirs": "ours"}'
    )
    assert "! refused" in shown(capsys, path, code=2)


def test_an_experiment_may_be_a_file_its_own_command_line_or_json(write, capsys: pytest.CaptureFixture[str]) -> None:
    ours = experiment(Data.Text(write({"text": "abc"})))
    assert cli.main_of(ours, ["data", "--json"]) == 0
    actual = json.loads(capsys.readouterr().out)
    Path("seen.json").write_text(to_json(ours))
    assert as_json(capsys, file_of(ours)) == as_json(capsys, "seen.json") == actual
    Path("rows.json").write_text(json.dumps([{"text": "abc"}]))
    assert as_json(capsys, "rows.json")["source"]["kind"] == "Data.Text"


def table(lines: Iterable[str]) -> list[tuple[str, int]]:
    """The table of rows among lines: labels, with a reason if there is one, and numbers."""
    cells = [re.split(r"\s{2,}", line.strip(), maxsplit=2) for line in lines]
    labels = ("read", "left out", "held out", "trained on", "accepted")
    return [(" ".join([row[0], *row[2:]]), int(row[1])) for row in cells if row[0] in labels]


@pytest.mark.parametrize("test_size", [None, 0.25])
def test_the_table_of_rows_adds_up_wherever_it_is_shown(
    write, capsys: pytest.CaptureFixture[str], test_size: float | None
) -> None:
    data = Data.Text(write(*({"text": str(n)} for n in range(40)), {"text": " "}, {"other": "a"}, {"text": ""}))
    data = evolve(data, {"bad_rows": BadRows.Skip(at_most=3)})
    made = experiment(data, test_size=test_size)
    actual = as_json(capsys, file_of(made))
    held_out = actual["test_size"]["rows"] if test_size else 0
    rows = [
        ("read", 43),
        ("left out empty text (first: rows.jsonl:41)", 2),
        ("left out missing field (first: rows.jsonl:42)", 1),
        *([("held out", held_out)] if test_size else []),
        ("trained on", 40 - held_out),
    ]
    assert rows[0][1] == sum(count for _, count in rows[1:])
    *parts, end = shown(capsys, file_of(made), "--rows", "0").split("Data.Text of ")[1:]
    assert [table(part.splitlines()) for part in (*parts, end)] == [rows] * (2 if test_size else 1)
    with Display() as display:
        prepared = prepare(made, Path("runs"), display)
    assert table(capsys.readouterr().err.splitlines()) == table(prepared.dataset.report.lines()) == rows
    if test_size:
        assert prepared.evaluator is not None
        assert prepared.evaluator.dataset is not None
        assert table(prepared.evaluator.dataset.report.lines("held out")) == rows
    of_file = shown(capsys, "rows.jsonl", "bad_rows=BadRows.Skip()", "--rows", "0")
    assert table(of_file.splitlines()) == [*rows[:3], ("accepted", 40)]


def test_rows_that_are_held_out_by_test_size_are_shown_apart(write, capsys: pytest.CaptureFixture[str]) -> None:
    data = Data.Text(write(*({"text": str(number)} for number in range(40))))
    actual = as_json(capsys, file_of(experiment(data, test_size=0.25)))
    assert list(actual) == ["id", "data", "test_size"]
    assert actual["data"]["rows"] + actual["test_size"]["rows"] == 40
    assert 1 <= actual["test_size"]["rows"] <= 20
    shown_rows = [{example["row"] for example in actual[part]["examples"]} for part in ("data", "test_size")]
    assert not shown_rows[0] & shown_rows[1]
