"""How long a DPO step takes on this machine's CPU, and how much memory: nnxdsl against Tunix and TRL.

`python benchmarks/dpo_step.py --peers DIRECTORY`, with the environment that `make_peers.py` makes; without `--peers`,
against a step in Tunix's layout alone. Every side is a process of its own on the same weights, token ids, adapters and
settings in float32. They take a step by turns, while the others wait. Losses are compared; where they differ by more
than 1e-4, or a side fails, the exit code is 1.

`--before CHECKOUT` takes another checkout of nnxdsl as one more side, in the same turns: what a change costs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs
import step_model

HERE = Path(__file__).parent
SAME = 1e-4
"""By how much losses of the first steps may differ."""

COMPARED = 6
"""Steps whose losses must be the same."""

BATCHES = 8
"""Batches before they begin again: so many steps are taken before any is timed, to meet all shapes."""

OURS, TUNIX, TRL, LAYOUT, BEFORE = "nnxdsl", "Tunix", "TRL", "Tunix's layout", "nnxdsl before"
CASES = {
    "lora": (True, False),
    "full": (False, False),
    "lora-spread": (True, True),
    "full-spread": (False, True),
}
"""Whether adapters are trained, and whether lengths are spread."""

# Ours, theirs, and at most what part of their time ours should take; of memory it is always `OF_MEMORY`.
AIMS = (
    ((OURS, "cached"), (TUNIX, "online"), 0.40),
    ((OURS, "cached"), (TRL, "cached"), 0.25),
    ((OURS, "online"), (TUNIX, "online"), 0.55),
    ((OURS, "online"), (TRL, "online"), 0.35),
    ((OURS, "cached"), (LAYOUT, "online"), 0.40),
    ((OURS, "online"), (LAYOUT, "online"), 0.55),
    ((OURS, "cached"), (BEFORE, "cached"), 1.02),
    ((OURS, "online"), (BEFORE, "online"), 1.02),
)
OF_MEMORY, OF_MEMORY_BEFORE = 0.6, 1.02
FIGURES = "  {:<22} {:>10} {:>10} {:>10} {:>11} {:>13} {:>13} {:>9}"

TRIED = (("--attention", "sdpa"), ("--attention", "eager"), ("--attention", "sdpa", "--compile"))
"""How TRL may compute, of which the quickest is taken."""


class FailedError(Exception):
    """A side that ended before its time, or took too long: the end of its log."""


class Side:
    """A process that takes steps when it is told to; see `side.py`."""

    def __init__(self, name: tuple[str, str], argv: list[str], log: Path, checkout: Path = HERE.parent) -> None:
        self.name, self.log = name, log
        self.seconds: list[float] = []
        self.busy: list[float] = []
        self.report: dict[str, Any] = {}
        with log.open("w") as file:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                cwd=checkout / HERE.name,
                env={**os.environ, "PYTHONPATH": str(checkout)},
            )

    def ask(self, what: str, limit: float) -> dict[str, Any]:
        """Its answer.

        Raises:
            FailedError: there is none within so many seconds.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(what + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise FailedError(self._end()) from None
        if not select.select([self._process.stdout], [], [], limit)[0]:
            raise FailedError(f"no answer to '{what}' within {limit:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise FailedError(self._end())
        return json.loads(line)

    def step(self, limit: float) -> float:
        """One step, timed."""
        answer = self.ask("go 1", limit)
        self.seconds += answer["seconds"]
        self.busy += answer["busy"]
        return answer["seconds"][0]

    def end(self, limit: float) -> None:
        """It tells what there is to tell."""
        self.report = self.ask("end", limit)

    def kill(self) -> None:
        """Ends the process if it has not ended itself."""
        self._process.kill()
        self._process.wait()

    def _end(self) -> str:
        self._process.wait()
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])


