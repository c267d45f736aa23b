"""Every objective with every way of training, on one device and on eight, in one part and in two:
docs/design/support_matrix.md.

    python tests/program/matrix.py [OBJECTIVE ...]      # tries what matrix.json has not yet
    python tests/program/matrix.py --update             # that, and writes the tables into docs/design/support_matrix.md

Each result is stored in tests/program/matrix.json as it comes, so it may be stopped and started again. A model of one
layer takes three steps on batches with rows of unequal lengths, one of which has weight 0. What the loss is at first is
reckoned here in float64, from the logits of both models where it depends on them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Thousands of programs that run for a moment: LLVM is not to take pains with them.
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "packages"))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from small_lab import samples  # noqa: E402
from small_lab.model import Small  # noqa: E402

from nnxdsl import (  # noqa: E402
    Adapter,
    Batching,
    Data,
    Experiment,
    Memory,
    Mesh,
    Objective,
    Optimizer,
    Precision,
    Quantization,
    Reward,
    Schedule,
    SpecError,
    compile,
)
from nnxdsl.config.core.base import members  # noqa: E402
from nnxdsl.config.objectives.policy_gradient import PolicyGradient  # noqa: E402
from nnxdsl.data.batch import Batch, PairBatch, RolloutBatch, SequenceBatch  # noqa: E402
from nnxdsl.models.attention.positions import positions_right_padded  # noqa: E402
from nnxdsl.program.compile import Program, TrainState  # noqa: E402

STORE = HERE / "matrix.json"
PAGE = HERE.parents[1] / "docs" / "design" / "support_matrix.md"
ROWS, STEPS = 8, 3
PAIRS = Data.Preferences("none.jsonl", max_prompt_length=16, max_completion_length=16)
FEEDBACK = Data.Feedback("none.jsonl", max_prompt_length=16, max_completion_length=16)
PROMPTS = Data.Prompts("none.jsonl", max_prompt_length=8, max_completion_length=8)
TEXT = Data.Text("none.jsonl", max_length=32)
MODEL = Small(layers=1, pattern=1, heads=4)
TEACHER = Small(layers=1, pattern=1, embed_dim=32, heads=4)
SPECIAL: dict[str, Any] = {
    "Sum": Objective.Sum(terms=(Objective.DPO(), Objective.BCO(), Objective.ChosenSFT()), weights=(0.8, 0.2, 1.0)),
    "SFT": Objective.SFT(loss_on="all"),
    "Distill": Objective.Distill(teacher=TEACHER, loss_on="all", hard_weight=0.2),
    "OnPolicyDistill": Objective.OnPolicyDistill(teacher=TEACHER, num_generations=4),
    **{
        name: cls(rewards=(Reward("none"),), num_generations=4)
        for name, cls in members(Objective).items()
        if issubclass(cls, PolicyGradient)
    },
}
_KNOWN = members(Objective)
OBJECTIVES: dict[str, Any] = {
    name: SPECIAL.get(name) or _KNOWN[name]() for name in Objective.__annotations__ if name in _KNOWN
}
"""An object of every class, with its defaults where it has them."""
LORA = Adapter.LoRA(rank=2, alpha=4.0)
TRAININGS: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": {"adapter": LORA},
    "DoRA": {"adapter": Adapter.DoRA(rank=2, alpha=4.0)},
    "QLoRA-NF4": {"adapter": LORA, "quantization": Quantization.NF4(block_size=8)},
    "QLoRA-Int8": {"adapter": LORA, "quantization": Quantization.Int8(block_size=8)},
}
AS_GRPO = tuple(name for name, cls in members(Objective).items() if issubclass(cls, PolicyGradient) and name != "GRPO")
"""Objectives that differ from GRPO by their loss alone: they are tried with LoRA."""


def trainings(objective: str) -> tuple[str, ...]:
    """The ways of training with which an objective is tried."""
    return ("LoRA",) if objective in AS_GRPO else tuple(TRAININGS)


def furthest(objective: str) -> tuple[str, ...]:
    """The places with which an objective is tried: all, or the first and what is furthest from it."""
    return ("alone", "8 devices, 2 parts") if objective in AS_GRPO else tuple(PLACES)


EIGHT = Mesh(data=2, fsdp=2, tensor=2)
PLACES: dict[str, dict[str, Any]] = {
    "alone": {},
    "2 parts": {"microbatch_size": ROWS // 2},
    "8 devices": {"mesh": EIGHT},
    "8 devices, 2 parts": {"mesh": EIGHT, "microbatch_size": ROWS // 2},
}
AT_FIRST, APART = 1e-6, 3e-5
"""The largest relative errors: of the loss before any step, and of what places differ in after three steps.

