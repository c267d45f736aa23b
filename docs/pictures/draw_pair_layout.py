"""Draws pair_layout.svg: a preference pair as one row of tokens, its attention mask, and what each slot predicts.

Tokens, positions, mask and targets of the pair are computed by the library.

    python docs/pictures/draw_pair_layout.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from svg import BLUE, FAINT, GREY, MUTED, ORANGE, PALE_BLUE, PALE_ORANGE, PALE_TEAL, RULE, TEAL, Drawing, main

from nnxdsl import Data
from nnxdsl.data import BytesTokenizer, PairBatch, load
from nnxdsl.models.attention.mask import attention_mask
from nnxdsl.program.batches.pairs import PairKind

PAIR = {"prompt": "sky: ", "chosen": "blue", "rejected": "red"}
TOKENIZER = BytesTokenizer()
PARTS = ("prompt", "chosen", "rejected")
COLORS, PALE = (BLUE, TEAL, ORANGE), (PALE_BLUE, PALE_TEAL, PALE_ORANGE)
X, Y, CELL, GRID = 112, 92, 19, 172
"""The first slot of the row, the side of a slot, and where the mask begins."""


def pair() -> PairBatch:
    """A batch of the pair alone, padded as every batch of a file that has this row only."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pairs.jsonl"
        file.write_text(json.dumps(PAIR) + "\n", encoding="utf-8")
        return load(Data.Preferences(str(file)), TOKENIZER).batch([0], 1)


def shown(token: int) -> str:
    """A token as it is written in a slot."""
    special = {TOKENIZER.bos_id: "bos", TOKENIZER.eos_id: "eos", ord(" "): "␣"}
    return special.get(token) or TOKENIZER.decode([token])


def predictions(batch: PairBatch, slots: int) -> dict[int, list[tuple[int, int]]]:
    """The tokens that each slot predicts, and that count, with the branch of each."""
    numbers = jnp.arange(slots)[None, :, None]  # [B, T, D]: a slot's hidden state is its number
    targets = PairKind().targets(numbers, batch)
    result: dict[int, list[tuple[int, int]]] = {}
    for number, (slot, token, counts) in enumerate(zip(*(np.ravel(part) for part in targets), strict=True)):
        if counts:
            result.setdefault(int(slot), []).append((int(token), 1 + number // batch.chosen.shape[1]))
    return result


def draw() -> Drawing:
    """The picture."""
    batch = pair()
    row = PairKind().rows(batch)
    tokens, (positions, segments, branches) = np.asarray(row[0])[0], (np.asarray(part)[0] for part in row[1])
    mask = np.asarray(attention_mask(row[1], row[1]))[0]  # [query, key]
    size, real = len(tokens), int((segments > 0).sum())
    drawing = Drawing(960, GRID + size * CELL + 24, "The row of a preference pair and its attention mask")
    drawing.text(24, 34, "A preference pair is one row: [prompt | chosen | rejected]", size=16, bold=True)

    for branch, name in enumerate(PARTS):
        slots = np.flatnonzero(branches == branch)
        x, width = X + slots[0] * CELL, len(slots) * CELL
        drawing.path(f"M{x + 2} {Y - 12}v-5h{width - 4}v5", stroke=COLORS[branch], line=1.5)
        padded = "left-padded" if branch == 0 else "right-padded"
        drawing.text(x + width / 2, Y - 22, f"{name}, {padded}", size=12, fill=COLORS[branch], anchor="middle")
    for slot in range(size):
        _slot(drawing, X + slot * CELL, Y - 6, int(tokens[slot]), int(branches[slot]), bool(segments[slot]))
        for line, value in enumerate((positions[slot], branches[slot])):
            fill = MUTED if segments[slot] else RULE
            drawing.text(X + (slot + 0.5) * CELL, Y + 30 + 17 * line, str(value), size=11, fill=fill, anchor="middle")
    for line, name in enumerate(("tokens", "position", "branch")):
        drawing.text(X - 10, Y + (8, 30, 47)[line], name, size=12, fill=MUTED, anchor="end")

    drawing.text(X, GRID - 12, "attention mask: a row is a query, a column is a key", size=12, fill=MUTED)
    predicted = predictions(batch, size)
    right = X + size * CELL
    drawing.text(right + 14, GRID - 12, "predicts", size=12, fill=MUTED)
    for query in range(size):
        y = GRID + query * CELL
        _slot(drawing, X - CELL - 8, y, int(tokens[query]), int(branches[query]), bool(segments[query]))
        for key in range(size):
            seen = mask[query, key]
            fill = (COLORS[branches[key]] if segments[query] else RULE) if seen else GREY
            drawing.rect(X + key * CELL + 1, y + 1, CELL - 2, CELL - 2, fill=fill, radius=2)
        for number, (token, branch) in enumerate(predicted.get(query, [])):
            drawing.text(right + 14 + 20 * number, y + 14, shown(token), size=12, fill=COLORS[branch], mono=True)
    for begin in np.flatnonzero(np.diff(branches)) + 1:
        index = X + begin * CELL
        drawing.path(f"M{index} {GRID - 2}v{size * CELL + 4}", stroke=FAINT, line=1, dash="3 3")
        drawing.path(f"M{X - 2} {GRID + begin * CELL}h{size * CELL + 4}", stroke=FAINT, line=1, dash="3 3")

    x = right + 90
    for line, (fill, label) in enumerate(
        [
            (BLUE, "sees the prompt"),
            (TEAL, "sees chosen tokens"),
            (ORANGE, "sees rejected tokens"),
            (RULE, "padding sees padding"),
            (GREY, "masked"),
        ]
    ):
        drawing.rect(x, GRID + line * 24, 15, 15, fill=fill, radius=2)
        drawing.text(x + 24, GRID + 12 + line * 24, label)
    prompt, chosen, rejected = (
        int(length[0]) for length in (batch.prompt_length, batch.chosen_length, batch.rejected_length)
    )
    both = positions[branches > 0][segments[branches > 0] > 0].min()
    first = int(np.flatnonzero(segments == 1)[0])
    assert mask[first:, first].sum() == real  # every real token sees the first one
    notes = [
        (
            "The prompt is computed once.",
            f"{real} tokens, where two rows of",
            f"their own have {2 * prompt + chosen + rejected}.",
        ),
        ("The completions are independent.", f"Both start at position {both}; neither", "sees the other."),
        ("One slot predicts two tokens.", "The prompt's last slot predicts the", "first token of both completions."),
        ("Logits are for completions only.", f"{chosen + rejected} targets; nothing predicts the", "prompt."),
    ]
    for number, (head, *lines) in enumerate(notes):
        y = GRID + 158 + number * 76
        drawing.text(x, y, head, bold=True)
        drawing.texts(x, y + 19, lines, fill=MUTED)
    return drawing


def _slot(drawing: Drawing, x: float, y: float, token: int, branch: int, is_real: bool) -> None:
    """A slot of the row with its token."""
    fill, stroke = (PALE[branch], COLORS[branch]) if is_real else ("#ffffff", RULE)
    drawing.rect(x + 1, y + 1, CELL - 2, CELL - 2, fill=fill, stroke=stroke, radius=2)
    if is_real:
        text = shown(token)
        drawing.text(x + CELL / 2, y + 13.5, text, size=8.5 if len(text) > 1 else 12, anchor="middle", mono=True)


if __name__ == "__main__":
    main(__file__, draw)
