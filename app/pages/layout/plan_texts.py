"""A plan as Markdown and tables: whether it fits, warnings, facts, rules, activations, the compiler's report.

Works on the output of `nnxdsl plan --json` only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from nnxdsl.terminal.plan_format import format_axes, format_mesh, format_names, format_shape, format_spec
from nnxdsl.terminal.plan_view import facts as plan_facts

from ...formatting import duration, number, sentence, size
from ...markup import plain
from .arrays import Plan

TIGHT = 0.9  # fraction of usable memory above which a plan that fits gets a warning: estimates are accurate to 10 %
RECOMPUTED_TO_FIT = "first that fits"  # why a plan has chosen a policy that recomputes activations

SEARCH = (
    "Try a mesh with more devices, a device with more memory, a smaller micro-batch, an adapter or quantization; in a "
    "terminal, `nnxdsl plan FILE --device NAME --count N --search` lists meshes on which it fits."
)

FIGURES = {
    "arguments": "inputs of the step",
    "outputs": "outputs of the step",
    "aliased": "outputs in buffers of donated arguments",
    "temporaries": "temporary buffers within the step",
    "allocated": "arguments + outputs - aliased + temporaries",
    "host": "in host memory",
    "peak": "peak memory, as XLA reports it",
}
"""Meanings of XLA's figures for one device."""

WHERE = {"in_loop": "in a loop", "conditional": "in a branch: at most"}
STEP_TIMES = {"compute": "compute", "memory": "memory", "links": "communication"}


def summary(plan: Plan) -> str:
    """Returns Markdown: the mesh, the verdict and the warnings."""
    return "\n\n".join(filter(None, [f"### {format_mesh(plan['mesh'])}", verdict(plan), warnings(plan)]))


def verdict(plan: Plan) -> str:
    """Returns whether a plan fits, with a warning if the margin is smaller than the error of the estimate."""
    verdict, device = plan["verdict"], plan["device"]
    if not verdict:
        where = plain(device["description"]) if device else "no device selected"
        return f"**{size(plan['bytes_per_device'])}** on each device; the device's memory is unknown ({where})."
    share, (message, _, remedy) = verdict["share"], verdict["message"].partition("; ")
    text = f"{share:.1%} of the usable memory of {plain(device['description'])}."
    sign = "✘" if not verdict["fits"] else "⚠" if share > TIGHT else "✔"
    if not verdict["fits"]:
        is_setting = remedy and not remedy.startswith("--")
        text += f" {plain(sentence(remedy))}." if is_setting else f" {SEARCH}"
    elif share > TIGHT:
        text += " That is tight: the memory of activations is an estimate, accurate to 10 %."
    if verdict["fits"] and plan["remat_why"] == RECOMPUTED_TO_FIT:
        text += f" Activations are recomputed in part to fit: memory.remat={plan['remat']}."
    return f"**{sign} {plain(message)}**\n\n{text}"


def warnings(plan: Plan) -> str:
    """Returns the plan's warnings as a list."""
    if not plan["warnings"]:
        is_tight = plan["verdict"] and plan["verdict"]["share"] > TIGHT  # the verdict is a warning already
        return "" if is_tight else "✔ No warnings."
    return "\n".join(
        f"- **! {plain(one['kind'])}** {plain(one['path'])}: {plain(one['message'])}" for one in plan["warnings"]
    )


def facts(plans: Sequence[Plan]) -> pd.DataFrame:
    """Returns facts of the run, a column for each plan."""
    columns = [dict(_facts(plan)) for plan in plans]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "-") for column in columns)] for name in names]
    return pd.DataFrame(rows, columns=["fact", *(("value", "on the second mesh")[: len(plans)])])


def _facts(plan: Plan) -> list[tuple[str, str]]:
    rows = list(plan_facts(plan))
    if plan["activations"]:
        policies = ", ".join(f"{policy} {size(count)}" for policy, count in plan["activations"].items())
        rows += [("activations by policy", policies), ("policy", f"{plan['remat']}: {plan['remat_why']}")]
    if seconds := plan["step_seconds"]:
        parts = ", ".join(f"{label} {_seconds(seconds[key])}" for key, label in STEP_TIMES.items())
        rows.append(("estimated step time, for ranking", f"{_seconds(seconds['step'])}: {parts}"))
    return rows


