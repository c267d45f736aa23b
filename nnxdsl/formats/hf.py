"""Weights in the Hub's layout: which tensor of a directory is which leaf of our decoder, read and written."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs
import jax
import numpy as np

from nnxdsl.errors import Problem, WeightsError
from nnxdsl.formats import hf_names, safetensors
from nnxdsl.formats.files import read_json
from nnxdsl.formats.finite import all_finite, require_finite
from nnxdsl.formats.hf_names import HEAD, copies, has_mtp, is_auxiliary, tensor_sources
from nnxdsl.formats.mapped_arrays import MappedArray
from nnxdsl.formats.quantized import BlockFloat8, Mxfp4, dequantize
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.families.registry import from_hf, to_hf
from nnxdsl.models.params import AbstractModel, is_mtp_param

Stored = safetensors.Tensor | Mxfp4 | BlockFloat8

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# What stands before our names: the text model, the multimodal one of transformers 5, and that of transformers 4.
_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
# What no decoder has a use for: parts of a multimodal checkpoint, RoPE's frequencies in old checkpoints, and what is
# beside the layer that predicts tokens further ahead in Qwen3-Next's.
_UNUSED = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.|mtp\.|.*\.rotary_emb\.inv_freq$")
_LAYER = re.compile(r"\blayers\.(\d{1,9})\.")


def read_config(directory: str | Path) -> DecoderConfig:
    """Reads a directory's `config.json`.

    Args:
        directory: a directory in the Hub's layout.

    Returns:
        The decoder's numbers.

    Raises:
        WeightsError: the file is missing, no JSON, not of a family that is understood, or tells of more layers than
            the weights beside it hold; names the file.
    """
    fields, file = read_fields(directory), Path(directory) / "config.json"
    try:
        config = from_hf(fields)
    except WeightsError as error:
        raise WeightsError(f"{file}: {error}") from None
    stored = _count_layers(Path(directory))
    if stored is not None and config.num_layers > stored:  # before anything is built of so many
        raise WeightsError(
            f"{file}: num_hidden_layers is {config.num_layers}, the weights beside it have {stored} layers"
        )
    return config


def _count_layers(directory: Path) -> int | None:
    """How many layers the names of a directory's tensors tell of; None where they tell of none, or cannot be read."""
    try:
        listing, where = _list_files(directory)
        names = where or safetensors.index(listing)
    except WeightsError:
        return None  # told of where weights are read, which may be others
    return max((int(found[1]) + 1 for name in names if (found := _LAYER.search(name))), default=None)


def read_fields(directory: str | Path) -> dict[str, Any]:
    """A directory's `config.json` as it stands there; WeightsError where `files.read_json` cannot read it."""
    return read_json(Path(directory) / "config.json")


