"""`plan` and `diff --layout` on the command line: every flag, what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import pytest

from nnxdsl import cli, compile, evolve
from nnxdsl.cli.exit_codes import REFUSED
from nnxdsl.cli.load import load
from nnxdsl.planning.plan import plan
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.sharding import hardware
from nnxdsl.sharding.rules import DEFAULT_RULES
from nnxdsl.terminal.plan_format import format_bytes

HERE = Path("runs")
QUICK = "model=Model.Llama3('tiny')"
"""Traced more quickly than Gemma 3, whose periods are six layers long."""


@pytest.fixture
def place(lab: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(lab.place)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return lab.place


SEVERAL_BLOCKS = "model=Model.Gemma3('tiny')"


class Terminal:
    """The command line in this process: what it printed, and what it was refused for."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *text: str, err: str = "") -> str:
        code = cli.main(text)
        out, said = self._capsys.readouterr()
        assert (code, said) == (0, err)
        return "\n".join(line.rstrip() for line in out.splitlines()) + "\n"

    def refused(self, *argv: str) -> str:
        code = cli.main(argv)
        out, said = self._capsys.readouterr()
        assert (code, out) == (REFUSED, "")
        return said


@pytest.fixture
def nnxdsl(place: Path, capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)


# What is planned


@pytest.mark.extended
@pytest.mark.parametrize("file", ["sft.py", pytest.param("dpo.py", marks=pytest.mark.slow)])
def test_bytes_are_those_of_the_arrays(place: Path, file: str) -> None:
    experiment = evolve(load(file, HERE), {"model.weights": load("sft.py", HERE).model.weights})
    actual = plan(experiment)
    state = compile(experiment).init()
    parts = {"frozen weights": state.frozen, "trainable weights": state.trainable, "optimizer": state.optimizer,
             "reference copy": state.reference}  # fmt: skip
    planned = {part["name"]: part["bytes"] for part in actual["memory"] if part["tag"] == "exact"}
    made = {name: sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for name, tree in parts.items()}
    assert planned == {name: size for name, size in made.items() if size}
    arrays = {(array["part"], array["path"]): array for array in actual["arrays"]}
    for path, leaf in state.trainable.items():
        array = arrays["trainable", path]
        assert (tuple(array["shape"]), array["dtype"], array["device_bytes"]) == (leaf.shape, leaf.dtype, leaf.nbytes)
    assert actual["parameters"]["trainable"] == sum(leaf.size for leaf in state.trainable.values())
    assert actual["bytes_per_device"] == sum(part["bytes"] for part in actual["memory"])


