"""The Rollouts page: what a real GRPO run sampled, by its URL, and what it shows of runs that sampled nothing."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.state import Site
from app.store.rollouts import Rollouts
from nnxdsl import (
    Checkpoint,
    Data,
    Experiment,
    Model,
    Objective,
    Optimizer,
    Reward,
    RolloutLog,
    RunError,
    Schedule,
    Tokenizer,
    reward,
)
from nnxdsl.storage.records import ROLLOUT, problem_in
from tests.app.many import experiment, write_run
from tests.app.on_pages import EVIL, dim_texts, overflow

native = pytest.importorskip("tests.app.native")
page = pytest.importorskip("app.pages.rollouts")


@reward("even letters")
def even_letters(completion: str) -> float:
    return sum(ord(letter) % 2 == 0 for letter in completion) / 8


@reward("brief")
def brief(completion: str) -> float:
    return max(0.0, 1 - len(completion) / 8)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a GRPO run of four steps."""
    place = tmp_path_factory.mktemp("trained")
    rows = [json.dumps({"prompt": f"Say {number} <b>loudly</b>: "}) + "\n" for number in range(6)]
    (place / "prompts.jsonl").write_text("".join(rows))
    made = Experiment(
        name="grpo",
        model=Model.Gemma3("tiny", tokenizer=Tokenizer.Bytes()),
        objective=Objective.GRPO(
            rewards=(Reward("even letters"), Reward("brief", weight=0.5)), num_generations=4, beta=0.0
        ),
        data=Data.Prompts(str(place / "prompts.jsonl"), max_prompt_length=64, max_completion_length=8),
        optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
        batch_size=8,
        steps=4,
        checkpoint=Checkpoint(every_steps=4),
        rollouts=RolloutLog(every_steps=2),
    )
    return made.run(place / "runs", quiet=True).directory


def copied(trained: Path, home: Path) -> str:
    """The name of a copy whose process has ended: the run's own is this one, which fixtures would kill."""
    status = shutil.copytree(trained, home / trained.name) / "status.json"
    ended = subprocess.Popen(["true"])
    ended.wait()
    status.write_text(json.dumps({**json.loads(status.read_text()), "pid": ended.pid}))
    return trained.name


