"""The model that a run saved, read leaf by leaf: its base, its adapter, and both in one; writes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.adapters import lora_math
from nnxdsl.config.adapter import LowRank
from nnxdsl.config.core.serialization import evolve
from nnxdsl.config.experiment import Experiment
from nnxdsl.config.sharding import Mesh
from nnxdsl.errors import RunError, WeightsError
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.params import AbstractModel, ParamSpec
from nnxdsl.program.blueprint import build_blueprint, template
from nnxdsl.program.init import ArrayLike, Source
from nnxdsl.runs.checkpoint_format import find
from nnxdsl.runs.checkpoint_reader import CheckpointReader, Good
from nnxdsl.weights import sources

GROUP = "trainable"
"""What of a checkpoint is the model's; the rest is the optimizer's."""

AHEAD_BYTES = 1 << 26
"""Of small arrays that are read together."""


@attrs.frozen(eq=False)
class RunWeights:
    """What a run's checkpoint holds of a model. Each leaf is read when it is asked for, and none is kept after that.

    Where the run kept its base in few bits, the base here is what was quantised, not what was left of it: an adapter
    belongs to the model that people have, and few bits are how it fitted into memory.

    Attributes:
        directory: the run's directory.
        step: optimizer steps done.
        experiment: what the run was asked for.
        config: the network's numbers.
        base: leaves of the published network by path, in the dtypes in which the run kept them.
        plain: the published network.
        policy: the network with the run's adapter beside its weights, none of them in few bits.
        adapter: the run's adapter; None where all weights were trained.
        passed_over: newer checkpoints that are damaged, and how.
    """

    directory: Path
    step: int
    experiment: Experiment
    config: DecoderConfig
    base: Mapping[str, ParamSpec]
    plain: AbstractModel
    policy: AbstractModel
    adapter: LowRank | None
    passed_over: tuple[str, ...]
    _trained: Mapping[str, ParamSpec]
    _checkpoints: CheckpointReader
    _source: Source | None
    _ahead: dict[str, jax.Array] = attrs.field(factory=dict, init=False)

    @classmethod
    def open(cls, path: Path) -> RunWeights:
        """Opens the newest good checkpoint of a run, or one step of it.

        Args:
            path: a run's directory, its `checkpoints`, or one step in there.

        Raises:
            WeightsError: there is no checkpoint yet, or its experiment is not there.
            RunError: there is no such run, or its checkpoints are damaged.
        """
        directory, step = find(path)
        experiment = sources.saved_experiment(path)
        checkpoints = CheckpointReader(directory)
        good = checkpoints.latest_good() if step is None else Good(step)
        step = good.step
        if step is None:
            raise WeightsError(f"{path} has no checkpoint yet; run its experiment first")
        # Its own dtypes, which may have gone by a device that this machine does not have.
        identity = checkpoints.meta(step)["identity"]
        blueprint = build_blueprint(evolve(experiment, {"mesh": Mesh(), "precision.compute": identity["compute"]}))
        adapter = experiment.adapter
        if adapter is not None and not isinstance(adapter, LowRank):
            raise RunError(f"{path}: nothing knows how to merge {type(adapter).__qualname__}")
        policy = template(blueprint.config, blueprint.frozen_dtype, adapter) if adapter else blueprint.base_template
        run = directory.parent
        source = sources.open_source(blueprint, run.parent) if blueprint.frozen else None
        return cls(
            run, step, experiment, blueprint.config, blueprint.base, blueprint.base_template, policy, adapter,
            tuple(map(str, good.damaged)), blueprint.trainable, checkpoints, source,
        )  # fmt: skip

    def trained(self, path: str) -> np.ndarray:
        """One array that the run trained, float32, by the path that it has in the checkpoint."""
        if path not in self._ahead:
            self._ahead.clear()
            targets = self._next(path)
            self._ahead.update(self._checkpoints.restore(self.step, {GROUP: targets})[GROUP])
        return np.asarray(self._ahead.pop(path))

    def _next(self, path: str) -> dict[str, jax.ShapeDtypeStruct]:
        """An array, and those after it that are read with it: to read is slow to begin, and small arrays are many."""
        paths = list(self._trained)
        found: dict[str, jax.ShapeDtypeStruct] = {}
        size = 0
        for each in paths[paths.index(path) :]:
            leaf = self._trained[each]
            size += math.prod(leaf.shape) * leaf.dtype.itemsize
            if found and size > AHEAD_BYTES:
                break
            found[each] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host())
        return found

    def weight(self, path: str) -> ArrayLike:
        """A weight of the published network without the adapter, in the dtype that the run kept it in."""
        if self._source is None or path in self._trained:
            return self.trained(path)
        return jnp.asarray(self._source.leaf(path), self.base[path].dtype)

    def adapted(self, path: str) -> bool:
        """Whether the adapter changes the weight of a path."""
        return path + lora_math.A in self._trained

    def merged(self, path: str) -> np.ndarray:
        """A weight of the published network with the adapter in it, float32."""
        weight = self.weight(path)
        if not self.adapted(path):
            return np.asarray(weight, np.float32)
        assert self.adapter is not None  # there is nothing else that adapts
        return np.asarray(lora_math.merged(self.adapter, path, jnp.asarray(weight), self.trained))

    def adapter_leaves(self) -> dict[str, np.ndarray]:
        """All arrays of the adapter, by path; small."""
        return {path: self.trained(path) for path in self._trained if lora_math.is_adapter(path)}

    def policy_leaf(self, path: str) -> ArrayLike:
        """An array of `policy`: a weight as it is, or one of the adapter."""
        return self.trained(path) if path in self._trained else self.weight(path)


def host() -> jax.sharding.Sharding:
    """The host's memory, where it is a device of its own; else the first device."""
    return jax.sharding.SingleDeviceSharding(host_device())


def host_device() -> Any:
    """The host, where it is a device of its own; else the first device."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves no other device
        return jax.local_devices()[0]
