"""Exports the result of a run as a Hub directory, or its adapter in PEFT's format, and verifies the logits."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from nnxdsl.config.weights import HF, Checkpoint, From
from nnxdsl.errors import RunError, WeightsError
from nnxdsl.formats import hf, peft, quantize
from nnxdsl.formats.hf_download import locate
from nnxdsl.models.attention.positions import positions_right_padded
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.families.registry import to_hf
from nnxdsl.models.params import AbstractModel
from nnxdsl.program import xla_options
from nnxdsl.program.architecture import model_type, with_selection
from nnxdsl.program.init import ArrayLike
from nnxdsl.runtime.backend import host_device
from nnxdsl.storage.atomic_dir import atomic_directory, require_vacant
from nnxdsl.terminal.display import Display
from nnxdsl.weights.run_weights import RunWeights
from nnxdsl.weights.sources import starts_from_pissa
from nnxdsl.weights.tokenizer_files import TokenizerFiles

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
"""Supported dtypes of exported weights, by name."""

TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-1}
"""Largest difference of logits after the export, relative to the largest logit: in float32 from merging and sums in
another order, else from the rounding of the weights."""

ROWS, LENGTH = 2, 32
"""Shape of the tokens on which logits are compared, drawn from a fixed seed."""


@attrs.frozen(kw_only=True)
class Exported:
    """The result of `export`.

    Attributes:
        directory: The directory that was written.
        run: The id of the run.
        step: The step of the checkpoint.
        kind: "model" or "adapter".
        dtype: The dtype of the weights; of a quantized model, of those that are not quantized.
        files: Names and sizes in bytes.
        difference: Largest difference between the logits of the exported model and those of the run's model.
        largest: The largest logit of the run's model, for comparison.
        tokenizer: A description of the tokenizer that was written.
        base: The base model of an adapter; None if it is in no Hub format.
        quantization: The format of the weights of linear layers; None if they are not quantized.
        notes: Remarks for the user.
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
    quantization: str | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**attrs.asdict(self), "directory": str(self.directory), "notes": list(self.notes)}


def export(
    run: str | Path,
    directory: str | Path,
    *,
    adapter: bool = False,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    quantization: str | None = None,
    display: Display | None = None,
) -> Exported:
    """Exports the newest undamaged checkpoint of a run for transformers or PEFT.

    Weights are read, merged and written one array at a time. Then the directory is read back, and its logits are
    compared with those of the run's own model before it is renamed to its final name. Relative paths in the experiment,
    such as that of its initial weights, are resolved in the working directory of this process.

    Args:
        run: A run directory, or one step of it: `runs/NAME-ID/checkpoints/STEP`.
        directory: The directory to write, which must not exist.
        adapter: Whether to write only the adapter, for PEFT, instead of the weights with the adapter merged.
        dtype: The dtype of the weights: "float32", "bfloat16" or "float16"; None for float32, or bfloat16 beside
            quantized weights.
        max_shard_bytes: Largest size of a file of weights; None for one file.
        quantization: The format of linear layers' weights, one of `quantize.METHODS`. Every weight that is read back
            is then compared with the run's; the difference of logits, which has no bound, is returned.
        display: Shows progress; None for nothing.

    Raises:
        RunError: There is no such run, `directory` exists, or a write failed.
        WeightsError: There is no checkpoint, no adapter, no family of the Hub with this architecture, or the exported
            model computes other logits than the run's.
    """
    target = Path(directory)
    if dtype is not None and dtype not in DTYPES:
        raise RunError(f"dtype: expected one of {', '.join(DTYPES)}, got '{dtype}'")
    refuse_quantization(quantization, dtype)
    if adapter and quantization is not None:
        raise RunError("quantization has no effect on an adapter; export it alone, or the model with it merged")
    dtype = dtype or ("float32" if quantization is None else "bfloat16")
    if max_shard_bytes is not None and max_shard_bytes < 1:
        raise RunError(f"max_shard_bytes: expected a number above 0, got {max_shard_bytes}")
    require_vacant(target)
    display = display or Display(quiet=True)
    display.stage(f"reading {run}")
    saved = RunWeights.open(Path(run))
    if adapter and saved.adapter is None:
        raise WeightsError(f"{run} trained all weights and has no adapter; export it without --adapter")
    to_hf(saved.config)  # raises before anything is written
    tokenizer = TokenizerFiles.from_experiment(saved.experiment, saved.directory.parent)
    notes = _notes(saved, adapter=adapter)
    with atomic_directory(target) as place:
        if adapter:
            base, is_multimodal = _base_model(saved)
            _write_adapter(place, saved, dtype, base, is_multimodal)
            notes += () if base else (_note_on_base(saved),)
        else:
            base = None
            ids = tokenizer.ids(saved.config.vocab_size)
            notes += _write_model(place, saved, dtype, max_shard_bytes, ids, quantization, display)
        tokenizer.write(place, saved.config.max_length, saved.config.vocab_size)
        display.stage("reading back, and comparing logits")
        difference, largest = _compare(place, target, saved, dtype, is_adapter=adapter, quantization=quantization)
        files = {
            str(path.relative_to(place)): path.stat().st_size for path in sorted(place.rglob("*")) if path.is_file()
        }
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
        quantization=quantization,
        notes=notes,
    )


