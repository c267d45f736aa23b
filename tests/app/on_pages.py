"""What is asked of any page: that it fits its width, and that its texts stand out from what is behind them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parents[2] / "docs" / "pictures"
EVIL = '<img src=x onerror="boom(1)">${boom(2)}{{boom(3)}}'

_SHARED = """
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length > 3 ? n : [...n, 1]; };
  const part = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const contrast = (one, other) => {
    const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  const behind = (one) => {
    for (let e = one; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour[3] === 1) return colour;
    }
    return [255, 255, 255, 1];
  };
  const isSeen = (one) => one.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });
  const found = [];
"""

_DIM = """
  document.querySelectorAll("header.top *, main *").forEach((one) => {
    if (!isSeen(one) || one.closest("[hidden], :disabled, .visually-hidden, svg")) return;
    if (![...one.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) return;
    const style = getComputedStyle(one), large = parseFloat(style.fontSize) >= 24;
    const ratio = contrast(parse(style.color), behind(one));
    const named = one.tagName + "." + one.className + " " + ratio.toFixed(2);
    if (ratio < (large ? 3 : 4.5)) found.push(named + ": " + one.textContent.trim().slice(0, 40));
  });
"""

_FAINT = """
  const kinds = "input:not([type=range], [type=file], [type=radio], [type=checkbox]), textarea";
  document.querySelectorAll(`main :is(${kinds})`).forEach((one) => {
    if (!isSeen(one) || one.closest(":disabled, [role=grid], .cm-editor") || !one.getBoundingClientRect().width) return;
    const ratios = [];
    for (let e = one; e && ratios.length < 4; e = e.parentElement) {
      const style = getComputedStyle(e), colour = parse(style.borderBottomColor);
      const isDrawn = parseFloat(style.borderBottomWidth) > 0 && colour[3] === 1;
      ratios.push(isDrawn ? contrast(colour, behind(e.parentElement)) : 1);
    }
    const label = one.getAttribute("aria-label") ?? one.closest("label, .block")?.textContent.trim().slice(0, 30);
    if (Math.max(...ratios) < 3) found.push(label + " " + Math.max(...ratios).toFixed(2));
  });
"""

_CUT = """
  document.querySelectorAll("main [role=grid], main table").forEach((table) => {
    const heads = [...table.querySelectorAll("[role=columnheader], th")].filter(
      (one) => isSeen(one) && one.getBoundingClientRect().width && one.textContent.trim()
    );
    const boxes = heads.map((head) => {
      const range = document.createRange();
      range.selectNodeContents(head.querySelector(".header-content, .header-button, span") ?? head);
      return [head, range.getBoundingClientRect(), head.getBoundingClientRect()];
    });
    boxes.forEach(([head, text, box]) => {
      const cut = [head, ...head.querySelectorAll("*")].some(
        (e) => e.scrollWidth > e.clientWidth + 1 && e.clientWidth && getComputedStyle(e).overflowX !== "visible"
      );
      if (cut || text.right > box.right + 1) found.push(head.textContent.trim().slice(0, 30));
    });
  });
"""


def _faults(page: Any, script: str) -> list[str]:
    return page.evaluate(f"() => {{{_SHARED}{script}return [...new Set(found)]; }}")


def dim_texts(page: Any) -> list[str]:
    """Texts whose contrast is below what WCAG 2.2 asks for at level AA."""
    return _faults(page, _DIM)


def faint_boxes(page: Any) -> list[str]:
    """Fields whose border has less contrast than the 3 that WCAG 2.2 asks for at level AA."""
    return _faults(page, _FAINT)


def cut_headers(page: Any) -> list[str]:
    """Headers of tables whose text is cut or reaches into the next column."""
    return _faults(page, _CUT)


def overflow(page: Any) -> int:
    """How many pixels the page is wider than its window."""
    return page.evaluate("Math.max(0, document.scrollingElement.scrollWidth - window.innerWidth)")


def picture(page: Any, name: str) -> None:
    """Writes `docs/pictures/<name>.png` where NNXDSL_UPDATE_IMAGES is set."""
    if os.environ.get("NNXDSL_UPDATE_IMAGES"):
        IMAGES.mkdir(exist_ok=True)
        page.wait_for_timeout(600)
        page.screenshot(path=IMAGES / f"{name}.png")