class HubReader:
    """Reads a decoder's leaves from a directory in the Hub's layout, one file or many, memory-mapped.

    Args:
        directory: holds `config.json` and `model.safetensors`, or `model.safetensors.index.json` and its shards.
        allow_non_finite: whether NaN and infinity are read as any value; else each part of a tensor is checked as it
            is read.

    Attributes:
        directory: the directory.
        config: the decoder's numbers; with the layer that predicts a token further ahead where its tensors are there.

    Raises:
        WeightsError: a file is missing, damaged or not understood; names the file.
    """

    def __init__(self, directory: str | Path, *, allow_non_finite: bool = False) -> None:
        self.directory = Path(directory)
        self._allow_non_finite = allow_non_finite
        self.config = read_config(directory)
        fields = read_fields(directory)
        further = _further(self.config, fields)
        whole = attrs.evolve(self.config, mtp_layers=1) if has_mtp(fields) else self.config
        self._sources = tensor_sources(whole, fields.get("model_type"))
        self._copies = copies(whole, fields.get("model_type"))
        self._tensors: dict[str, Stored] = {}
        self._heads: dict[str, Stored] = {}
        self._others: dict[str, Stored] = {}
        self._listing, self._where = _list_files(self.directory)
        files = sorted(set(self._where.values())) or [self._listing]
        stored = {name: tensor for file in files for name, tensor in safetensors.index(file).items()}
        tensors: dict[str, Stored] = dict(dequantize(stored))
        self._prefix = next((p for p in _PREFIXES if any(name.startswith(p + "layers.") for name in tensors)), "model.")
        wanted = {name for source in self._sources.values() for name in source.names} | set(self._copies)
        for name, tensor in tensors.items():
            ours = name.removeprefix(self._prefix)
            if name in _HEADS and self.config.tied_head:
                self._heads[name] = tensor
            elif name in _HEADS:
                self._tensors[HEAD] = tensor
            elif ours in wanted and name == self._full(ours):
                self._tensors[ours] = tensor
            elif not _UNUSED.match(name) and not ((layer := _LAYER.match(ours)) and int(layer[1]) in further):
                self._others[name] = tensor
        if whole.mtp_layers and self._tensors.keys() & set(self._sources["mtp.join.kernel"].names):
            self.config = whole

    def leaf(self, path: str) -> np.ndarray:
        """One leaf of a plain decoder, in the dtype of the file; periods stacked, kernels `[in, out]`.

        Args:
            path: such as "layers.blocks.0.attention.query.kernel".

        Raises:
            KeyError: no such leaf in a plain decoder of this size.
            WeightsError: a tensor of it is missing, of a dtype that is not understood, or holds NaN or infinity.
        """
        return self.mapped(path).read()

    def mapped(self, path: str) -> MappedArray:
        """The same array as a MappedArray, of which nothing is read yet; errors as of `leaf`."""
        source = self._sources[path]
        self._require(path)
        found = hf_names.mapped(source, [self._tensors[name] for name in source.names])
        if self._allow_non_finite:
            return found
        return attrs.evolve(found, guards=tuple(functools.partial(self._require_finite, name) for name in source.names))

    def _require_finite(self, name: str, part: np.ndarray) -> None:
        """Refuses a part of a tensor that is not finite, with all such tensors of the same file."""
        if all_finite(part):
            return
        file = self._tensors[name].file
        beside = {
            self._full(other): each.read for other, each in self._tensors.items() if each.file == file and each.readable
        }
        require_finite(beside, file)

    def _require(self, path: str) -> None:
        for name in self._sources[path].names:
            if name not in self._tensors:
                raise WeightsError(str(self._missing(path, name, None)))
            if not self._tensors[name].readable:
                raise WeightsError(str(self._unreadable(path, name)))

    def dtype(self, path: str) -> np.dtype:
        """The dtype that `leaf` gives, without reading it; KeyError and WeightsError as there."""
        return self.mapped(path).dtype

    def check(self, template: AbstractModel) -> list[Problem]:
        """Everything that keeps the directory from filling a template; reads headers only, no weights.

        Leaves that adapters or quantisation add are not looked for; a quantised kernel is checked as the kernel.
        If a head is stored though it is tied to the embedding, it must hold the same bytes.

        Args:
            template: of a decoder of `config`.

        Returns:
            A Problem for each tensor that is missing, mis-shaped, of a dtype that is not understood, or left over.
        """
        problems: list[Problem] = []
        for path, leaf in template.variables.items():
            path = path.removesuffix(".array.qvalue")
            if path not in self._sources:
                if path == "mtp.join.kernel":
                    file = self.directory / "config.json"
                    message = f"{file}: num_nextn_predict_layers says that no layer predicts further ahead"
                    problems.append(Problem(path, message))
                continue
            source = self._sources[path]
            shape = source.part_shape(leaf.shape)
            if (stack := leaf.shape[: len(source.leading)]) != source.leading:
                found, wanted = (" of ".join(map(str, sizes)) for sizes in (source.leading, stack))
                message = f"{self.directory / 'config.json'}: {found} periods, expected {wanted}"
                problems.append(Problem(path, message))
                continue
            for name in source.names:
                tensor = self._tensors.get(name)
                if tensor is None:
                    problems.append(self._missing(path, name, shape))
                elif tensor.shape != shape:
                    problems.append(
                        Problem(path, f"{tensor.file}: {self._full(name)}: expected shape {shape}, got {tensor.shape}")
                    )
                elif not tensor.readable:
                    problems.append(self._unreadable(path, name))
        problems += (
            Problem(name, f"{tensor.file}: no part of a text decoder of {self.config.num_layers} layers")
            for name, tensor in self._others.items()
        )
        problems += self._check_heads()
        if any(is_mtp_param(path) for path in template.variables):
            problems += self._check_copies()
        return problems

    def _check_heads(self) -> Iterator[Problem]:
        for name, head in self._heads.items():
            if self._differs(head, "embed_tokens.weight"):
                yield Problem(
                    name,
                    f"{head.file}: differs from {self._prefix}embed_tokens.weight, but config.json says that the two "
                    "are tied",
                )

    def _check_copies(self) -> Iterator[Problem]:
        for name, of in self._copies.items():
            if name in self._tensors and self._differs(self._tensors[name], of):
                message = f"differs from {self._full(of)}, which a layer that predicts further ahead shares"
                yield Problem(self._full(name), f"{self._tensors[name].file}: {message}")

    def _differs(self, copy: Stored, name: str) -> bool:
        """Whether a tensor holds other bytes than the one of this name; not where one of them is a problem already."""
        own = self._tensors.get(name)
        if own is None or not (own.readable and copy.readable):
            return False
        if copy.shape != own.shape or copy.dtype != own.dtype:
            return True
        return not np.array_equal(copy.read().view(np.uint8), own.read().view(np.uint8))

    def _full(self, name: str) -> str:
        return name if is_auxiliary(name) else self._prefix + name

    def _missing(self, path: str, name: str, shape: tuple[int, ...] | None) -> Problem:
        file = self._where.get(self._full(name), self._listing)
        expected = f" of shape {shape}" if shape is not None else ""
        return Problem(path, f"{file}: expected a tensor {self._full(name)}{expected}, there is none")

    def _unreadable(self, path: str, name: str) -> Problem:
        tensor = self._tensors[name]
        return Problem(
            path, f"{tensor.file}: {self._full(name)}: expected dtype F64, F32, F16 or BF16, got {tensor.dtype}"
        )


