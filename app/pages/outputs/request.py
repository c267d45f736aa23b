"""Parses the query of the Outputs page into a run, a checkpoint and a request. Reads files of runs, no models."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import attrs

from nnxdsl.config.data import Text
from nnxdsl.errors import NnxdslError, RunError

from ...processes.outputs_worker import Model, Request
from ...settings import Limits
from ...state import Site
from ...store.index import Row
from ...words import whole

FIELDS = {
    "generate": ("prompt", "row", "chat", "max", "samples", "temperature", "top_k", "top_p", "seed", "blind"),
    "tokens": ("prompt", "text", "row", "chat", "from", "side", "n"),
    "pairs": ("limit",),
    "chat": ("turns", "with", "max", "temperature", "top_k", "top_p", "seed"),
    "checkpoints": ("prompt", "row", "chat", "max", "temperature", "top_k", "top_p", "seed"),
}
"""Parts of the query that a request of each tab is made of; "blind" is how its result is shown."""

DOES = {"chat": "generate", "checkpoints": "generate"}
"""What is computed for a tab, if it has not the name of the tab."""

DEFAULTS = {"max": "64", "temperature": "0", "seed": "0", "samples": "1", "limit": "500"}
LONGEST_QUERY = 3_000
"""Maximum length of a text in the query; a longer text is referenced by the key of its answer."""

LISTED = 100
"""Number of held-out rows offered."""

MOST_PAIRS = 5_000
MOST_SAMPLES = 16
MOST_MORE = 2
"""Most checkpoints that chat beside the page's two models."""

MOST_TURNS = 16
OTHER_RUNS = 40
"""Number of other runs offered for comparison."""

RUNS = 200
"""Number of runs in the list of choices; others are reachable by URL."""

SIDES = ("policy", "other")


@attrs.frozen
class Chosen:
    """Run and checkpoint of a query.

    Attributes:
        row: The run; None if the query names none that exists.
        steps: Steps of its checkpoints, newest first.
        step: The chosen step.
        against: "reference", another step, or `RUN@STEP` of another run.
        tab: "generate", "tokens", "pairs", "chat" or "checkpoints".
    """

    row: Row | None
    steps: list[int]
    step: int
    against: str
    tab: str

    @property
    def model(self) -> Model | None:
        """The two models to compare; None without a checkpoint."""
        return Model(self.row.id, self.step, self.against) if self.row is not None and self.steps else None

    @property
    def models(self) -> list[Model]:
        """The models that the tab computes with: the chosen ones, or those of every checkpoint, by step."""
        if self.model is None or self.tab != "checkpoints":
            return [] if self.model is None else [self.model]
        others = [(step, "reference" if self.against == str(step) else self.against) for step in (0, *self.steps[::-1])]
        return [Model(self.model.run, step, against) for step, against in others]

    @property
    def query(self) -> dict[str, str]:
        """The part of the query that all tabs share."""
        return {} if self.row is None else {"run": self.row.id, "step": str(self.step), "against": self.against}


def chosen(site: Site, query: Mapping[str, str]) -> Chosen:
    """Parses the query; a missing step means the newest."""
    run = query.get("run", "")
    row = site.index.row(run) if run else None
    steps = [] if row is None else steps_of(row.path)
    given, against = whole(query.get("step", "")), query.get("against", "")
    step = given if given is not None and given in (*steps, 0) else (steps[0] if steps else 0)
    is_step = whole(against) in (*steps, 0) and whole(against) != step
    if not is_step and not (row is not None and _is_of_another(site, row.id, against)):
        against = "reference"
    tab = query.get("tab", "")
    return Chosen(row, steps, step, against, tab if tab in FIELDS else "generate")


def _is_of_another(site: Site, run: str, against: str) -> bool:
    """Whether `against` is `RUN@STEP` with an existing checkpoint of another run."""
    other, _, step = against.rpartition("@")
    row = site.index.row(other) if whole(step) is not None and other and other != run else None
    return row is not None and whole(step) in steps_of(row.path)


def checkpoint_of(site: Site, name: str) -> Model | None:
    """The policy of `RUN@STEP`, if the home has that run and checkpoint; step 0 is before training."""
    run, _, text = name.rpartition("@")
    row, step = site.index.row(run) if run else None, whole(text)
    there = [] if row is None else steps_of(row.path)
    return Model(run, step) if there and step is not None and step in (*there, 0) else None


def other_runs(site: Site, here: Chosen) -> list[tuple[str, str]]:
    """Checkpoints of other runs to compare with, as `(RUN@STEP, label)`.

    The newest checkpoint of each run of the same model; all of the run that is being compared with.
    """
    if here.row is None:
        return []
    named = here.against.rpartition("@")[0]
    found: list[tuple[str, str]] = []
    for row in site.index.rows():
        if row.id == here.row.id or (row.facts.get("model") != here.row.facts.get("model") and row.id != named):
            continue
        steps = steps_of(row.path)
        found += [
            (f"{row.id}@{step}", f"{row.id}, step {step:,}") for step in (steps if row.id == named else steps[:1])
        ]
        if len(found) >= OTHER_RUNS:
            break
    return found


