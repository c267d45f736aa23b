"""A plan on a terminal: what it takes, where each array lies, and why; knows the plan's plain values, no jax."""

from __future__ import annotations

import difflib
import fnmatch
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from nnxdsl.errors import RunError
from nnxdsl.terminal.display import clean
from nnxdsl.terminal.tables import Column, gap, grid_of, line, show_table

PALETTE = ("#8dd3c7", "#ffd92f", "#bebada", "#fb8072", "#80b1d3", "#fdb462", "#b3de69", "#fccde5", "#d9d9d9", "#bc80bd")
"""Light backgrounds; the text on them is black."""

FREE, RESERVED = "·", "▒"
"""In a bar of memory: what is free, and what the device's runtime keeps for itself."""

_SHOWN = 6


def show_plan(found: Mapping[str, Any], console: Console) -> None:
    """Print a whole plan: the facts, the memory, what is worth a word, every array, what was compiled.

    Args:
        found: The plan, as `nnxdsl plan --json` prints it.
        console: Where to; columns that do not fit are left out, and named.
    """
    console.print(line(found["id"], "bold"))
    console.print(grid_of(facts(found)))
    gap(console)
    _show_memory(found, console)
    for warning in found["warnings"]:
        gap(console)
        message = f"{warning['message']} [{warning['kind']}]"
        console.print(grid_of([("! warning", f"{warning['path']}: {message}")], style="yellow"))
    gap(console)
    console.print(line(f"{counted(len(found['arrays']), 'array')}, equal ones of all blocks in one row", "bold"))
    show_table(_array_columns(found["arrays"]), console)
    if found.get("flows"):
        gap(console)
        console.print(line("activations that the modules name, of one micro-batch", "bold"))
        show_table(_flow_columns(found), console)
    if found["compiled"]:
        gap(console)
        _show_compiled(found, console)


def _flow_columns(found: Mapping[str, Any]) -> list[Column]:
    """Each kind of activation, where the layout wants it, and where the compiler put it if it was asked."""
    rows = found["flows"]
    chosen = {
        json.dumps([one["axes"], one["shape"]]): one["spec"] for one in (found["compiled"] or {}).get("flows") or ()
    }
    columns = [
        Column("axes", [", ".join(axis or "-" for axis in row["axes"]) for row in rows], least=16),
        Column("shape", [shape_words(row["shape"]) for row in rows]),
        Column("partition", [spec_words(row["spec"]) for row in rows], least=10),
        Column("per device", [shape_words(row["device_shape"]) for row in rows], rank=1),
    ]
    if chosen:
        cells = [chosen.get(json.dumps([row["axes"], row["shape"]])) for row in rows]
        columns.append(
            Column("as compiled", ["not met" if cell is None else spec_words(cell) for cell in cells], least=10)
        )
    return columns


