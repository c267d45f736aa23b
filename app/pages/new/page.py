"""The New run page: a form generated from the spec, with a panel of Python, changes, plan and problems."""

from __future__ import annotations

import attrs

from nnxdsl.config.core.serialization import to_dict
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import NnxdslError, Problem, SpecError

from ...components.parts import action
from ...html import Child, Html, join, link, tag
from ...page import Action, Answer, Ask, Page
from ...processes.jobs import Job
from ...state import Site
from ...store.drafts import Draft
from ...store.experiments import from_text, from_tree, stored
from ...words import whole
from .. import demo
from ..layout.request import NO_DEVICE, plan_job, why_not_compiled
from . import form, form_texts
from .panel import import_form, panel
from .plan import device_of, planned

COPIED = (
    "Another tab has changed this draft since this page was opened. Your version was saved as a new draft, which this "
    "page shows; the other tab keeps its version."
)
SHOWN = 20_000
"""Maximum number of characters shown of a damaged draft's file."""


def opened(site: Site, ask: Ask) -> Answer:
    """Returns the page for the draft in the query; creates a draft for `from` or `preset`, else offers a choice."""
    if site.settings.read_only:
        note = tag("p", "This app is read-only: runs cannot be started.", cls="empty")
        return _whole(tag("h1", "New run"), note, join())
    if ask.query.get("draft"):
        try:
            return _draft(site, ask, site.drafts.load(ask.query["draft"]))
        except Exception as error:  # its file may come from another version of the app: it can be discarded
            return _damaged(site, ask.query["draft"], error)
    if ask.query.get("demo"):
        return _begin(site, ask, demo.written(site)[0], demo.NAME)
    begun = ask.query.get("from") or ask.query.get("preset") or ""
    if not begun:
        return _choice(site)
    if ask.query.get("preset"):
        experiment = site.presets.experiment(begun)
        job = site.presets.job(begun)
        if experiment is None:
            return _whole(tag("h1", "New run"), _unread(begun, job), join())
        return _begin(site, ask, experiment, f"experiments/{begun}.py", begun)
    return _begin(site, ask, _of_run(site, begun), begun, site.launcher.recipe_of(begun))


def _damaged(site: Site, name: str, error: Exception) -> Answer:
    """Shows a draft that cannot be opened: the error, the file's contents, and a button to delete it."""
    message = str(error) if isinstance(error, NnxdslError) else f"{type(error).__name__}: {error}"
    text = site.drafts.text(name)
    stored = tag("details", tag("summary", "Contents of its file"), tag("pre", text[:SHOWN], tabindex=0), cls="panel")
    body = join(
        tag("p", f"This draft cannot be opened: {message}", cls="notice bad", role="alert"),
        tag("div", action("Discard the draft", "new.discard", "danger") if text else None, cls="row"),
        stored if text else None,
        tag("p", tag("a", "Start another draft", href="/new", cls="button")),
    )
    return _whole(tag("h1", "New run"), body, join())


def discard(site: Site, ask: Ask) -> Answer:
    """Deletes a draft."""
    site.drafts.discard(ask.query.get("draft", ""))
    return Answer(goto="/new", notice="The draft was discarded.")


def _unread(name: str, job: Job | None) -> Html:
    """Shows that a recipe is being read, or why it could not be."""
    if job is None:
        return tag("p", f"There is no recipe {name}.", cls="empty")
    if not job.is_over:
        return tag("p", "Reading the recipe ...", cls="empty", data_tick="0.5")
    wrong = tag("pre", job.error or job.state, cls="error", role="alert")
    return join(tag("p", f"experiments/{name}.py cannot be read:"), wrong, action("Retry", "new.reread"))


def reread(site: Site, ask: Ask) -> Answer:
    """Retries a recipe that could not be read."""
    site.presets.job(ask.query.get("preset", ""), again=True)
    return opened(site, ask)


def ticked(site: Site, ask: Ask) -> Answer:
    """Updates the panel while a plan is computed; the form is not sent again."""
    if not ask.query.get("draft"):
        return opened(site, ask)
    draft = site.drafts.load(ask.query["draft"])
    return Answer({"panel": panel(site, ask, draft)})


def change(site: Site, ask: Ask) -> Answer:
    """Saves a changed field, and updates the panel; a change of class also updates the form."""
    shapes = ask.text("changed").endswith(".type")
    return _edited(site, ask, form_texts.completed(ask.fields) if shapes else ask.fields, with_form=shapes)