def refuse_quantization(quantization: str | None, dtype: str | None) -> None:
    """Checks the settings of an output with quantized weights.

    Raises:
        RunError: There is no such format, or the other weights would not be bfloat16.
    """
    if quantization is None:
        return
    if quantization not in quantize.METHODS:
        raise RunError(f"quantization: expected one of {', '.join(quantize.METHODS)}, got '{quantization}'")
    if dtype not in (None, "bfloat16"):
        raise RunError(f"dtype: what is not quantized is bfloat16, got '{dtype}'")


def _write_model(
    place: Path,
    saved: RunWeights,
    dtype: str,
    limit: int | None,
    fields: Mapping[str, Any],
    quantization: str | None,
    display: Display,
) -> tuple[str, ...]:
    shapes = {path: jax.ShapeDtypeStruct(leaf.shape, DTYPES[dtype]) for path, leaf in saved.base.items()}
    count = counted(display, "writing weights", len(shapes))

    def value(path: str) -> np.ndarray:
        count()
        merged = saved.merged(path)
        return merged if quantization is not None else merged.astype(DTYPES[dtype])

    return hf.write(
        place, saved.config, shapes, value=value, max_shard_bytes=limit, fields=fields,
        like=model_type(saved.experiment), quantization=quantization,
    )  # fmt: skip


def counted(display: Display, stage: str, total: int) -> Callable[[], None]:
    """Starts a progress bar over `total` arrays; the returned function advances it by one."""
    display.stage(stage, total, unit="arrays")
    numbers = itertools.count(1)

    def count() -> None:
        display.step(next(numbers), total, {}, {})

    return count


def _write_adapter(place: Path, saved: RunWeights, dtype: str, base: str | None, is_multimodal: bool) -> None:
    assert saved.adapter is not None
    leaves = {path: leaf.astype(DTYPES[dtype]) for path, leaf in saved.adapter_leaves().items()}
    kind = model_type(saved.experiment)
    adapter = saved.adapter
    form: dict[str, Any] = {"is_multimodal": is_multimodal, "is_pissa": starts_from_pissa(saved.experiment)}
    form["whole"] = {path: leaf.astype(DTYPES[dtype]) for path, leaf in saved.head_leaves().items()}
    peft.write(place, saved.config, leaves, adapter=adapter, base=base, model_type=kind, **form)


def _compare(
    place: Path, target: Path, saved: RunWeights, dtype: str, *, is_adapter: bool, quantization: str | None
) -> tuple[float, float]:
    """The largest difference of a logit, and the run's largest logit; with one model in memory at a time.

    Raises:
        WeightsError: A difference exceeds the tolerance, or the files hold another model or adapter.
    """
    tokens = _tokens(saved.config)
    forward = forward_of(saved.policy)
    expected = logits(saved.policy, saved.policy_leaf, tokens, forward)
    if is_adapter:
        read = peft.read(place, saved.config, saved.base, model_type(saved.experiment))
        assert saved.adapter is not None
        if problems := list(read.unlike(saved.adapter, saved.adapter_leaves())):
            listed = "\n  ".join(map(str, problems))
            raise WeightsError(f"{target}: internal error: the files hold another adapter:\n  {listed}")
        leaves = {**read.leaves, **read.whole}
        got = logits(saved.policy, lambda path: leaves[path] if path in leaves else saved.weight(path), tokens, forward)
    else:
        reader = hf.HubReader(place)
        problems = reader.check(saved.plain)
        if problems or reader.config != with_selection(saved.config, selects=True):
            listed = "\n  ".join(map(str, problems or ["config.json has another architecture"]))
            raise WeightsError(f"{target}: internal error: the files hold another model:\n  {listed}")
        if quantization is not None:
            _compare_weights(target, saved, reader, quantize.largest_error(quantization))
        compiled = forward if saved.plain is saved.policy else None
        got = logits(saved.plain, reader.leaf, tokens, compiled)
    difference, largest = float(np.abs(got - expected).max()), float(np.abs(expected).max())
    tolerance = TOLERANCES[dtype] if quantization is None else np.inf
    if not difference <= tolerance * largest:  # also refuses NaN
        raise WeightsError(
            f"{target}: logits of the exported model differ by up to {difference:.3g} from those of the run, whose "
            f"largest is {largest:.3g}; the tolerance in {dtype} is {tolerance * largest:.3g}; nothing was kept"
        )
    return difference, largest


