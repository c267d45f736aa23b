"""The network of a model spec: the published sizes, checked against the `config.json` of its weights."""

from __future__ import annotations

from functools import singledispatch
from pathlib import Path

import attrs

from nnxdsl.config import weights
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.model import HF, Model
from nnxdsl.errors import NotRegisteredError, PlanError, Problem, WeightsError
from nnxdsl.formats import hf
from nnxdsl.formats.hf_download import locate
from nnxdsl.formats.hf_names import has_mtp
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.families.registry import family_of, text_fields
from nnxdsl.program import heads
from nnxdsl.runs.saved_experiment import is_run, saved_experiment


@singledispatch
def architecture(model: Model) -> DecoderConfig:
    """The config of a model's network, from its family; register a `Model` of your own here."""
    family = family_of(model)
    if family is not None:
        size: str = getattr(model, "size")  # noqa: B009 - the spec class of a family has it
        return _published(model, family.sizes[size], size)
    name = type(model).__name__
    raise NotRegisteredError(
        f"no network is registered for {type(model).__qualname__}; write\n"
        f"  from nnxdsl.program import blueprint\n"
        f"  @blueprint.architecture.register({name})\n"
        f"  def _(model): return DecoderConfig(...)"
    )


@architecture.register
def _(model: HF) -> DecoderConfig:
    try:
        directory = locate(model.path, configs_only=True)
    except WeightsError as error:
        raise PlanError([Problem("model.path", str(error))], f"{type(model).__qualname__}") from error
    if model.mtp_layers and not has_mtp(hf.read_fields(directory)):
        message = f"{directory / 'config.json'} has no multi-token-prediction (MTP) layer; set 0"
        raise PlanError([Problem("model.mtp_layers", message)], f"{type(model).__qualname__}")
    return _staged(model, attrs.evolve(hf.read_config(directory), mtp_layers=model.mtp_layers))


def reward_network(place: weights.Weights) -> DecoderConfig:
    """The network of a reward model, as that of its experiment, its run, or its `config.json`.

    Raises:
        NnxdslError: There is no such model, or its experiment or `config.json` cannot be read.
    """
    if isinstance(place, weights.From):
        return _trained_network(place.experiment)
    assert place.path is not None
    if is_run(path := Path(place.path).expanduser()):
        return _trained_network(saved_experiment(path))
    return attrs.evolve(hf.read_config(locate(place.path, configs_only=True)), mtp_layers=0)


def _trained_network(experiment: Experiment) -> DecoderConfig:
    config = heads.build(experiment.objective).network(architecture(experiment.model))
    return attrs.evolve(config, mtp_layers=0)


def model_type(experiment: Experiment) -> str | None:
    """The Hub's `model_type` of an experiment's text decoder; None if it is unknown."""
    model = experiment.model
    places = [place.path for place in (model, model.weights) if isinstance(place, weights.HF | HF)]
    for place in map(Path, places):
        if (file := place.expanduser() / "config.json").is_file():
            return text_fields(hf.read_fields(file.parent)).get("model_type")
    family = family_of(model)
    return None if family is None else family.model_types[0]


def _published(model: Model, config: DecoderConfig, size: str) -> DecoderConfig:
    """The network of a published size; that of its weights' `config.json`, where there is one."""
    layers = model.mtp_layers
    config = _staged(model, attrs.evolve(config, mtp_layers=layers))
    place = weights.parts(model.weights)[0]
    if not isinstance(place, weights.HF) or not (directory := Path(place.path).expanduser()).is_dir():
        return config
    # The config of the weights must equal the spec's; the vocabulary may be padded differently.
    stored = hf.read_config(directory)
    resized = attrs.evolve(config, vocab_size=stored.vocab_size, max_length=stored.max_length)
    problems = config_problems(stored, resized, place.path)
    if problems:
        raise PlanError(problems, f"{type(model).__qualname__}({size!r})")
    return _staged(model, attrs.evolve(stored, mtp_layers=layers))


def _staged(model: Model, config: DecoderConfig) -> DecoderConfig:
    """The network in the model's indexer stage: in the dense warm-up, attention is dense.

    Raises:
        PlanError: indexer settings are set for a network without indexers.
    """
    has_indexer = config.mla is not None and config.mla.indexer is not None
    if not has_indexer and (model.indexer_loss_coef or model.indexer_stage != "sparse"):
        message = "has no effect: the model has no indexers; unset it, and indexer_stage"
        raise PlanError([Problem("model.indexer_loss_coef", message)], f"{type(model).__qualname__}")
    return with_selection(config, selects=model.indexer_stage == "sparse")


def with_selection(config: DecoderConfig, *, selects: bool) -> DecoderConfig:
    """The network with its indexers, if any, selecting the attended tokens or not."""
    mla = config.mla
    if mla is None or mla.indexer is None:
        return config
    return attrs.evolve(config, mla=attrs.evolve(mla, indexer=attrs.evolve(mla.indexer, selects=selects)))


def config_problems(stored: DecoderConfig, config: DecoderConfig, directory: str) -> list[Problem]:
    """The values in which the `config.json` of a Hub directory differs from the spec's network.

    MTP layers are recognised by their tensors, the stage of indexers is in no file, and the objective decides the head.
    """
    stored = with_selection(stored, selects=True)
    decided = {"mtp_layers": stored.mtp_layers, "head.num_labels": stored.head.num_labels}
    wanted = with_selection(config, selects=True).to_fields() | decided
    return [
        Problem("model", f"has {name}={wanted[name]}, but {directory}/config.json has {value}")
        for name, value in stored.to_fields().items()
        if value != wanted[name]
    ]
