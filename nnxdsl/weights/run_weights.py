"""The model that a run saved, read array by array: its base, its adapter, and both merged; writes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import attrs
import jax
import jax.numpy as jnp
import numpy as np

from nnxdsl.adapters import lora_math
from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.config.adapter import LowRank
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import RunError
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.params import AbstractModel, ParamSpec
from nnxdsl.program.init import ArrayLike, Source
from nnxdsl.weights import sources
from nnxdsl.weights.saved_run import SavedRun

READ_AHEAD_BYTES = 1 << 26
"""Small arrays are read together up to this size."""


@attrs.frozen(eq=False)
class RunWeights:
    """The model in a run's checkpoint. Arrays are read on demand and not kept.

    For a run with a quantized base, the base here is the original, unquantized one: that is the model on which users
    load the adapter.

    Attributes:
        directory: The run directory.
        step: Number of optimizer steps done.
        experiment: The run's experiment.
        config: The architecture.
        base: Arrays of the base model by path, in the dtypes of the run.
        plain: The base model.
        policy: The base model with the run's adapter, not quantized.
        adapter: The run's adapter; None if all weights were trained.
        damaged: A message for each newer checkpoint that is damaged.
    """

    directory: Path
    step: int
    experiment: Experiment
    config: DecoderConfig
    base: Mapping[str, ParamSpec]
    plain: AbstractModel
    policy: AbstractModel
    adapter: LowRank | None
    damaged: tuple[str, ...]
    _run: SavedRun
    _source: Source | None
    _ahead: dict[str, jax.Array] = attrs.field(factory=dict, init=False)

    @classmethod
    def open(cls, path: Path) -> RunWeights:
        """Opens the newest undamaged checkpoint of a run, or one step of it; errors as for `SavedRun.open`.

        Raises:
            RunError: The run has an adapter that cannot be merged.
        """
        run = SavedRun.open(path)
        blueprint, adapter = run.blueprint, run.experiment.adapter
        if adapter is not None and not isinstance(adapter, LowRank):
            raise RunError(f"{path}: adapters of type {type(adapter).__qualname__} cannot be merged")
        policy = (
            abstract_decoder(blueprint.config, blueprint.frozen_dtype, adapter) if adapter else blueprint.base_template
        )
        source = sources.open_source(blueprint, run.directory.parent) if blueprint.frozen else None
        return cls(
            run.directory, run.step, run.experiment, blueprint.config, blueprint.base, blueprint.base_template, policy,
            adapter, tuple(map(str, run.damaged)), run, source,
        )  # fmt: skip

    @property
    def _trained(self) -> Mapping[str, ParamSpec]:
        return self._run.blueprint.trainable

    def trained(self, path: str) -> np.ndarray:
        """One array that the run trained, float32, by its path in the checkpoint."""
        if path not in self._ahead:
            self._ahead.clear()
            self._ahead.update(self._run.restore(self._paths_to_read(path)))
        return np.asarray(self._ahead.pop(path))

    def _paths_to_read(self, path: str) -> list[str]:
        """An array and the small ones after it, since each read has a high latency."""
        trained = list(self._trained)
        paths: list[str] = []
        size = 0
        for each in trained[trained.index(path) :]:
            leaf = self._trained[each]
            size += math.prod(leaf.shape) * leaf.dtype.itemsize
            if paths and size > READ_AHEAD_BYTES:
                break
            paths.append(each)
        return paths

    def weight(self, path: str) -> ArrayLike:
        """A weight of the base model without the adapter, in the dtype of the run."""
        if self._source is None or path in self._trained:
            return self.trained(path)
        return jnp.asarray(self._source.leaf(path), self.base[path].dtype)

    def merged(self, path: str) -> np.ndarray:
        """A weight of the base model with the adapter merged, float32."""
        weight = self.weight(path)
        if path + lora_math.A not in self._trained:
            return np.asarray(weight, np.float32)
        assert self.adapter is not None
        return np.asarray(lora_math.merged(self.adapter, path, jnp.asarray(weight), self.trained))

    def adapter_leaves(self) -> dict[str, np.ndarray]:
        """All arrays of the adapter, by path."""
        return {path: self.trained(path) for path in self._trained if lora_math.is_adapter(path)}

    def head_leaves(self) -> dict[str, np.ndarray]:
        """A head of labels that was trained beside the adapter, by path; empty without one."""
        return {path: self.trained(path) for path in self._trained if path.startswith("score.")}

    def policy_leaf(self, path: str) -> ArrayLike:
        """An array of `policy`: a weight without the adapter, or an array of the adapter."""
        return self.trained(path) if path in self._trained else self.weight(path)
