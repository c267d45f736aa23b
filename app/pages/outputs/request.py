"""The query of the Outputs page: a run, a checkpoint, and a request to models. Reads files of runs, no models."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import attrs

from nnxdsl.config.data import Text
from nnxdsl.data.loaders.files import RowError
from nnxdsl.data.loaders.sources import source_rows
from nnxdsl.errors import NnxdslError, RunError

from ...formatting import shortened, whole
from ...processes.outputs_worker import Model, Request
from ...processes.votes import SIDES, samples_of
from ...settings import Limits
from ...state import Site
from ...store.index import Row

FIELDS = {
    "generate": ("row", "prompt", "chat", "max", "samples", "temperature", "top_k", "top_p", "seed"),
    "tokens": ("row", "prompt", "chat", "text", "from", "side", "n"),
    "pairs": ("limit",),
    "chat": ("turns", "with", "max", "temperature", "top_k", "top_p", "seed"),
    "checkpoints": ("row", "prompt", "chat", "max", "temperature", "top_k", "top_p", "seed"),
}
"""Parts of the query that a request of each tab is made of."""

BETWEEN = "\n---\n"  # between two prompts of the query
MOST_PROMPTS = 16


class Number(NamedTuple):
    """A number in the query: label and explanation of its field, its bounds, and its text in a query without it."""

    label: str
    info: str
    low: int
    high: int
    initial: str = ""
    is_whole: bool = True


NUMBERS = {
    "max": Number("Max new tokens", "At most {high:,}", 1, 0, "64"),
    "samples": Number("Samples per model", "At most {high}; one if greedy", 1, 16, "1"),
    "temperature": Number("Temperature", "0 is greedy decoding", 0, 10, "0", is_whole=False),
    "top_k": Number("Top-k", "Empty for all tokens", 1, 10_000_000),
    "top_p": Number("Top-p", "Empty for all tokens", 0, 1, is_whole=False),
    "seed": Number("Seed", "The same for all models", 0, 2**31 - 1, "0"),
    "limit": Number("Max pairs", "The first ones of the held-out data; at most {high:,}", 1, 5_000, "500"),
}
"""The numbers that a query may have; an app has its own limit of new tokens."""

LONGEST_QUERY = 3_000  # maximum length of a text in the query; a longer text is referenced by the key of its answer
LISTED = 100  # number of held-out rows offered
OTHER_RUNS = 40  # number of other runs offered for comparison
RUNS = 200  # number of runs in the list of choices; others are reachable by URL


@attrs.frozen
class Chosen:
    """Run and checkpoint of a query."""

    row: Row | None  # None if the query names no run that exists
    steps: list[int]  # of its checkpoints, newest first
    step: int
    against: str  # "reference", another step, or `RUN@STEP` of another run
    tab: str

    @property
    def model(self) -> Model | None:
        """The two models to compare; None without a checkpoint."""
        return Model(self.row.id, self.step, self.against) if self.row is not None and self.steps else None

    @property
    def query(self) -> dict[str, str]:
        """The part of the query that all tabs share."""
        return {} if self.row is None else {"run": self.row.id, "step": str(self.step), "against": self.against}


def chosen(site: Site, query: Mapping[str, str]) -> Chosen:
    """Parses the query; a missing step means the newest."""
    row = site.index.row(query["run"]) if query.get("run") else None
    steps = [] if row is None else steps_of(row.path)
    chosen_step, against = whole(query.get("step", "")), query.get("against", "")
    step = chosen_step if chosen_step is not None and chosen_step in (*steps, 0) else (steps[0] if steps else 0)
    is_step = whole(against) in (*steps, 0) and whole(against) != step
    other = None if row is None else checkpoint_of(site, against)
    if not is_step and (row is None or other is None or other.run == row.id or not other.step):
        against = "reference"
    tab = query.get("tab", "")
    return Chosen(row, steps, step, against, tab if tab in FIELDS else "generate")


def checkpoint_of(site: Site, name: str) -> Model | None:
    """The policy of `RUN@STEP`, if the home has that run and checkpoint; step 0 is before training."""
    run, _, text = name.rpartition("@")
    row, step = site.index.row(run) if run else None, whole(text)
    steps = [] if row is None else steps_of(row.path)
    return Model(run, step) if steps and step is not None and step in (*steps, 0) else None


def other_runs(site: Site, here: Chosen) -> list[tuple[str, str]]:
    """The newest checkpoint of each run of the same model, as `(label, RUN@STEP)`; all of the run compared with."""
    if here.row is None:
        return []
    named, model = here.against.rpartition("@")[0], here.row.facts.get("model")
    others = [row for row in site.index.rows() if row.id == named or row.facts.get("model") == model]
    candidates = (
        (f"another run: {row.id}, step {step:,}", f"{row.id}@{step}")
        for row in others
        if row.id != here.row.id
        for step in steps_of(row.path)[: None if row.id == named else 1]
    )
    return list(itertools.islice(candidates, OTHER_RUNS))


def with_checkpoints(site: Site) -> list[Row]:
    """Newest runs that have a checkpoint."""
    return list(itertools.islice((row for row in site.index.rows() if steps_of(row.path)), RUNS))


def steps_of(run: Path) -> list[int]:
    """Steps of a run's committed checkpoints, newest first."""
    steps = [whole(file.parent.name) for file in (run / "checkpoints").glob("*/manifest.json")]
    return sorted((step for step in steps if step is not None), reverse=True)


