"""The check, before compilation, that a program fits its devices; the error lists the bytes of each part."""

from __future__ import annotations

from nnxdsl.errors import PlanError, Problem
from nnxdsl.program.batches.abstract import lengths
from nnxdsl.program.blueprint import Blueprint
from nnxdsl.program.memory import memory

MARGIN = 1.1
"""Estimates are within 10% of XLA's figures (docs/guides/memory.md): a program that exceeds memory by less is run."""

_GIB = 2**30


def require_fit(blueprint: Blueprint, usable: int | None) -> None:
    """Raise for a program that would run out of memory.

    Args:
        blueprint: The program without devices.
        usable: Bytes that it may use on each device; None if unknown.

    Raises:
        PlanError: with the bytes of each part.
    """
    if usable is None:
        return
    parts = [part for part in memory(blueprint, lengths(blueprint.experiment.data)) if part.memory == "device"]
    needed = sum(part.bytes for part in parts)
    if needed <= MARGIN * usable:
        return
    width = max(len(part.name) for part in parts)
    table = [f"    {part.name:{width}}  {part.bytes / _GIB:12,.4f} GiB  {part.tag}: {part.how}" for part in parts]
    message = (
        f"a step takes {needed / _GIB:,.4f} GiB on each device, of which {usable / _GIB:,.4f} GiB are usable:\n"
        + "\n".join(table)
        + "\n    `plan --device NAME --count N --search` finds placements that fit; less takes microbatch_size, "
        "memory.remat=full,\n    an adapter, quantization, more devices. NNXDSL_DEVICE_GIB=N says that N GiB are usable"
    )
    raise PlanError([Problem("memory", message)], f"Experiment '{blueprint.experiment.name}'")
