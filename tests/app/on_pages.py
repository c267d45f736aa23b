"""What is asked of any page: that it fits its width, and that its texts stand out from what is behind them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parents[2] / "docs" / "pictures"
EVIL = '<img src=x onerror="boom(1)">${boom(2)}{{boom(3)}}'

_DIM = """() => {
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length > 3 ? n : [...n, 1]; };
  const part = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const behind = (one) => {
    for (let e = one; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour[3] === 1) return colour;
    }
    return [255, 255, 255, 1];
  };
  const found = [];
  document.querySelectorAll("header.top *, main *").forEach((one) => {
    if (!one.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true })) return;
    if (one.closest("[hidden], :disabled, .visually-hidden, svg")) return;
    if (![...one.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) return;
    const style = getComputedStyle(one);
    const [a, b] = [light(parse(style.color)), light(behind(one))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05), large = parseFloat(style.fontSize) >= 24;
    const named = one.tagName + "." + one.className + " " + ratio.toFixed(2);
    if (ratio < (large ? 3 : 4.5)) found.push(named + ": " + one.textContent.trim().slice(0, 40));
  });
  return found;
}"""


def dim_texts(page: Any) -> list[str]:
    """Texts whose contrast is below what WCAG 2.2 asks for at level AA."""
    return page.evaluate(_DIM)


def overflow(page: Any) -> int:
    """How many pixels the page is wider than its window."""
    return page.evaluate("Math.max(0, document.scrollingElement.scrollWidth - window.innerWidth)")


def picture(page: Any, name: str) -> None:
    """Writes `docs/pictures/<name>.png` where NNXDSL_UPDATE_IMAGES is set."""
    if os.environ.get("NNXDSL_UPDATE_IMAGES"):
        IMAGES.mkdir(exist_ok=True)
        page.wait_for_timeout(600)
        page.screenshot(path=IMAGES / f"{name}.png")
