"""Formats numbers, sizes and times for display."""

from __future__ import annotations

import datetime
import math
import zoneinfo

from nnxdsl.terminal.plan_format import format_bytes

size = format_bytes  # formats bytes as `512 B`, `1.5 KiB` or `72.04 GiB`


def number(value: object) -> str:
    """Formats a number with four significant digits.

    >>> [number(x) for x in (0.693147, 12345.6, 2e-7, 3, float("nan"), None)]
    ['0.6931', '12,346', '2e-07', '3', 'nan', '-']
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    if value and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def rounded(value: float | None) -> float:
    """Four significant digits, as a number that tables sort; NaN for None."""
    return math.nan if value is None else float(f"{value:.4g}")


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters, whose last one is an ellipsis if it was longer."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def sentence(text: str) -> str:
    """A text with a capital first letter, such as a message of an error as a paragraph.

    >>> sentence("no GPU here")
    'No GPU here'
    """
    return text[:1].upper() + text[1:]


def whole(text: str) -> int | None:
    """Parses a non-negative integer of ASCII digits, from a URL or a file name; None for any other text.

    >>> [whole(text) for text in ("12", "²", "-1", "9" * 5000)]
    [12, None, None, None]
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None


def duration(seconds: float | None) -> str:
    """Formats seconds as `42 s`, `3:05 min`, `2:07 h` or `3 d 4 h`."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    if whole < 86400:
        return f"{whole // 3600}:{whole // 60 % 60:02d} h"
    return f"{whole // 86400} d {whole // 3600 % 24} h"


def parsed(iso: str | None) -> datetime.datetime | None:
    """Parses a time stamp of a run; None if it is invalid."""
    try:
        return datetime.datetime.fromisoformat(iso) if iso else None
    except ValueError:
        return None


def local_time(iso: str | None, zone: str = "") -> str:
    """Formats a time stamp of a run in a time zone by its name, or else in UTC.

    >>> local_time("2026-01-01T12:00:00+00:00", "Asia/Tokyo"), local_time("2026-01-01T12:00:00+00:00", "../x")
    ('2026-01-01 21:00', '2026-01-01 12:00 UTC')
    """
    when = parsed(iso)
    if when is None:
        return "-"
    try:
        return when.astimezone(zoneinfo.ZoneInfo(zone)).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
        return when.astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def age(seconds: float) -> str:
    """Formats elapsed seconds coarsely, so that a page does not change at every update."""
    if not math.isfinite(seconds):
        return "never"
    if seconds < 10:
        return "now"
    if seconds < 60:
        return f"{int(seconds // 10) * 10} s ago"
    return f"{int(seconds // 60)} min ago" if seconds < 3600 else f"{duration(seconds // 60 * 60)} ago"
