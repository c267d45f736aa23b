"""The page of outputs from answers that are kept on disk: what is shown is what they say, as text, in every state."""

from __future__ import annotations

import contextlib
import csv
import doctest
import gzip
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from app.page import Ask
from app.pages import PAGES
from app.pages.outputs import generate as outputs_generate
from app.pages.outputs import stats as outputs_stats
from app.pages.outputs.export import exported
from app.pages.outputs.page import PAGE, opened, submitted, voted
from app.pages.outputs.request import held_out_prompts, query_of, request
from app.pages.outputs.stats import Group, recorded_difference, wilson
from app.processes.outputs_worker import Model, Request
from app.processes.votes import SIDES
from app.settings import Limits, Settings
from app.state import Site
from nnxdsl import Data, Evaluation, RunError, to_dict
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.loaders.sources import source_rows
from tests.app.many import experiment, write_run

compare_page = pytest.importorskip("app.pages.compare.page")
native = pytest.importorskip("tests.app.native")

EVIL = '<img src=x onerror="boom(1)">'


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site.of(
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
    head = opened(site, Ask({"run": run})).regions["head"]
    assert f'value="{other.name}@30"' in head
    assert f'value="{other.name}@10"' not in head
    assert bare.name not in head.partition("against")[2]
    against = f"{other.name}@10"
    head = opened(site, Ask({"run": run, "against": against})).regions["head"]
    assert f'value="{against}" selected' in head
    model, asked_ = Model(run, 20, against), {"do": "pairs"}
    key = site.answers.key(model, asked_)
    (other / "checkpoints" / "00000010" / "manifest.json").write_text('{"changed": 1}')
    assert site.answers.key(model, asked_) != key
    for wrong in (f"{other.name}@11", f"{run}@20", "gone@1", f"../{other.name}@10", f"{EVIL}@1", "@3"):
        head = opened(site, Ask({"run": run, "against": wrong})).regions["head"]
        assert 'value="reference" selected' in head
    values = native.Built(compare_page.PAGE, site).shown(ids=f"{run},{other.name}")
    assert f"/outputs?run={other.name}&against={run}%4020" in values["Markdown"]


def test_several_answers_stand_below_each_other_with_tokens_of_their_own(site: Site, run: str) -> None:
    query = {"prompt": "H", "temperature": "0.7", "samples": "2", "max": "8"}
    given = request(site, "", query)
    assert given is not None
    assert given["samples"] == 2
    assert "samples" not in (request(site, "", {**query, "temperature": "0"}) or {})
    with pytest.raises(RunError, match="samples: expected a whole number from 1 to 16"):
        request(site, "", {**query, "samples": "17"})
    result = generated()
    for name in SIDES:
        result[name]["more"] = [{**result[name], "ids": [1, 2], "text": f"{name} again"}]
    key = keep(site, run, "", query, result)
    html = opened(site, Ask({"run": run, **query})).regions["result"]
    assert "2 of 2" in html
    assert html.count("Its tokens") == 4
    found = request(site, "tokens", {"from": key, "side": "policy", "n": "2"})
    assert found == {"do": "tokens", "prompt_ids": [256, 72], "completion_ids": [1, 2]}
    assert request(site, "tokens", {"from": key, "side": "policy", "n": "3"}) is None
    rows = [json.loads(line) for line in exported(result, "jsonl").splitlines()]
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


def shown(site: Site, **query: str) -> str:
    return "".join(opened(site, Ask(query)).regions.values())


@pytest.mark.parametrize("module", [outputs_stats, outputs_generate])
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
    assert "Choose a run" in shown(site)
    assert "There is no run" in shown(site, run=EVIL)
    without = write_run(site.settings.home, experiment(1), "failed", 3)
    assert "This run has no checkpoint yet" in shown(site, run=without.name)
    assert "press Generate" in shown(site, run=run)
    assert "newest" not in shown(site, run=run, step="7")  # which is not there: the newest is taken
    assert "held.jsonl:2" in shown(site, run=run)


def test_an_empty_home_says_what_the_page_is_for(tmp_path: Path) -> None:
    site = Site.of(Settings(home=tmp_path, project=tmp_path, read_only=True))
    assert "No run has saved a checkpoint yet" in shown(site)
    assert PAGE.offered(read_only=True).keys() == {"open", "tick"}
    site.close()


def test_answers_stand_side_by_side_with_their_words_marked(site: Site, run: str) -> None:
    query = {"prompt": "H", "temperature": "0.7", "top_p": "0.9", "max": "8", "seed": "3"}
    key = keep(site, run, "", query, generated())
    html = shown(site, run=run, **query)
    assert "<ins>good</ins>" in html
    assert "<del>bad</del>" in html
    for words in (
        "stopped at &lt;eos&gt;",
        "truncated at 3 tokens",
        "0.50 s",
        "0.7",
        "0.9",
        "3, the same for both",
    ):
        assert words in html
    assert f"from={key}" in html
    assert "onerror" in html
    assert "<img" not in html
    assert '<span class="marker">&lt;bos&gt;</span>' in html


def test_a_blind_vote_tells_nothing_before_and_counts_after(site: Site, run: str) -> None:
    query = {"run": run, "prompt": "H", "temperature": "0.7", "top_p": "0.9", "max": "8", "seed": "3", "blind": "1"}
    key = keep(site, run, "", query, generated())
    result = opened(site, Ask(query)).regions["result"]
    assert "Answer A" in result
    assert "Policy" not in result
    assert "0.50 s" not in result
    assert "/download" not in result
    order = site.votes.order(key)
    texts = [re.sub(r"<[^>]+>", "", one) for one in re.findall(r'class="answer">(.*?)</div>', result)]
    assert ["good" in texts[place] for place in (0, 1)] == [name == "policy" for name in order]
    with pytest.raises(RunError):
        voted(site, Ask(query, {"key": key, "choice": "policy"}))
    answer = voted(site, Ask(query, {"key": key, "choice": "ab"[order.index("policy")]}))
    assert "you preferred the policy" in (answer.notice or "")
    assert "Policy, step 20" in answer.regions["result"]
    assert site.votes.tally(Model(run, 20)) == {"policy": 1, "other": 0, "tie": 0}
    voted(site, Ask(query, {"key": key, "choice": "tie"}))  # thought again: the last vote counts
    assert site.votes.tally(Model(run, 20)) == {"policy": 0, "other": 0, "tie": 1}
    assert {site.votes.order(f"key {n}") for n in range(20)} == {SIDES, SIDES[::-1]}


@pytest.mark.parametrize("choice", ["a", "b", "tie"])
def test_a_vote_on_equal_answers_is_a_tie(site: Site, run: str, choice: str) -> None:
    query = {"run": run, "prompt": "H", "temperature": "0.7", "top_p": "0.9", "max": "8", "seed": "3", "blind": "1"}
    result = generated()
    key = keep(site, run, "", query, {**result, "other": result["policy"]})
    assert "counts as a tie" in opened(site, Ask(query)).regions["result"]
    answer = voted(site, Ask(query, {"key": key, "choice": choice}))
    assert answer.notice == "Recorded: no difference."
    assert site.votes.tally(Model(run, 20)) == {"policy": 0, "other": 0, "tie": 1}


def test_a_request_at_work_tells_what_is_compiled_again(site: Site, run: str) -> None:
    query = {"run": run, "prompt": "H"}
    given = request(site, "", query)
    assert given is not None
    model = Model(run, 20)
    site.answers._remember(Request(site.answers.key(model, given), model, given, "running", "starting"))
    shown = opened(site, Ask(query)).regions["result"]
    assert "another prompt length, number of samples or max new tokens is compiled first" in shown


def test_tokens_have_their_figures_and_cannot_be_more_than_the_scale(site: Site, run: str) -> None:
    keep(site, run, "tokens", {"prompt": "H", "text": "a"}, {"sides": [side()]})
    html = shown(site, run=run, tab="tokens", prompt="H", text="a")
    tokens = re.findall(r'<span class="token (\w+)" style="--w:([\d.]+)" tabindex="(-?\d)".*?figure">([^<]*)', html)
    assert tokens == [
        ("more", "0.250", "0", "+0.50"),
        ("even", "0.000", "-1", "+0.00"),
        ("less", "1.000", "-1", "-3.50"),
    ]
    assert "1 of 3 tokens exceed ±2" in html
    assert "-5.250 nats" in html  # the policy's sum
    assert "-3.000 nats over 3 tokens" in html
    assert "↵" in html
    assert "·&lt;img" in html
    assert "<img" not in html
    wide = shown(site, run=run, tab="tokens", prompt="H", text="a", scale="5")
    assert "beyond" not in wide


def test_pairs_are_counted_and_the_worst_come_first(site: Site, run: str) -> None:
    margins = [0.5, -0.25, 1.5, 0.125]
    recorded = {"eval/rewards/margins": sum(margins) / 4, "eval/logps/chosen": -3.0, "eval/rewards/chosen": 0.25}
    keep(site, run, "pairs", {}, paired(margins, recorded={**recorded, "eval/rewards/chosen": sum(margins) / 8}))
    html = shown(site, run=run, tab="pairs")
    assert "75.0% (95 % interval 30.1% to 95.4%)" in html
    places = [html.index(f'title="token by token">{number}</a>') for number in (2, 4, 1, 3)]
    assert places == sorted(places)
    assert "differ by at most 0" in html
    assert html.count("✔ right") == 3
    assert "<img" not in html
    assert "<circle" in html
    best = shown(site, run=run, tab="pairs", sort="best")
    assert best.index(">3</a>") < best.index(">2</a>")


def test_a_first_policy_that_is_not_the_reference_is_told(site: Site, run: str) -> None:
    first = {"largest": 0.75, "rows": 4, "expected": True, "compute": "float32"}
    keep(site, run, "pairs", {}, paired([1.0], first=first, recorded={"eval/rewards/margins": 2.0}))
    html = shown(site, run=run, tab="pairs")
    assert "not the same model" in html
    assert "may have changed since" in html
    assert html.count("check bad") == 2


def test_groups_and_differences() -> None:
    rows = [pair(1, 1.0), pair(2, -1.0), {**pair(3, 1.0), "rewards": {}}]
    assert Group.of(rows) == Group(2, 1, 0.0)
    assert recorded_difference(rows[:2], {"eval/rewards/margins": 0.5, "eval/logps/rejected": -4.0, "eval/x": 1.0}) == {
        "eval/rewards/margins": -0.5,
        "eval/logps/rejected": 0.0,
    }


def test_files_hold_what_is_shown(run: str) -> None:
    rows = list(csv.DictReader(io.StringIO(exported({**who(run), **paired([-0.5, 1.0])}, "csv"))))
    assert [float(row["reward_margins"]) for row in rows] == [-0.5, 1.0]
    assert float(rows[0]["policy_logp_chosen"]) == -3.0
    tokens = exported({**who(run), "sides": [{**side(), "pieces": ["<bos>", "H", "=1", "+", "b"]}]}, "csv")
    found = list(csv.DictReader(io.StringIO(tokens)))
    assert [row["token"] for row in found] == ["'=1", "'+", "b"]  # no formulas
    assert [float(row["policy_logp"]) - float(row["other_logp"]) for row in found] == [0.5, 0.0, -3.5]
    both = [json.loads(line) for line in exported({**who(run), **generated()}, "jsonl").splitlines()]
    assert [row["side"] for row in both] == ["policy", "other"]
    assert both[0]["answer"] == f"a good {EVIL} day"


@pytest.mark.parametrize(
    ("tab", "query", "words"),
    [
        ("", {"prompt": "x", "max": "101"}, "max: expected a whole number from 1 to 100"),
        ("", {"prompt": "x", "max": "1e3"}, "max: expected a whole number"),
        ("", {"prompt": "x", "temperature": "nan"}, "temperature: expected a number from 0 to 10"),
        ("", {"prompt": "x" * 6_001}, "6,001 characters; expected at most 6,000"),
        ("tokens", {"text": "x" * 6_001}, "6,001 characters; expected at most 6,000"),
        ("pairs", {"limit": "-1"}, "limit: expected a whole number"),
    ],
)
def test_what_is_beyond_a_limit_is_refused(site: Site, run: str, tab: str, query: dict[str, str], words: str) -> None:
    with pytest.raises(RunError, match=words):
        request(site, tab, query)
    assert words.partition(":")[0] in shown(site, run=run, tab=tab, **query)


@pytest.mark.parametrize("text", ["²", "٣", "9" * 5_000, "-1", "1e3"])
def test_a_number_of_a_url_that_is_none_is_no_fault_of_the_app(site: Site, run: str, text: str) -> None:
    (site.run(run).path / "samples.jsonl").write_text(json.dumps({"step": 10, "prompt": "a", "policy": "b"}) + "\n")
    (site.run(run).path / "checkpoints" / "²").mkdir()
    names = ("step", "pages", "n", "against", "samples", "max", "seed", "limit", "top_k")
    numbers = dict.fromkeys(names, text)
    for page in PAGES:
        for tab in ("", "samples", "tokens", "pairs"):
            query = {**numbers, "id": run, "run": run, "tab": tab, "prompt": "a", "against": f"{run}@{text}"}
            for given in (query, {**query, "against": text, "temperature": "1"}):
                with contextlib.suppress(RunError):
                    page.offered(read_only=True)["open"](site, Ask(given))


def test_a_form_becomes_a_query_and_a_long_text_a_key(site: Site, run: str) -> None:
    fields = {"prompt": "Hi", "max": "64", "temperature": "0", "seed": "", "blind": "true", "chat": "", "x": "y"}
    ask = Ask({"run": run, "tab": ""}, {"fields": fields})
    assert query_of(ask, "") == {"run": run, "tab": "", "prompt": "Hi", "blind": "1"}
    long = Ask({"run": run}, {"fields": {**fields, "prompt": "x" * 5_000}})
    assert query_of(long, "", "abc") == {"run": run, "blind": "1", "key": "abc"}
    key = keep(site, run, "", {"prompt": "x" * 5_000}, generated())
    html = shown(site, run=run, key=key)
    assert "x" * 5_000 in html
    assert "<ins>good</ins>" in html


def test_a_prompt_is_needed(site: Site, run: str) -> None:
    assert "needs a prompt" in (submitted(site, Ask({"run": run}, {"fields": {}})).notice or "")
    assert held_out_prompts(site, run) == [("held.jsonl:1", f"Say 1 {EVIL}"), ("held.jsonl:2", f"Say 2 {EVIL}")]
    assert request(site, "", {"row": "held.jsonl:2"}) == {
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
    options = re.findall(r'<option value="([^"]+:[^"]+)"', shown(site, run=run))
    assert options == [where for where, _ in listed]

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