@attrs.frozen
class Case:
    """One table.

    Attributes:
        name: See `CASES`.
        directory: The job.
        peers: Their Python, or None.
        before: Another checkout of nnxdsl, or None.
        rounds: Timed steps of each side.
        limit: Seconds that an answer may take.
        trial: Seconds that each of `TRIED` may take until its second step is over.
    """

    name: str
    directory: Path
    peers: Path | None
    before: Path | None
    rounds: int
    limit: float
    trial: float

    def begin(self, name: tuple[str, str], flags: tuple[str, ...] = ()) -> Side:
        """A side of this case, which loads its model now."""
        kind, reference = name
        scripts = {OURS: "side_nnxdsl.py", TUNIX: "side_tunix.py", TRL: "side_trl.py", LAYOUT: "side_tunix_layout.py"}
        script = scripts.get(kind, "side_nnxdsl.py")
        checkout = self.before if kind == BEFORE and self.before is not None else HERE.parent
        python = str(self.peers) if kind in (TUNIX, TRL) else sys.executable
        argv = [python, str(checkout / HERE.name / script), str(self.directory), *flags]
        if kind in (OURS, BEFORE, TRL):
            argv += ["--reference", reference]
        log = f"{kind}-{reference}.log".replace(" ", "-")
        return Side(name, argv, self.directory / log, checkout)

    def quickest(self) -> tuple[tuple[str, ...], dict[str, float | str]]:
        """The flags with which TRL is quickest here, and what each of them took."""
        took: dict[str, float | str] = {}
        for flags in TRIED:
            side = self.begin((TRL, "cached"), flags)
            try:
                side.ask("go 2", min(self.limit, self.trial))
                took[" ".join(flags)] = min(side.step(self.limit) for _ in range(3))
            except FailedError as failure:
                took[" ".join(flags)] = str(failure)
            finally:
                side.kill()
        known = {flags: seconds for flags, seconds in took.items() if isinstance(seconds, float)}
        return tuple(min(known, key=lambda flags: known[flags]).split()) if known else TRIED[0], took

    def run(self, trl: tuple[str, ...]) -> tuple[dict[tuple[str, str], Side], dict[tuple[str, str], str]]:
        """All sides after their steps, and those that failed with the reason."""
        names = [(OURS, "cached"), (OURS, "online")]
        if self.before is not None:
            names += [(BEFORE, "cached"), (BEFORE, "online")]
        else:
            names += [(LAYOUT, "online")]
        if self.peers is not None:
            names += [(TUNIX, "online"), (TRL, "cached"), (TRL, "online")]
        sides: dict[tuple[str, str], Side] = {}
        failed: dict[tuple[str, str], str] = {}

        def each(what: str) -> None:
            for name, side in list(sides.items()):
                try:
                    match what:
                        case "step":
                            side.step(self.limit)
                        case "end":
                            side.end(self.limit)
                        case _:
                            side.ask(what, self.limit)
                except FailedError as failure:
                    failed[name] = str(failure)
                    sides.pop(name).kill()

        try:
            for name in names:
                sides[name] = self.begin(name, trl if name[0] == TRL else ())
                # One after the other, so that no two compile at the same time.
                try:
                    sides[name].ask(f"go {BATCHES}", self.limit)
                    sides[name].ask("measure", self.limit)
                except FailedError as failure:
                    failed[name] = str(failure)
                    sides.pop(name).kill()
            for _ in range(self.rounds):
                each("step")
            each("end")
        finally:
            for side in sides.values():
                side.kill()
        return sides, failed


def compared(one: Side, other: Side, aim: float) -> dict[str, Any]:
    """Both sides' times and memory, and one's parts of the other's."""
    by_turn = [mine / theirs for mine, theirs in zip(one.seconds, other.seconds, strict=True)]
    return {
        "sides": [" ".join(side.name) for side in (one, other)],
        "time": min(one.seconds) / min(other.seconds),
        "time_by_turn": statistics.median(by_turn),
        "busy": min(one.busy) / min(other.busy),
        "aim": aim,
        "memory": growth(one) / growth(other),
        "memory_aim": OF_MEMORY_BEFORE if other.name[0] == BEFORE else OF_MEMORY,
        "memory_in_steps": growth(one, "before_steps") / growth(other, "before_steps"),
    }


def growth(side: Side, since: str = "after_import") -> int:
    """Bytes by which its largest memory during steps is above what it had after its imports, or "before_steps"."""
    return side.report["memory"]["peak"] - side.report["memory"][since]


def figures(side: Side, first: Side) -> dict[str, Any]:
    """What is told of one side; its losses are compared with those of `first`."""
    losses = list(zip(side.report["losses"], first.report["losses"], strict=True))
    return {
        "side": " ".join(side.name),
        "minimum": min(side.seconds),
        "median": statistics.median(side.seconds),
        "busy": min(side.busy),
        "seconds": side.seconds,
        "growth": growth(side),
        "growth_in_steps": growth(side, "before_steps"),
        "memory": side.report["memory"],
        "temporaries": side.report["temporaries"],
        "losses": side.report["losses"],
        "loss_difference": max(abs(mine - theirs) for mine, theirs in losses[:COMPARED]),
        "versions": side.report["versions"],
    }


