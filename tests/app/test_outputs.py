"""The page of outputs from answers that are kept on disk: what is shown is what they say, as text, in every state."""

from __future__ import annotations

import csv
import doctest
import gzip
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import attrs
import pytest

from app.pages import PAGES
from app.pages.outputs import interval
from app.pages.outputs.export import exported
from app.pages.outputs.interval import wilson
from app.pages.outputs.request import held_out_prompts, request, requests, written
from app.processes.outputs_worker import Model, Request
from app.processes.votes import SIDES
from app.settings import Limits, Settings
from app.state import Site
from nnxdsl import Checkpoint, Data, Evaluation, RunError, to_dict
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.loaders.sources import source_rows
from tests.app.many import experiment, write_run

gr = pytest.importorskip("gradio")
pd = pytest.importorskip("pandas")
compare_page = pytest.importorskip("app.pages.compare.page")
outputs_page = pytest.importorskip("app.pages.outputs.page")
tokens = pytest.importorskip("app.components.tokens")
native = pytest.importorskip("tests.app.native")

EVIL = '<img src=x onerror="boom(1)">'


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(
        Settings(home=tmp_path / "runs", project=tmp_path, limits=Limits(new_tokens=100, prompt_characters=6_000))
    )
    yield site
    site.close()


@pytest.fixture
def run(site: Site) -> str:
    """A run with a checkpoint of step 20 and two held-out rows."""
    rows = [{"prompt": f"Say {n} {EVIL}", "chosen": "yes", "rejected": "no"} for n in (1, 2)]
    (site.settings.project / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = experiment(0, evaluation=Evaluation(every_steps=10, data=Data.Preferences("held.jsonl")))
    path = write_run(site.settings.home, made, "finished", 20)
    (path / "attempts.jsonl").write_text(json.dumps({"cwd": str(site.settings.project)}) + "\n")
    place = path / "checkpoints" / "00000020"
    place.mkdir()
    (place / "manifest.json").write_text("{}")
    return path.name


def keep(site: Site, run: str, tab: str, query: dict[str, str], result: dict[str, Any]) -> str:
    """Writes an answer as the child's are kept; returns its key."""
    model = Model(run, 20)
    asked = request(site, tab, query)
    assert asked is not None
    key = site.answers.key(model, asked)
    site.answers.place.mkdir(parents=True, exist_ok=True)
    kept = {"model": {"run": run, "step": 20, "against": "reference"}, "request": asked, "seconds": 2.0}
    (site.answers.place / f"{key}.json").write_text(json.dumps({**kept, "result": {**who(run), **result}}))
    return key


def who(run: str) -> dict[str, Any]:
    return {"run": run, "step": 20, "against": "reference", "objective": "Objective.DPO", "device": "cpu"}


def generated() -> dict[str, Any]:
    def side(text: str, stop: str | None) -> dict[str, Any]:
        return {"ids": [*text.encode()], "text": text, "pieces": [*text], "tokens": 3, "stop": stop, "seconds": 0.5}

    sampling = {"max_new_tokens": 8, "temperature": 0.7, "top_k": None, "top_p": 0.9, "seed": 3}
    return {
        "prompt_ids": [256, 72],
        "prompt_pieces": ["<bos>", f"H{EVIL}\n"],
        "special": [0],
        "sampling": sampling,
        "policy": side(f"a good {EVIL} day", "<eos>"),
        "other": side(f"a bad {EVIL} day", None),
    }


def saved(path: Path, *steps: int) -> None:
    for step in steps:
        place = path / "checkpoints" / f"{step:08d}"
        place.mkdir()
        (place / "manifest.json").write_text("{}")


def test_another_run_may_be_the_other_side(site: Site, run: str) -> None:
    other = write_run(site.settings.home, experiment(1), "finished", 30)
    bare = write_run(site.settings.home, experiment(2), "finished", 30)
    saved(other, 10, 30)
    offered = [value for _, value in shown(site, run=run)["Compare with choices"]]
    assert f"{other.name}@30" in offered
    assert f"{other.name}@10" not in offered
    assert not any(bare.name in value for value in offered)
    against = f"{other.name}@10"
    values = shown(site, run=run, against=against)
    assert values["Compare with"] == against
    assert against in [value for _, value in values["Compare with choices"]]
    model, asked_ = Model(run, 20, against), {"do": "pairs"}
    key = site.answers.key(model, asked_)
    (other / "checkpoints" / "00000010" / "manifest.json").write_text('{"changed": 1}')
    assert site.answers.key(model, asked_) != key
    for wrong in (f"{other.name}@11", f"{run}@20", "gone@1", f"../{other.name}@10", f"{EVIL}@1", "@3"):
        assert shown(site, run=run, against=wrong)["Compare with"] == "reference"
    values = native.Built(compare_page.Compare, site).shown(ids=f"{run},{other.name}")
    assert f"/outputs?run={other.name}&against={run}%4020" in values["Markdown"]


def test_several_answers_stand_below_each_other_with_tokens_of_their_own(site: Site, run: str) -> None:
    query = {"prompt": "H", "temperature": "0.7", "samples": "2", "max": "8"}
    inputs = request(site, "generate", query)
    assert inputs is not None
    assert inputs["samples"] == 2
    assert "samples" not in (request(site, "generate", {**query, "temperature": "0"}) or {})
    with pytest.raises(RunError, match="samples: expected a whole number from 1 to 16"):
        request(site, "generate", {**query, "samples": "17"})
    result = generated()
    for name in SIDES:
        result[name]["more"] = [{**result[name], "ids": [1, 2], "text": f"{name} again"}]
    key = keep(site, run, "generate", query, result)
    html = shown_text(site, run=run, **query)
    assert "2 of 2" in html
    assert html.count("Its tokens") == 4
    actual = request(site, "tokens", {"from": key, "side": "policy", "n": "2"})
    assert actual == {"do": "tokens", "prompt_ids": [256, 72], "completion_ids": [1, 2]}
    assert request(site, "tokens", {"from": key, "side": "policy", "n": "3"}) is None
    rows = [json.loads(line) for line in exported([result], "jsonl").splitlines()]
    assert [(row["side"], row["number"]) for row in rows] == [("policy", 1), ("policy", 2), ("other", 1), ("other", 2)]


def side(name: str = "text") -> dict[str, Any]:
    best = [[["a", -0.5, -1.0], [EVIL, -2.0, -1.5]] for _ in range(3)]
    return {
        "name": name,
        "ids": [256, 72, 97, 10, 98],
        "pieces": ["<bos>", "H", f" {EVIL}", "\n", "b"],
        "special": [0],
        "begin": 2,
        "policy": [-1.0, -0.25, -4.0],
        "other": [-1.5, -0.25, -0.5],
        "likeliest": {"policy": best, "other": best},
    }


def pair(number: int, margin: float, chosen_tokens: int = 4) -> dict[str, Any]:
    rewards = {"chosen": margin / 2, "rejected": -margin / 2, "margins": margin, "accuracies": float(margin > 0)}
    return {
        "row": f"held.jsonl:{number}",
        **dict.fromkeys(("prompt", "chosen", "rejected"), EVIL),
        "prompt_tokens": 3,
        "chosen_tokens": chosen_tokens,
        "rejected_tokens": 5,
        "policy": [-3.0, -4.0],
        "other": [-3.5, -3.5],
        "rewards": rewards,
    }


def paired(margins: list[float], **more: Any) -> dict[str, Any]:
    first = {"largest": 0.0, "rows": 4, "expected": True, "compute": "float32"}
    rows = [pair(number, margin, 3 + number) for number, margin in enumerate(margins, start=1)]
    return {"rows": rows, "total": len(rows), "first": first, "recorded": {}, "is_feedback": False, **more}


def shown(site: Site, built: Any = None, **query: str) -> dict[str, Any]:
    """What the page shows for a query; the choices of a list `NAME` are `NAME choices`."""
    built = built or native.Built(outputs_page.Outputs, site)
    choices = {f"{one.label} choices": value["choices"] for one, value in updates(built, **query) if "choices" in value}
    return {**built.shown(**query), **choices}


def updates(built: Any, **query: str) -> list[tuple[Any, dict[str, Any]]]:
    """The components whose properties change for a query, and how."""
    loads = [one for one in built.blocks.fns.values() if one.targets[0][1] == "load"]
    result = [zip(one.outputs, one.fn("{}", f"?{urlencode(query)}", "{}"), strict=True) for one in loads]
    return [(component, value) for pairs in result for component, value in pairs if isinstance(value, dict)]


def text_of(value: Any) -> str:
    if isinstance(value, pd.DataFrame):
        return value.to_csv(index=False)
    return value if isinstance(value, str) else value.to_json() if hasattr(value, "to_json") else ""


def shown_text(site: Site, built: Any = None, **query: str) -> str:
    """All texts that the page shows for a query."""
    return "\n".join(text_of(value) for value in shown(site, built, **query).values())


def table(site: Site, **query: str) -> Any:
    return next(value for value in shown(site, **query).values() if isinstance(value, pd.DataFrame) and "row" in value)


@pytest.mark.parametrize("module", [interval, tokens])
def test_examples_hold(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0


def test_the_interval_is_wilsons() -> None:
    # Newcombe 1998 (doi 10.1002/(SICI)1097-0258(19980430)17:8<857), table I, method 3
    for (right, count), ends in {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }.items():
        assert wilson(right, count) == pytest.approx(ends, abs=5e-5)
    low, high = wilson(20, 20)
    assert (round(low, 4), high) == (0.8389, 1.0)


def test_what_is_missing_is_said(site: Site, run: str) -> None:
    assert "Choose a run" in shown_text(site)
    assert "There is no run" in shown_text(site, run=EVIL)
    without = write_run(site.settings.home, experiment(1), "failed", 3)
    assert "this run has no checkpoint yet" in shown_text(site, run=without.name)
    for field in attrs.fields(Checkpoint):
        if field.name.startswith("every_"):
            assert f"checkpoint.{field.name}" in shown_text(site, run=without.name)
    assert "press Generate" in shown_text(site, run=run)
    assert shown(site, run=run, step="7")["Policy at step"] == "20"  # 7 is not there: the newest is taken
    rows = shown(site, run=run)["Held-out row choices"]
    assert [value for _, value in rows] == ["", "held.jsonl:1", "held.jsonl:2"]


def test_a_read_only_app_computes_nothing(tmp_path: Path, site: Site, run: str) -> None:
    reader = Site(Settings(home=tmp_path / "runs", project=tmp_path, read_only=True))
    assert "a read-only app computes nothing" in shown_text(reader, run=run)
    writes = {"Generate", "Score with both models", "Compute", "Cancel"}
    assert writes <= set(native.Built(outputs_page.Outputs, site).buttons)
    built, query = native.Built(outputs_page.Outputs, reader), {"run": run, **BLIND}
    assert not writes & set(built.buttons)
    keep(site, run, "generate", query, generated())
    assert "data-vote" in shown_text(site, **query)
    assert "data-vote" not in shown_text(reader, built, **query)
    with pytest.raises(ValueError, match="not enough values"):  # no such event
        vote(built, query, "0:a")
    link = {"run": run, "tab": "tokens", "prompt": "H", "text": "never scored"}
    assert "not cached" in shown_text(reader, built, **link)
    assert all(one.is_over for one in reader.answers._requests.values())
    assert "so far" in shown_text(site, **link)  # another app scores it at once
    reader.close()


def test_an_empty_home_says_what_the_page_is_for(tmp_path: Path) -> None:
    site = Site(Settings(home=tmp_path, project=tmp_path, read_only=True))
    assert "No run has saved a checkpoint yet" in shown_text(site)
    site.close()


def test_answers_stand_side_by_side_with_their_words_marked(site: Site, run: str) -> None:
    query = {"prompt": "H", "temperature": "0.7", "top_p": "0.9", "max": "8", "seed": "3"}
    key = keep(site, run, "generate", query, generated())
    html = shown_text(site, run=run, **query)
    assert "<ins>good</ins>" in html
    assert "<del>bad</del>" in html
    for text in (
        "stopped at &lt;eos&gt;",
        "truncated at 3 tokens",
        "0.50 s",
        "Temperature: 0.7",
        "Top-p: 0.9",
        "Seed: 3, the same for both",
    ):
        assert text in html
    assert f"from={key}" in html
    assert "onerror" in html
    assert "<img" not in html
    assert '<span class="special">&lt;bos&gt;</span>' in html


def vote(built: Any, query: dict[str, str], choice: str) -> None:
    """Presses one of the buttons below the answers."""
    event = SimpleNamespace(index=0, value=choice)
    (call,) = [
        one.fn
        for one in built.blocks.fns.values()
        if one.targets[0] == (built.page.tabs["generate"]._panes._id, "select")
    ]
    call(SimpleNamespace(client=None), event, f"?{urlencode(query)}")


BLIND = {"prompt": "H", "temperature": "0.7", "top_p": "0.9", "max": "8", "seed": "3", "blind": "1"}


def test_a_blind_vote_tells_nothing_before_and_counts_after(
    site: Site, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    query = {"run": run, **BLIND}
    key = keep(site, run, "generate", query, generated())
    values = shown(site, **query)
    result = values["HTML"]
    assert "Answer A" in result
    assert "Policy" not in result
    assert "0.50 s" not in result
    assert key not in result
    assert "<del>" not in result
    order = site.votes.order(key)
    texts = [re.sub(r"<[^>]+>", "", one) for one in re.findall(r'class="answer">(.*?)</div>', result)]
    assert ["good" in texts[place] for place in (0, 1)] == [name == "policy" for name in order]
    built = native.Built(outputs_page.Outputs, site)
    vote(built, query, f"0:{'ab'[order.index('policy')]}")
    assert "you preferred the policy" in capsys.readouterr().out
    assert "Policy, step 20" in shown_text(site, **query)
    assert "policy 1, reference 0, no difference 0" in shown_text(site, **query)
    assert site.votes.tally(Model(run, 20)) == {"policy": 1, "other": 0, "tie": 0}
    assert "1 of them blind. The policy won 100% of 1 blind votes" in shown_text(site, **query)
    vote(built, query, "0:tie")  # thought again: the last vote counts, now with the names
    assert site.votes.tally(Model(run, 20)) == {"policy": 0, "other": 0, "tie": 1}
    assert "0 of them blind." in shown_text(site, **query)
    assert '<button type="button" data-vote="0:tie" aria-pressed="true">No difference</button>' in shown_text(
        site, **query
    )
    assert {site.votes.order(f"key {n}") for n in range(20)} == {SIDES, SIDES[::-1]}


def test_a_vote_needs_no_blind_order_and_names_an_answer_that_is_there(
    site: Site, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    query = {"run": run, **BLIND, "blind": ""}
    keep(site, run, "generate", query, generated())
    built = native.Built(outputs_page.Outputs, site)
    for label in ("Policy is better", "No difference", "Reference is better"):
        assert f">{label}</button>" in shown_text(site, built, **query)
    vote(built, query, "0:b")
    assert "you preferred the other side, reference" in capsys.readouterr().out
    assert "policy 0, reference 1, no difference 0; 0 of them blind." in shown_text(site, built, **query)
    for wrong in ("1:a", "²:a", "-1:a", EVIL, "", f"{10**6}:a"):
        with pytest.raises(gr.Error, match="no longer stored"):
            vote(built, query, wrong)
    with pytest.raises(gr.Error, match="vote for a, b or tie"):
        vote(built, query, "0:c")


def test_several_prompts_are_answered_and_voted_on_one_by_one(
    site: Site, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sampling = {name: text for name, text in BLIND.items() if name not in ("prompt", "blind")}
    keys = [keep(site, run, "generate", {"prompt": text, **sampling}, generated()) for text in ("H", "I\nJ")]
    query = {"run": run, "prompt": "H\n---\nI\nJ\n---\nnot answered", **sampling}
    built = native.Built(outputs_page.Outputs, site)
    values = shown(site, built, **query)
    assert values["HTML"].count('<section class="pane policy">') == 2  # what was not submitted is not shown
    assert "2 of 2: I\nJ" in values["HTML"]
    assert "Prompt: 2 tokens" in shown_text(site, built, **query)
    assert f"outputs={keys[0]}%2C{keys[1]}" in str(updates(built, **query))
    vote(built, query, "1:a")
    assert "you preferred the policy" in capsys.readouterr().out
    assert [site.votes.choice(key) for key in keys] == [None, "policy"]
    assert "Answer A" in shown_text(site, built, **query, blind="1")
    fields = requests(site, "generate", {"row": "held.jsonl:1\nheld.jsonl:2", "prompt": "x"})
    assert [one["row"] for one in fields] == ["held.jsonl:1", "held.jsonl:2"]
    assert fields == [request(site, "generate", {"row": one["row"]}) for one in fields]
    assert [one["prompt"] for one in requests(site, "generate", {"key": ",".join(keys)})] == ["H", "I\nJ"]
    assert requests(site, "generate", {"prompt": "\n---\n"}) == []
    with pytest.raises(RunError, match="prompt: 17 prompts; expected at most 16"):
        requests(site, "generate", {"prompt": "\n---\n".join("x" * 17)})
    done = built.pressed("Generate", {"run": run}, [], "new 1\n---\nnew 2", "", 8, 1, 0, None, None, 0)
    actual = requests(site, "generate", done["query"])
    asked = [site.answers.find(site.answers.key(Model(run, 20), one)) for one in actual]
    assert [one.request["prompt"] for one in asked if one is not None] == ["new 1", "new 2"]
    built.pressed("Cancel", {"run": run, **done["query"]})
    assert all(one is not None and one.is_over for one in asked)


@pytest.mark.parametrize("choice", ["a", "b", "tie"])
def test_a_vote_on_equal_answers_is_a_tie(
    site: Site, run: str, choice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    query, result = {"run": run, **BLIND}, generated()
    keep(site, run, "generate", query, {**result, "other": result["policy"]})
    assert "counts as a tie" in shown_text(site, **query)
    vote(native.Built(outputs_page.Outputs, site), query, f"0:{choice}")
    assert "Recorded: no difference." in capsys.readouterr().out
    assert site.votes.tally(Model(run, 20)) == {"policy": 0, "other": 0, "tie": 1}


def test_a_request_at_work_tells_what_is_compiled_again_and_can_be_cancelled(site: Site, run: str) -> None:
    query = {"run": run, "prompt": "H"}
    inputs = request(site, "generate", query)
    assert inputs is not None
    model = Model(run, 20)
    asked = Request(site.answers.key(model, inputs), model, inputs, f"starting {EVIL}", state="running")
    site.answers._remember(asked)
    values = shown(site, **query)
    assert values["Timer"]["active"]
    text = shown_text(site, **query)
    assert "another prompt length, number of samples or max new tokens is compiled first" in text
    assert "<img" not in text
    native.Built(outputs_page.Outputs, site).pressed("Cancel", query)
    assert asked.state == "cancelled"
    assert "The request was cancelled" in shown_text(site, **query)
    assert not shown(site, **query)["Timer"]["active"]
    asked.state, asked.error = "failed", f"RunError: {EVIL}"
    text = shown_text(site, **query)
    assert "The request failed" in text
    assert "RunError: &lt;img" in text


def streaming(site: Site, run: str, tab: str, query: dict[str, str], partial: dict[str, Any]) -> Request:
    """A request under way, of which some of the answers is sampled."""
    inputs = request(site, tab, query)
    assert inputs is not None
    key = site.answers.key(Model(run, 20), inputs)
    return site.answers._remember(
        Request(key, Model(run, 20), inputs, "sampling from the policy", state="running", partial=partial)
    )


def test_answers_are_shown_while_they_are_decoded(site: Site, run: str) -> None:
    query = {"run": run, "prompt": "H", "temperature": "0.7", "samples": "2", "max": "8"}
    policy = {"texts": [f"one {EVIL}", "two"], "tokens": [5, 2], "done": [False, True]}
    asked = streaming(site, run, "generate", query, {"policy": policy})
    html = shown_text(site, **query)
    panes = re.findall(r'<section class="pane running" aria-busy="true" data-side="(\w+)">(.*?)</section>', html)
    assert [side for side, _ in panes] == ["policy", "other"]
    answers = re.findall(r'class="answer">(.*?)</div>.*?<span>(.*?)</span>', panes[0][1])
    assert answers == [
        (f"one {EVIL}".replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;"), "5 tokens so far, running"),
        ("two", "2 tokens so far, complete"),
    ]
    assert panes[1][1] == "<h3>Reference</h3>"
    assert "Sampling from the policy" in html
    assert shown(site, **query)["Timer"]["active"]
    assert "The result is complete" not in html
    assert "one" not in shown_text(site, **query, blind="1")  # the first to answer is the policy
    asked.state = "cancelled"
    assert "one" not in shown_text(site, **query)
    assert '<div role="status" class="visually-hidden">The request was cancelled.</div>' in shown_text(site, **query)
    asked.state, asked.result = "done", {**who(run), **generated()}
    html = shown_text(site, **query)
    assert "so far" not in html
    assert "<ins>good</ins>" in html
    assert '<div role="status" class="visually-hidden">The result is complete.</div>' in html


def test_an_answer_of_a_checkpoint_is_shown_while_it_is_decoded(site: Site, run: str) -> None:
    query = {"run": run, "tab": "checkpoints", "prompt": "H", "max": "8"}
    streaming(site, run, "checkpoints", query, {"policy": {"texts": ["some"], "tokens": [3], "done": [False]}})
    values = shown(site, **query).values()
    answers = next(value for value in values if isinstance(value, pd.DataFrame) and "step" in value)
    assert answers.to_numpy().tolist() == [[20, "some", 3, "running"]]


def test_tokens_are_coloured_by_their_figures_which_cannot_be_more_than_the_scale(site: Site, run: str) -> None:
    query = {"run": run, "tab": "tokens", "prompt": "H", "text": "a"}
    key = keep(site, run, "tokens", query, {"sides": [side()]})
    html = shown_text(site, **query)
    actual = re.findall(
        r'<span class="token (\w+)" style="--w:([\d.]+)" role="button" tabindex="-1" title="([^"]*)"', html
    )
    assert [(way, weight, title.rpartition(": ")[2]) for way, weight, title in actual] == [
        ("more", "0.250", "+0.500 nats"),
        ("even", "0.000", "+0.000 nats"),
        ("less", "1.000", "-3.500 nats"),
    ]
    assert "1 of 3 tokens exceed ±2" in html
    assert "Policy -5.250 nats" in html
    assert "-3.000 nats over 3 tokens" in html
    assert "↵" in html
    assert "&lt;img" in html
    assert "<img" not in html
    wide = shown_text(site, **query, scale="5")
    assert "exceed" not in wide
    ((line,),) = (rendered.data for rendered in plots(site, **query))
    assert line.y.tolist() == [0.5, 0.5, -3.0]
    assert f"outputs={key}&format=csv" in json.dumps(links(site, **query))


def plots(site: Site, **query: str) -> list[Any]:
    return [value for name, value in shown(site, **query).items() if name.startswith("Plot") and hasattr(value, "data")]


def links(site: Site, **query: str) -> list[str]:
    built = native.Built(outputs_page.Outputs, site)
    return [value["link"] for _, value in updates(built, **query) if "link" in value]


def test_a_chosen_token_has_its_alternatives(site: Site, run: str) -> None:
    query = {"run": run, "tab": "tokens", "prompt": "H", "text": "a"}
    best = {"policy": [[["b", -0.5, -1.0], [EVIL, -2.0, -1.5]] for _ in range(3)]}
    keep(site, run, "tokens", query, {"sides": [{**side(), "likeliest": best}]})
    assert "Choose a token" in shown_text(site, **query)
    html = shown_text(site, **query, at="0.4")
    assert "**'b'**, token 4: policy -4.000, reference -0.500, difference -3.500 nats" in html
    rows = next(value for value in shown(site, **query, at="0.4").values() if isinstance(value, pd.DataFrame))
    assert rows["token"].tolist() == ["b ✓", EVIL]
    for wrong in ("0.1", "0.5", "1.2", "x", "0.²", f"0.{EVIL}"):
        assert "Choose a token" in shown_text(site, **query, at=wrong)


def test_a_text_of_many_small_tokens_is_a_text() -> None:
    text = "one word after another\n"
    html = tokens.heat_map([tokens.Token(sign, 0.5) for sign in text], 2.0, "Text")
    assert re.sub(r"<[^>]+>", "", html) == "one word after another↵\n"


def test_pairs_are_counted_and_the_worst_come_first(site: Site, run: str) -> None:
    margins = [0.5, -0.25, 1.5, 0.125]
    recorded = {"eval/rewards/margins": sum(margins) / 4, "eval/logps/chosen": -3.0, "eval/rewards/chosen": 0.25}
    keep(site, run, "pairs", {}, paired(margins, recorded={**recorded, "eval/rewards/chosen": sum(margins) / 8}))
    query = {"run": run, "tab": "pairs"}
    html = shown_text(site, **query)
    assert "**75.0%** (95 % interval 30.1% to 95.4%)" in html
    assert "Mean margin: 0.4688" in html
    assert "Chosen is shorter: 100.0% of 1, mean margin 0.5" in html
    assert "Chosen is longer: 100.0% of 2, mean margin 0.8125" in html
    rows = table(site, **query)
    assert rows["row"].tolist() == ["2", "4", "1", "3"]
    assert rows["margin"].tolist() == [-0.25, 0.125, 0.5, 1.5]
    assert "differ by at most 0" in html
    assert rows["right?"].tolist().count("✔ right") == 3
    margins_drawn, lengths_drawn = plots(site, **query)
    assert sum(sum(bars.y) for bars in margins_drawn.data) == 4
    assert [len(points.x) for points in lengths_drawn.data] == [4, 4]
    assert table(site, **query, sort="best first")["row"].tolist() == ["3", "1", "4", "2"]


@pytest.mark.parametrize("count", [0, 1])
def test_pairs_without_rewards_are_shown(site: Site, run: str, count: int) -> None:
    actual = paired([1.0] * count)
    for row in actual["rows"]:
        row["rewards"] = {}
    keep(site, run, "pairs", {}, actual)
    query = {"run": run, "tab": "pairs"}
    assert "Pairs: 0" in shown_text(site, **query)
    assert "Internal error" not in shown_text(site, **query)
    assert table(site, **query)["right?"].tolist() == ["-"] * count


def test_a_selected_pair_has_its_texts_and_leads_to_its_tokens(site: Site, run: str) -> None:
    rows = paired([0.5, -0.25])
    for row in rows["rows"]:
        row["prompt"] = f"{EVIL} {'long ' * 200}"
    keep(site, run, "pairs", {}, rows)
    query = {"run": run, "tab": "pairs"}
    assert max(map(len, table(site, **query)["prompt"])) == 160
    assert rows["rows"][1]["prompt"] in shown_text(site, **query, pair="2")
    assert rows["rows"][1]["prompt"] not in shown_text(site, **query)
    assert any("row=held.jsonl%3A2" in one for one in links(site, **query, pair="2"))
    assert not any("row=held.jsonl%3A2" in one for one in links(site, **query, pair="7"))


def test_a_first_policy_that_is_not_the_reference_is_told(site: Site, run: str) -> None:
    first = {"largest": 0.75, "rows": 4, "expected": True, "compute": "float32"}
    keep(site, run, "pairs", {}, paired([1.0], first=first, recorded={"eval/rewards/margins": 2.0}))
    html = shown_text(site, run=run, tab="pairs")
    assert "not the same model" in html
    assert "may have changed since" in html
    assert "differ by at most 1 (rewards/margins)" in html
    assert "Step 0: ✘" in html
    assert "Metrics of the run: ✘" in html


def test_recorded_logps_are_compared_with_those_of_the_pairs(site: Site, run: str) -> None:
    actual = paired([1.0], recorded={"eval/rewards/margins": 1.0, "eval/logps/rejected": 4.0})
    assert actual["rows"][0]["policy"][1] == -4.0
    keep(site, run, "pairs", {}, actual)
    assert "differ by at most 8 (logps/rejected)" in shown_text(site, run=run, tab="pairs")


def test_one_prompt_is_answered_by_every_checkpoint(site: Site, run: str) -> None:
    saved(site.settings.home / run, 10)
    query = {"run": run, "tab": "checkpoints", "prompt": "H", "max": "8", "samples": "2", "temperature": "0.7"}
    inputs = request(site, "checkpoints", query)
    assert inputs is not None
    assert inputs["do"] == "generate"
    assert "samples" not in inputs  # of another tab
    for step in (0, 20):
        asked = Request(site.answers.key(Model(run, step), inputs), Model(run, step), inputs, state="done")
        answer = {**generated()["policy"], "text": f"{EVIL} at {step}"}
        asked.result = {**who(run), **generated(), "policy": answer}
        site.answers._remember(asked)
    key = site.answers.key(Model(run, 10), inputs)
    waiting = site.answers._remember(Request(key, Model(run, 10), inputs, "loading", state="running"))
    values = shown(site, **query)
    answers = next(value for value in values.values() if isinstance(value, pd.DataFrame) and "step" in value)
    assert answers["step"].tolist() == [0, 20]
    assert answers["answer"].tolist() == [f"{EVIL} at 0", f"{EVIL} at 20"]
    assert values["Timer"]["active"]
    assert "**Loading**" in shown_text(site, **query)
    native.Built(outputs_page.Outputs, site).pressed("Cancel", query)
    assert waiting.state == "cancelled"


def test_files_hold_what_is_shown(run: str) -> None:
    rows = list(csv.DictReader(io.StringIO(exported([{**who(run), **paired([-0.5, 1.0])}], "csv"))))
    assert [float(row["reward_margins"]) for row in rows] == [-0.5, 1.0]
    assert float(rows[0]["policy_logp_chosen"]) == -3.0
    tokens = exported([{**who(run), "sides": [{**side(), "pieces": ["<bos>", "H", "=1", "+", "b"]}]}], "csv")
    actual = list(csv.DictReader(io.StringIO(tokens)))
    assert [*actual[0]][3:] == ["text", "position", "id", "token", "policy_logp", "other_logp"]
    assert [row["position"] for row in actual] == ["2", "3", "4"]
    assert [row["token"] for row in actual] == ["'=1", "'+", "b"]  # no formulas
    assert [float(row["policy_logp"]) - float(row["other_logp"]) for row in actual] == [0.5, 0.0, -3.5]
    both = [json.loads(line) for line in exported([{**who(run), **generated()}], "jsonl").splitlines()]
    assert [row["side"] for row in both] == ["policy", "other"]
    assert both[0]["answer"] == f"a good {EVIL} day"


@pytest.mark.parametrize(
    ("tab", "query", "text"),
    [
        ("generate", {"prompt": "x", "max": "101"}, "max: expected a whole number from 1 to 100"),
        ("generate", {"prompt": "x", "max": "1e3"}, "max: expected a whole number"),
        ("generate", {"prompt": "x", "temperature": "nan"}, "temperature: expected a number from 0 to 10"),
        ("pairs", {"limit": "-1"}, "limit: expected a whole number"),
    ],
)
def test_what_is_beyond_a_limit_is_refused(site: Site, run: str, tab: str, query: dict[str, str], text: str) -> None:
    with pytest.raises(RunError, match=text):
        request(site, tab, query)
    assert text.partition(":")[0] in shown_text(site, run=run, tab=tab, **query)


@pytest.mark.parametrize(
    ("button", "fields"),
    [
        ("Generate", ([], "x" * 6_001, "", 8, 1, 0, None, None, 0)),
        ("Score with both models", ("", "", "", "x" * 6_001)),
    ],
)
def test_a_text_that_is_too_long_is_refused(site: Site, run: str, button: str, fields: tuple[Any, ...]) -> None:
    tab = "generate" if button == "Generate" else "tokens"
    with pytest.raises(gr.Error, match="6,001 characters; expected at most 6,000"):
        native.Built(outputs_page.Outputs, site).pressed(button, {"run": run, "tab": tab}, *fields)


@pytest.mark.extended
def test_a_number_of_a_url_that_is_none_is_no_fault_of_the_app(site: Site, run: str) -> None:
    (site.run(run).path / "samples.jsonl").write_text(json.dumps({"step": 10, "prompt": "a", "policy": "b"}) + "\n")
    (site.run(run).path / "checkpoints" / "²").mkdir()
    names = ("step", "pages", "n", "against", "samples", "max", "seed", "limit", "top_k")
    pages = {page.name: native.Built(page, site) for page in PAGES}
    for text in ("²", "٣", "9" * 5_000, "-1", "1e3"):
        query = {**dict.fromkeys(names, text), "id": run, "run": run, "prompt": "a", "against": f"{run}@{text}"}
        for fields in (query, {**query, "against": text, "temperature": "1"}):
            for name, built in pages.items():
                for tab in ("", "samples"):
                    assert "Internal error" not in str(built.shown(**{**fields, "tab": tab})), name
            for tab in ("generate", "tokens", "pairs"):
                assert "Internal error" not in shown_text(site, pages["outputs"], **{**fields, "tab": tab})


def test_a_form_becomes_a_query_and_a_long_text_a_key(site: Site, run: str) -> None:
    fields = {"prompt": "Hi", "max": "64", "temperature": "0", "seed": "", "chat": "", "x": "y"}
    actual = written("generate", fields, "abc")
    assert {name: value for name, value in actual.items() if value} == {"prompt": "Hi"}
    assert "max" in actual  # an older one is removed
    long = written("generate", {**fields, "prompt": "x" * 5_000}, "abc")
    assert {name: value for name, value in long.items() if value} == {"key": "abc"}
    key = keep(site, run, "generate", {"prompt": "x" * 5_000}, generated())
    html = shown_text(site, run=run, key=key)
    assert "x" * 5_000 in html
    assert "<ins>good</ins>" in html


def test_a_submitted_form_is_computed_by_the_child(site: Site, run: str) -> None:
    built, query = native.Built(outputs_page.Outputs, site), {"run": run}
    row, prompt, chat = [], "Say 1", ""
    sampling = (8, 2, 0.7, None, None, 3)
    done = built.pressed("Generate", query, row, prompt, chat, *sampling)
    assert {name: value for name, value in done["query"].items() if value} == {
        "prompt": "Say 1",
        "max": "8",
        "samples": "2",
        "temperature": "0.7",
        "seed": "3",
    }
    inputs = request(site, "generate", done["query"])
    assert inputs is not None
    asked = site.answers.find(site.answers.key(Model(run, 20), inputs))
    assert asked is not None
    assert not asked.is_over
    site.answers.cancel(asked.key)


def test_a_prompt_is_needed(site: Site, run: str) -> None:
    built = native.Built(outputs_page.Outputs, site)
    with pytest.warns(UserWarning, match="needs a prompt"):
        assert built.pressed("Generate", {"run": run}, [], "", "", 8, 1, 0, None, None, 0)["query"] == {}
    with pytest.raises(gr.Error, match="Choose a run that has a checkpoint"):
        built.pressed("Generate", {}, [], "Hi", "", 8, 1, 0, None, None, 0)
    assert held_out_prompts(site, run) == [("held.jsonl:1", f"Say 1 {EVIL}"), ("held.jsonl:2", f"Say 2 {EVIL}")]
    assert request(site, "generate", {"row": "held.jsonl:2"}) == {
        "do": "generate",
        "row": "held.jsonl:2",
        "max_new_tokens": 64,
        "temperature": 0.0,
        "seed": 0,
    }


SOURCES: dict[str, Data] = {
    "one file": Data.Preferences("held.jsonl.gz"),
    "a glob and a file": Data.Preferences(("./parts/*.jsonl", "held.jsonl.gz")),
    "a folder": Data.Preferences("parts"),
    "other columns": Data.Preferences("table.csv", columns={"question": "prompt", "good": "chosen", "bad": "rejected"}),
    "texts": Data.Text("table.csv", field="question"),
    "chats": Data.Conversations("chats.json"),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_held_out_rows_are_read_as_the_run_reads_them(
    site: Site, run: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, data = site.settings.project / "started [1]", SOURCES[kind]
    (place / "parts").mkdir(parents=True)
    pairs = [{"prompt": f"Say {n}", "chosen": "yes", "rejected": "no"} for n in range(3)]
    lines = [f"{json.dumps(row)}\n" for row in pairs]
    (place / "held.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    (place / "parts" / "a.jsonl").write_text(f"{{\n{lines[1]}")
    (place / "parts" / "b.jsonl").write_text(lines[2])
    (place / "table.csv").write_text("question,good,bad\nSay 0,yes,no\nSay 1,yes,no\n")
    (place / "chats.json").write_text(json.dumps([{"conversations": [{"from": "human", "value": "Say 0"}]}]))
    run_path = site.settings.home / run
    tree = json.loads((run_path / "experiment.json").read_text())
    tree["evaluation"]["data"] = {name: value for name, value in to_dict(data).items() if name != "schema"}
    (run_path / "experiment.json").write_text(json.dumps(tree))
    (run_path / "attempts.jsonl").write_text(json.dumps({"cwd": str(place)}) + "\n")

    before, listed = site.answers.key(Model(run, 20), {"do": "pairs"}), held_out_prompts(site, run)
    monkeypatch.chdir(place)
    rows = [row for row in source_rows(data) if not isinstance(row.value, RowError)]  # as the run, in its directory
    assert [where for where, _ in listed] == [row.place for row in rows]
    numbers = {"one file": "012", "a glob and a file": "12012", "a folder": "12", "chats": "0"}.get(kind, "01")
    assert [text for _, text in listed] == [f"Say {number}" for number in numbers]
    options = [value for _, value in shown(site, run=run)["Held-out row choices"]]
    assert options == ["", *(where for where, _ in listed)]

    name = rows[-1].place.rpartition(":")[0]
    (place / name).write_bytes((place / name).read_bytes() + b"\n")
    assert site.answers.key(Model(run, 20), {"do": "pairs"}) != before
    (place / name).unlink()
    assert held_out_prompts(site, run) == [] or kind == "a folder"


def test_held_out_rows_of_an_absolute_path_have_its_whole_name(site: Site, run: str) -> None:
    file = site.settings.project / "held.jsonl"
    run_path = site.settings.home / run
    tree = json.loads((run_path / "experiment.json").read_text())
    tree["evaluation"]["data"]["path"] = str(file)
    (run_path / "experiment.json").write_text(json.dumps(tree))
    rows = [row.place for row in source_rows(Data.Preferences(str(file)))]
    assert [where for where, _ in held_out_prompts(site, run)] == rows == [f"{file}:1", f"{file}:2"]


def test_an_answer_belongs_to_its_checkpoint_and_held_out_file(site: Site, run: str) -> None:
    first = site.answers.key(Model(run, 20), {"do": "pairs"})
    assert first == site.answers.key(Model(run, 20), {"do": "pairs"})
    (site.settings.home / run / "checkpoints" / "00000020" / "manifest.json").write_text('{"other": 1}')
    second = site.answers.key(Model(run, 20), {"do": "pairs"})
    (site.settings.project / "held.jsonl").write_text("")
    third = site.answers.key(Model(run, 20), {"do": "pairs"})
    assert len({first, second, third, site.answers.key(Model(run, 0), {"do": "pairs"})}) == 4
    with pytest.raises(RunError, match="choose another checkpoint"):
        site.answers.key(Model(run, 7), {"do": "pairs"})
    for name in ("../x", "a/b", "", "x" * 300):
        assert site.answers.find(name) is None


def chatted(site: Site, model: Model, side: str, turns: list[str], text: str) -> None:
    """Keeps a model's answer to a conversation of user, assistant, user, ... as the child's are kept."""
    messages = [{"role": "assistant" if index % 2 else "user", "content": turn} for index, turn in enumerate(turns)]
    fields = {
        "do": "generate",
        "messages": messages,
        "sides": [side],
        "max_new_tokens": 8,
        "temperature": 0.0,
        "seed": 0,
    }
    asked = Request(site.answers.key(model, fields), model, fields, state="done")
    answer = {"ids": [1, 2], "text": text, "pieces": ["a", "b"], "tokens": 2, "stop": None, "seconds": 0.5}
    asked.result = {**who(model.run), side: answer, "prompt_ids": [1], "device": "cpu"}
    site.answers._remember(asked)


def chats(site: Site, **query: str) -> list[list[tuple[str, str]]]:
    """The messages of each conversation that is shown: their roles and texts."""
    values = shown(site, tab="chat", max="8", **query)
    result = [value for name, value in values.items() if name.startswith("Chatbot")]
    return [[(one["role"], one["content"]) for one in value] for value in result if isinstance(value, list)]


def test_each_model_sees_its_own_turns(site: Site, run: str) -> None:
    other = write_run(site.settings.home, experiment(1), "finished", 30)
    saved(other, 30)
    turns = json.dumps(["Hi", "More"])
    for side, text in (("policy", EVIL), ("other", "no")):
        chatted(site, Model(run, 20), side, ["Hi"], text)
        chatted(site, Model(run, 20), side, ["Hi", text, "More"], f"{text} again")
    chatted(site, Model(other.name, 30), "policy", ["Hi"], "third")
    query = {"run": run, "turns": turns, "with": f"{other.name}@30"}
    assert chats(site, **query) == [
        [("user", "Hi"), ("assistant", EVIL), ("user", "More"), ("assistant", f"{EVIL} again")],
        [("user", "Hi"), ("assistant", "no"), ("user", "More"), ("assistant", "no again")],
        [("user", "Hi"), ("assistant", "third"), ("user", "More")],
    ]
    built = native.Built(outputs_page.Outputs, site)
    fields = ([f"{other.name}@30"], 8, 0, None, None, 0)
    place = {"run": run, "tab": "chat", "max": "8", **query}
    with pytest.raises(gr.Error, match="has not answered all turns so far"):
        built.pressed("Send", place, "And", *fields)
    done = built.pressed("Send", place, "", *fields)["query"]
    assert json.loads(done["turns"]) == ["Hi", "More"]
    assert done["with"] == f"{other.name}@30"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "third"}]
    messages += [{"role": "user", "content": "More"}]
    sampling = {"max_new_tokens": 8, "temperature": 0.0, "seed": 0}
    options = {"do": "generate", "messages": messages, "sides": ["policy"], **sampling}
    asked = site.answers.find(site.answers.key(Model(other.name, 30), options))
    assert asked is not None
    assert not asked.is_over
    built.pressed("Cancel", place)
    assert asked.state == "cancelled"
    assert built.pressed("Take back the last turn", place)["query"]["turns"] == '["Hi"]'
    assert built.pressed("Start over", place)["query"]["turns"] == ""


def test_a_turn_is_shown_while_it_is_decoded(site: Site, run: str) -> None:
    chatted(site, Model(run, 20), "other", ["Hi"], "no")
    sampling = {"max_new_tokens": 8, "temperature": 0.0, "seed": 0}
    fields = {"do": "generate", "messages": [{"role": "user", "content": "Hi"}], "sides": ["policy"], **sampling}
    asked = Request(site.answers.key(Model(run, 20), fields), Model(run, 20), fields, "sampling", state="running")
    asked.partial = {"policy": {"texts": ["he"], "tokens": [1], "done": [False]}}
    site.answers._remember(asked)
    query = {"run": run, "turns": '["Hi"]'}
    assert chats(site, **query) == [[("user", "Hi"), ("assistant", "he")], [("user", "Hi"), ("assistant", "no")]]
    assert "Sampling, 1 tokens so far" in shown_text(site, **query, tab="chat", max="8")
    asked.state = "cancelled"
    assert chats(site, **query)[0] == [("user", "Hi")]


@pytest.mark.extended
def test_a_conversation_that_cannot_be_is_refused(site: Site, run: str) -> None:
    for name in ("gone@1", f"../{run}@20", f"{run}@21", f"{EVIL}@1", f"{run}@", "@20"):
        text = shown_text(site, run=run, tab="chat", turns='["Hi"]', **{"with": name})
        assert "is not a run with this checkpoint" in text, name
        assert EVIL not in text
    several = ",".join(f"{run}@{step}" for step in (0, 20, 1))
    assert "expected at most 2" in shown_text(site, run=run, tab="chat", turns='["Hi"]', **{"with": several})
    assert "at most 16 turns" in shown_text(site, run=run, tab="chat", turns=json.dumps(["x"] * 17))
    for wrong in ("[", '{"a": 1}', "[1]", EVIL):
        assert chats(site, run=run, turns=wrong) == []
    built = native.Built(outputs_page.Outputs, site)
    with pytest.warns(UserWarning, match="needs a message"):
        built.pressed("Send", {"run": run, "tab": "chat"}, "", [], 8, 0, None, None, 0)
