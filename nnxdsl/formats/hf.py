"""Reads and writes Hugging Face model directories: `config.json` and safetensors, as arrays of our decoder."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import jax
import numpy as np

from nnxdsl.errors import Problem, WeightsError
from nnxdsl.formats import hf_names, quantize, safetensors
from nnxdsl.formats.even_parts import recut
from nnxdsl.formats.files import PICKLE_REFUSED, read_json
from nnxdsl.formats.finite import all_finite, require_finite
from nnxdsl.formats.hf_names import HEAD, copies, has_mtp, is_auxiliary, is_unread, tensor_sources
from nnxdsl.formats.mapped_arrays import MappedArray
from nnxdsl.formats.quantized import StoredTensor, dequantize
from nnxdsl.formats.stacked_experts import unstacked
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.families.registry import family_named, from_hf, text_fields, to_hf
from nnxdsl.models.params import AbstractModel, is_mtp_param

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Prefixes of tensor names: multimodal models in transformers 5 and 4, text models, and Nemotron-H.
PREFIXES = ("model.language_model.", "language_model.model.", "model.", "backbone.")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
# Tensors that a decoder ignores: other parts of multimodal checkpoints, RoPE frequencies in old checkpoints, and the
# multi-token-prediction (MTP) tensors of the Qwen families.
_OTHER_PARTS = (
    *("visual", "vision_tower", "vision_model", "vision_embedder", "embed_vision"),
    *("vision_adapter", "vision_projection", "multi_modal_projector", "mm_projector", "audio_tower", "embed_audio"),
)
_UNUSED = re.compile(rf"(model\.)?({'|'.join(_OTHER_PARTS)})\.|mtp\.|.*\.rotary_emb\.inv_freq$")
_NOT_STORED = {
    "mtp.join.kernel": "num_nextn_predict_layers has no multi-token-prediction (MTP) layer",
    "lm_head.kernel": "a model for sequence classification, which has no output head",
}
"""Why files lack arrays that a model may need and that nothing draws."""
_LAYER = re.compile(r"\blayers\.(\d{1,9})\.")


def read_config(directory: str | Path) -> DecoderConfig:
    """Reads a directory's `config.json` into the architecture of a decoder.

    Args:
        directory: A directory in the Hub's layout.

    Raises:
        WeightsError: The file is missing, no JSON, of a family that is not supported, or has more layers than the
            weights next to it.
    """
    fields, file = read_fields(directory), Path(directory) / "config.json"
    try:
        config = from_hf(fields)
    except WeightsError as error:
        raise WeightsError(f"{file}: {error}") from None
    stored = _count_layers(Path(directory))
    if stored is not None and (layers := config.layers.num_layers) > stored:  # before a model of that size is built
        raise WeightsError(
            f"{file}: num_hidden_layers is {layers}, the weights in the same directory have {stored} layers"
        )
    return config


def _count_layers(directory: Path) -> int | None:
    """The number of layers in the names of a directory's tensors; None if there are none, or they cannot be read."""
    try:
        listing, file_of = _list_files(directory)
        names = file_of or safetensors.index(listing)
    except WeightsError:
        return None  # reported where weights are read, which may be those of another directory
    return max((int(match[1]) + 1 for name in names if (match := _LAYER.search(name))), default=None)


def read_fields(directory: str | Path) -> dict[str, Any]:
    """The fields of a directory's `config.json`; errors as for `files.read_json`."""
    return read_json(Path(directory) / "config.json")


