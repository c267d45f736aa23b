"""What a service holds of a run, read by its own client: from a metric's name to its steps and values."""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Held = Callable[[str], list[tuple[int, float]]]


def tensorboard(directory: Path) -> Held:
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(directory), size_guidance={module.SCALARS: 0})  # 0: all of them
    events.Reload()
    return lambda name: [(event.step, event.value) for event in events.Scalars(name)]


def trackio(project: str, run: str) -> Held:
    """From the database in TRACKIO_DIR, which is read when the package is imported."""
    rows = importlib.import_module("trackio.sqlite_storage").SQLiteStorage.get_logs(project, run)
    return lambda name: [(row["step"], row[name]) for row in rows if name in row]


def mlflow(client: Any, run_id: str) -> Held:
    return lambda name: [(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)]


def wandb(directory: Path) -> Held:
    """From the files of all attempts in a run directory."""
    rows = [row for file in sorted(directory.rglob("*.wandb")) for row in _history(file)]
    return lambda name: [(step, row[name]) for step, row in rows if name in row]


def _history(file: Path) -> Iterator[tuple[int, dict[str, float]]]:
    for record in wandb_records(file):
        if record.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            yield record.history.step.num, row


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a W&B file: after 7 bytes, LevelDB's log format (blocks of 32 KiB; checksum, length, type)."""
    proto = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, offset, parts = file.read_bytes(), 7, b""
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:
            offset += 32768 - offset % 32768
            continue
        length, part = struct.unpack("<HB", data[offset + 4 : offset + 7])
        parts += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if part in (1, 4):  # whole, or the last part
            yield proto.Record.FromString(parts)
            parts = b""
