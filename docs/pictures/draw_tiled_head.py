"""Draws tiled_head.svg: log-probabilities over a large vocabulary, a tile of logits at a time.

The sizes of chunks and tiles are those that the library computes for this batch.

    python docs/pictures/draw_tiled_head.py
"""

from __future__ import annotations

from svg import BLUE, FAINT, GREY, MUTED, ORANGE, PALE_BLUE, PALE_TEAL, RULE, TEAL, Drawing, main

from nnxdsl.losses.lm_head.token_stats import ACCELERATOR, LOGITS_BYTES, tiles

PAIRS, COMPLETION = 8, 512
VOCABULARY, WIDTH = 262_144, 1_152  # of Gemma 3 1B
TOKENS = PAIRS * 2 * COMPLETION
CHUNKS, TILE, _ = tiles(TOKENS, VOCABULARY, WIDTH, None, ACCELERATOR)
CHUNK, TILES = TOKENS // CHUNKS, VOCABULARY // TILE
AT_CHUNK, AT_TILE = 1, 22
"""The tile that is drawn as the one of the moment."""

X, Y, WIDE, HIGH = 136, 158, 512, 232
"""Where the logits would stand."""


def draw() -> Drawing:
    """The picture."""
    assert CHUNK * CHUNKS == TOKENS
    assert TILE * TILES == VOCABULARY
    drawing = Drawing(960, 562, "Log-probabilities of a batch, computed tile by tile over the vocabulary")
    drawing.text(24, 34, "Log-probabilities without the logits of a batch", size=16, bold=True)
    example = (
        f"{PAIRS} pairs of {COMPLETION} completion tokens, vocabulary of {VOCABULARY:,}, width {WIDTH:,} (Gemma 3 1B)"
    )
    drawing.text(24, 54, f"Example: {example}", size=12, fill=MUTED)
    column, line = WIDE / TILES, HIGH / CHUNKS
    x, y = X + AT_TILE * column, Y + AT_CHUNK * line

    _matrix(drawing, X, 84, WIDE, 44, f"LM head  [{VOCABULARY:,} x {WIDTH:,}], rows in {TILES} tiles of {TILE:,}")
    drawing.rect(x, 84, column, 44, fill=ORANGE)
    _matrix(drawing, 68, Y, 40, HIGH)
    for number, text in enumerate((f"hidden states  [{TOKENS:,} x {WIDTH:,}]", f"{CHUNKS} chunks of {CHUNK:,} tokens")):
        drawing.text(38 + 18 * number, Y + HIGH / 2, text, size=11.5, fill=MUTED, anchor="middle", turned=True)
    drawing.rect(68, y, 40, line, fill=BLUE)

    drawing.rect(X, Y, WIDE, HIGH, fill="#fafbfc", stroke=RULE, dash="4 4")
    for number in range(1, TILES):
        drawing.path(f"M{X + number * column} {Y}v{HIGH}", stroke=GREY, line=1)
    for number in range(1, CHUNKS):
        drawing.path(f"M{X} {Y + number * line:g}h{WIDE}", stroke=RULE, line=1)
    drawing.rect(X, y, AT_TILE * column, line, fill=PALE_TEAL)
    drawing.rect(x, y, column, line, fill=ORANGE)
    drawing.arrow([(x + column / 2, 128), (x + column / 2, y - 2)], stroke=ORANGE, line=1.5)
    drawing.arrow([(108, y + line / 2), (X - 2, y + line / 2)], stroke=BLUE, line=1.5)
    drawing.arrow([(x + column + 6, y + line / 2), (x + column + 70, y + line / 2)], stroke=FAINT, line=1.5)
    drawing.text(x + column + 78, y + line / 2 + 4, "the next tile", size=12, fill=MUTED)
    drawing.text(X + 10, y + line / 2 + 4, "done, not kept", size=12, fill=TEAL)
    whole, tile = 4 * TOKENS * VOCABULARY, 4 * CHUNK * TILE
    drawing.text(
        X + WIDE,
        Y + HIGH + 20,
        f"all logits, float32: {_bytes(whole)}, never in memory",
        size=12,
        fill=MUTED,
        anchor="end",
    )
    drawing.text(X, Y + HIGH + 20, f"one tile: {_bytes(tile)}", size=12, fill=ORANGE, bold=True)

    right = X + WIDE + 34
    drawing.text(right, 98, "Carried from tile to tile", bold=True)
    drawing.text(right, 116, "per token of the chunk, float32", size=12, fill=MUTED)
    carried = [
        ("m", "largest logit so far"),
        ("s", "sum of exp(logit - m), target left out"),
        ("e", "the same, times (logit - m): entropy"),
        ("t", "the target's logit"),
    ]
    for number, (name, meaning) in enumerate(carried):
        top = 134 + number * 34
        drawing.rect(right, top, 26, 26, fill=PALE_TEAL, stroke=TEAL, radius=4)
        drawing.text(right + 13, top + 17.5, name, anchor="middle", mono=True, bold=True)
        drawing.text(right + 36, top + 17.5, meaning, size=12)
    drawing.text(right, 298, "A new tile z", bold=True)
    steps = ["m' = max(m, max z)", "s' = s exp(m - m') + sum exp(z - m')", "t  = z[target], in the tile that has it"]
    for number, step in enumerate(steps):
        drawing.text(right, 318 + number * 18, step, size=11, mono=True, fill=MUTED)
    drawing.text(right, 386, "After the last tile", bold=True)
    drawing.text(right, 406, "log p = t - m - log(s + exp(t - m))", size=11, mono=True, fill=MUTED)

    drawing.path("M24 436h912", stroke=RULE)
    for number, (color, head, lines) in enumerate(notes()):
        left = 24 + number * 316
        drawing.rect(left, 454, 6, 84, fill=color, radius=2)
        drawing.text(left + 16, 470, head, bold=True)
        drawing.texts(left + 16, 492, lines, size=12, fill=MUTED, step=20)
    return drawing


def notes() -> list[tuple[str, str, list[str]]]:
    """What stands under the picture: color, heading, lines."""
    frozen = [
        "The same pass also carries the head's rows",
        "summed with weights exp(z - m): the backward",
        "pass computes no logits.",
    ]
    trained = [
        f"Logits of up to {_bytes(LOGITS_BYTES)} are kept, others",
        "computed again: tiles outside, chunks inside,",
        "so that a tile's gradient is summed in one go.",
    ]
    tokens = [
        "Slots that predict completion tokens, no",
        "prompt. memory.logprob_tokens lowers the",
        f"{CHUNK:,} tokens of a chunk.",
    ]
    return [
        (BLUE, "Gradient, frozen head (LoRA)", frozen),
        (ORANGE, "Gradient, trained head", trained),
        (TEAL, "Which tokens", tokens),
    ]


def _matrix(drawing: Drawing, x: float, y: float, width: float, height: float, label: str = "") -> None:
    """A matrix in memory, with what it is."""
    drawing.rect(x, y, width, height, fill=PALE_BLUE, stroke=BLUE, radius=2)
    if label:
        drawing.text(x + 10, y - 6, label, size=12, fill=MUTED)


def _bytes(number: int) -> str:
    """A size in GiB or MiB."""
    return f"{number / 2**30:g} GiB" if number >= 2**30 else f"{number / 2**20:g} MiB"


if __name__ == "__main__":
    main(__file__, draw)