The latter is of the losses and gradient norms of all steps, of the parameters (of the largest change of any), and of
rewards (of the largest log-probability that they are made of).
"""
REFUSED: dict[str, dict[str, Any]] = {
    "all weights, NF4": {"quantization": Quantization.NF4()},
    "LoRA, quantised training": {"adapter": LORA, "quantization": Quantization.Int8Training()},
    "GRPO, packing": {"objective": SPECIAL["GRPO"], "data": PROMPTS, "batching": Batching.Packed()},
    "KTO, pairs alone": {"objective": Objective.KTO(), "data": PAIRS},
    "a sum with LD-DPO": {
        "objective": lambda: Objective.Sum(terms=(Objective.DPO(ld_alpha=0.5), Objective.ChosenSFT()), weights=(1, 1))
    },
    "a sum with SFT": {
        "objective": lambda: Objective.Sum(terms=(Objective.DPO(), Objective.SFT()), weights=(1.0, 1.0))
    },
    "ORPO, a reference kept": {"objective": Objective.ORPO(), "memory": Memory(reference="online")},
}


def asked(objective: Any, fields: dict[str, Any]) -> Experiment:
    """The experiment of one cell at one place."""
    data = {"pairs": PAIRS, "feedback": FEEDBACK, "prompts": PROMPTS, "sequences": TEXT}[objective.batch_kind]
    return Experiment(
        name="matrix",
        model=MODEL,
        objective=objective,
        data=data,
        optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1), max_grad_norm=1.0),
        batch_size=ROWS,
        steps=STEPS,
        memory=Memory(reference="online") if objective.needs_reference else Memory(),
        precision=Precision(compute="float32"),
        **fields,
    )


def batches(objective: Any) -> list[Any]:
    """Two batches, used in turn."""
    weight = np.array([1, 1, 1, 1, 1, 0, 1, 1], np.float32)
    if objective.batch_kind == "prompts":
        # `old` is not known: learnt from once, when the policy is what it was.
        result: list[Any] = [samples.answers()._replace(old_logps=None)] * 2
    elif objective.batch_kind == "sequences":
        result = [samples.sequences(ROWS, seed=seed) for seed in (0, 1)]
    else:
        result = [samples.pairs(ROWS, seed=seed) for seed in (0, 1)]
    if objective.batch_kind == "feedback":
        result = [each._replace(desirable=(np.arange(ROWS) % 3 > 0).astype(np.float32)) for each in result]
    return [each._replace(weight=weight) for each in result]


# -- what the loss is at first ---------------------------------------------------------------------------------------


def log_probabilities(template: Any, leaves: dict[str, jax.Array], tokens: np.ndarray, length: np.ndarray) -> Any:
    """Float64 `[B, T - 1, V]`: of every word after each token of right-padded rows, by a plain forward pass."""

    result = outputs(template, leaves, tokens, length)[:, :-1]
    result -= result.max(-1, keepdims=True)
    return result - np.log(np.exp(result).sum(-1, keepdims=True))


def outputs(template: Any, leaves: dict[str, jax.Array], tokens: np.ndarray, length: np.ndarray) -> Any:
    """Float64 `[B, T, V]`: what the head gives at each token."""

    @jax.jit
    def logits(leaves: dict[str, jax.Array]) -> jax.Array:
        decoder: Any = template.merge(leaves)
        hidden = decoder(
            jnp.asarray(tokens), positions_right_padded(jnp.asarray(length), tokens.shape[1]), dtype=jnp.float32
        )
        return decoder.logits(hidden.hidden)

    return np.asarray(logits(leaves), np.float64)


def whole_rows(batch: PairBatch) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """Of both completions the tokens with the prompt, right-padded `[B, T]`, and their own number `[B]`."""
    size = batch.prompt.shape[1]
    for ids, lengths in ((batch.chosen, batch.chosen_length), (batch.rejected, batch.rejected_length)):
        tokens = np.zeros((ROWS, size + ids.shape[1]), np.int32)
        for row, (first, ours) in enumerate(zip(batch.prompt_length, lengths, strict=True)):
            tokens[row, : first + ours] = [*batch.prompt[row, size - first :], *ids[row, :ours]]
        yield tokens, lengths


def first_reward_loss(program: Program, state: TrainState, batch: PairBatch) -> float:
    """The loss of a reward model from the rewards of whole rows, each computed without the other."""
    sides = []
    for tokens, lengths in whole_rows(batch):
        length = batch.prompt_length + lengths
        sides.append(outputs(*program.policy(state), tokens, length)[np.arange(ROWS), length - 1, 0])
    margin = (sides[0] - sides[1])[np.asarray(batch.weight) > 0]
    return float(np.mean(np.log1p(np.exp(-margin))))


def answers_of(program: Program, state: TrainState, batch: PairBatch) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of both completions the summed log-probability `[B]` and the number of tokens `[B]`."""
    result = []
    for tokens, lengths in whole_rows(batch):
        logp = log_probabilities(*program.policy(state), tokens, batch.prompt_length + lengths)
        sums = [
            sum(logp[row, place - 1, tokens[row, place]] for place in range(first, first + ours))
            for row, (first, ours) in enumerate(zip(batch.prompt_length, lengths, strict=True))
        ]
        result.append((np.array(sums), lengths))
    return result


