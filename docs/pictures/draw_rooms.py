"""Draws rooms.svg: the packages of nnxdsl by rank, and their imports. Needs the extra `test`.

Ranks and imports are those that `tests/test_house.py` checks; here is only where a package stands in the picture.

    python docs/pictures/draw_rooms.py
"""

from __future__ import annotations

import runpy
from pathlib import Path

from svg import BLUE, FAINT, MUTED, PALE_BLUE, PALE_TEAL, TEAL, Drawing, Point, main

HOUSE = runpy.run_path(str(Path(__file__).parents[2] / "tests" / "test_house.py"))
RANKS: dict[str, int] = HOUSE["RANKS"]

PURPOSE = {
    "cli": (4, "main, and a file a verb"),
    "trainer": (3, "the loop and its hooks"),
    "app": (5, "the web app's pages"),
    "rollouts": (2, "prompts to a batch"),
    "serve": (0, "OpenAI's protocol"),
    "generate": (2, "samples completions"),
    "weights": (2, "open, export, convert"),
    "planning": (3, "memory, time, search"),
    "sweep": (5, "many runs of a recipe"),
    "program": (1, "one jitted training step"),
    "adapters": (0, "LoRA, DoRA, QAT"),
    "losses": (1, "losses, tiled LM head"),
    "launch": (5, "Slurm, Ray, clusters"),
    "tracking": (4, "W&B, MLflow, others"),
    "sharding": (0, "axes to the mesh"),
    "formats": (2, "safetensors, HF, PEFT"),
    "optim": (3, "optimizers, schedules"),
    "runs": (4, "the run directory"),
    "data": (0, "rows, tokens, batches"),
    "models": (1, "Flax NNX decoders"),
    "runtime": (4, "XLA flags, signals"),
    "config": (1, "the DSL: frozen classes"),
    "terminal": (3, "tables and plan views"),
    "storage": (4, "atomic files"),
    "errors": (2, "every exception"),
}
"""The column of each package, and what it is for."""

VIA: dict[tuple[str, str], list[tuple[float, float]]] = {
    ("program", "data"): [(0.5, 4.5), (0.5, 2.5)],
    ("program", "formats"): [(1.5, 4.5), (1.5, 3.6)],
    ("runs", "terminal"): [(3.5, 2.5), (3.5, 1.6)],
    ("weights", "runs"): [(2.6, 5), (3.2, 4)],
    ("planning", "runs"): [(3.46, 5), (3.46, 3.7)],
    ("trainer", "tracking"): [(3.7, 6)],
    ("tracking", "config"): [(4.6, 3.4), (4.6, 1.6), (2.1, 1.6)],
    ("sharding", "terminal"): [(1.5, 2.45), (1.5, 1.62)],
    ("app", "errors"): [(5.53, 8.4), (5.53, 0.55)],
    ("launch", "config"): [(5.087, 1.5), (2, 1.5)],
}
"""Columns and ranks through which an arrow goes that would cross a package."""

TOP_RANK = max(RANKS.values())
LEFT, COLUMN, TOP, FLOOR, WIDTH, HEIGHT = 122, 150, 76, 80, 134, 46


def center(column: float, rank: float) -> Point:
    """The pixel in the middle of a place."""
    return LEFT + column * COLUMN, TOP + (TOP_RANK - rank) * FLOOR + HEIGHT / 2


def imports() -> dict[str, set[str]]:
    """Which packages each package imports."""
    result: dict[str, set[str]] = {room: set() for room in RANKS}
    for file in HOUSE["FILES"]:
        if HOUSE["room"](file) in RANKS:
            result[HOUSE["room"](file)] |= HOUSE["rooms_known"](file)
    return result


def reduced(edges: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The imports that do not follow from others."""
    reach: dict[str, set[str]] = {}
    for room in sorted(edges, key=RANKS.__getitem__):
        reach[room] = edges[room].union(*(reach[other] for other in edges[room]))
    return [
        (room, other)
        for room in edges
        for other in sorted(edges[room])
        if not any(other in reach[between] for between in edges[room])
    ]


def draw() -> Drawing:
    """The picture."""
    arrows = reduced(imports())
    drawing = Drawing(960, TOP + (TOP_RANK + 1) * FLOOR - 12, "The packages of nnxdsl by rank, and which imports which")
    drawing.text(20, TOP + 2, "rank", size=12, fill=FAINT)
    drawing.text(24, 32, "A package imports packages of lower rank only", size=16, bold=True)
    legend = "An arrow is an import; those that follow from other arrows are left out."
    drawing.text(24, 51, legend, size=12, fill=MUTED)
    for x, fill, stroke, label in ((680, PALE_BLUE, BLUE, "imports jax"), (800, PALE_TEAL, TEAL, "never imports jax")):
        drawing.rect(x, 39, 14, 14, fill=fill, stroke=stroke, radius=3)
        drawing.text(x + 20, 51, label, size=12, fill=MUTED)
    for rank in range(TOP_RANK + 1):
        y = center(0, rank)[1]
        drawing.text(24, y + 5, str(rank), size=13, fill=FAINT, mono=True)
    for room, other in arrows:
        starts = sorted((end for begin, end in arrows if begin == room), key=lambda end: _aim(room, end))
        ends = sorted((begin for begin, end in arrows if end == other), key=lambda begin: _aim(other, begin))
        (x, y), (to_x, to_y) = center(PURPOSE[room][0], RANKS[room]), center(PURPOSE[other][0], RANKS[other])
        x += _spread(starts.index(other), len(starts))
        to_x += _spread(ends.index(room), len(ends))
        between = [center(*place) for place in VIA.get((room, other), [])]
        drawing.arrow([(x, y + HEIGHT / 2), *between, (to_x, to_y - HEIGHT / 2 - 2)], stroke="#9aa3b2")
    for room, (column, purpose) in PURPOSE.items():
        x, y = center(column, RANKS[room])
        has_jax = not f"{room}/".startswith(tuple(HOUSE["WITHOUT_JAX"])) and room not in ("app", "errors")
        fill, stroke = (PALE_BLUE, BLUE) if has_jax else (PALE_TEAL, TEAL)
        drawing.rect(x - WIDTH / 2, y - HEIGHT / 2, WIDTH, HEIGHT, fill=fill, stroke=stroke, radius=6)
        drawing.text(x, y - 3, room, size=14, bold=True, anchor="middle", mono=True)
        drawing.text(x, y + 14, purpose, size=11, fill=MUTED, anchor="middle")
    return drawing


def _aim(room: str, other: str) -> tuple[float, int]:
    """Toward which side an arrow leaves a package, from left to right."""
    via = VIA.get((room, other)) or VIA.get((other, room), [])[::-1]
    column = via[0][0] if via else PURPOSE[other][0]
    distance = abs(RANKS[room] - RANKS[other])
    return (column - PURPOSE[room][0]) / distance, distance


def _spread(index: int, count: int) -> float:
    """Where on a package's edge an arrow begins or ends, of so many, from the middle."""
    return (index - (count - 1) / 2) * min(26, (WIDTH - 24) / count)


if __name__ == "__main__":
    main(__file__, draw)
