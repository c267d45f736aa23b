"""The row shapes that TRL has as well have the token ids that TRL's trainers prepare, stored by `make_row_shapes.py`.

Two things are known to differ: TRL trains on what a chat template writes after the last end token (a line break), which
is left out here, and counts the first token of a text as a target, which nothing predicts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nnxdsl import Data, Tokenizer
from nnxdsl.data import load, open_tokenizer

HERE = Path(__file__).parents[1] / "reference" / "row_shapes"
STORED: dict[str, dict[str, list[dict[str, Any]]]] = json.loads((HERE / "row_shapes.json").read_text(encoding="utf-8"))
SPECS = {
    "language modeling, text": (Data.Text, {"loss_on": "all"}),
    "language modeling, chat": (Data.Conversations, {}),
    "prompt, text": (Data.Prompts, {}),
    "prompt, chat": (Data.Prompts, {}),
    "prompt and completion, text": (Data.Conversations, {"loss_on": "completion"}),
    "prompt and completion, chat": (Data.Conversations, {"loss_on": "completion"}),
    "preference, text": (Data.Preferences, {}),
    "preference, chat": (Data.Preferences, {}),
    "implicit, text": (Data.Preferences, {}),
    "implicit, chat": (Data.Preferences, {}),
    "labelled, text": (Data.Feedback, {}),
    "labelled, chat": (Data.Feedback, {}),
}


def test_all_shapes_are_compared() -> None:
    assert [set(shapes) for shapes in STORED.values()] == [set(SPECS)] * 2
    assert all(len(rows) >= 3 for shapes in STORED.values() for rows in shapes.values())


@pytest.mark.parametrize("shape", SPECS)
@pytest.mark.parametrize("name", STORED)
def test_ids_are_those_of_trl(name: str, shape: str, write: Any) -> None:
    tokenizer = open_tokenizer(Tokenizer.File(str(HERE / name)), None)
    stored = STORED[name][shape]
    kind, options = SPECS[shape]
    limits = {"max_length": 512} if kind in (Data.Text, Data.Conversations) else {"max_prompt_length": 512}
    if kind in (Data.Preferences, Data.Feedback):
        limits["max_completion_length"] = 512
    dataset = load(kind(write(*(example["row"] for example in stored)), **limits), tokenizer, **options)
    line_break = tokenizer.encode("\n")
    for row, example in enumerate(stored):
        fields, trl = {part: ids.tolist() for part, ids in dataset.row(row).items()}, dict(example["trl"])
        if "target" in trl:
            trl["target"][0] = 0
        if kind is Data.Feedback:
            fields = {"prompt": fields["prompt"], "completion": fields["chosen"]}
        if shape.endswith("chat") and kind is not Data.Prompts:
            for part in trl.keys() - {"prompt", "target"}:
                assert trl[part][-len(line_break) :] == line_break
            trl = {part: ids if part == "prompt" else ids[: -len(line_break)] for part, ids in trl.items()}
        assert fields == trl
