"""Writes SVG: rectangles, texts and arrows on a white card, which is legible on light and on dark pages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

SANS = "ui-sans-serif, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"

INK, MUTED, FAINT, RULE = "#1f2430", "#5b6472", "#8b93a1", "#d5d9e0"
BLUE, TEAL, ORANGE, GREY = "#3b6fd4", "#12806a", "#c2571a", "#eef0f4"
PALE_BLUE, PALE_TEAL, PALE_ORANGE = "#e3ecfc", "#dcf2ec", "#fce8da"

Point = tuple[float, float]


class Drawing:
    """An SVG file in the making.

    Attributes:
        width: Pixels.
        height: Pixels.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        """A white card.

        Args:
            width: Pixels.
            height: Pixels.
            title: What the picture shows, for readers who do not see it.
        """
        self.width, self.height = width, height
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="{SANS}" font-size="13" fill="{INK}">',
            f"<title>{escape(title)}</title>",
        ]
        self.rect(0.5, 0.5, width - 1, height - 1, fill="#ffffff", stroke=RULE, radius=8)

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        stroke: str = "none",
        radius: float = 0,
        dash: str = "",
        line: float = 1,
    ) -> None:
        """A rectangle."""
        size = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
        edge = f' stroke="{stroke}" stroke-width="{_n(line)}"' if stroke != "none" else ""
        edge += f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<rect {size}{f" rx={chr(34)}{_n(radius)}{chr(34)}" if radius else ""} fill="{fill}"{edge}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 13,
        fill: str = INK,
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
        turned: bool = False,
    ) -> None:
        """A line of text with its baseline at `y`; `turned` reads from below to above."""
        style = ' font-weight="600"' if bold else ""
        style += f' font-family="{MONO}"' if mono else ""
        style += f' text-anchor="{anchor}"' if anchor != "start" else ""
        style += f' transform="rotate(-90 {_n(x)} {_n(y)})"' if turned else ""
        style += f' font-size="{_n(size)}"' if size != 13 else ""
        style += f' fill="{fill}"' if fill != INK else ""
        self._parts.append(f'<text x="{_n(x)}" y="{_n(y)}"{style} xml:space="preserve">{escape(text)}</text>')

    def texts(
        self, x: float, y: float, lines: Sequence[str], *, step: float = 18, size: float = 13, fill: str = INK
    ) -> None:
        """Lines of text, the first with its baseline at `y`."""
        for number, line in enumerate(lines):
            self.text(x, y + number * step, line, size=size, fill=fill)

    def path(self, d: str, *, stroke: str = FAINT, line: float = 1.25, dash: str = "") -> None:
        """A path that is not filled, from the commands of SVG."""
        more = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(f'<path d="{d}" fill="none" stroke="{stroke}" stroke-width="{_n(line)}"{more}/>')

    def arrow(self, points: Sequence[Point], *, stroke: str = FAINT, line: float = 1.25) -> None:
        """A line through the points, with round corners and a head at its end."""
        (x, y), (before_x, before_y) = points[-1], points[-2]
        length = ((x - before_x) ** 2 + (y - before_y) ** 2) ** 0.5
        along, across = (x - before_x) / length, (y - before_y) / length
        base = x - 7 * along, y - 7 * across
        self.path(_rounded([*points[:-1], base]), stroke=stroke, line=line)
        sides = [(base[0] - 3.5 * across, base[1] + 3.5 * along), (base[0] + 3.5 * across, base[1] - 3.5 * along)]
        corners = " ".join(f"{_n(a)},{_n(b)}" for a, b in [(x, y), *sides])
        self._parts.append(f'<polygon points="{corners}" fill="{stroke}"/>')

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])


def main(script: str, draw: Callable[[], Drawing]) -> None:
    """Writes the picture of a script `draw_NAME.py` to `NAME.svg` beside it, or to the path of the command line."""
    place = Path(script).with_name(Path(script).stem.removeprefix("draw_") + ".svg")
    (Path(sys.argv[1]) if len(sys.argv) > 1 else place).write_text(str(draw()), encoding="utf-8")


def _rounded(points: Sequence[Point], radius: float = 10) -> str:
    """The commands of a line through the points whose corners are cut off by curves."""
    result = [f"M{_n(points[0][0])} {_n(points[0][1])}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        enter, leave = _toward(corner, before, radius), _toward(corner, after, radius)
        result.append(f"L{_n(enter[0])} {_n(enter[1])}Q{_n(corner[0])} {_n(corner[1])} {_n(leave[0])} {_n(leave[1])}")
    return "".join([*result, f"L{_n(points[-1][0])} {_n(points[-1][1])}"])


def _toward(start: Point, end: Point, distance: float) -> Point:
    """The point at a distance from the start, at most half of the way."""
    length = ((end[0] - start[0]) ** 2 + (end[1] - start[1]) ** 2) ** 0.5
    share = min(distance / length, 0.5) if length else 0
    return start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1])


def _n(number: float) -> str:
    """A number in at most one decimal."""
    return f"{round(number, 1):g}"
