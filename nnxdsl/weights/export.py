"""What a run learnt, as other people's programs load it: a Hub directory, or an adapter in PEFT's format."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from nnxdsl.config.experiment import Experiment
from nnxdsl.config.model import Model
from nnxdsl.config.weights import HF, Checkpoint, From
from nnxdsl.errors import RunError, WeightsError
from nnxdsl.formats import hf, peft
from nnxdsl.formats.hf_download import locate
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.families.registry import family_of, to_hf
from nnxdsl.models.params import AbstractModel
from nnxdsl.program.init import ArrayLike
from nnxdsl.storage.atomic_dir import appearing, require_vacant
from nnxdsl.terminal.display import Display
from nnxdsl.weights.run_weights import RunWeights, host_device
from nnxdsl.weights.tokenizer_files import TokenizerFiles

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
"""In which weights are written, by name."""

CLOSE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-1}
"""Largest difference that rounding may make between logits of what is written and those of the run, as a part of the
largest: in float32 that of merging and of sums in another order, else that of the weights' own rounding."""

ROWS, LENGTH = 2, 32
"""Of the tokens on which logits are compared; drawn from a fixed seed."""


@attrs.frozen(kw_only=True)
class Exported:
    """What was written.

    Attributes:
        directory: where.
        run: the run it is of.
        step: the checkpoint's step.
        kind: "model" or "adapter".
        dtype: of the weights.
        files: names and sizes in bytes.
        difference: largest difference between a logit of what was read back and that of the run's model.
        largest: the run's largest logit, to judge it by.
        tokenizer: which tokenizer is beside the weights.
        base: of an adapter, what it belongs to; None where that is nowhere in the Hub's format.
        notes: what else is to be known.
    """

    directory: Path
    run: str
    step: int
    kind: str
    dtype: str
    files: Mapping[str, int]
    difference: float
    largest: float
    tokenizer: str
    base: str | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {**attrs.asdict(self), "directory": str(self.directory), "notes": list(self.notes)}


def export(
    run: str | Path,
    directory: str | Path,
    *,
    adapter: bool = False,
    dtype: str = "float32",
    max_shard_bytes: int | None = None,
    display: Display | None = None,
) -> Exported:
    """Writes what a run learnt for transformers or PEFT to load, from its newest good checkpoint.

    Weights are read, merged and written one leaf at a time. Then the directory is read back, and its logits are
    compared with those of the run's own model; only then it has its name. Relative paths in the experiment, such as
    that of its first weights, are taken from the directory that this process works in.

    Args:
        run: a run's directory, or one step of it: `runs/NAME-ID/checkpoints/STEP`.
        directory: where to; nothing may be there.
        adapter: write the adapter alone, for PEFT, and not the weights with the adapter in them.
        dtype: of what is written: "float32", "bfloat16" or "float16".
        max_shard_bytes: the most that one file of weights holds; None for one file.
        display: what people see of it; None for nothing.

    Returns:
        What was written.

    Raises:
        RunError: there is no such run, something is at `directory`, or the disk will not take it.
        WeightsError: there is no checkpoint, no adapter, no family of the Hub with such a network, or what was written
            does not compute what the run's model does.
    """
    target = Path(directory)
    if dtype not in DTYPES:
        raise RunError(f"dtype: expected one of {', '.join(DTYPES)}, got '{dtype}'")
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise RunError(f"max_shard_bytes: expected a number above 0, got {max_shard_bytes}")
    require_vacant(target)
    display = display or Display(quiet=True)
    display.stage(f"reading {run}")
    saved = RunWeights.open(Path(run))
    if adapter and saved.adapter is None:
        raise WeightsError(f"{run} trained all weights and has no adapter; export it without --adapter")
    to_hf(saved.config)  # refused before anything is written
    tokenizer = TokenizerFiles.of(saved.experiment, saved.directory.parent)
    notes = _notes(saved)
    with appearing(target) as place:
        if adapter:
            base, multimodal = _base_of(saved)
            _write_adapter(place, saved, dtype, base, multimodal)
            notes += () if base else (_baseless(saved),)
        else:
            base = None
            _write_model(place, saved, dtype, max_shard_bytes, tokenizer.ids(saved.config.vocab_size), display)
        tokenizer.write(place, saved.config.max_length, saved.config.vocab_size)
        display.stage("reading back, and comparing logits")
        difference, largest = _compare(place, target, saved, dtype, is_adapter=adapter)
        files = {path.name: path.stat().st_size for path in sorted(place.iterdir())}
    return Exported(
        directory=target,
        run=saved.directory.name,
        step=saved.step,
        kind="adapter" if adapter else "model",
        dtype=dtype,
        files=files,
        difference=difference,
        largest=largest,
        tokenizer=tokenizer.description,
        base=base,
        notes=notes,
    )


def _write_model(
    place: Path, saved: RunWeights, dtype: str, limit: int | None, fields: Mapping[str, Any], display: Display
) -> None:
    shapes = {path: jax.ShapeDtypeStruct(leaf.shape, DTYPES[dtype]) for path, leaf in saved.base.items()}
    count = counted(display, "writing weights", len(shapes))

    def value(path: str) -> np.ndarray:
        count()
        return saved.merged(path).astype(DTYPES[dtype])

    like = model_type(saved.experiment)
    hf.write(place, saved.config, shapes, value=value, max_shard_bytes=limit, fields=fields, like=like)


def counted(display: Display, stage: str, total: int) -> Callable[[], None]:
    """Begins a stage of so many arrays; what is returned counts one, which moves the bar where there is one."""
    display.stage(stage, total, unit="arrays")
    numbers = itertools.count(1)

    def count() -> None:
        if display.console.is_terminal:
            display.step(next(numbers), total, {}, {})

    return count