def first_policy_loss(program: Program, state: TrainState, batch: RolloutBatch) -> float:
    """The loss of completions where all ratios are 1: a token's is minus its advantage."""
    keep = np.asarray(batch.weight) > 0
    mask, advantages = np.asarray(batch.loss_mask) & keep[:, None], np.asarray(batch.advantages, np.float64)
    of_tokens, by_row = -advantages, mask.sum(axis=1)
    match program.experiment.objective:
        case Objective.OnPolicyDistill():
            student = log_probabilities(*program.policy(state), batch.tokens, batch.length)
            assert program.blueprint.teacher is not None
            template = program.blueprint.teacher.template
            teacher = log_probabilities(template, dict(state.reference), batch.tokens, batch.length)
            apart = (np.exp(student) * (student - teacher)).sum(-1)
            for row, column in np.argwhere(mask):
                place = batch.length[row] - by_row[row] + column
                of_tokens[row, column] = apart[row, place - 1]
        case Objective.CISPO() | Objective.VESPO():
            logp = log_probabilities(*program.policy(state), batch.tokens, batch.length)
            for row, column in np.argwhere(mask):
                place = batch.length[row] - by_row[row] + column
                of_tokens[row, column] *= logp[row, place - 1, batch.tokens[row, place]]
        case Objective.SAPO(temperature_positive=above, temperature_negative=below):
            of_tokens = of_tokens * 2 / np.where(advantages > 0, above, below)
        case _:
            pass
    sums = (of_tokens * mask).sum(axis=1)[keep]
    match program.experiment.objective:
        case (
            Objective.DAPO()
            | Objective.CISPO()
            | Objective.DPPO()
            | Objective.VESPO()
            | Objective.ReinforcePlusPlus()
            | Objective.OnPolicyDistill()
        ):
            return float(sums.sum() / mask.sum())
        case Objective.LUSPO():
            return float(np.mean(sums))
        case Objective.DrGRPO():
            return float(sums.sum() / np.sum(batch.max_completion_length[keep]))
        case _:
            return float(np.mean(sums / by_row[keep]))


