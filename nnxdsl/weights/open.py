"""Opens weights of any supported format under our paths and reads them one array at a time; writes nothing."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import flax.serialization
import numpy as np

from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.errors import RunError, WeightsError
from nnxdsl.formats import hf, linen, safetensors
from nnxdsl.formats.files import PICKLE_REFUSED
from nnxdsl.formats.hf import HubReader
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.runs.checkpoint_format import CheckpointError, find
from nnxdsl.runs.saved_experiment import is_run
from nnxdsl.weights import orbax
from nnxdsl.weights.run_weights import RunWeights
from nnxdsl.weights.saved_run import WeightsCheckpoint

Kind = Literal["hub", "run", "checkpoint", "linen", "tensors"]

CONFIG = "config.json"
LINEN = ("params.msgpack", "params.npz", "params")
"""Names of a Linen tree in a directory: a file, or an orbax directory."""

FORMATS = (
    "a Hub directory (config.json and safetensors), a run or a checkpoint of one, a checkpoint of weights only, "
    "a Linen tree (.msgpack, .npz, an orbax directory, or a directory with config.json and one of these, 'params')"
)


@attrs.frozen(eq=False)
class Weights:
    """The arrays of a model.

    Attributes:
        path: The file or directory that was opened.
        kind: Its format; "tensors" for safetensors under their own names.
        config: The architecture; None if it is unknown.
        shapes: Shapes by our path, or by the file's own names.
        dtype: Returns the dtype of an array, without reading the array if the format allows.
        read: Reads an array as it is stored.
    """

    path: Path
    kind: Kind
    config: DecoderConfig | None
    shapes: Mapping[str, tuple[int, ...]]
    dtype: Callable[[str], np.dtype]
    read: Callable[[str], np.ndarray]


def open_weights(path: Path) -> Weights:
    """Opens weights of any supported format.

    Args:
        path: See `FORMATS`.

    Raises:
        WeightsError: Files are missing, damaged or pickled, or do not fit the architecture in their config: names
            each tensor by the Hub's name and ours.
        RunError: There is no such path, or its format is not supported.
    """
    if path.is_file():
        return _file(path)
    if not path.is_dir():
        raise RunError(f"{path}: no such file or directory (relative to {Path.cwd()})")
    for name in LINEN:
        if (path / name).exists() and (path / CONFIG).is_file():
            return _linen(path / name, hf.read_config(path))
    if _is_checkpoint(path):
        return _checkpoint(path)
    if (path / CONFIG).is_file():
        return _hub(path)
    if orbax.is_tree(path):
        return _linen(path, None)
    if tensors := [file for file in sorted(path.glob("*.safetensors")) if file.is_file()]:
        return _tensors(path, tensors)
    raise RunError(f"{path}: holds no weights of a supported format; expected {FORMATS}")


def open_tensors(path: Path) -> Weights | None:
    """The tensors of a Hub directory under their own names; None for other paths."""
    is_hub = (path / CONFIG).is_file() and any((path / name).exists() for name in (hf.SINGLE, hf.INDEX))
    return _tensors(path, hf.files_of(path)) if is_hub else None


def _file(path: Path) -> Weights:
    config_file = path.parent / CONFIG
    if path.suffix == ".safetensors":
        return _tensors(path, [path])
    if path.suffix in (".msgpack", ".npz"):
        return _linen(path, hf.read_config(path.parent) if config_file.is_file() else None)
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".npy"):
        raise WeightsError(
            f"{path}: {PICKLE_REFUSED}; if you trust it, load it with the program that wrote it, and save it as "
            "safetensors"
        )
    raise RunError(f"{path}: not a supported format of weights; expected {FORMATS}")


def _hub(path: Path) -> Weights:
    reader = HubReader(path, allow_non_finite=True)  # compared or converted unchanged
    template = abstract_decoder(reader.config)
    if problems := reader.check(template):
        raise WeightsError("\n  ".join([f"{path}: {len(problems)} tensors do not fit:", *map(str, problems)]))
    shapes = {name: leaf.shape for name, leaf in template.variables.items()}
    return Weights(path, "hub", reader.config, shapes, reader.dtype, reader.leaf)


def _tensors(path: Path, files: list[Path]) -> Weights:
    tensors = {name: tensor for file in files for name, tensor in safetensors.index(file).items()}
    for name, tensor in tensors.items():
        if not tensor.readable:
            raise WeightsError(f"{tensor.file}: {name}: dtype {tensor.dtype} is not supported")
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return Weights(path, "tensors", None, shapes, lambda name: tensors[name].numpy, lambda name: tensors[name].read())


def _is_checkpoint(path: Path) -> bool:
    try:
        find(path)
    except CheckpointError:
        return False
    return True


def _checkpoint(path: Path) -> Weights:
    if is_run(path):
        return _run(path)
    parent = find(path)[0].parent
    checkpoint = WeightsCheckpoint(path)
    config = hf.read_config(parent) if (parent / CONFIG).is_file() else None
    shapes = {name: array.shape for name, array in checkpoint.arrays.items()}
    return Weights(path, "checkpoint", config, shapes, lambda name: checkpoint.arrays[name].dtype, checkpoint.read)


def _run(path: Path) -> Weights:
    saved = RunWeights.open(path)
    shapes = {name: leaf.shape for name, leaf in saved.base.items()}
    return Weights(path, "run", saved.config, shapes, lambda _: np.dtype(np.float32), saved.merged)


def _linen(path: Path, config: DecoderConfig | None) -> Weights:
    flat, read = _tree(path)
    parts_of = linen.leaves(flat, None if config is None else config.layers.period)
    shapes = {
        name: (len(parts), *flat[parts[0]][0]) if linen.is_stacked(name, parts) else flat[parts[0]][0]
        for name, parts in parts_of.items()
    }
    return Weights(
        path,
        "linen",
        config,
        shapes,
        lambda name: np.result_type(*(flat[part][1] for part in parts_of[name])),
        lambda name: linen.assemble(name, parts_of[name], read),
    )


Flat = dict[linen.Name, tuple[tuple[int, ...], np.dtype]]


def _tree(path: Path) -> tuple[Flat, Callable[[linen.Name], Any]]:
    """Shapes and dtypes of a tree's arrays by name, and a function that reads one."""
    if path.is_dir():
        return orbax.open_tree(path)
    if path.suffix == ".npz":
        return _npz(path)
    try:
        tree: Any = flax.serialization.msgpack_restore(path.read_bytes())
        arrays = dict(linen.flat_tree(tree))
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from None
    except Exception as error:  # msgpack and flax raise many types
        raise WeightsError(f"{path}: damaged, or not a Flax msgpack file: {type(error).__name__}: {error}") from None
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise WeightsError(f"{path}: {'.'.join(name)}: expected an array, got {type(array).__name__}")
    return {name: (array.shape, array.dtype) for name, array in arrays.items()}, arrays.__getitem__


