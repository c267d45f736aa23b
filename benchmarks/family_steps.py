"""How near training of every family is to torch: the second table of docs/guides/models.md.

`python benchmarks/family_steps.py --peers PYTHON [NAME ...]` trains the stored checkpoints of tests/reference/families
for five steps, all of the model on texts (SFT) and LoRA on pairs (DPO), and compares with the same steps in torch, by
tests/reference/train_families.py in that environment, from the same rows and the same first values of adapters.
Figures are the largest of all relative differences of a step's loss and of its gradient norm, and of the difference of
what the five steps added to the weights, relative to it (both as one vector). LoRA is put on every layer for which PEFT
has adapters: not on parts of a joined tensor, and not on stacked experts. `--update` writes the lines into the table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import family_parity
import jax
import numpy as np
from safetensors.numpy import load_file

import nnxdsl
from nnxdsl import Adapter, Data, Experiment, Memory, Model, Objective, Optimizer, Schedule, Weights, WeightsError
from nnxdsl.adapters import lora_math
from nnxdsl.data.batch import PairBatch, SequenceBatch
from nnxdsl.formats import hf, peft
from nnxdsl.program.compile import Program, TrainState

SCRIPT = family_parity.REFERENCE.parent / "train_families.py"
COLUMNS = ("SFT", "LoRA-DPO")
Arrays = dict[str, np.ndarray]
STEPS, ROWS = 5, 4
LORA = Adapter.LoRA(rank=2, alpha=4.0)
# AdamW divides by the size of a gradient; with its usual eps of 1e-8 it would enlarge the rounding of those near zero.
ADAMW = Optimizer.AdamW(schedule=Schedule.Constant(lr=1e-3), eps=1e-4, max_grad_norm=1.0)
FIGURES = ("loss", "grad_norm")
NAMES = ("prompt", "chosen", "rejected")
LONGEST = {"prompt": 12, "chosen": 12, "rejected": 12, "tokens": 40}


def padded(rows: list[list[int]], size: int, *, left: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Tokens `[B, size]` and lengths `[B]`."""
    tokens = np.zeros((len(rows), size), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[slice(size - len(ids), None) if left else slice(len(ids))] = ids
    return tokens, np.array([len(ids) for ids in rows], np.int32)


def texts(vocab: int) -> tuple[list[Any], list[SequenceBatch]]:
    """Random rows of every step, as lists of ids and as batches."""
    draw, steps, batches = np.random.default_rng(5), [], []
    for _ in range(STEPS):
        steps.append([draw.integers(0, vocab, draw.integers(8, 41)).tolist() for _ in range(ROWS)])
        tokens, length = padded(steps[-1], LONGEST["tokens"])
        slots = np.arange(tokens.shape[1])[None]
        mask = (slots >= 1) & (slots < length[:, None])
        batches.append(SequenceBatch(tokens, length, mask, np.ones(ROWS, np.float32)))
    return steps, batches


def pairs(vocab: int) -> tuple[list[Any], list[PairBatch]]:
    """As `texts`, of preference pairs."""
    draw, steps, batches = np.random.default_rng(6), [], []
    for _ in range(STEPS):
        rows = [{name: draw.integers(0, vocab, draw.integers(3, 13)).tolist() for name in NAMES} for _ in range(ROWS)]
        steps.append(rows)
        parts = [padded([row[name] for row in rows], LONGEST[name], left=name == "prompt") for name in NAMES]
        tokens, lengths = zip(*parts, strict=True)
        batches.append(PairBatch(*tokens, *lengths, weight=np.ones(ROWS, np.float32)))
    return steps, batches


def experiment(directory: Path, adapter: Adapter | None) -> Experiment:
    """Full SFT, or DPO with an adapter."""
    objective: dict[str, Any] = {
        "objective": Objective.SFT(loss_on="all"),
        "data": Data.Text("none.jsonl", max_length=LONGEST["tokens"]),
    }
    if adapter is not None:
        data = Data.Preferences("none.jsonl", max_prompt_length=12, max_completion_length=12)
        objective = {"objective": Objective.DPO(), "data": data, "memory": Memory(reference="online")}
    model = Model.HF(str(directory), weights=Weights.HF(str(directory)))
    return Experiment(
        name="family", model=model, adapter=adapter, optimizer=ADAMW, batch_size=ROWS, steps=STEPS, **objective
    )


def peft_targets(reader: hf.HubReader, kind: str) -> tuple[str, ...]:
    """The layers of a block whose adapters PEFT has: not parts of a tensor, and not stacked experts."""
    trained = nnxdsl.compile(experiment(reader.directory, LORA)).blueprint.trainable
    has: dict[str, bool] = {}
    for path in (path.removesuffix(lora_math.A) for path in trained if path.endswith(lora_math.A)):
        arrays = {path + side: np.zeros(trained[path + side].shape, np.float32) for side in (lora_math.A, lora_math.B)}
        layer = path.partition("blocks.")[2].split(".", 1)[1].removesuffix(".kernel")
        with tempfile.TemporaryDirectory() as place:
            try:
                peft.write(place, reader.config, arrays, adapter=LORA, base=None, model_type=kind)
                has.setdefault(layer, True)
            except WeightsError:
                has[layer] = False
    return tuple(sorted(layer for layer, is_written in has.items() if is_written))


def compared(directory: Path, python: Path, *, lora: bool) -> float:
    """The largest relative difference from torch of any step's loss and gradient norm, and of the whole update."""
    reader = hf.HubReader(directory)
    kind = hf.read_fields(directory)["model_type"]
    adapter = attrs.evolve(LORA, targets=peft_targets(reader, kind)) if lora else None
    program = nnxdsl.compile(experiment(directory, adapter))
    state = program.init()
    begun = {path: np.asarray(leaf) for path, leaf in state.trainable.items()}
    rows, batches = (pairs if lora else texts)(reader.config.vocab_size)
    with tempfile.TemporaryDirectory() as place:
        out = Path(place)
        (out / "rows.json").write_text(json.dumps(rows))
        argv = [str(python), str(SCRIPT), str(directory), str(out / "rows.json"), str(out / "torch")]
        if adapter is not None:
            peft.write(out, reader.config, begun, adapter=adapter, base=None, model_type=kind)
            argv.append(str(out / "adapter_model.safetensors"))
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        theirs = json.loads((out / "torch" / "figures.json").read_text())
        ours, ended = trained(program, state, batches)
        if adapter is None:
            checkpoint = hf.HubReader(out / "torch")
            last = {path: np.asarray(checkpoint.leaf(path)) for path in ended}
        else:
            files = []
            for leaves in (begun, ended):
                peft.write(out, reader.config, leaves, adapter=adapter, base=None, model_type=kind)
                files.append(load_file(out / "adapter_model.safetensors"))
            begun, ended = files
            last = load_file(out / "torch" / "adapter_model.safetensors")
    figures = [[step[name] for name in FIGURES] for step in theirs]
    return difference(ours, np.array(figures), added(begun, ended), added(begun, last))


def trained(program: Program, state: TrainState, batches: Sequence[Any]) -> tuple[np.ndarray, Arrays]:
    """The figures of each step, `[steps, FIGURES]`, and what is trained after the last."""
    figures = []
    for batch in batches:
        state, metrics = program.step(state, batch)
        figures.append([float(metrics[name]) for name in FIGURES])
    return np.array(figures), {path: np.asarray(leaf) for path, leaf in state.trainable.items()}


def added(begun: Arrays, ended: Arrays) -> Arrays:
    """What steps added to each array."""
    assert begun.keys() == ended.keys()
    return {path: ended[path] - first for path, first in begun.items()}


def difference(ours: np.ndarray, theirs: np.ndarray, own_update: Arrays, their_update: Arrays) -> float:
    """The largest relative difference of a figure, and of the whole update; NaN if one is."""
    norm = sum(float(np.sum(np.square(leaf, dtype=np.float64))) for leaf in their_update.values())
    off = sum(
        float(np.sum(np.square(leaf - own_update[path], dtype=np.float64))) for path, leaf in their_update.items()
    )
    return float(np.max([*np.abs(ours / theirs - 1).ravel(), (off / norm) ** 0.5]))


def own_change(directory: Path) -> float:
    """As `compared`, of full SFT by nnxdsl from these weights, and from weights changed by 1e-7 of their size."""
    program = nnxdsl.compile(experiment(directory, None))
    _, batches = texts(hf.HubReader(directory).config.vocab_size)
    draw, figures, updates = np.random.default_rng(0), [], []
    for size in (0.0, 1e-7):
        state = program.init()
        begun = {path: np.asarray(leaf) for path, leaf in state.trainable.items()}
        changed = {
            path: (leaf * (1 + size * draw.standard_normal(leaf.shape))).astype(np.float32)
            for path, leaf in begun.items()
        }
        ours, ended = trained(program, state._replace(trainable=jax.device_put(changed)), batches)
        figures.append(ours)
        updates.append(added(changed, ended))
    return difference(*figures[::-1], *updates[::-1])


def main() -> int:
    """What the command line asks for; 1 if a figure is not within 1e-4."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    against = parser.add_mutually_exclusive_group(required=True)
    against.add_argument("--peers", type=Path, help="a Python with torch and transformers")
    against.add_argument("--own-change", action="store_true", help="only what a change of weights by 1e-7 does to SFT")
    parser.add_argument("--update", action="store_true", help="write the lines into docs/guides/models.md")
    options = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    if options.update and options.own_change:
        parser.error("--update: --own-change prints no table")
    for name in options.names or sorted(path.name for path in family_parity.REFERENCE.iterdir()):
        directory = family_parity.REFERENCE / name
        if options.own_change:
            print(name, family_parity.entry(own_change(directory)), flush=True)
            continue
        rows[name] = {
            column: compared(directory, options.peers, lora=lora)
            for column, lora in zip(COLUMNS, (False, True), strict=True)
        }
        print(name, {column: family_parity.entry(value) for column, value in rows[name].items()}, flush=True)
    if options.own_change:
        return 0
    text = family_parity.table(rows, "five steps", COLUMNS)
    print(f"\n{text}")
    if options.update:
        family_parity.update(text)
    return int(any(not value <= 1e-4 for row in rows.values() for value in row.values()))


if __name__ == "__main__":
    sys.exit(main())
