"""All that a container of a page has, such as a tab: what a page may change there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gradio.blocks import Block


def inside(block: Any) -> Iterator[Block]:
    """Yields the components in a column or tab, and the columns, rows and groups in it."""
    for child in block.children:
        yield child
        yield from inside(child) if hasattr(child, "children") else ()