def _seconds(value: float) -> str:
    return duration(value) if value >= 10 else f"{number(value)} s" if value >= 0.01 else f"{value * 1000:.3g} ms"


def rules(plans: Sequence[Plan]) -> pd.DataFrame:
    """Returns the sharding rules in order; those of the second mesh below, if they are others."""
    different = plans[:1] if all(plan["rules"] == plans[0]["rules"] for plan in plans) else plans
    rows = [
        [f"#{number}", logical, format_axes(axes), format_mesh(plan["mesh"])]
        for plan in different
        for number, (logical, axes) in enumerate(plan["rules"])
    ]
    return pd.DataFrame(rows, columns=["rule", "logical axis", "mesh axes", "mesh"]).iloc[:, : 2 + len(different)]


def activations(plans: Sequence[Plan]) -> pd.DataFrame:
    """Returns the activations of one micro-batch that have logical axes, on each mesh."""
    tables = [_flows(plan.get("flows") or ()) for plan in plans]
    if len(tables) == 1 or tables[0].empty or tables[1].empty:
        return tables[0]
    second = tables[1].drop_duplicates(["axes", "shape"])
    return tables[0].merge(second, "left", ["axes", "shape"], suffixes=("", ", second mesh")).fillna("-")


def _flows(flows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    rows = [
        {
            "axes": format_names(flow["axes"]),
            "shape": format_shape(flow["shape"]),
            "partition": format_spec(flow["spec"]),
            **({"on a device": format_shape(flow["device_shape"])} if "device_shape" in flow else {}),
        }
        for flow in flows
    ]
    return pd.DataFrame(rows)


# The compiler's report


def compiled(plan: Plan) -> str:
    """Returns Markdown: whether the compiled step fits, compared with the plan, and what compiled it."""
    report = plan["compiled"]
    if not report:
        return "XLA returned no report."
    if report["problem"]:
        return f"**✘ {plain(report['problem'])}**"
    times = [report[key] for key in ("lower_seconds", "compile_seconds")]
    lowered, compiled = ["an unknown time" if one is None else f"{one:.1f} s" for one in times]
    took = f"lowered in {lowered}, compiled in {compiled}{' (cached report)' if report['cached'] else ''}"
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    made = f"{report['count']} x {report['device']}, {report['topology']}; {took}; {versions}"
    none = "No collectives." if report["collectives"] == [] else ""
    return "\n\n".join(filter(None, [_compiled_verdict(plan, report), none, plain(made)]))


def _compiled_verdict(plan: Plan, report: Mapping[str, Any]) -> str:
    if not report["memory"]:
        return "The step compiles. XLA reports no memory figures on this platform."
    planned, needs, usable = plan["bytes_per_device"], report["memory"]["allocated"], report["usable"]
    off = f"; the plan estimates {size(planned)}, {planned / needs - 1:+.1%}" if needs else ""
    share = needs / usable if usable else 0
    sign = "✘ it does not fit" if share > 1 else "⚠ it fits, with little room" if share > TIGHT else "✔ it fits"
    return f"**{sign}: XLA needs {size(needs)}{f' of {size(usable)} usable' if usable else ''}{off}.**"


def compiled_tables(plan: Plan) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Returns XLA's figures of memory, the collectives of one step, and the compiled sharding of activations."""
    report = plan["compiled"] or {}
    memory = report.get("memory") or {}
    figures = [[key, size(memory[key]), label] for key, label in FIGURES.items() if memory.get(key) is not None]
    collectives = [
        {
            "collective": one["kind"],
            "devices": one["group"] or "-",
            "where": " ".join(label for name, label in WHERE.items() if one[name]) or "-",
            "times": number(one["count"]),
            "bytes": size(one["bytes"]),
        }
        for one in report.get("collectives") or ()
    ]
    figures_table = pd.DataFrame(figures, columns=["figure", "bytes", "meaning"])
    return figures_table, pd.DataFrame(collectives), _flows(report.get("flows") or ())
