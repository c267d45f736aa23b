"""A tokenizer that does not match the model is refused before anything is written, unless allow_mismatch is set."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models

import nnxdsl
from nnxdsl import Adapter, Data, Experiment, Model, Objective, Optimizer, PlanError, Schedule, Tokenizer, Weights
from nnxdsl.errors import DataError
from nnxdsl.terminal.display import Display
from nnxdsl.trainer.prepare import prepare

MODEL = Path(__file__).parent.parent / "reference" / "families" / "gemma2"
ROWS = 96


def write_tokenizer(place: Path, size: int, *, special: int = 0) -> Path:
    """A tokenizer of `size` words, and special tokens above them."""
    place.mkdir(exist_ok=True)
    tokens = ["<eos>", "<unk>", *(f"w{number}" for number in range(size - 2))]
    made = tokenizers.Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(tokens)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens([f"<image{number}>" for number in range(special)])
    made.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return place


def experiment(place: Path, model: Model, **row: Any) -> Experiment:
    row = row or {"prompt_ids": [2], "chosen_ids": [3], "rejected_ids": [ROWS - 1]}
    (place / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    return Experiment(
        name="mismatch",
        model=model,
        adapter=Adapter.LoRA(rank=2),
        objective=Objective.DPO(),
        data=Data.Preferences(str(place / "rows.jsonl"), max_prompt_length=8, max_completion_length=8),
        optimizer=Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-3)),
        batch_size=2,
        steps=1,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory with a tokenizer of its own, and an embedding that is padded beyond it."""
    shutil.copytree(MODEL, tmp_path / "model")
    return write_tokenizer(tmp_path / "model", 40)


def test_bytes_over_a_model_with_its_own_tokenizer(model: Path, tmp_path: Path) -> None:
    home, path = tmp_path / "runs", model / "tokenizer.json"
    asked = experiment(tmp_path, Model.HF(str(model), tokenizer=Tokenizer.Bytes()))
    with pytest.raises(PlanError) as error:
        prepare(asked, home, Display(quiet=True))
    assert str(error.value) == (
        f"1 problem in Experiment 'mismatch'\n  model.tokenizer: Tokenizer.Bytes() has other ids than {path}, the "
        f"tokenizer of the weights; unset it to use that one, or set Tokenizer.Bytes(allow_mismatch=True)"
    )
    assert not home.exists()
    for tokenizer in (Tokenizer.Bytes(allow_mismatch=True), Tokenizer.Auto(), Tokenizer.File(str(model))):
        chosen = prepare(nnxdsl.evolve(asked, {"model.tokenizer": tokenizer}), home, Display(quiet=True))
        assert chosen.tokenizer.vocab_size == (320 if isinstance(tokenizer, Tokenizer.Bytes) else 40)
    loaded = nnxdsl.load(model, tokenizer=Tokenizer.Bytes())
    with pytest.raises(DataError, match=r"Tokenizer.Bytes\(\) has other ids than .*tokenizer.json"):
        loaded.generate(["w1"], max_new_tokens=1)
    assert nnxdsl.load(model).tokenizer.encode("w1") == [3]


def test_more_ids_than_the_embedding_has_rows(tmp_path: Path) -> None:
    for size, special in ((ROWS, 0), (ROWS, 3), (ROWS - 2, 3)):  # such as Gemma 3 1B's <image_soft_token>
        fitting = Tokenizer.File(str(write_tokenizer(tmp_path / "fitting", size, special=special)))
        asked = experiment(tmp_path, Model.HF(str(MODEL), tokenizer=fitting))
        assert prepare(asked, tmp_path / "runs", Display(quiet=True)).tokenizer.vocab_size == size + special
    large = str(write_tokenizer(tmp_path / "large", ROWS + 1))
    whole = shutil.copytree(MODEL, tmp_path / "whole")
    shutil.copytree(large, whole, dirs_exist_ok=True)
    cases = (
        (Model.HF(str(MODEL), tokenizer=Tokenizer.File(large)), f'File("{large}")', ROWS, f'File("{large}", '),
        (Model.HF(str(whole)), f'File("{whole}")', ROWS, f'File("{whole}", '),
        (Model.HF(str(MODEL), tokenizer=Tokenizer.Bytes()), "Bytes()", 258, "Bytes("),
        (Model.HF(str(MODEL), weights=Weights.Random(), tokenizer=Tokenizer.Bytes()), "Bytes()", 258, "Bytes("),
    )
    for network, tokenizer, last, allowed in cases:
        asked = experiment(tmp_path, network)
        with pytest.raises(PlanError) as error:
            prepare(asked, tmp_path / "runs", Display(quiet=True))
        assert str(error.value).partition("\n")[2] == (
            f"  model.tokenizer: Tokenizer.{tokenizer} has ids up to {last}, but the model's embedding has {ROWS} "
            f"rows; set the tokenizer of the model with Tokenizer.File(path), or, if the data is token ids, "
            f"set Tokenizer.{allowed}allow_mismatch=True)"
        )
    for tokenizer in (Tokenizer.Bytes(allow_mismatch=True), Tokenizer.File(large, allow_mismatch=True)):
        permitted = nnxdsl.evolve(asked, {"model.tokenizer": tokenizer})
        assert len(prepare(permitted, tmp_path / "runs", Display(quiet=True)).dataset) == 2