def _npz(path: Path) -> tuple[Flat, Callable[[linen.Name], Any]]:
    """The arrays of an .npz file, whose names are keys joined by `/` or `.`; read one at a time."""
    try:
        archive = zipfile.ZipFile(path)
        headers = {name.removesuffix(".npy"): _read_header(archive, name) for name in archive.namelist()}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise WeightsError(f"{path}: damaged, or not an .npz file: {error}") from None
    stored: dict[linen.Name, str] = {}
    for name, (_, dtype) in headers.items():
        if dtype.hasobject or dtype.kind == "V":
            content = "pickled objects" if dtype.hasobject else "a dtype that .npz does not support (bfloat16?)"
            raise WeightsError(f"{path}: {name}: holds {content}; save it in another format, such as .msgpack")
        stored[linen.without_collection(tuple(re.split(r"[/.]", name)))] = name

    def read(name: linen.Name) -> np.ndarray:
        with archive.open(stored[name] + ".npy") as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    return {keys: headers[name] for keys, name in stored.items()}, read


def _read_header(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype]:
    with archive.open(name) as file:
        version = np.lib.format.read_magic(file)
        reads = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in reads:
            raise ValueError(f"{name}: version {version} of the .npy format")
        shape, _, dtype = reads[version](file)
    return shape, dtype
