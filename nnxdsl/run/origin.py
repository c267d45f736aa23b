"""Where a run's first weights and its tokenizer are: Hub directories, checkpoints, earlier experiments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.models.hub_download import locate
from nnxdsl.program import adapters, initial
from nnxdsl.program.blueprint import Blueprint, draw
from nnxdsl.program.initial import ArrayLike, Source
from nnxdsl.run.checkpoint import Checkpoints, find
from nnxdsl.run.jsonl import read_json
from nnxdsl.spec.adapter import LoRA
from nnxdsl.spec.errors import WeightsError
from nnxdsl.spec.experiment import Experiment
from nnxdsl.spec.placement import Mesh
from nnxdsl.spec.tokenizer import Auto
from nnxdsl.spec.tree import evolve, from_dict
from nnxdsl.spec.weights import HF, Checkpoint, From


def tokenizer_directory(experiment: Experiment, home: Path) -> Path | None:
    """The directory in which `Tokenizer.Auto` finds the tokenizer of an experiment's weights; None for random ones."""
    match experiment.model.weights:
        case HF(path=path):
            return locate(path)
        case From(experiment=earlier):
            return tokenizer_directory(earlier, home)
        case Checkpoint(path=path):
            return tokenizer_directory(saved_experiment(Path(path)), home)
        case _:
            return None


def tokenizer_owner(experiment: Experiment) -> Experiment:
    """The experiment whose `model.tokenizer` counts: with `Auto` over a checkpoint, that of the run it came from."""
    match experiment.model.weights:
        case From(experiment=earlier) if isinstance(experiment.model.tokenizer, Auto):
            return tokenizer_owner(earlier)
        case Checkpoint(path=path) if isinstance(experiment.model.tokenizer, Auto):
            return tokenizer_owner(saved_experiment(Path(path)))
        case _:
            return experiment


def open_source(blueprint: Blueprint, home: Path) -> Source:
    """The source of an experiment's base weights, runs included.

    Args:
        blueprint: Of the experiment.
        home: The directory of all runs, where those of earlier experiments are.

    Raises:
        WeightsError: there is no such run, or it is of another network.
        PlanError: tensors of a Hub directory are missing or of another shape.
    """
    match blueprint.experiment.model.weights:
        case Checkpoint(path=path):
            return CheckpointSource(blueprint, Path(path).expanduser())
        case From(experiment=earlier):
            return CheckpointSource(blueprint, home / earlier.id)
        case _:
            return initial.open_source(blueprint)


def saved_experiment(path: Path) -> Experiment:
    """The experiment that a run directory, or one of its checkpoints, belongs to."""
    directory, _ = find(path.expanduser())
    file = directory.parent / "experiment.json"
    if not file.is_file():
        raise WeightsError(f"{path}: {file} is missing, so it is not known which experiment saved it")
    return from_dict(read_json(file), Experiment)


class CheckpointSource:
    """The weights that a run saved, as weights of the published network: an adapter is merged into its base.

    What comes out is the model that the run ended with: where it kept its base in few bits, the adapter is merged into
    that base, errors of rounding included, since that is what it was trained on. Nothing in the run's directory is
    written or swept.
    """

    def __init__(self, blueprint: Blueprint, path: Path) -> None:
        self.experiment = saved_experiment(path)
        directory, step = find(path)
        here = _host()
        with Checkpoints.open(directory) as checkpoints:
            step = checkpoints.latest_good().step if step is None else step
            if step is None:
                raise WeightsError(f"{path} has no checkpoint yet; run its experiment first")
            # Its own dtypes, which may have gone by a device that this machine does not have.
            computed = checkpoints.meta(step)["identity"]["compute"]
            here_alone = {"mesh": Mesh(), "precision.compute": computed}
            earlier = draw(evolve(self.experiment, here_alone))
            if earlier.config != blueprint.config:
                raise WeightsError(
                    f"{path} holds weights of another network than {type(blueprint.experiment.model).__qualname__}"
                )
            targets = {
                p: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here) for p, leaf in earlier.trainable.items()
            }
            self._saved: Mapping[str, jax.Array] = checkpoints.restore(step, {"trainable": targets})["trainable"]
        self.step = step
        self._earlier = earlier
        # The earlier run's own earlier runs are beside it, which need not be where this one is.
        self._base = open_source(earlier, directory.parent.parent) if self.experiment.adapter is not None else None

    def leaf(self, path: str) -> ArrayLike:
        """The weight of one path; float32 where it was trained."""
        if self._base is None:
            return np.asarray(self._saved[path])
        weight = jnp.asarray(self._base.leaf(path), self._earlier.base[path].dtype)
        quantization = self.experiment.quantization
        if quantization is not None and path not in self._earlier.frozen:
            weight = adapters.rounded(weight, quantization)
        if path + adapters.A not in self._saved:
            return weight
        adapter = self.experiment.adapter
        assert isinstance(adapter, LoRA)
        a, b = (np.asarray(self._saved[path + end]) for end in (adapters.A, adapters.B))
        return adapters.merge(adapter, weight, jnp.asarray(a), jnp.asarray(b))


def _host() -> jax.sharding.Sharding:
    """The host's memory, where it is a device of its own; else the first device."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves no other device
        device = jax.local_devices()[0]
    return jax.sharding.SingleDeviceSharding(device)