class Shaped(Protocol):
    """Shape and dtype of an array that is not read yet."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def dtype(self) -> Any:
        """Its dtype."""
        ...


def write(
    directory: str | Path,
    config: DecoderConfig,
    leaves: Mapping[str, Shaped],
    *,
    value: Callable[[str], jax.Array | np.ndarray] | None = None,
    max_shard_bytes: int | None = None,
    fields: Mapping[str, Any] | None = None,
    like: str | None = None,
) -> None:
    """Writes a directory that transformers loads as a model of the family that `config` is of.

    Args:
        directory: is made if need be; its `config.json` and weights are replaced.
        config: the decoder's numbers.
        leaves: the leaves of a plain decoder, each stored in its own dtype (float32, float16 or bfloat16); where
            `value` is given, their shapes and dtypes are enough.
        value: gives a leaf by path, when it is its turn: one at a time, each once. None to take them
            from `leaves`.
        max_shard_bytes: the weights are split so that no file holds more than this, but for a tensor that is larger
            alone. None for one file.
        fields: more for `config.json`, such as ids of tokens.
        like: the `model_type` of the family to write, where several have such a decoder; see `config.to_hf`.

    Raises:
        WeightsError: a leaf is missing, or is no part of a plain decoder (an adapter: merge it first); or no family of
            the Hub has such a decoder.
    """
    about = {**to_hf(config, np.dtype(leaves["embed.embedding"].dtype).name, like), **(fields or {})}
    wanted = tensor_sources(config, about["model_type"])
    if wanted.keys() != leaves.keys():
        problems = [f"{path}: missing" for path in wanted if path not in leaves]
        problems += [f"{path}: no leaf of a plain decoder" for path in leaves if path not in wanted]
        raise WeightsError("\n  ".join([f"{directory}: cannot be written:", *problems]))
    origin: dict[str, list[tuple[str, int]]] = {}
    for path, source in wanted.items():
        for number, name in enumerate(source.names):
            origin.setdefault(tensor_name(name), []).append((path, number))
            for copy in (copy for copy, of in copies(config, about["model_type"]).items() if of == name):
                origin[tensor_name(copy)] = [(path, number)]
    tensors = {
        name: (wanted[path].part_shape(tuple(leaves[path].shape)), np.dtype(leaves[path].dtype))
        for name, [(path, _), *_] in origin.items()
    }
    current: dict[str, Any] = {}  # the leaves whose tensors are being written: those of one leaf follow each other

    def part(name: str) -> np.ndarray:
        if origin[name][0][0] not in current:
            current.clear()
            current.update((path, leaves[path] if value is None else value(path)) for path, _ in origin[name])
        parts = [hf_names.part(wanted[path], current[path], number) for path, number in origin[name]]
        return parts[0] if len(parts) == 1 else np.stack(parts, axis=-1).reshape(*parts[0].shape[:-1], -1)

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shards = safetensors.shards(tensors, max_shard_bytes)
    if len(shards) == 1:
        safetensors.write(directory / SINGLE, tensors, part)
        (directory / INDEX).unlink(missing_ok=True)  # of a sharded checkpoint that was here before
    else:
        files = {f"model-{n:05d}-of-{len(shards):05d}.safetensors": names for n, names in enumerate(shards, start=1)}
        for file, names in files.items():
            safetensors.write(directory / file, {name: tensors[name] for name in names}, part)
        total = sum(safetensors.size(*tensor) for tensor in tensors.values())
        listing = {
            "metadata": {"total_size": total},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        (directory / INDEX).write_text(json.dumps(listing, indent=2) + "\n", encoding="utf-8")
        (directory / SINGLE).unlink(missing_ok=True)  # transformers would take it in place of the shards
    (directory / "config.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def tensor_name(name: str, prefix: str = "model.") -> str:
    """The name in a file of a tensor of `tensor_sources`."""
    return name if is_auxiliary(name) else prefix + name


def _further(config: DecoderConfig, fields: Mapping[str, Any]) -> range:
    """The numbers of the layers that predict tokens further ahead, behind those of the decoder (DeepSeek-V3)."""
    count = fields.get("num_nextn_predict_layers")
    return range(config.num_layers, config.num_layers + (count if isinstance(count, int) else 0))


def _list_files(directory: Path) -> tuple[Path, dict[str, Path]]:
    """The file that says what there is, and for a sharded checkpoint the file of each tensor."""
    single, listing = directory / SINGLE, directory / INDEX
    if not listing.exists():
        if not single.exists():
            drawn = "; a network without weights is trained from the beginning with weights=Weights.Random()"
            raise WeightsError(
                f"{directory}: expected {SINGLE} or {INDEX}, there is neither{_pickled(directory) or drawn}"
            )
        return single, {}
    names = read_json(listing).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()) or not names:
        raise WeightsError(f"{listing}: expected a 'weight_map' of tensor names to file names")
    # By the names alone: in the Hub's own cache every file is a link to somewhere else.
    outside = sorted({file for file in names.values() if Path(file).is_absolute() or ".." in Path(file).parts})
    if outside:
        files = ", ".join(map(repr, outside))
        raise WeightsError(f"{listing}: names files outside of its directory, which are not read: {files}")
    return listing, {name: directory / file for name, file in names.items()}


def files_of(directory: str | Path) -> list[Path]:
    """The safetensors files of a directory in the Hub's layout; WeightsError as of `HubReader`."""
    listing, where = _list_files(Path(directory))
    return sorted(set(where.values())) or [listing]


def _pickled(directory: Path) -> str:
    """What to do about a directory whose weights are pickled: reading those runs whatever code they hold."""
    found = sorted(file.name for file in directory.glob("*") if file.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if not found:
        return ""
    return (
        f"; {', '.join(found)} would be read with pickle, which runs any code that a file holds, so it is not. Where "
        f'you trust it, convert it with torch and transformers: python -c "from transformers import '
        f"AutoModelForCausalLM as M; M.from_pretrained('{directory}').save_pretrained('{directory}-safetensors')\""
    )