class HubReader:
    """Reads a decoder's arrays from a directory in the Hub's layout, memory-mapped.

    Args:
        directory: Holds `config.json` and `model.safetensors`, or `model.safetensors.index.json` and its shards.
        allow_non_finite: Whether NaN and infinity are accepted; if not, each part of a tensor is checked when it is
            read.

    Attributes:
        directory: The directory.
        config: The decoder's architecture; with the multi-token-prediction (MTP) layer if its tensors are present.

    Raises:
        WeightsError: A file is missing, damaged or not supported.
    """

    def __init__(self, directory: str | Path, *, allow_non_finite: bool = False) -> None:
        self.directory = Path(directory)
        self._allow_non_finite = allow_non_finite
        self.config = read_config(directory)
        fields = text_fields(read_fields(directory))
        mtp_numbers = _mtp_layers(self.config, fields)
        with_mtp = attrs.evolve(self.config, mtp_layers=1) if has_mtp(fields) else self.config
        self._sources = tensor_sources(with_mtp, fields.get("model_type"))
        self._copies = copies(with_mtp, fields.get("model_type"))
        self._tensors: dict[str, StoredTensor] = {}
        self._heads: dict[str, StoredTensor] = {}
        self._others: dict[str, StoredTensor] = {}
        self._listing, self._file_of = _list_files(self.directory)
        files = sorted(set(self._file_of.values())) or [self._listing]
        stored = {name: tensor for file in files for name, tensor in safetensors.index(file).items()}
        tensors: dict[str, StoredTensor] = dict(dequantize(stored))
        self._prefix = next((p for p in PREFIXES if any(name.startswith(p + "layers.") for name in tensors)), "model.")
        wanted = {name for source in self._sources.values() for name in source.names} | set(self._copies)
        family = family_named(fields.get("model_type"))
        aliases = {} if family is None else family.aliases
        for name, tensor in tensors.items():
            ours = name.removeprefix(self._prefix)
            if ours not in wanted:
                ours = ".".join(aliases.get(part, part) for part in ours.split("."))
            if name in _HEADS and self.config.head.tied:
                self._heads[name] = tensor
            elif name in _HEADS:
                self._tensors[HEAD] = tensor
            elif ours in wanted and name.startswith(self._prefix) != is_auxiliary(ours):
                self._tensors[ours] = tensor
            elif each := dict(unstacked(ours, tensor, wanted)):
                self._tensors |= each
            elif is_unread(self.config, ours):
                pass
            elif not _UNUSED.match(name) and not ((layer := _LAYER.match(ours)) and int(layer[1]) in mtp_numbers):
                self._others[name] = tensor
        for name, part in list(recut(self._tensors, {} if family is None else family.even_parts)):
            self._tensors[name] = part
        if with_mtp.mtp_layers and self._tensors.keys() & set(self._sources["mtp.join.kernel"].names):
            self.config = with_mtp

    def leaf(self, path: str) -> np.ndarray:
        """One array of the base model, in the dtype of the file; layer groups stacked, kernels `[in, out]`.

        Args:
            path: Such as "layers.blocks.0.attention.query.kernel".

        Raises:
            KeyError: The base model has no such array.
            WeightsError: A tensor of it is missing, has a dtype that is not supported, or holds NaN or infinity.
        """
        return self.mapped(path).read()

    def mapped(self, path: str) -> MappedArray:
        """The same array as a MappedArray, of which nothing is read yet; errors as for `leaf`."""
        source = self._sources[path]
        self._require(path)
        array = hf_names.mapped(source, [self._tensors[name] for name in source.names])
        if self._allow_non_finite:
            return array
        return attrs.evolve(array, guards=tuple(functools.partial(self._require_finite, name) for name in source.names))

    def _require_finite(self, name: str, part: np.ndarray) -> None:
        """Refuses a non-finite part of a tensor; the message lists all non-finite tensors of its file."""
        if all_finite(part):
            return
        file = self._tensors[name].file
        same_file = {
            self._full(other): each.read for other, each in self._tensors.items() if each.file == file and each.readable
        }
        require_finite(same_file, file)

    def _require(self, path: str) -> None:
        for name in self._sources[path].names:
            if name not in self._tensors:
                raise WeightsError(str(self._missing(path, name, None)))
            if not self._tensors[name].readable:
                raise WeightsError(str(self._unreadable(path, name)))

    def dtype(self, path: str) -> np.dtype:
        """The dtype of `leaf`, without reading it; errors as for `leaf`."""
        return self.mapped(path).dtype

    def check(self, template: AbstractModel) -> list[Problem]:
        """Compares the directory with a model; reads headers only, no weights.

        Arrays that adapters or quantization add are ignored; a quantized kernel is checked as the kernel.
        A head that is stored although it is tied to the embedding must hold the same bytes.

        Args:
            template: A decoder of `config`.

        Returns:
            A Problem for each tensor that is missing, unexpected, or has another shape or a dtype that is not
            supported.
        """
        problems: list[Problem] = []
        for path, leaf in template.variables.items():
            path = path.removesuffix(".array.qvalue")
            if path not in self._sources:
                if path in _NOT_STORED:
                    problems.append(Problem(path, f"{self.directory / 'config.json'}: {_NOT_STORED[path]}"))
                continue
            source = self._sources[path]
            shape = source.part_shape(leaf.shape)
            if (stack := leaf.shape[: len(source.leading)]) != source.leading:
                got, expected = (" of ".join(map(str, sizes)) for sizes in (source.leading, stack))
                message = f"{self.directory / 'config.json'}: {got} layer groups, expected {expected}"
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
            Problem(name, f"{tensor.file}: no tensor of a text decoder of {self.config.layers.num_layers} layers")
            for name, tensor in self._others.items()
        )
        problems += self._check_heads()
        if any(is_mtp_param(path) for path in template.variables):
            problems += self._check_copies()
        return problems

    def _check_heads(self) -> Iterator[Problem]:
        for name, head in self._heads.items():
            (embedding,) = self._sources["embed.embedding"].names
            if self._differs(head, embedding):
                message = f"differs from {self._full(embedding)}, but config.json says that the two are tied"
                yield Problem(name, f"{head.file}: {message}")

    def _check_copies(self) -> Iterator[Problem]:
        for name, of in self._copies.items():
            if name in self._tensors and self._differs(self._tensors[name], of):
                message = f"differs from {self._full(of)}, which the multi-token-prediction (MTP) layer shares"
                yield Problem(self._full(name), f"{self._tensors[name].file}: {message}")

    def _differs(self, copy: StoredTensor, name: str) -> bool:
        """Whether a tensor holds other bytes than the tensor `name`; False if one of them is reported already."""
        tensor = self._tensors.get(name)
        if tensor is None or not (tensor.readable and copy.readable):
            return False
        if copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            return True
        return not np.array_equal(copy.read().view(np.uint8), tensor.read().view(np.uint8))

    def _full(self, name: str) -> str:
        return name if is_auxiliary(name) else self._prefix + name

    def _missing(self, path: str, name: str, shape: tuple[int, ...] | None) -> Problem:
        file = self._file_of.get(self._full(name), self._listing)
        expected = f" of shape {shape}" if shape is not None else ""
        return Problem(path, f"{file}: expected a tensor {self._full(name)}{expected}, there is none")

    def _unreadable(self, path: str, name: str) -> Problem:
        tensor = self._tensors[name]
        return Problem(
            path, f"{tensor.file}: {self._full(name)}: expected dtype F64, F32, F16 or BF16, got {tensor.dtype}"
        )


