"""A `config.json` that lies: whatever it says, it is read as transformers reads it, or refused at once.

Each of 300 mutations of the families' small checkpoints changes one or two fields: another type, huge, negative, zero,
NaN or infinity, nested deeply, removed, renamed, twice there, a list for a number. `load` then accepts the directory or
raises an error of ours, in about the usual time. The slow half also compares the logits of all accepted ones with those
of transformers, where transformers reads the directory too and its logits are finite.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnxdsl
from nnxdsl import Model, NnxdslError, Weights
from nnxdsl.program.architecture import architecture

FAMILIES = Path(__file__).parent.parent / "reference" / "families"
NAMES = sorted(path.name for path in FAMILIES.iterdir())
COUNT = 300
TOLERANCE = 1e-4
"""Of the largest logit."""
MOST_TIMES = 30
"""As long as the reading of an unchanged checkpoint."""
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 24))

WITHOUT_EFFECT = {"bos_token_id", "eos_token_id", "dtype", "initializer_range", "transformers_version", "architectures"}
# transformers 5.23 takes the least time step of Nemotron-H from the first, where NVIDIA's code takes the second.
WITHOUT_EFFECT |= {"time_step_min", "time_step_limit"}
# Written into the file as they stand, which json.dumps could not.
RAW = {
    "@deep@": "[" * 60 + "]" * 60,
    "@deeper@": "[" * 100_000 + "]" * 100_000,
    "@objects@": '{"a":' * 900 + "1" + "}" * 900,
    "@1e999@": "1e999",
    "@long@": "9" * 5000,
}
ODD: list[Any] = [
    None,
    True,
    False,
    "",
    "text",
    "silu",
    "default",
    [],
    ["a"],
    [1, 2],
    {},
    {"a": 1},
    {"rope_type": ["yarn"]},
]
NUMBERS: list[Any] = [-1, 0, 1, 2, 3, 7, 0.5, -2.0, 1e-30, 1e30, 1e300, 2**31, 2**63, 10**12, 10**30, 10**400]
NOT_FINITE: list[Any] = [float("nan"), float("inf"), -float("inf")]
ADDED = (
    *(
        "rope_theta",
        "rope_scaling",
        "head_dim",
        "sliding_window",
        "layer_types",
        "partial_rotary_factor",
        "text_config",
    ),
    *("quantization_config", "num_local_experts", "num_experts", "attn_logit_softcapping", "query_pre_attn_scalar"),
    *("num_nextn_predict_layers", "mlp_only_layers", "max_window_layers", "attention_multiplier"),
)
KINDS = (
    *("odd", "odd", "number", "number", "scale", "scale", "raw", "not finite", "removed", "renamed", "twice", "added"),
    *("list", "list", "swapped"),
)


def places(holder: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Every field, those of objects within the file too; but for most of those that have no effect on logits."""
    for name, value in holder.items():
        if name not in WITHOUT_EFFECT:
            yield holder, name
        if isinstance(value, dict):
            yield from places(value)


