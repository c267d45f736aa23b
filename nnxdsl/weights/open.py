"""Weights in any format that is known, opened under our paths and read one array at a time; writes nothing."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import flax.serialization
import jax
import numpy as np
from flax import nnx

from nnxdsl.errors import RunError, WeightsError
from nnxdsl.formats import hf, linen, safetensors
from nnxdsl.formats.hf import HubReader
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.decoder import Decoder
from nnxdsl.models.params import AbstractModel, abstract
from nnxdsl.runs.checkpoint_format import CheckpointError, find
from nnxdsl.runs.checkpoint_reader import CheckpointReader
from nnxdsl.weights import orbax
from nnxdsl.weights.run_weights import RunWeights, host
from nnxdsl.weights.sources import PARAMS

Kind = Literal["hub", "run", "checkpoint", "linen", "tensors"]

CONFIG = "config.json"
LINEN = ("params.msgpack", "params.npz", "params")
"""What a directory holds a Linen tree as: one file, or a directory of orbax's."""

FORMATS = (
    "a Hub directory (config.json and safetensors), a run or a checkpoint of one, a checkpoint of weights alone, "
    "a Linen tree (.msgpack, .npz, a directory of orbax's, or a directory with config.json and one of these, 'params')"
)


@attrs.frozen(eq=False)
class Weights:
    """Some model's arrays.

    Attributes:
        where: what was opened.
        kind: its format; "tensors" for safetensors whose names are kept as they are.
        config: the network's numbers; None where nothing says them.
        shapes: by path of ours, or by the file's own names.
    """

    where: Path
    kind: Kind
    config: DecoderConfig | None
    shapes: Mapping[str, tuple[int, ...]]
    _dtype: Callable[[str], np.dtype]
    _read: Callable[[str], np.ndarray]

    def dtype(self, path: str) -> np.dtype:
        """The dtype of an array, without reading it where its format says it."""
        return self._dtype(path)

    def read(self, path: str) -> np.ndarray:
        """An array as it is stored."""
        return self._read(path)


def open_weights(path: Path) -> Weights:
    """Opens weights of whatever format they have.

    Args:
        path: see `FORMATS`.

    Raises:
        WeightsError: files are missing, damaged or pickled, or do not fit the network that they say they are of: each
            tensor by the Hub's name and ours.
        RunError: there is nothing there, or nothing that is known.
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
    if orbax.is_one(path):
        return _linen(path, None)
    if tensors := [file for file in sorted(path.glob("*.safetensors")) if file.is_file()]:
        return _tensors(path, tensors)
    raise RunError(f"{path}: holds no weights that are known; expected {FORMATS}")


def open_tensors(path: Path) -> Weights | None:
    """The tensors of a Hub directory under the file's own names; None where it is none."""
    is_one = (path / CONFIG).is_file() and any((path / name).exists() for name in (hf.SINGLE, hf.INDEX))
    return _tensors(path, hf.files_of(path)) if is_one else None


def template_of(config: DecoderConfig) -> AbstractModel:
    """The network of these numbers, without its arrays."""
    return abstract(lambda: Decoder(config, rngs=nnx.Rngs(0)))


def _file(path: Path) -> Weights:
    beside = path.parent / CONFIG
    if path.suffix == ".safetensors":
        return _tensors(path, [path])
    if path.suffix in (".msgpack", ".npz"):
        return _linen(path, hf.read_config(path.parent) if beside.is_file() else None)
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".npy"):
        raise WeightsError(
            f"{path}: would be read with pickle, which runs any code that a file holds, so it is not; where you trust "
            f"it, load it with what wrote it, and save it as safetensors"
        )
    raise RunError(f"{path}: no weights that are known; expected {FORMATS}")


def _hub(path: Path) -> Weights:
    reader = HubReader(path, allow_non_finite=True)  # to be looked at or rewritten as they are
    template = template_of(reader.config)
    if problems := reader.check(template):
        raise WeightsError("\n  ".join([f"{path}: {len(problems)} tensors do not fit:", *map(str, problems)]))
    shapes = {name: leaf.shape for name, leaf in template.variables.items()}
    return Weights(path, "hub", reader.config, shapes, reader.dtype, reader.leaf)


def _tensors(path: Path, files: list[Path]) -> Weights:
    tensors = {name: tensor for file in files for name, tensor in safetensors.index(file).items()}
    for name, tensor in tensors.items():
        if not tensor.readable:
            raise WeightsError(f"{tensor.file}: {name}: dtype {tensor.dtype} is not understood")
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return Weights(path, "tensors", None, shapes, lambda name: tensors[name].numpy, lambda name: tensors[name].read())


