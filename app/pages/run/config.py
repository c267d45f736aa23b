"""The experiment of a run as Python, and its differences from a recipe or another run."""

from __future__ import annotations

from typing import Any

from nnxdsl.config.core.codegen import render, to_python
from nnxdsl.config.core.serialization import diff, get
from nnxdsl.errors import NnxdslError, SpecError
from nnxdsl.runs.run_dir import RunDirectory

from ...components.parts import copy_button, field_path, table
from ...html import Html, join, link, tag
from ...page import Ask
from ...state import Site
from ...store.experiments import stored
from ...store.index import Row


def config(site: Site, directory: RunDirectory, row: Row, ask: Ask) -> Html:
    """Returns the Config tab."""
    experiment = stored(directory.path / "experiment.json")
    if experiment is None:
        source = (directory.path / "experiment.py").read_text(encoding="utf-8")[:200_000]
        note = "It names classes of another package, which the app does not import; this is the stored file."
        return join(tag("p", note, cls="notice"), tag("pre", source))
    compared = ask.query.get("with", "")
    others = [("preset", name) for name in site.presets.names()] + [
        ("run", one.id) for one in site.index.rows()[:50] if one.id != row.id
    ]
    options = [tag("option", "nothing", value="")]
    options += [
        tag("option", f"{kind} {name}", value=f"{kind}:{name}", selected=f"{kind}:{name}" == compared)
        for kind, name in others
    ]
    form = tag(
        "form", tag("label", "Differences from ", tag("select", options, name="with")), data_query=True, cls="row"
    )
    saves = [
        tag("a", name, href=link("/download", run=row.id, file=name), download=True, cls="button small")
        for name in ("experiment.py", "experiment.json", "metrics.jsonl", "metrics.csv")
    ]
    return join(
        tag("div", form, tag("div", copy_button("run-python", "Copy Python"), saves, cls="row"), cls="row between"),
        _differences(site, compared, experiment),
        tag("pre", tag("code", to_python(experiment), id="run-python"), tabindex=0),
    )


def _differences(site: Site, compared: str, experiment: Any) -> Html | None:
    kind, _, name = compared.partition(":")
    if not name:
        return None
    try:
        if kind == "preset":
            other = site.presets.experiment(name)
            if other is None:
                job = site.presets.job(name)
                wrong = job.error if job is not None and job.error else "The recipe is still being read."
                return tag("p", wrong, cls="notice", data_tick="1")
        else:
            other = stored(site.run(name).path / "experiment.json")
            if other is None:
                return tag("p", f"{name} cannot be read by the app.", cls="notice")
        changes = diff(other, experiment)
    except (NnxdslError, SpecError) as error:
        return tag("p", str(error), cls="notice bad")
    if not changes:
        return tag("p", f"No differences from {name}.", cls="notice")
    rows = [(field_path(path), render(get(other, path)), render(value)) for path, value in changes.items()]
    return table(("Field", name, "this run"), rows, f"{len(rows)} differences from {name}")
