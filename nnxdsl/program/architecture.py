"""Which network a model of the spec is: the published numbers, checked against what its weights say of themselves."""

from __future__ import annotations

from functools import singledispatch
from pathlib import Path

import attrs

from nnxdsl.models import hub
from nnxdsl.models.config import GEMMA3, LLAMA3, DecoderConfig
from nnxdsl.spec.errors import NotRegisteredError, PlanError, Problem
from nnxdsl.spec.model import Gemma3, Llama3, Model
from nnxdsl.spec.weights import HF


@singledispatch
def architecture(model: Model) -> DecoderConfig:
    """The network of a model; register a `Model` of your own here."""
    name = type(model).__name__
    raise NotRegisteredError(
        f"no network is registered for {type(model).__qualname__}; write\n"
        f"  from nnxdsl.program import blueprint\n"
        f"  @blueprint.architecture.register({name})\n"
        f"  def _(model): return DecoderConfig(...)"
    )


@architecture.register
def _(model: Gemma3) -> DecoderConfig:
    return _published(model, GEMMA3[model.size], model.size)


@architecture.register
def _(model: Llama3) -> DecoderConfig:
    return _published(model, LLAMA3[model.size], model.size)


def _published(model: Model, config: DecoderConfig, size: str) -> DecoderConfig:
    """The network of a published size; the one of its weights, where those say something of themselves."""
    if not isinstance(model.weights, HF) or not (directory := Path(model.weights.path).expanduser()).is_dir():
        return config
    # What the weights say of themselves must be what was asked for; the vocabulary may be padded differently.
    stored = hub.read_config(directory)
    asked = attrs.evolve(config, vocab_size=stored.vocab_size, max_length=stored.max_length)
    problems = config_problems(stored, asked, model.weights.path)
    if problems:
        raise PlanError(problems, f"{type(model).__qualname__}({size!r})")
    return stored


def config_problems(stored: DecoderConfig, asked: DecoderConfig, where: str) -> list[Problem]:
    """Every number in which the `config.json` of a Hub directory differs from the network that was asked for."""
    wanted = attrs.asdict(asked, recurse=False)
    return [
        Problem("model", f"it has {name}={wanted[name]}, but {where}/config.json says {value}")
        for name, value in attrs.asdict(stored, recurse=False).items()
        if value != wanted[name]
    ]
