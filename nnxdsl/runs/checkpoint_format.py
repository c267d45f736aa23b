"""The on-disk layout of checkpoints: names of steps, arrays that can be saved, errors; reads and writes nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import attrs
import jax

from nnxdsl.errors import RunError
from nnxdsl.storage import manifest

ARRAYS = "arrays"  # orbax's own directory inside a step
WRITING, TRASH = ".writing", ".trash"
# Each of these is restored bit for bit (tests/runs/test_checkpoint.py); orbax refuses uint2 and uint4.
_SIZES = {"int": (2, 4, 8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64), "complex": (64, 128)}
SAVED_DTYPES = frozenset(
    [f"{kind}{bits}" for kind, sizes in _SIZES.items() for bits in sizes]
    + ["bool", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn"]
)

STEP = re.compile(r"\d{8,}")
_GROUP = re.compile(r"[a-z][a-z0-9_]*")
_MAX_LISTED = 5  # problems in one message


class CheckpointError(RunError):
    """A checkpoint that cannot be written, read, or restored into the targets: the step, the array, and the cure."""


@attrs.frozen
class ArrayInfo:
    """Shape and dtype of a saved array; `dtype` by name ("bfloat16", "key<fry>")."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def from_array(cls, array: jax.Array | jax.ShapeDtypeStruct) -> ArrayInfo:
        """The shape and dtype of an array."""
        return cls(tuple(array.shape), str(array.dtype))

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def step_name(step: int) -> str:
    """The directory name of a step: its number with at least eight digits."""
    if step < 0:
        raise ValueError(f"step: expected at least 0, got {step}")
    return f"{step:08d}"


def find(path: Path) -> tuple[Path, int | None]:
    """Finds the directory of checkpoints for a path, and the step if the path names one.

    Args:
        path: A run directory, its `checkpoints`, or one step inside that.

    Raises:
        CheckpointError: It is none of them.
    """
    if STEP.fullmatch(path.name) and (path / manifest.NAME).is_file():
        return path.parent, int(path.name)
    if (path / "checkpoints").is_dir():
        return path / "checkpoints", None
    if path.is_dir() and any(STEP.fullmatch(entry.name) for entry in path.iterdir()):
        return path, None
    raise CheckpointError(
        f"{path} holds no checkpoints; expected a run directory, its 'checkpoints', or one step in there"
    )


def check_savable(step: int, contents: Mapping[str, Mapping[str, ArrayInfo]]) -> None:
    """Refuses arrays that orbax cannot store.

    Raises:
        CheckpointError: Names the arrays.
        ValueError: The name of a group is invalid.
    """
    for group in contents:
        if not _GROUP.fullmatch(group):
            raise ValueError(f"group '{group}': expected a-z, 0-9 and '_', a letter first")
    problems = [
        f"{group}.{name}: {info}"
        for group, infos in contents.items()
        for name, info in infos.items()
        if 0 in info.shape or (info.dtype not in SAVED_DTYPES and not info.dtype.startswith("key<"))
    ]
    if problems:
        raise CheckpointError(
            f"checkpoint step {step} cannot be saved: orbax cannot store {list_arrays(problems)}\n"
            f"arrays need at least one element, and a dtype other than uint2 and uint4 and the rarer float8: "
            f"convert them, or leave them out and recompute them"
        )


def list_arrays(problems: list[str]) -> str:
    """The number of arrays with a problem, and a line for each of the first ones."""
    count = f"{len(problems)} array{'s' if len(problems) != 1 else ''}"
    more = [f"... and {len(problems) - _MAX_LISTED} more"] if len(problems) > _MAX_LISTED else []
    return "\n".join([count, *(f"  {line}" for line in [*problems[:_MAX_LISTED], *more])])


def first_line(error: BaseException) -> str:
    """The type and the first line of an error from orbax or tensorstore, with its middle left out if it is long."""
    text = (str(error).strip().splitlines() or [""])[0]
    if len(text) > 300:  # tensorstore names the operation first and the cause last
        text = f"{text[:100]} ... {text[-150:]}"
    return f"{type(error).__name__}: {text}"
