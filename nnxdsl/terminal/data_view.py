"""Prints statistics of a dataset: counts, lengths, and some rows as runs of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nnxdsl.terminal.display import clean
from nnxdsl.terminal.plan_format import pluralize
from nnxdsl.terminal.row_counts import row_counts
from nnxdsl.terminal.sparkline import sparkline
from nnxdsl.terminal.tables import Column, gap, grid_of, line, show_section, show_table

WIDTH = 40
"""Columns of the longest bar."""
SHOWN = 400
"""Characters of a run of tokens that are shown from its beginning; a quarter of them from its end."""


def show_data(path: str, data: Mapping[str, Any], console: Console) -> None:
    """Print the statistics of a source, or of a mixture; `path` is their place in an experiment."""
    report = data["report"]
    console.print(line(f"{path}: {data['kind']} of {report['source']}", "bold"))
    console.print(grid_of(facts(data)))
    gap(console)
    show_table(_length_columns(data), console)
    _show_histogram(data, console)
    for example in data["examples"]:
        _show_example(example, console)
    if data.get("sources"):
        show_section(f"sources, with weights of {data['unit']}", _source_columns(data["sources"]), console)
        for source in data["sources"]:
            gap(console)
            show_data(f"{path}, source {source['name']}", source, console)
    if data.get("refused"):
        gap(console)
        console.print(grid_of([("! refused", data["refused"])], style="red"))


def show_source(source: Mapping[str, Any], console: Console) -> None:
    """Print the columns and counts of a source, independent of a loader."""
    bad = sum(source["bad"].values())
    console.print(line(f"{source['source']}: {pluralize(source['rows'], 'row')}", "bold"))
    kind = source["kind"] or "not recognised; name the columns with columns={'theirs': 'ours'}"
    facts = [("read as", kind)] if source["rows"] else []
    facts += [("columns read", source["layout"])] if source["layout"] else []
    facts += [("unreadable", f"{count:,} {kind}: {source['first'][kind]}") for kind, count in source["bad"].items()]
    facts += [("tokens", source["tokens"])] if source.get("tokens") else []
    facts += [("! refused", source["refused"])] if source["refused"] else []
    console.print(grid_of(facts))
    if source["columns"]:
        columns, readable = source["columns"], max(1, source["rows"] - bad)
        gap(console)
        show_table(
            [
                Column("column", [column["name"] for column in columns], least=12),
                Column("rows", [f"{column['rows']:,}" for column in columns], right=True),
                Column("share", [f"{column['rows'] / readable:.1%}" for column in columns], rank=2, right=True),
                Column("values", [", ".join(column["kinds"]) for column in columns], least=8),
                Column("characters", [f"{column['characters']:,}" for column in columns], right=True),
                Column(
                    "a row", [f"{column['characters'] / column['rows']:.1f}" for column in columns], rank=1, right=True
                ),
            ],
            console,
        )


def facts(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The statistics of a dataset as pairs of a name and a text."""
    report, tokens, targets = data["report"], data["tokens"], data["tokens_with_loss"]
    facts = [("columns", ", ".join(data["columns"]))] if data["columns"] else []
    facts += [("layout", report["layout"])] if report["layout"] else []
    facts += [("tokenizer", data["tokenizer"])] if data.get("tokenizer") else []
    facts += [(count.label, f"{count.rows:,}  {count.note}".rstrip()) for count in row_counts(report, data["use"])]
    if data["rows"] != report["accepted"]:
        facts.append(("examples", f"{data['rows']:,}: a preference pair is two labelled answers"))
    odd = report["odd"].items()
    facts += [("odd, accepted", f"{count:,}  {kind} (first: {report['first'][kind]})") for kind, count in odd]
    cut = ", ".join(f"{part} of {pluralize(count, 'row')}" for part, count in report["cut"].items())
    facts += [("truncated", cut)] if cut else []
    unread = ", ".join(f"{name} ({rows:,})" for name, rows in report["unread"].items())
    facts += [("not read", unread)] if unread else []
    loss = "" if targets is None else f", {targets:,} with loss ({targets / max(1, tokens):.1%})"
    facts.append(("tokens", f"{tokens:,}{loss}"))
    if data.get("padding"):
        padding = data["padding"]
        facts.append(
            ("padding", f"{padding['share']:.1%} of batches of {padding['batch_size']:,} rows ({padding['batching']})")
        )
    return facts


def _length_columns(data: Mapping[str, Any]) -> list[Column]:
    lengths = data["lengths"]
    names = ("min", "median", "p95", "max", "total")
    return [
        Column("tokens of a row", list(lengths), least=10),
        *(Column(name, [f"{statistics[name]:,}" for statistics in lengths.values()], right=True) for name in names),
        Column("min to max", [sparkline(one["histogram"]["counts"], WIDTH) for one in lengths.values()], rank=1),
    ]


def _show_histogram(data: Mapping[str, Any], console: Console) -> None:
    """Print how many rows have how many tokens in all."""
    name = next(reversed(data["lengths"]))
    histogram = data["lengths"][name]["histogram"]
    counts, start, width = histogram["counts"], histogram["start"], histogram["width"]
    gap(console)
    grid = Table.grid(padding=(0, 2))
    for justify in ("right", "right", "left"):
        grid.add_column(justify=justify, no_wrap=True)
    grid.add_row(Text(name, "dim"), Text("rows", "dim"))
    for index, count in enumerate(counts):
        first = start + index * width
        bins = f"{first:,}" if width == 1 else f"{first:,} to {first + width - 1:,}"
        grid.add_row(Text(bins), Text(f"{count:,}"), Text("█" * -(-WIDTH * count // max(counts)), "blue"))
    console.print(grid)


def _show_example(example: Mapping[str, Any], console: Console) -> None:
    """Print the runs of tokens of a row; what they are is written beside them and shown by colours."""
    gap(console)
    console.print(line(example["row"], "bold"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    for run in example["runs"]:
        state = "truncated" if run["cut"] else "loss" if run["loss"] else "no loss"
        style = {"truncated": "red strike", "loss": "green", "no loss": ""}[state]
        grid.add_row(
            Text(f"{run['part']}, {state}"), Text(f"{run['tokens']:,}"), Text().append(_shown(run["text"]), style)
        )
    console.print(grid)


def _shown(text: str) -> str:
    """The text with visible ends of lines, and without the middle of a long one."""
    head, tail = SHOWN, SHOWN // 4
    if len(text) > head + 2 * tail:
        text = f"{text[:head]} ... ({len(text) - head - tail:,} more characters) ... {text[-tail:]}"
    return clean(text).replace("\n", "↵\n").removesuffix("\n")


def _source_columns(sources: Sequence[Mapping[str, Any]]) -> list[Column]:
    return [
        Column("source", [source["name"] for source in sources], least=10),
        Column("share of rows", [f"{source['share']:.1%}" for source in sources], right=True),
        Column("rows", [f"{source['rows']:,}" for source in sources], right=True),
        Column("tokens", [f"{source['tokens']:,}" for source in sources], right=True),
        Column("epochs of the run", [f"{source['epochs']:.2f}" for source in sources], right=True),
    ]