@pytest.mark.extended
def test_a_plan_needs_no_devices_and_reads_no_data(lab: Any) -> None:
    for file in lab.place.glob("*.jsonl"):
        file.unlink()
    code, out, err = lab.cli("plan", "dpo.py", "mesh.fsdp=4", "mesh.tensor=2", "batch_size=8", "--json")
    assert (code, err) == (0, "")
    actual = json.loads(out)
    assert actual["devices"] == 8
    assert (actual["steps"], actual["rows"], actual["microbatches"]) == (40, 320, 1)
    assert actual["tokens_at_most"] == 320 * (48 + 2 * 16)
    embedding = next(array for array in actual["arrays"] if array["path"] == "embed.embedding")
    assert embedding["spec"] == ["tensor", "fsdp"]
    assert embedding["device_shape"] == [320 // 2, 128 // 4]
    assert embedding["device_bytes"] * 8 == 320 * 128 * 4
    assert not (lab.place / "runs").exists()


# What it prints


def test_the_plan_for_people(nnxdsl: Terminal) -> None:
    lines = nnxdsl("plan", "dpo.py", SEVERAL_BLOCKS).splitlines()
    actual = plan(cli.override(load("dpo.py", HERE), (SEVERAL_BLOCKS,)))
    assert lines[0] == actual["id"]
    assert any(line.startswith("computed in float32, on cpu, attention ") for line in lines)
    assert any(line.startswith("reference   cached: precomputed from the initial policy") for line in lines)
    assert "mesh        one device" in lines
    for part in actual["memory"]:
        row = rf"^[A-Z] {part['name']} +{format_bytes(part['bytes'])} +{part['tag']}: {part['formula']}$"
        assert re.search(row, "\n".join(lines), re.M)
    policies = ", ".join(f"{name} {format_bytes(count)}" for name, count in actual["activations"].items())
    assert f"remat       none (the device's memory is unknown); activations: {policies}" in lines
    assert len(lines) <= 24
    title = f"{len(actual['arrays'])} arrays; those of all blocks with the same layout share a row"
    listed = nnxdsl("plan", "dpo.py", SEVERAL_BLOCKS, "--arrays").splitlines()
    assert title in listed
    assert nnxdsl("plan", "dpo.py", SEVERAL_BLOCKS, "--match", "norm.scale", "--match", "embedding").startswith(
        "\n2 of "
    )
    assert nnxdsl("plan", "dpo.py", SEVERAL_BLOCKS, "--warnings") == "no warnings\n"
    row = next(line for line in listed if " layers.blocks.*.mlp.up.kernel " in line)
    assert re.split(r"  +", row)[:6] == [
        "frozen", "layers.blocks.*.mlp.up.kernel", "1x128x384", "float32", "-, -, -", "1x128x384",
    ]  # fmt: skip


@pytest.mark.default_variants(1)
@pytest.mark.parametrize(("device", "sign"), [("h200", "✔ fits: "), ("rtx4090", "✘ does not fit: ")])
def test_whether_a_device_holds_it_is_an_answer(nnxdsl: Terminal, device: str, sign: str) -> None:
    argv = ("model=Model.Llama3('1b')", "adapter=None", "memory.remat=full", "batch_size=8")
    lines = nnxdsl("plan", "sft.py", *argv, "--device", device.upper()).splitlines()
    kind = hardware.device(device)
    actual = plan(cli.override(load("sft.py", HERE), argv), "gpu", kind)
    needed, usable = actual["bytes_per_device"], kind.usable
    assert usable is not None
    assert any(line.startswith("computed in bfloat16, on gpu, attention ") for line in lines)
    (verdict,) = [line for line in lines if line.startswith(sign)]
    numbers = f"{needed / 2**30:.1f} of {usable / 2**30:.1f} GiB"
    rest = f"{abs(usable - needed) / 2**30:.1f} GiB {'free' if needed < usable else 'too much'}"
    message = actual["verdict"]["message"]
    assert f"{verdict[0]} {message}".startswith(f"{sign}{numbers}, {rest}")
    message, _, remedy = message.partition("; ")
    assert verdict == f"{verdict[0]} {message} ({needed / usable:.0%} of {kind.description})"
    assert (f"→ {remedy}" in lines) == (remedy.startswith("with "))


WHY = """\
layers.blocks.0.mlp.up.kernel  (frozen)
array        float32 1x128x384, 192 KiB
mesh         fsdp=4 x tensor=2 (8 devices)
partition    -, fsdp, tensor
each device  1x32x192, 24 KiB; no copies
same layout  5 others of layers.blocks.*.mlp.up.kernel (frozen)
"""

LAYERS, MLP, EMBED, EXPERTS = (
    DEFAULT_RULES.index(rule)
    for rule in (
        ("layers", "stage"),
        ("mlp", "tensor"),
        ("embed", ("fsdp", "context", "expert")),
        ("embed", ("fsdp", "context")),
    )
)
RULES = f"""
dimensions
dimension  name    size  cut over  per device
─────────────────────────────────────────────
0          layers     1  -                  1
1          embed    128  fsdp=4            32
2          mlp      384  tensor=2         192

rules for these axes, in order
rule  dimension  mesh axes            outcome        why
──────────────────────────────────────────────────────────────────────────────────────────────
{f"#{LAYERS}":>4}  0 layers   stage                ✔ taken        dropped, since of size 1: stage
{f"#{MLP}":>4}  2 mlp      tensor               ✔ taken        its axes were free
{f"#{EMBED}":>4}  1 embed    fsdp+context+expert  ✔ taken        dropped, since of size 1: context, expert
{f"#{EXPERTS}":>4}  1 embed    fsdp+context         · not reached  rule {EMBED} was taken
"""

GRID = """
fsdp  tensor   0   1
0              0   1
1              2   3
2              4   5
3              6   7

each cell is a device, with the number and colour of its block
8 blocks, each on 1 device (x1)
  block 0: [:, 0:32, 0:192]  (embed over fsdp, mlp over tensor)
  block 1: [:, 0:32, 192:384]
  block 2: [:, 32:64, 0:192]
  block 3: [:, 32:64, 192:384]
  block 4: [:, 64:96, 0:192]
  block 5: [:, 64:96, 192:384]
  block 6: [:, 96:128, 0:192]
  block 7: [:, 96:128, 192:384]
"""
EIGHT = (SEVERAL_BLOCKS, "mesh.fsdp=4", "mesh.tensor=2", "batch_size=8")


@pytest.mark.extended
def test_one_array_why_and_drawn(nnxdsl: Terminal) -> None:
    assert nnxdsl("plan", "dpo.py", *EIGHT, "--why", "mlp.up.kernel") == WHY + RULES
    assert nnxdsl("plan", "dpo.py", *EIGHT, "--draw", "mlp.up.kernel") == WHY + GRID
    assert nnxdsl.refused("plan", "dpo.py", SEVERAL_BLOCKS, "--why", "mlp.up.kernell").startswith(
        "RunError: the plan has no array 'mlp.up.kernell'; nearest are:\n  layers.blocks.*.mlp.up.kernel\n"
    )


@pytest.mark.extended
def test_the_layout_as_text(nnxdsl: Terminal) -> None:
    dumped = nnxdsl("plan", "dpo.py", *EIGHT, "--dump")
    assert dumped == build_blueprint(cli.override(load("dpo.py", HERE), EIGHT)).layout.dump()
    assert "frozen layers.blocks.0.mlp.up.kernel 1x128x384 float32 (None, 'fsdp', 'tensor') 24576\n" in dumped
    in_bfloat16 = nnxdsl("plan", "dpo.py", *EIGHT, "--dump", "--device", "v5e")
    assert "frozen layers.blocks.0.mlp.up.kernel 1x128x384 bfloat16 (None, 'fsdp', 'tensor') 12288\n" in in_bfloat16


@pytest.mark.extended
def test_for_machines_it_is_the_same(nnxdsl: Terminal) -> None:
    actual = json.loads(nnxdsl("plan", "dpo.py", QUICK, *EIGHT[1:], "--device", "h100", "--json"))
    assert actual == plan(cli.override(load("dpo.py", HERE), (QUICK, *EIGHT[1:])), "gpu", hardware.device("h100"))


# So many devices


@pytest.mark.slow
def test_a_count_of_devices(nnxdsl: Terminal) -> None:
    note = "# mesh has 1 device; planning with mesh.fsdp=4\n"
    dumped = nnxdsl("plan", "dpo.py", "--count", "4", "--dump", err=note)
    assert dumped == build_blueprint(evolve(load("dpo.py", HERE), {"mesh.fsdp": 4})).layout.dump()
    same = nnxdsl("plan", "dpo.py", "mesh.data=2", "mesh.tensor=2", "--count", "4", "--dump")
    assert same == nnxdsl("plan", "dpo.py", "mesh.data=2", "mesh.tensor=2", "--dump")
    assert nnxdsl.refused("plan", "dpo.py", "mesh.data=2", "mesh.tensor=2", "--count", "8") == (
        "RunError: --count 8: the mesh has 4 devices (data=2 x tensor=2); change the mesh, or find one with --search\n"
    )


# Refusals


def test_what_does_not_fit_is_refused(nnxdsl: Terminal) -> None:
    refused = nnxdsl.refused("plan", "dpo.py", "mesh.tensor=3", "adapter.targets=('mpl',)")
    assert refused.startswith("PlanError: ")
    assert "adapter.targets.0: 'mpl' matches no linear layer; did you mean 'mlp'?" in refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plan dpo.py --device h20o", "PlanError: 1 problem\n  device: there is no 'h20o'; did you mean 'h200'?"),
        ("show dpo.py --device h200", "UsageError: --device has no effect on show"),
        ("run dpo.py --compile --count 8", "UsageError: --compile has no effect on run; --count has no effect on run"),
        ("plan dpo.py --layout", "UsageError: --layout has no effect on plan"),
        (
            "plan dpo.py --why norm --draw norm",
            "UsageError: argument --draw: not allowed with argument --why; see nnxdsl plan --help",
        ),
        (
            "plan dpo.py --dump --json",
            "UsageError: --json excludes --why, --draw, --dump, --warnings, --arrays and --match",
        ),
        ("plan dpo.py --why norm --arrays", "UsageError: --arrays and --match go with the plan, or with --compile"),
        ("plan dpo.py --limit 5", "UsageError: --limit has no effect without --compile"),
        (
            "plan dpo.py --compile --why norm",
            "UsageError: argument --why: not allowed with argument --compile; see nnxdsl plan --help",
        ),
        (
            "plan dpo.py --search --compile --dump",
            "UsageError: argument --compile: not allowed with argument --search; see nnxdsl plan --help",
        ),
        (
            "plan dpo.py --count 0",
            "UsageError: argument --count: expected a value > 0, got 0; see nnxdsl plan --help",
        ),
        (
            "plan dpo.py --compile --limit -1",
            "UsageError: argument --limit: expected a value > 0, got -1; see nnxdsl plan --help",
        ),
        (
            "plan dpo.py --count two",
            "UsageError: argument --count: invalid int value: 'two'; see nnxdsl plan --help",
        ),
        (
            "plan dpo.py --search",
            "RunError: --search needs --device and --count: --search --device h200 --count 8",
        ),
        (
            "plan dpo.py --search --device cpu --count 2",
            "PlanError: 1 problem in Experiment 'dpo'\n"
            "  'cpu' has no published memory and speed, so nothing can be compared",
        ),
        ("plan dpo.py --devise h200", "UsageError: --devise: there is no such flag; did you mean '--device'?"),
    ],
)
def test_words_that_do_not_go_together(nnxdsl: Terminal, text: str, message: str) -> None:
    assert nnxdsl.refused(*text.split()) == f"{message}\n"