def write(
    directory: str | Path,
    config: DecoderConfig,
    leaves: Mapping[str, jax.Array | np.ndarray | jax.ShapeDtypeStruct],
    *,
    value: Callable[[str], jax.Array | np.ndarray] | None = None,
    max_shard_bytes: int | None = None,
    fields: Mapping[str, Any] | None = None,
    like: str | None = None,
    quantization: str | None = None,
) -> tuple[str, ...]:
    """Writes a directory that transformers loads.

    Args:
        directory: Created if missing; its `config.json` and weights are replaced.
        config: The decoder's architecture.
        leaves: The arrays of the base model by path, each stored in its own dtype (float32, float16 or bfloat16);
            with `value`, only their shapes and dtypes are used.
        value: Returns an array by path; called once for each, one at a time. None to take them from `leaves`.
        max_shard_bytes: Largest size of a file; a larger tensor has a file of its own. None for one file.
        fields: Further fields of the text decoder in `config.json`, such as token ids.
        like: The `model_type` of the family to write, where several have such a decoder; see `config.to_hf`.
        quantization: The format of linear layers' weights, one of `quantize.METHODS`; None for their own dtypes. The
            values may then have other dtypes than `leaves`, such as float32, and the rest is cast.

    Returns:
        Remarks for the user.

    Raises:
        WeightsError: An array is missing, or is none of the base model (an adapter: merge it first); no family of
            the Hub has such a decoder; or its weights cannot be quantized so.
    """
    config_json = to_hf(config, np.dtype(leaves["embed.embedding"].dtype).name, like)
    config_json.get("text_config", config_json).update(fields or {})
    sources = tensor_sources(config, config_json["model_type"])
    family = family_named(config_json["model_type"])
    prefix = "model." if family is None else family.prefix
    if sources.keys() != leaves.keys():
        problems = [f"{path}: missing" for path in sources if path not in leaves]
        problems += [f"{path}: no array of the base model" for path in leaves if path not in sources]
        raise WeightsError("\n  ".join([f"{directory}: cannot be written:", *problems]))
    origin: dict[str, list[tuple[str, int]]] = {}
    for path, source in sources.items():
        for number, name in enumerate(source.names):
            origin.setdefault(tensor_name(name, prefix), []).append((path, number))
            for copy in (copy for copy, of in copies(config, config_json["model_type"]).items() if of == name):
                origin[tensor_name(copy, prefix)] = [(path, number)]
    tensors = {
        name: (sources[path].part_shape(tuple(leaves[path].shape)), np.dtype(leaves[path].dtype))
        for name, [(path, _), *_] in origin.items()
    }
    quantized = None
    if quantization is not None:
        linears = [name for name, [(path, _), *_] in origin.items() if _is_linear(path)]
        quantized = quantize.layout(quantization, tensors, linears, config_json["model_type"])
        config_json["quantization_config"] = dict(quantized.config)
    current: dict[str, Any] = {}  # the arrays being written: all tensors of one array follow each other

    def whole(name: str) -> np.ndarray:
        if origin[name][0][0] not in current:
            current.clear()
            current.update((path, leaves[path] if value is None else value(path)) for path, _ in origin[name])
        parts = [hf_names.part(sources[path], current[path], number) for path, number in origin[name]]
        return hf_names.joined([sources[path] for path, _ in origin[name]], parts)

    encoded: dict[str, np.ndarray] = {}  # the parts of the weight being written, which follow each other likewise

    def part(name: str) -> np.ndarray:
        if quantized is None:
            return whole(name)
        if name not in quantized.weight_of:
            return whole(name).astype(tensors[name][1])
        if name not in encoded:
            encoded.clear()
            weight = quantized.weight_of[name]
            encoded.update(quantized.format.encode(weight, whole(weight)))
        return encoded[name]

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    stored = tensors if quantized is None else quantized.stored
    shards = safetensors.shards(stored, max_shard_bytes)
    if len(shards) == 1:
        safetensors.write(directory / SINGLE, stored, part)
        (directory / INDEX).unlink(missing_ok=True)  # of a sharded checkpoint that this one replaces
    else:
        files = {f"model-{n:05d}-of-{len(shards):05d}.safetensors": names for n, names in enumerate(shards, start=1)}
        for file, names in files.items():
            safetensors.write(directory / file, {name: stored[name] for name in names}, part)
        total = sum(safetensors.size(*tensor) for tensor in stored.values())
        listing = {
            "metadata": {"total_size": total},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        (directory / INDEX).write_text(json.dumps(listing, indent=2) + "\n", encoding="utf-8")
        (directory / SINGLE).unlink(missing_ok=True)  # transformers would read it instead of the shards
    (directory / "config.json").write_text(json.dumps(config_json, indent=2) + "\n", encoding="utf-8")
    return () if quantized is None else quantized.notes


def _is_linear(path: str) -> bool:
    """Whether an array may be quantized: kernels of linear layers, except the head and the one before MTP's block."""
    return path.endswith(".kernel") and path not in ("lm_head.kernel", "score.kernel", "mtp.join.kernel")


def tensor_name(name: str, prefix: str) -> str:
    """The full name in a file of a tensor of `tensor_sources`."""
    return name if is_auxiliary(name) else prefix + name


def _mtp_layers(config: DecoderConfig, fields: Mapping[str, Any]) -> range:
    """The numbers of the multi-token-prediction layers, which follow those of the decoder (DeepSeek-V3)."""
    count = fields.get("num_nextn_predict_layers")
    first = config.layers.num_layers
    return range(first, first + (count if isinstance(count, int) else 0))


def _list_files(directory: Path) -> tuple[Path, dict[str, Path]]:
    """The single file or the index; for a sharded checkpoint also the file of each tensor."""
    single, listing = directory / SINGLE, directory / INDEX
    if not listing.exists():
        if not single.exists():
            hint = _pickled(directory) or "; to train a model from scratch, set weights=Weights.Random()"
            raise WeightsError(f"{directory}: expected {SINGLE} or {INDEX}, there is neither{hint}")
        return single, {}
    names = read_json(listing).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()) or not names:
        raise WeightsError(f"{listing}: expected a 'weight_map' of tensor names to file names")
    # Checks names, not resolved paths: in the Hub's cache every file is a link out of the directory.
    outside = sorted({file for file in names.values() if Path(file).is_absolute() or ".." in Path(file).parts})
    if outside:
        files = ", ".join(map(repr, outside))
        raise WeightsError(f"{listing}: names files outside of its directory, which are not read: {files}")
    return listing, {name: directory / file for name, file in names.items()}


def files_of(directory: str | Path) -> list[Path]:
    """The safetensors files of a directory in the Hub's layout; errors as for `HubReader`."""
    listing, file_of = _list_files(Path(directory))
    return sorted(set(file_of.values())) or [listing]


def _pickled(directory: Path) -> str:
    """How to convert the pickled weights of a directory, if it has some; they are never read."""
    names = sorted(file.name for file in directory.glob("*") if file.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if not names:
        return ""
    return (
        f"; {', '.join(names)} {PICKLE_REFUSED}. If "
        f'you trust it, convert it with torch and transformers: python -c "from transformers import '
        f"AutoModelForCausalLM as M; M.from_pretrained('{directory}').save_pretrained('{directory}-safetensors')\""
    )
