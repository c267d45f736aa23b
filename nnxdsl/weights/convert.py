"""Converts weights between formats: Hub directories, checkpoints of weights only, Linen trees."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import attrs
import flax.serialization
import jax
import numpy as np

from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.errors import RunError, WeightsError
from nnxdsl.formats import hf, linen
from nnxdsl.formats.hf_names import tensor_sources
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.families.registry import text_fields, to_hf
from nnxdsl.models.params import is_mtp_param
from nnxdsl.runs.checkpointer import Checkpoints
from nnxdsl.storage.atomic_dir import atomic_directory, require_vacant
from nnxdsl.terminal.display import Display
from nnxdsl.weights import tokenizer_files
from nnxdsl.weights.export import DTYPES, counted, export, refuse_quantization
from nnxdsl.weights.open import CONFIG, LINEN, Weights, open_weights
from nnxdsl.weights.saved_run import PARAMS, TRAINABLE, SavedRun

Format = Literal["hub", "checkpoint", "linen"]


@attrs.frozen(kw_only=True)
class Converted:
    """The result of `convert`.

    Attributes:
        source: The path that was read.
        kind: Its format.
        directory: The directory that was written.
        to: Its format.
        arrays: Number of arrays.
        size: Bytes of all arrays.
        notes: Remarks for the user.
    """

    source: Path
    kind: str
    directory: Path
    to: Format
    arrays: int
    size: int
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {
            **attrs.asdict(self), "source": str(self.source), "directory": str(self.directory),
            "notes": list(self.notes),
        }  # fmt: skip


def convert(
    source: str | Path,
    directory: str | Path,
    to: Format,
    *,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    unrolled: bool = False,
    quantization: str | None = None,
    display: Display | None = None,
) -> Converted:
    """Writes weights in another format; values are unchanged, bit for bit, unless a dtype or quantization is given.

    The adapter of a run is merged into its weights, in float32. To "checkpoint", the run's trained arrays are copied
    instead, with its experiment and without the optimizer state; `Weights.Checkpoint` starts from it as from the run.

    Args:
        source: Weights of any format in `open.FORMATS`.
        directory: The directory to write, which must not exist.
        to: "hub": a directory for transformers; "checkpoint": our format, weights only; "linen": `params.msgpack` for
            `flax.serialization.msgpack_restore`, with a `config.json`.
        dtype: The dtype of all arrays; None for no change.
        max_shard_bytes: Largest size of a file; for "hub" only.
        unrolled: Whether each layer is separate, as `layers_0`; for "linen" only.
        quantization: The format of linear layers' weights, one of `quantize.METHODS`, the rest in bfloat16; for "hub"
            only.
        display: Shows progress; None for nothing.

    Raises:
        RunError: `directory` exists, a write failed, or settings are inconsistent.
        WeightsError: The weights cannot be read, or their architecture is unknown.
    """
    place, target = Path(source), Path(directory)
    _refuse(to, dtype, max_shard_bytes, unrolled, quantization)
    require_vacant(target)
    display = display or Display(quiet=True)
    display.stage(f"reading {place}")
    weights = open_weights(place)
    if weights.kind == "run":
        if to == "hub":
            exported = export(
                place, target, dtype=dtype, max_shard_bytes=max_shard_bytes, quantization=quantization, display=display
            )
            size = sum(size for name, size in exported.files.items() if name.endswith(".safetensors"))
            return Converted(
                source=place, kind="run", directory=target, to=to, arrays=len(weights.shapes), size=size,
                notes=exported.notes,
            )  # fmt: skip
        if to == "checkpoint":
            return _without_optimizer(place, target, dtype)
    config = _checked_config(weights)
    if quantization is not None:
        dtype = "bfloat16"
    shapes = {
        path: jax.ShapeDtypeStruct(shape, DTYPES[dtype] if dtype else weights.dtype(path))
        for path, shape in weights.shapes.items()
    }
    count = counted(display, f"writing {target}", len(shapes))

    def value(path: str) -> np.ndarray:
        count()
        array = np.asarray(weights.read(path))
        return array if quantization is not None else array.astype(shapes[path].dtype, copy=False)

    origin = weights.path if weights.path.is_dir() else weights.path.parent
    origin_config = hf.read_fields(origin) if (origin / CONFIG).is_file() else {}
    size = sum(int(np.prod(shape.shape)) * np.dtype(shape.dtype).itemsize for shape in shapes.values())
    notes: tuple[str, ...] = ()
    with atomic_directory(target) as new:
        if to == "hub":
            notes = hf.write(
                new, config, shapes, value=value, max_shard_bytes=max_shard_bytes, fields=_token_ids(origin_config),
                like=origin_config.get("model_type"), quantization=quantization,
            )  # fmt: skip
            if quantization is not None:
                size = sum(file.stat().st_size for file in hf.files_of(new))
        else:
            name = np.dtype(shapes["embed.embedding"].dtype).name
            fields = {**to_hf(config, name, origin_config.get("model_type")), **_token_ids(origin_config)}
            (new / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
            if to == "linen":
                _write_linen(new / LINEN[0], shapes, value, unrolled=unrolled)
            else:
                with Checkpoints(new / "checkpoints") as checkpoints:
                    arrays: Any = {path: value(path) for path in shapes}
                    checkpoints.save(0, {PARAMS: arrays}, {"weights": True})
        tokenizer_files.copy(origin, new)
    return Converted(
        source=place, kind=weights.kind, directory=target, to=to, arrays=len(shapes), size=size, notes=notes
    )


def _refuse(to: str, dtype: str | None, max_shard_bytes: int | None, unrolled: bool, quantization: str | None) -> None:
    if to not in get_args(Format):
        raise RunError(f"to: expected one of {', '.join(get_args(Format))}, got '{to}'")
    if dtype is not None and dtype not in DTYPES:
        raise RunError(f"dtype: expected one of {', '.join(DTYPES)}, got '{dtype}'")
    if max_shard_bytes is not None and to != "hub":
        raise RunError(f"max_shard_bytes has no effect to '{to}'")
    if unrolled and to != "linen":
        raise RunError(f"unrolled has no effect to '{to}'")
    if quantization is not None and to != "hub":
        raise RunError(f"quantization has no effect to '{to}'")
    refuse_quantization(quantization, dtype)


def _checked_config(weights: Weights) -> DecoderConfig:
    """The architecture of some weights, compared with their arrays.

    Raises:
        WeightsError: It is unknown; or names every array that is missing, unexpected or of another shape.
    """
    if weights.config is None:
        raise WeightsError(f"{weights.path}: needs the model's config.json in the same directory, in the Hub's format")
    config = attrs.evolve(weights.config, mtp_layers=int(any(is_mtp_param(path) for path in weights.shapes)))
    base = abstract_decoder(config).variables
    names = {path: ", ".join(source.names) for path, source in tensor_sources(config).items()}
    problems = [
        f"{path}: expected an array of shape {leaf.shape}, "
        + ("there is none" if path not in weights.shapes else f"got {weights.shapes[path]}")
        + f" ({names.get(path, 'no name on the Hub')})"
        for path, leaf in base.items()
        if weights.shapes.get(path) != leaf.shape
    ]
    problems += [f"{path}: no array of this model" for path in weights.shapes if path not in base]
    if problems:
        raise WeightsError("\n  ".join([f"{weights.path}: {len(problems)} arrays do not fit:", *problems]))
    return config


def _without_optimizer(source: Path, target: Path, dtype: str | None) -> Converted:
    """Copies a run's experiment and its trained arrays at one step, without the optimizer state."""
    if dtype is not None:
        raise RunError("dtype has no effect from a run to 'checkpoint', which keeps float32")
    run = SavedRun.open(source)
    arrays = run.restore()
    with atomic_directory(target) as new:
        for name in ("experiment.json", "experiment.py"):
            if (run.directory / name).is_file():
                shutil.copyfile(run.directory / name, new / name)
        with Checkpoints(new / "checkpoints") as checkpoints:
            checkpoints.save(run.step, {TRAINABLE: arrays}, run.checkpoints.meta(run.step))
    notes = ()
    if run.experiment.adapter is not None:
        notes = ("holds the adapter only; its base is named in the run's experiment",)
    size = sum(array.nbytes for array in arrays.values())
    return Converted(
        source=source, kind="run", directory=target, to="checkpoint", arrays=len(arrays), size=size, notes=notes
    )


