"""Model outputs as tables of plain values, and those as JSON lines, or as CSV with formulas escaped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from nnxdsl.errors import RunError

from ...processes.votes import SIDES, samples_of
from ..layout.arrays import guarded

TYPES = {"jsonl": "application/jsonl", "csv": "text/csv; charset=utf-8"}
Result = Mapping[str, Any]


def exported(results: Sequence[Result], kind: str) -> str:
    """Formats the rows of results: pairs, tokens, or the two answers; raises for an unknown file format."""
    names = ("run", "step", "against")
    rows = [{name: result.get(name) for name in names} | row for result in results for row in _rows(result)]
    if kind == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if kind != "csv":
        raise RunError(f"format: expected one of {', '.join(TYPES)}")
    cells = pd.DataFrame(rows, dtype=object).map(lambda cell: guarded(cell) if isinstance(cell, str) else cell)
    return cells.to_csv(index=False, lineterminator="\r\n")


def tokens_of(side: Result) -> pd.DataFrame:
    """The tokens of a text that have log-probs, indexed by their position in it.

    `difference` is the log-prob under the policy minus that under the other model; NaN where one is not finite.
    """
    begin = side["begin"]
    table = pd.DataFrame({"id": side["ids"][begin:], "token": side["pieces"][begin:]})
    for who in SIDES:
        table[f"{who}_logp"] = np.array(side[who], dtype=float)
    table["difference"] = table["policy_logp"] - table["other_logp"]
    return table.set_axis(range(begin, begin + len(table)))


def _rows(result: Result) -> list[dict[str, Any]]:
    if "rows" in result:
        return [_pair(row) for row in result["rows"]]
    if "sides" in result:
        tables = {side["name"]: tokens_of(side).drop(columns="difference") for side in result["sides"]}
        table = pd.concat(tables, names=["text", "position"]).reset_index().astype(object)
        return table.where(table.notna(), None).to_dict("records")
    prompt = "".join(result.get("prompt_pieces", ()))
    return [
        {"side": side, "number": number, "prompt": prompt, "answer": answer["text"]}
        | {name: answer[name] for name in ("tokens", "stop")}
        | result["sampling"]
        for side in SIDES
        if side in result
        for number, answer in enumerate(samples_of(result, side), start=1)
    ]


def _pair(row: Result) -> dict[str, Any]:
    fields = {name: value for name, value in row.items() if not isinstance(value, list | dict)}
    for who in SIDES:
        fields |= {f"{who}_logp_{side}": row[who][number] for number, side in enumerate(("chosen", "rejected"))}
    return fields | {f"reward_{name}": value for name, value in row["rewards"].items()}
