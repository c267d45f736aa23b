"""How near every family is to transformers, and to itself in other forms: the table of docs/guides/models.md.

`python benchmarks/family_parity.py [NAME ...]` prints it, one line for each of the stored checkpoints in
tests/reference/families, which tests/reference/make_families.py made with transformers. All figures are the largest
differences in float32, relative to the largest logit (logits, left, packed, LoRA, NF4, export) or to the figure itself
(loss, gradient, 8 devices); an answer is equal or it is not.

`--peers PYTHON` also loads what nnxdsl exports in that environment's transformers; without it that column is left out.
`--update` writes the lines into the table of docs/guides/models.md; those of other checkpoints stay as they are.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get("XLA_FLAGS", "")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import nnxdsl
from nnxdsl import Adapter, Data, Experiment, Memory, Mesh, Model, Objective, Optimizer, Quantization, Schedule, Weights
from nnxdsl.adapters import lora_math, weight_only_quant
from nnxdsl.adapters.lora import abstract_decoder as adapted
from nnxdsl.data.batch import PairBatch
from nnxdsl.formats import hf
from nnxdsl.generate.sampler import Sampler
from nnxdsl.generate.sampling import Sampling
from nnxdsl.models.attention.positions import TokenPositions, positions_left_padded, positions_right_padded
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.params import AbstractModel, abstract

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "tests" / "reference" / "families"
PAGE = ROOT / "docs" / "guides" / "models.md"
COLUMNS = ("logits", "loss", "gradient", "answers", "left", "packed", "LoRA", "NF4", "8 devices", "export")
LORA = Adapter.LoRA(rank=2, alpha=4.0)
NF4 = Quantization.NF4(block_size=4)
Leaves = dict[str, jax.Array]


def relative(result: Any, expected: Any) -> float:
    """The largest difference, of the largest value that is expected."""
    return float(np.abs(np.asarray(result) - expected).max() / np.abs(expected).max())


def logits_of(template: AbstractModel) -> Callable[[Leaves, Any, TokenPositions], jax.Array]:
    """A compiled forward pass."""

    @jax.jit
    def logits(leaves: Leaves, tokens: jax.Array, places: TokenPositions) -> jax.Array:
        decoder: Any = template.merge(leaves)
        return decoder.logits(decoder(tokens, places, dtype=jnp.float32).hidden)

    return logits


class Family:
    """A stored checkpoint, and what transformers says of it."""

    def __init__(self, name: str) -> None:
        self.directory = REFERENCE / name
        self.reader = hf.HubReader(self.directory)
        self.config = self.reader.config
        self.template = abstract(lambda: Decoder(self.config, rngs=nnx.Rngs(0)))
        assert self.reader.check(self.template) == []
        self.leaves: Leaves = {path: jnp.asarray(self.reader.leaf(path)) for path in self.template.variables}
        self.expected = dict(np.load(self.directory / "expected.npz"))
        self.tokens, self.lengths = self.expected["tokens"], self.expected["lengths"]
        self.size = self.tokens.shape[1]
        self.logits = logits_of(self.template)

    def real(self, logits: jax.Array) -> np.ndarray:
        """Logits of all tokens that are no padding, one row after the other."""
        return np.concatenate([np.asarray(row)[:n] for row, n in zip(logits, self.lengths, strict=True)])

    def measured(self) -> dict[str, float | bool]:
        """Every figure that needs no other program."""
        places = positions_right_padded(jnp.asarray(self.lengths), self.size)
        wanted = self.real(self.expected["logits"])
        plain = self.real(self.logits(self.leaves, self.tokens, places))
        loss, norm = self._loss()
        shifted = np.stack([np.roll(row, self.size - n) for row, n in zip(self.tokens, self.lengths, strict=True)])
        left = self.logits(self.leaves, shifted, positions_left_padded(jnp.asarray(self.lengths), self.size))
        left = [np.asarray(row)[self.size - n :] for row, n in zip(left, self.lengths, strict=True)]
        return {
            "logits": relative(plain, wanted),
            "loss": abs(loss / float(self.expected["loss"]) - 1),
            "gradient": abs(norm / float(self.expected["norm"]) - 1),
            "answers": self._answers(),
            "left": relative(np.concatenate(left), wanted),
            "packed": relative(self._packed(), wanted),
            "LoRA": self._lora(),
            "NF4": self._few_bits(),
            "8 devices": self._devices(),
        }

    def _loss(self) -> tuple[float, float]:
        tokens, lengths = jnp.asarray(self.tokens), jnp.asarray(self.lengths)

        @jax.jit
        @jax.value_and_grad
        def loss(leaves: Leaves) -> jax.Array:
            logps = jax.nn.log_softmax(self.logits(leaves, tokens, positions_right_padded(lengths, self.size))[:, :-1])
            chosen = jnp.take_along_axis(logps, tokens[:, 1:, None], axis=-1)[..., 0]
            counted = jnp.arange(1, self.size) < lengths[:, None]
            return -jnp.sum(chosen * counted) / jnp.sum(counted)

        value, gradient = loss(self.leaves)
        return float(value), float(np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in gradient.values())))

    def _answers(self) -> bool:
        """Whether the sampler of `nnxdsl.load`, through its cache, answers as transformers does."""
        prompt, greedy = int(self.expected["prompt"]), self.expected["greedy"]
        sampler = Sampler(self.template, self.config, jnp.dtype("float32"), ())
        result = sampler(self.leaves, self.tokens[:, :prompt].tolist(), Sampling(greedy.shape[1]))
        return result == greedy.tolist()

    def _packed(self) -> jax.Array:
        position = np.concatenate([np.arange(n) for n in self.lengths])[None].astype(np.int32)
        segment = np.repeat(np.arange(1, len(self.lengths) + 1), self.lengths)[None].astype(np.int32)
        places = TokenPositions(*map(jnp.asarray, (position, segment, np.zeros_like(segment))))
        tokens = np.concatenate([row[:n] for row, n in zip(self.tokens, self.lengths, strict=True)])[None]
        return self.logits(self.leaves, tokens, places)[0]

    def _lora(self) -> float:
        """Adapters beside the weights against adapters merged into them."""
        template = adapted(self.config, jnp.float32, LORA)
        draw = np.random.default_rng(0)
        fields = {
            path: jnp.asarray(draw.standard_normal(leaf.shape) * 0.2, jnp.float32)
            for path, leaf in template.variables.items()
            if lora_math.is_adapter(path)
        }
        merged = dict(self.leaves)
        for path in [path for path in self.leaves if path + lora_math.A in fields]:
            merged[path] = lora_math.merge(
                LORA, self.leaves[path], fields[path + lora_math.A], fields[path + lora_math.B]
            )
        places = positions_right_padded(jnp.asarray(self.lengths), self.size)
        beside = logits_of(template)({**self.leaves, **fields}, self.tokens, places)
        return relative(self.real(beside), self.real(self.logits(merged, self.tokens, places)))

    def _few_bits(self) -> float:
        """Weights in four bits against the weights that these stand for."""
        template = adapted(self.config, jnp.float32, None, NF4)
        small, whole = {}, {}
        for path, leaf in self.leaves.items():
            if path in template.variables:
                small[path] = whole[path] = leaf
            else:
                small[path + weight_only_quant.QVALUE], small[path + weight_only_quant.SCALE] = (
                    weight_only_quant.quantize(leaf, NF4)
                )
                whole[path] = weight_only_quant.rounded(leaf, NF4)
        places = positions_right_padded(jnp.asarray(self.lengths), self.size)
        result = logits_of(template)(small, self.tokens, places)
        return relative(self.real(result), self.real(self.logits(whole, self.tokens, places)))

    def _devices(self) -> float:
        """Two DPO steps with adapters on eight devices against one: the largest difference of any metric."""
        draw, rows, size = np.random.default_rng(1), 8, 16
        ids = {name: draw.integers(0, self.config.vocab_size, (rows, size)).astype(np.int32) for name in NAMES}
        lengths = {f"{name}_length": draw.integers(3, size + 1, rows).astype(np.int32) for name in NAMES}
        batch = PairBatch(**ids, **lengths, weight=np.ones(rows, np.float32))
        result = []
        for mesh in (Mesh(), Mesh(fsdp=2, expert=2, tensor=2)):
            path = str(self.directory)
            program = nnxdsl.compile(
                Experiment(
                    name="family",
                    model=Model.HF(path, weights=Weights.HF(path)),
                    adapter=LORA,
                    objective=Objective.DPO(),
                    data=Data.Preferences("none.jsonl", max_prompt_length=size, max_completion_length=size),
                    optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
                    memory=Memory(reference="online"),
                    mesh=mesh,
                    batch_size=rows,
                    steps=2,
                )
            )
            state = program.init()
            for _ in range(2):
                state, metrics = program.step(state, batch)
            result.append({name: float(value) for name, value in metrics.items()})
        one, eight = result
        return max(abs(eight[name] - value) / max(abs(value), 1e-2) for name, value in one.items())

    def exported(self, python: Path) -> float:
        """What transformers says of the directory that we write, against what it said of the first."""
        script = ROOT / "tests" / "reference" / "make_families.py"
        with tempfile.TemporaryDirectory() as place:
            kind = hf.read_fields(self.directory)["model_type"]
            hf.write(place, self.config, {path: np.asarray(leaf) for path, leaf in self.leaves.items()}, like=kind)
            argv = [str(python), str(script), "check", place, self.directory.name]
            done = subprocess.run(argv, capture_output=True, text=True, check=True)
        return float(done.stdout.split()[-1]) / float(np.abs(self.expected["logits"]).max())


NAMES = ("prompt", "chosen", "rejected")


def entry(value: float | bool | str | None) -> str:
    """A figure, or a text, as the table shows it."""
    if value is None:
        return "not run"
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "equal" if value else "differ"
    return "0" if value == 0 else f"{value:.0e}"


def table(rows: dict[str, dict[str, Any]], title: str = "family", columns: Sequence[str] = COLUMNS) -> str:
    """The table in Markdown."""
    lines = [(title, *columns), ("---",) * (len(columns) + 1)]
    lines += [(name, *(entry(figures.get(column)) for column in columns)) for name, figures in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def updated(page: str, text: str) -> str:
    """The page with the lines of `text` in its table, sorted by name; lines of checkpoints without a figure stay."""
    head, rule, *new = text.splitlines()
    match = re.search(rf"{re.escape(head)}\n.*?\n\n", page, flags=re.DOTALL)
    assert match is not None  # or the page has no such table
    _, _, *old = match[0].strip().splitlines()
    lines = {line.split("|")[1].strip(): line for line in (*old, *new)}
    merged = "\n".join((head, rule, *(lines[name] for name in sorted(lines))))
    return page.replace(match[0], merged + "\n\n")


def update(text: str) -> None:
    """Writes the lines of a table into that of the page."""
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")


def main() -> int:
    """What the command line asks for; 1 if an answer differs or a figure is above 1e-4."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--peers", type=Path, help="a Python with torch and transformers")
    parser.add_argument("--update", action="store_true", help="write the lines into docs/guides/models.md")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for name in options.names or sorted(path.name for path in REFERENCE.iterdir()):
        family = Family(name)
        rows[name] = family.measured()
        if options.peers is not None:
            rows[name]["export"] = family.exported(options.peers)
        print(name, {column: entry(value) for column, value in rows[name].items()}, flush=True)
    text = table(rows)
    print(f"\n{text}")
    if options.update:
        update(text)
    bad = [v for row in rows.values() for v in row.values() if v is False or (v is not True and not v <= 1e-4)]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