def with_checkpoints(site: Site) -> list[Row]:
    """Newest runs that have a checkpoint."""
    found: list[Row] = []
    for row in site.index.rows():
        if steps_of(row.path):
            found.append(row)
        if len(found) >= RUNS:
            break
    return found


def steps_of(run: Path) -> list[int]:
    """Steps of a run's committed checkpoints, newest first."""
    try:
        names = [entry.name for entry in (run / "checkpoints").iterdir()]
    except OSError:
        return []
    there = [whole(name) for name in names if (run / "checkpoints" / name / "manifest.json").is_file()]
    return sorted((step for step in there if step is not None), reverse=True)


def request(site: Site, tab: str, query: Mapping[str, str]) -> dict[str, Any] | None:
    """Parses the request to the models; None if the query is incomplete.

    Raises:
        RunError: a field is not a number or out of range, or a text is too long.
    """
    limits = site.settings.limits
    do: dict[str, Any] = {"do": DOES.get(tab, tab)}
    query = {name: query[name] for name in (*FIELDS[tab], "key") if name in query}
    if stored := by_key(site, tab, query):
        return stored.request
    if tab == "pairs":
        return {**do, "limit": _whole(query, "limit", 1, MOST_PAIRS)}
    if tab == "tokens" and query.get("from"):
        return _of_answer(site, query)
    if query.get("row"):
        do["row"] = query["row"]
    else:
        do["prompt"] = _text(query, "prompt", limits)
        do["chat"] = {"yes": True, "no": False}.get(query.get("chat", ""))
    if tab == "tokens":
        if "row" not in do and not query.get("text"):
            return None
        return do if "row" in do else {**do, "text": _text(query, "text", limits)}
    if "row" not in do and not do["prompt"]:
        return None
    do |= _sampling(query, limits)
    if tab == "checkpoints":
        return {**do, "sides": ["policy"]}
    samples = _whole(query, "samples", 1, MOST_SAMPLES)
    return {**do, "samples": samples} if do["temperature"] and samples > 1 else do


def _sampling(query: Mapping[str, str], limits: Limits) -> dict[str, Any]:
    """The settings of a sampler."""
    temperature = _real(query, "temperature", 0.0, 10.0)
    found: dict[str, Any] = {
        "max_new_tokens": _whole(query, "max", 1, limits.new_tokens),
        "temperature": temperature,
        "seed": _whole(query, "seed", 0, 2**31 - 1),
    }
    if temperature:
        top_k = _whole(query, "top_k", 1, 10_000_000) if query.get("top_k") else None
        top_p = _real(query, "top_p", 0.0, 1.0) if query.get("top_p") else None
        found |= {"top_k": top_k, "top_p": None if top_p in (0.0, 1.0) else top_p}
    return found


@attrs.frozen
class Speaker:
    """A model that answers in the Chat tab: one of the two models of a child process.

    Attributes:
        model: The two models.
        side: "policy" or "other".
    """

    model: Model
    side: str


def speakers(site: Site, here: Chosen, query: Mapping[str, str]) -> list[Speaker]:
    """The page's two models, then the checkpoints that `with` names.

    Raises:
        RunError: It names something else, or too many.
    """
    if here.model is None:
        return []
    names = list(dict.fromkeys(name for name in query.get("with", "").split(",") if name))
    if len(names) > MOST_MORE:
        raise RunError(f"with: {len(names)} checkpoints; expected at most {MOST_MORE} beside the two of the page")
    more = [checkpoint_of(site, name) for name in names]
    if None in more:
        raise RunError(f"with: {names[more.index(None)][:100]} is not a run with this checkpoint, RUN@STEP")
    found = [Speaker(here.model, side) for side in SIDES]
    return [*found, *(Speaker(model, "policy") for model in more if model is not None)]


def turns_of(site: Site, query: Mapping[str, str]) -> list[str]:
    """The user's messages; empty for a text that is not a list of texts.

    Raises:
        RunError: There are too many, or they are too long.
    """
    if stored := by_key(site, "chat", query):
        return [one["content"] for one in stored.request["messages"] if one["role"] == "user"]
    try:
        given = json.loads(query.get("turns") or "[]")
    except (ValueError, RecursionError):
        return []
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        return []
    limit = site.settings.limits.prompt_characters
    if len(given) > MOST_TURNS or sum(map(len, given)) > limit:
        raise RunError(f"turns: expected at most {MOST_TURNS} turns of {limit:,} characters in all")
    return given