def _write_adapter(place: Path, saved: RunWeights, dtype: str, base: str | None, is_multimodal: bool) -> None:
    assert saved.adapter is not None
    leaves = {path: leaf.astype(DTYPES[dtype]) for path, leaf in saved.adapter_leaves().items()}
    peft.write(place, saved.config, leaves, adapter=saved.adapter, base=base, is_multimodal=is_multimodal)


def _compare(place: Path, target: Path, saved: RunWeights, dtype: str, *, is_adapter: bool) -> tuple[float, float]:
    """The largest difference of a logit, and the run's largest logit.

    One of the two models is in memory at a time.

    Raises:
        WeightsError: they differ by more than rounding explains, or arrays are not what was written.
    """
    tokens = _tokens(saved.config)
    forward = forward_of(saved.policy)
    wanted = logits(saved.policy, saved.policy_leaf, tokens, forward)
    if is_adapter:
        read = peft.read(place, saved.config, saved.base)
        ours = saved.adapter
        assert ours is not None
        if problems := list(read.unlike(ours, saved.adapter_leaves())):
            found = "\n  ".join(map(str, problems))
            raise WeightsError(f"{target}: was read back as another adapter, which should not be:\n  {found}")
        given = read.leaves
        got = logits(saved.policy, lambda path: given[path] if path in given else saved.weight(path), tokens, forward)
    else:
        reader = hf.HubReader(place)
        problems = reader.check(saved.plain)
        if problems or reader.config != saved.config:
            found = "\n  ".join(map(str, problems or ["config.json says another network"]))
            raise WeightsError(f"{target}: was read back as something else, which should not be:\n  {found}")
        again = forward if saved.plain is saved.policy else None
        got = logits(saved.plain, reader.leaf, tokens, again)
    difference, largest = float(np.abs(got - wanted).max()), float(np.abs(wanted).max())
    if not difference <= CLOSE[dtype] * largest:  # a NaN is no agreement either
        raise WeightsError(
            f"{target}: what was written gives logits up to {difference:.3g} away from those of the run, of which the "
            f"largest is {largest:.3g}; {dtype} explains no more than {CLOSE[dtype] * largest:.3g}, so it was not kept"
        )
    return difference, largest


Forward = Callable[[dict[str, jax.Array], jax.Array], jax.Array]


def forward_of(template: AbstractModel) -> Forward:
    """The jitted logits `[B, T, V]` of a model, float32, from its arrays and tokens `[B, T]`."""

    def forward(leaves: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        model = template.merge(leaves)
        assert isinstance(model, Decoder)
        rows, length = tokens.shape
        places = positions_right_padded(jnp.full((rows,), length, jnp.int32), length)
        return model.logits(model(tokens, places, dtype=jnp.float32).hidden)

    return jax.jit(forward)


def logits(
    template: AbstractModel, leaf: Callable[[str], ArrayLike], tokens: np.ndarray, forward: Forward | None = None
) -> np.ndarray:
    """A model's logits, computed on the host in float32.

    Args:
        template: the model.
        leaf: gives its arrays by path.
        tokens: `[B, T]`.
        forward: of the same template, if it has been compiled already.

    Returns:
        `[B, T, V]` float32.
    """
    with jax.default_device(host_device()), jax.default_matmul_precision("highest"):
        leaves = {path: jnp.asarray(leaf(path)) for path in template.variables}
        return np.asarray((forward or forward_of(template))(leaves, jnp.asarray(tokens)))


def _tokens(config: DecoderConfig) -> np.ndarray:
    draw = np.random.default_rng(0)
    return draw.integers(0, config.vocab_size, (ROWS, min(LENGTH, config.max_length))).astype(np.int32)


def model_type(experiment: Experiment) -> str | None:
    """What the Hub calls the family of an experiment's network; None where that is not known."""
    model = experiment.model
    places = [place.path for place in (model, model.weights) if isinstance(place, HF | Model.HF)]
    for place in map(Path, places):
        if (file := place.expanduser() / "config.json").is_file():
            return json.loads(file.read_text(encoding="utf-8")).get("model_type")
    family = family_of(model)
    return None if family is None else family.model_types[0]


def _base_of(saved: RunWeights) -> tuple[str | None, bool]:
    """What an adapter belongs to, and whether transformers loads that with parts for other inputs than text."""
    weights = saved.experiment.model.weights
    if not isinstance(weights, HF):
        return None, False
    directory = locate(weights.path)
    fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    is_local = Path(weights.path).expanduser().is_dir()
    return os.fspath(directory.resolve()) if is_local else weights.path, "text_config" in fields


def _baseless(saved: RunWeights) -> str:
    """Where the base of an adapter is to be had, that no Hub directory is."""
    match saved.experiment.model.weights:
        case From(experiment=earlier) if earlier.quantization is None:
            base = f"the base is what {earlier.id} ended with: nnxdsl export {earlier.id} BASE"
        case Checkpoint(path=path):
            base = f"the base is what {path} holds: nnxdsl export {path} BASE"
        case weights:
            base = f"the run began with Weights.{type(weights).__name__}; without --adapter the base is in the export"
    return f"base_model_name_or_path is empty, since no Hub directory is the base; {base}"


def _notes(saved: RunWeights) -> tuple[str, ...]:
    notes = tuple(f"{damage}; an earlier one was taken" for damage in saved.passed_over)
    if saved.experiment.quantization is None or saved.adapter is None:
        return notes
    kind = type(saved.experiment.quantization).__name__
    return (
        *notes,
        f"the run kept its base in few bits ({kind}); what is exported, and what its logits were compared with, is its "
        f"adapter on the weights before they were quantised",
    )