def mutate(number: int) -> tuple[str, str, str]:
    """(family, what was changed, the text of its `config.json`) of a mutation."""
    draw = random.Random(number)
    family = NAMES[number % len(NAMES)]
    fields = json.loads((FAMILIES / family / "config.json").read_text())
    said = []
    twice = None
    for _ in range(draw.choice((1, 1, 1, 2))):
        holder, name = draw.choice(list(places(fields)))
        value = holder[name]
        kind = draw.choice(KINDS)
        if kind == "odd":
            holder[name] = draw.choice(ODD)
        elif kind == "number":
            holder[name] = draw.choice(NUMBERS)
        elif kind == "scale" and isinstance(value, int | float) and not isinstance(value, bool):
            holder[name] = draw.choice(
                (value * 2, value // 2, value + 1, value - 1, -value, float(value), value * 10**9)
            )
        elif kind == "raw":
            holder[name] = draw.choice(list(RAW))
        elif kind == "not finite":
            holder[name] = draw.choice(NOT_FINITE)
        elif kind == "removed":
            del holder[name]
        elif kind == "renamed":
            holder[name + "_"] = holder.pop(name)
        elif kind == "twice":
            twice = name, draw.choice((value, *ODD, *NUMBERS))
        elif kind == "added":
            name = draw.choice(ADDED)
            fields[name] = draw.choice([*ODD, *NUMBERS])
        elif kind == "list":
            holder[name] = [value]
        elif kind == "swapped":
            other = draw.choice([other for other in fields if type(fields[other]) is type(value)] or [name])
            if other in fields and holder is fields:
                fields[name], fields[other] = fields[other], fields[name]
        said.append(f"{kind} {name}: {str(value)[:40]!r} -> {str(holder.get(name, 'gone'))[:40]!r}")
    text = json.dumps(fields)
    if twice is not None:
        text = text.removesuffix("}") + f", {json.dumps(twice[0])}: {json.dumps(twice[1])}}}"
    for mark, raw in RAW.items():
        text = text.replace(json.dumps(mark), raw)
    return family, "; ".join(said), text


def written(number: int, directory: Path) -> str:
    """A mutation as a directory; what was changed."""
    family, said, text = mutate(number)
    (directory / "config.json").write_text(text)
    (directory / "model.safetensors").symlink_to(FAMILIES / family / "model.safetensors")
    return f"{number} {family}: {said}"


def read(directory: Path) -> tuple[Any, float]:
    """The model, None where it is refused, and the CPU time that took; no other error comes out."""
    result, began = None, time.process_time()
    with contextlib.suppress(NnxdslError):
        place = str(directory)
        architecture(Model.HF(place, weights=Weights.HF(place)))
        result = nnxdsl.load(directory)
    return result, time.process_time() - began


@functools.cache
def usual_seconds() -> float:
    """CPU time of reading an unchanged checkpoint when jax has compiled what puts its arrays on a device."""
    return min(read(FAMILIES / NAMES[0])[1] for _ in range(2))


def opened(directory: Path, said: str) -> Any:
    """The model; None where it is refused. It takes about as long as an unchanged one."""
    for _ in range(2):  # the first time jax compiles what it takes to put arrays of these shapes on a device
        result, took = read(directory)
        if took < MOST_TIMES * usual_seconds():
            return result
    raise AssertionError(f"{said}: {took:.1f} s, where {usual_seconds():.1f} s is usual")


@pytest.mark.default_variants(1)
@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.slow] if part > 3 else []) for part in range(10)]
)
def test_it_is_read_or_refused_at_once(part: int, tmp_path: Path) -> None:
    for number in range(part, COUNT, 10):
        directory = tmp_path / str(number)
        directory.mkdir()
        opened(directory, written(number, directory))


def peer_logits(directory: Path) -> tuple[np.ndarray | None, str]:
    """Transformers' logits; None, and why, where it does not read the directory or they are not finite."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            is_multimodal = "ForConditionalGeneration" in (directory / "config.json").read_text()
            auto = transformers.AutoModelForImageTextToText if is_multimodal else transformers.AutoModelForCausalLM
            model, about = auto.from_pretrained(
                directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
            if about["missing_keys"]:
                return None, "transformers draws weights that the file does not have"
            with torch.no_grad():
                result = model.eval()(input_ids=torch.tensor(TOKENS)).logits.float().numpy()
        except Exception as error:  # whatever it raises of what it does not check
            return None, f"{type(error).__name__}: {error}".splitlines()[0][:150]
    return (result, "") if np.isfinite(result).all() else (None, "its logits are not finite")


def outcome(number: int, directory: Path) -> tuple[str, str]:
    """How a mutation ends, and what was changed.

    "unread" is what transformers does not read, or reads as a model whose logits are not finite.
    """
    said = written(number, directory)
    model = opened(directory, said)
    if model is None:
        return "refused", said
    wanted, why = peer_logits(directory)
    if wanted is None:
        return "unread", f"{said}: {why}"
    length = min(model.config.max_length, TOKENS.shape[1])
    apart = float(np.abs(np.asarray(model(TOKENS[:, :length])) - wanted[:, :length]).max() / np.abs(wanted).max())
    return ("equal" if apart <= TOLERANCE else "wrong"), f"{said}: {apart:.2g}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_is_accepted_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    actual: dict[str, list[str]] = {"refused": [], "equal": [], "unread": [], "wrong": []}
    for number in range(COUNT):
        directory = tmp_path / str(number)
        directory.mkdir()
        kind, said = outcome(number, directory)
        actual[kind].append(said)
    print({kind: len(each) for kind, each in actual.items()})
    assert actual["wrong"] == []
