"""The printed plan: complete at any width, readable without colour, the rules of each array."""

from __future__ import annotations

import copy
import io
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from nnxdsl.errors import RunError
from nnxdsl.terminal.array_rules_view import show_why
from nnxdsl.terminal.array_selection import select
from nnxdsl.terminal.plan_format import format_bytes, format_mesh, format_shape
from nnxdsl.terminal.plan_memory_view import letters, memory_bar
from nnxdsl.terminal.plan_view import advice, facts, show_arrays, show_plan, show_warnings
from nnxdsl.terminal.tables import Column, fit, fold

GIB = 2**30
MESH = {"stage": 1, "data": 2, "fsdp": 4, "expert": 1, "context": 1, "tensor": 2}
WIDTHS = (60, 80, 100, 120, 160, 200, 240)
RULES: dict[str, list[tuple[int, Any, str, str]]] = {
    "layers": [(3, "stage", "taken", "dropped, since of size 1: stage")],
    "vocab": [(4, "tensor", "taken", "its axes were free")],
    "mlp": [(7, "tensor", "taken", "its axes were free")],
    "embed": [
        (8, ["fsdp", "context", "expert"], "taken", "dropped, since of size 1: context, expert"),
        (9, ["fsdp", "context"], "not reached", "rule 8 was taken"),
    ],
    "rank": [(10, None, "taken", "replicated")],
    "norm": [(12, None, "taken", "replicated")],
    "kv_heads": [(6, "tensor", "indivisible", "1 does not divide by tensor=2")],
}


