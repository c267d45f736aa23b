"""Takes the pictures of the app's pages, docs/pictures/*.png, in Chromium over real runs.

    python docs/pictures/take_app.py PROJECT [NAME ...]

PROJECT is a directory that is created: a copy of experiments/ whose recipes are run there (SFT, DPO twice, GRPO, a
sweep of six points, and a run that fails; about ten minutes on two cores). If it exists, its runs are used as they are.
It needs the extras `browser` and `test`. Pages are as on a window of 1400 pixels, light.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.app.browser import launch  # noqa: E402
from tests.app.conftest import RunningApp, with_token  # noqa: E402

BYTES = 150_000
WAIT_MILLISECONDS = 1_200_000
DATA = "experiments/data/preferences.jsonl"
BUTTONS = {"outputs": "Generate", "export": "Export"}
"""What is pressed on a page before its picture is taken."""
SWEEP = """
from quickstart import experiment as quickstart

from nnxdsl import Sweep, evolve, product

experiment = evolve(quickstart, {"name": "rates", "steps": 60, "evaluation.every_steps": 60})
sweep = Sweep(experiment, product({"optimizer.schedule.peak_lr": [3e-4, 1e-3, 3e-3], "batch_size": [4, 8]}))

if __name__ == "__main__":
    sweep.main()
"""
LARGE = """
from nnxdsl import Adapter, Data, Experiment, Model, Objective

experiment = Experiment(
    name="dpo-gemma3-12b",
    model=Model.Gemma3("12b"),
    adapter=Adapter.LoRA(),
    objective=Objective.DPO(),
    data=Data.Preferences("experiments/data/preferences.jsonl", max_prompt_length=1024, max_completion_length=1024),
    batch_size=16,
    steps=500,
)
"""
RUNS = (
    ("experiments/dpo_gemma.py",),
    ("experiments/dpo_gemma.py", "objective.beta=0.3"),
    ("experiments/grpo_gemma.py", "steps=30", "evaluation.every_steps=15"),
    ("-m", "nnxdsl", "sweep", "experiments/rates.py"),
)
FAILS = ("experiments/quickstart.py", "optimizer.schedule.peak_lr=1e30", "name=too-high-a-rate")


def prepare(project: Path) -> None:
    """Creates the project and its runs."""
    shutil.copytree(ROOT / "experiments", project / "experiments", ignore=shutil.ignore_patterns("__pycache__"))
    (project / "experiments" / "rates.py").write_text(SWEEP.lstrip(), encoding="utf-8")
    (project / "experiments" / "dpo_gemma_12b.py").write_text(LARGE.lstrip(), encoding="utf-8")
    for argv in RUNS:
        subprocess.run([sys.executable, *argv], cwd=project, env=environment(), check=True)
    subprocess.run([sys.executable, *FAILS], cwd=project, env=environment(), check=False)


def environment() -> dict[str, str]:
    """This process's, with the repository first on the path."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def pages(home: Path) -> dict[str, tuple[str, str, int]]:
    """By name of a picture: path of the page, what it waits for, and the picture's height."""
    one, two = sorted(path.name for path in home.glob("dpo-gemma3-tiny-*"))
    (online,) = (path.name for path in home.glob("grpo-gemma3-tiny-*"))
    plot = ".js-plotly-plot .main-svg"
    prompt = "What+is+the+capital+of+Italy%3F"
    return {
        "runs": ("/", "[role=gridcell]", 760),
        "run": (f"/run?id={one}", plot, 1000),
        "new": (f"/new?model=Gemma+3+tiny%2C+random+weights&data={DATA}", "[role=gridcell]", 950),
        "data": ("/data?of=exp:dpo_gemma", plot, 1100),
        "compare": (f"/compare?ids={one},{two}", plot, 1100),
        "sweeps": ("/sweeps", plot, 1200),
        "layout": ("/layout?exp=dpo_gemma_12b&device=h100&mesh=fsdp:4,tensor:2", ".device-grid", 1200),
        "outputs": (f"/outputs?run={one}&prompt={prompt}&max=64", ".pane.policy", 1160),
        "rollouts": (f"/rollouts?run={online}", plot, 1100),
        "export": (f"/export?run={one}", "[role=gridcell]", 760),
    }


def take(page: Any, address: str, waits_for: str, height: int, button: str | None) -> bytes:
    """A PNG of the top of a page, after a press of the button, in 256 colours."""
    page.set_viewport_size({"width": 1400, "height": height})
    page.goto(address)
    if button is not None:
        page.get_by_role("button", name=button, exact=True).click()
    page.wait_for_selector(waits_for, timeout=WAIT_MILLISECONDS)
    page.wait_for_timeout(3_000)  # curves are drawn and sizes settle
    image = Image.open(io.BytesIO(page.screenshot()))
    out = io.BytesIO()
    image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()


def main(project: Path, names: list[str]) -> None:
    """Takes the pictures of these names, or all of them."""
    if not project.exists():
        prepare(project)
    app = RunningApp(project, environment())
    app.start()
    with contextlib.ExitStack() as stack, sync_playwright() as playwright:
        stack.callback(app.end)
        browser = launch(playwright)
        page = browser.new_context(color_scheme="light").new_page()
        page.goto(with_token(app.url()))
        for name, (path, waits_for, height) in pages(project / "runs").items():
            if names and name not in names:
                continue
            data = take(page, app.url(path), waits_for, height, BUTTONS.get(name))
            if len(data) > BYTES:
                sys.exit(f"{name}: {len(data):,} bytes are more than {BYTES:,}")
            (Path(__file__).parent / f"{name}.png").write_bytes(data)
            print(f"{name}: {len(data):,} bytes", flush=True)
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(str(__doc__))
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