def conversation(site: Site, speaker: Speaker, query: Mapping[str, str]) -> list[tuple[dict[str, Any], Request | None]]:
    """Requests of a speaker's turns with what came of them; the one after an unanswered turn cannot be made yet.

    Raises:
        RunError: A part of the query is out of range.
    """
    sampling = _sampling(query, site.settings.limits)
    messages: list[dict[str, str]] = []
    found: list[tuple[dict[str, Any], Request | None]] = []
    for turn in turns_of(site, query):
        messages = [*messages, {"role": "user", "content": turn}]
        given = {"do": "generate", "messages": messages, "sides": [speaker.side], **sampling}
        answer = site.answers.find(site.answers.key(speaker.model, given))
        found.append((given, answer))
        if answer is None or answer.result is None:
            break
        messages = [*messages, {"role": "assistant", "content": answer.result[speaker.side]["text"]}]
    return found


def asks(site: Site, here: Chosen, query: Mapping[str, str]) -> list[tuple[Model, dict[str, Any]]]:
    """What the query asks of which models; empty if it is incomplete.

    Raises:
        RunError: A part of the query is out of range.
    """
    if here.tab == "chat":
        return [
            (speaker.model, given)
            for speaker in speakers(site, here, query)
            for given, _ in conversation(site, speaker, query)
        ]
    given = None if here.model is None else request(site, here.tab, query)
    return [] if given is None else [(model, given) for model in here.models]


def by_key(site: Site, tab: str, query: Mapping[str, str]) -> Request | None:
    """The tab's request that the query names by its key, since its texts are too long for a URL; None without one."""
    found = site.answers.find(query.get("key", ""))
    if found is None or found.request["do"] != DOES.get(tab, tab):
        return None
    return found if ("messages" in found.request) == (tab == "chat") else None


def written(tab: str, fields: Mapping[str, str], key: str) -> dict[str, str]:
    """Returns what a submitted request writes into the query; an empty text removes a part."""
    given = {name: fields.get(name, "") for name in FIELDS[tab]}
    changed = {name: "" if value == DEFAULTS.get(name) or not value.strip() else value for name, value in given.items()}
    if len(urlencode(changed)) > LONGEST_QUERY:
        return changed | {name: "" for name in ("prompt", "text", "turns") if name in changed} | {"key": key}
    return changed | {"key": ""}


def held_out_prompts(site: Site, run: str) -> list[tuple[str, str]]:
    """Returns the first held-out rows: the name of each in the run, and the beginning of its prompt."""
    try:
        held_out = site.answers.held_out(run)
        if held_out is None:
            return []
        field = held_out.data.field if isinstance(held_out.data, Text) else "prompt"
        return [(where, _begins(row, field)) for where, row in itertools.islice(held_out.rows(), LISTED)]
    except NnxdslError:
        return []


def _begins(row: Mapping[str, Any], field: str) -> str:
    value = next((row[name] for name in (field, "messages", "conversations", "chosen") if row.get(name)), "")
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        chat = [message for message in value if isinstance(message, dict)]
        user = [message for message in chat if message.get("role", message.get("from")) in ("user", "human")] or chat
        value = user[-1].get("content", user[-1].get("value", ""))
    text = " ".join(str(value).split())
    return text if len(text) <= 70 else f"{text[:69]}…"


def _of_answer(site: Site, query: Mapping[str, str]) -> dict[str, Any] | None:
    """Request to score exactly the tokens of a generated answer."""
    stored, side = site.answers.find(query["from"]), query.get("side", "policy")
    if stored is None or stored.result is None or side not in SIDES or "prompt_ids" not in stored.result:
        return None
    drawn, number = [stored.result[side], *stored.result[side].get("more", ())], whole(query.get("n", "1"))
    if number is None or not 1 <= number <= len(drawn):
        return None
    ids = drawn[number - 1]["ids"]
    return {"do": "tokens", "prompt_ids": stored.result["prompt_ids"], "completion_ids": ids}


def _text(query: Mapping[str, str], name: str, limits: Limits) -> str:
    text = query.get(name, "").replace("\r\n", "\n")
    if len(text) > limits.prompt_characters:
        raise RunError(f"{name}: {len(text):,} characters; expected at most {limits.prompt_characters:,}")
    return text


def _whole(query: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = query.get(name, "").strip() or DEFAULTS.get(name, "")
    value = whole(text)
    if value is None or not low <= value <= high:
        raise RunError(f"{name}: expected a whole number from {low:,} to {high:,}, got {text[:40]!r}")
    return value


def _real(query: Mapping[str, str], name: str, low: float, high: float) -> float:
    text = query.get(name, "").strip() or DEFAULTS.get(name, "")
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise RunError(f"{name}: expected a number from {low:g} to {high:g}, got {text[:40]!r}")
    return value
