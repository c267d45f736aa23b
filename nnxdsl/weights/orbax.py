"""Trees that somebody else saved with orbax, read one array at a time; knows no names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from nnxdsl.errors import WeightsError
from nnxdsl.formats import linen
from nnxdsl.weights.run_weights import host

_MARKS = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")


def is_one(path: Path) -> bool:
    """Whether a directory is a tree of orbax's, or holds one as its item `default` or `items`."""
    return _item(path) is not None


def _item(path: Path) -> Path | None:
    for place in (path, path / "default", path / "items", path / "params"):
        if (place / "_METADATA").is_file() and any((place / mark).exists() for mark in _MARKS):
            return place
    return None


def open_tree(
    path: Path,
) -> tuple[dict[linen.Name, tuple[tuple[int, ...], np.dtype]], Callable[[linen.Name], np.ndarray]]:
    """Shapes and dtypes of a tree's arrays by name, and what reads one of them.

    Raises:
        WeightsError: it cannot be read, or holds what is no array.
    """
    place = _item(path)
    if place is None:
        raise WeightsError(f"{path}: no tree of orbax's")
    handler: Any = ocp.PyTreeCheckpointHandler()  # whose paths are of a type of its own
    try:
        tree: Any = handler.metadata(place.absolute()).tree
        full = dict(_flat(tree))
    except Exception as error:  # orbax has many
        raise WeightsError(f"{path}: cannot be read by orbax: {type(error).__name__}: {_line(error)}") from None
    names: dict[linen.Name, linen.Name] = {}
    for keys, info in full.items():
        if getattr(info, "shape", None) is None or getattr(info, "dtype", None) is None:
            raise WeightsError(f"{path}: {'.'.join(keys)}: expected an array, got {type(info).__name__}")
        short = keys
        while short[0] == linen.PARAMS and len(short) > 1:
            short = short[1:]
        names[short] = keys

    def read(name: linen.Name) -> np.ndarray:
        keys = names[name]
        info = full[keys]
        wanted: dict[str, Any] = {}
        linen.put(wanted, keys, jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=host()))
        args = ocp.args.PyTreeRestore(
            item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
        )
        try:
            found: Any = handler.restore(place.absolute(), args=args)
        except Exception as error:  # orbax and tensorstore have many
            raise WeightsError(f"{path}: {'.'.join(keys)}: cannot be read: {_line(error)}") from None
        for key in keys:
            found = found[key]
        return np.asarray(found)

    return {short: (tuple(full[keys].shape), np.dtype(full[keys].dtype)) for short, keys in names.items()}, read


def _flat(tree: Any, above: linen.Name = ()) -> Any:
    for key, value in tree.items():
        if hasattr(value, "items"):
            yield from _flat(value, (*above, str(key)))
        else:
            yield (*above, str(key)), value


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
