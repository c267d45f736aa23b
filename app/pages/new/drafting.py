"""What the New run page does with drafts, without components: begins, saves, loads and starts them."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable, Sequence

import attrs

from nnxdsl.config.core.serialization import to_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import NnxdslError, Problem

from ...markup import link
from ...state import Site
from ...store.drafts import Draft
from ...store.experiments import from_text, from_tree
from ...view import Done, Query, json_object
from .. import demo
from . import basics, form_texts

BEGINNINGS = ("demo", "preset", "from")  # parts of a query that a draft begins from


@attrs.frozen
class Opened:
    """A draft that is shown, with the experiment that it was copied from, and its own, None if it has problems."""

    draft: Draft
    base: Experiment
    experiment: Experiment | None
    problems: Sequence[Problem]

    @classmethod
    def of(cls, site: Site, name: str) -> Opened:
        """Loads a draft; an `NnxdslError` says why it cannot be opened."""
        draft = site.drafts.load(name)
        return cls(draft, from_tree(draft.base), *form_texts.read(draft.texts))


def beginning(site: Site, query: Query) -> tuple[Experiment, str, str] | None:
    """The experiment that a draft begins from, its name and its recipe; None if a query asks for none, or none yet.

    A `RunError` says why a recipe or run cannot be read.
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
    opened = None
    if not query.get("draft"):
        with contextlib.suppress(NnxdslError):  # the page says why
            opened = beginning(site, query)
    if opened is None:
        return None
    experiment, name, recipe = opened
    return _begun(site.drafts.new(form_texts.texts_of(experiment), to_dict(experiment), name, recipe))


def edited(site: Site, query: Query, _form: str) -> Done:
    """Creates a draft of what the first screen shows, with all settings."""
    experiment = basics.experiment(site, query)
    draft = site.drafts.new(form_texts.texts_of(experiment), to_dict(experiment), experiment.name)
    return _begun(draft, **dict.fromkeys(("model", "data", "method", *basics.NUMBERS), ""))


def _begun(draft: Draft, **more: str) -> Done:
    return Done(query={"draft": draft.id, **dict.fromkeys((*BEGINNINGS, "copied"), ""), **more})


def loaded(site: Site, query: Query, text: str) -> Done:
    """Creates a draft of a pasted text (SpecError); its changes are relative to the draft that was shown, if any."""
    experiment = from_text(text)
    texts = form_texts.texts_of(experiment)
    if not query.get("draft"):
        return _begun(site.drafts.new(texts, to_dict(experiment), "pasted text"))
    shown = site.drafts.load(query["draft"])
    return _begun(site.drafts.new(texts, shown.base, shown.base_name, shown.recipe), tab="")  # shown as Python


def origin(site: Site, name: str) -> str:
    """A draft for the browser, as JSON; empty if it cannot be opened, which the page then says."""
    try:
        draft = site.drafts.load(name)
    except NnxdslError:
        return ""
    return json.dumps({"draft": draft.id, "revision": draft.revision, "texts": draft.texts})


def saved(site: Site, form: str) -> Draft | None:
    """Saves the form of a browser tab; None if it is of no draft, a `RunError` if that is no more."""
    values = json_object(form)
    name, texts = values.get("draft"), values.get("texts")
    if not isinstance(texts, dict) or not isinstance(name, str):
        return None
    plain = {path: text for path, text in texts.items() if isinstance(text, str)}
    tab, revision = str(values.get("tab", "")), str(values.get("revision", ""))
    return site.drafts.change(name, form_texts.completed(plain), tab, revision)


def answer(site: Site, form: str) -> str:
    """Saves the form of a browser tab, and says what was saved where, as JSON; a copy is shown instead of the draft."""
    values, draft = json_object(form), None
    with contextlib.suppress(NnxdslError):  # the page says why
        draft = saved(site, form)
    name = None if draft is None else draft.id
    query = {} if name in (None, values.get("draft")) else {"draft": name, "copied": "1"}
    return json.dumps({"from": values.get("draft"), "count": values.get("count"), "draft": name, "query": query})


def require(site: Site, query: Query, form: str = "") -> tuple[Draft, Experiment]:
    """Saves the form, and returns the draft and its experiment; a `SpecError` has all problems."""
    draft = saved(site, form) or site.drafts.load(query.get("draft", ""))
    return draft, form_texts.experiment_of(draft.texts)


def launch(site: Site, query: Query, form: str) -> Done:
    """Launches the draft's run, through the recipe's file if the draft was copied from a recipe."""
    return _started(site, site.launcher.launch, query, form)


def enqueue(site: Site, query: Query, form: str) -> Done:
    """Adds the draft's run to the queue."""
    return _started(site, site.launcher.enqueue, query, form)


def _started(site: Site, start: Callable[..., object], query: Query, form: str) -> Done:
    if query.get("draft"):
        draft, experiment = require(site, query, form)
        start(experiment, draft.recipe)
    else:
        start(experiment := basics.experiment(site, query))
    return Done(goto=link("/run", id=experiment.id))


def command(site: Site, draft: Draft, experiment: Experiment) -> str:
    """The command that Launch runs; a `RunError` if its recipe cannot be read (yet), or changed into this."""
    argv: tuple[str, ...] = ("nnxdsl", "run", f"{experiment.name}.py")
    if draft.recipe:
        argv = ("python", *site.presets.command(draft.recipe, experiment))
    return shlex.join((*argv, "--home", str(site.settings.home)))