def first_loss(program: Program, state: TrainState, batch: Batch) -> float:
    """What the table of objectives has for the loss before any step, where policy and reference are equal."""
    objective: Any = program.experiment.objective
    keep = np.asarray(batch.weight) > 0
    if isinstance(batch, RolloutBatch):
        return first_policy_loss(program, state, batch)
    if isinstance(batch, SequenceBatch):
        mask, target = batch.loss_mask[:, 1:] & keep[:, None], batch.tokens[:, 1:, None]
        student = log_probabilities(*program.policy(state), batch.tokens, batch.length)
        nll = -np.take_along_axis(student, target, axis=-1)[..., 0]
        if not isinstance(objective, Objective.Distill):
            return float(nll[mask].mean())
        assert program.blueprint.teacher is not None
        template = program.blueprint.teacher.template
        teacher = log_probabilities(template, dict(state.reference), batch.tokens, batch.length)
        apart = (np.exp(teacher) * (teacher - student)).sum(-1)
        return float((0.8 * apart + 0.2 * nll)[mask].mean())
    assert isinstance(batch, PairBatch)
    if isinstance(objective, Objective.KTO):
        return 0.5  # half the weights, which are 1
    if isinstance(objective, Objective.Reward):
        return first_reward_loss(program, state, batch)
    known = REFERENCED.get(type(objective).__name__)
    if known is not None:
        return known(objective)
    (chosen, chosen_count), (rejected, rejected_count) = answers_of(program, state, batch)
    p, q, a, b = chosen[keep], rejected[keep], (chosen / chosen_count)[keep], (rejected / rejected_count)[keep]

    def s(z: np.ndarray) -> np.ndarray:
        return -np.log1p(np.exp(-z))

    match objective:
        case Objective.ORPO():
            odds = a - b - (np.log1p(-np.exp(a)) - np.log1p(-np.exp(b)))
            return float(np.mean(-a - objective.beta * s(odds)))
        case Objective.SimPO():
            return float(np.mean(-s(objective.beta * (a - b) - objective.gamma)))
        case Objective.CPO():
            return float(np.mean(-s(objective.beta * (p - q)) - objective.alpha * a))
        case Objective.ChosenSFT():
            return float(np.mean(-a))
        case Objective.Sum():
            of_terms = (REFERENCED[type(term).__name__](term) for term in objective.terms[:2])
            return sum(w * x for w, x in zip(objective.weights, (*of_terms, np.mean(-a)), strict=True))
    raise AssertionError(f"{type(objective).__qualname__}: what is its loss at first?")


LOG2 = float(np.log(2.0))
REFERENCED: dict[str, Callable[[Any], float]] = {
    **dict.fromkeys(("DPO", "RobustDPO", "LengthNormalizedDPO", "AOT", "AOTUnpaired"), lambda o: LOG2),
    **dict.fromkeys(("NCA", "BCO"), lambda o: 2 * LOG2),
    **dict.fromkeys(("Hinge", "APOZero", "APODown"), lambda o: 1.0),
    "IPO": lambda o: 1 / (4 * o.tau**2),
    "EXO": lambda o: float(-LOG2 - (np.log(1 - o.label_smoothing) + np.log(o.label_smoothing)) / 2),
    "SPPO": lambda o: 1 / (2 * o.beta**2),
    "DiscoPOP": lambda o: (LOG2 + 1) / 2,
}
"""The last column of the table of docs/guides/objectives.md."""


# -- trying ----------------------------------------------------------------------------------------------------------