def edit_items(site: Site, ask: Ask) -> Answer:
    """Adds or removes a member of a tuple of specs."""
    texts, path, index = ask.fields, ask.text("path"), ask.text("remove")
    spec = form_texts.items_at(texts, path)
    if spec is None:
        return Answer(notice=f"{path} has no members to edit; reload the page.", bad=True)
    if index:
        texts = form_texts.without_item(texts, path, -1 if (at := whole(index)) is None else at)
    else:
        texts = form_texts.with_item(texts, path, spec)
    return _edited(site, ask, form_texts.completed(texts), with_form=True)


def _edited(site: Site, ask: Ask, texts: dict[str, str], *, with_form: bool) -> Answer:
    draft = _saved(site, ask, texts)
    is_copy = draft.id != ask.query.get("draft")
    ask = attrs.evolve(ask, query={**ask.query, "draft": draft.id})
    regions = {"panel": panel(site, ask, draft), "head": _head(site, draft)}
    if with_form:
        regions["form"] = _form(draft)
    if not is_copy:
        return Answer(regions)
    return Answer(regions, notice=COPIED, query=link("", **ask.query).lstrip("?"))


def _saved(site: Site, ask: Ask, texts: dict[str, str]) -> Draft:
    return site.drafts.change(ask.query.get("draft", ""), texts, ask.text("tab"), ask.text("revision"))


def launch(site: Site, ask: Ask) -> Answer:
    """Launches the draft's run, through the recipe's file if the draft was copied from a recipe."""
    draft, experiment = _require(site, ask)
    site.launcher.launch(experiment, ask.client, draft.recipe)
    return Answer(goto=link("/run", id=experiment.id))


def queue(site: Site, ask: Ask) -> Answer:
    """Adds the draft's run to the queue."""
    draft, experiment = _require(site, ask)
    site.launcher.enqueue(experiment, ask.client, draft.recipe)
    return Answer(goto=link("/run", id=experiment.id))


def plan(site: Site, ask: Ask) -> Answer:
    """Starts the plan in a child process."""
    planned(site, _require(site, ask)[1], ask, start=True)
    return Answer(goto=link("/new", **{**ask.query, "tab": "plan", "planned": "1"}))


def load(site: Site, ask: Ask) -> Answer:
    """Creates a draft from a pasted text."""
    try:
        experiment = from_text(ask.fields.get("text", ""))
    except SpecError as error:
        listed = "\n".join(map(str, error.problems[:20]))
        return Answer(notice=f"This could not be loaded:\n{listed}", bad=True)
    draft_name = ask.query.get("draft")
    if not draft_name:
        return _begin(site, ask, experiment, "pasted text")
    draft = _saved(site, ask, form_texts.texts_of(experiment))
    answer = _draft(site, Ask({**ask.query, "draft": draft.id, "tab": ""}), draft)
    return Answer(answer.regions, notice="Loaded.", query=link("", draft=draft.id).lstrip("?"))


def _require(site: Site, ask: Ask) -> tuple[Draft, Experiment]:
    """Returns the draft and its experiment.

    Raises:
        SpecError: all problems of the draft.
    """
    draft = _saved(site, ask, ask.fields) if ask.fields else site.drafts.load(ask.query.get("draft", ""))
    experiment, problems = form_texts.read(draft.texts)
    if experiment is None:
        raise SpecError(problems, "this draft")
    return draft, experiment


def _of_run(site: Site, run: str) -> Experiment:
    """Loads the experiment of a run, or of a launch that was rejected."""
    newest = site.launcher.newest(run)
    if site.index.row(run) is not None:
        found = stored(site.run(run).path / "experiment.json")
    else:
        found = None if newest is None else stored(newest.directory / "experiment.json")
    if found is None:
        message = "cannot be read by the app: there is no such run, or it names classes of another package"
        raise SpecError([Problem("", f"{run} {message}")])
    return found


def _begin(site: Site, ask: Ask, experiment: Experiment, name: str, recipe: str = "") -> Answer:
    texts = form_texts.texts_of(experiment)
    draft = site.drafts.new(texts, to_dict(experiment), name, recipe)
    query = link("", draft=draft.id).lstrip("?")
    answer = _draft(site, Ask({"draft": draft.id}), draft)
    return Answer(answer.regions, query=query)


