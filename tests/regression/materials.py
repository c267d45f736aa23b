"""The files that all cases work on: small models in the Hub's format, a tokenizer, rows of every kind, one reward.

They are made in an empty directory and named by relative paths, so that no result depends on where the checkout lies.
Nothing here is drawn by a library whose random streams may change, and nothing is imported from nnxdsl's internals.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

import nnxdsl

REFERENCE = Path(__file__).parents[1] / "reference"
FAMILIES = REFERENCE / "families"
TEXT = "a red fox, seven small boats and the old lamp go over one hill by night; nobody knows why it was so"
VOCABULARY = TEXT.split()
END = {"eos_token": "t1"}


def numbers(seed: int) -> Iterator[int]:
    """An endless stream of 31-bit integers: the generator of Lewis, Goodman and Miller (1969)."""
    state = seed % (2**31 - 2) + 1
    while True:
        state = state * 16_807 % (2**31 - 1)
        yield state


def text(draw: Iterator[int], least: int, most: int) -> str:
    """Between `least` and `most` words."""
    return " ".join(VOCABULARY[next(draw) % len(VOCABULARY)] for _ in range(least + next(draw) % (most - least + 1)))


def make(place: Path) -> None:
    """Writes everything into an empty directory."""
    # Two layers of five: one that attends in a window, one that attends to everything.
    _shrink(REFERENCE / "replay" / "model", place / "model", layers=(0, 1))
    _shrink(REFERENCE / "replay" / "model", place / "other", layers=(2, 3))
    shutil.copytree(REFERENCE / "replay" / "model", place / "teacher")
    _keep_layers(REFERENCE / "replay" / "adapter", place / "adapter", "adapter_model.safetensors", (0, 1))
    for source in sorted(FAMILIES.iterdir()):
        shutil.copytree(source, place / "families" / source.name, ignore=shutil.ignore_patterns("*.npz"))
    _write_tokenizer(place / "tokenizer")
    draw = numbers(1)
    for name, rows in (("", 28), ("held_out_", 5)):
        _write(place / f"{name}pairs.jsonl", [_pair(draw) for _ in range(rows)])
        _write(place / f"{name}texts.jsonl", [{"text": text(draw, 2, 9)} for _ in range(rows)])
    _write(place / "chats.jsonl", [{"messages": _chat(draw, 1 + index % 2)} for index in range(28)])
    _write(
        place / "feedback.jsonl",
        [
            {"prompt": text(draw, 1, 4) + ": ", "completion": text(draw, 1, 4), "label": index % 3 > 0}
            for index in range(28)
        ],
    )
    _write(place / "prompts.jsonl", [{"prompt": text(draw, 1, 4), "answer": text(draw, 1, 1)} for _ in range(12)])
    ids = [[2 + next(draw) % 94 for _ in range(2 + next(draw) % 9)] for _ in range(3 * 20)]
    _write(
        place / "pairs_of_ids.jsonl",
        [
            {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": [*rejected, 2 + index]}
            for index, (prompt, chosen, rejected) in enumerate(zip(ids[::3], ids[1::3], ids[2::3], strict=True))
        ],
    )


def register_rewards() -> None:
    """Registers the rewards that policies' answers are judged by."""

    @nnxdsl.reward("remainder")
    def remainder(completion: str, answer: str) -> float:
        return sum(map(ord, completion + answer)) % 11 / 11

    @nnxdsl.reward("brevity")
    def brevity(completion: str) -> float:
        return -len(completion) / 8

    @nnxdsl.reward("stopping")
    def stopping(completion: str) -> float:
        """As `brevity`; and asks the run that it is called in to stop, the first time."""
        for run in Path("homes/resumed").glob("*/control"):
            if not Path("homes/stopped").exists():
                (run / "stop").touch()
                Path("homes/stopped").touch()
        return -len(completion) / 8


def _pair(draw: Iterator[int]) -> dict[str, Any]:
    prompt, chosen = text(draw, 1, 5) + ": ", text(draw, 1, 4)
    return {"prompt": prompt, "chosen": chosen, "rejected": chosen[: len(chosen) // 2] + "." + text(draw, 1, 3)}


def _chat(draw: Iterator[int], turns: int) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": text(draw, 1, 3)} for index in range(2 * turns)]


def _write(path: Path, rows: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _shrink(source: Path, target: Path, layers: tuple[int, ...]) -> None:
    """Copies a model of which only some layers are kept."""
    _keep_layers(source, target, "model.safetensors", layers)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = len(layers)
    config["layer_types"] = [config["layer_types"][layer] for layer in layers]
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _keep_layers(source: Path, target: Path, name: str, layers: tuple[int, ...]) -> None:
    shutil.copytree(source, target)
    kept = {}
    for key, tensor in load_file(target / name).items():
        match = re.search(r"(?<=\.layers\.)\d+", key)
        if match is None:
            kept[key] = tensor
        elif int(match[0]) in layers:
            kept[key[: match.start()] + str(layers.index(int(match[0]))) + key[match.end() :]] = tensor
    save_file(kept, target / name)


def _write_tokenizer(place: Path) -> None:
    """Writes a tokenizer whose 96 tokens are called t0 to t95, for models of so small a vocabulary."""
    place.mkdir()
    model = {"type": "WordLevel", "vocab": {f"t{token}": token for token in range(96)}, "unk_token": "t0"}
    fields = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (place / "tokenizer.json").write_text(json.dumps(fields), encoding="utf-8")
    (place / "tokenizer_config.json").write_text(json.dumps(END), encoding="utf-8")