def requests(site: Site, tab: str, query: Mapping[str, str]) -> list[dict[str, Any]]:
    """Parses the requests of the Generate tab: one for each held-out row, or else prompt; raises as `request`."""
    for name, between in (("key", ","), ("row", "\n"), ("prompt", BETWEEN)):
        if texts := [text for text in query.get(name, "").replace("\r\n", "\n").split(between) if text.strip()]:
            if len(texts) > MOST_PROMPTS:
                raise RunError(f"{name}: {len(texts)} prompts; expected at most {MOST_PROMPTS}")
            rest = {other: text for other, text in query.items() if other not in ("key", "row", "prompt")}
            submitted = [request(site, tab, {**rest, name: text}) for text in texts]
            return [one for one in submitted if one is not None]
    return []


def request(site: Site, tab: str, query: Mapping[str, str]) -> dict[str, Any] | None:
    """Parses a request of any tab but Chat; None if the query is incomplete, raises if a part of it is invalid."""
    limits = site.settings.limits
    do: dict[str, Any] = {"do": _does(tab)}
    query = {name: query[name] for name in (*FIELDS[tab], "key") if name in query}
    if stored := by_key(site, tab, query):
        return stored.request
    if tab == "pairs":
        return {**do, "limit": number(query, "limit", limits)}
    if query.get("from"):
        return _of_answer(site, query)
    needed = "text" if tab == "tokens" else "prompt"
    if query.get("row"):
        do["row"] = query["row"]
    elif query.get(needed):
        do["prompt"] = _text(query, "prompt", limits)
        do["chat"] = {"yes": True, "no": False}.get(query.get("chat", ""))
    else:
        return None
    if tab == "tokens":
        return do if "row" in do else {**do, "text": _text(query, "text", limits)}
    do |= sampling(query, limits)
    if tab == "checkpoints":
        return {**do, "sides": ["policy"]}
    samples = number(query, "samples", limits)
    return {**do, "samples": samples} if do["temperature"] and samples != 1 else do


def sampling(query: Mapping[str, str], limits: Limits) -> dict[str, Any]:
    """The settings of a sampler; raises if one is not a number or out of range."""
    names = {"max": "max_new_tokens", "temperature": "temperature", "seed": "seed"}
    if number(query, "temperature", limits):
        names |= {"top_k": "top_k", "top_p": "top_p"}
    values = {to: number(query, name, limits) for name, to in names.items()}
    return values | ({"top_p": None} if values.get("top_p") in (0.0, 1.0) else {})


