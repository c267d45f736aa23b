"""The first screen of a new run: an experiment of a model, a file and a method, and what it says of the rows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nnxdsl import Adapter, Data, Model, Objective, Weights
from nnxdsl.errors import NnxdslError
from tests.app.many import experiment as earlier
from tests.app.many import write_run
from tests.app.on_pages import dim_texts, overflow, picture

pytest.importorskip("gradio", reason="needs gradio: pip install 'nnxdsl[app]'")
from app.page import Page
from app.pages.new import basics
from tests.app import native

Open = Callable[..., Any]
ROWS = {
    "pairs": {"prompt": "Say 1: ", "chosen": "good", "rejected": "bad"},
    "liked": {"prompt": "Say 1: ", "completion": "good", "label": True},
    "chats": {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
    "texts": {"text": "Once upon a time"},
}


@pytest.fixture
def files(site: Any) -> Path:
    for name, row in ROWS.items():
        rows = [{**row, "prompt": f"Say {number}: "} if "prompt" in row else row for number in range(3)]
        text = "".join(json.dumps(one) + "\n" for one in rows)
        (site.settings.project / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return site.settings.project


class Screen(Page):
    """The first screen alone."""

    def build(self) -> None:
        self.basics = basics.Basics(self.site, self.view)


def read(site: Any, **query: str) -> tuple[Any, str]:
    """What the screen shows of a query once the rows are read, by label or class, and what is missing."""

    screen = native.Built(Screen, site).page.basics
    while (result := screen.fill(query))[2]:
        time.sleep(0.05)
    names = {one: getattr(one, "label", None) or type(one).__name__ for one in result[0]}
    notes = [one for one, name in names.items() if name == "Markdown"]
    return {names[one] + (f" {notes.index(one)}" if one in notes else ""): result[0][one] for one in names}, result[1]


@pytest.mark.parametrize(
    ("name", "method", "objective", "rows"),
    [
        ("pairs", "LoRA DPO", Objective.DPO(), Data.Preferences),
        ("liked", "LoRA KTO", Objective.KTO(), Data.Feedback),
        ("chats", "LoRA SFT", Objective.SFT(), Data.Conversations),
        ("texts", "LoRA SFT", Objective.SFT(loss_on="all"), Data.Text),
    ],
)
def test_the_method_follows_from_the_rows(
    site: Any, files: Path, name: str, method: str, objective: Objective, rows: type[Data]
) -> None:
    query = {"model": basics.TINY, "data": f"{name}.jsonl"}
    shown, missing = read(site, **query)
    assert (shown["Method"]["value"], missing) == (method, "")
    assert list(shown["First rows"]["value"].columns) in (list(ROWS[name]), ["prompt", "completion"], ["tokens"])
    made = basics.experiment(site, query)
    assert (made.objective, type(made.data), made.adapter) == (objective, rows, Adapter.LoRA(rank=16))


def test_numbers_and_methods_are_those_that_are_chosen(site: Any, files: Path) -> None:
    query = {"model": basics.TINY, "data": "pairs.jsonl", "method": "LoRA ORPO", "lr": "3e-4", "epochs": "2"}
    made = basics.experiment(site, {**query, "batch": "4", "length": "65"})
    assert (made.objective, made.optimizer.schedule.peak_lr) == (Objective.ORPO(), 3e-4)
    assert (made.epochs, made.batch_size, made.name) == (2.0, 4, "lora-orpo-pairs")
    assert (made.data.max_prompt_length, made.data.max_completion_length) == (32, 33)
    shown, _ = read(site, **{**query, "method": "LoRA SFT"})
    assert "LoRA SFT does not read such rows" in shown["Markdown 1"]
    assert all(f"[{name} from my file]" in basics.templates() for name in basics.METHODS)


@pytest.mark.default_variants(4)
@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"data": "pairs.jsonl"}, "Choose a model"),
        ({"model": basics.TINY}, "Choose the data"),
        ({"model": "nowhere", "data": "pairs.jsonl"}, "no directory with a config.json"),
        ({"model": basics.TINY, "data": "pairs.jsonl", "lr": "fast"}, "Learning rate: expected a number"),
        ({"model": "run:no-such-run", "data": "pairs.jsonl"}, "there is no run no-such-run"),
        ({"model": "../x/../../y", "data": "pairs.jsonl"}, "outside of the project"),
        ({"model": "x" * 1_000, "data": "pairs.jsonl"}, "x' cannot be read: File name too long"),
    ],
)
def test_what_is_missing_or_wrong_is_told(site: Any, files: Path, query: dict[str, str], message: str) -> None:
    with pytest.raises(NnxdslError, match=message):
        basics.experiment(site, query)
    assert message in read(site, **query)[1]


def test_a_model_is_a_directory_a_run_or_a_name_on_the_hub(site: Any, files: Path) -> None:
    (files / "models" / "mine").mkdir(parents=True)
    (files / "models" / "mine" / "config.json").write_text("{}")
    run = write_run(site.settings.home, earlier(1), "finished", 3)
    assert basics.model_of(site, "models/mine") == Model.HF("models/mine")
    assert basics.model_of(site, "google/gemma-3-1b-it") == Model.HF("google/gemma-3-1b-it")
    assert basics.model_of(site, f"run:{run.name}").weights == Weights.Checkpoint(str(run))


def test_files_that_are_missing_or_damaged_are_told(site: Any, files: Path) -> None:
    (files / "bad.jsonl").write_text("{not json\n")
    shown, missing = read(site, model=basics.TINY, data="nowhere.jsonl")
    assert (missing, "nowhere.jsonl" in shown["Markdown 1"]) == ("Data cannot be read", True)
    shown, _ = read(site, model=basics.TINY, data="bad.jsonl")
    assert "not recognised" in shown["Markdown 1"]
    (files / "same.jsonl").write_text((json.dumps(ROWS["liked"]) + "\n") * 3)
    shown, missing = read(site, model=basics.TINY, data="same.jsonl")
    assert "all rows have the same prompt" in missing
    shown, _ = read(site, model=basics.TINY, data="../secret.jsonl")
    assert "outside of the project" in shown["Markdown 1"]


@pytest.mark.browser
@pytest.mark.parametrize(("width", "dark"), [(1400, False), (390, True)])
def test_a_lora_dpo_of_a_file_is_launched_from_one_screen(app: Any, open_page: Open, width: int, dark: bool) -> None:
    shown = open_page(app.url("/new"), width=width, dark=dark)
    shown.get_by_label("Model", exact=True).click()
    shown.get_by_role("option", name=basics.TINY).click()
    shown.get_by_label("Data", exact=True).click()
    shown.get_by_role("option", name="pairs.jsonl", exact=True).click()
    shown.get_by_text("read as Data.Preferences").wait_for()
    shown.locator("[role=gridcell]:has-text('good')").first.wait_for()
    assert shown.get_by_label("Method", exact=True).input_value() == "LoRA DPO"
    assert overflow(shown) == 0
    assert dim_texts(shown) == []
    if width > 500:
        picture(shown, "new")
    shown.get_by_role("button", name="Launch").click()
    shown.wait_for_url("**/run?id=lora-dpo-pairs-*")


@pytest.mark.browser
def test_a_wrong_path_is_told_and_all_settings_open(app: Any, open_page: Open) -> None:
    shown = open_page(app.url(f"/new?model={basics.TINY.replace(' ', '+')}"), width=390)
    shown.get_by_label("Data", exact=True).fill("nowhere.jsonl")
    shown.keyboard.press("Enter")
    shown.get_by_text("nowhere.jsonl").locator("visible=true").first.wait_for()
    shown.get_by_text("Data cannot be read").wait_for()
    assert shown.get_by_role("button", name="Launch").is_disabled()
    shown.get_by_label("Data", exact=True).fill("pairs.jsonl")
    shown.keyboard.press("Enter")
    shown.get_by_text("read as Data.Preferences").wait_for()
    shown.get_by_role("button", name="All settings").click()
    shown.wait_for_url("**/new?draft=*")
    shown.locator("[id='f-data.path'] :is(input, textarea)").first.wait_for()
    assert shown.locator("[id='f-data.path'] :is(input, textarea)").first.input_value() == "pairs.jsonl"
    mouse, head = shown.mouse, shown.locator("#new-head")
    mouse.wheel(0, 900)
    assert head.evaluate("(one) => getComputedStyle(one).backgroundColor.replace('rgb(', '').split(',').length") == 3