def show(case: dict[str, Any]) -> None:
    """Prints a case."""
    print(f"\n{case['title']}")
    for one in case["comparisons"]:
        memory = f"memory {one['memory']:.2f} (aim {one['memory_aim']:.2f}), in steps {one['memory_in_steps']:.2f}"
        print(
            f"  {one['sides'][0]:>13} / {one['sides'][1]:<21} time {one['time']:.2f} (aim {one['aim']:.2f}), "
            f"by turn {one['time_by_turn']:.2f}, of all cores {one['busy']:.2f}; {memory}"
        )
    print(
        FIGURES.format("", "minimum s", "median s", "cores s", "growth MiB", "in steps MiB", "XLA temp MiB", "loss off")
    )
    for side in case["sides"]:
        temporaries = "-" if side["temporaries"] is None else f"{side['temporaries'] / 2**20:.0f}"
        times = (f"{side[key]:.3f}" for key in ("minimum", "median", "busy"))
        off = f"{side['loss_difference']:.1e}"
        sizes = (f"{side[key] / 2**20:.0f}" for key in ("growth", "growth_in_steps"))
        print(FIGURES.format(side["side"], *times, *sizes, temporaries, off))
    losses = ", ".join(f"{loss:.5f}" for loss in case["sides"][0]["losses"][:COMPARED]) if case["sides"] else "-"
    print(f"  losses of the first {COMPARED} steps, {OURS}: {losses}")
    for name, reason in case["failed"].items():
        print(f"  {name} failed: {reason}")
    if case["trl"]:
        tried = "; ".join(f"{flags}: {t if isinstance(t, str) else f'{t:.2f} s'}" for flags, t in case["trl"].items())
        print(f"  TRL's ways: {tried}")


def measure(name: str, options: argparse.Namespace, place: Path, chosen: dict[bool, tuple[str, ...]]) -> dict[str, Any]:
    """One case, from the job to the figures; `chosen` remembers TRL's flags by whether adapters are trained."""
    is_lora, is_spread = CASES[name]
    numbers = {
        "batch": options.pairs,
        "prompt": options.prompt,
        "response": options.response,
        "beta": 0.1,
        "learning_rate": 2e-4 if is_lora else 2e-5,
        "rank": 16,
        "alpha": 32.0,
        "lora": is_lora,
        "spread": is_spread,
        "seed": 0,
    }
    directory = place / name
    step_model.write(directory, numbers, batches=BATCHES)
    case = Case(
        name,
        directory,
        options.peers and options.peers / "bin/python",
        options.before,
        options.rounds,
        options.limit,
        options.trial,
    )
    tried: dict[str, float | str] = {}
    if case.peers is not None and is_lora not in chosen:
        chosen[is_lora], tried = case.quickest()
    sides, failed = case.run(chosen.get(is_lora, ()))
    first = sides.get((OURS, "cached"))
    trained = "LoRA of rank 16" if is_lora else "all weights trained"
    spread = ", lengths spread" if is_spread else ", all rows full"
    return {
        "case": name,
        "title": f"{trained}, {options.pairs} pairs of {options.prompt} + {options.response} tokens{spread}",
        "comparisons": [
            compared(sides[one], sides[other], aim) for one, other, aim in AIMS if one in sides and other in sides
        ],
        "sides": [figures(side, first) for side in sides.values()] if first else [],
        "failed": {" ".join(side): reason for side, reason in failed.items()},
        "trl": tried,
    }


def main() -> int:
    """What the command line asks for; 1 if a side failed or losses differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="the directory that make_peers.py made")
    parser.add_argument("--before", type=Path, help="another checkout of nnxdsl, instead of Tunix's layout")
    parser.add_argument("--cases", nargs="*", choices=tuple(CASES), default=tuple(CASES))
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each side")
    parser.add_argument("--pairs", type=int, default=4, help="of a step")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the longest prompt")
    parser.add_argument("--response", type=int, default=128, help="tokens of the longest completion")
    parser.add_argument("--limit", type=float, default=900, help="seconds that a side may take for an answer")
    parser.add_argument(
        "--trial", type=float, default=300, help="seconds until TRL's second step, for each of its ways"
    )
    parser.add_argument("--json", type=Path, help="where all figures go as well")
    options = parser.parse_args()
    options.peers = options.peers and options.peers.absolute()
    options.before = options.before and options.before.absolute()
    chosen: dict[bool, tuple[str, ...]] = {}
    with tempfile.TemporaryDirectory() as place:
        cases = []
        for name in options.cases:
            cases.append(measure(name, options, Path(place), chosen))
            show(cases[-1])
    versions = {name: version for case in cases for side in case["sides"] for name, version in side["versions"].items()}
    about = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    print("\n" + ", ".join(f"{name} {value}" for name, value in (about | versions).items()))
    if options.json is not None:
        options.json.write_text(json.dumps({**about, "versions": versions, "cases": cases}, indent=1))
    off = [side["loss_difference"] for case in cases for side in case["sides"]]
    return int(any(case["failed"] or not case["sides"] for case in cases) or max(off, default=0.0) > SAME)


if __name__ == "__main__":
    sys.exit(main())