def _choice(site: Site) -> Answer:
    names = site.presets.names()
    cards = [
        tag(
            "a",
            tag("b", name),
            tag("span", f"experiments/{name}.py", cls="muted small"),
            href=link("/new", preset=name),
            cls="panel card",
        )
        for name in names
    ]
    runs = [
        tag("li", tag("a", row.id, href=link("/new", **{"from": row.id}), cls="mono")) for row in site.index.rows()[:8]
    ]
    cards = cards or [
        tag(
            "a",
            tag("b", "demo"),
            tag("span", "a tiny DPO run with its own data; takes a few minutes", cls="muted small"),
            href=link("/new", demo=1),
            cls="panel card",
        )
    ]
    none = tag("p", f"Recipes are read from {site.presets.place}.", cls="muted small")
    body = join(
        tag("p", "Start from a copy: a recipe, an earlier run, or pasted text."),
        tag("h2", "Recipes"),
        tag("div", cards, cls="grid"),
        None if names else none,
        join(tag("h2", "Earlier runs"), tag("ul", runs, cls="plain panel")) if runs else None,
        tag("h2", "Python or JSON"),
        tag("section", import_form(), cls="panel"),
    )
    return _whole(tag("h1", "New run"), body, join())


def _whole(head: Html, body: Html, panel: Html) -> Answer:
    return Answer({"head": head, "form": body, "panel": panel})


def _draft(site: Site, ask: Ask, draft: Draft) -> Answer:
    return _whole(_head(site, draft), _form(draft), panel(site, ask, draft))


def _head(site: Site, draft: Draft) -> Html:
    experiment, problems = form_texts.read(draft.texts)
    ready = experiment is not None
    exists = ready and site.index.row(experiment.id) is not None
    if not ready:
        note: Child = f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'} to fix first"
    elif exists:
        note = join(
            "this run exists already: ", tag("a", experiment.id, href=link("/run", id=experiment.id), cls="mono")
        )
    else:
        note = join("run id: ", tag("span", experiment.id, cls="mono"))
    buttons = [
        # With the form's fields, since the last edit may not have been sent yet.
        action("Plan", "new.plan", title="memory per device and shardings", disabled=not ready, data_form="spec-form"),
        action("Queue", "new.queue", title="starts when a slot is free", disabled=not ready, data_form="spec-form"),
        action("Launch", "new.launch", "primary", title="starts now", disabled=not ready, data_form="spec-form"),
    ]
    return tag(
        "div",
        tag("div", tag("h1", "New run"), tag("div", buttons, cls="row"), cls="row between"),
        tag("p", "Copied from ", tag("span", draft.base_name, cls="mono"), "; ", note, cls="muted"),
        data_revision=draft.revision,
    )


def _form(draft: Draft) -> Html:
    base = form_texts.texts_of(from_tree(draft.base))
    toggle = tag("label", tag("input", type="checkbox", id="only-changed"), " Changed fields only", cls="row small")
    return join(tag("div", toggle, cls="row end"), form.rendered(draft.texts, base, "new.change"))


def verify(site: Site, ask: Ask) -> Answer:
    """Starts ahead-of-time compilation of the step."""
    experiment, device = _require(site, ask)[1], device_of(ask) or NO_DEVICE
    why = why_not_compiled(experiment, device)
    if why is not None:
        return Answer(notice=why, bad=True)
    plan_job(site, experiment, device, start=True, compiled=True)
    return ticked(site, ask)


def cancel(site: Site, ask: Ask) -> Answer:
    """Cancels the compilation."""
    job = plan_job(site, _require(site, ask)[1], device_of(ask) or NO_DEVICE, start=False, compiled=True)
    if job is not None:
        site.compiles.cancel(job.key)
    return attrs.evolve(ticked(site, ask), notice="Ended.")


PAGE = Page(
    name="new",
    path="/new",
    title="New run",
    regions=("head", "form", "panel"),
    actions={
        "open": opened,
        "tick": ticked,
        "reread": reread,
        "change": Action(change, writes=True),
        "discard": Action(discard, writes=True),
        "edit_items": Action(edit_items, writes=True),
        "launch": Action(launch, writes=True),
        "queue": Action(queue, writes=True),
        "plan": Action(plan, writes=True),
        "verify": Action(verify, writes=True),
        "cancel": Action(cancel, writes=True),
        "load": Action(load, writes=True),
    },
)
