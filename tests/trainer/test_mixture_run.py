"""A run on a mixture: the shares among its metrics, what it prints, and an exact resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

MIXED = """
from nnxdsl import *
from sft import experiment as sft

more = Data.Conversations("more.jsonl", max_length=96)
experiment = evolve(sft, {
    "name": "mixed", "data": Data.Mixture({sft.data: 3, more: 1}),
    "steps": 6, "evaluation": None, "checkpoint.every_steps": 2,
})

if __name__ == "__main__":
    experiment.main()
"""


@pytest.fixture
def mixed(lab: Any) -> Any:
    (lab.place / "mixed.py").write_text(MIXED)
    rows = [{"prompt": f"More {n}? ", "completion": "yes " * (n % 9 + 1)} for n in range(5)]
    (lab.place / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lab


def metrics(home: Path) -> list[dict[str, Any]]:
    (directory,) = home.glob("mixed-*")
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_shares_are_metrics(mixed: Any) -> None:
    code, _, err = mixed.python("mixed.py")
    assert code == 0, err
    assert "chats.jsonl, rows:\n  read        43\n  trained on  43\n" in err
    assert "more.jsonl, rows:\n  read        5\n  trained on  5\n" in err
    rows = metrics(mixed.place / "runs")
    assert len(rows) == 6
    assert all(row["mixture/chats"] + row["mixture/more"] == 1 for row in rows)
    assert 0 < sum(row["mixture/more"] for row in rows) < 3


@pytest.mark.slow
def test_a_killed_run_ends_as_if_it_had_not_been(mixed: Any) -> None:
    assert mixed.python("mixed.py", "--home", "whole")[0] == 0
    mixed.environment["NNXDSL_FAILPOINT"] = "commit-renamed@2"
    assert mixed.python("mixed.py", "--home", "killed")[0] == -9
    del mixed.environment["NNXDSL_FAILPOINT"]
    assert mixed.python("mixed.py", "--home", "killed")[0] == 0
    names = ("loss", "grad_norm", "mixture/chats", "num_tokens")
    whole, killed = (
        [[row[name] for name in names] for row in metrics(mixed.place / home)] for home in ("whole", "killed")
    )
    assert whole == killed