# Searching


@pytest.mark.slow
def test_a_search_prints_words_to_paste(nnxdsl: Terminal) -> None:
    device = hardware.device("h200")
    assert device.usable
    search = ("plan", "dpo.py", QUICK, "--search", "--device", "h200", "--count", "2")
    first, headings, *rows = nnxdsl(*search).splitlines()
    actual = json.loads(nnxdsl(*search, "--json"))
    total, fit = actual["tried"], len(actual["fit"])
    assert first == f"{fit} of {total} placements on 2 x NVIDIA H200 fit; the fastest, by estimate:"
    assert headings.split() == ["s/step", "products", "memory", "links", "GiB/device"]
    assert (actual["device"], actual["count"], len(rows)) == ("h200", 2, min(fit, 8))
    for row, one in list(zip(rows, actual["fit"], strict=False))[:2]:
        argv = [word for word in row.split() if "=" in word]
        asked = cli.override(cli.override(load("dpo.py", HERE), [QUICK]), argv)
        assert asked == evolve(cli.override(load("dpo.py", HERE), [QUICK]), one["changes"])
        assert asked.mesh.device_count == 2
        planned = json.loads(nnxdsl("plan", "dpo.py", QUICK, *argv, "--device", "h200", "--json"))
        assert planned["verdict"]["fits"]
        assert planned["bytes_per_device"] == pytest.approx(one["bytes_per_device"], rel=0.01)
        assert planned["step_seconds"] == one["step_seconds"]
        assert float(row.split()[0]) == pytest.approx(one["step_seconds"]["step"], rel=0.01)