def _compare_weights(target: Path, saved: RunWeights, reader: hf.HubReader, tolerance: float) -> None:
    """Refuses an array that differs from the run's by more than `tolerance`, as a fraction of its largest weight."""
    for path in saved.base:
        merged = saved.merged(path)
        difference = np.abs(np.asarray(reader.leaf(path), np.float32) - merged).max()
        largest = np.abs(merged).max()
        if not difference <= tolerance * largest:
            raise WeightsError(
                f"{target}: {path} as read back differs by up to {difference:.3g} from that of the run, whose largest "
                f"is {largest:.3g}; nothing was kept"
            )


Forward = Callable[[dict[str, jax.Array], jax.Array], jax.Array]


def forward_of(template: AbstractModel) -> Forward:
    """The jitted logits `[B, T, V]` of a model, float32, from its arrays and tokens `[B, T]`."""

    def forward(leaves: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        model = template.merge(leaves)
        assert isinstance(model, Decoder)
        rows, length = tokens.shape
        places = positions_right_padded(jnp.full((rows,), length, jnp.int32), length)
        return model.logits(model(tokens, places, dtype=jnp.float32).hidden)

    return xla_options.jit(forward)


def logits(
    template: AbstractModel, leaf: Callable[[str], ArrayLike], tokens: np.ndarray, forward: Forward | None = None
) -> np.ndarray:
    """A model's logits, computed on the host in float32.

    Args:
        template: The model.
        leaf: Returns its arrays by path.
        tokens: `[B, T]`.
        forward: The function of `forward_of` for the same template, if it is compiled already.

    Returns:
        `[B, T, V]` float32.
    """
    with jax.default_device(host_device()), jax.default_matmul_precision("highest"):
        leaves = {path: jnp.asarray(leaf(path)) for path in template.variables}
        return np.asarray((forward or forward_of(template))(leaves, jnp.asarray(tokens)))


def _tokens(config: DecoderConfig) -> np.ndarray:
    draw = np.random.default_rng(0)
    return draw.integers(0, config.vocab_size, (ROWS, min(LENGTH, config.max_length))).astype(np.int32)


def _base_model(saved: RunWeights) -> tuple[str | None, bool]:
    """The path or name of an adapter's base model, and whether transformers loads it as a multimodal model."""
    weights = saved.experiment.model.weights
    if not isinstance(weights, HF):
        return None, False
    directory = locate(weights.path)
    fields = hf.read_fields(directory)
    is_local = Path(weights.path).expanduser().is_dir()
    return os.fspath(directory.resolve()) if is_local else weights.path, "text_config" in fields


def _note_on_base(saved: RunWeights) -> str:
    """How to get the base model of an adapter if it is no Hub directory."""
    match saved.experiment.model.weights:
        case From(experiment=earlier) if earlier.quantization is None:
            base = f"the base is the final model of {earlier.id}: nnxdsl export {earlier.id} BASE"
        case Checkpoint(path=path):
            base = f"the base is the model in {path}: nnxdsl export {path} BASE"
        case weights:
            base = f"the run started from Weights.{type(weights).__name__}; an export without --adapter holds it"
    return f"base_model_name_or_path is empty, since the base is no Hub directory; {base}"


def _notes(saved: RunWeights, *, adapter: bool) -> tuple[str, ...]:
    notes = tuple(f"{damage}; an earlier one was used" for damage in saved.damaged)
    if adapter and saved.experiment.mtp_loss_weight:
        notes += (
            "the multi-token-prediction (MTP) layer that the run trained is in no adapter; export the model for it",
        )
    if saved.experiment.quantization is None or saved.adapter is None:
        return notes
    kind = type(saved.experiment.quantization).__name__
    return (
        *notes,
        f"the run quantized its base ({kind}); the export, and the logits it was compared with, are those of its "
        f"adapter on the unquantized weights",
    )
