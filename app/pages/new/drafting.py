"""What the New run page does with drafts, without components: begins, saves, loads and starts them."""

from __future__ import annotations

import contextlib
import json
import shlex

import attrs

from nnxdsl.config.core.serialization import to_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import NnxdslError, SpecError

from ...html import link
from ...state import Site
from ...store.drafts import Draft
from ...store.experiments import from_text
from ...view import Done, Query, json_object
from .. import demo
from . import form_texts

BEGINNINGS = ("demo", "preset", "from")
"""Parts of a query that a draft begins from."""


def beginning(site: Site, query: Query) -> tuple[Experiment, str, str] | None:
    """The experiment that a draft begins from, its name and its recipe; None if a query asks for none, or none yet.

    Raises:
        RunError: there is no such recipe or run, or the app cannot read its experiment.
    """
    if query.get("demo"):
        return demo.written(site)[0], demo.NAME, ""
    if preset := query.get("preset"):
        experiment = site.presets.experiment(preset)
        return None if experiment is None else (experiment, f"experiments/{preset}.py", preset)
    run = query.get("from")
    return (site.experiment(run), run, site.launcher.recipe_of(run)) if run else None


def begin(site: Site, query: Query) -> Done | None:
    """Creates the draft that a query asks for, if it can be read by now."""
    found = None
    if not query.get("draft"):
        with contextlib.suppress(NnxdslError):  # the page says why
            found = beginning(site, query)
    if found is None:
        return None
    experiment, name, recipe = found
    return begun(site.drafts.new(form_texts.texts_of(experiment), to_dict(experiment), name, recipe))


def begun(draft: Draft) -> Done:
    """Shows a new draft."""
    return Done(query={"draft": draft.id, **dict.fromkeys((*BEGINNINGS, "copied"), "")})


def loaded(site: Site, query: Query, text: str) -> Done:
    """Creates a draft of a pasted text; its changes are relative to the draft that was shown, if any.

    Raises:
        SpecError: what is wrong in the text, by line.
    """
    experiment = from_text(text)
    texts = form_texts.texts_of(experiment)
    if not query.get("draft"):
        return begun(site.drafts.new(texts, to_dict(experiment), "pasted text"))
    shown = site.drafts.load(query["draft"])
    done = begun(site.drafts.new(texts, shown.base, shown.base_name, shown.recipe))
    return attrs.evolve(done, query={**done.query, "tab": ""})  # what was read is shown as Python


# The form, as the browser has it


def origin(site: Site, name: str) -> str:
    """A draft for the browser, as JSON; empty if it cannot be opened, which the page then says."""
    try:
        draft = site.drafts.load(name)
    except NnxdslError:
        return ""
    return json.dumps({"draft": draft.id, "revision": draft.revision, "texts": draft.texts})


def saved(site: Site, form: str) -> Draft | None:
    """Saves the form of a browser tab; None if it is of no draft.

    Raises:
        RunError: there is no such draft (any more).
    """
    found = json_object(form)
    texts = found.get("texts")
    if not isinstance(texts, dict) or not isinstance(found.get("draft"), str):
        return None
    plain = {path: text for path, text in texts.items() if isinstance(text, str)}
    completed = form_texts.completed(plain)
    return site.drafts.change(found["draft"], completed, str(found.get("tab", "")), str(found.get("revision", "")))


def answer(site: Site, form: str) -> str:
    """Saves the form of a browser tab, and says what was saved where, as JSON."""
    try:
        draft = saved(site, form)
    except NnxdslError:
        draft = None  # the page says why
    found = json_object(form)
    given = {"from": found.get("draft"), "saved": found.get("count")}
    return json.dumps({**given, "draft": None if draft is None else draft.id})


# What it becomes


def require(site: Site, query: Query, form: str = "") -> tuple[Draft, Experiment]:
    """Saves the form, and returns the draft and its experiment.

    Raises:
        SpecError: all problems of the draft.
    """
    draft = saved(site, form) or site.drafts.load(query.get("draft", ""))
    experiment, problems = form_texts.read(draft.texts)
    if experiment is None:
        raise SpecError(problems, "this draft")
    return draft, experiment


def launch(site: Site, query: Query, client: str, form: str) -> Done:
    """Launches the draft's run, through the recipe's file if the draft was copied from a recipe."""
    draft, experiment = require(site, query, form)
    site.launcher.launch(experiment, client, draft.recipe)
    return Done(goto=link("/run", id=experiment.id))


def enqueue(site: Site, query: Query, client: str, form: str) -> Done:
    """Adds the draft's run to the queue."""
    draft, experiment = require(site, query, form)
    site.launcher.enqueue(experiment, client, draft.recipe)
    return Done(goto=link("/run", id=experiment.id))


def command(site: Site, draft: Draft, experiment: Experiment) -> str:
    """The command that Launch runs.

    Raises:
        RunError: The recipe cannot be read (yet), or its file cannot be started with these fields.
    """
    words: tuple[str, ...] = ("nnxdsl", "run", f"{experiment.name}.py")
    if draft.recipe:
        words = ("python", *site.presets.command(draft.recipe, experiment))
    return shlex.join((*words, "--home", str(site.settings.home)))
