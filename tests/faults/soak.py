"""Kills a run at random instants, hundreds of times, and sees after each that nothing which was saved is lost or wrong.

    python tests/faults/soak.py --kills 500 --seed 0 DIR

Runs are killed and resumed until they end, then compared bit for bit with an undisturbed one, and begun again
elsewhere, until there were so many kills. What was found is in `DIR/soak.json`, rewritten after each kill.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import attrs

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from fault_lab import RECIPE, STEPS, Lab, Nursery, Whole, environment, make, steps_done

from nnxdsl.runs.run_dir import RunDirectory

EVERY = ("checkpoint.every_steps=1", "checkpoint.keep=2")  # a save at every step, so that most kills come in one


@attrs.define
class Soak:
    """What was seen so far.

    Attributes:
        kills: Processes that were killed.
        runs: That came to their end, each bit-equal to the undisturbed one.
        fresh: Kills of a process that had not brought the run further than it found it.
        where: What lay there after a kill: half a step, a retired one, a half written file, or none of them.
        states: What the status said at the kill.
        seconds: Of the whole soak.
        whole: Seconds that an undisturbed process took.
        training: Of these, seconds from its first step on.
    """

    seed: int
    kills: int = 0
    runs: int = 0
    fresh: int = 0
    where: collections.Counter[str] = attrs.Factory(collections.Counter)
    states: collections.Counter[str] = attrs.Factory(collections.Counter)
    seconds: float = 0.0
    whole: float = 0.0
    training: float = 0.0


def soak(place: Path, nursery: Nursery, *, kills: int, seed: int, tell: Any = None, recipe: str = RECIPE) -> Soak:
    """Kills runs of a recipe so many times.

    Raises:
        AssertionError: something that was saved is lost or wrong, or a run ended otherwise than an undisturbed one.
    """
    seeded, seen, began = random.Random(seed), Soak(seed), time.monotonic()
    reference = make(place / "whole", nursery, recipe)
    for name in ("cold", "whole"):  # the first fills the compile cache, the second is as quick as those to be killed
        lab = make(place / name, nursery, recipe)
        started = time.monotonic()
        child = lab.start("checkpoint.every_steps=1", "checkpoint.keep=100")
        child.until(lambda lab=lab: is_training(lab, 1))
        first = time.monotonic()
        assert child.wait() == 0, child.said()
        seen.whole, seen.training = time.monotonic() - started, time.monotonic() - first
    shutil.rmtree(place / "cold")
    whole = Whole.of(reference.run)
    while seen.kills < kills:
        lab = make(place / f"run-{seen.runs}", nursery, recipe)
        before, is_killed = 0, True
        while is_killed:
            is_killed = seen.kills < kills and one(lab, before, seeded, seen)
            if is_killed:
                seen.kills += 1
                after = checked(lab, whole, before, seen)
                seen.fresh += after == before
                before = after
                seen.seconds = time.monotonic() - began
                if tell is not None:
                    tell(seen)
        if not (lab.place / "runs").is_dir() or lab.directory.status().get("state") != "finished":
            lab.finish(*EVERY)
        whole.check_ended(lab.run)
        seen.runs += 1
        seen.seconds = time.monotonic() - began
        shutil.rmtree(lab.place)
    if tell is not None:
        tell(seen)
    return seen


def one(lab: Lab, before: int, seeded: random.Random, seen: Soak) -> bool:
    """Starts the run and kills it, one time in four at any instant, else about a step; False if it had ended."""
    attempt, step = attempts(lab) + 1, seeded.randint(before, STEPS)
    child = lab.start(*EVERY)
    if seeded.random() < 0.25:
        time.sleep(seeded.uniform(0, seen.whole))
    else:
        while child.is_there() and not (is_training(lab, attempt) and steps_done(lab.run) >= step):
            time.sleep(0.002)
        time.sleep(seeded.uniform(0, 3 * seen.training / STEPS))
    code = child.kill()
    assert code in (0, -9), child.said()
    return code == -9


def is_training(lab: Lab, attempt: int) -> bool:
    """Whether an attempt has written figures."""
    if attempts(lab) < attempt:
        return False
    metrics = lab.run / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_mtime_ns > (lab.run / "attempts.jsonl").stat().st_mtime_ns


def attempts(lab: Lab) -> int:
    """How often the run was begun."""
    return sum(path.read_bytes().count(b"\n") for path in (lab.place / "runs").glob("tiny-*/attempts.jsonl"))


def checked(lab: Lab, whole: Whole, before: int, seen: Soak) -> int:
    """The newest step after a kill, which must be there and right."""
    runs = lab.place / "runs"
    if not runs.is_dir() or not any(path.name.startswith("tiny-") for path in runs.iterdir()):
        assert before == 0
        seen.where["no run yet"] += 1
        return 0
    run = lab.run
    status = RunDirectory(run).status()  # whole, whenever it was killed
    said = status.get("checkpoint") or 0
    logged = [
        int(line.split("checkpoint step ")[1].split()[0])
        for line in (run / "log.txt").read_text().splitlines()
        if line.endswith(" saved")
    ] if (run / "log.txt").exists() else []  # fmt: skip
    newest = whole.check_saved(run, at_least=max([said, before, *logged]))
    result = [
        name
        for name, is_there in (
            ("half a step", (run / "checkpoints" / ".writing").exists()),
            ("a retired step", (run / "checkpoints" / ".trash").exists()),
            ("half a file", any(run.glob(".*.tmp"))),
        )
        if is_there
    ]
    seen.where[" and ".join(result) or "nothing half done"] += 1
    seen.states[str(status.get("state"))] += 1
    assert newest <= STEPS
    return newest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", type=Path, metavar="DIR")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.place.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(options.place / "compiled"))
    os.environ.update(JAX_PLATFORMS="cpu", **{k: v for k, v in environment().items() if k.startswith("JAX_PERSISTENT")})
    result = options.place / "soak.json"

    def tell(seen: Soak) -> None:
        temporary = result.with_suffix(".tmp")
        temporary.write_text(json.dumps(attrs.asdict(seen), indent=2) + "\n")
        temporary.replace(result)
        sys.stderr.write(f"\r{seen.kills} kills, {seen.runs} runs, {seen.seconds:.0f} s")

    work = options.place / f"seed-{options.seed}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    nursery = Nursery(work)
    seen = soak(work, nursery, kills=options.kills, seed=options.seed, tell=tell)
    nursery.close()
    shutil.rmtree(work)
    print(f"\n{json.dumps(attrs.asdict(seen))}")


if __name__ == "__main__":
    main()
