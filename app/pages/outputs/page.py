"""The Outputs page: policy against reference by answers, tokens and held-out pairs; a child process computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nnxdsl.errors import RunError

from ...components.parts import action, run_link, state_badge, tabs
from ...html import Html, join, link, tag
from ...page import Action, Answer, Ask, Page
from ...processes.outputs_worker import Request
from ...state import Site
from ...store.index import Row
from ...words import duration
from .. import demo
from .forms import form
from .generate import answers, vote_buttons
from .pairs import pairs
from .request import TABS, Chosen, chosen, other_runs, query_of, request, with_checkpoints
from .tokens import tokens

REGIONS = ("head", "form", "result")
SHOWN_RUNS = 30


def opened(site: Site, ask: Ask) -> Answer:
    """Returns the page for a query with cached results; it starts no computation."""
    here, rows = chosen(site, ask), with_checkpoints(site)
    if here.row is not None and here.row.id not in [row.id for row in rows]:
        rows = [here.row, *rows]
    if here.model is None:
        return Answer({"head": _head(site, here, rows), "form": join(), "result": _empty(site, here, rows, ask)})
    regions = {"head": _head(site, here, rows), "form": _form(site, here, ask), "result": _result(site, here, ask)}
    return Answer(regions)


def ticked(site: Site, ask: Ask) -> Answer:
    """Updates the progress; forms are not replaced, since the user may be typing."""
    here = chosen(site, ask)
    if here.model is None:
        return Answer()
    return Answer({"result": _result(site, here, ask)})


def submitted(site: Site, ask: Ask) -> Answer:
    """Submits a form's request to the child process."""
    here = chosen(site, ask)
    if here.model is None:
        return Answer(notice="Choose a run that has a checkpoint.", bad=True)
    query = query_of(ask, here.tab)
    given = request(site, here.tab, query)
    if given is None:
        needed = {"": "a prompt", "tokens": "a text", "pairs": "held-out pairs"}[here.tab]
        return Answer(notice=f"This needs {needed}: enter it, or choose a held-out row.", bad=True)
    found = site.answers.ask(here.model, given)
    query = {**query_of(ask, here.tab, found.key), **here.query}
    moved = Ask({**query}, ask.payload, ask.client)
    return Answer({"result": _result(site, here, moved)}, query=link("", **query).lstrip("?"))


def cancelled(site: Site, ask: Ask) -> Answer:
    """Cancels the request."""
    site.answers.cancel(ask.text("key"))
    return Answer({"result": _result(site, chosen(site, ask), ask)}, notice="Cancelled.")


def voted(site: Site, ask: Ask) -> Answer:
    """Records a vote, and reveals which model gave the answer."""
    here, key = chosen(site, ask), ask.text("key")
    request = site.answers.find(key)
    if request is None or request.result is None:
        return Answer(notice="This answer is no longer stored; generate it again.", bad=True)
    whose = site.votes.add(request, ask.text("choice"))
    message = "Recorded: no difference." if whose == "tie" else f"Recorded: you preferred {_whose(request, whose)}."
    return Answer({"result": _result(site, here, ask)}, notice=message)


def _whose(request: Request, side: str) -> str:
    assert request.result is not None
    return (
        f"the policy, step {request.model.step}" if side == "policy" else f"the other side, {request.result['against']}"
    )


# Head


def _head(site: Site, here: Chosen, rows: list[Row]) -> Html:
    title = tag("h1", "Outputs")
    if not rows:
        return title
    run = "" if here.row is None else here.row.id
    runs = [tag("option", "choose a run", value="")] if here.model is None else []
    runs += [tag("option", row.id, value=row.id, selected=row.id == run) for row in rows]
    parts: list[Html] = [tag("label", "Run ", tag("select", runs, name="run"))]
    if here.row is not None and here.model is not None:
        every = [*here.steps, 0]
        steps = [tag("option", _step(one), value=one, selected=one == here.step) for one in every]
        others = [tag("option", "its reference", value="reference", selected=here.against == "reference")]
        others += [
            tag("option", f"the policy at step {_step(one)}", value=one, selected=str(one) == here.against)
            for one in every
            if one != here.step
        ]
        runs_of_it = other_runs(site, here)
        if runs_of_it:
            named = [tag("option", text, value=value, selected=value == here.against) for value, text in runs_of_it]
            others.append(tag("optgroup", named, label="another run of this model"))
        parts.append(tag("label", "Policy at step ", tag("select", steps, name="step")))
        parts.append(tag("label", "against ", tag("select", others, name="against")))
        parts.append(tag("span", state_badge(here.row.state), " ", run_link(here.row)))
    picker = tag("form", parts, cls="row controls outputs-pick", data_query=True)
    if here.model is None:
        return join(title, picker)
    spoken = dict(here.query)
    return join(title, picker, tabs("/outputs", spoken, TABS, here.tab, "Ways to compare"))


def _step(number: int) -> str:
    return f"{number:,}" if number else "0 (before training)"