def _is_checkpoint(path: Path) -> bool:
    try:
        find(path)
    except CheckpointError:
        return False
    return True


def _checkpoint(path: Path) -> Weights:
    directory, step = find(path)
    if (directory.parent / "experiment.json").is_file():
        return _run(path)
    checkpoints = CheckpointReader(directory)
    step = checkpoints.latest_good().step if step is None else step
    if step is None:
        raise WeightsError(f"{path} has no checkpoint yet")
    contents = checkpoints.contents(step).get(PARAMS)
    if contents is None:
        raise WeightsError(f"{path}: is of a run whose experiment.json is gone, so it is not known what it holds")
    config = hf.read_config(directory.parent) if (directory.parent / CONFIG).is_file() else None

    def read(name: str) -> np.ndarray:
        info = contents[name]
        target = jax.ShapeDtypeStruct(info.shape, np.dtype(info.dtype), sharding=host())
        return np.asarray(checkpoints.restore(step, {PARAMS: {name: target}})[PARAMS][name])

    shapes = {name: info.shape for name, info in contents.items()}
    return Weights(path, "checkpoint", config, shapes, lambda name: np.dtype(contents[name].dtype), read)


def _run(path: Path) -> Weights:
    saved = RunWeights.open(path)
    shapes = {name: leaf.shape for name, leaf in saved.base.items()}
    return Weights(path, "run", saved.config, shapes, lambda _: np.dtype(np.float32), saved.merged)


def _linen(path: Path, config: DecoderConfig | None) -> Weights:
    flat, read = _tree(path)
    made_of = linen.leaves(flat, None if config is None else config.period)
    shapes = {
        name: (len(parts), *flat[parts[0]][0]) if linen.is_stacked(name, parts) else flat[parts[0]][0]
        for name, parts in made_of.items()
    }
    return Weights(
        path,
        "linen",
        config,
        shapes,
        lambda name: np.result_type(*(flat[part][1] for part in made_of[name])),
        lambda name: linen.assemble(name, made_of[name], read),
    )


Flat = dict[linen.Name, tuple[tuple[int, ...], np.dtype]]


def _tree(path: Path) -> tuple[Flat, Callable[[linen.Name], Any]]:
    """Shapes and dtypes of a tree's arrays by name, and what reads one."""
    if path.is_dir():
        return orbax.open_tree(path)
    if path.suffix == ".npz":
        return _npz(path)
    try:
        tree: Any = flax.serialization.msgpack_restore(path.read_bytes())
        arrays = dict(linen.flat_tree(tree))
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from None
    except Exception as error:  # msgpack has many, and flax adds its own
        raise WeightsError(f"{path}: damaged, or no tree of Flax's: {type(error).__name__}: {error}") from None
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise WeightsError(f"{path}: {'.'.join(name)}: expected an array, got {type(array).__name__}")
    return {name: (array.shape, array.dtype) for name, array in arrays.items()}, arrays.__getitem__


def _npz(path: Path) -> tuple[Flat, Callable[[linen.Name], Any]]:
    """Arrays named by their keys with `/` or `.` between them; read one at a time."""
    try:
        archive = zipfile.ZipFile(path)
        heads = {name.removesuffix(".npy"): _head(archive, name) for name in archive.namelist()}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise WeightsError(f"{path}: damaged, or no .npz file: {error}") from None
    stored: dict[linen.Name, str] = {}
    for name, (_, dtype) in heads.items():
        if dtype.hasobject or dtype.kind == "V":
            what = (
                "objects, which are pickled" if dtype.hasobject else "a dtype that .npz files cannot name (bfloat16?)"
            )
            raise WeightsError(f"{path}: {name}: holds {what}; save it in another format, such as .msgpack")
        keys = tuple(re.split(r"[/.]", name))
        while keys[0] == linen.PARAMS and len(keys) > 1:
            keys = keys[1:]
        stored[keys] = name

    def read(name: linen.Name) -> np.ndarray:
        with archive.open(stored[name] + ".npy") as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    return {keys: heads[name] for keys, name in stored.items()}, read


def _head(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype]:
    with archive.open(name) as file:
        version = np.lib.format.read_magic(file)
        reads = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in reads:
            raise ValueError(f"{name}: version {version} of the .npy format")
        shape, _, dtype = reads[version](file)
    return shape, dtype