def test_where_nothing_fits(nnxdsl: Terminal) -> None:
    argv = ("model=Model.Llama3('8b')", "batch_size=1", "--search", "--device", "rtx4090", "--count", "1")
    assert nnxdsl("plan", "sft.py", *argv) == (
        "none of 5 placements on 1 x NVIDIA GeForce RTX 4090 fits; try quantization, an adapter, or shorter rows\n"
    )


# Comparing


@pytest.mark.extended
def test_layouts_are_compared(nnxdsl: Terminal) -> None:
    sft = load("sft.py", HERE)
    left = evolve(sft, {"mesh.fsdp": 2})
    lines = nnxdsl("diff", "sft.py", "sft.py", "mesh.fsdp=2", "--layout").splitlines()
    assert lines[:2] == [f"--- {left.id} on fsdp=2 (2 devices)", f"+++ {sft.id} on one device"]
    texts = [set(build_blueprint(one).layout.dump().splitlines()) for one in (left, sft)]
    assert {line[1:] for line in lines[2:] if line[0] == "-"} == texts[0] - texts[1]
    assert {line[1:] for line in lines[2:] if line[0] == "+"} == texts[1] - texts[0]
    assert "-trainable norm.scale 128 float32 (None,) 512" not in lines  # norms lie alike
    assert nnxdsl("diff", "sft.py", "sft.py", "batch_size=8", "--layout") == "# the same layout\n"
    actual = json.loads(nnxdsl("diff", "sft.py", "sft.py", "mesh.fsdp=2", "--layout", "--json"))
    assert actual == {
        "same": False,
        "left": build_blueprint(left).layout.dump().splitlines(),
        "right": build_blueprint(sft).layout.dump().splitlines(),
    }


