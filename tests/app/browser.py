"""Where Chromium is and how it is started: `python -m tests.app.browser` says whether it can be."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
NAMES = ("chromium", "chromium-browser", "google-chrome")


def launch(playwright: Any) -> Any:
    """The machine's Chromium, or else the one that `playwright install chromium` brought.

    Raises:
        FileNotFoundError: there is neither.
    """
    result = next(filter(None, map(shutil.which, NAMES)), None) or playwright.chromium.executable_path
    if not Path(result).exists():
        raise FileNotFoundError("there is no Chromium: apt-get install chromium, or playwright install chromium")
    return playwright.chromium.launch(executable_path=result, args=list(FLAGS))


def main() -> int:
    try:
        from playwright.sync_api import sync_playwright  # noqa: PLC0415 - its lack is one of the answers
    except ImportError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    try:
        with sync_playwright() as playwright:
            browser = launch(playwright)
            browser.close()
    except Exception as error:
        sys.stderr.write(f"{error}\n".split("\n", 1)[0] + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
