"""Weights from one format to another: Hub directories, checkpoints of weights alone, Linen trees."""

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

from nnxdsl.errors import RunError, WeightsError
from nnxdsl.formats import hf, linen
from nnxdsl.formats.hf_names import tensor_sources
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.families.registry import to_hf
from nnxdsl.models.params import is_mtp_param
from nnxdsl.runs.checkpoint_format import find
from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.runs.checkpointer import Checkpoints
from nnxdsl.storage.atomic_dir import appearing, require_vacant
from nnxdsl.terminal.display import Display
from nnxdsl.weights import tokenizer_files
from nnxdsl.weights.export import DTYPES, counted, export
from nnxdsl.weights.open import CONFIG, LINEN, PARAMS, Weights, open_weights, template_of
from nnxdsl.weights.run_weights import GROUP, RunWeights, host

Format = Literal["hub", "checkpoint", "linen"]


@attrs.frozen(kw_only=True)
class Converted:
    """What was written.

    Attributes:
        source: what was read.
        kind: the format it had.
        directory: what was written.
        to: the format that it has.
        arrays: how many were written.
        size: bytes of all arrays.
        notes: what else is to be known.
    """

    source: Path
    kind: str
    directory: Path
    to: Format
    arrays: int
    size: int
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON values."""
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
    display: Display | None = None,
) -> Converted:
    """Writes weights in another format; values stay as they are, bit for bit, unless a dtype is asked for.

    A run's weights have its adapter merged into them, in float32, but to "checkpoint": then what it trained is copied
    without the optimizer's state, with its experiment, and `Weights.Checkpoint` starts from it as from the run.

    Args:
        source: weights of any format that `weights_in.FORMATS` says.
        directory: where to; nothing may be there.
        to: "hub": what transformers loads; "checkpoint": ours, of weights alone; "linen": `params.msgpack`, which
            `flax.serialization.msgpack_restore` reads, with `config.json` beside it.
        dtype: of all arrays; None for each as it is.
        max_shard_bytes: the most that one file holds; to "hub" only.
        unrolled: each layer by itself, as `layers_0`; to "linen" only.
        display: what people see of it; None for nothing.

    Raises:
        RunError: something is at `directory`, the disk will not take it, or settings do not go together.
        WeightsError: weights that cannot be read, or that nothing says the network of.
    """
    place, target = Path(source), Path(directory)
    _refuse(to, dtype, max_shard_bytes, unrolled)
    require_vacant(target)
    display = display or Display(quiet=True)
    display.stage(f"reading {place}")
    weights = open_weights(place)
    if weights.kind == "run":
        if to == "hub":
            exported = export(place, target, dtype=dtype or "float32", max_shard_bytes=max_shard_bytes, display=display)
            size = sum(size for name, size in exported.files.items() if name.endswith(".safetensors"))
            return Converted(
                source=place, kind="run", directory=target, to=to, arrays=len(weights.shapes), size=size,
                notes=exported.notes,
            )  # fmt: skip
        if to == "checkpoint":
            return _stripped(place, target, dtype)
    config = _fitting(weights)
    shapes = {
        path: jax.ShapeDtypeStruct(shape, DTYPES[dtype] if dtype else weights.dtype(path))
        for path, shape in weights.shapes.items()
    }
    count = counted(display, f"writing {target}", len(shapes))

    def value(path: str) -> np.ndarray:
        count()
        return np.asarray(weights.read(path)).astype(shapes[path].dtype, copy=False)

    beside = weights.where if weights.where.is_dir() else weights.where.parent
    about = _about(beside)
    with appearing(target) as new:
        if to == "hub":
            hf.write(
                new, config, shapes, value=value, max_shard_bytes=max_shard_bytes, fields=_ids(about),
                like=about.get("model_type"),
            )  # fmt: skip
        else:
            name = np.dtype(shapes["embed.embedding"].dtype).name
            fields = {**to_hf(config, name, about.get("model_type")), **_ids(about)}
            (new / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
            if to == "linen":
                _write_linen(new / LINEN[0], shapes, value, unrolled=unrolled)
            else:
                with Checkpoints(new / "checkpoints") as checkpoints:
                    arrays: Any = {path: value(path) for path in shapes}
                    checkpoints.save(0, {PARAMS: arrays}, {"weights": True})
        tokenizer_files.copy(beside, new)
    size = sum(int(np.prod(shape.shape)) * np.dtype(shape.dtype).itemsize for shape in shapes.values())
    return Converted(source=place, kind=weights.kind, directory=target, to=to, arrays=len(shapes), size=size)


def _refuse(to: str, dtype: str | None, max_shard_bytes: int | None, unrolled: bool) -> None:
    if to not in get_args(Format):
        raise RunError(f"to: expected one of {', '.join(get_args(Format))}, got '{to}'")
    if dtype is not None and dtype not in DTYPES:
        raise RunError(f"dtype: expected one of {', '.join(DTYPES)}, got '{dtype}'")
    if max_shard_bytes is not None and to != "hub":
        raise RunError(f"max_shard_bytes has no effect to '{to}'")
    if unrolled and to != "linen":
        raise RunError(f"unrolled has no effect to '{to}'")


def _fitting(weights: Weights) -> DecoderConfig:
    """The network of some weights, which they must fit.

    Raises:
        WeightsError: nothing says it; or every array that is missing, left over or of another shape.
    """
    if weights.config is None:
        raise WeightsError(f"{weights.where}: put the network's config.json beside it, as the Hub has it")
    config = attrs.evolve(weights.config, mtp_layers=int(any(is_mtp_param(path) for path in weights.shapes)))
    base = template_of(config).variables
    names = {path: ", ".join(source.names) for path, source in tensor_sources(config).items()}
    problems = [
        f"{path}: expected an array of shape {leaf.shape}, "
        + ("there is none" if path not in weights.shapes else f"got {weights.shapes[path]}")
        + f" ({names.get(path, 'no name on the Hub')})"
        for path, leaf in base.items()
        if weights.shapes.get(path) != leaf.shape
    ]
    problems += [f"{path}: no part of this network" for path in weights.shapes if path not in base]
    if problems:
        raise WeightsError("\n  ".join([f"{weights.where}: {len(problems)} arrays do not fit:", *problems]))
    return config


def _stripped(source: Path, target: Path, dtype: str | None) -> Converted:
    """A run's experiment and what it trained at one step, without the state of its optimizer."""
    if dtype is not None:
        raise RunError("dtype has no effect to 'checkpoint' from a run, whose arrays stay float32")
    saved = RunWeights.open(source)
    directory, _ = find(source)
    with CheckpointReader(directory) as checkpoints:
        infos = checkpoints.contents(saved.step)[GROUP]
        targets = {
            name: jax.ShapeDtypeStruct(info.shape, np.dtype(info.dtype), sharding=host())
            for name, info in infos.items()
        }
        arrays = checkpoints.restore(saved.step, {GROUP: targets})[GROUP]
        meta = checkpoints.meta(saved.step)
    with appearing(target) as new:
        for name in ("experiment.json", "experiment.py"):
            if (saved.directory / name).is_file():
                shutil.copyfile(saved.directory / name, new / name)
        with Checkpoints(new / "checkpoints") as checkpoints:
            checkpoints.save(saved.step, {GROUP: arrays}, meta)
    notes = ()
    if saved.adapter is not None:
        notes = ("holds the adapter alone: its base is where the run's experiment says",)
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
    """A tree as Flax's own msgpack, array after array: the whole of it is never in memory."""
    parts = linen.parts({path: shape.shape for path, shape in shapes.items()}, unrolled=unrolled)
    tree: dict[str, Any] = {}
    for name, part in parts.items():
        linen.put(tree, (linen.PARAMS, *name), part)
    held: dict[str, np.ndarray] = {}  # the leaf whose parts are being written

    def read(part: linen.Part) -> np.ndarray:
        if part.path not in held:
            held.clear()
            held[part.path] = value(part.path)
        array = held[part.path]
        return np.ascontiguousarray(array if part.number is None else array[part.number])

    with file.open("wb") as stream:

        def write(node: Mapping[str, Any] | linen.Part) -> None:
            if isinstance(node, linen.Part):
                stream.write(flax.serialization.msgpack_serialize(read(node), in_place=True))
                return
            stream.write(b"\xdf" + len(node).to_bytes(4, "big"))  # a map of so many keys; "map 32" of msgpack
            for key, below in node.items():
                stream.write(flax.serialization.msgpack_serialize(key))
                write(below)

        write(tree)


def _about(directory: Path) -> dict[str, Any]:
    file = directory / CONFIG
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _ids(about: Mapping[str, Any]) -> dict[str, Any]:
    """What a `config.json` says of tokens, which the network's numbers do not."""
    return {name: about[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in about}
