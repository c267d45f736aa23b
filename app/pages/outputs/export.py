"""Exports model outputs as JSON lines, and as CSV with formulas escaped. Independent of pages."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from typing import Any

from nnxdsl.errors import RunError

TYPES = {"jsonl": "application/jsonl", "csv": "text/csv; charset=utf-8"}
_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


def exported(result: Mapping[str, Any], kind: str) -> str:
    """Formats the rows of a result: pairs, tokens, or the two answers.

    Raises:
        RunError: unknown file format.
    """
    rows = _rows(result)
    if kind == "jsonl":
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if kind != "csv":
        raise RunError(f"format: expected one of {', '.join(TYPES)}")
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\r\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    who = {name: result.get(name) for name in ("run", "step", "against")}
    if "rows" in result:
        return [{**who, **_pair(row)} for row in result["rows"]]
    if "sides" in result:
        return [
            {
                **who,
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
        {
            **who,
            "side": side,
            "number": number,
            "prompt": prompt,
            "answer": answer["text"],
            "tokens": answer["tokens"],
            "stop": answer["stop"],
            **result["sampling"],
        }
        for side in ("policy", "other")
        for number, answer in enumerate((result[side], *result[side].get("more", ())), start=1)
    ]


def _pair(row: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: value for name, value in row.items() if not isinstance(value, list | dict)}
    for who in ("policy", "other"):
        fields |= {f"{who}_logp_{side}": row[who][number] for number, side in enumerate(("chosen", "rejected"))}
    return fields | {f"reward_{name}": value for name, value in row["rewards"].items()}


def _cell(value: Any) -> Any:
    """Prefixes text that a spreadsheet would run as a formula with a quote."""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULAS) else value