def _form(site: Site, here: Chosen, ask: Ask) -> Html:
    query: Mapping[str, str] = ask.query
    request = site.answers.find(query["key"]) if query.get("key") else None
    if request is not None:  # its text is too long for the URL
        query = {**query, **{name: request.request[name] for name in ("prompt", "text") if name in request.request}}
    return form(site, here, query)


def _empty(site: Site, here: Chosen, rows: list[Row], ask: Ask) -> Html:
    run = ask.query.get("run", "")
    if here.row is not None:
        words = "This run has no checkpoint yet. The first one is saved after checkpoint.every_steps steps, or when "
        words += "the run is stopped with Stop and save; this page then compares its policy with its reference."
        return tag("div", tag("h2", here.row.id), tag("p", words), tag("p", run_link(here.row)), cls="empty")
    lost = tag("p", f"There is no run {run} here.") if run else None
    if not rows:
        words = "This page compares the policy of a run's checkpoint with its reference: answers side by side, "
        words += "per-token log-probs, and all held-out pairs. No run has saved a checkpoint yet."
        start = (
            demo.offered(site, "outputs.demo") if not site.index.rows() else tag("p", tag("a", "All runs", href="/"))
        )
        return tag("div", tag("h2", "Nothing to compare yet"), lost, tag("p", words), start, cls="empty")
    listed = [
        tag("li", tag("a", row.id, href=link("/outputs", run=row.id), cls="mono"), " ", state_badge(row.state))
        for row in rows[:SHOWN_RUNS]
    ]
    return tag(
        "div", lost, tag("p", "Choose a run that has a checkpoint:"), tag("ul", listed, cls="plain"), cls="empty"
    )


# Results


def _result(site: Site, here: Chosen, ask: Ask) -> Html:
    if here.model is None:
        return join()
    try:
        given = request(site, here.tab, ask.query)
        found = None if given is None else site.answers.find(site.answers.key(here.model, given))
    except RunError as error:
        return tag("p", str(error), cls="notice bad", role="alert")
    if found is None:
        return _nothing(site, here, ask)
    if not found.is_over:
        return _at_work(site, found)
    if found.state == "cancelled":
        return tag("p", "The request was cancelled.", cls="empty")
    if found.result is None:
        return join(
            tag("pre", found.error, cls="error", role="alert"),
            tag("p", "Change the request, or press the button to try again.", cls="muted"),
        )
    shown = _SHOWN[here.tab](site, here, found, ask.query)
    took = tag("p", f"Computed in {duration(found.seconds)} on {found.result.get('device', '-')}.", cls="small muted")
    return join(shown, took)


def _answers(site: Site, here: Chosen, found: Request, query: Mapping[str, str]) -> Html:
    assert found.result is not None
    is_blind = query.get("blind") == "1" and not site.votes.has(found.key)
    votes = vote_buttons(site, here, found, is_blind)
    return join(answers(here, found.key, found.result, is_blind, site.votes.order(found.key)), votes)


def _tokens(site: Site, here: Chosen, found: Request, query: Mapping[str, str]) -> Html:
    assert found.result is not None
    return tokens(found.key, found.result, query)


def _pairs(site: Site, here: Chosen, found: Request, query: Mapping[str, str]) -> Html:
    assert found.result is not None
    return pairs(here, found.key, found.result, query)


_SHOWN: dict[str, Callable[[Site, Chosen, Request, Mapping[str, Any]], Html]] = {
    "": _answers,
    "tokens": _tokens,
    "pairs": _pairs,
}


def _nothing(site: Site, here: Chosen, ask: Ask) -> Html:
    if site.settings.read_only:
        return tag("p", "This result is not cached, and a read-only app computes nothing.", cls="empty")
    if ask.query.get("key") or ask.query.get("from"):
        return tag("p", "The result of this link is not cached: press the button to compute it.", cls="empty")
    words = {
        "": "Enter a prompt or choose a held-out one, and press Generate. Both models sample with the same seed.",
        "tokens": "Choose a held-out row or enter a text: both models score it, and each token shows how much "
        "more likely it is under the policy.",
        "pairs": "Press Compute to see rewards and margins of every held-out pair.",
    }
    return tag("p", words[here.tab], cls="empty")


def _at_work(site: Site, found: Request) -> Html:
    stage = "waiting for an earlier request" if found.state == "waiting" else found.stage
    words = f"{stage[:1].upper()}{stage[1:]}, {duration(found.seconds)} so far."
    hint = None
    if found.seconds < 20:
        words_of_hint = (
            "The first request loads both models. A request with another prompt length, number of samples or "
        )
        words_of_hint += "max new tokens is compiled first; the same shapes are reused later."
        hint = tag("p", words_of_hint, cls="small muted")
    cancel = None if site.settings.read_only else action("Cancel", "outputs.cancel", data_key=found.key)
    return tag("div", tag("p", words, role="status"), hint, cancel, cls="panel at-work", data_tick="0.7")


PAGE = Page(
    name="outputs",
    path="/outputs",
    title="Outputs",
    regions=REGIONS,
    actions={
        "open": opened,
        "tick": ticked,
        "ask": Action(submitted, writes=True),
        "cancel": Action(cancelled, writes=True),
        "vote": Action(voted, writes=True),
        "demo": Action(demo.start, writes=True),
    },
)
