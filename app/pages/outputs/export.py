"""Exports model outputs as JSON lines, and as CSV with formulas escaped. Independent of pages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pandas as pd

from nnxdsl.errors import RunError

from ...processes.votes import SIDES, samples_of
from ..layout.arrays import guarded

TYPES = {"jsonl": "application/jsonl", "csv": "text/csv; charset=utf-8"}


def exported(result: Mapping[str, Any], kind: str) -> str:
    """Formats the rows of a result: pairs, tokens, or the two answers.

    Raises:
        RunError: unknown file format.
    """
    rows = [{name: result.get(name) for name in ("run", "step", "against")} | row for row in _rows(result)]
    if kind == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if kind != "csv":
        raise RunError(f"format: expected one of {', '.join(TYPES)}")
    cells = pd.DataFrame(rows, dtype=object).map(lambda cell: guarded(cell) if isinstance(cell, str) else cell)
    return cells.to_csv(index=False, lineterminator="\r\n")


def _rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "rows" in result:
        return [_pair(row) for row in result["rows"]]
    if "sides" in result:
        return [
            {
                "text": side["name"],
                "position": at,
                "id": side["ids"][at],
                "token": side["pieces"][at],
                "policy_logp": side["policy"][at - side["begin"]],
                "other_logp": side["other"][at - side["begin"]],
            }
            for side in result["sides"]
            for at in range(side["begin"], len(side["ids"]))
        ]
    prompt = "".join(result.get("prompt_pieces", ()))
    return [
        {"side": side, "number": number, "prompt": prompt, "answer": answer["text"]}
        | {name: answer[name] for name in ("tokens", "stop")}
        | result["sampling"]
        for side in SIDES
        if side in result
        for number, answer in enumerate(samples_of(result, side), start=1)
    ]


def _pair(row: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: value for name, value in row.items() if not isinstance(value, list | dict)}
    for who in SIDES:
        fields |= {f"{who}_logp_{side}": row[who][number] for number, side in enumerate(("chosen", "rejected"))}
    return fields | {f"reward_{name}": value for name, value in row["rewards"].items()}
