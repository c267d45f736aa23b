"""The table of what recipes learn: each that is in it has learnt; `benchmarks/held_out.py` writes it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guides" / "objectives.md").read_text(encoding="utf-8")
FALLS = ("`eval/loss`", "`eval/distill_loss`")


def test_recipes_improve_what_is_held_out() -> None:
    table = PAGE.split("<!-- held out -->\n")[1].split("<!-- end of held out -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    shown = {row[0].split("`")[1] for row in rows if row[0]}
    assert {"sft_gemma.py", "dpo_gemma.py"} <= shown <= {path.name for path in (ROOT / "experiments").glob("*_*.py")}
    for _, name, before, after in rows:
        assert (float(after) < float(before)) == (name in FALLS), name
