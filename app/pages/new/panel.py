"""The panel next to the form of a new run: problems, Python, changes, plan, import of text."""

from __future__ import annotations

import shlex
from urllib.parse import quote

from nnxdsl.config.core.codegen import render, to_python
from nnxdsl.config.core.serialization import diff, get, to_json
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import NnxdslError, Problem

from ...components.parts import copy_button, field_path, table, tabs
from ...html import Html, join, tag
from ...page import Ask
from ...state import Site
from ...store.drafts import Draft
from ...store.experiments import from_tree
from . import form_texts
from .plan import plan_tab

TABS = {"": "Python", "diff": "Changes", "plan": "Plan", "json": "JSON", "import": "Import"}


def panel(site: Site, ask: Ask, draft: Draft) -> Html:
    """Returns the tab in the query, below the list of problems."""
    experiment, problems = form_texts.read(draft.texts)
    tab = ask.query.get("tab", "")
    tab = tab if tab in TABS else ""
    listed = {problem.path: problem.message for problem in problems}
    if tab == "import":
        body: Html = import_form()
    elif experiment is None:
        body = tag("p", "Fix the problems above to see this tab.", cls="muted")
    elif tab == "json":
        body = join(tag("div", copy_button("new-json"), cls="row end"), _code(to_json(experiment), "new-json"))
    elif tab == "diff":
        body = _changes(from_tree(draft.base), draft.base_name, experiment)
    elif tab == "plan":
        body = plan_tab(site, ask, experiment)
    else:
        body = _python(site, draft, experiment)
    query = {name: value for name, value in ask.query.items() if name in ("draft", "device")}
    names = {
        name: f"{text} ({_count(draft, experiment)})" if name == "diff" and experiment else text
        for name, text in TABS.items()
    }
    return tag(
        "section",
        _problems(problems),
        tabs("/new", query, names, tab, "Views of the draft"),
        body,
        cls="panel sticky",
        data_problems=listed,
    )


def _count(draft: Draft, experiment: Experiment) -> int:
    return len(diff(from_tree(draft.base), experiment))


def _problems(problems: list[Problem]) -> Html | None:
    if not problems:
        return None
    lines = [
        tag(
            "li",
            tag("a", problem.path, href=f"#f-{problem.path}", data_field=problem.path) if problem.path else None,
            f": {problem.message}" if problem.path else problem.message,
        )
        for problem in problems[:20]
    ]
    return tag(
        "div",
        tag("h2", f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'}"),
        tag("ul", lines),
        cls="problems",
        role="alert",
    )


def _code(text: str, name: str) -> Html:
    return tag("pre", tag("code", text, id=name), tabindex=0, cls="code")


def _python(site: Site, draft: Draft, experiment: Experiment) -> Html:
    text = to_python(experiment)
    name = f"{experiment.name}.py"
    save = tag("a", "Download", href=_data(text, "text/x-python"), download=name, cls="button small")
    return join(
        tag("div", copy_button("new-python"), save, cls="row end"),
        _code(text, "new-python"),
        _command(site, draft, experiment, name),
    )


def _command(site: Site, draft: Draft, experiment: Experiment, name: str) -> Html:
    """Shows the command that Launch runs; or why the recipe's file cannot be started with these fields."""
    words: tuple[str, ...] = ("nnxdsl", "run", name)
    if draft.recipe:
        try:
            words = ("python", *site.presets.command(draft.recipe, experiment))
        except NnxdslError as error:
            job = site.presets.job(draft.recipe)
            is_reading = job is not None and not job.is_over
            return tag("p", str(error), cls="small", role="status", data_tick="1" if is_reading else None)
    text = shlex.join((*words, "--home", str(site.settings.home)))
    return tag(
        "p", "In a terminal: ", tag("code", text, id="new-command"), " ", copy_button("new-command"), cls="small"
    )


def _data(text: str, kind: str) -> str:
    return f"data:{kind};charset=utf-8,{quote(text)}"


def _changes(base: Experiment, name: str, experiment: Experiment) -> Html:
    changes = diff(base, experiment)
    same = base.id == experiment.id
    verdict = "Same run id: only placement or cadence differ." if same else "This is a different run id."
    if not changes:
        return tag("p", f"Nothing differs from {name}.", cls="muted")
    rows = [
        (tag("a", field_path(path), href=f"#f-{path}", data_field=path), render(get(base, path)), render(value))
        for path, value in changes.items()
    ]
    return join(
        table(("Field", "was", "is"), rows, f"{len(rows)} differences from {name}"), tag("p", verdict, cls="muted")
    )


def import_form() -> Html:
    """Returns a form for Python or JSON, which is parsed and never executed."""
    return tag(
        "form",
        tag(
            "label",
            "Python as ",
            tag("code", "nnxdsl show FILE --python"),
            " prints it, or JSON. It is parsed, never executed.",
            for_="import-text",
        ),
        tag(
            "textarea",
            rows=14,
            name="text",
            id="import-text",
            spellcheck="false",
            placeholder="from nnxdsl import ...\n\nexperiment = Experiment(...)",
        ),
        tag(
            "label",
            "or read a file ",
            tag("input", type="file", accept=".py,.json,.txt", data_reads="import-text"),
            cls="small",
        ),
        tag("div", tag("button", "Load", type="submit", cls="button primary"), cls="row end"),
        data_do="new.load",
    )