def _write_linen(
    file: Path,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    value: Callable[[str], np.ndarray],
    *,
    unrolled: bool,
) -> None:
    """Writes a tree in Flax's msgpack format, one array after another, so that only one is in memory."""
    parts = linen.parts({path: shape.shape for path, shape in shapes.items()}, unrolled=unrolled)
    tree: dict[str, Any] = {}
    for name, part in parts.items():
        linen.put(tree, (linen.PARAMS, *name), part)
    current: dict[str, np.ndarray] = {}  # the array whose parts are being written

    def read(part: linen.Part) -> np.ndarray:
        if part.path not in current:
            current.clear()
            current[part.path] = value(part.path)
        array = current[part.path]
        return np.ascontiguousarray(array if part.number is None else array[part.number])

    with file.open("wb") as stream:

        def write(node: Mapping[str, Any] | linen.Part) -> None:
            if isinstance(node, linen.Part):
                stream.write(flax.serialization.msgpack_serialize(read(node), in_place=True))
                return
            stream.write(b"\xdf" + len(node).to_bytes(4, "big"))  # a map with this number of keys: "map 32" of msgpack
            for key, below in node.items():
                stream.write(flax.serialization.msgpack_serialize(key))
                write(below)

        write(tree)


def _token_ids(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The ids of special tokens in a `config.json`, which are not part of the architecture."""
    fields = {**text_fields(fields), **fields}
    return {name: fields[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in fields}