def tried(objective: str, training: str, places: Iterable[str] = PLACES) -> dict[str, Any]:
    """What came of a cell.

    Args:
        objective: Its name.
        training: Likewise.
        places: With what the others are compared with first.

    Returns:
        `start` and `expected`, the loss before any step; `finite`, whether all figures and parameters were; `kept`,
        whether all frozen arrays were equal to the bit afterwards; `moved`, whether every trained array was not; and
        how far each further place was from the first. Or `refused`, with the reason.
    """
    said: dict[str, Any] = {}
    first: Any = None
    for place in places:
        try:
            program = compile(asked(OBJECTIVES[objective], {**TRAININGS[training], **PLACES[place]}))
        except ValueError as error:
            return {"refused": str(error), "place": place}
        rows = batches(OBJECTIVES[objective])
        state = samples.trained(program)
        before, still = jax.device_get((state.trainable, (state.frozen, state.reference)))
        if first is None:
            said["expected"] = first_loss(program, state, rows[0])
        metrics = []
        for step in range(STEPS):
            state, result = program.step(state, rows[step % 2])
            metrics.append({name: float(value) for name, value in result.items()})
        after = jax.device_get(state.trainable)
        kept = jax.tree.all(jax.tree.map(np.array_equal, still, jax.device_get((state.frozen, state.reference))))
        finite = all(np.isfinite(value) for row in metrics for value in row.values())
        finite &= all(bool(np.isfinite(leaf).all()) for leaf in after.values())
        moved = all(bool((after[path] != leaf).any()) for path, leaf in before.items())
        for name, holds in (("finite", finite), ("kept", kept), ("moved", moved)):
            said[name] = said.get(name, True) and bool(holds)
        if first is None:
            said |= {"start": metrics[0]["loss"], "worst start": 0.0}
            first = metrics, after, max(float(np.abs(after[path] - leaf).max()) for path, leaf in before.items())
        else:
            said[place] = apart(metrics, after, *first)
            said["worst start"] = max(said["worst start"], abs(metrics[0]["loss"] / said["start"] - 1))
    return said


def apart(metrics: list[Any], after: Any, expected: list[Any], leaves: Any, change: float) -> float:
    """The largest relative difference of two places, see `APART`."""
    result = max(float(np.abs(after[path] - leaf).max()) for path, leaf in leaves.items()) / change
    for ours, theirs in zip(metrics, expected, strict=True):
        result = max(result, *(abs(ours[name] / theirs[name] - 1) for name in ("loss", "grad_norm")))
        nats = max((abs(value) for name, value in theirs.items() if name.startswith("logps/")), default=1.0)
        rewards = (abs(ours[name] - value) for name, value in theirs.items() if name in ("rewards/chosen", "kl"))
        result = max(result, *(difference / nats for difference in rewards), 0.0)
    return result


def wrong(said: dict[str, Any]) -> list[str]:
    """What of a cell is not as it should be."""
    if "refused" in said:
        return []
    bad = [name for name in ("finite", "kept", "moved") if not said[name]]
    if abs(said["start"] / said["expected"] - 1) > AT_FIRST:
        bad.append(f"starts at {said['start']}, expected {said['expected']}")
    if said["worst start"] > AT_FIRST:
        bad.append(f"starts elsewhere by {said['worst start']:.0e}")
    return bad + [f"{place} differ by {said[place]:.0e}" for place in PLACES if said.get(place, 0.0) > APART]


# -- the page --------------------------------------------------------------------------------------------------------


def entry(said: dict[str, Any] | None) -> str:
    """A cell of the table."""
    if said is None:
        return "as GRPO"
    if "refused" in said:
        return "refused"
    return "**" + "; ".join(bad) + "**" if (bad := wrong(said)) else f"{max(said.get(p, 0.0) for p in PLACES):.0e}"