def recorded(trained: Path, step: int) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (trained / "rollouts.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] == step]


@pytest.mark.extended
def test_a_run_is_shown_by_step_prompt_and_completion(site: Site, trained: Path) -> None:
    run = copied(trained, site.settings.home)
    built = native.Built(page.Rollouts, site)
    last = built.shown()  # the newest run, at its last step
    assert last["Run"] == run
    assert last["Slider"] == 2
    assert "GRPO · step **2** · 2 prompts recorded, 8 completions" in last["Markdown"]
    groups = recorded(trained, 0)
    shown = built.shown(run=run, step="1", group="2")  # of step 1 nothing is recorded: step 0 stands for it
    assert shown["Slider"] == 0
    table, answers = shown["Dataframe"], shown["Dataframe 1"]
    for line, group in zip(table.to_dict("records"), groups, strict=True):
        rewards = [one["reward"] for one in group["completions"]]
        assert line["Mean reward"] == pytest.approx(statistics.fmean(rewards), rel=1e-3)
        assert line["Spread"] == pytest.approx(statistics.stdev(rewards), rel=1e-3, abs=1e-12)
        assert line["Prompt"] == group["prompt"]
    assert shown["Textbox"] == groups[1]["prompt"]
    ours = groups[1]["completions"]
    assert answers["Reward"].is_monotonic_decreasing
    assert sorted(answers["#"]) == [1, 2, 3, 4]
    for line in answers.to_dict("records"):
        one = ours[line["#"] - 1]
        assert line["rewards/even letters"] == pytest.approx(one["rewards"]["even letters"], rel=1e-3)
        assert line["Advantage"] == pytest.approx(one["advantage"], rel=1e-3, abs=1e-12)
        assert line["Tokens"] == one["length"]
    assert shown["Textbox 1"] == ours[answers["#"][0] - 1]["text"]
    assert built.shown(run=run, step="0", group="2", completion="3")["Textbox 1"] == ours[2]["text"]
    traces = {trace.name: list(trace.y) for trace in shown["Plot"].data if trace.name}
    metrics = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    for name in ("reward", "rewards/even letters/mean", "rewards/brief/mean", "completions/mean_length"):
        assert traces[name] == pytest.approx([row[name] for row in metrics])


def test_rewards_that_do_not_apply_and_recorded_values() -> None:
    one = {
        "text": "a",
        "reward": 1.5,
        "rewards": {"r": None, "s": 1.5},
        "advantage": 0.0,
        "length": 1,
        "truncated": False,
    }
    other = {**one, "reward": None, "rewards": {"r": None, "s": None}, "extra": {"#": "<b>9</b>"}}
    table = page._completions([(1, one), (2, other)]).to_dict("list")
    assert table["#"] == [1, 2]
    assert table["extra/#"][1] == "<b>9</b>"
    assert [str(value) for value in table["Reward"]] == ["1.5", "nan"]
    assert table["Advantage"] == [0, 0]
    assert "Advantage" not in page._completions([(1, {**one, "advantage": None})])
    turns = [{"role": "assistant", "content": "2?"}, {"role": "user", "content": "no"}]
    assert (page._episode(one), page._episode({**one, "turns": turns})) == ("a", "assistant: 2?\n\nuser: no")
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    result = {"role": "tool", "name": "add", "content": "2"}
    turns = [{"role": "assistant", "content": "So:", "tool_calls": [call]}, result]
    assert page._episode({**one, "turns": turns}) == 'assistant: So:\nadd({"a": 1})\n\ntool: 2'
    group = {"group": 0, "row": "x:1", "prompt": "p", "completions": [one, other]}
    for completions, mean in (([one, other], "1.5"), ([other, other], "nan")):
        (line,) = page._prompts([{**group, "completions": completions}]).to_dict("records")
        assert (str(line["Mean reward"]), line["Spread"]) == (mean, 0.0)
    good = {**group, "step": 0, "attempt": 1}
    for extra, is_good in (({"a": None, "b": 1, "c": "x"}, True), ({"a": [1]}, False), (3, False)):
        row = {**good, "completions": [{**one, "extra": extra}]}
        assert (problem_in(row, ROLLOUT, required=tuple(ROLLOUT)) is None) == is_good
    for changed, is_good in (
        ({}, True),
        ({"tool_calls": [3]}, False),
        ({"content": None}, False),
        ({"role": 1}, False),
    ):
        row = {**good, "completions": [{**one, "turns": [{**turns[0], **changed}]}]}
        assert (problem_in(row, ROLLOUT, required=tuple(ROLLOUT)) is None) == is_good


@pytest.mark.extended
def test_runs_without_rollouts_and_foreign_ids(site: Site, trained: Path) -> None:
    built = native.Built(page.Rollouts, site)
    assert "There is no such run yet" in built.shown()["Markdown"]
    other = write_run(site.settings.home, experiment(0), "finished", 3)
    assert "There is no such run yet" in built.shown()["Markdown"]
    assert built.shown(run=other.name)["Markdown"] == page.NONE_YET
    run = copied(trained, site.settings.home)
    assert "There is no run" in built.shown(run=f"../{site.settings.home.name}/{run}")["Markdown"]
    (site.settings.home / run / "rollouts.jsonl").unlink()
    (site.settings.home / run / "rollouts.jsonl").symlink_to(trained / "rollouts.jsonl")
    link = "rollouts.jsonl is a link, which the app does not follow"
    assert link in built.shown(run=run)["Markdown 1"].replace("\\", "")
    with pytest.raises(RunError, match="is a link"):
        Rollouts().steps(site.settings.home / run / "rollouts.jsonl")


@pytest.mark.extended
def test_a_file_is_followed_while_it_grows_shrinks_and_is_damaged(tmp_path: Path, trained: Path) -> None:
    lines = (trained / "rollouts.jsonl").read_bytes().splitlines(keepends=True)
    path, cache = tmp_path / "rollouts.jsonl", Rollouts()
    assert cache.steps(path) == cache.groups(path, 0) == []
    path.write_bytes(lines[0] + lines[1][:20])
    assert (cache.steps(path), len(cache.groups(path, 0))) == ([0], 1)
    path.write_bytes(b"".join(lines))
    assert (cache.steps(path), len(cache.groups(path, 0))) == ([0, 2], 2)
    damaged = lines[1].replace(b'"length": ', b'"length": -')
    surrogate = lines[0].replace(b"Say", b"\\ud800")
    path.with_suffix(".new").write_bytes(surrogate + damaged + b"[]\nx\n")
    path.with_suffix(".new").rename(path)
    assert cache.steps(path) == [0]
    (row,) = cache.groups(path, 0)
    assert "?" in row["prompt"]
    assert "\ud800" not in row["prompt"]


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_rollouts_in_a_browser(
    emptied_app: Any, trained: Path, open_page: Callable[..., Any], width: int, dark: bool
) -> None:
    home: Path = emptied_app.home
    run = copied(trained, home)
    file = home / run / "rollouts.jsonl"
    file.write_text(file.read_text().replace("Say 1 ", json.dumps(EVIL)[1:-1]))
    shown = open_page(emptied_app.url(f"/run?id={run}"), width=width, dark=dark)
    shown.locator(".buttons").get_by_role("link", name="Rollouts").click()
    shown.wait_for_url(f"**/rollouts?run={run}")
    shown.wait_for_selector(".js-plotly-plot .scatterlayer .trace")
    cells = shown.locator("[role=grid]").first.locator("[role=gridcell]")
    cells.get_by_text("2", exact=True).first.click()
    shown.wait_for_url(f"**/rollouts?run={run}&group=2")
    shown.get_by_text("Prompt 2:").wait_for()
    slider = shown.get_by_role("slider")
    slider.focus()
    shown.keyboard.press("ArrowLeft")
    shown.wait_for_url("**step=0*")
    shown.reload()
    shown.get_by_text("step 0 · 2 prompts recorded").wait_for()
    shown.get_by_text("Prompt 2:").wait_for()
    shown.wait_for_timeout(1_000)
    assert overflow(shown) == 0
    assert dim_texts(shown) == []
    assert shown.evaluate("window.boomed") is None
