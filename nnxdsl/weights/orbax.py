"""Reads trees that other programs saved with orbax, one array at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from nnxdsl.errors import WeightsError
from nnxdsl.formats import linen
from nnxdsl.runs.checkpoint_format import first_line
from nnxdsl.runtime.backend import host_sharding
from nnxdsl.storage.plain_path import plain_path

_MARKS = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")


def is_tree(path: Path) -> bool:
    """Whether a directory is an orbax tree, or holds one as its item `default`, `items` or `params`."""
    return _item(path) is not None


def _item(path: Path) -> Path | None:
    for place in (path, path / "default", path / "items", path / "params"):
        if (place / "_METADATA").is_file() and any((place / mark).exists() for mark in _MARKS):
            return place
    return None


def open_tree(
    path: Path,
) -> tuple[dict[linen.Name, tuple[tuple[int, ...], np.dtype]], Callable[[linen.Name], np.ndarray]]:
    """Shapes and dtypes of a tree's arrays by name, and a function that reads one of them.

    Raises:
        WeightsError: It cannot be read, or holds values that are no arrays.
    """
    place = _item(path)
    if place is None:
        raise WeightsError(f"{path}: not an orbax tree")
    handler: Any = ocp.PyTreeCheckpointHandler()  # typed with orbax's own path type
    try:
        tree: Any = handler.metadata(plain_path(place)).tree
        full = dict(_flat(tree))
    except Exception as error:  # orbax raises many types
        raise WeightsError(f"{path}: cannot be read by orbax: {first_line(error)}") from None
    names: dict[linen.Name, linen.Name] = {}
    for keys, info in full.items():
        if getattr(info, "shape", None) is None or getattr(info, "dtype", None) is None:
            raise WeightsError(f"{path}: {'.'.join(keys)}: expected an array, got {type(info).__name__}")
        names[linen.without_collection(keys)] = keys

    def read(name: linen.Name) -> np.ndarray:
        keys = names[name]
        info = full[keys]
        target: dict[str, Any] = {}
        linen.put(target, keys, jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=host_sharding()))
        args = ocp.args.PyTreeRestore(
            item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=True
        )
        try:
            value: Any = handler.restore(plain_path(place), args=args)
        except Exception as error:  # orbax and tensorstore raise many types
            raise WeightsError(f"{path}: {'.'.join(keys)}: cannot be read: {first_line(error)}") from None
        for key in keys:
            value = value[key]
        return np.asarray(value)

    return {short: (tuple(full[keys].shape), np.dtype(full[keys].dtype)) for short, keys in names.items()}, read


def _flat(tree: Any, prefix: linen.Name = ()) -> Any:
    for key, value in tree.items():
        if hasattr(value, "items"):
            yield from _flat(value, (*prefix, str(key)))
        else:
            yield (*prefix, str(key)), value