def numbers(limits: Limits) -> dict[str, Number]:
    """The numbers that a query may have, by their names in it."""
    return NUMBERS | {"max": NUMBERS["max"]._replace(high=limits.new_tokens)}


def number(query: Mapping[str, str], name: str, limits: Limits) -> float | None:
    """Returns a number of the query; None if it is left out and may be, raises if it is no number or out of range."""
    field = numbers(limits)[name]
    text = query.get(name, "").strip() or field.initial
    if not text:
        return None
    try:
        value = whole(text) if field.is_whole else float(text)
    except ValueError:
        value = None
    if value is None or not field.low <= value <= field.high:
        kind = "a whole number" if field.is_whole else "a number"
        raise RunError(f"{name}: expected {kind} from {field.low:,} to {field.high:,}, got {text[:40]!r}")
    return value


def _does(tab: str) -> str:
    return tab if tab in ("tokens", "pairs") else "generate"


def by_key(site: Site, tab: str, query: Mapping[str, str]) -> Request | None:
    """The tab's request that the query names by its key, since its texts are too long for a URL; None without one."""
    request = site.answers.find(query.get("key", ""))
    if request is None or request.request["do"] != _does(tab):
        return None
    return request if ("messages" in request.request) == (tab == "chat") else None


def written(tab: str, fields: Mapping[str, str], key: str) -> dict[str, str]:
    """Returns what a submitted request writes into the query; an empty text removes a part."""
    changed = {name: fields.get(name, "") for name in FIELDS[tab]}
    initial = {name: field.initial for name, field in NUMBERS.items()}
    changed = {name: text if text.strip() and text != initial.get(name) else "" for name, text in changed.items()}
    if len(urlencode(changed)) > LONGEST_QUERY:
        return changed | {name: "" for name in ("prompt", "text", "turns") if name in changed} | {"key": key}
    return changed | {"key": ""}


def held_out_prompts(site: Site, run: str) -> list[tuple[str, str]]:
    """Returns the first held-out rows: the name of each in the run, and the beginning of its prompt."""
    try:
        if (held_out := site.answers.held_out(run)) is None:
            return []
        data, prefix = held_out
        field = data.field if isinstance(data, Text) else "prompt"
        rows = ((place, row) for place, row in source_rows(data) if not isinstance(row, RowError))
        return [(place.removeprefix(prefix), _begins(row, field)) for place, row in itertools.islice(rows, LISTED)]
    except NnxdslError:
        return []


def _begins(row: Mapping[str, Any], field: str) -> str:
    value = next((row[name] for name in (field, "messages", "conversations", "chosen") if row.get(name)), "")
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        chat = [message for message in value if isinstance(message, dict)]
        user = [message for message in chat if message.get("role", message.get("from")) in ("user", "human")] or chat
        value = user[-1].get("content", user[-1].get("value", ""))
    return shortened(" ".join(str(value).split()), 70)


def _of_answer(site: Site, query: Mapping[str, str]) -> dict[str, Any] | None:
    """Request to score exactly the tokens of a generated answer."""
    stored, side, place = site.answers.find(query["from"]), query.get("side", "policy"), whole(query.get("n", "1"))
    if stored is None or stored.result is None or side not in SIDES or "prompt_ids" not in stored.result:
        return None
    samples = dict(enumerate(samples_of(stored.result, side), start=1))
    if place not in samples:
        return None
    return {"do": "tokens", "prompt_ids": stored.result["prompt_ids"], "completion_ids": samples[place]["ids"]}


def _text(query: Mapping[str, str], name: str, limits: Limits) -> str:
    text = query.get(name, "").replace("\r\n", "\n")
    if len(text) > limits.prompt_characters:
        raise RunError(f"{name}: {len(text):,} characters; expected at most {limits.prompt_characters:,}")
    return text
