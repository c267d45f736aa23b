"""What every recipe of experiments/ makes of rows that it has not learnt from: a table of docs/guides/objectives.md.

`python benchmarks/held_out.py [RECIPE ...] [--home runs]` runs them as they are, one after another (each goes on where
it stands, and is not run again), and prints their held-out measures before the first step and after the last one.
`--update` writes the table into the page.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from nnxdsl.cli.load import load

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "guides" / "objectives.md"
START, END = "<!-- held out -->\n", "<!-- end of held out -->"
MEASURES = {
    "sft_gemma": ("loss", "mean_token_accuracy"),
    "dpo_gemma": ("loss", "rewards/margins", "rewards/accuracies"),
    "orpo_gemma": ("loss", "rewards/margins", "rewards/accuracies"),
    "simpo_gemma": ("loss", "rewards/margins", "rewards/accuracies"),
    "kto_gemma": ("loss", "rewards/margins"),
    "distill_gemma": ("distill_loss", "mean_token_accuracy"),
    "grpo_gemma": ("reward", "rewards/kind/mean"),
    "reward_gemma": ("loss", "rewards/margins", "rewards/accuracies"),
    "grpo_reward_model": ("reward", "rewards/reward_model/mean"),
    "grpo_calculator": ("reward", "tools/call_frequency"),
}
FALLS = ("loss", "distill_loss")


def measured(recipe: str, home: Path) -> dict[str, tuple[float, float]]:
    """Each measure before and after."""
    file = str(ROOT / "experiments" / f"{recipe}.py")
    subprocess.run([sys.executable, file, "--home", str(home), "--quiet"], cwd=ROOT, check=True)
    directory = home / load(file, home).id
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    result = {}
    for name in MEASURES[recipe]:
        values = [row[f"eval/{name}"] for row in rows if f"eval/{name}" in row]
        result[name] = values[0], values[-1]
    return result


def table(result: dict[str, dict[str, tuple[float, float]]]) -> str:
    """The table in Markdown."""
    lines = ["| recipe | held out | before | after |", "|---|---|---|---|"]
    for recipe, measures in result.items():
        for index, (name, (before, after)) in enumerate(measures.items()):
            first = f"[`{recipe}.py`](../experiments/{recipe}.py)" if index == 0 else ""
            lines.append(f"| {first} | `eval/{name}` | {before:.4g} | {after:.4g} |")
    return "\n".join(lines)


def main() -> int:
    """What the command line asks for; 1 if a measure has become worse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", choices=[[], *MEASURES], metavar="RECIPE")
    parser.add_argument("--home", type=Path, default=Path("runs"))
    parser.add_argument("--update", action="store_true", help="write the table into docs/guides/objectives.md")
    options = parser.parse_args()
    result = {}
    for recipe in options.recipes or MEASURES:
        result[recipe] = measured(recipe, options.home.absolute())
        print(recipe, result[recipe], flush=True)
    text = table(result)
    print(f"\n{text}")
    if options.update:
        before, rest = PAGE.read_text(encoding="utf-8").split(START)
        PAGE.write_text(f"{before}{START}{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    worse = [
        f"{recipe}: {name}"
        for recipe, measures in result.items()
        for name, (before, after) in measures.items()
        if (after < before) != (name in FALLS)
    ]
    print("\n".join(worse))
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