def array(
    part: str,
    path: str,
    axes: Sequence[str],
    shape: Sequence[int],
    spec: Sequence[Any],
    dtype: str = "bfloat16",
    memory: str = "device",
) -> dict[str, Any]:
    shards = [math.prod(MESH[axis] for axis in ([e] if isinstance(e, str) else e or [])) for e in spec]
    piece = [length // pieces for length, pieces in zip(shape, shards, strict=True)]
    bytes_each = 2 if dtype == "bfloat16" else 4
    why = [
        {"dimension": d, "logical": a, "rule": number, "axes": named, "outcome": outcome, "why": text}
        for d, a in enumerate(axes)
        for number, named, outcome, text in RULES.get(a, [])
    ]
    return {
        "path": path,
        "group": ".".join("*" if word.isdigit() and place else word for place, word in enumerate(path.split("."))),
        "part": part,
        "axes": list(axes),
        "dtype": dtype,
        "shape": list(shape),
        "spec": list(spec),
        "device_shape": piece,
        "bytes": bytes_each * math.prod(shape),
        "device_bytes": bytes_each * math.prod(piece),
        "replicas": math.prod(MESH.values()) // math.prod(shards),
        "memory": memory,
        "why": sorted(why, key=lambda one: one["rule"]),
    }


def moment(path: str, shape: Sequence[int], axes: Sequence[str]) -> dict[str, Any]:
    """A moment of the optimizer, cut further than its parameter is, in the host's memory."""
    result = array("optimizer", f"1.mu.{path}", axes, shape, [None, ["fsdp", "data"], None], "float32", "host")
    text = "ZeRO stage 1: optimizer state is sharded over data"
    result["why"].append(
        {"dimension": 1, "logical": "embed", "rule": None, "axes": ["fsdp", "data"], "outcome": "taken", "why": text}
    )
    return result


def arrays() -> list[dict[str, Any]]:
    result = [array("frozen", "embed.table", ["vocab", "embed"], [262144, 1152], ["tensor", "fsdp"])]
    for block in range(6):
        up, lora = f"layers.blocks.{block}.mlp.up.kernel", f"layers.blocks.{block}.mlp.up.kernel_lora_a"
        result.append(array("frozen", up, ["layers", "embed", "mlp"], [4, 1152, 6912], [None, "fsdp", "tensor"]))
        thin = (["layers", "embed", "rank"], [4, 1152, 16])
        result.append(array("trainable", lora, *thin, [None, "fsdp", None], "float32"))
        result.append(moment(lora, thin[1], thin[0]))
    result.append(array("frozen", "tail.blocks.0.mlp.up.kernel", ["embed", "mlp"], [1152, 6912], ["fsdp", "tensor"]))
    result.append(
        array("frozen", "tail.blocks.0.attention.key.scale", ["kv_heads", "head_dim"], [1, 256], [None, None])
    )
    result.append(array("frozen", "norm.scale", ["norm"], [1152], [None]))
    result.append(array("optimizer", "1.count", [], [], [], "int32"))
    return result


def part(name: str, count: float, tag: str, mode: str, memory: str = "device") -> dict[str, Any]:
    return {"name": name, "bytes": int(count * GIB), "tag": tag, "formula": mode, "memory": memory}


MEMORY = [
    part("frozen weights", 16, "exact", "every array of the layout"),
    part("trainable weights", 2, "exact", "float32"),
    part("gradients", 4, "estimated", "float32: one of this part, one added up"),
    part("activations", 32, "estimated", "what each layer keeps for the backward pass"),
    part("log-probabilities", 8, "estimated", "2048 tokens x 262144 logits, float32, three copies"),
    part("optimizer", 4, "exact", "every array of its state", "host"),
]


def plan(**changes: Any) -> dict[str, Any]:
    result = {
        "schema": 1,
        "id": "dpo-gemma3-1b-1a2b3c4d",
        "steps": 2000,
        "batch_size": 64,
        "rows": 128_000,
        "tokens_at_most": 196_608_000,
        "microbatches": 8,
        "parameters": {"total": 1_012_931_712, "trainable": 13_045_760},
        "compute": "bfloat16",
        "platform": "gpu",
        "reference": "the frozen base with the adapter off: no copy",
        "attention": "dense: rows of 64 slots are short",
        "mesh": MESH,
        "slices": 2,
        "across": {"data": 2, "stage": 1, "fsdp": 1},
        "devices": 16,
        "rules": [[name, tried[0][1]] for name, tried in RULES.items()],
        "memory": MEMORY,
        "bytes_per_device": 62 * GIB,
        "host_bytes_per_device": 4 * GIB,
        "activations": {"none": 32 * GIB, "full": 5 * GIB},
        "remat": "none",
        "remat_why": "set by memory.remat",
        "device": {"name": "h200", "description": "NVIDIA H200", "memory": 128 * GIB, "usable": 124 * GIB},
        "verdict": {"fits": True, "share": 0.5, "message": "fits: 62.0 of 124.0 GiB, 62.0 GiB free"},
        "warnings": [
            {"kind": "replicated", "path": "mesh.tensor", "message": "12% of the bytes are replicated along tensor=2"},
            {"kind": "rule", "path": "mesh.rules.0", "message": "('mlp', 'tensor') has no effect: [bold]why[/bold]"},
        ],
        "compiled": {
            "memory": {
                "arguments": 18 * GIB,
                "outputs": 3 * GIB,
                "aliased": 2 * GIB,
                "temporaries": 55 * GIB,
                "host": 4 * GIB,
                "peak": 70 * GIB,
            },
            "collectives": [
                {"kind": "all-reduce", "count": 3, "bytes": 1234, "in_loop": False},
                {"kind": "all-gather", "count": 1200, "bytes": 123_456_789, "in_loop": True},
            ],
            "lower_seconds": 5.1,
            "compile_seconds": 9.8,
            "cached": True,
            "device": "h200",
            "count": 16,
            "versions": {"jax": "0.10.2"},
            "problem": None,
        },
        "arrays": arrays(),
    }
    return copy.deepcopy({**result, **changes})


def written(show: Callable[[Console], object], width: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show(console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(cell_len, text.splitlines())) <= width
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def shown(width: int = 200, **changes: Any) -> str:
    return written(lambda console: show_plan(plan(**changes), console), width)


def listed(width: int = 200, patterns: Sequence[str] = (), **changes: Any) -> str:
    return written(lambda console: show_arrays(plan(**changes), patterns, console), width)


def table(text: str, heading: str) -> list[dict[str, str]]:
    """The rows of the table whose heading has a word, folded cells put together again."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines[:-1]) if heading in line.split() and lines[i + 1].startswith("──")]
    start = starts[-1]
    body = list(itertools.takewhile(lambda line: line and not line.startswith("left out"), lines[start + 2 :]))
    # A column begins where every line has a gap of two before it and some has text.
    width = max(map(len, [lines[start], *body]))
    padded = [line.ljust(width) for line in (lines[start], *body)]
    used = [any(line[place] != " " for line in padded) for place in range(width)]
    edges = [
        place for place in range(width) if used[place] and (place == 0 or not (used[place - 1] or used[place - 2]))
    ]
    ends = [*edges[1:], width]
    rows: list[dict[str, str]] = []
    names = [padded[0][begin:end].strip() for begin, end in zip(edges, ends, strict=True)]
    path = names.index("path") if "path" in names else 0
    for line in padded[1:]:
        cells = [line[begin:end].strip() for begin, end in zip(edges, ends, strict=True)]
        if cells[-1]:  # sizes are never folded
            rows.append(dict(zip(names, cells, strict=True)))
        else:
            for number, (name, cell) in enumerate(zip(names, cells, strict=True)):
                space = " " if number != path and cell and not rows[-1][name].endswith("+") else ""
                rows[-1][name] += space + cell
    return rows


@pytest.mark.parametrize("width", WIDTHS)
def test_every_array_stands_in_the_table_at_any_width(width: int) -> None:
    text = listed(width)
    rows = table(text, "path")
    assert [
        (row["path"], row.get("arrays", count), row["partition"]) for row, count in zip(rows, "16661111", strict=True)
    ] == [
        (path, count, partition)
        for path, count, partition in [
            ("embed.table", "1", "tensor, fsdp"),
            ("layers.blocks.*.mlp.up.kernel", "6", "-, fsdp, tensor"),
            ("layers.blocks.*.mlp.up.kernel_lora_a", "6", "-, fsdp, -"),
            ("1.mu.layers.blocks.*.mlp.up.kernel_lora_a", "6", "-, fsdp+data, -"),
            ("tail.blocks.0.mlp.up.kernel", "1", "fsdp, tensor"),
            ("tail.blocks.0.attention.key.scale", "1", "-, -"),
            ("norm.scale", "1", "-"),
            ("1.count", "1", "-"),
        ]
    ]
    assert rows[1]["size"] == "45.56 MiB"  # all six of them
    names = {"part", "path", "axes", "shape", "dtype", "partition", "per device", "copies", "rules", "arrays", "size"}
    gone = " ".join(text.partition("left out (terminal too narrow): ")[2].partition("\n\n")[0].split())
    assert set(rows[0]) | set(gone.split(", ")) - {""} == names
    assert not set(rows[0]) & set(gone.split(", "))
    assert bool(gone) == (width < 240)


def test_rows_of_the_wide_table() -> None:
    rows = table(listed(240), "path")
    assert rows[1] == {
        "part": "frozen",
        "path": "layers.blocks.*.mlp.up.kernel",
        "axes": "layers, embed, mlp",
        "shape": "4x1152x6912",
        "dtype": "bfloat16",
        "partition": "-, fsdp, tensor",
        "per device": "4x288x3456",
        "copies": "x2",
        "rules": "layers→- #3, embed→fsdp #8, mlp→tensor #7",
        "arrays": "6",
        "size": "45.56 MiB",
    }
    assert (rows[3]["part"], rows[3]["rules"]) == (
        "optimizer (host)",
        "layers→- #3, embed→fsdp+data (ZeRO stage 1), rank→- #10",
    )
    assert rows[5]["rules"] == "kv_heads→- (indivisible), head_dim→- (no rule)"
    assert (rows[7]["shape"], rows[7]["copies"]) == ("scalar", "x16")


def test_blocks_that_lie_differently_stand_apart() -> None:
    actual = arrays()
    actual[4] = array(
        "frozen", "layers.blocks.1.mlp.up.kernel", ["layers", "embed", "mlp"], [4, 1152, 6912], [None] * 3
    )
    rows = table(listed(240, arrays=actual), "path")
    assert [(row["path"], row["arrays"]) for row in rows if row["path"].endswith("up.kernel")] == [
        ("layers.blocks.*.mlp.up.kernel", "5"),
        ("layers.blocks.1.mlp.up.kernel", "1"),
        ("tail.blocks.0.mlp.up.kernel", "1"),
    ]


def test_facts() -> None:
    assert facts(plan()) == [
        ("steps", "2,000 of 64 rows in 8 micro-batches: 128,000 rows"),
        ("tokens", "at most 196,608,000"),
        ("parameters", "1,012,931,712, trained 13,045,760 (1.29%)"),
        ("computed in", "bfloat16, on gpu"),
        ("reference", "the frozen base with the adapter off: no copy"),
        ("attention", "dense: rows of 64 slots are short"),
        ("mesh", "data=2 x fsdp=4 x tensor=2 (16 devices)"),
        ("slices", "2, slow links between them: 2 along data"),
    ]
    assert [name for name, _ in facts(plan(slices=1))][-1] == "mesh"
    assert format_mesh({"data": 1, "fsdp": 1}) == "one device"


def test_arrays_are_selected_by_patterns() -> None:
    rows = table(listed(160, ["mlp.up.kernel", "frozen:norm.scale"]), "path")
    assert [row["path"] for row in rows] == [
        "layers.blocks.*.mlp.up.kernel",
        "tail.blocks.0.mlp.up.kernel",
        "norm.scale",
    ]
    assert listed(160, ["optimizer:*"]).startswith("\n7 of 23 arrays; ")
    with pytest.raises(RunError, match=r"no array 'mlp\.upp\.kernel'; nearest are"):
        listed(160, ["mlp.upp.kernel"])


def test_a_plan_is_one_screen() -> None:
    assert shown(80, compiled=None) == (
        "dpo-gemma3-1b-1a2b3c4d\n"
        "✔ fits: 62.0 of 124.0 GiB, 62.0 GiB free (50% of NVIDIA H200)\n"
        "▕FFFFFFFFFFTGGAAAAAAAAAAAAAAAAAAAALLLLL······································▒▒▏\n"
        "                                                             usable: 124 GiB ▲\n"
        "F frozen weights        16 GiB  exact: every array of the layout\n"
        "T trainable weights      2 GiB  exact: float32\n"
        "G gradients              4 GiB  estimated: float32: one of this part, one added…\n"
        "A activations           32 GiB  estimated: what each layer keeps for the backwa…\n"
        "L log-probabilities      8 GiB  estimated: 2048 tokens x 262144 logits, float32…\n"
        "  optimizer (host)       4 GiB  exact: every array of its state\n"
        "= on each device        62 GiB\n"
        "steps       2,000 of 64 rows in 8 micro-batches: 128,000 rows, at most 196,608,…\n"
        "parameters  1,012,931,712, trained 13,045,760 (1.29%)\n"
        "computed in bfloat16, on gpu, attention dense: rows of 64 slots are short\n"
        "reference   the frozen base with the adapter off: no copy\n"
        "mesh        data=2 x fsdp=4 x tensor=2 (16 devices), slices 2, slow links betwe…\n"
        "remat       none (set by memory.remat); activations: none 32 GiB, full 5 GiB\n"
        "! mesh.tensor: 12% of the bytes are replicated along tensor=2 [replicated]\n"
        "! mesh.rules.0: ('mlp', 'tensor') has no effect: [bold]why[/bold] [rule]\n"
        "→ 2 warnings: --warnings; 23 arrays: --arrays; one of them: --why PATH\n"
    )


def test_the_largest_plan_is_one_screen_at_any_width() -> None:
    parts = [part(f"part {letter} " * 3, 3, "estimated", "what it is " * 20) for letter in "abcdefgh"]
    warnings = [{"kind": "rule", "path": f"mesh.rules.{n}", "message": "no effect " * 30} for n in range(9)]
    changes = {"memory": parts, "warnings": warnings, "slices": 1, "compiled": None, "step_seconds": SECONDS}
    for width in WIDTHS[1:]:
        lines = shown(width, **changes).splitlines()
        assert len(lines) <= 24
        assert lines[-1].startswith("→ 9 warnings: --warnings; 23 arrays: --arrays; ")


SECONDS = {"compute": 0.4, "memory": 0.1, "links": 0.05, "step": 0.45}


def test_the_estimated_time() -> None:
    line = "time        about 0.45 s a step by estimate, 15:00 for all steps"
    assert f"{line} (products 0.4 s, memory 0.1 s, links 0.05 s)\n" in shown(120, step_seconds=SECONDS)
    assert "\ntime " not in shown(120, step_seconds=None)


def test_advice_names_the_setting_or_the_flag() -> None:
    arrays_too = "2 warnings: --warnings; 23 arrays: --arrays; one of them: --why PATH"
    fits, small = plan()["verdict"], {"name": "s", "description": "Small", "memory": 25 * GIB, "usable": 24 * GIB}
    too_much = {"fits": False, "share": 2.5, "message": "does not fit: 62.0 of 24.0 GiB, 38.0 GiB too much"}

    def advice_of(**changes: Any) -> list[str]:
        *texts, last = advice(plan(**changes))
        assert last == arrays_too
        return texts

    assert advice_of() == []
    assert advice_of(remat="full", bytes_per_device=35 * GIB) == [
        "memory.remat=auto recomputes less where that fits: with none about 62 GiB"
    ]
    assert advice_of(remat="full", bytes_per_device=35 * GIB, remat_why="first that fits") == []
    assert advice_of(remat="full", bytes_per_device=120 * GIB, verdict=fits) == []
    remedy = "with memory.remat=full microbatch_size=2 it would take 20.0 GiB"
    search = "a mesh on which it fits: --search --device s --count 32"
    verdict = {**too_much, "message": f"{too_much['message']}; {remedy}"}
    assert advice_of(device=small, verdict=verdict) == [remedy, search]
    verdict = {**too_much, "message": f"{too_much['message']}; --search may find a mesh on which it fits"}
    assert advice_of(device=small, verdict=verdict) == [search]
    assert advice_of(device=None, verdict=None) == [
        "does it fit? --device h200 (h100, v5e, ...) compares it with a device's memory"
    ]


def test_memory_that_is_too_much_and_no_device() -> None:
    verdict = {"fits": False, "share": 2.5, "message": "does not fit: 62.0 of 24.0 GiB, 38.0 GiB too much; with less"}
    small = {"name": "s", "description": "Small", "memory": 25 * GIB, "usable": 24 * GIB}
    text = shown(80, device=small, verdict=verdict)
    assert "✘ does not fit: 62.0 of 24.0 GiB, 38.0 GiB too much (250% of Small)\n" in text
    assert (
        "▕FFFFFFFFFFFFFFFFFFFFTTTGGGGGAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAALLLLLLLLLL▏\n"
        "                               ▲ usable: 24 GiB\n"
    ) in text
    alone = shown(80, device=None, verdict=None)
    assert "usable" not in alone
    assert "▕FFFFFFFFFFFFFFFFFFFFTTTGGGGGAAAA" in alone


def test_the_verdict_is_coloured_and_has_a_word() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="truecolor", highlight=False)
    show_plan(plan(), console)
    assert isinstance(console.file, io.StringIO)
    assert "\x1b[1;32m✔ fits: " in console.file.getvalue()
    assert "\x1b[30;48;2;141;211;199mFFFF" in console.file.getvalue()


@given(
    st.lists(st.integers(1, 10**12), min_size=1, max_size=7),
    st.none() | st.integers(1, 10**12),
    st.integers(40, 120),
)
def test_a_bar_has_every_part_and_fills_its_width(counts: list[int], memory: int | None, width: int) -> None:
    names = ["frozen weights", "trainable weights", "reference copy", "optimizer", "gradients", "activations", "logits"]
    parts = [{"name": name, "bytes": count} for name, count in zip(names, counts, strict=False)]
    device = None if memory is None else {"memory": memory, "usable": int(0.9 * memory)}
    segments = [(letter, "", each["name"], each["bytes"]) for letter, each in zip("FTROGAL", parts, strict=False)]
    lines = memory_bar(segments, sum(counts), device, width).plain.splitlines()
    assert all(cell_len(line) <= width for line in lines)
    assert cell_len(lines[0]) == width
    assert list(dict.fromkeys(lines[0].strip("▕▏·▒"))) == list("FTROGAL")[: len(parts)]
    cells = width - 2
    whole = max(sum(counts), memory or 0)
    for letter, count in zip("FTROGAL", counts, strict=False):
        assert abs(lines[0].count(letter) - count / whole * cells) <= len(parts) + 2


def test_letters_are_all_different() -> None:
    assert letters(["activations", "adapter", "a", "aa"]) == ["A", "D", "B", "C"]


def test_warnings_in_full_have_their_paths_and_no_markup() -> None:
    text = written(lambda console: show_warnings(plan(), console), 60)
    assert text.startswith(
        "! warning  mesh.tensor: 12% of the bytes are replicated\n           along tensor=2 [replicated]\n"
    )
    assert "mesh.rules.0: ('mlp', 'tensor') has no effect: [bold]why[/bold] [rule]" in " ".join(text.split())
    assert written(lambda console: show_warnings(plan(warnings=[]), console), 60) == "no warnings\n"


def test_what_was_compiled() -> None:
    text = shown(100)
    assert text.endswith(
        "compiled for 16 devices (h200) with jax 0.10.2\n"
        "lowered in 5.1 s, compiled in 9.8 s, from the cache\n"
        "\n"
        "memory on each device, as planned and as compiled\n"
        "                               planned  measured  difference\n"
        "────────────────────────────────────────────────────────────\n"
        "arrays and batch (arguments)    18 GiB    18 GiB       +0.0%\n"
        "while computing (temporaries)   44 GiB    55 GiB      +25.0%\n"
        "outputs beside the arguments               1 GiB\n"
        "sum                             62 GiB    74 GiB      +19.4%\n"
        "peak (reported by XLA)                    70 GiB\n"
        "in the host's memory             4 GiB     4 GiB       +0.0%\n"
        "\n"
        "collectives of a step\n"
        "kind        count       size  where\n"
        "────────────────────────────────────────────────────────\n"
        "all-gather  1,200  117.7 MiB  in a loop, every iteration\n"
        "all-reduce      3  1.205 KiB  once a step\n"
    )


def test_what_was_not_compiled() -> None:
    assert "compiled for" not in shown(compiled=None)
    compiled = {**plan()["compiled"], "memory": None, "collectives": [], "problem": "exceeded its time limit of 300 s"}
    text = shown(compiled={**compiled, "compile_seconds": None, "versions": None})
    assert "compiled for 16 devices (h200)\n✘ would not run: exceeded its time limit of 300 s\nlowered in 5.1 s" in text
    assert "collectives" not in text
    assert "no collectives" in shown(compiled={**compiled, "problem": None})


def why(path: str, width: int = 100, **changes: Any) -> str:
    return written(lambda console: show_why(plan(**changes), path, console), width)


def test_why_in_full() -> None:
    assert why("layers.blocks.3.mlp.up.kernel") == (
        "layers.blocks.3.mlp.up.kernel  (frozen)\n"
        "array        bfloat16 4x1152x6912, 60.75 MiB\n"
        "mesh         data=2 x fsdp=4 x tensor=2 (16 devices)\n"
        "partition    -, fsdp, tensor\n"
        "each device  4x288x3456, 7.594 MiB; x2: 2 devices hold the same block\n"
        "\n"
        "dimensions\n"
        "dimension  name     size  cut over  per device\n"
        "──────────────────────────────────────────────\n"
        "0          layers      4  -                  4\n"
        "1          embed   1,152  fsdp=4           288\n"
        "2          mlp     6,912  tensor=2       3,456\n"
        "\n"
        "rules for these axes, in order\n"
        "rule  dimension  mesh axes            outcome        why\n"
        "──────────────────────────────────────────────────────────────────────────────────────────────\n"
        "  #3  0 layers   stage                ✔ taken        dropped, since of size 1: stage\n"
        "  #7  2 mlp      tensor               ✔ taken        its axes were free\n"
        "  #8  1 embed    fsdp+context+expert  ✔ taken        dropped, since of size 1: context, expert\n"
        "  #9  1 embed    fsdp+context         · not reached  rule 8 was taken\n"
    )


@pytest.mark.parametrize("width", [60, 80])
def test_why_loses_nothing_in_a_narrow_window(width: int) -> None:
    text = why("1.mu.layers.blocks.0.mlp.up.kernel_lora_a", width)
    assert "left out" not in text
    assert "in the host's memory" in text
    assert "1          embed   1,152  fsdp=4 x data=2         144\n" in text
    lines = text.partition("in order\n")[2].splitlines()
    begins = [lines[0].index(name) for name in ("rule", "dimension", "mesh axes", "outcome", "why")]
    rows: list[list[str]] = []
    for line in lines[2:]:
        cells = [line[begin:end].strip() for begin, end in zip(begins, [*begins[1:], None], strict=True)]
        if cells[0]:
            rows.append(cells)
        else:
            rows[-1] = [f"{above} {cell}".strip() for above, cell in zip(rows[-1], cells, strict=True)]
    assert [[cell.replace("+ ", "+") for cell in row] for row in rows] == [
        ["#3", "0 layers", "stage", "✔ taken", "dropped, since of size 1: stage"],
        ["#8", "1 embed", "fsdp+context+expert", "✔ taken", "dropped, since of size 1: context, expert"],
        ["#9", "1 embed", "fsdp+context", "· not reached", "rule 8 was taken"],
        ["#10", "2 rank", "-", "✔ taken", "replicated"],
        ["-", "1 embed", "fsdp+data", "✔ taken", "ZeRO stage 1: optimizer state is sharded over data"],
    ]


def test_a_group_or_the_end_of_a_path_will_do() -> None:
    for path in ("layers.blocks.*.mlp.up.kernel", "frozen:layers.blocks.*.mlp.up.kernel"):
        text = why(path)
        assert text.startswith("layers.blocks.0.mlp.up.kernel  (frozen)\n")
        assert "same layout  5 others of layers.blocks.*.mlp.up.kernel (frozen)\n" in text
    assert why("table").startswith("embed.table  (frozen)\n")
    assert why("blocks.4.mlp.up.kernel_lora_a").startswith("layers.blocks.4.mlp.up.kernel_lora_a  (trainable)\n")
    assert why("optimizer:up.kernel_lora_a").startswith("1.mu.layers.blocks.0.mlp.up.kernel_lora_a  (optimizer)\n")
    assert why("1.count").endswith("no rules: every device holds the whole array\n")


def test_several_kinds_are_listed() -> None:
    assert why("mlp.up.kernel") == (
        "'mlp.up.kernel' matches arrays with 2 different layouts; use one of these paths:\n"
        "path                           part    shape        partition        arrays\n"
        "───────────────────────────────────────────────────────────────────────────\n"
        "layers.blocks.*.mlp.up.kernel  frozen  4x1152x6912  -, fsdp, tensor       6\n"
        "tail.blocks.0.mlp.up.kernel    frozen  1152x6912    fsdp, tensor          1\n"
    )


def test_a_path_of_two_parts() -> None:
    """A reference may be of another type than the weights that it is a copy of, or the same."""
    weights = array("trainable", "norm.scale", ["norm"], [1152], [None], "float32")
    reference = {**array("reference", "norm.scale", ["norm"], [1152], [None], "bfloat16")}
    text = why("norm.scale", arrays=[weights, reference])
    assert text.count("rules for these axes") == 2
    assert "norm.scale  (trainable)" in text
    assert "norm.scale  (reference)" in text
    same = why("norm.scale", arrays=[weights, {**weights, "part": "reference"}])
    assert same.count("rules for these axes") == 1
    assert "same layout  1 other of norm.scale (trainable, reference)" in same
    listed = why("scale", arrays=[weights, reference])
    assert "trainable:norm.scale" in listed
    assert "reference:norm.scale" in listed


@pytest.mark.parametrize("path", ["layers.blocks.0.mlp.up.kernels", "mlp.upp.kernel", "layers.blocks.*.mlp.up.kernal"])
def test_a_path_that_is_not_there_names_the_nearest(path: str) -> None:
    with pytest.raises(RunError) as error:
        select(arrays(), path)
    heading, *near = str(error.value).splitlines()
    assert heading == f"the plan has no array '{path}'; nearest are:"
    assert near[0] == f"  layers.blocks.{'0' if '0' in path else '*'}.mlp.up.kernel"
    assert 2 <= len(near) <= 6


def test_a_part_that_is_not_there() -> None:
    with pytest.raises(RunError, match="no part 'opt' in 'opt:x'; there are: frozen, trainable, optimizer"):
        select(arrays(), "opt:x")
    with pytest.raises(RunError, match=r"no array 'zzzzzzzzzzzzzzzz'; `nnxdsl plan --arrays` lists all 23 of them"):
        select(arrays(), "zzzzzzzzzzzzzzzz")


def test_shapes() -> None:
    assert (format_shape((2, 16, 32)), format_shape(())) == ("2x16x32", "scalar")


def test_sizes() -> None:
    assert [format_bytes(count) for count in (0, 999, 1024, 1536, 2**20, 72.04 * GIB, 3 * 2**40)] == [
        "0 B",
        "999 B",
        "1 KiB",
        "1.5 KiB",
        "1 MiB",
        "72.04 GiB",
        "3 TiB",
    ]


@given(st.text("ab.*+/ 9_漢", max_size=60), st.integers(2, 20))
def test_folding_loses_nothing(text: str, width: int) -> None:
    folded = fold(text, width)
    assert all(cell_len(line) <= width for line in folded.split("\n"))
    assert folded.replace("\n", "").replace(" ", "") == text.replace(" ", "")


def test_folds_stand_where_a_reader_expects_them() -> None:
    assert fold("layers.blocks.*.mlp.up.kernel_lora_a", 24) == "layers.blocks.*.mlp.up\n.kernel_lora_a"
    assert fold("-, fsdp+data, tensor", 12) == "-, fsdp+\ndata, tensor"
    assert fold("a sentence of 0.5 words", 12) == "a sentence\nof 0.5 words"


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5), st.none() | st.integers(2, 8)), max_size=9))
def test_tables_fit_and_keep_what_matters(rendered: list[tuple[int, int, int | None]]) -> None:
    columns = [Column("path", ["p" * 20], least=8)]
    columns += [
        Column(f"{number}", ["x" * width], rank=rank + 1, least=least)
        for number, (width, rank, least) in enumerate(rendered)
    ]
    fitted = fit(columns, 60)
    assert sum(width for _, width in fitted) + 2 * (len(fitted) - 1) <= 60
    assert fitted[0][0].name == "path"
    gone = [column for column in columns if column not in [kept for kept, _ in fitted]]
    assert all(kept.rank <= column.rank for column in gone for kept, _ in fitted)


def test_a_spare_column_goes_before_another_is_folded() -> None:
    columns = [Column("path", ["p" * 20], least=8), Column("spare", ["s" * 10], spare=True), Column("rest", ["r" * 10])]
    assert [(column.name, width) for column, width in fit(columns, 44)] == [("path", 20), ("spare", 10), ("rest", 10)]
    assert [(column.name, width) for column, width in fit(columns, 43)] == [("path", 20), ("rest", 10)]
    assert [(column.name, width) for column, width in fit(columns, 24)] == [("path", 12), ("rest", 10)]