# Compiling


@pytest.mark.slow
def test_a_plan_is_compiled_for_a_divided_cpu(lab: Any, place: Path) -> None:
    argv = ("plan", "sft.py", "mesh.fsdp=2", "--compile", "--device", "cpu", "--limit", "250")
    code, out, err = lab.cli(*argv, "--json")
    assert (code, err) == (0, "")
    actual = json.loads(out)
    compiled, cpu = actual["compiled"], hardware.device("cpu")
    assert {**actual, "compiled": None} == plan(evolve(load("sft.py", HERE), {"mesh.fsdp": 2}), device=cpu)
    assert (compiled["problem"], compiled["count"], compiled["cached"]) == (None, 2, False)
    placed = sum(part["bytes"] for part in actual["memory"] if part["tag"] == "exact")
    assert compiled["memory"]["arguments"] == pytest.approx(placed, rel=0.01)
    assert {"all-gather", "all-reduce"} & {one["kind"] for one in compiled["collectives"]}
    assert not [path for path in (place / "runs").iterdir() if path.name != ".plans"]

    lines = [line.rstrip() for line in lab.cli(*argv)[1].splitlines()]
    assert any(line.startswith("compiled for 2 devices (cpu) with nnxdsl ") for line in lines)
    assert any(line.endswith(" s, from the cache") for line in lines)
    table = lines[lines.index("memory on each device, as planned and as compiled") :]
    row = next(re.split(r"  +", line) for line in table if line.startswith("arrays and batch (arguments)"))
    assert row[1:3] == [format_bytes(placed), format_bytes(compiled["memory"]["arguments"])]


@pytest.mark.slow
def test_a_compiler_that_takes_too_long_leaves_the_estimate(lab: Any) -> None:
    code, out, _ = lab.cli("plan", "sft.py", "--compile", "--device", "cpu", "--limit", "1")
    assert code == 0
    lines = [line.rstrip() for line in out.splitlines()]
    assert any(line.startswith("= on each device ") for line in lines)
    assert "✘ would not run: exceeded its time limit of 1 s" in lines