def facts(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a run does, as pairs of a name and words."""
    total, trained = found["parameters"]["total"], found["parameters"]["trainable"]
    at_once = f"{found['batch_size']:,} rows in {counted(found['microbatches'], 'micro-batch', 'es')}"
    rows = [
        ("steps", f"{found['steps']:,} of {at_once}: {found['rows']:,} rows"),
        ("tokens", f"at most {found['tokens_at_most']:,}"),
        ("parameters", f"{total:,}, trained {trained:,} ({trained / total:.2%})"),
        ("computed in", f"{found['compute']}, on {found['platform']}"),
        ("reference", str(found["reference"])),
        *([("quantization", str(words))] if (words := found.get("quantization")) else []),
        *([("outer", str(words))] if (words := found.get("outer")) else []),
        ("attention", str(found["attention"])),
        ("mesh", mesh_words(found["mesh"])),
    ]
    if found["slices"] > 1:
        over = " x ".join(f"{steps} along {axis}" for axis, steps in found["across"].items() if steps > 1)
        rows.append(("slices", f"{found['slices']}, slow links between them: {over}"))
    return rows


def mesh_words(mesh: Mapping[str, int]) -> str:
    """`fsdp=4 x tensor=2 (8 devices)`, without axes of size 1."""
    devices = 1
    for size in mesh.values():
        devices *= size
    axes = " x ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1)
    return f"{axes} ({devices:,} devices)" if axes else "one device"


def size(count: float) -> str:
    """Bytes in four significant digits at most: `512 B`, `1.5 KiB`, `72.04 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1000:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB" if count < 10_000 else f"{count:,.0f} TiB"


def counted(number: int, noun: str, plural: str = "s") -> str:
    """`1 array`, `2 arrays`."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def shape_words(shape: Sequence[int]) -> str:
    """`4x1152x6912`, or `scalar`."""
    return "x".join(map(str, shape)) or "scalar"


def entry_words(entry: str | Sequence[str] | None) -> str:
    """One entry of a partition, or the mesh axes of a rule: `fsdp`, `data+fsdp`, `-`."""
    return entry if isinstance(entry, str) else "+".join(entry or ()) or "-"


def spec_words(spec: Iterable[str | Sequence[str] | None]) -> str:
    """A partition: `-, fsdp, tensor`."""
    return ", ".join(map(entry_words, spec)) or "-"


# Memory


def _show_memory(found: Mapping[str, Any], console: Console) -> None:
    device, verdict, total = found["device"], found["verdict"], found["bytes_per_device"]
    here = [part for part in found["memory"] if part["memory"] == "device"]
    there = [part for part in found["memory"] if part["memory"] == "host"]
    if device and verdict:
        style, sign = ("bold green", "✔") if verdict["fits"] else ("bold red", "✘")
        share = f"{verdict['share']:.0%} of what is usable on {device['description']}"
        console.print(line(f"{sign} {verdict['message']}; {share}", style))
    budget = device if device and device["memory"] else None  # nobody knows how much a CPU has
    console.print(memory_bar(here, total, budget, min(console.width, 120)))
    gap(console)
    console.print(line("memory on each device", "bold"))
    show_table(_memory_columns(here, ("total", total)), console)
    if there:
        gap(console)
        console.print(line("memory of the host, for each device", "bold"))
        show_table(_memory_columns(there, ("total", found["host_bytes_per_device"])), console)
    if found["activations"]:
        gap(console)
        chosen = {found["remat"]: f" ({found['remat_why']})"}
        policies = [f"{policy} {size(count)}{chosen.get(policy, '')}" for policy, count in found["activations"].items()]
        console.print(line(f"activations by rematerialisation: {', '.join(policies)}"))


def memory_bar(parts: Sequence[Mapping[str, Any]], total: int, device: Mapping[str, Any] | None, width: int) -> Text:
    """A bar of a device's memory with a letter for each part, and its legend.

    Without a device, or where the parts are more than it has, the bar is as long as their sum.

    Args:
        parts: With `name` and `bytes`.
        total: The sum of their bytes.
        device: With `memory` and `usable`, in bytes.
        width: Columns of the terminal.
    """
    cells = max(width - 2, 8)
    whole = max(total, device["memory"] if device else 0, 1)
    signs, colours = letters([part["name"] for part in parts]), _cycle(len(parts))
    segments = [
        (sign, f"black on {colour}", part["name"], part["bytes"])
        for sign, colour, part in zip(signs, colours, parts, strict=True)
    ]
    if device:
        usable = min(device["usable"], device["memory"])
        free, reserved = max(usable - total, 0), device["memory"] - max(usable, min(total, device["memory"]))
        segments += [(FREE, "", "free", free), (RESERVED, "dim", "not usable", reserved)]
    segments = [segment for segment in segments if segment[3] > 0]
    text = Text("▕", end="")
    for (sign, style, _, _), count in zip(segments, _split(cells, [s[3] / whole for s in segments]), strict=True):
        text.append(sign * count, style)
    text.append("▏\n")
    if device:
        place = min(round(cells * device["usable"] / whole), cells - 1) + 1
        label = f"usable: {size(device['usable'])}"
        pointed = f"▲ {label}" if place + len(label) + 2 <= width else f"{label} ▲"
        before = place if pointed.startswith("▲") else place + 1 - len(pointed)
        text.append(" " * max(before, 0) + pointed + "\n")
    column = 0
    for sign, style, name, count in segments:
        words = f" {clean(name)} {size(count)}"
        if column and column + 3 + len(words) > width:
            text.append("\n")
            column = 0
        text.append("  " if column else "")
        text.append(sign, style)
        text.append(words)
        column += len(words) + 3
    return text


def letters(names: Sequence[str]) -> list[str]:
    """A letter of its own for each name: its first that is not taken yet, else any."""
    taken: list[str] = []
    for name in names:
        wanted = [*name.upper(), *"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"]
        taken.append(next((sign for sign in wanted if sign.isalnum() and sign not in taken), "?"))
    return taken


def _split(cells: int, shares: Sequence[float]) -> list[int]:
    """Whole cells for shares of a bar: one at least for each, the rest to those that lack most."""
    counts = [max(int(share * cells), 1) for share in shares]
    while counts and sum(counts) != cells:
        step = 1 if sum(counts) < cells else -1
        order = sorted(range(len(counts)), key=lambda index: step * (shares[index] * cells - counts[index]))
        movable = [index for index in order if counts[index] + step >= 1]
        if not movable:
            break
        counts[movable[-1]] += step
    return counts


def _cycle(count: int) -> list[str]:
    return [PALETTE[index % len(PALETTE)] for index in range(count)]


def _memory_columns(parts: Sequence[Mapping[str, Any]], last: tuple[str, int]) -> list[Column]:
    names = [*(part["name"] for part in parts), last[0]]
    return [
        Column("part", names),
        Column("size", [*(size(part["bytes"]) for part in parts), size(last[1])], right=True),
        Column("", [*(part["tag"] for part in parts), ""], rank=1),
        Column("reckoning", [*(part["how"] for part in parts), ""], rank=2, least=16),
    ]


# Arrays


def _array_columns(arrays: Sequence[Mapping[str, Any]]) -> list[Column]:
    """The table of arrays; those of a group that lie alike stand in one row."""
    alike: dict[str, list[Mapping[str, Any]]] = {}
    for array in arrays:
        alike.setdefault(_kind(array, array["part"]), []).append(array)
    kinds = list(alike.values())
    first = [kind[0] for kind in kinds]
    hosts = ["" if array["memory"] == "device" else f" ({array['memory']})" for array in first]
    return [
        Column("part", [f"{array['part']}{host}" for array, host in zip(first, hosts, strict=True)], rank=2, least=9),
        Column("path", [_name(kind) for kind in kinds], least=26),
        Column("axes", [", ".join(axis or "-" for axis in array["axes"]) for array in first], rank=9, spare=True),
        Column("shape", [shape_words(array["shape"]) for array in first], rank=4),
        Column("dtype", [array["dtype"] for array in first], rank=7),
        Column("partition", [spec_words(array["spec"]) for array in first], least=12),
        Column("per device", [shape_words(array["device_shape"]) for array in first], rank=3),
        Column("copies", [f"x{array['replicas']}" for array in first], rank=5, right=True),
        Column("rules", [", ".join(_won(array)) for array in first], rank=6, least=24),
        Column("arrays", [str(len(kind)) for kind in kinds], rank=8, right=True),
        Column("size", [size(sum(array["device_bytes"] for array in kind)) for kind in kinds], rank=1, right=True),
    ]


def _kind(array: Mapping[str, Any], *more: str) -> str:
    """What arrays that lie alike have in common."""
    names = ("group", "shape", "dtype", "axes", "spec", "device_shape", "replicas", "memory", "why")
    return json.dumps([*more, *(array[name] for name in names)])


def _name(kind: Sequence[Mapping[str, Any]]) -> str:
    return kind[0]["path"] if len({array["path"] for array in kind}) == 1 else kind[0]["group"]


def _won(array: Mapping[str, Any]) -> Iterator[str]:
    """`embed→fsdp #8` for each dimension that has a name."""
    for dimension, (logical, entry) in enumerate(zip(array["axes"], array["spec"], strict=True)):
        if logical is None:
            continue
        tried = [one for one in array["why"] if one["dimension"] == dimension]
        taken = [one for one in tried if one["outcome"] == "taken"]
        if taken:  # the last: what was cut further comes after the rule
            number, why = taken[-1]["rule"], taken[-1]["why"]
            by = f"({why.partition(':')[0]})" if number is None else f"#{number}"
        else:
            by = f"({tried[-1]['outcome']})" if tried else "(no rule)"
        yield f"{logical}→{entry_words(entry)} {by}"


# Why


def show_why(found: Mapping[str, Any], path: str, console: Console) -> None:
    """Print how one array came to lie where it does: its dimensions, and every rule that was tried.

    Args:
        found: The plan.
        path: Of the array; see `select`. Where several that differ are meant, they are listed.
        console: Where to.

    Raises:
        RunError: there is no such array; with the nearest paths.
    """
    for kind in shown(found, path, console):
        gap(console)
        console.print(line("dimensions", "bold"))
        show_table(_dimension_columns(kind[0], found["mesh"]), console)
        gap(console)
        console.print(line("rules that name them, in order", "bold"))
        if kind[0]["why"]:
            show_table(_tried_columns(kind[0]), console)
        else:
            console.print(line("none: every device holds the whole array"))


def shown(found: Mapping[str, Any], path: str, console: Console) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Print what each array that a path means is, and give it to print more of it; of several that differ, list them.

    Raises:
        RunError: there is no such array; with the nearest paths.
    """
    kinds, exact = select(found["arrays"], path)
    if len(kinds) > 1 and not exact:
        show_choice(path, kinds, console)
        return
    for number, kind in enumerate(kinds):
        if number:
            gap(console)
        show_array(kind, found, console)
        yield kind


def show_array(kind: Sequence[Mapping[str, Any]], found: Mapping[str, Any], console: Console) -> None:
    """Print what an array is and what each device holds of it; `kind`: it, and those that lie alike."""
    array = kind[0]
    console.print(line(f"{array['path']}  ({array['part']})", "bold"))
    where = "" if array["memory"] == "device" else f", in the {array['memory']}'s memory"
    rows = [
        ("array", f"{array['dtype']} {shape_words(array['shape'])}, {size(array['bytes'])}"),
        ("mesh", mesh_words(found["mesh"])),
        ("partition", spec_words(array["spec"])),
        (
            "each device",
            f"{shape_words(array['device_shape'])}, {size(array['device_bytes'])}{where}; "
            + ("no copies" if array["replicas"] == 1 else f"x{array['replicas']}: as many devices hold the same block"),
        ),
    ]
    if len(kind) > 1:
        # Kinds are of one group, yet maybe of several parts: a reference lies as the weights that it is a copy of.
        parts = dict.fromkeys(other["part"] for other in kind)
        rows.append(("alike", f"{counted(len(kind) - 1, 'other')} of {array['group']} ({', '.join(parts)})"))
    console.print(grid_of(rows))


def select(arrays: Sequence[Mapping[str, Any]], path: str) -> tuple[list[list[Mapping[str, Any]]], bool]:
    """The arrays that a path means, those that lie alike together; and whether it is the path or group of all of them.

    Args:
        arrays: Of the plan.
        path: A path; a group (with a star for the number of a block); any pattern with stars; or the end of a path
            (`mlp.up.kernel`), which means the optimizer's arrays only where no others end so. `PART:` before it takes
            those of one part.

    Raises:
        RunError: there is none; with the nearest paths.
    """
    part, colon, rest = path.partition(":")
    chosen = [array for array in arrays if array["part"] == part] if colon else list(arrays)
    pattern = rest if colon else path
    exact = [array for array in chosen if pattern in (array["path"], array["group"])]
    meant = exact or [
        array
        for array in chosen
        if any(name.endswith(f".{pattern}") for name in (array["path"], array["group"]))
        or ("*" in pattern and fnmatch.fnmatchcase(array["path"], pattern))
    ]
    if not exact:
        meant = [array for array in meant if array["part"] != "optimizer"] or meant
    if not meant:
        raise RunError(_no_array(path, part if colon else "", pattern, arrays))
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for array in meant:
        kinds.setdefault(_kind(array), []).append(array)
    return list(kinds.values()), bool(exact)


def _no_array(path: str, part: str, pattern: str, arrays: Sequence[Mapping[str, Any]]) -> str:
    parts = list(dict.fromkeys(array["part"] for array in arrays))
    if part and part not in parts:
        return f"the plan has no part '{part}' in '{path}'; there are: {', '.join(parts)}"
    depth = pattern.count(".") + 1
    ends: dict[str, dict[str, str]] = {}  # the path to name, by its group
    for key in ("group", "path"):
        for array in arrays:
            for end in (array[key], ".".join(array[key].split(".")[-depth:])):
                ends.setdefault(end, {}).setdefault(array["group"], array[key])
    near: dict[str, str] = {}
    for end in difflib.get_close_matches(pattern, ends, n=12, cutoff=0.5):
        near = {**near, **{group: name for group, name in ends[end].items() if group not in near}}
    listed = "".join(f"\n  {name}" for name in list(near.values())[:_SHOWN])
    found = f"; nearest are:{listed}" if near else f"; `nnxdsl plan` lists all {len(arrays)} of them"
    return f"the plan has no array '{path}'{found}"


def show_choice(path: str, kinds: Sequence[Sequence[Mapping[str, Any]]], console: Console) -> None:
    """Print that a path means several arrays that lie differently, and which."""
    console.print(line(f"'{path}' means {len(kinds)} kinds of arrays; give one of these paths:"))
    first = [kind[0] for kind in kinds]
    names = [_name(kind) for kind in kinds]
    paths = [
        f"{array['part']}:{name}" if names.count(name) > 1 else name for array, name in zip(first, names, strict=True)
    ]
    columns = [
        Column("path", paths, least=30),
        Column("part", [array["part"] for array in first], rank=2),
        Column("shape", [shape_words(array["shape"]) for array in first], rank=1),
        Column("partition", [spec_words(array["spec"]) for array in first], rank=4, least=14),
        Column("arrays", [str(len(kind)) for kind in kinds], rank=3, right=True),
    ]
    show_table(columns, console)


def _dimension_columns(array: Mapping[str, Any], mesh: Mapping[str, int]) -> list[Column]:
    numbers = range(len(array["shape"]))
    over = [
        " x ".join(f"{axis}={mesh[axis]}" for axis in ([entry] if isinstance(entry, str) else entry or [])) or "-"
        for entry in array["spec"]
    ]
    return [
        Column("dimension", [str(number) for number in numbers]),
        Column("name", [axis or "-" for axis in array["axes"]]),
        Column("size", [f"{length:,}" for length in array["shape"]], right=True),
        Column("cut over", over, least=14),
        Column("per device", [f"{length:,}" for length in array["device_shape"]], right=True),
    ]


def _tried_columns(array: Mapping[str, Any]) -> list[Column]:
    tried = array["why"]
    return [
        Column("rule", ["-" if one["rule"] is None else f"#{one['rule']}" for one in tried], right=True),
        Column("dimension", [f"{one['dimension']} {one['logical']}" for one in tried], least=12),
        Column("mesh axes", [entry_words(one["axes"]) for one in tried], least=12),
        Column("outcome", [f"{'✔' if one['outcome'] == 'taken' else '·'} {one['outcome']}" for one in tried]),
        Column("why", [one["why"] for one in tried], least=16),
    ]


# Compiled


def _show_compiled(found: Mapping[str, Any], console: Console) -> None:
    compiled = found["compiled"]
    versions = ", ".join(f"{name} {version}" for name, version in (compiled.get("versions") or {}).items())
    on = f"compiled for {counted(compiled.get('count') or found['devices'], 'device')} ({compiled.get('device')})"
    console.print(line(f"{on}{f' with {versions}' if versions else ''}", "bold"))
    if compiled.get("problem"):
        console.print(line(f"✘ would not run: {compiled['problem']}", "bold red"))
    seconds = [
        f"{word} in {compiled[key]:.1f} s"
        for word, key in (("lowered", "lower_seconds"), ("compiled", "compile_seconds"))
        if compiled.get(key) is not None
    ]
    if seconds:
        console.print(line(", ".join(seconds) + (", from the cache" if compiled.get("cached") else "")))
    if any(count is not None for count in (compiled.get("memory") or {}).values()):
        gap(console)
        console.print(line("memory on each device, as planned and as compiled", "bold"))
        show_table(_measured_columns(found), console)
    if compiled.get("collectives"):
        gap(console)
        console.print(line("collectives of a step", "bold"))
        show_table(_collective_columns(compiled["collectives"]), console)
    elif compiled.get("collectives") is not None and not compiled.get("problem"):
        console.print(line("no collectives: the devices do not talk to each other"))


def _measured_columns(found: Mapping[str, Any]) -> list[Column]:
    """Arguments are what the layout places, temporaries what was estimated; outputs mostly take arguments' place.

    Of a program that is too large, a compiler says less: those rows are left out.
    """
    measured = found["compiled"]["memory"]
    here = [part for part in found["memory"] if part["memory"] == "device"]
    placed = sum(part["bytes"] for part in here if part["tag"] == "exact")
    has_outputs = measured["outputs"] is not None
    beside = max(measured["outputs"] - measured["aliased"], 0) if has_outputs else None
    together = measured["arguments"] + measured["temporaries"] + beside if beside is not None else None
    columns: list[tuple[str, int | None, int | None]] = [
        ("arrays and batch (arguments)", placed, measured["arguments"]),
        ("while computing (temporaries)", sum(part["bytes"] for part in here) - placed, measured["temporaries"]),
        ("outputs beside the arguments", None, beside),
        ("sum", found["bytes_per_device"], together),
        ("peak, as XLA says", None, measured["peak"]),
    ]
    if measured["host"] or found["host_bytes_per_device"]:
        columns.append(("in the host's memory", found["host_bytes_per_device"], measured["host"]))
    rows = [(name, planned, count) for name, planned, count in columns if count is not None]
    return [
        Column("", [name for name, _, _ in rows], least=16),
        Column("planned", ["" if planned is None else size(planned) for _, planned, _ in rows], right=True),
        Column("measured", [size(count) for _, _, count in rows], right=True),
        Column("difference", [_difference(planned, count) for _, planned, count in rows], right=True),
    ]


def _difference(planned: int | None, measured: int) -> str:
    return f"{measured / planned - 1:+.1%}" if planned else ""


def _collective_columns(collectives: Sequence[Mapping[str, Any]]) -> list[Column]:
    rows = sorted(collectives, key=lambda one: -one["bytes"])
    return [
        Column("kind", [one["kind"] for one in rows]),
        Column("count", [f"{one['count']:,}" for one in rows], right=True),
        Column("size", [size(one["bytes"]) for one in rows], right=True),
        Column("where", ["in a loop, each time round" if one["in_loop"] else "once a step" for one in rows], least=12),
    ]