def table(stored: dict[str, Any]) -> str:
    """All cells."""
    lines: list[tuple[str, ...]] = [("objective", "loss at first", *TRAININGS), ("---",) * (len(TRAININGS) + 2)]
    for name in filter(stored.get, OBJECTIVES):
        cells = [stored.get(name, {}).get(training) for training in TRAININGS]
        start = next((f"{cell['start']:.6g}" for cell in cells if cell and "start" in cell), "")
        lines.append((f"`{name}`", start, *map(entry, cells)))
    rest = ", ".join(f"`{name}`" for name in OBJECTIVES if not stored.get(name))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + (f"\n\nNot tried yet: {rest}." if rest else "")


def reason(fields: dict[str, Any]) -> str:
    """What is said of a pair that is refused."""
    try:
        objective = fields.get("objective", Objective.DPO())
        Experiment(
            **{
                "name": "matrix",
                "model": MODEL,
                "data": PAIRS,
                "optimizer": Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
                "batch_size": ROWS,
                "steps": STEPS,
                **fields,
                "objective": objective() if callable(objective) else objective,
            }
        )
    except SpecError as error:
        return " ".join(str(error).split("\n", 1)[1].split())
    raise AssertionError("it is not refused")


def refusals() -> str:
    """The table of what does not go together."""
    lines = ["| combination | message |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {reason(fields)} |" for name, fields in REFUSED.items())])


def page(text: str, stored: dict[str, Any]) -> str:
    """The page with both tables, each between two marks, as they are now."""
    for mark, new in (("cells", table(stored)), ("refused", refusals())):
        start, rest = text.split(f"<!-- {mark} -->\n", 1)
        _, end = rest.split(f"<!-- end of {mark} -->", 1)
        text = f"{start}<!-- {mark} -->\n{new}\n<!-- end of {mark} -->{end}"
    return text


def main() -> int:
    """What the command line asks for; 1 if a cell is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("objectives", nargs="*", choices=[[], *OBJECTIVES], metavar="OBJECTIVE")
    parser.add_argument("--store", type=Path, default=STORE, help="where results are kept")
    parser.add_argument("--again", action="store_true", help="try these again")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so many, between two cells")
    parser.add_argument("--update", action="store_true", help="write the tables into docs/design/support_matrix.md")
    options = parser.parse_args()
    stored: dict[str, Any] = json.loads(options.store.read_text()) if options.store.exists() else {}
    chosen, begun = options.objectives or OBJECTIVES, time.monotonic()
    if options.again:
        stored = {name: row for name, row in stored.items() if name not in chosen}
    # First what is furthest apart, so that one who is in a hurry has all of that.
    for places in (("alone", "8 devices, 2 parts"), ("alone", "2 parts", "8 devices")):
        for name, training in [(each, training) for each in chosen for training in trainings(each)]:
            cell, is_late = stored.get(name, {}).get(training, {}), time.monotonic() - begun > options.seconds
            is_tried = "refused" in cell or set(places[1:]) <= cell.keys()
            if is_tried or is_late or not {*places} <= {*furthest(name)}:
                continue
            said = tried(name, training, places)
            flags = {key: said[key] and cell.get(key, True) for key in ("finite", "kept", "moved") if key in said}
            cell = stored.setdefault(name, {})[training] = {**cell, **said, **flags}
            print(f"{time.monotonic() - begun:5.0f} s  {name}, {training}: {entry(cell)}", flush=True)
            lines = ",\n".join(f'"{key}": {json.dumps(stored[key])}' for key in OBJECTIVES if key in stored)
            options.store.write_text("{\n" + lines + "\n}\n")
            jax.clear_caches()  # no program is used twice
    if options.update:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), stored), encoding="utf-8")
    bad = {f"{name}, {training}": wrong(said) for name, row in stored.items() for training, said in row.items()}
    for cell, what in bad.items():
        for each in what:
            print(f"{cell}: {each}")
    return 1 if any(bad.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
